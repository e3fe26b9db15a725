"""List the trainings (cells). Each has a strategy, a number of ranks and a number of micro batches per step.

The accumulation is the number of micro batches per step.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from study.exact import faults, problem
from zero_study.strategy.file import Strategy, names, read_by_name

NUM_RANKS = (1, 2, 3, 4, 8)
ACCUMULATIONS = (1, 4)
QUICK_STRATEGIES = ("ddp", "zero1", "zero2_tuned", "zero3_tuned", "fsdp2")
QUICK_RANKS = (2, 3)
FAULTY_STRATEGIES = ("ddp", "zero2", "zero3", "fsdp2")


@dataclass(frozen=True)
class Cell:
    """One training: its strategy, its ranks, its micro batches per step, and an injected fault or None."""

    strategy: str
    num_ranks: int
    accumulation: int
    fault: str | None = None

    @property
    def name(self) -> str:
        return "/".join([self.strategy, str(self.num_ranks), str(self.accumulation), *filter(None, [self.fault])])

    @property
    def micro_batch_size(self) -> int:
        return problem.BATCH_SIZE // (self.num_ranks * self.accumulation)

    def sequences(self, step: int, rank: int, number: int) -> list[problem.Sequence]:
        """Return the sequences in one micro batch of a rank. `number` counts the micro batches of the step from 0."""
        part = number * self.num_ranks + rank
        return problem.batch(step)[part * self.micro_batch_size : (part + 1) * self.micro_batch_size]

    @cached_property
    def strategy_file(self) -> Strategy:
        return strategy_for(self.strategy, self.num_ranks)

    @property
    def refusal(self) -> str | None:
        """The reason why this training is not possible. None if it is possible."""
        shipped = read_by_name(self.strategy)
        copies = shipped.secondary_partition_size
        if shipped.distributed_type == "NO" and self.num_ranks > 1:
            return "the strategy is for one process"
        if copies > 1 and self.num_ranks % copies:
            return f"the strategy shards its second copy of the parameters over groups of {copies} ranks"
        if shipped.mesh and not shipped.could_run(self.num_ranks):
            return f"the strategy has {shipped.mesh[0]} replicas of at least 2 shards each"
        if shipped.distributed_type == "FSDP" and shipped.offload_param_device != "none":
            return "FSDP2 offloads from a GPU to the host, and PyTorch refuses it where there is no GPU"
        if shipped.offloads_to_nvme:
            return "DeepSpeed swaps no tensor below 1 MiB, and this model has 4 KiB: nothing would reach the disk"
        return None


@cache
def strategy_for(name: str, num_ranks: int) -> Strategy:
    """Return one of the project's strategies, adapted to this number of ranks.

    If its mesh has another number of ranks, the number of shards in each replica is changed.
    """
    shipped = read_by_name(name)
    if shipped.mesh is None or math.prod(shipped.mesh) == num_ranks or not shipped.could_run(num_ranks):
        return shipped
    content = copy.deepcopy(shipped.content)
    content["parallelism_config"]["parallelism_config_dp_shard_size"] = num_ranks // shipped.mesh[0]
    return dataclasses.replace(shipped, content=content)


def plain_cells(
    quick: bool = False, strategies: Sequence[str] | None = None, num_ranks: Sequence[int] | None = None
) -> list[Cell]:
    """Return the trainings without an injected fault, for these strategies and numbers of ranks.

    Trainings that are not possible are included. None stands for all strategies or all numbers of ranks. If `quick` is
    True, it stands for the small selection of --quick.
    """
    strategies = strategies or (QUICK_STRATEGIES if quick else names())
    num_ranks = num_ranks or (QUICK_RANKS if quick else NUM_RANKS)
    return [Cell(name, number, steps) for number in num_ranks for name in strategies for steps in ACCUMULATIONS]


def with_faults(chosen: Iterable[str], strategies: Sequence[str] | None = None) -> list[Cell]:
    """Return the trainings on two ranks into which one of these faults is injected.

    If `strategies` is None, they are FAULTY_STRATEGIES.
    """
    return [
        Cell(name, 2, faults.FAULTS[fault].accumulation, fault)
        for fault in chosen
        for name in strategies or FAULTY_STRATEGIES
    ]
