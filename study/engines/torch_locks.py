"""Find the locks that killed builds of torch's extensions left behind, which other scripts wait for forever.

torch.utils.cpp_extension creates a file `lock` in the folder of what it compiles, and removes it at the end. Any other
process that loads the same extension waits until the file is gone, without a message. This project's own builds use
another lock (`extensions.py`), but a user's script that starts DeepSpeed by itself uses torch's.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

NAME = "lock"
STALE_SECONDS = 60.0  # minimum age of a stale lock


def stale() -> list[Path]:
    """Return the locks that are older than STALE_SECONDS if no process of this user compiles in their folder."""
    locks = []
    for folder in _folders():
        for lock in sorted(folder.glob(f"*/{NAME}")):
            with suppress(OSError):
                if time.time() - lock.stat().st_mtime > STALE_SECONDS and not _is_current_folder(lock.parent):
                    locks.append(lock)
    return locks


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


REMEDY = "Delete this file."


def description(lock: Path) -> str:
    """Return a text that describes a stale lock and its effect on scripts."""
    minutes = (time.time() - lock.stat().st_mtime) / 60
    return (
        f"{lock} is a lock of a torch build that was killed: it is {minutes:.0f} min old, and no process compiles "
        f"there. Every script that loads {lock.parent.name} waits for this lock forever, without a message."
    )


def _is_current_folder(folder: Path) -> bool:
    """Return whether a process has this working directory, which for ninja is the folder of the build."""
    for link in Path("/proc").glob("[0-9]*/cwd"):
        with suppress(OSError):
            if Path(os.readlink(link)) == folder.resolve():
                return True
    return False
