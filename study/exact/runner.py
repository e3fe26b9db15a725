"""Train cells.

Each rank of a cell is a fork of this process, which has imported everything that the ranks need.
"""

from __future__ import annotations

import functools
import gc
import importlib
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from study.dryrun import ranks
from study.engines import extensions, this_machine
from study.errors import Refusal, RunFailed
from study.exact import faults, problem, reference, training
from study.exact.cells import Cell

CELL_SECONDS = 300
POLL_SECONDS = 0.01
# Modules that engines import only when they train; each rank would have to import them again.
IMPORTED = (
    "cpuinfo", "torch._dynamo", "torch._inductor.compile_fx", "torch.distributed.fsdp", "torch.distributed.tensor",
    "torch.distributed.algorithms.ddp_comm_hooks", "deepspeed", "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.superoffload.superoffload_stage3", "deepspeed.runtime.zero.muon.original_muon",
    "transformers.integrations.deepspeed", "study.training.accelerators",
)  # fmt: skip


@dataclass
class Outcome:
    """The outcome of one cell: its refusal, its failure, or the answers of its ranks."""

    cell: Cell
    refusal: str | None = None  # why it cannot be trained
    failure: str | None = None  # how its training failed
    answers: list[dict[str, Any]] = field(default_factory=list)  # of each rank
    number: int = 0  # the position of the cell in the list, because outcomes arrive in another order

    @property
    def difference(self) -> dict[str, Any] | None:
        """The first difference from the reference. None if there is none.

        If several ranks found one, the earliest step counts.
        """
        differences = [answer["difference"] for answer in self.answers if answer["difference"]]
        return min(differences, key=lambda difference: difference["step"], default=None)

    @property
    def is_same(self) -> bool:
        """Whether every rank compared every value, and all values had the reference's bits."""
        is_complete = [answer["compared"] for answer in self.answers] == [problem.NUM_COMPARED] * self.cell.num_ranks
        return is_complete and not (self.failure or self.refusal or self.difference)

    @property
    def word(self) -> str:
        """The outcome in at most two words, for a narrow column."""
        if self.refusal or self.failure:
            return "refused" if self.refusal else "FAILED"
        return "same bits" if self.is_same else "DIFFERENT"

    @property
    def text(self) -> str:
        """The outcome as the list below the table shows it, with the reason for a refusal or a failure."""
        if self.refusal or self.failure:
            return f"refused: {self.refusal}" if self.refusal else f"failed: {self.failure}"
        if self.difference:
            return f"DIFFERENT from step {self.difference['step']}"
        return "same bits" if self.is_same else "DIFFERENT: a rank has not compared every value"

    @property
    def is_seen(self) -> bool:
        """Whether the planted fault was found in its first step, and in the kind of value where it must show."""
        fault, first = faults.FAULTS[self.cell.fault or ""], self.difference
        return first is not None and (first["step"], first["what"]) == (faults.FAULTY_STEP, fault.shows_in)

    def as_json(self) -> dict[str, Any]:
        cell = self.cell
        content = {"strategy": cell.strategy, "ranks": cell.num_ranks, "accumulation": cell.accumulation}
        if cell.fault:
            return content | {"fault": cell.fault, "seen": self.is_seen, "difference": self.difference}
        return content | {"outcome": self.text, "difference": self.difference}


def import_engines() -> None:
    """Import once what every rank needs.

    Afterwards this process still has only one thread, so it can be forked.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in IMPORTED:
            importlib.import_module(name)
        # Each rank would spend a second in it, because DeepSpeed calls it.
        cpuinfo: Any = importlib.import_module("cpuinfo")
        cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
        extensions.use_built()
    reference.expect()
    assert threading.active_count() == 1
    gc.collect()
    gc.freeze()  # otherwise, garbage collection in a rank would copy the memory of everything that was imported


def run(cells: Sequence[Cell]) -> Iterator[Outcome]:
    """Train cells, and yield the outcome of each cell as it ends.

    Cells are trained at the same time as long as there is a processor for each of their ranks.
    """
    waiting, active = list(enumerate(cells)), list[_Active]()
    try:
        while waiting or active:
            while waiting and _fits(waiting[0][1], active):
                number, cell = waiting.pop(0)
                if refusal := cell.refusal:
                    yield Outcome(cell, refusal=refusal, number=number)
                else:
                    active.append(_Active(cell, number))
            for active_cell in [active_cell for active_cell in active if active_cell.is_done()]:
                active.remove(active_cell)
                yield active_cell.outcome
            time.sleep(POLL_SECONDS)
    finally:
        for active_cell in active:
            active_cell.end()


def _fits(cell: Cell, active: Sequence[_Active]) -> bool:
    """Say whether there are enough processors for the ranks of one more cell.

    If no cell is in training, the answer is True. A cell with more ranks than processors is then trained by itself.
    """
    num_processors = len(this_machine.allowed_processors())
    return not active or sum(active_cell.cell.num_ranks for active_cell in active) + cell.num_ranks <= num_processors


class _Active:
    """A cell in training, with the processes of its ranks."""

    def __init__(self, cell: Cell, number: int) -> None:
        self.cell, self.outcome = cell, Outcome(cell, number=number)
        self._began = time.monotonic()
        self._scratch = tempfile.TemporaryDirectory(prefix="zero-study-", ignore_cleanup_errors=True)
        self._answers: dict[int, dict[str, Any]] = {}
        folder = Path(self._scratch.name)
        program: Callable[[], dict[str, Any]] = functools.partial(training.train, cell, folder)
        self._running = {
            rank: ranks.start(program, training.as_rank(cell, rank, folder), folder / str(rank))
            for rank in range(cell.num_ranks)
        }

    def is_done(self) -> bool:
        """Collect the answers of ranks that have ended, and say whether the training of the cell is over.

        If a rank fails or the training takes too long, the other ranks are ended.
        """
        try:
            self._answers |= ranks.ended(self._running, Path(self._scratch.name))
            if self._running and time.monotonic() - self._began > CELL_SECONDS:
                raise RunFailed(f"not done after {CELL_SECONDS} s")
        except (Refusal, RunFailed) as failed:  # a refusal that the cell did not foresee is a failure, too
            self.outcome.failure = str(failed)
        if self._running and not self.outcome.failure:
            return False
        self.outcome.answers = [answer for _, answer in sorted(self._answers.items())]
        self.end()
        return True

    def end(self) -> None:
        ranks.end(self._running)
        self._running.clear()
        self._scratch.cleanup()
