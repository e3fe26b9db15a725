"""Do all ranks of a small world come to their end? Each is a fork of this process, and they exchange what is real.

A decision that they make by an all-reduce, or DDP's `join`, is then the same for all of them, as on GPUs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import psutil

from .ranks import Program, end, ended, start
from .watch import DONE

MOST_RANKS = 8  # that exchange what is real on one machine
POLL_SECONDS = 0.25
IDLE_SHARE = 0.02  # of a processor, that a process which only waits takes at most
WAITING_SECONDS = 10.0  # in collectives, without one that is done: for ever
ASLEEP_SECONDS = 60.0  # outside of them: a script may sleep


def journal(folder: Path, rank: int) -> Path:
    """Where a rank writes its calls."""
    return folder / f"{rank}.calls"


def ask(
    program: Program, places: Mapping[int, AbstractContextManager[None]], folder: Path
) -> dict[int, dict[str, Any]]:
    """Run a program as all ranks of a world at once, and return what each has said.

    Ranks that wait for each other for ever are ended; `waits` is then true in what they say, which is their calls.
    `folder`: of their journals. Raises Refusal if a rank refuses, and RunFailed if one ends without an answer.
    """
    running = {rank: start(program, place, folder / str(rank)) for rank, place in places.items()}
    answers: dict[int, dict[str, Any]] = {}
    idle = _Idle(folder)
    try:
        while running:
            time.sleep(POLL_SECONDS)
            answers |= ended(running, folder)
            if running and idle.is_for_ever(running):
                break
        for rank in running:
            answers[rank] = {"calls": _written(journal(folder, rank)), "raised": None, "waits": True}
    finally:
        end(running)
    return dict(sorted(answers.items()))


def _written(path: Path) -> list[dict[str, Any]]:
    """The calls in a journal; of the last line, which may be cut off, only what is whole."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("\n")]


class _Idle:
    """Since when all processes of a world have been waiting, by their time on a processor and by their journals."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._since = self._looked = time.monotonic()
        self._before: Any = None
        self._seconds = 0.0

    def is_for_ever(self, running: Mapping[int, int]) -> bool:
        """Say whether these ranks, with their process ids, have all been waiting for too long."""
        now = time.monotonic()
        seconds = sum(map(_processor_seconds, running.values()))
        journals = {rank: journal(self._folder, rank) for rank in running}
        state = {rank: path.stat().st_size if path.exists() else 0 for rank, path in journals.items()}
        works = seconds - self._seconds > IDLE_SHARE * len(running) * (now - self._looked)
        if works or state != self._before:
            self._since = now
        self._before, self._seconds, self._looked = state, seconds, now
        if now - self._since < WAITING_SECONDS:
            return False
        in_calls = all(path.exists() and not path.read_text().endswith(f"{DONE}\n") for path in journals.values())
        return in_calls or now - self._since > ASLEEP_SECONDS


def _processor_seconds(process: int) -> float:
    with suppress(psutil.Error):
        used = psutil.Process(process).cpu_times()
        return float(used.user + used.system)
    return 0.0
