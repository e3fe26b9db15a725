"""Starts runs and commands on simulated GPUs (tests/simulated_gpu), shared by the tests of a session."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import launching
from launching import ROOT, Run
from simulated_gpu import executed_lines, simulated_environment

from study.records import schema
from study.records.schema import Record
from zero_study.strategy.file import find_strategy

Gpus = dict[str, Any]
H100: Gpus = {"name": "NVIDIA H100 80GB HBM3", "memory_bytes": 85_000_000_000}


def python() -> Path:
    """Return the Python that simulates GPUs, made once for a test session."""
    return launching.once("simulated-gpus", simulated_environment.make) / "bin" / "python"


def executed_folder() -> Path:
    """Return the folder in which all simulated processes write the lines that they execute."""
    return launching.once("executed-lines", lambda folder: None)


def environment(gpus: Gpus) -> dict[str, str | None]:
    return {**simulated_environment.variables(python(), **gpus), executed_lines.VARIABLE: str(executed_folder())}


def train(
    strategy: str, num_processes: int = 1, gpus: Gpus = H100, script: Path = launching.TRAIN, **flags: Any
) -> Run:
    """Return the run of a strategy on simulated GPUs, which ended well. `script` is run in place of study/train.py."""
    return launching.read(_run_dir(strategy, num_processes, gpus, True, flags, script), num_processes)


def fail(strategy: str, num_processes: int = 1, gpus: Gpus = H100, **flags: Any) -> Record:
    """Return the record of a run on simulated GPUs, which failed."""
    return schema.read(_run_dir(strategy, num_processes, gpus, False, flags))


def _run_dir(
    strategy: str,
    num_processes: int,
    gpus: Gpus,
    ends_well: bool,
    flags: dict[str, Any],
    script: Path = launching.TRAIN,
) -> Path:
    flags = {**launching.DEFAULTS, **flags}
    key = repr(
        (strategy, num_processes, gpus, script.name, *sorted((name, str(value)) for name, value in flags.items()))
    )
    config_file, env = find_strategy(strategy), environment(gpus)

    def make(folder: Path) -> None:
        done = launching.fork_with(python(), config_file, num_processes, flags, folder, env, script)
        if ends_well != (done.returncode == 0):
            raise AssertionError(f"exit status {done.returncode}\n{done.stderr[:8000]}\n...\n{done.stderr[-4000:]}")

    return launching.once(f"simulated-{strategy}-{hashlib.sha256(key.encode()).hexdigest()[:12]}", make)


def command(arguments: Sequence[str | Path], gpus: Gpus = H100, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run a program of Python, such as `-m zero_study plan smoke`, on a machine with simulated GPUs."""
    launching.use()
    env = launching.environment(environment(gpus))
    words = [str(python()), *map(str, arguments)]
    return subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, timeout=launching.TIMEOUT_SECONDS)
