"""Describe the machine of a run: hardware, library versions and commit, without private information."""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from study.records import imports
from study.records.laboratory import LABORATORY
from study.records.schema import Code
from study.records.simulation import SIMULATED_GPUS
from zero_study.engines import this_machine
from zero_study.files import ROOT, redact_paths

# A run that was forked has this variable. Its resident memory cannot be compared with that of a run that was started in
# the ordinary way, because it shares imported code with the process that it was forked from. It also starts faster.
FORKED = "ZERO_STUDY_FORKED"

# The environment variables that change speed, memory or arithmetic. Other variables may hold names or tokens, and are
# not recorded.
_FAMILIES = (
    "ACCELERATE|FSDP|PARALLELISM_CONFIG|DEEPSPEED|DS|TORCH|TORCHDYNAMO|TORCHINDUCTOR|PYTORCH|NCCL|GLOO|CUDA|CUBLAS|CUDNN|"
    "OMP|GOMP|KMP|MKL|OPENBLAS|ONEDNN|DNNL|ATEN|MALLOC|TRITON|FLASH_ATTENTION|HF|TRANSFORMERS"
)
# The variables among them that change the order or the type of additions: two runs with different values do not train
# alike. OpenBLAS has none here, because PyTorch's builds for x86 do not multiply with it.
_ARITHMETIC = re.compile(
    "ATEN_CPU_CAPABILITY|MKL_(ENABLE_INSTRUCTIONS|CBWR|DEBUG_CPU_TYPE)|"
    "(ONEDNN|DNNL)_(MAX_CPU_ISA|CPU_ISA_HINTS|DEFAULT_FPMATH_MODE)|NVIDIA_TF32_OVERRIDE|CUBLAS_(WORKSPACE_CONFIG|EMU.*)|"
    "TORCH_(ALLOW_TF32_CUBLAS_OVERRIDE|BLAS_PREFER_.*|LINALG_PREFER_.*|CUDNN_.*)|CUDNN_(CONV|DETERMINISTIC).*|"
    "FLASH_ATTENTION_.*|TRITON_F32_DEFAULT|NCCL_(ALGO|PROTO|NVLS_ENABLE)"
)
# Names of folders are left out, because they change no result.
_PLACE = re.compile(r"_(DIR|HOME)$")
_RECORDED = re.compile(
    rf"({_FAMILIES})_\w+|NVIDIA_(TF32_OVERRIDE|VISIBLE_DEVICES)|USE_HUB_KERNELS|LD_PRELOAD|{LABORATORY}|"
    rf"{SIMULATED_GPUS}|{FORKED}"
)
_SECRET = re.compile("TOKEN|KEY|SECRET|PASSW|CREDENTIAL|AUTH")
_IN_ADDRESS = re.compile(r"(?<=://)[^/@\s]+@")  # a user name and a password in an address
_PATH = re.compile(r"(?<![\w.~/])/(?!/)(?:[^\s:;,=/]+/)*([^\s:;,=/]*)")
_LONGEST_VALUE = 200
_PACKAGES = ("study", "zero_study")  # the packages of the project

# The facts that must agree between two machines whose results are in one file.
SAME = ("cpu", "num_cores", "gpus", "python", "libraries")


def describe() -> dict[str, Any]:
    """Return a description of the machine on which this process runs. Unknown values are None."""
    import torch

    return {
        "cpu": cpu_model(),
        "num_cores": psutil.cpu_count(logical=False),
        "usable_cores": this_machine.usable_cores(),
        "allowed_processors": this_machine.allowed_processors(),
        "processor_quota": this_machine.quota(),
        "num_threads_per_process": torch.get_num_threads(),
        "host_memory_bytes": psutil.virtual_memory().total,
        "gpus": _gpus(),
        "driver": _nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader"),
        "interconnect": _nvidia_smi("topo", "-m"),
        "cuda": torch.version.cuda,
        "tf32": torch.backends.cuda.matmul.allow_tf32 if torch.cuda.is_available() else None,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "libraries": versions(),
        "environment": environment(os.environ),
        "imports": imports.describe(),
        **git_state(),
    }


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that a record keeps, without private information.

    Only the last part of a path is kept. User names and passwords are removed from addresses. Variables whose names
    suggest a secret are left out.
    """
    return {
        name: _IN_ADDRESS.sub("", _PATH.sub(r".../\1", redact_paths(value)))[:_LONGEST_VALUE]
        for name, value in sorted(variables.items())
        if _RECORDED.fullmatch(name) and not _SECRET.search(name) and not _PLACE.search(name)
    }


def arithmetic(described: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a recorded machine that change the results of its arithmetic. Empty if there are none.

    A library whose files were changed after the installation is also listed, because its version does not tell what it
    computes.
    """
    settings = {name: v for name, v in described.get("environment", {}).items() if _ARITHMETIC.fullmatch(name)}
    for name, imported in described.get("imports", {}).get("libraries", {}).items():
        settings |= {f"changed {name}": imported["sha256"][:12]} if imported["changed"] else {}
    return settings | ({"tf32": True} if described.get("tf32") else {})


def cpu_model() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)


def _gpus() -> list[dict[str, Any]]:
    import torch

    properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [{"name": p.name, "memory_bytes": p.total_memory, "capability": f"{p.major}.{p.minor}"} for p in properties]


def devices() -> str:
    """Return the device that a run trains on here: the models of the GPUs that PyTorch finds, or "cpu"."""
    return " + ".join(sorted({gpu["name"] for gpu in _gpus()})) or "cpu"


def _nvidia_smi(*arguments: str) -> str | None:
    import torch

    return (command_output("nvidia-smi", *arguments) or None) if torch.cuda.is_available() else None


def command_output(*command: str) -> str | None:
    """Return the output of a command. None if the program does not exist or fails."""
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if process.returncode else process.stdout.strip()


def versions() -> dict[str, str | None]:
    """Return the versions of the libraries that affect a run. None for a library that is not installed.

    The libraries that only an adapter needs are left out if this process has not imported them.
    """
    names = [*imports.LIBRARIES, *(name for name in imports.OF_ADAPTERS if name in sys.modules)]
    return {name: _version(name) for name in names}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def running_code() -> Code:
    """Return the commit and checksum of the code that this process runs, the processor, and the number of threads."""
    import torch

    state = git_state()
    return Code(
        commit=state["git_commit"],
        is_dirty=state["git_dirty"],
        sha256=code_sha256(),
        processor=cpu_model(),
        num_threads=torch.get_num_threads(),
    )


def code_sha256(folder: Path = ROOT) -> str:
    """Return the digest of all Python modules of the project's packages on this machine.

    It is more precise than git, which only tells whether the modules were changed.
    """
    digest = hashlib.sha256()
    for path in sorted(path for package in _PACKAGES for path in (folder / package).rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder)} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def git_state() -> dict[str, Any]:
    """Return the commit of the study's code, and whether the clone has uncommitted changes. None if unknown."""
    git = ("git", "-C", str(ROOT))
    commit = command_output(*git, "rev-parse", "HEAD")
    changed = command_output(
        *git, "status", "--porcelain", "--", *(f":/{name}" for name in (*_PACKAGES, "accelerate_configs"))
    )
    if commit is None or changed is None:
        return {"git_commit": None, "git_dirty": None}
    return {"git_commit": commit, "git_dirty": bool(changed)}


# ---------------------------------------------------------------- a file of results


def benchmark_header(benchmark: str, command: str) -> dict[str, Any]:
    """Return the first keys of a file of results: the benchmark, its command, the time and the machine.

    `describe` makes the description of the machine.
    """
    return {
        "benchmark": benchmark,
        "command": command,
        "finished_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": describe(),
    }
