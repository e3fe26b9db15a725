"""How does one run become processes, and how did they end?

A run is `accelerate launch` in a process group of its own, which lives no longer than the process that started it.
Whatever happens to it, the answer is an Ending.
"""

from __future__ import annotations

import datetime
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

import psutil

from study.errors import Refusal
from study.files import missing_folders, remove_empty, shown_text
from study.records.schema import OutcomeStatus
from study.run import Run
from study.running import bound, ending

TRAIN = Path(__file__).resolve().parents[1] / "train.py"

# What torch's C++ side and the tokenizers would print otherwise, on every run; the user's own values win.
QUIET = {"TOKENIZERS_PARALLELISM": "false", "KINETO_LOG_LEVEL": "6", "TORCH_CPP_LOG_LEVEL": "ERROR"}

# In the environment of everything that a run starts: its run directory.
RUN_FOLDER = "ZERO_STUDY_RUN_FOLDER"

HEARTBEAT_SECONDS = 5.0
STDERR_LINES = 30  # kept of a run that did not end well
LEFT_OVER_SECONDS = 30


@dataclass(frozen=True)
class Ending:
    """What came of one launch. Its texts are as `shown_text` makes them."""

    status: OutcomeStatus
    message: str  # for people: one line
    record_path: Path | None
    started_at: str
    wall_seconds: float
    returncode: int
    command: list[str]
    stderr_tail: list[str]


def command(run: Run) -> list[str]:
    """The command of one run; port 0 lets the rendezvous pick a free one."""
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(run.strategy.path)]
    processes = ["--num_processes", str(run.world_size), "--main_process_port", "0"]
    return [*launcher, *processes, str(TRAIN), *run.arguments()]


def launch(
    run: Run, timeout_seconds: float | None = None, progress: Callable[[str], None] = lambda line: None
) -> Ending:
    """Start one run, wait for it, and type how it ended. Its output goes to stdout.log and stderr.log.

    `progress` is called every few seconds with one line. A time-out and Ctrl-C end its whole process group; where this
    process is killed, Linux kills the run too. A refused run leaves nothing behind.
    """
    created = missing_folders(run.folder)
    run.folder.mkdir(parents=True, exist_ok=True)
    arguments = command(run)
    started_at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    started = time.monotonic()
    kills_before = _out_of_memory_kills()
    with open(run.folder / "stdout.log", "w") as stdout, open(run.folder / "stderr.log", "w") as stderr:
        process = subprocess.Popen(
            bound.command(arguments),
            stdout=stdout,
            stderr=stderr,
            env=_environment(run),
            start_new_session=True,
        )
        try:
            time_limit = _wait(process, run, timeout_seconds, progress)
        finally:
            if process.poll() is None:
                _end_group(process)
    wall_seconds = time.monotonic() - started

    kills = _out_of_memory_kills()
    short = None if kills is None or kills_before is None else kills > kills_before
    errors = ending.read_lines(run.folder / "stderr.log")
    report = ending.read_report(run.folder)
    status, message = ending.classify(errors, report, process.returncode, time_limit, short)
    if status == "misconfigured" and report is None:
        _leave_nothing(run.folder, created)
    path = run.folder / "record.json"
    return Ending(
        status=status,
        message=shown_text(message),
        record_path=path if path.exists() else None,
        started_at=started_at,
        wall_seconds=wall_seconds,
        returncode=process.returncode,
        command=ending.shown_command(arguments),
        stderr_tail=[] if status == "ok" else [shown_text(line) for line in errors[-STDERR_LINES:]],
    )


def _environment(run: Run) -> dict[str, str]:
    """This process's environment, with the run's own threads and the mark by which `end_left_over` knows it."""
    threads = os.environ.get("OMP_NUM_THREADS") or _threads(run.world_size)
    return os.environ | {"OMP_NUM_THREADS": threads, RUN_FOLDER: str(run.folder.resolve())}


def _wait(
    process: subprocess.Popen, run: Run, timeout_seconds: float | None, progress: Callable[[str], None]
) -> float | None:
    """Wait until a run ends; return the time limit where it reached that first."""
    started = time.monotonic()
    while process.poll() is None:
        left = HEARTBEAT_SECONDS
        if timeout_seconds is not None:
            left = min(left, started + timeout_seconds - time.monotonic())
        if left <= 0:
            return timeout_seconds
        try:
            process.wait(timeout=left)
        except subprocess.TimeoutExpired:
            progress(_progress(run.folder, time.monotonic() - started))
    return None


def end_left_over(folder: Path) -> None:
    """End what an earlier call left running on run directories below a folder: this user's processes only.

    To be called where nothing else may work there. Raises Refusal where a process does not end.
    """
    deadline = time.monotonic() + LEFT_OVER_SECONDS
    # Again and again, because one that is about to be killed may just have started another.
    while left_over := [process for process in psutil.process_iter() if _works_below(folder.resolve(), process)]:
        if time.monotonic() > deadline:
            raise Refusal(
                f"{folder}: process {left_over[0].pid} of an earlier call does not end; end it, then try again"
            )
        for process in left_over:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(0.1)


def _works_below(folder: Path, process: psutil.Process) -> bool:
    """Say whether a process of this user works for a run below a folder."""
    try:
        run_folder = process.environ().get(RUN_FOLDER)  # none of a process that has ended and is not waited for
        is_own = process.uids().real == os.getuid() and process.pid != os.getpid()
        return run_folder is not None and is_own and folder in Path(run_folder).parents
    except (psutil.Error, OSError):
        return False


def _threads(num_processes: int) -> str:
    """Threads per process so that the processes of one machine share its cores."""
    return str(max(1, (psutil.cpu_count(logical=False) or 1) // num_processes))


def _progress(run_dir: Path, seconds: float) -> str:
    try:
        last = json.loads((run_dir / "steps.jsonl").read_text().splitlines()[-1])
    except (OSError, IndexError, json.JSONDecodeError):
        return f"{seconds:.0f} s, starting"
    loss = "NaN" if last["loss"] is None else f"{last['loss']:.4f}"
    return f"{seconds:.0f} s, step {last['step']}, loss {loss}"


def _end_group(process: subprocess.Popen) -> None:
    """End the run and everything it started: ask first, so that torchrun's ranks can record themselves, then insist.

    torchrun starts its ranks in sessions of their own, so they are not of the launcher's process group; asked to end,
    it gives them 30 s, and has 45. Accelerate's launcher of one process ends at once, and its process with it.
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


def _out_of_memory_kills() -> int | None:
    """How many processes the kernel has ended for want of memory since it started, None where it does not say."""
    with suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None


def _leave_nothing(run_dir: Path, created: Sequence[Path]) -> None:
    """Remove what a refused run left, and the folders made for it, innermost first."""
    for name in ("stdout.log", "stderr.log"):
        (run_dir / name).unlink(missing_ok=True)
    remove_empty(created)
