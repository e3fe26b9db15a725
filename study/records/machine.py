"""On what did the run take place? Hardware, library versions, commit; nothing private."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import psutil

LIBRARIES = ("torch", "accelerate", "deepspeed", "transformers", "datasets", "evaluate", "tokenizers", "numpy")

# Only what changes speed, memory or arithmetic; values elsewhere may hold paths, names or tokens.
ENVIRONMENT = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUBLAS_WORKSPACE_CONFIG",
    "NVIDIA_TF32_OVERRIDE",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NCCL_P2P_DISABLE",
    "NCCL_IB_DISABLE",
    "NCCL_P2P_LEVEL",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "DS_SKIP_CUDA_CHECK",
)

# What two machines must share for results of both to stand in one file.
SAME = ("cpu", "num_cores", "gpus", "python", "libraries")


def describe() -> dict[str, Any]:
    """Describe this process's machine. Unknown is None."""
    import torch

    return {
        "cpu": _cpu_model(),
        "num_cores": psutil.cpu_count(logical=False),
        "num_threads_per_process": torch.get_num_threads(),
        "host_memory_bytes": psutil.virtual_memory().total,
        "gpus": _gpus(),
        "driver": _nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader"),
        "interconnect": _nvidia_smi("topo", "-m"),
        "cuda": torch.version.cuda,
        "tf32": torch.backends.cuda.matmul.allow_tf32 if torch.cuda.is_available() else None,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "libraries": {name: _version(name) for name in LIBRARIES},
        "environment": {name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
        **_git(),
    }


def _cpu_model() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)


def _gpus() -> list[dict[str, Any]]:
    import torch

    properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [{"name": p.name, "memory_bytes": p.total_memory, "capability": f"{p.major}.{p.minor}"} for p in properties]


def _nvidia_smi(*arguments: str) -> str | None:
    import torch

    if not torch.cuda.is_available():
        return None
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git() -> dict[str, Any]:
    """The commit of the study's code, and whether the tree had changes."""
    here = Path(__file__).resolve().parent
    try:
        commit = subprocess.run(["git", "-C", here, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=20)
        dirty = subprocess.run(
            ["git", "-C", here, "status", "--porcelain", "--", ":/study", ":/accelerate_configs"],
            capture_output=True,
            text=True,
            timeout=20,
        )
    except (OSError, subprocess.TimeoutExpired):
        return {"git_commit": None, "git_dirty": None}
    if commit.returncode or dirty.returncode:
        return {"git_commit": None, "git_dirty": None}
    return {"git_commit": commit.stdout.strip(), "git_dirty": bool(dirty.stdout.strip())}
