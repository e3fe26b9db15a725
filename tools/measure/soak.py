"""Functions that all soak tests share: steps of a run, waiting, killing processes, and results of earlier calls."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from study import files
from study.records.machine import benchmark_header

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


def kept(output: Path | None, name: str) -> Any:
    """Return what an earlier call wrote under this name, or an empty list."""
    return json.loads(output.read_text())[name] if output and output.exists() else []


def keep(output: Path | None, name: str, command: str, **content: Any) -> None:
    """Write the file of `--output`, with a header that describes the benchmark and the machine."""
    if output:
        files.write_json(output, {**benchmark_header(name, command), **content})
