"""Find the cause of a failure among the ranks, from the error and the report of each rank.

Each rank writes its report to a file on its machine. If there are several machines, it also writes the report to their
shared store.
"""

from __future__ import annotations

import json
import re
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from study.run import Run
from study.running.outcome import REMOVED
from zero_study import files
from zero_study.errors import Failed, Interrupted, MachineLost, OffloadFailed, OutputFailed, PeerLost, Refusal, Stalled

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

WAIT_SECONDS = 5.0  # how long the ranks that reached a collective wait for each other's reports
ANSWER_SECONDS = 2.0  # time limit of the store's answer; the broken link may be the one to the store
# Error messages of gloo's operations and of its store. If two operations wait for the same rank, the first one times
# out and closes the connection, and the second one fails with a message about the closed connection.
_TIMED_OUT = re.compile(r"Timed out waiting|Application timeout caused pair closure|wait timeout after|Socket Timeout")
_PEER_LOST = re.compile(r"Connection (?:closed|reset) by peer|Broken pipe")
# Error messages of the kernel, and of torch's archive writer, which does not pass on the kernel's message.
_NO_ROOM = re.compile(
    r"No space left on device|Disk quota exceeded|Read-only file system|Stale file handle|Input/output error|"
    r"file write failed|unexpected pos \d+"
)
_SWAPPERS = "/deepspeed/runtime/swap_tensor/"


def removed_folder(folder: Path) -> OutputFailed:
    return OutputFailed(f"{folder} {REMOVED}")


@contextmanager
def explain_write_errors(folder: Path) -> Iterator[None]:
    """Raise an OutputFailed that names the folder, if a full or broken disk causes an error in the `with` block."""
    try:
        yield
    except Exception as error:
        if _NO_ROOM.search(str(error)):
            raise OutputFailed(_lacks(folder, error)) from None
        raise


def cause_of(error: BaseException, run: Run, is_removed: bool) -> BaseException:
    """Return an error that names the cause of a library's error, such as a full disk or a missing folder.

    If none is known, return `error`.

    `is_removed` is True if the run directory was removed. The error does not name a missing rank, because only the
    reports of all ranks together show which one is missing.
    """
    text = str(error)
    if isinstance(error, (Failed, Refusal, Interrupted)) or not isinstance(error, Exception):
        return error
    is_of_collective = isinstance(error, RuntimeError)  # excludes OSErrors of other sockets and pipes
    if is_of_collective and _TIMED_OUT.search(text):
        return Stalled(_line(text))
    if is_of_collective and _PEER_LOST.search(text):
        return PeerLost(_line(text))
    if is_removed:
        return removed_folder(run.folder)
    if run.strategy.offloads_to_nvme and (_was_swapping(error) or str(run.swap_folder) in text):
        return OffloadFailed(_lacks(run.swap_folder, error))
    if _NO_ROOM.search(text) and files.why_not_writable(run.folder):
        return OutputFailed(_lacks(run.folder, error))
    return error


def stalled_by(missing: list[int], run: Run) -> Stalled:
    """Return the error that names the ranks for which the others waited in vain."""
    seconds = run.config.collective_timeout
    if not missing:
        return Stalled(
            f"every rank waited {seconds} s (--collective-timeout) in a collective that other ranks did not call"
        )
    return Stalled(f"{_named(missing, run)} did not call a collective within {seconds} s (--collective-timeout)")


def lost_ranks(missing: list[int], run: Run) -> MachineLost:
    """Return the error that names the ranks that disappeared without a report."""
    return MachineLost(
        f"the connection to {_named(missing, run)} was lost without an error message. "
        "Look at the output on that machine"
    )


def _named(ranks: list[int], run: Run) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(run.machine_of, ranks))}"


def _was_swapping(error: BaseException) -> bool:
    return any(_SWAPPERS in frame.filename for frame in traceback.extract_tb(error.__traceback__))


def _lacks(folder: Path, error: Exception) -> str:
    """Return what is wrong with a folder: the operating system's current reason, or else the message of `error`."""
    if not folder.is_dir():
        return f"{folder} {REMOVED}"
    message = _line(str(error))
    reason = files.why_not_writable(folder, 1 << 20)
    if reason and reason not in message:
        message = f"{reason} ({type(error).__name__}: {message})" if message else f"{reason} ({type(error).__name__})"
    return f"{folder}: {message or type(error).__name__}"


def _line(text: str) -> str:
    return " ".join(text.split())[:300]


# ---------------------------------------------------------------- the reports of ranks


class RankReports:
    """The failure reports of a run's ranks. No method waits long for another machine."""

    def __init__(self, run: Run, store: Store | None = None) -> None:
        self._run = run
        self._store = store

    def post(self, rank: int, report: dict[str, Any]) -> None:
        """Make a rank's report available on this machine and on the others.

        Raises OSError if the folder cannot be written to.
        """
        if (store := self._store) is not None:
            _in_time(lambda: store.set(f"failure/{rank}", json.dumps(report)))
        files.write_json(self._run.own_folder / f"failure-rank{rank}.json", report)

    def read(self) -> dict[int, dict[str, Any]]:
        """Return the reports that exist now, by rank."""
        reports = {}
        for rank in range(self._run.world_size):
            with suppress(OSError):
                reports[rank] = json.loads((self._run.own_folder / f"failure-rank{rank}.json").read_text())
        return reports | (_in_time(self._of_store) or {})

    def missing(self) -> list[int]:
        """Wait up to WAIT_SECONDS for reports, and return the ranks that have not reported."""
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            present = self.read()
            missing = [rank for rank in range(self._run.world_size) if rank not in present]
            if not missing or time.monotonic() > deadline:
                return missing
            time.sleep(0.1)

    def remove(self) -> None:
        """Delete the report files. Call this after the record has been written."""
        for path in self._run.own_folder.glob("failure-rank*.json"):
            path.unlink()

    def _of_store(self) -> dict[int, dict[str, Any]]:
        if self._store is None:
            return {}
        keys = {rank: f"failure/{rank}" for rank in range(self._run.world_size)}
        return {rank: json.loads(self._store.get(key)) for rank, key in keys.items() if self._store.check([key])}


def _in_time(ask: Callable[[], Any]) -> Any:
    """Return the result of `ask`. None if it fails or takes longer than ANSWER_SECONDS.

    In the second case, the thread that waits for the answer keeps running.
    """
    answer: list[Any] = []

    def run() -> None:
        with suppress(RuntimeError):  # torch raises it if the store no longer exists
            answer.append(ask())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(ANSWER_SECONDS)
    return answer[0] if answer else None
