"""Comparison of two programs that do the same work on a machine with drifting speed: pairs in alternating order."""

from __future__ import annotations

import dataclasses
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from study.config import build_config
from study.run import Run, make_run
from study.running import checks, launch
from zero_study.engines import this_machine
from zero_study.errors import RunFailed
from zero_study.strategy.file import find_strategy, read_strategy

TIMEOUT_SECONDS = 1800  # of one run


def run_pair(
    arms: dict[str, Callable[[], dict[str, Any]]], number: int, say: Callable[[str, int, dict[str, Any]], None]
) -> dict[str, Any]:
    """Run both arms as pair `number`, counted from 1. `say(arm, number, facts)` is called after each run.

    The order alternates from pair to pair (A B, B A, A B, ...), so that a drift of the machine favors neither.
    """
    order = list(arms) if number % 2 else list(arms)[::-1]
    pair: dict[str, Any] = {"order": order}
    for arm in order:
        pair[arm] = arms[arm]()
        say(arm, number, pair[arm])
    return pair


def summarize(values: Sequence[float]) -> dict[str, float]:
    """Return median, range and number of the values."""
    return {"count": len(values), "median": statistics.median(values), "minimum": min(values), "maximum": max(values)}


def show(summary: dict[str, float]) -> str:
    return f"{summary['median']:.3f} ({summary['minimum']:.3f} to {summary['maximum']:.3f}, n={summary['count']})"


def plan(strategy_name: str, flags: dict[str, Any], num_processes: int | None = None) -> Run:
    """Check the runs of a comparison, with the strategy's number of processes or `num_processes`. Raises Refusal."""
    strategy = read_strategy(find_strategy(strategy_name))
    world_size = strategy.num_processes if strategy.name == "single" else num_processes or strategy.num_processes
    work = make_run(build_config(**flags), strategy, world_size)
    checks.check(work)
    return work


@contextmanager
def finished(work: Run) -> Iterator[Run]:
    """Run the work as `zero-study train` does, in a folder that exists for a `with` block. Raises RunFailed."""
    with tempfile.TemporaryDirectory(prefix="zero-study-benchmark-") as folder:
        run = dataclasses.replace(work, folder=Path(folder) / "run")
        ended = launch.launch(run, TIMEOUT_SECONDS)
        if ended.status != "ok":
            raise RunFailed("\n".join([f"{run.strategy.name}: {ended.status}, {ended.message}", *ended.stderr_tail]))
        yield run


def share_cores(num_processes: int) -> None:
    """Set the number of threads for all processes of this benchmark, before torch is imported."""
    os.environ.setdefault("OMP_NUM_THREADS", str(this_machine.threads_of_each(num_processes)))
