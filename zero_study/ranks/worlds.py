"""Run programs as groups of ranks (worlds). Each rank is a fork of this process, which has imported what they need.

Engines leave global state behind, so every world gets processes of its own.
"""

from __future__ import annotations

import datetime
import functools
import gc
import importlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from ..engines import extensions, this_machine
from ..errors import Refusal, RunFailed
from . import forks
from .forks import Judge

POLL_SECONDS = 0.01
COLLECTIVE_SECONDS = 60


class World(NamedTuple):
    """A program that runs as a group of ranks."""

    num_ranks: int
    program: Callable[[int, Path], dict[str, Any]]  # gets its rank and the world's folder, and returns an answer
    timeout_seconds: float
    judge: Judge = lambda rank, ending: None


class Result(NamedTuple):
    """The answers of a world's ranks, and the reasons why other ranks gave none."""

    answers: dict[int, dict[str, Any]]  # by rank
    failure: str | None = None


def import_before_forks(names: Sequence[str], *, deepspeed: bool = True) -> None:
    """Import what every rank needs, before any rank is forked. No thread may exist yet, and none is started.

    With `deepspeed`, the ranks load the extensions of DeepSpeed that are already built.
    """
    for name in names:
        importlib.import_module(name)
    if deepspeed:
        # DeepSpeed calls it whenever it loads an extension, and it takes a second.
        cpuinfo: Any = importlib.import_module("cpuinfo")
        cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
        extensions.use_built()
    freeze()


def freeze() -> None:
    """Keep garbage collection in the ranks from copying the memory of everything that was imported."""
    gc.collect()
    gc.freeze()


def join(rank: int, num_ranks: int, folder: Path) -> None:
    """Make this process a rank of a gloo process group, until the process ends.

    Sets the environment that a launcher would set, and joins the process group. The ranks meet at a file in `folder`.
    """
    sizes = {"WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks, "RANK": rank, "LOCAL_RANK": rank}
    sizes["LOCAL_SIZE"] = num_ranks  # read by DeepSpeed; without it, each rank starts numactl 24 times
    os.environ |= {name: str(value) for name, value in sizes.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # nobody connects to it
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=num_ranks,
        timeout=datetime.timedelta(seconds=COLLECTIVE_SECONDS),
    )


def run(worlds: Sequence[World], at_once: int | None = None) -> Iterator[tuple[int, Result]]:
    """Run worlds, and yield the index and the result of each world when it ends.

    Worlds run at the same time as long as they have at most `at_once` ranks together. By default, this is the number of
    processors. A world with more ranks runs by itself. If a rank ends without an answer, or a world takes too long, all
    of its ranks are ended.
    """
    at_once = at_once or len(this_machine.allowed_processors())
    waiting, active = list(enumerate(worlds)), list[_Active]()
    try:
        while waiting or active:
            num_active = sum(each.world.num_ranks for each in active)
            if waiting and (not active or num_active + waiting[0][1].num_ranks <= at_once):
                active.append(_Active(*waiting.pop(0)))
                continue
            for each in list(active):
                if result := each.result():
                    active.remove(each)
                    yield each.position, result
            time.sleep(POLL_SECONDS)
    finally:
        for each in active:
            each.end()


class _Active:
    """A world that runs, with the processes of its ranks."""

    def __init__(self, position: int, world: World) -> None:
        self.position, self.world = position, world
        self._began = time.monotonic()
        self._scratch = tempfile.TemporaryDirectory(prefix="zero-study-", ignore_cleanup_errors=True)
        self._folder = Path(self._scratch.name)
        self._answers: dict[int, dict[str, Any]] = {}
        self._running = {
            rank: forks.start(
                functools.partial(world.program, rank, self._folder), nullcontext(), self._folder / str(rank)
            )
            for rank in range(world.num_ranks)
        }

    def result(self) -> Result | None:
        """Collect the answers of ended ranks. If all have ended or one failed, end the world and return its result."""
        failure = None
        try:
            self._answers |= forks.ended(self._running, self._folder, self.world.judge)
            if self._running and time.monotonic() - self._began > self.world.timeout_seconds:
                raise RunFailed(f"not done after {self.world.timeout_seconds:g} s")
        except (Refusal, RunFailed) as failed:  # a refusal that was not foreseen is a failure, too
            failure = str(failed)
        if self._running and not failure:
            return None
        self.end()
        return Result(dict(sorted(self._answers.items())), failure)

    def end(self) -> None:
        forks.end(self._running)
        self._running.clear()
        self._scratch.cleanup()
