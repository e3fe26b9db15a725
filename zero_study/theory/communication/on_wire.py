"""Predict the bytes that gloo and NCCL really send for a collective, and how many of them pass between machines.

All other modules count collectives as engines request them. In torch 2.13 (ProcessGroupGloo) and gloo, a reduce-scatter
is an all-reduce of the whole tensor. A reduce to one rank is a reduce-scatter, followed by a gather on that rank. A
broadcast follows a binomial tree. NCCL's rings send each tensor once, and twice for an all-reduce.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal, Protocol

from zero_study.theory.engine import Engine

Backend = Literal["gloo", "nccl"]

# How often (n - 1) / n of the tensor pass each of the n ranks of a ring. An all-reduce is a reduction followed by a
# gather (gloo's allreduce.cc and allgather.cc).
_PASSES: dict[Backend, dict[str, int]] = {
    "gloo": {"all_reduce": 2, "reduce_scatter": 2, "all_gather": 1, "broadcast": 1, "reduce": 1},
    "nccl": {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1, "broadcast": 1, "reduce": 1},
}
_SEGMENT_BYTES = 1 << 20  # largest segment of gloo's rings


class OneKind(Protocol):
    """The calls of one kind of collective, measured or expected."""

    @property
    def kind(self) -> str: ...  # begins with subgroup_ if only some of the ranks take part

    @property
    def count(self) -> Any: ...

    @property
    def bytes(self) -> Any: ...  # sum over the whole tensors


def is_known(collectives: Iterable[OneKind]) -> bool:
    """Return whether this module knows the algorithms of all these collectives."""
    return all(collective.kind.removeprefix("subgroup_") in _PASSES["gloo"] for collective in collectives)


def moved_by_gloo(collectives: Iterable[OneKind], world_size: int) -> float:
    """Return the bytes that a rank sends with gloo. The factor (n - 1) / n of a ring is omitted, as in `moved_bytes`.

    Collectives with an unknown algorithm are counted as if they sent their bytes once.
    """
    moved = 0.0
    for collective in collectives:
        kind = collective.kind.removeprefix("subgroup_")
        moved += _PASSES["gloo"].get(kind, 1) * collective.bytes
        if kind == "reduce" and world_size > 1:
            ring = world_size / (world_size - 1)
            moved += (_of_reduce(collective, world_size) * ring - 1 + 1 / world_size) * collective.bytes
    return moved


def sent_bytes(collectives: Sequence[OneKind], engine: Engine, num_machines: int, backend: Backend) -> float:
    """Return the bytes per step that a machine sends to other machines, averaged over machines.

    `collectives` are those of one rank in a step. Ranks are in order on the machines, with the same number on each.
    Only payload is counted, without headers.
    """
    ranks_per_machine = engine.world_size // num_machines
    sent = []
    for collective in collectives:
        kind = collective.kind.removeprefix("subgroup_")
        groups = _groups(collective.kind, engine)
        if backend == "gloo" and kind == "broadcast":
            sent.append(collective.bytes * _tree_crossings(engine.world_size, ranks_per_machine))
            continue
        passed = _PASSES[backend][kind] * collective.bytes * _crossings(groups, ranks_per_machine)
        if backend == "gloo" and kind == "reduce":
            world = engine.world_size
            passed *= _of_reduce(collective, world) * world / (world - 1)
            # The destination rank then gathers the parts from the other machines.
            passed += collective.bytes * (world - ranks_per_machine) / world
        sent.append(passed)
    return float(sum(sent)) / num_machines


def _of_reduce(reduces: OneKind, world_size: int) -> float:
    """Return the share of a tensor that each rank sends in gloo's ring reduce (reduce.cc).

    The share is larger than necessary. The ring stops two segments before all segments are sent, while gloo's
    all-reduce stops when a rank has its own segment. All calls are assumed to have equal sizes, because a record has
    only the sum of their sizes.
    """
    size = reduces.bytes / max(1, reduces.count)
    segment = min(math.ceil(size / (2 * world_size)), _SEGMENT_BYTES) or 1
    least = max(math.ceil(size / segment), 2 * world_size)
    segments = world_size * math.ceil(least / world_size)
    return 1.0 - 2 / int(segments)


def _groups(kind: str, engine: Engine) -> list[range]:
    """Return the groups of ranks in which a kind of collective runs at the same time."""
    ranks = range(engine.world_size)
    if not kind.startswith("subgroup_"):
        return [ranks]
    size = engine.world_size // engine.replicas if engine.replicas > 1 else engine.secondary_partition_size
    if kind == "subgroup_all_reduce":  # between the replicas of a shard
        return [ranks[first::size] for first in range(size)]
    return [ranks[first : first + size] for first in range(0, len(ranks), size)]


def _crossings(groups: Iterable[range], ranks_per_machine: int) -> float:
    """Return the share of a tensor that passes between machines in one pass of rings, summed over these groups."""
    return sum(
        (len(group) - 1) / len(group)
        for group in groups
        for place, rank in enumerate(group)
        if rank // ranks_per_machine != group[place - 1] // ranks_per_machine
    )


def _tree_crossings(world_size: int, ranks_per_machine: int) -> int:
    """Return how often a tensor passes between machines in gloo's broadcast tree from rank 0 (broadcast.cc)."""
    above = {rank: rank - (1 << (rank.bit_length() - 1)) for rank in range(1, world_size)}
    return sum(rank // ranks_per_machine != parent // ranks_per_machine for rank, parent in above.items())
