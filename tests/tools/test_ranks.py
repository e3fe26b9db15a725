"""Test the worlds of forked ranks: their answers, and how a rank that fails, hangs or dies is reported."""

from __future__ import annotations

import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from zero_study.ranks import worlds
from zero_study.ranks.forks import Ending
from zero_study.ranks.worlds import Result, World


def behave(how: dict[int, str], rank: int, folder: Path) -> dict[str, Any]:
    """Be a rank that answers, fails, waits for ever or ends itself, as `how` says."""
    # Not what pytest captures.
    sys.stdout, sys.stderr = (open(number, "w", closefd=False) for number in (1, 2))  # noqa: SIM115
    what = how.get(rank, "answer")
    if what == "fail":
        raise ValueError("planted")
    if what == "hang":
        time.sleep(600)
    if what == "die":
        print("the last line", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    return {"rank": rank, "folder": str(folder), "process": os.getpid()}


def run(*ways: dict[int, str], timeout_seconds: float = 60, at_once: int = 2, **options: Any) -> list[Result]:
    each = [World(2, partial(behave, how), timeout_seconds, **options) for how in ways]
    return [result for _, result in sorted(worlds.run(each, at_once), key=lambda pair: pair[0])]


def test_each_world_gives_the_answers_of_its_ranks_and_has_processes_of_its_own():
    results = run({}, {}, at_once=4)
    assert [result.failure for result in results] == [None, None]
    assert [list(result.answers) for result in results] == [[0, 1], [0, 1]]
    answers = [answer for result in results for answer in result.answers.values()]
    assert len({answer["process"] for answer in answers} - {os.getpid()}) == 4
    assert not any(Path(answer["folder"]).exists() for answer in answers)


@pytest.mark.parametrize(
    ("how", "failure"),
    [
        ({0: "hang", 1: "fail"}, "rank 1: ValueError: planted"),
        ({0: "hang", 1: "die"}, "rank 1: was ended by signal 9 (SIGKILL)"),
    ],
)
def test_a_rank_that_fails_ends_its_world_and_no_other(how, failure):
    began = time.monotonic()
    failed, right = run(how, {}, timeout_seconds=300)
    assert (failed.failure, right.failure) == (failure, None)
    assert time.monotonic() - began < 200


def test_a_world_that_takes_too_long_is_ended_and_keeps_the_answers_that_it_has():
    (result,) = run({1: "hang"}, timeout_seconds=3)
    assert result.failure == "not done after 3 s"
    assert set(result.answers) <= {0}


def test_an_ending_can_be_an_answer():
    def judge(rank: int, ending: Ending) -> dict[str, Any]:
        return {"status": ending.status, "last": ending.lines[-1]}

    (result,) = run({1: "die"}, judge=judge)
    assert result.failure is None
    assert result.answers[1].items() >= {"status": -9, "last": "the last line"}.items()
    assert result.answers[0]["rank"] == 0
