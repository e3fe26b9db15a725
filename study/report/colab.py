"""Train a few strategies from a notebook in Colab, on its GPU or on its two CPU cores."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from study.records import machine
from zero_study.errors import Refusal
from zero_study.version import REPOSITORY

STRATEGIES = ("single", "zero2", "zero3")  # on a GPU, none of them needs a compiled extension
ON_CORES = ("ddp", "zero3")
RUNS = Path("runs/colab")


class ColabGpu(NamedTuple):
    name: str  # as the driver reports it: Tesla T4, NVIDIA L4, NVIDIA A100-SXM4-40GB
    capability: float  # CUDA's compute capability


def address(notebook: str) -> str:
    """Return the address at which Colab opens a notebook of the published project."""
    in_colab = REPOSITORY.replace("github.com", "colab.research.google.com/github")
    return f"{in_colab}/blob/main/notebooks/{notebook}.ipynb"


def find_gpu() -> ColabGpu | None:
    """Return the first GPU that the driver reports. None if there is no driver or no GPU."""
    output = machine.command_output("nvidia-smi", "--query-gpu=name,compute_cap", "--format=csv,noheader")
    if not output:
        return None
    name, _, capability = output.splitlines()[0].rpartition(",")
    return ColabGpu(name.strip(), float(capability))


def precision(gpu: ColabGpu) -> str:
    """Return "bf16-autocast" if the GPU supports bf16 (Ampere and later), otherwise "fp32", as on a T4."""
    return "bf16-autocast" if gpu.capability >= 8 else "fp32"


def commands(gpu: ColabGpu | None) -> dict[str, list[str]]:
    """Return the command of each run, by the name of the run's folder.

    With a GPU, the runs follow the protocol of the article a100-replication: one process, text and weights from the
    hub. Without a GPU, two processes train a tiny model on the bundled text.
    """
    cells = {}
    for strategy in STRATEGIES if gpu else ON_CORES:
        name = f"paper-{strategy}-{precision(gpu)}" if gpu else strategy
        flags = ["--preset", "paper", "--num-processes", "1", "--precision", precision(gpu)] if gpu else []
        cells[name] = ["zero-study", "train", "--strategy", strategy, *flags, "--output-dir", str(RUNS / name)]
    return cells


def train(committed: str | list[str], clone: Path) -> list[str]:
    """Train the strategies on this machine, and return the folder of the new runs.

    If no run leaves a record, return the `committed` folders instead. Raises Refusal if the clone has none, because it
    is only a folder with a wheel. A run that fails does not stop the others. A run that already has a record is not
    repeated.
    """
    gpu = find_gpu()
    place = f"{gpu.name}: the paper preset in {precision(gpu)}" if gpu else "no GPU: a tiny BERT on two cores"
    runs = commands(gpu)
    print(f"{place}. {len(runs)} runs follow, which take some minutes each", flush=True)
    for name, command in runs.items():
        if (clone / RUNS / name / "record.json").exists():
            print(f"{name}: kept", flush=True)
        else:
            print(" ".join(command), flush=True)
            _run([sys.executable, "-m", "zero_study", *command[1:]], clone)
    if not any((clone / RUNS).glob("*/record.json")):
        folders = [clone / folder for folder in ([committed] if isinstance(committed, str) else committed)]
        if not any(folder.exists() for folder in folders):
            raise Refusal(
                "No run left a record, and the wheel does not contain the stored results. Delete the folder "
                f"{clone}, run the set-up cell again, and upload the zip file of the repository."
            )
        print("No run left a record. This notebook shows the committed runs instead.")
        return [str(folder) for folder in folders]
    return [str(clone / RUNS)]


def _run(command: list[str], folder: Path) -> None:
    """Run a command and print each line as soon as it arrives.

    This is needed because a notebook does not show the output of a child process.
    """
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
