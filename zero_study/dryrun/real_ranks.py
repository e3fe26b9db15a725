"""Run a program on all ranks of a small world that exchange real values, and end ranks that wait forever.

Each rank is a fork of this process. Because values are real, decisions that ranks make by an all-reduce work as on
GPUs, and so does DDP's `join`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from zero_study.dryrun.tracker import DONE
from zero_study.ranks.forks import Ending, Program, ended, start
from zero_study.ranks.process_trees import ProcessTrees

POLL_SECONDS = 0.25
IDLE_SHARE = 0.02  # the most CPU time per second that a waiting rank uses, with all processes that it has started
WINDOW_SECONDS = 5.0  # the time over which that is measured, because CPU time is counted in ticks of 10 ms
WAITING_SECONDS = 10.0  # if all ranks are in collectives and none finishes for so long, they wait forever
ASLEEP_SECONDS = 60.0  # the same for ranks outside of collectives, because a script may sleep


def journal(folder: Path, rank: int) -> Path:
    """Return the path of the file to which a rank writes its collectives."""
    return folder / f"{rank}.calls"


def run(
    program: Program, places: Mapping[int, AbstractContextManager[None]], folder: Path
) -> dict[int, dict[str, Any]]:
    """Run a program on all ranks of a world at the same time, and return the results by rank.

    Ranks that wait for each other forever are ended, together with all processes that they have started. The answer of
    such a rank has its `calls` so far, and `waits` is True. A rank that is ended by a signal, or by os._exit, has such
    an answer, too, in which `ended` says how it ended.

    `places` maps a rank to the context that makes a process this rank. The ranks write their journals to `folder`.
    Raises Refusal if a rank refuses, and RunFailed if a rank ends before it begins to write its journal.
    """
    running = {rank: start(program, place, folder / str(rank)) for rank, place in places.items()}
    answers: dict[int, dict[str, Any]] = {}
    trees = ProcessTrees()
    idle = _Idle(folder, trees)
    try:
        while running:
            time.sleep(POLL_SECONDS)
            answers |= ended(running, folder, partial(_judge, folder))
            if running and idle.is_for_ever(running):
                break
        for rank in running:
            answers[rank] = {"calls": _written(journal(folder, rank)), "raised": None, "waits": True}
    finally:
        trees.end(running)
    return dict(sorted(answers.items()))


def _judge(folder: Path, rank: int, ending: Ending) -> dict[str, Any] | None:
    """Return a result for a rank that ended without one, with the calls in its journal. None if it has no journal."""
    path = journal(folder, rank)
    text = str(ending) if ending.status else None
    return {"calls": _written(path), "raised": None, "ended": text} if path.exists() else None


def _written(path: Path) -> list[dict[str, Any]]:
    """Return the calls in a journal. An incomplete last line is left out."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("\n")]


class _Idle:
    """A timer of how long all ranks of a world have been waiting.

    A rank waits if it uses almost no CPU time and writes nothing to its journal.
    """

    def __init__(self, folder: Path, trees: ProcessTrees) -> None:
        self._folder = folder
        self._trees = trees
        self._since = self._began = time.monotonic()  # since when all ranks wait, and when the current window began
        self._before: Any = None
        self._seconds: dict[int, float] = {}  # of each rank, as the window began

    def is_for_ever(self, running: Mapping[int, int]) -> bool:
        """Return whether all these ranks have been waiting for so long that they will never continue.

        `running` maps a rank to its process id.
        """
        now = time.monotonic()
        seconds = self._trees.look(running)
        journals = {rank: journal(self._folder, rank) for rank in running}
        state = {rank: path.stat().st_size if path.exists() else 0 for rank, path in journals.items()}
        most = IDLE_SHARE * WINDOW_SECONDS
        works = state != self._before or any(seconds[rank] - self._seconds.get(rank, 0.0) > most for rank in running)
        if works:
            self._since = now
        if works or now - self._began > WINDOW_SECONDS:
            self._began, self._seconds = now, seconds
        self._before = state
        waits = WAITING_SECONDS if all(map(_is_in_call, journals.values())) else ASLEEP_SECONDS
        return now - self._since >= waits


def _is_in_call(path: Path) -> bool:
    """Return whether the last call in a journal has not finished. False if the journal has no calls."""
    last = path.read_text().splitlines()[-1:] if path.exists() else []
    return bool(last) and last != [DONE]
