"""Which rank, or which folder, is behind an error that does not name it?"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from study import files
from study.errors import Failed, Interrupted, MachineLost, OffloadFailed, OutputFailed, PeerLost, Refusal, Stalled
from study.run import Run
from study.running.outcome import REMOVED

# gloo's words, of its operations and of its store.
# Of two operations that wait for one rank, gloo ends the second with the connection that the first has given up.
_TIMED_OUT = re.compile(r"Timed out waiting|Application timeout caused pair closure|wait timeout after|Socket Timeout")
_PEER_LOST = re.compile(r"Connection (?:closed|reset) by peer|Broken pipe")
# The kernel's words, and those of torch's writer of archives, which passes none on.
_NO_ROOM = re.compile(
    r"No space left on device|Disk quota exceeded|Read-only file system|Stale file handle|Input/output error|"
    r"file write failed|unexpected pos \d+"
)
_SWAPPERS = "/deepspeed/runtime/swap_tensor/"


def removed(folder: Path) -> OutputFailed:
    return OutputFailed(f"{folder} {REMOVED}")


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Name the run's folder where its disk takes nothing more. Raises OutputFailed."""
    try:
        yield
    except Exception as error:
        if _NO_ROOM.search(str(error)):
            raise OutputFailed(_lacks(folder, error)) from None
        raise


def named(error: BaseException, run: Run, is_removed: bool) -> BaseException:
    """Return the rank or the folder that stands behind a library's error; where there is none, the error itself.

    `is_removed`: whether the run's folder was. Which rank it is that did not come, the ranks say together.
    """
    text = str(error)
    if isinstance(error, (Failed, Refusal, Interrupted)) or not isinstance(error, Exception):
        return error
    is_of_collective = isinstance(error, RuntimeError)  # and no socket's or pipe's of another kind
    if is_of_collective and _TIMED_OUT.search(text):
        return Stalled(_line(text))
    if is_of_collective and _PEER_LOST.search(text):
        return PeerLost(_line(text))
    if is_removed:
        return removed(run.folder)
    if run.strategy.offloads_to_nvme and (_was_swapping(error) or str(run.swap_folder) in text):
        return OffloadFailed(_lacks(run.swap_folder, error))
    if _NO_ROOM.search(text) and files.why_not_writable(run.folder):
        return OutputFailed(_lacks(run.folder, error))
    return error


def did_not_come(missing: list[int], run: Run) -> Stalled:
    """Say which ranks kept the others waiting."""
    seconds = run.config.collective_timeout
    if not missing:
        return Stalled(
            f"every rank waited {seconds} s (--collective-timeout) in a collective that the others were not in"
        )
    return Stalled(f"{_named(missing, run)} did not come to a collective within {seconds} s (--collective-timeout)")


def gone(missing: list[int], run: Run) -> MachineLost:
    """Say which ranks have gone without a word."""
    return MachineLost(
        f"the connection to {_named(missing, run)} is gone, and nothing is heard from there; look at that machine"
    )


def _named(ranks: list[int], run: Run) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(run.machine_of, ranks))}"


def _was_swapping(error: BaseException) -> bool:
    return any(_SWAPPERS in frame.filename for frame in traceback.extract_tb(error.__traceback__))


def _lacks(folder: Path, error: Exception) -> str:
    """Say what is wrong with a folder: what the kernel says of it now, or else the error that was met there."""
    if not folder.is_dir():
        return f"{folder} {REMOVED}"
    said = _line(str(error))
    reason = files.why_not_writable(folder, 1 << 20)
    if reason and reason not in said:
        said = f"{reason} ({type(error).__name__}: {said})" if said else f"{reason} ({type(error).__name__})"
    return f"{folder}: {said or type(error).__name__}"


def _line(text: str) -> str:
    return " ".join(text.split())[:300]
