"""How many bytes does each machine send to the others, by the algorithm of the backend that ranks talk through?

Collectives are counted as engines ask for them. gloo has no reduce-scatter of its own (torch 2.13, ProcessGroupGloo):
it takes an all-reduce of all and drops what is not its own, and so sends twice what NCCL sends.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, Protocol

from study.theory.case import Engine

Backend = Literal["gloo", "nccl"]

# How often a ring over n ranks takes (n - 1) / n of the tensor past each of them: reduce, then gather (gloo's
# allreduce.cc and allgather.cc; NCCL's rings are the same). A broadcast passes it on once.
_PASSES: dict[Backend, dict[str, int]] = {
    "gloo": {"all_reduce": 2, "reduce_scatter": 2, "all_gather": 1, "broadcast": 1},
    "nccl": {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1, "broadcast": 1},
}


class OneKind(Protocol):
    """A kind of collective, counted or expected."""

    @property
    def kind(self) -> str: ...  # subgroup_ before it: among some of the ranks only

    @property
    def bytes(self) -> Any: ...  # of the whole tensor


def is_known(collectives: Iterable[OneKind]) -> bool:
    """Whether all are of kinds whose algorithm is told here; a reduce to one rank is not."""
    return all(each.kind.removeprefix("subgroup_") in _PASSES["gloo"] for each in collectives)


def sent_bytes(collectives: Iterable[OneKind], engine: Engine, num_machines: int, backend: Backend) -> float:
    """Bytes that a machine sends to others for what one rank of it asks in a step, mean over the machines.

    Ranks are in order on the machines, as many on each. Payload alone: headers come on top.
    """
    ranks_each = engine.world_size // num_machines
    sent = [
        _passes(each.kind, backend) * each.bytes * _crossings(_groups(each.kind, engine), ranks_each)
        for each in collectives
    ]
    return float(sum(sent)) / num_machines


def _passes(kind: str, backend: Backend) -> int:
    return _PASSES[backend][kind.removeprefix("subgroup_")]


def _groups(kind: str, engine: Engine) -> list[range]:
    """The groups of ranks in which a kind of collective runs at the same time."""
    ranks = range(engine.world_size)
    if not kind.startswith("subgroup_"):
        return [ranks]
    size = engine.world_size // engine.replicas if engine.replicas > 1 else engine.secondary_partition_size
    if kind == "subgroup_all_reduce":  # of a shard, over its replicas
        return [ranks[first::size] for first in range(size)]
    return [ranks[first : first + size] for first in range(0, len(ranks), size)]


def _crossings(groups: Iterable[range], ranks_each: int) -> float:
    """Of a tensor, how much passes from machine to machine in one pass of rings over these groups."""
    return sum(
        (len(group) - 1) / len(group)
        for group in groups
        for place, rank in enumerate(group)
        if rank // ranks_each != group[place - 1] // ranks_each
    )
