"""Find where ranks would wait for each other forever, by comparing their collectives in shared groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, zip_longest

from study.dryrun.tracker import Call

# Not compared, because any order that pairs sends with receives works.
POINT_TO_POINT = ("send", "recv", "recv_any_source")
UNEQUAL = ("gather", "scatter", "all_to_all")  # the tensors of these calls may differ between ranks


@dataclass(frozen=True)
class Mismatch:
    """The first collective that does not match between two ranks."""

    ranks: tuple[int, int]
    number: int  # counts the calls in groups that both ranks are in, from 1
    calls: tuple[Call | None, Call | None]  # the call of each rank; None if the rank makes no further call
    before: Call | None  # the last call that matched


def first_mismatches(calls: Mapping[int, Sequence[Call]], by_module: bool = True) -> list[Mismatch]:
    """Return the first collective that does not match, for each pair of ranks that has one.

    The list is empty if all calls match. If `by_module` is True, calls in the forward passes of different modules do
    not match. Set it to False for ranks that have exchanged real values: under DDP's `join`, a rank that has no more
    batches issues calls for the modules of another rank.
    """
    mismatches = []
    for first, second in combinations(sorted(calls), 2):
        mismatch = _first_mismatch((first, second), calls[first], calls[second], by_module)
        mismatches += [mismatch] if mismatch else []
    return mismatches


def _first_mismatch(
    ranks: tuple[int, int], first: Sequence[Call], second: Sequence[Call], by_module: bool
) -> Mismatch | None:
    def is_shared(call: Call) -> bool:
        return call.kind not in POINT_TO_POINT and (not call.ranks or {*ranks} <= {*call.ranks})

    before = None
    pairs = zip_longest(filter(is_shared, first), filter(is_shared, second))
    for number, (call, partner) in enumerate(pairs, 1):
        if call is None or partner is None or _signature(call, by_module) != _signature(partner, by_module):
            return Mismatch(ranks, number, (call, partner), before)
        before = call
    return None


def _signature(call: Call, by_module: bool) -> tuple[object, ...]:
    """Return the properties of a call in which the ranks must agree.

    The size of a call that sends bytes is not compared, because objects are sent as bytes, and ranks agree on their
    size in an earlier call. The module distinguishes calls of the same size, which would otherwise match by chance.
    """
    size = None if call.dtype in ("uint8", "int8") else call.num_bytes
    return call.kind, call.ranks, () if call.kind in UNEQUAL else (call.dtype, size), call.module if by_module else ""
