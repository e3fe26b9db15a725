"""The results of a dry run as tables and sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tabulate import tabulate

from study.dryrun.deadlock import Mismatch
from study.dryrun.tracker import Call

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


def memory(ranks: Mapping[int, Mapping[str, Any]]) -> str:
    """Tabulate the memory of each rank in its third step, and what the dry run itself took."""
    rows = [["of a step", *(f"rank {rank}" for rank in ranks)]]
    for key in STATES:
        rows.append([key.replace("_", " "), *(_gib(answer["states"][key]) for answer in ranks.values())])
    rows.append(["between steps, all tensors", *(_gib(answer["before_bytes"]) for answer in ranks.values())])
    rows.append(["peak of a step, all tensors", *(_gib(answer["peak_bytes"]) for answer in ranks.values())])
    for key, mode in RESERVED.items() if all(answer["reserved_bytes"] for answer in ranks.values()) else ():
        reserved = (_gib(answer["reserved_bytes"][key]) for answer in ranks.values())
        rows.append([f"reserved by CUDA's allocator{mode}", *reserved])
    rows.append(["seconds here", *(f"{answer['seconds']:.0f}" for answer in ranks.values())])
    rows.append(["this machine's memory", *(_gib(answer["resident_bytes"]) for answer in ranks.values())])
    return str(tabulate(rows, headers="firstrow", stralign="right", colalign=("left",)))


def communication(calls: Sequence[Call], world_size: int) -> str:
    """Tabulate the collectives of one rank's step by kind, group and type, in the order of their first calls."""
    if not calls:
        return "No collectives."
    counts: Counter[tuple[str, int, str]] = Counter()
    num_bytes: Counter[tuple[str, int, str]] = Counter()
    for call in calls:
        key = call.kind, len(call.ranks) or world_size, call.dtype
        counts[key] += 1
        num_bytes[key] += call.num_bytes
    rows = [[*key, count, _gib(num_bytes[key])] for key, count in counts.items()]
    return str(tabulate(rows, headers=["collectives", "ranks", "type", "calls", "whole tensors"]))


def mismatches(found: Sequence[Mismatch], ranks: Sequence[int], are_all_there: bool) -> Iterator[str]:
    """Say where ranks would wait for each other for ever, or that they do not."""
    if len(ranks) > 1 and not found:
        if are_all_there:
            yield f"The {len(ranks)} ranks make the same calls in the same order, by kind, size and type."
        else:
            yield f"Ranks {', '.join(map(str, ranks))} make the same calls in the same order."
    for mismatch in found:
        yield (
            f"HANG: ranks {mismatch.ranks[0]} and {mismatch.ranks[1]} part at their collective {mismatch.number}"
            + (f", after {_call(mismatch.before)}" if mismatch.before else "")
        )
        for rank, call in zip(mismatch.ranks, mismatch.calls, strict=True):
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
    endings = {rank: f"raised {answer['raised']}" for rank, answer in ranks.items() if answer.get("raised")}
    endings |= {rank: str(answer["ended"]) for rank, answer in ranks.items() if answer.get("ended")}
    own = {rank: reason for rank, reason in endings.items() if not any(ended in reason for ended in ENDED)}
    return [f"rank {rank} {reason}" for rank, reason in (own if own or is_explained else endings).items()]


def _call(call: Call) -> str:
    place = [f"in {call.module}" if call.module else "", call.line]
    return " ".join(filter(None, [call.kind, f"of {_bytes(call.num_bytes)} {call.dtype}".rstrip(), *place]))


def _bytes(number: int) -> str:
    return f"{number:,} bytes" if number < 1 << 20 else f"{number / 2**20:.1f} MiB"


def _gib(number: int) -> str:
    return f"{number / 2**30:.3f} GiB"
