"""What the ranks of a dry run held and sent, in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tabulate import tabulate

from .order import Parting
from .watch import Call

STATES = ("parameters", "gradients", "optimizer_states", "communication_buffers")
RESERVED = {"default": "", "expandable_segments": ", expandable_segments"}
TRACED = """\
Traced: the engine's own code on a group that is pretended, where no rank gets another one's values; a GPU's kernels,
context and NCCL are not in it."""
REAL = "All ranks are here and exchange real values, over gloo; a GPU's kernels, context and NCCL are not in it."
ENDED = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Is there a distributed collective mismatch",
)  # what gloo says of a rank that is gone, or that makes another call


def held(ranks: Mapping[int, Mapping[str, Any]]) -> str:
    """Bytes of each rank, in its third step, and what they took to find."""
    rows = [["of a step", *(f"rank {rank}" for rank in ranks)]]
    for key in STATES:
        rows.append([key.replace("_", " "), *(_gib(said["states"][key]) for said in ranks.values())])
    rows.append(["between steps, all tensors", *(_gib(said["before_bytes"]) for said in ranks.values())])
    rows.append(["peak of a step, all tensors", *(_gib(said["peak_bytes"]) for said in ranks.values())])
    for key, how in RESERVED.items() if all(said["reserved_bytes"] for said in ranks.values()) else ():
        reserved = (_gib(said["reserved_bytes"][key]) for said in ranks.values())
        rows.append([f"reserved by CUDA's allocator{how}", *reserved])
    rows.append(["seconds here", *(f"{said['seconds']:.0f}" for said in ranks.values())])
    rows.append(["this machine's memory", *(_gib(said["resident_bytes"]) for said in ranks.values())])
    return str(tabulate(rows, headers="firstrow", stralign="right", colalign=("left",)))


def sent(calls: Sequence[Call], world_size: int) -> str:
    """The collectives of a step of one rank, by kind and group, in the order in which the first of each came."""
    counts: Counter[tuple[str, int, str]] = Counter()
    num_bytes: Counter[tuple[str, int, str]] = Counter()
    for call in calls:
        alike = call.kind, len(call.ranks) or world_size, call.dtype
        counts[alike] += 1
        num_bytes[alike] += call.num_bytes
    rows = [[*alike, count, _gib(num_bytes[alike])] for alike, count in counts.items()]
    return str(tabulate(rows, headers=["collectives", "ranks", "type", "calls", "whole tensors"]))


def order(partings: Sequence[Parting], ranks: Sequence[int], are_all_there: bool) -> Iterator[str]:
    """Say where ranks would wait for each other for ever, or that they do not."""
    if len(ranks) > 1 and not partings:
        if are_all_there:
            yield f"The {len(ranks)} ranks make the same calls in the same order, by kind, size and type."
        else:
            yield f"Ranks {', '.join(map(str, ranks))} make the same calls in the same order."
    for parting in partings:
        yield (
            f"HANG: ranks {parting.ranks[0]} and {parting.ranks[1]} part at their collective {parting.number}"
            + (f", after {_call(parting.before)}" if parting.before else "")
        )
        for rank, call in zip(parting.ranks, parting.calls, strict=True):
            yield f"  rank {rank}: {_call(call) if call else 'makes no more calls'}"


def waiting(ranks: Mapping[int, Sequence[Call]]) -> Iterator[str]:
    """Say which ranks had to be ended, because they waited for each other, and in which call each of them was."""
    if ranks:
        yield f"HANG: rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} waited until they were ended"
    for rank, calls in ranks.items():
        yield f"  rank {rank}: {_call(calls[-1]) if calls else 'has made no call'}"


def raised(ranks: Mapping[int, Mapping[str, Any]], is_explained: bool) -> list[str]:
    """Say what ranks raised, and how those ended that did not come to their end.

    What the end of another rank made one raise is left out if that one says why, or if it `is_explained`.
    """
    found = {rank: f"raised {said['raised']}" for rank, said in ranks.items() if said.get("raised")}
    found |= {rank: str(said["ended"]) for rank, said in ranks.items() if said.get("ended")}
    own = {rank: why for rank, why in found.items() if not any(ended in why for ended in ENDED)}
    return [f"rank {rank} {why}" for rank, why in (own if own or is_explained else found).items()]


def _call(call: Call) -> str:
    where = [f"in {call.module}" if call.module else "", call.line]
    return " ".join(filter(None, [call.kind, f"of {_bytes(call.num_bytes)} {call.dtype}".rstrip(), *where]))


def _bytes(number: int) -> str:
    return f"{number:,} bytes" if number < 1 << 20 else f"{number / 2**20:.1f} MiB"


def _gib(number: int) -> str:
    return f"{number / 2**30:.3f} GiB"
