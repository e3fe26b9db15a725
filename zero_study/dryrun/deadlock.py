"""Find where ranks would wait for each other forever, by comparing their collectives in the groups that they share."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations, zip_longest

from zero_study.dryrun.tracker import POINT_TO_POINT, Call

UNEQUAL = ("gather", "scatter", "all_to_all")  # the tensors of these calls may differ between ranks


@dataclass(frozen=True)
class Mismatch:
    """The first collective in which two ranks do not match, so that they would wait forever or reduce wrongly."""

    ranks: tuple[int, int]
    number: int  # counts the calls in groups that both ranks are in, from 1
    calls: tuple[Call | None, Call | None]  # the call of each rank; None if the rank makes no further call
    before: Call | None  # the last call that matched

    @property
    def is_only_operation(self) -> bool:
        """Whether the calls only differ in the operation of the reduction, so that values are wrong without a hang."""
        first, second = self.calls
        return (
            first is not None
            and second is not None
            and first.operation != second.operation
            and (_signature(first, False)[:-1] == _signature(second, False)[:-1])
        )


@dataclass(frozen=True)
class LostMessage:
    """Messages that one rank sends and another does not receive, or the reverse."""

    sender: int
    receiver: int
    num_sent: int
    num_received: int
    call: Call  # one of the calls


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


def follow_from(failures: Collection[int], mismatches: Iterable[Mismatch]) -> bool:
    """Return whether every mismatch is a call that a rank does not make because it failed.

    `failures` has the ranks that failed.
    """
    return all(
        any(rank in failures and call is None for rank, call in zip(mismatch.ranks, mismatch.calls, strict=True))
        for mismatch in mismatches
    )


def lost_messages(calls: Mapping[int, Sequence[Call]]) -> list[LostMessage]:
    """Return the pairs of ranks in which the sent and the received messages differ in number or in size."""
    lost = []
    for sender, receiver in permutations(sorted(calls), 2):
        sent = [call for call in calls[sender] if call.kind == "send" and call.peer == receiver]
        received = [call for call in calls[receiver] if call.kind == "recv" and call.peer == sender]
        num_without_source = sum(call.kind == "recv_any_source" for call in calls[receiver])
        is_too_few = len(received) > len(sent) or len(sent) > len(received) + num_without_source
        has_different_sizes = not num_without_source and _sizes(sent) != _sizes(received)
        if is_too_few or has_different_sizes:
            example = (received if len(received) >= len(sent) else sent)[-1]
            lost.append(LostMessage(sender, receiver, len(sent), len(received), example))
    return lost


def _sizes(calls: Iterable[Call]) -> list[int]:
    return sorted(call.num_bytes for call in calls)


def num_compared(calls: Mapping[int, Sequence[Call]]) -> tuple[int, int]:
    """Return how many collectives, and how many messages, are compared with those of another rank."""
    collectives = [
        sum(call.kind not in POINT_TO_POINT and bool((set(call.ranks) or set(calls)) & peers) for call in own)
        for own, peers in ((own, set(calls) - {rank}) for rank, own in calls.items())
    ]
    sent = [call for own in calls.values() for call in own if call.kind == "send" and call.peer in calls]
    return max(collectives, default=0), len(sent)


def num_messages_to_absent_ranks(calls: Mapping[int, Sequence[Call]]) -> int:
    """Return how many messages the simulated ranks exchange with ranks that were not run."""
    messages = (call for own in calls.values() for call in own if call.kind in ("send", "recv"))
    return sum(call.peer not in calls for call in messages)


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
    sizes = () if call.kind in UNEQUAL else (call.dtype, size)
    return call.kind, call.ranks, sizes, call.module if by_module else "", call.peer, call.operation
