"""Format the results of a dry run as tables and sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tabulate import tabulate

from study import terminal
from study.dryrun.deadlock import Mismatch
from study.dryrun.tracker import Call

STATES = ("parameters", "gradients", "optimizer_states", "communication_buffers")
RESERVED = {"default": "", "expandable_segments": ", expandable_segments"}
TRACED = (
    "The engine's own code ran in a simulated process group, in which no rank receives the values of another rank. GPU "
    "kernels, the CUDA context and NCCL are not included."
)
REAL = "All ranks ran and exchanged real values over gloo. GPU kernels, the CUDA context and NCCL are not included."
ENDED = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Is there a distributed collective mismatch",
)  # gloo's messages about a rank that has ended, or that makes a different call


def memory(ranks: Mapping[int, Mapping[str, Any]]) -> str:
    """Return a table of each rank's memory in its third step, and of the time and memory of the dry run itself."""
    rows = [["memory in step 3", *(f"rank {rank}" for rank in ranks)]]
    for key in STATES:
        rows.append([key.replace("_", " "), *(_gib(answer["states"][key]) for answer in ranks.values())])
    rows.append(["all tensors, between steps", *(_gib(answer["before_bytes"]) for answer in ranks.values())])
    rows.append(["all tensors, peak of the step", *(_gib(answer["peak_bytes"]) for answer in ranks.values())])
    for key, mode in RESERVED.items() if all(answer["reserved_bytes"] for answer in ranks.values()) else ():
        reserved = (_gib(answer["reserved_bytes"][key]) for answer in ranks.values())
        rows.append([f"reserved by CUDA's allocator{mode}", *reserved])
    rows.append(["seconds of this dry run", *(f"{answer['seconds']:.0f}" for answer in ranks.values())])
    rows.append(["memory of this machine", *(_gib(answer["resident_bytes"]) for answer in ranks.values())])
    return str(tabulate(rows, headers="firstrow", stralign="right", colalign=("left",)))


def communication(calls: Sequence[Call], world_size: int) -> str:
    """Return a table of the collectives in one rank's step, by kind, number of ranks and type.

    The rows are in the order of the first calls.
    """
    if not calls:
        return "The step has no collectives."
    counts: Counter[tuple[str, int, str]] = Counter()
    num_bytes: Counter[tuple[str, int, str]] = Counter()
    for call in calls:
        key = call.kind, len(call.ranks) or world_size, call.dtype
        counts[key] += 1
        num_bytes[key] += call.num_bytes
    rows = [[*key, count, _gib(num_bytes[key])] for key, count in counts.items()]
    return str(tabulate(rows, headers=["collective in a step", "ranks", "type", "calls", "size of full tensors"]))


def mismatches(first_mismatches: Sequence[Mismatch], ranks: Sequence[int], are_all_there: bool) -> Iterator[str]:
    """Yield sentences on where ranks would wait for each other forever, or that they would not."""
    if len(ranks) > 1 and not first_mismatches:
        if are_all_there:
            yield f"No hang: the {len(ranks)} ranks make the same calls in the same order, by kind, size and type."
        else:
            yield f"No hang: ranks {', '.join(map(str, ranks))} make the same calls in the same order."
    for mismatch in first_mismatches:
        yield (
            f"HANG: ranks {mismatch.ranks[0]} and {mismatch.ranks[1]} make different calls at their collective number "
            f"{mismatch.number}" + (f", after {_call(mismatch.before)}." if mismatch.before else ".")
        )
        for rank, call in zip(mismatch.ranks, mismatch.calls, strict=True):
            yield f"  rank {rank}: {_call(call) if call else 'no further call'}"


def waiting(ranks: Mapping[int, Sequence[Call]]) -> Iterator[str]:
    """Yield sentences on the ranks that waited until they were ended, and on the call that each was in."""
    if ranks:
        yield f"HANG: rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} waited until the dry run ended them."
    for rank, calls in ranks.items():
        yield f"  rank {rank}: {_call(calls[-1]) if calls else 'no call yet'}"


def raised(ranks: Mapping[int, Mapping[str, Any]], is_explained: bool) -> list[str]:
    """Return a sentence for each rank that raised an error or did not finish.

    An error that only follows from the end of another rank is left out if any rank has an error of its own, or if
    `is_explained` is True.
    """
    endings = {rank: f"raised {answer['raised']}" for rank, answer in ranks.items() if answer.get("raised")}
    endings |= {rank: str(answer["ended"]) for rank, answer in ranks.items() if answer.get("ended")}
    own = {rank: reason for rank, reason in endings.items() if not any(ended in reason for ended in ENDED)}
    return [f"rank {rank} {reason}" for rank, reason in (own if own or is_explained else endings).items()]


def indented(lines: Sequence[str]) -> list[str]:
    """Wrap lines to the terminal's width. Lines that begin with spaces stay indented."""
    return [terminal.wrapped(line.strip(), " " * (len(line) - len(line.lstrip())), "    ") for line in lines]


def _call(call: Call) -> str:
    place = [f"in {call.module}" if call.module else "", call.line]
    return " ".join(filter(None, [call.kind, f"of {_bytes(call.num_bytes)} {call.dtype}".rstrip(), *place]))


def _bytes(number: int) -> str:
    return f"{number:,} bytes" if number < 1 << 20 else f"{number / 2**20:.1f} MiB"


def _gib(number: int) -> str:
    return f"{number / 2**30:.3f} GiB"
