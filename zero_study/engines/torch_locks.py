"""Remove the locks of killed builds of torch's extensions, for which other scripts would wait forever.

torch.utils.cpp_extension creates a file `lock` in the folder of what it compiles, keeps it open while it compiles, and
removes it at the end. Any other process that loads the same extension waits until the file is gone, without a message.
This project's own builds use another lock (`extensions.py`), but a user's script that starts DeepSpeed by itself uses
torch's.

A lock is removed only if no process can hold it. The kernel grants a lease on a file only if no process of this machine
has the file open, in whichever container. It knows nothing of other machines that share the disk, so a lock on such a
disk has to be much older.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

NAME = "lock"
STALE_SECONDS = 60.0  # minimum age of a stale lock on a disk of this machine
# Minimum time without a new file in the folder, if another machine may hold the lock. No single source file of an
# extension takes so long to compile.
STALE_SECONDS_IF_SHARED = 3600.0
PROC = Path("/proc")
LOCAL_FILE_SYSTEMS = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "overlay"}


class Removed(NamedTuple):
    """A lock file that was removed, and its age in seconds."""

    lock: Path
    age: float

    def __str__(self) -> str:
        return (
            f"Removed {self.lock}: a build of {self.lock.parent.name} was interrupted {self.age / 60:.0f} min ago and "
            "left this lock. Every script that needs the extension would have waited for this lock."
        )


def remove_stale() -> list[Removed]:
    """Remove the lock files of builds that no process holds, and return them.

    A lock that cannot be removed is no error.
    """
    removed = []
    for lock in stale():
        with suppress(OSError):
            status = lock.stat()
            if _remove(lock, status):
                removed.append(Removed(lock, time.time() - status.st_mtime))
    return removed


def stale() -> list[Path]:
    """Return this user's lock files that are old enough, and that no process holds or compiles for."""
    locks = []
    for folder in _folders():
        for lock in sorted(folder.glob(f"*/{NAME}")):
            with suppress(OSError):
                if _is_own_file(lock) and _is_abandoned(lock):
                    locks.append(lock)
    return locks


def unclear() -> list[Path]:
    """Return old lock files that may belong to a process which cannot be seen from here."""
    found = []
    for folder in _folders():
        for lock in sorted(folder.glob(f"*/{NAME}")):
            with suppress(OSError):
                is_old = time.time() - lock.stat().st_mtime > STALE_SECONDS
                is_stale = _is_own_file(lock) and _is_abandoned(lock)
                if is_old and not is_stale and not _has_builder(lock) and not _is_held_here(lock):
                    found.append(lock)
    return found


def description(lock: Path) -> str:
    """Return sentences that say how a lock file blocks scripts, and what to do."""
    minutes = (time.time() - lock.stat().st_mtime) / 60
    return (
        f"{lock} is {minutes:.0f} min old, and none of your processes uses it. Every script that needs "
        f"{lock.parent.name} waits until this file is gone. If no other user or machine compiles in this "
        "folder, delete the file."
    )


def is_of_build(lock: Path) -> bool:
    """Return whether a file named `lock` belongs to a build of torch.

    It does if it is in a folder for extensions, or next to a build.ninja.
    """
    folders = [folder.resolve() for folder in _folders()]
    return lock.parent.resolve().parent in folders or (lock.parent / "build.ninja").exists()


def _folders() -> list[Path]:
    """Return the folders in which torch builds extensions. Each extension has a subfolder."""
    configured = os.environ.get("TORCH_EXTENSIONS_DIR")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path("~").expanduser() / ".cache")
    return [Path(configured)] if configured else sorted((cache / "torch_extensions").glob("*"))


def _is_own_file(lock: Path) -> bool:
    """Return whether a lock is a regular file of this user whose processes are completely visible in /proc."""
    return not lock.is_symlink() and lock.is_file() and lock.stat().st_uid == os.getuid()


def _is_held_here(lock: Path) -> bool:
    return _is_own_file(lock) and _is_closed(lock) is False


def _is_abandoned(lock: Path) -> bool:
    """Return whether no process holds a lock, as far as the kernel, the processes and the times of files say."""
    age = time.time() - lock.stat().st_mtime
    if age <= STALE_SECONDS:
        return False
    is_closed = _is_closed(lock)
    if is_closed is False:
        return False
    if is_closed is None or _file_system(lock.parent) not in LOCAL_FILE_SYSTEMS:
        newest = max(path.lstat().st_mtime for path in lock.parent.iterdir())
        is_closed = time.time() - newest > STALE_SECONDS_IF_SHARED
    return is_closed and not _has_builder(lock)


def _file_system(folder: Path) -> str | None:
    """Return the type of the file system of a folder, from the list of mounts. None if it is unknown."""
    place, kinds = folder.resolve(), dict[Path, str]()
    with suppress(OSError):
        for line in (PROC / "self/mountinfo").read_text(errors="replace").splitlines():
            before, _, after = line.partition(" - ")
            if after and len(before.split()) > 4:
                kinds[Path(before.split()[4])] = after.split()[0]
    containing = [mount for mount in kinds if place.is_relative_to(mount)]
    return kinds[max(containing, key=lambda mount: len(mount.parts))] if containing else None


def _is_closed(lock: Path) -> bool | None:
    """Return whether no process of this machine has a file open. None if the kernel does not say.

    The lease lasts for microseconds. If another process opens the file meanwhile, the kernel sends a signal, which is
    chosen so that this process ignores it.
    """
    if not hasattr(fcntl, "F_SETLEASE"):  # only Linux has leases
        return None
    descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError as error:
        return False if error.errno == errno.EAGAIN else None
    finally:
        os.close(descriptor)
    return True


def _has_builder(lock: Path) -> bool:
    """Return whether a process has the lock open, or works in the folder of the build, as ninja and compilers do."""
    folder, identity = lock.parent.resolve(), _identity(lock)
    return any(_is_builder(process, folder, identity) for process in PROC.glob("[0-9]*"))


def _is_builder(process: Path, folder: Path, identity: tuple[int, int]) -> bool:
    with suppress(OSError):
        if Path(os.readlink(process / "cwd")).is_relative_to(folder):
            return True
    with suppress(OSError):
        if str(folder).encode() in (process / "cmdline").read_bytes():
            return True
    return any(_identity_of_open_file(link) == identity for link in _open_files(process))


def _open_files(process: Path) -> Iterator[Path]:
    with suppress(OSError):
        yield from (process / "fd").iterdir()


def _identity_of_open_file(link: Path) -> tuple[int, int] | None:
    with suppress(OSError):
        if os.readlink(link).endswith(f"/{NAME}"):
            return _identity(link)
    return None


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino


def _remove(lock: Path, status: os.stat_result) -> bool:
    """Remove a lock file if it is still the file with this status. Return whether it was removed.

    Meanwhile, another process may have removed the lock and begun a build. Its new lock is put back.
    """
    aside = lock.with_name(f".{NAME}-{uuid.uuid4().hex}")
    os.rename(lock, aside)
    is_same = os.path.samestat(aside.stat(), status)
    if not is_same:
        with suppress(OSError):
            os.link(aside, lock)
    os.unlink(aside)
    return is_same
