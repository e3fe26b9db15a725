"""Print a line of progress for work that takes longer than a reader expects."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

SECONDS = 2.0


def at_once(activity: str) -> None:
    """Print on standard error what a command is doing, for work that always takes longer than two seconds.

    It starts no thread, so the process can be forked afterwards.
    """
    print(f"{activity} ...", file=sys.stderr, flush=True)


@contextmanager
def after_two_seconds(activity: str) -> Iterator[None]:
    """Print on standard error what a command is doing, if the work in the block takes longer than two seconds.

    `activity`: what is being done, for instance "Reading 600 records". Quicker work prints nothing.
    The timer is a thread: use `at_once` if the work forks this process.
    """
    timer = threading.Timer(SECONDS, lambda: print(f"{activity} ...", file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
