"""What the ranks of a dry run held and sent, in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tabulate import tabulate

from study.engines.dry_run.order import Parting
from study.engines.dry_run.watch import Call

STATES = ("parameters", "gradients", "optimizer_states", "communication_buffers")
RESERVED = {"default": "", "expandable_segments": ", expandable_segments"}
TRACED = "Traced: the engine's own code on a group that is pretended; a GPU's kernels, context and NCCL are not in it."


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


def order(partings: Sequence[Parting], ranks: Sequence[int]) -> Iterator[str]:
    """Say where ranks would wait for each other for ever, or that they do not."""
    if len(ranks) > 1 and not partings:
        yield f"Ranks {', '.join(map(str, ranks))} make the same calls in the same order."
    for parting in partings:
        yield (
            f"HANG: ranks {parting.ranks[0]} and {parting.ranks[1]} part at their collective {parting.number}"
            + (f", after {_call(parting.before)}" if parting.before else "")
        )
        for rank, call in zip(parting.ranks, parting.calls, strict=True):
            yield f"  rank {rank}: {_call(call) if call else 'makes no more calls'}"


def _call(call: Call) -> str:
    where = [f"in {call.module}" if call.module else "", call.line]
    return " ".join(filter(None, [call.kind, f"of {_bytes(call.num_bytes)} {call.dtype}".rstrip(), *where]))


def _bytes(number: int) -> str:
    return f"{number:,} bytes" if number < 1 << 20 else f"{number / 2**20:.1f} MiB"


def _gib(number: int) -> str:
    return f"{number / 2**30:.3f} GiB"
