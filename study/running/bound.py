"""Start a program that does not outlive the process that starts it, however that ends: `bound.py PARENT PROGRAM ...`.

It takes this process's place. As a file of its own, because it must be quick: nothing but the standard library.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask the kernel to kill this process as soon as its parent ends. Linux only; elsewhere it does nothing.

    A parent that has ended already goes unnoticed: whoever calls this looks for it afterwards.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))


def command(arguments: list[str]) -> list[str]:
    """The command that starts a program bound to this process; its first word is the program's path."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *arguments]


if __name__ == "__main__":
    die_with_parent()
    if os.getppid() == int(sys.argv[1]):
        os.execv(sys.argv[2], sys.argv[2:])
