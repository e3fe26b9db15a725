"""How does one run become a process, and what came of it?

A run is `accelerate launch` in a process group of its own. Whatever happens to it, the answer is an Outcome.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from study import record

TRAIN = Path(__file__).resolve().with_name("train.py")
# How train.py begins the one line that says why it refused, or why it failed.
REFUSED = "zero-study: "
FAILED = "zero-study failed: "

# What torch's C++ side and the tokenizers would print otherwise, on every run; the user's own values win.
QUIET = {"TOKENIZERS_PARALLELISM": "false", "KINETO_LOG_LEVEL": "6", "TORCH_CPP_LOG_LEVEL": "ERROR"}


@dataclass(frozen=True)
class Outcome:
    """What came of a run."""

    status: Literal["ok", "out_of_memory", "failed", "interrupted", "refused", "timed_out", "crashed", "skipped"]
    message: str  # for people: one line, or the command and the end of stderr
    record_path: Path | None


def command(config_file: Path, num_processes: int, flags: Sequence[str]) -> list[str]:
    """The command of one run; port 0 lets the rendezvous pick a free one."""
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config_file)]
    return [*launcher, "--num_processes", str(num_processes), "--main_process_port", "0", str(TRAIN), *flags]


def launch(
    config_file: Path,
    num_processes: int,
    flags: Sequence[str],
    run_dir: Path,
    timeout_seconds: float | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> Outcome:
    """Start one run, wait for it, and type what came of it. Its output goes to stdout.log and stderr.log.

    `progress` is called every few seconds with one line. A time-out and Ctrl-C end its whole process group.
    """
    created = missing_folders(run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    arguments = command(config_file, num_processes, [*flags, "--output-dir", str(run_dir)])
    environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or _threads(num_processes)}
    started = time.monotonic()
    timed_out = False
    with open(run_dir / "stdout.log", "w") as stdout, open(run_dir / "stderr.log", "w") as stderr:
        process = subprocess.Popen(arguments, stdout=stdout, stderr=stderr, env=environment, start_new_session=True)
        try:
            while process.poll() is None:
                try:
                    process.wait(timeout=5)
                except subprocess.TimeoutExpired:
                    progress(_progress(run_dir, time.monotonic() - started))
                if timeout_seconds is not None and time.monotonic() - started > timeout_seconds:
                    timed_out = True
                    break
        finally:
            if process.poll() is None:
                _end_group(process)
    outcome = _outcome(run_dir, arguments, process.returncode, timed_out)
    if outcome.status == "refused":
        _leave_nothing(run_dir, created)
    return outcome


def _threads(num_processes: int) -> str:
    """Threads per process so that the processes of one machine share its cores."""
    return str(max(1, (psutil.cpu_count(logical=False) or 1) // num_processes))


def _progress(run_dir: Path, seconds: float) -> str:
    try:
        last = json.loads((run_dir / "steps.jsonl").read_text().splitlines()[-1])
    except (OSError, IndexError, json.JSONDecodeError):
        return f"{seconds:.0f} s, starting"
    loss = "not a number" if last["loss"] is None else f"{last['loss']:.4f}"
    return f"{seconds:.0f} s, step {last['step']}, loss {loss}"


def _end_group(process: subprocess.Popen) -> None:
    """End the run and everything it started: ask first, so that it can record itself; insist after 45 s.

    torchrun starts its ranks in sessions of their own, so they are not of the launcher's process group; asked to end,
    it gives them 30 s.
    """
    started = psutil.Process(process.pid).children(recursive=True)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=45)
    for left in started:
        with suppress(psutil.NoSuchProcess):
            left.kill()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _outcome(run_dir: Path, arguments: Sequence[str], returncode: int, timed_out: bool) -> Outcome:
    path = run_dir / "record.json"
    errors = (run_dir / "stderr.log").read_text(errors="replace").splitlines()
    refused = next((line[len(REFUSED) :] for line in errors if line.startswith(REFUSED)), None)
    failed = next((line[len(FAILED) :] for line in errors if line.startswith(FAILED)), None)
    if timed_out:
        return Outcome("timed_out", "ended at its time limit", path if path.exists() else None)
    if path.exists():
        written = record.read(path)
        if written.status == "ok" and returncode == 0:
            return Outcome("ok", f"final loss {written.final_loss:.4f}", path)
        if written.status != "ok":
            return Outcome(written.status, failed or written.failure.error.splitlines()[0], path)
    elif refused and not failed:
        return Outcome("refused", refused, None)
    tail = "\n".join(errors[-15:])
    return Outcome(
        "crashed", f"exit status {returncode}\n{' '.join(arguments)}\n{tail}", path if path.exists() else None
    )


def _leave_nothing(run_dir: Path, created: Sequence[Path]) -> None:
    """Remove what a refused run left, and the folders made for it, innermost first."""
    for name in ("stdout.log", "stderr.log"):
        (run_dir / name).unlink(missing_ok=True)
    remove_empty(created)


def missing_folders(run_dir: Path) -> list[Path]:
    """The folders that making a run directory would create, innermost first."""
    return [folder for folder in (run_dir, *run_dir.parents) if not folder.exists()]


def remove_empty(folders: Sequence[Path]) -> None:
    """Remove folders, innermost first, as far as they are empty."""
    for folder in folders:
        if any(folder.iterdir()):
            break
        folder.rmdir()
