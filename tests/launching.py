"""Starts real runs for tests: the one helper that does, so that tests share launches, which cost seconds each."""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from study.config import build_config
from study.records import schema
from study.records.schema import Record
from study.run import as_words, make_run
from study.running.launch import command
from study.strategy.file import find_strategy, read_strategy

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_SECONDS = 300

# Small, but long enough for the probed step (the sixth) and two more; the learning rate lets the tiny model move.
DEFAULTS: dict[str, Any] = {"max_steps": 8, "num_train_examples": 64, "num_eval_examples": 16, "learning_rate": 1e-3}

_finished: dict[tuple[Any, ...], Run | Exception] = {}
_session_folder: Path | None = None


@dataclass(frozen=True)
class Run:
    """A run that ended well."""

    record: Record
    steps: list[dict[str, Any]]
    run_dir: Path


def run(strategy: str | Path, num_processes: int = 2, **flags: Any) -> Run:
    """Return the run of a strategy (its name or its file) with these flags; started once for a whole test session."""
    flags = {**DEFAULTS, **flags}
    key = (str(strategy), num_processes, *sorted((name, str(value)) for name, value in flags.items()))
    if key not in _finished:
        try:
            _finished[key] = _start(find_strategy(str(strategy)), num_processes, flags)
        except Exception as error:  # told to every test that wants the run, without starting it again
            _finished[key] = error
    found = _finished[key]
    if isinstance(found, Exception):
        raise found
    return found


def attempt(
    arguments: Sequence[str | Path], cwd: Path = ROOT, env: Mapping[str, str | None] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run what may fail: `zero-study ...`, `accelerate launch ...` or `python ...`, each by this Python.

    `env` changes the environment; None removes a variable.
    """
    programs = {
        ("zero-study",): ["-m", "study"],
        ("accelerate", "launch"): ["-m", "accelerate.commands.launch"],
        ("python",): [],
    }
    words = [str(word) for word in arguments]
    first = next(program for program in programs if tuple(words[: len(program)]) == program)
    return subprocess.run(
        [sys.executable, *programs[first], *words[len(first) :]],
        cwd=cwd,
        env=environment(env),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )


def environment(changes: Mapping[str, str | None] | None = None) -> dict[str, str]:
    """This process's environment, one thread per process, no GPU, the study importable from any folder.

    Without a GPU any machine runs any number of processes.
    """
    fixed = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    changed = {**os.environ, **fixed, **(changes or {})}
    return {name: value for name, value in changed.items() if value is not None}


def words(flags: Mapping[str, Any]) -> list[str]:
    """Flags as train.py takes them: {"max_steps": 8, "measure": False} is --max-steps 8 --no-measure."""
    return as_words(flags)


def _start(config_file: Path, num_processes: int, flags: dict[str, Any]) -> Run:
    run_dir = _folder() / f"{len(_finished)}-{config_file.stem}-{num_processes}x"
    config = build_config(**flags, output_dir=run_dir)
    arguments = command(make_run(config, read_strategy(config_file, ROOT), num_processes))
    assert arguments[:3] == [sys.executable, "-m", "accelerate.commands.launch"]
    assert "--config_file" in arguments  # or the user's own default leaks in
    try:
        done = subprocess.run(
            arguments, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=TIMEOUT_SECONDS
        )
    except subprocess.TimeoutExpired as expired:
        command_line = " ".join(arguments)
        raise AssertionError(f"{command_line}\nnot done after {TIMEOUT_SECONDS} s\n{_tail(expired.stderr)}") from None
    if done.returncode:
        raise AssertionError(f"{' '.join(arguments)}\nexit status {done.returncode}\n{_tail(done.stderr)}")
    found = schema.read(run_dir)
    assert found.status == "ok"
    assert found.world_size == found.proof.world_size == num_processes
    return Run(found, schema.read_steps(run_dir), run_dir)


def _tail(output: str | bytes | None) -> str:
    text = output.decode(errors="replace") if isinstance(output, bytes) else output or ""
    return "\n".join(text.splitlines()[-40:])


def _folder() -> Path:
    """The folder of this test session, deleted at its end."""
    global _session_folder
    if _session_folder is None:
        temporary = tempfile.TemporaryDirectory(prefix="zero-study-tests-")
        atexit.register(temporary.cleanup)
        _session_folder = Path(temporary.name)
    return _session_folder
