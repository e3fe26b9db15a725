"""Start processes and return their results, or raise an error whose message is one line.

On Linux, the kernel kills these processes as soon as this process ends, for whatever reason.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from . import files
from .errors import Refusal, RunFailed

RESULT_FILE = "ZERO_STUDY_ANSWER"  # environment variable of a rank with the file for its result
MESSAGE_LENGTH = 300

# Python code that replaces its interpreter by another program. It must be quick, because it runs before every launch.
# The 1 is PR_SET_PDEATHSIG, and the 9 is SIGKILL.
_WITH_PARENT_DEATH_SIGNAL = (
    "import ctypes, os, sys; sys.platform == 'linux' and ctypes.CDLL(None).prctl(1, ctypes.c_ulong(9)); "
    "os.getppid() == int(sys.argv[1]) and os.execv(sys.argv[2], sys.argv[2:])"
)


def with_parent_death_signal(command: Sequence[str]) -> list[str]:
    """Return a command that starts `command` so that the kernel kills it when this process ends.

    The first word of `command` is the path of the program. Only Linux kills the program; other systems let it run on.
    """
    return [sys.executable, "-I", "-S", "-c", _WITH_PARENT_DEATH_SIGNAL, str(os.getpid()), *command]


def die_with_parent() -> None:
    """Ask the kernel to kill this process as soon as its parent ends.

    This works only on Linux, and does nothing elsewhere.

    A parent that ended before the call is not noticed. The caller must check for that afterwards.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, ctypes.c_ulong(signal.SIGKILL))


# ---------------------------------------------------------------- ranks


@dataclass(frozen=True)
class Rank:
    """The result of one process: its exit status, the lines of its stderr, and the object that it sent."""

    returncode: int  # negative if a signal ended it: minus the signal's number
    errors: list[str]  # the lines of its stderr
    result: Any  # the result that it sent; None if it sent none


def send_result(content: Any) -> None:
    """Send a result from a rank to the process that started it. `content` must be serializable as JSON."""
    files.write_json(Path(os.environ[RESULT_FILE]), content)


def run(
    program: Sequence[str],
    num_ranks: int = 1,
    *,
    timeout_seconds: float,
    environment: Mapping[str, str] = os.environ,
    folder: Path | None = None,
) -> list[Rank]:
    """Run a Python program as the ranks of one process group, wait for all of them, and return the outcome of each.

    `program` has the arguments that follow `python`: `-m MODULE ...`, `-c CODE ...` or a file. `folder` is the working
    directory of the ranks. The ranks get the variables that torchrun sets if there are several of them, or if
    `environment` has a WORLD_SIZE. Raises RunFailed if a rank is not done after `timeout_seconds`. Then all ranks that
    still run are killed, together with the processes that they started.
    """
    with tempfile.TemporaryDirectory(prefix="zero-study-") as scratch, ExitStack() as logs:
        result_files = [Path(scratch) / f"{rank}.json" for rank in range(num_ranks)]
        errors = [logs.enter_context(open(path.with_suffix(".log"), "w+b")) for path in result_files]
        world = _world(num_ranks) if num_ranks > 1 or "WORLD_SIZE" in environment else {}
        started: list[subprocess.Popen[bytes]] = []
        try:
            for rank, log in enumerate(errors):
                own = {**world, "RANK": str(rank), "LOCAL_RANK": str(rank)} if world else {}
                started.append(
                    subprocess.Popen(
                        with_parent_death_signal([sys.executable, *program]),
                        stdout=subprocess.DEVNULL,
                        stderr=log,
                        env={**environment, **own, RESULT_FILE: str(result_files[rank])},
                        cwd=folder,
                    )
                )
            _wait(started, timeout_seconds)
        finally:
            for process in started:
                end(process)
        return [
            Rank(
                process.returncode,
                lines_of(path.with_suffix(".log").read_bytes()),
                files.load(path, "a rank's result") if path.exists() else None,
            )
            for process, path in zip(started, result_files, strict=True)
        ]


def run_ranks(program: Sequence[str], subject: str, *, remedy: str = "", **options: Any) -> list[Any]:
    """Run a Python program as several ranks, with the options of `run`, and return the result of each rank.

    `subject` is the beginning of an error's message. `remedy` is appended to the message if the time is up. Raises
    Refusal if a rank refused. Raises RunFailed if a rank sent no result; the message has the first exception in the
    ranks' logs.
    """
    try:
        ranks = run(program, **options)
    except RunFailed as late:
        raise RunFailed("; ".join(filter(None, (f"{subject}: {late}", remedy)))) from None
    if not all(rank.returncode == 0 and rank.result is not None for rank in ranks):
        raised = [error for rank in ranks for error in raised_in(rank.errors)]
        for error in raised:  # an earlier error may have caused a refusal
            if error.type == Refusal.__name__:
                raise Refusal(error.text.partition(": ")[2])
        status = next((rank.returncode for rank in ranks if rank.returncode), 0)
        raise RunFailed(f"{subject}: {raised[0].text if raised else f'ended with status {status}'}")
    return [rank.result for rank in ranks]


def end(process: subprocess.Popen[Any]) -> None:
    """Kill a process and all processes that it has started, and wait for it to end."""
    if process.poll() is None:
        for child in psutil.Process(process.pid).children(recursive=True):
            try:
                child.kill()
            except psutil.NoSuchProcess:
                continue
        process.kill()
    process.wait()


def _world(num_ranks: int) -> dict[str, str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    sizes = {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    return {**sizes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def _wait(started: Iterable[subprocess.Popen[bytes]], timeout_seconds: float) -> None:
    deadline = time.monotonic() + timeout_seconds
    for process in started:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise RunFailed(f"not done after {timeout_seconds:g} s") from None


# ---------------------------------------------------------------- the messages of a failed process


class Raised(NamedTuple):
    """One exception that a traceback in a log reports."""

    text: str  # type and message
    file: str  # the file in which it was raised; empty if unknown

    @property
    def type(self) -> str:
        return self.text.partition(":")[0].rpartition(".")[2]


_EXCEPTION = re.compile(r"(?:\w+\.)*\w*(?:Error|Exception|Interrupt|Refusal)(?::|$)")
_RANK = re.compile(r"^(?:\[\w+\]:)+ ?")  # prefixes of lines: [rank0]: (torch) and [default0]: (torchrun)
_FRAME = re.compile(r'\s+File "([^"]+)", line \d+')
# Exceptions of the launchers, which only say that a process ended.
_OF_LAUNCHERS = {"ChildFailedError", "CalledProcessError", "SignalException"}


def raised_in(errors: Iterable[str]) -> list[Raised]:
    """Return the exceptions whose tracebacks are in a log, in the order of the log.

    The exceptions of the launchers are left out, because they only say that a process ended.
    """
    raised, file = [], ""
    for line in errors:
        line = _RANK.sub("", line)
        if frame := _FRAME.match(line):
            file = frame[1]
        elif _EXCEPTION.match(line):
            exception = Raised(line[:MESSAGE_LENGTH], file)
            raised += [exception] if exception.type not in _OF_LAUNCHERS else []
            file = ""
    return raised


def lines_of(log: bytes) -> list[str]:
    """Return the nonempty lines of a log as a terminal shows them. Only the last state of a progress bar is kept."""
    lines = []
    for line in log.decode(errors="replace").split("\n"):
        drawn = [part for part in line.split("\r") if part.strip()]
        lines += [drawn[-1].rstrip()] if drawn else []
    return lines
