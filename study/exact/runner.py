"""Run the exact trainings, each on a world of ranks (see `ranks.worlds`)."""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from study.exact import faults, problem, reference, training
from study.exact.cells import Cell
from zero_study.ranks import worlds

CELL_SECONDS = 300
# Modules that engines import only when they train; each rank would have to import them again.
IMPORTED = (
    "cpuinfo", "torch._dynamo", "torch._inductor.compile_fx", "torch.distributed.fsdp", "torch.distributed.tensor",
    "torch.distributed.algorithms.ddp_comm_hooks", "deepspeed", "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.superoffload.superoffload_stage3", "deepspeed.runtime.zero.muon.original_muon",
    "transformers.integrations.deepspeed", "study.training.accelerators",
)  # fmt: skip


@dataclass
class Outcome:
    """The outcome of one training: why it was refused, how it failed, or the results of its ranks."""

    cell: Cell
    refusal: str | None = None  # why it cannot be trained
    failure: str | None = None  # how its training failed
    answers: list[dict[str, Any]] = field(default_factory=list)  # of each rank
    number: int = 0  # the position of the cell in the list, because outcomes arrive in another order

    @property
    def difference(self) -> dict[str, Any] | None:
        """The first value that differs from the reference. None if there is none.

        If several ranks found one, the earliest step counts.
        """
        differences = [answer["difference"] for answer in self.answers if answer["difference"]]
        return min(differences, key=lambda difference: difference["step"], default=None)

    @property
    def is_same(self) -> bool:
        """Whether every rank compared every value, and all values had the bits of the reference."""
        is_complete = [answer["compared"] for answer in self.answers] == [problem.NUM_COMPARED] * self.cell.num_ranks
        return is_complete and not (self.failure or self.refusal or self.difference)

    @property
    def word(self) -> str:
        """The outcome in one or two words, for a narrow column of a table."""
        if self.refusal or self.failure:
            return "refused" if self.refusal else "FAILED"
        return "same bits" if self.is_same else "DIFFERENT"

    @property
    def text(self) -> str:
        """The outcome as text, with the reason for a refusal or a failure."""
        if self.refusal or self.failure:
            return f"refused: {self.refusal}" if self.refusal else f"failed: {self.failure}"
        if self.difference:
            return f"DIFFERENT from step {self.difference['step']}"
        return "same bits" if self.is_same else "DIFFERENT: a rank did not compare all values"

    @property
    def is_seen(self) -> bool:
        """Whether the injected fault was detected in its first step, and in a value of the kind that it must change."""
        fault, first = faults.FAULTS[self.cell.fault or ""], self.difference
        return first is not None and (first["step"], first["what"]) == (faults.FAULTY_STEP, fault.shows_in)

    def as_json(self) -> dict[str, Any]:
        cell = self.cell
        content = {"strategy": cell.strategy, "ranks": cell.num_ranks, "accumulation": cell.accumulation}
        if cell.fault:
            return content | {"fault": cell.fault, "seen": self.is_seen, "difference": self.difference}
        return content | {"outcome": self.text, "difference": self.difference}


def import_engines() -> None:
    """Import the engines once for all ranks. Afterwards, this process can still be forked.

    It still has only one thread.
    """
    reference.expect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        worlds.import_before_forks(IMPORTED)
    assert threading.active_count() == 1


def run(cells: Sequence[Cell]) -> Iterator[Outcome]:
    """Run the trainings, and yield the outcome of each as it ends."""
    trained = [(number, cell) for number, cell in enumerate(cells) if not cell.refusal]
    yield from (Outcome(cell, cell.refusal, number=number) for number, cell in enumerate(cells) if cell.refusal)
    programs = [
        worlds.World(cell.num_ranks, functools.partial(training.train, cell), CELL_SECONDS) for _, cell in trained
    ]
    for position, result in worlds.run(programs):
        number, cell = trained[position]
        yield Outcome(cell, failure=result.failure, answers=list(result.answers.values()), number=number)
