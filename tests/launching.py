"""Starts real runs for tests: the one helper that does, so that tests share launches, which cost seconds each.

They share them in a folder of the test session, so that workers of pytest-xdist do as well.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from study.config import build_config
from study.records import schema
from study.records.schema import Record
from study.run import as_words, make_run
from study.running.launch import command
from study.strategy.file import find_strategy, read_strategy

ROOT = Path(__file__).resolve().parents[1]
HAS_IPROUTE2 = all(shutil.which(program) for program in ("ip", "tc"))
# CI is to have them: without, its tests fail there, and the laboratory says what to install.
in_laboratory = pytest.mark.skipif(
    os.geteuid() != 0 or not (HAS_IPROUTE2 or os.environ.get("CI")),
    reason="a laboratory takes root, and ip and tc of iproute2; run: make iproute2",
)
TIMEOUT_SECONDS = 300

# Small, but long enough for the probed step (the sixth) and two more; the learning rate lets the tiny model move.
DEFAULTS: dict[str, Any] = {"max_steps": 8, "num_train_examples": 64, "num_eval_examples": 16, "learning_rate": 1e-3}

session_folder = Path()  # which conftest.py makes and deletes

_may_launch = True  # whether the test that runs is marked `launches`
_has_launched = False


@dataclass(frozen=True)
class Run:
    """A run that ended well."""

    record: Record
    steps: list[dict[str, Any]]
    run_dir: Path


def run(strategy: str | Path, num_processes: int = 2, **flags: Any) -> Run:
    """Return the run of a strategy (its name or its file) with these flags; started once for a whole test session."""
    flags = {**DEFAULTS, **flags}
    config_file = find_strategy(str(strategy))
    key = repr((str(strategy), num_processes, *sorted((name, str(value)) for name, value in flags.items())))
    name = f"{config_file.stem}-{num_processes}x-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    run_dir = once(name, lambda folder: _start(config_file, num_processes, flags, folder))
    record = schema.read(run_dir)
    assert record.status == "ok"
    assert record.world_size == record.proof.world_size == num_processes
    return Run(record, schema.read_steps(run_dir), run_dir)


def once(name: str, make: Callable[[Path], None]) -> Path:
    """Return a folder that `make` has filled, once for a whole test session: other workers wait for the first.

    Where it fails, every test that wants the folder gets to know why, and none tries again.
    """
    use()
    folder, done, failed = (session_folder / f"{name}{suffix}" for suffix in ("", ".done", ".failed"))
    with FileLock(session_folder / f"{name}.lock"):
        if failed.exists():
            raise AssertionError(failed.read_text())
        if not done.exists():
            folder.mkdir()
            try:
                make(folder)
            except Exception as error:
                failed.write_text(f"{type(error).__name__}: {error}")
                raise
            done.touch()
    return folder


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


def begin(may_launch: bool) -> None:
    """Begin a test, which may start another Python, or may not."""
    global _may_launch, _has_launched
    _may_launch, _has_launched = may_launch, False


def use() -> None:
    """Say that the test starts another Python, or uses what one has left; it fails where it may not."""
    global _has_launched
    _has_launched = True
    if not _may_launch:
        pytest.fail("starts another Python, or uses what one has left: mark it with @pytest.mark.launches")


def end() -> None:
    """End a test that has passed; it fails where it is marked and has launched nothing, or the other way round."""
    if _has_launched and not _may_launch:  # and something has caught what `use` raised
        pytest.fail("has tried to start another Python: mark it with @pytest.mark.launches")
    if _may_launch and not _has_launched:
        pytest.fail("starts no other Python: take its mark `launches` away")


def _start(config_file: Path, num_processes: int, flags: dict[str, Any], run_dir: Path) -> None:
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


def _tail(output: str | bytes | None) -> str:
    text = output.decode(errors="replace") if isinstance(output, bytes) else output or ""
    return "\n".join(text.splitlines()[-40:])
