"""Format the results of a dry run as tables and sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from zero_study import terminal
from zero_study.dryrun import chosen
from zero_study.dryrun.deadlock import LostMessage, Mismatch
from zero_study.dryrun.tracker import Call

STATES = ("parameters", "gradients", "optimizer_states", "communication_buffers")
RESERVED = {"default": "", "expandable_segments": ", expandable_segments"}
TRACED = (
    "The engine's own code ran in a simulated process group, in which ranks do not receive values of other ranks. GPU "
    "kernels, the CUDA context and NCCL are not included."
)
REAL = "All ranks ran and exchanged real values over gloo. GPU kernels, the CUDA context and NCCL are not included."
_WITH_SOURCE = ("broadcast", "scatter", "recv")
ENDED = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Is there a distributed collective mismatch",
)  # gloo's messages about a rank that has ended, or that makes a different call


def memory(ranks: Mapping[int, Mapping[str, Any]]) -> str:
    """Return a table of each rank's memory in its third step, and of the dry run's own time and memory."""
    head, rows = ["memory in step 3", *(f"rank {rank}" for rank in ranks)], []
    for key in STATES:
        rows.append([key.replace("_", " "), *(_gib(answer["states"][key]) for answer in ranks.values())])
    rows.append(["all tensors, between steps", *(_gib(answer["before_bytes"]) for answer in ranks.values())])
    rows.append(["all tensors, peak of the step", *(_gib(answer["peak_bytes"]) for answer in ranks.values())])
    for key, mode in RESERVED.items() if all(answer["reserved_bytes"] for answer in ranks.values()) else ():
        reserved = (_gib(answer["reserved_bytes"][key]) for answer in ranks.values())
        rows.append([f"reserved by CUDA's allocator{mode}", *reserved])
    rows.append(["seconds of this dry run", *(f"{answer['seconds']:.0f}" for answer in ranks.values())])
    rows.append(["memory of this machine", *(_gib(answer["resident_bytes"]) for answer in ranks.values())])
    return "\n".join(terminal.table(head, rows, sides="<" + ">" * len(ranks), has_ruler=True))


def communication(calls: Sequence[Call], world_size: int) -> str:
    """Return a table of the collectives in one rank's step, by kind, number of ranks and data type.

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
    head = ["collective in a step", "ranks", "type", "calls", "size of full tensors"]
    return "\n".join(terminal.table(head, rows, sides="<><><", has_ruler=True))


def no_hang(ranks: Sequence[int], world_size: int) -> str:
    """Return a sentence which says that these ranks make the same calls, so that none waits forever."""
    if len(ranks) == world_size:
        return (
            f"No hang: the {len(ranks)} ranks make the same calls in the same order. The comparison "
            "covers the kind, size, type, source and operation of each call."
        )
    return f"No hang among {chosen.in_words(ranks)} of {world_size:,}: they make the same calls in the same order."


def mismatches(first_mismatches: Sequence[Mismatch]) -> Iterator[str]:
    """Yield sentences that say where ranks would wait for each other forever or reduce wrongly."""
    for mismatch in first_mismatches:
        first, second = mismatch.ranks
        difference = f"ranks {first} and {second} make different calls"
        if mismatch.is_only_operation:
            difference = f"ranks {first} and {second} reduce with different operations"
        yield (
            f"{'WRONG VALUES' if mismatch.is_only_operation else 'HANG'}: {difference} at their "
            f"collective number {mismatch.number}" + (f", after {_call(mismatch.before)}." if mismatch.before else ".")
        )
        for rank, call in zip(mismatch.ranks, mismatch.calls, strict=True):
            yield f"  rank {rank}: {_call(call, mismatch.calls) if call else 'no further call'}"


def lost_messages(messages: Sequence[LostMessage]) -> Iterator[str]:
    """Yield sentences about messages that are sent and not received, or received and not sent."""
    for lost in messages:
        sent, received = (terminal.count(number, "message") for number in (lost.num_sent, lost.num_received))
        if lost.num_sent == lost.num_received:
            yield f"HANG: rank {lost.sender} sends messages of different sizes than rank {lost.receiver} expects."
        else:
            yield f"HANG: rank {lost.sender} sends {sent} to rank {lost.receiver}, which expects {received}."
        yield f"  for instance {_call(lost.call)}"


def waiting(ranks: Mapping[int, Sequence[Call]]) -> Iterator[str]:
    """Yield a sentence for each rank that waited until it was ended, with the call in which it waited."""
    if ranks:
        yield f"HANG: rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} waited until the dry run ended them."
    for rank, calls in ranks.items():
        yield f"  rank {rank}: {_call(calls[-1]) if calls else 'no call yet'}"


def failures(ranks: Mapping[int, Mapping[str, Any]]) -> dict[int, str]:
    """Return a text for each rank that raised an error or did not finish, by rank."""
    endings = {rank: f"raised {answer['raised']}" for rank, answer in ranks.items() if answer.get("raised")}
    return endings | {rank: str(answer["ended"]) for rank, answer in ranks.items() if answer.get("ended")}


def own_failures(failures: Mapping[int, str]) -> dict[int, str]:
    """Return the texts of the ranks that failed by themselves, and not because another rank ended."""
    return {rank: reason for rank, reason in failures.items() if not any(ended in reason for ended in ENDED)}


def indented(lines: Sequence[str]) -> list[str]:
    """Wrap lines to the terminal's width. Lines that begin with spaces stay indented."""
    return [terminal.wrap(line.strip(), " " * (len(line) - len(line.lstrip())), "    ") for line in lines]


def _call(call: Call, pair: Sequence[Call | None] = ()) -> str:
    """Return a text that describes a call. Its source and its operation are shown if the calls in `pair` differ."""
    peers, operations = ({getattr(member, name) for member in pair if member} for name in ("peer", "operation"))
    details = [f"with operation {call.operation}" if len(operations) > 1 else ""]
    if len(peers) > 1 and call.peer is not None:
        details.append(f"with rank {call.peer} as its {'source' if call.kind in _WITH_SOURCE else 'destination'}")
    place = [*details, f"in {call.module}" if call.module else "", call.line]
    size = f"{call.num_bytes:,} bytes" if call.num_bytes < 1 << 20 else f"{call.num_bytes / 2**20:.1f} MiB"
    return " ".join(filter(None, [call.kind, f"of {size} {call.dtype}".rstrip(), *place]))


def _gib(number: int) -> str:
    return f"{number / 2**30:.3f} GiB"
