"""Let only one process at a time write to a folder, with a lock that the kernel releases when the process ends.

The lock is filelock's. Processes that the holder of the lock started are recognized by a random token in their
environment, because process numbers mean nothing across containers. If a network file system does not support locks, a
run notices another writer by its own files (`training/journal.py`).
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from filelock import BaseFileLock, FileLock, Timeout

from zero_study.errors import Refusal
from zero_study.files import missing_folders, remove_empty

LOCK = ".lock"
HOLDER = ".holder"  # holds the holder's token and a name for messages; it stays behind if the holder was killed
PATIENCE_SECONDS = 1.0  # how long to wait for a holder that is about to release the lock

# The environment variable with the token that lets the processes of a holder into its folder.
TOKEN = "ZERO_STUDY_TOKEN"


@contextmanager
def locked(folder: Path, doing: str, remedy: str) -> Iterator[str]:
    """Create and lock a folder, and yield the token with which other processes may write to it.

    `doing` and `remedy` are parts of the error message. The folder is removed at the end if it is still empty. Raises
    Refusal if another process holds the lock, or if the folder cannot be locked.
    """
    created = missing_folders(folder)
    lock = FileLock(folder / LOCK, timeout=PATIENCE_SECONDS)
    token = os.environ.get(TOKEN, "")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
        token = secrets.token_hex(16)
        (folder / HOLDER).unlink(missing_ok=True)
        with open(folder / HOLDER, "x") as holder:
            holder.write(f"{token} process {os.getpid()} on {socket.gethostname()}")
    except Timeout:
        if not is_ours(folder):
            holder_name = _holder(folder).partition(" ")[2] or "another process"
            raise Refusal(
                f"{folder}: {holder_name} is {doing} in this folder. Wait for the process, end it, or {remedy}"
            ) from None
    except OSError as error:
        _let_go(folder, lock, created)
        raise Refusal(f"{folder}: cannot be written or locked ({error.strerror}). To continue, {remedy}") from None
    try:
        yield token
    finally:
        if lock.is_locked:
            _let_go(folder, lock, created)


def _let_go(folder: Path, lock: BaseFileLock, created: Sequence[Path]) -> None:
    """Release a lock and remove its files, and remove the folders that were created and are still empty."""
    if lock.is_locked:
        for name in (HOLDER, LOCK):  # a process that waits for the removed lock creates a new one
            with suppress(OSError):  # the file does not exist any more, or there is a folder with its name
                (folder / name).unlink()
        lock.release()
    remove_empty([path for path in created if path.exists()])


def locked_run(folder: Path) -> AbstractContextManager[str]:
    """Lock the folder of one run, as `locked` does."""
    return locked(folder, "writing a run", "pass another --output-dir")


def locked_study(folder: Path) -> AbstractContextManager[str]:
    """Lock the folder of a study, as `locked` does."""
    return locked(folder, "running this study", "pass another --runs-dir")


def is_ours(folder: Path) -> bool:
    """Return whether this process was started by the process that holds the lock of a folder."""
    token = os.environ.get(TOKEN)
    return bool(token) and _holder(folder).partition(" ")[0] == token


def _holder(folder: Path) -> str:
    """Return what the holder of a folder's lock has written about itself.

    The text is empty if nothing has been written yet, or if it cannot be read.
    """
    with suppress(OSError, ValueError):
        return (folder / HOLDER).read_text()
    return ""
