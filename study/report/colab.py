"""Runs of a notebook in Colab: a few strategies train on the GPU, or on the two cores, that are there."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from study.records import machine

STRATEGIES = ("single", "zero2", "zero3")  # none needs a compiled extension on a GPU
ON_CORES = ("ddp", "zero3")
RUNS = Path("runs/colab")


class ColabGpu(NamedTuple):
    name: str  # as the driver says it: Tesla T4, NVIDIA L4, NVIDIA A100-SXM4-40GB
    capability: float  # CUDA's compute capability


def repository() -> str:
    """The address of the project, as its metadata has it (pyproject.toml); empty where it is not published."""
    with suppress(importlib.metadata.PackageNotFoundError):
        urls = importlib.metadata.metadata("zero-study").get_all("Project-URL", [])
        return next((url.removeprefix("Repository, ") for url in urls if url.startswith("Repository, ")), "")
    return ""


def address(notebook: str) -> str:
    """Where Colab opens a notebook of the project, which is published."""
    in_colab = repository().replace("github.com", "colab.research.google.com/github")
    return f"{in_colab}/blob/main/notebooks/{notebook}.ipynb"


def find_gpu() -> ColabGpu | None:
    """Ask the driver for the first GPU; None where there is no driver or no GPU."""
    output = machine.said("nvidia-smi", "--query-gpu=name,compute_cap", "--format=csv,noheader")
    if not output:
        return None
    name, _, capability = output.splitlines()[0].rpartition(",")
    return ColabGpu(name.strip(), float(capability))


def precision(gpu: ColabGpu) -> str:
    """bf16 under autocast where the GPU computes in it, from Ampere on; a T4 does not, and gets fp32."""
    return "bf16-autocast" if gpu.capability >= 8 else "fp32"


def commands(gpu: ColabGpu | None) -> dict[str, list[str]]:
    """The runs by the names of their folders.

    On a GPU the a100-replication protocol, one process each, text and weights from the hub; without one two processes
    on the two cores, a tiny model on the bundled text.
    """
    cells = {}
    for strategy in STRATEGIES if gpu else ON_CORES:
        name = f"paper-{strategy}-{precision(gpu)}" if gpu else strategy
        flags = ["--preset", "paper", "--num-processes", "1", "--precision", precision(gpu)] if gpu else []
        cells[name] = ["zero-study", "train", "--strategy", strategy, *flags, "--output-dir", str(RUNS / name)]
    return cells


def train(committed: str | list[str], clone: Path) -> list[str]:
    """Train here and return the folder of the new runs; where none left a record, return the committed ones.

    A run that fails is said and passed over: what it left is part of the result. One that has a record is kept.
    """
    gpu = find_gpu()
    place = f"{gpu.name}: the paper preset in {precision(gpu)}" if gpu else "no GPU: a tiny BERT on two cores"
    runs = commands(gpu)
    print(f"{place}, {len(runs)} runs of some minutes each", flush=True)
    for name, command in runs.items():
        if (clone / RUNS / name / "record.json").exists():
            print(f"{name}: kept", flush=True)
        else:
            print(" ".join(command), flush=True)
            _run([sys.executable, "-m", "study", *command[1:]], clone)
    if not any((clone / RUNS).glob("*/record.json")):
        print("No run left a record, so these are the committed ones.")
        return [str(clone / folder) for folder in ([committed] if isinstance(committed, str) else committed)]
    return [str(clone / RUNS)]


def _run(command: list[str], folder: Path) -> None:
    """Run a command and print its lines as they come: what a child writes itself does not reach a notebook."""
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
