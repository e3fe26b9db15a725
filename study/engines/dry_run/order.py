"""Would these ranks wait for each other for ever? Their collectives, call by call, in each group that they share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, zip_longest

from .watch import Call

BETWEEN_TWO = ("send", "recv", "recv_any_source")  # which are not compared: any order that pairs them will do
UNEQUAL = ("gather", "scatter", "all_to_all")  # of which each rank holds another part


@dataclass(frozen=True)
class Parting:
    """Where two ranks part: the first call that one makes, and the other does not make with it."""

    ranks: tuple[int, int]
    number: int  # of the call among those that both are in, from 1
    calls: tuple[Call | None, Call | None]  # None: that rank makes no more
    before: Call | None  # the last that both made


def partings(calls: Mapping[int, Sequence[Call]], by_module: bool = True) -> list[Parting]:
    """The first call in which ranks part, for each pair that does; none: they meet in every call.

    `by_module`: calls of different modules do not meet. Of ranks that have exchanged what is real it is known whether
    calls met: under DDP's `join` a rank that has no more batches answers for the modules of another one.
    """
    found = []
    for first, second in combinations(sorted(calls), 2):
        parted = _parting((first, second), calls[first], calls[second], by_module)
        found += [parted] if parted else []
    return found


def _parting(ranks: tuple[int, int], first: Sequence[Call], second: Sequence[Call], by_module: bool) -> Parting | None:
    def is_shared(call: Call) -> bool:
        return call.kind not in BETWEEN_TWO and (not call.ranks or {*ranks} <= {*call.ranks})

    before = None
    for number, (one, other) in enumerate(zip_longest(filter(is_shared, first), filter(is_shared, second)), 1):
        if one is None or other is None or _met(one, by_module) != _met(other, by_module):
            return Parting(ranks, number, (one, other), before)
        before = one
    return None


def _met(call: Call, by_module: bool) -> tuple[object, ...]:
    """What ranks have to agree upon. Of objects, which are sent as bytes, the size is agreed upon by an exchange.

    The module tells calls of one size apart, which would pair by chance and hang later.
    """
    size = None if call.dtype in ("uint8", "int8") else call.num_bytes
    return call.kind, call.ranks, () if call.kind in UNEQUAL else (call.dtype, size), call.module if by_module else ""
