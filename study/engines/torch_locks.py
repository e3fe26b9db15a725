"""Which locks of torch's make a script wait for ever? Those of builds that were killed.

torch.utils.cpp_extension makes a file `lock` beside what it compiles, and removes it at the end. Every other process
that loads the same extension waits until it is gone, without a line. This study's own builds have another lock
(`extensions.py`); a script of anybody's that starts DeepSpeed by itself has torch's.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

NAME = "lock"
STALE_SECONDS = 60.0  # for which no process has compiled in the folder


def stale() -> list[Path]:
    """List the locks that are older than a minute, and beside which no process of this user compiles."""
    found = []
    for folder in _folders():
        for lock in sorted(folder.glob(f"*/{NAME}")):
            with suppress(OSError):
                if time.time() - lock.stat().st_mtime > STALE_SECONDS and not _is_worked_in(lock.parent):
                    found.append(lock)
    return found


def is_of_build(lock: Path) -> bool:
    """Whether a file of this name is torch's: it is in a folder for extensions, or beside a file for ninja."""
    folders = [folder.resolve() for folder in _folders()]
    return lock.parent.resolve().parent in folders or (lock.parent / "build.ninja").exists()


def _folders() -> list[Path]:
    """Where torch builds extensions, each in a folder of its own."""
    given = os.environ.get("TORCH_EXTENSIONS_DIR")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path("~").expanduser() / ".cache")
    return [Path(given)] if given else sorted((cache / "torch_extensions").glob("*"))


def said(lock: Path) -> str:
    """Say what a stale lock does, and what to do about it."""
    minutes = (time.time() - lock.stat().st_mtime) / 60
    return (
        f"{lock}: a lock of torch's that is {minutes:.0f} min old, and nobody compiles there: its build was killed, "
        f"and every script that loads {lock.parent.name} waits for it without a line; delete it"
    )


def _is_worked_in(folder: Path) -> bool:
    """Whether a process has this current folder: ninja is started in the folder of what it builds."""
    for link in Path("/proc").glob("[0-9]*/cwd"):
        with suppress(OSError):
            if Path(os.readlink(link)) == folder.resolve():
                return True
    return False
