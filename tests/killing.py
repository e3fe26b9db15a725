"""Functions for tests that kill a training: its steps so far, waiting, and killing a process with its children."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

# A short training whose steps lie in the middle of an epoch, too.
SHORT: dict[str, Any] = {
    "num_train_examples": 56, "num_eval_examples": 8, "sequence_length": 32, "learning_rate": 1e-3,
    "global_batch_size": 8, "checkpoint_every": 5,
}  # fmt: skip


def steps(run_folder: Path) -> int:
    path = run_folder / "steps.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait(condition: Callable[[], bool], seconds: float, pause: float = 0.01) -> None:
    """Wait until the condition holds or the seconds are over."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(pause)


def kill_family(number: int) -> None:
    """Kill a process and all its descendants."""
    family = [*psutil.Process(number).children(recursive=True), psutil.Process(number)]
    for member in family:
        member.kill()
    psutil.wait_procs(family, timeout=30)
