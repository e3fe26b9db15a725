"""Find where ranks would wait for each other forever, by comparing their collectives in the groups that they share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, zip_longest

from study.dryrun.tracker import Call

POINT_TO_POINT = ("send", "recv", "recv_any_source")  # are not compared: any order that pairs them will do
UNEQUAL = ("gather", "scatter", "all_to_all")  # of which each rank holds another part


@dataclass(frozen=True)
class Mismatch:
    """The first call that one of two ranks makes and the other does not make with it."""

    ranks: tuple[int, int]
    number: int  # of the call among those of groups that both ranks are in, from 1
    calls: tuple[Call | None, Call | None]  # of each rank; None: it makes no more
    before: Call | None  # the last call that matched


def first_mismatches(calls: Mapping[int, Sequence[Call]], by_module: bool = True) -> list[Mismatch]:
    """Find the first call that does not match, for each pair of ranks that has one; empty: all calls match.

    `by_module`: calls of different modules do not match. Switch it off for ranks that have exchanged real values: under
    DDP's `join` a rank that has no more batches answers for the modules of another one.
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
    """Return the properties of a call in which ranks must agree.

    Objects are sent as bytes, whose size the ranks agree upon in an earlier exchange.

    The module distinguishes calls of the same size, which would pair by chance and hang later.
    """
    size = None if call.dtype in ("uint8", "int8") else call.num_bytes
    return call.kind, call.ranks, () if call.kind in UNEQUAL else (call.dtype, size), call.module if by_module else ""
