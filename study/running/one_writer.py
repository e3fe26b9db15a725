"""Who writes into a folder? One process at a time, by a lock that the kernel lets go of when that process ends."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TextIO

import psutil

from study.errors import Refusal
from study.files import missing_folders, remove_empty

LOCK = ".lock"  # holds its holder's process; gone with it, unless that was killed
PATIENCE_SECONDS = 1.0  # for one that only looks, as `is_another` does


@contextmanager
def locked(folder: Path, doing: str, remedy: str) -> Iterator[None]:
    """Keep other processes from writing into a folder, which is made; where it stays empty, it is removed.

    A process that `locked` itself started goes on: the folder is its parent's. Raises Refusal where it is another's,
    or cannot be locked.
    """
    created = missing_folders(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = _take(folder / LOCK)
    except OSError as error:
        remove_empty([path for path in created if path.exists()])
        raise Refusal(f"{folder}: cannot be written or locked ({error.strerror}); {remedy}") from None
    if lock is None:
        holder = _holder(folder / LOCK)
        if holder in _ancestors():
            yield
            return
        who = f"process {holder}" if holder else "another process"
        raise Refusal(f"{folder}: {who} is {doing} there; wait for it, end it, or {remedy}")
    with lock:
        try:
            yield
        finally:
            with suppress(FileNotFoundError):  # the folder may have been removed
                (folder / LOCK).unlink()
            remove_empty([path for path in created if path.exists()])


def locked_run(folder: Path) -> AbstractContextManager[None]:
    """`locked` for the folder of one run."""
    return locked(folder, "writing a run", "pass another --output-dir")


def locked_study(folder: Path) -> AbstractContextManager[None]:
    """`locked` for a study's folder."""
    return locked(folder, "running this study", "pass another --runs-dir")


def is_another(folder: Path) -> bool:
    """Say whether a launch other than this process's own is writing into a folder.

    Its own: what has started it, or another rank of the same launcher.
    """
    try:
        with open(folder / LOCK) as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except BlockingIOError:
        pass
    except OSError:
        return False
    holder = _holder(folder / LOCK)
    if holder is None or holder in {os.getpid(), *_ancestors()}:
        return False
    with suppress(psutil.Error):
        return bool(psutil.Process(holder).ppid() != os.getppid())
    return False


def _take(path: Path) -> TextIO | None:
    """Open and lock a file, and write this process into it; None where another process has it."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        lock = open(path, "a+")  # noqa: SIM115 - held by the caller
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(lock.fileno()).st_ino == path.stat().st_ino:  # else it was just removed by its holder
                break
            lock.close()
        except FileNotFoundError:
            lock.close()
        except BlockingIOError:
            lock.close()
            if time.monotonic() > deadline:
                return None
            time.sleep(0.1)
        except OSError:
            lock.close()
            raise
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    return lock


def _ancestors() -> set[int]:
    return {parent.pid for parent in psutil.Process().parents()}


def _holder(path: Path) -> int | None:
    """The process that a lock's file names."""
    with suppress(OSError, ValueError):
        return int(path.read_text())
    return None
