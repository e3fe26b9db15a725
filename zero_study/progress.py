"""Print a progress line for work that takes longer than two seconds."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

SECONDS = 2.0


def at_once(activity: str) -> None:
    """Print to stderr what a command is doing. Use it for work that always takes longer than two seconds.

    It starts no thread, so the process can be forked afterwards.
    """
    print(f"{activity} ...", file=sys.stderr, flush=True)


@contextmanager
def after_two_seconds(activity: str) -> Iterator[None]:
    """Print to stderr what a command is doing, if the work in the `with` block takes longer than two seconds.

    `activity` names the work, for instance "Reading 600 records". Nothing is printed if the work is quicker. The timer
    is a thread: use `at_once` if the work forks this process.
    """
    timer = threading.Timer(SECONDS, lambda: print(f"{activity} ...", file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
