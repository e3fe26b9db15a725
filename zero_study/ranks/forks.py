"""Run a function as several ranks.

Each rank is a fork of this process, which has imported everything that the ranks need.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .. import files, processes
from ..engines import this_machine
from ..errors import Refusal, RunFailed
from .process_trees import ProcessTrees

Program = Callable[[], dict[str, Any]]  # what a rank does in its context; returns the rank's answer
REFUSED, CRASHED = 2, 1
POLL_SECONDS = 0.02


class Ending(NamedTuple):
    """The description of how a rank without an answer ended."""

    status: int  # negative if a signal ended it: minus the signal's number
    lines: list[str]  # what it wrote to stdout and stderr

    def __str__(self) -> str:
        """Say how the rank ended. If a signal ended it, with the message of the C++ exception."""
        if self.status < 0:
            with_name = f"was ended by signal {-self.status} ({signal.Signals(-self.status).name})"
            words = next((line.partition("what():")[2].strip() for line in self.lines[::-1] if "what():" in line), "")
            return f"{with_name}: {words}" if words else with_name
        raised = processes.raised_in(self.lines)
        return raised[0].text if raised else f"ended with status {self.status}"


Judge = Callable[[int, Ending], dict[str, Any] | None]  # returns an answer in place of the missing one


def run(
    program: Program, places: dict[int, AbstractContextManager[None]], at_once: int | None = None
) -> dict[int, dict[str, Any]]:
    """Run a program as each of these ranks, and return the answer of each rank.

    `places` maps a rank to the context that makes a process this rank. `at_once` is how many ranks run at a time. If it
    is None, as many run as there are processors. Raises Refusal if a rank refuses, and RunFailed if a rank ends without
    an answer.
    """
    at_once = at_once or max(1, len(this_machine.allowed_processors()))
    waiting, running = list(places), dict[int, int]()
    answers: dict[int, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="zero-study-") as scratch:
        try:
            while waiting or running:
                while waiting and len(running) < at_once:
                    rank = waiting.pop(0)
                    running[rank] = start(program, places[rank], Path(scratch) / str(rank))
                # Poll instead of waiting in one call. A signal may reach another thread, and would then not interrupt
                # the call.
                answers |= ended(running, Path(scratch))
                time.sleep(POLL_SECONDS)
        finally:
            end(running)
    return dict(sorted(answers.items()))


def ended(running: dict[int, int], folder: Path, judge: Judge = lambda rank, ending: None) -> dict[int, dict[str, Any]]:
    """Remove the ranks that have ended from `running`, and return their answers.

    `judge` is called for a rank that left no answer. It returns an answer, or None if there is none. Raises Refusal if
    a rank refused, and RunFailed if there is no answer.
    """
    polled = [(rank, *os.wait4(child, os.WNOHANG)) for rank, child in running.items()]
    finished = {rank: (status, used) for rank, child, status, used in polled if child}
    for rank in finished:
        del running[rank]
    return {
        rank: _answer(folder / str(rank), rank, os.waitstatus_to_exitcode(status), judge)
        | {"resident_bytes": used.ru_maxrss * 1024}
        for rank, (status, used) in finished.items()
    }


def end(running: dict[int, int]) -> None:
    """End the ranks that are still running, and all processes that they have started."""
    if running:
        ProcessTrees().end(running)


def start(program: Program, place: AbstractContextManager[None], path: Path) -> int:
    """Fork a process that runs the program as a rank, and return its process id.

    The process writes its answer to `path`.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    try:
        os._exit(_be(program, place, path))
    finally:
        os._exit(CRASHED)


def _be(program: Program, place: AbstractContextManager[None], path: Path) -> int:
    """Run the program as a rank in the forked process, and return the exit status."""
    processes.die_with_parent()
    with open(path.with_suffix(".log"), "w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    torch.set_num_threads(1)  # a fork does not have the threads of its parent
    began = time.perf_counter()
    try:
        with warnings.catch_warnings(), place:
            warnings.simplefilter("ignore")  # the warnings are about real trainings
            answer = program()
        files.write_json(path, answer | {"seconds": time.perf_counter() - began})
        return 0
    except Refusal as refusal:
        files.write_json(path, {"refused": str(refusal)})
        return REFUSED
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        return CRASHED


def _answer(path: Path, rank: int, status: int, judge: Judge) -> dict[str, Any]:
    """Return the answer of a rank that has ended.

    If the rank left none, `judge` may return one. Raises Refusal if the rank refused, and RunFailed if there is no
    answer.
    """
    if path.exists():
        answer: dict[str, Any] = files.load(path, "a rank's answer")
        if "refused" in answer:
            raise Refusal(answer["refused"])
        return answer
    ending = Ending(status, processes.lines_of(path.with_suffix(".log").read_bytes()))
    judged = judge(rank, ending)
    if judged is None:
        raise RunFailed(f"rank {rank}: {ending}")
    return judged
