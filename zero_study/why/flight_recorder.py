"""Compare the calls of the ranks in the files of PyTorch's flight recorder. Each rank writes one.

The calls of a process group have numbers. A collective ends only after all ranks of its group have made the call with
the same number. The recordings forget old calls, so that only numbers are compared that all of them cover.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from zero_study.errors import Refusal
from zero_study.terminal import count, names, printable
from zero_study.why.fact import Fact
from zero_study.why.plain_pickle import number, place, read, refusing

ADVICE = "Leave only the files of one run in the folder, with the names that PyTorch gave them."
_RANK = re.compile(r"(\d{1,6})(?:\.\w+)*$")  # at the end of a file's name
_NUMBER = re.compile(r"\d{1,6}")
_RECEIVE = re.compile(r"recv (\d+)<-(\d+)")
# In these calls, each rank may have other sizes.
_UNEVEN = re.compile(r"all_?to_?all|coalesced|_oop|_v\b|^_?(gather|scatter)$|^(send|recv) ")


class _Call(NamedTuple):
    group: str
    ranks: tuple[int, ...]  # of the group, if they are known
    number: int | None  # None for a transfer between two ranks
    kind: str  # such as "all_reduce"
    must_agree: tuple[object, ...]
    waits: bool
    text: str  # with the sizes and the place in the code


def facts(folder: Path) -> list[Fact]:
    """Return what the recordings in a folder show: calls that differ, that a rank has not made, or that wait.

    The list is empty if no call differs or waits, and no recording is missing. Raises Refusal if there is no recording.
    """
    recordings: dict[int, list[_Call]] = {}
    complete = set()
    for path in sorted(path for path in folder.iterdir() if path.is_file()) if folder.is_dir() else [folder]:
        with refusing(path, "a recording of PyTorch's flight recorder that can be compared", ADVICE):
            content, named = read(path), _RANK.search(path.name)
            rank = number(content.get("rank", int(named[1]) if named else -1))
            if rank in recordings or rank > 999_999:
                raise ValueError(f"another file is of rank {rank}, too, or there is no such rank")
            entries, config = content["entries"], content.get("pg_config", {})
            groups = {name: tuple(map(int, _NUMBER.findall(str(each["ranks"])))) for name, each in config.items()}
            # The calls in a coalesced one are never recorded as complete, only their end is.
            ended = {_key(each) for each in entries if "coalesced" in each["profiling_name"] and not _waits(each)}
            calls = (_call(each, groups, _waits(each) and _key(each) not in ended) for each in entries)
            recordings[rank] = [call for call in calls if call]
            first = number(entries[0]["record_id"]) if entries else 0
            if entries and entries[-1]["record_id"] != first + len(entries) - 1:
                raise ValueError("some calls are missing, for instance because only active ones were recorded")
            if first == 0:
                complete.add(rank)
    if not any(recordings.values()):
        raise Refusal(f"{folder}: no calls are recorded. Set TORCH_FR_BUFFER_SIZE=2000, and run the training again.")
    found = sorted(_differences(recordings, complete), key=lambda fact: (fact.is_consequence, fact.is_open))
    members = {call.ranks for each in recordings.values() for call in each}
    missing = {*range(max(recordings))}.union(*members) - {*recordings}
    rest = f" There is no recording of {_ranks(missing)}." if missing else ""
    if not found and (missing or len(recordings) == 1):
        found = [Fact("hang/recorded-waiting", "hang", "No recorded call waits.", "", "computed")]
    return [
        replace(
            fact,
            happened=printable(fact.happened + rest),
            basis=f"the recordings of {count(len(recordings), 'rank')}",
            is_consequence=fact.is_consequence and not found[0].is_consequence,  # groups can wait for each other
        )
        for fact in found
    ]


def _key(entry: Any) -> tuple[Any, ...]:
    return entry["process_group"], entry["collective_seq_id"], entry.get("p2p_seq_id")


def _waits(entry: Any) -> bool:
    is_gloo = str(entry["profiling_name"]).startswith("gloo:")  # it leaves a call "scheduled" that is complete
    return entry["state"] != "completed" and not (is_gloo and entry.get("retired") is True)


def _call(entry: Any, groups: Mapping[str, tuple[int, ...]], waits: bool) -> _Call | None:
    """Return a call, or None for the end of coalesced transfers. Raises ValueError if it is damaged."""
    match entry:
        case {
            "profiling_name": str(full), "process_group": (str(name), str(description)),
            "collective_seq_id": int(position), "state": str(), "input_sizes": list(inputs),
        }:  # fmt: skip
            kind = full[:80].rpartition(":")[2]
            outputs = entry.get("output_sizes", [])
            elements = [sum(math.prod(map(number, size[:64])) for size in each) for each in (inputs, outputs)]
            types = sorted({*entry.get("input_dtypes", []), *entry.get("output_dtypes", [])})
            text = f"{kind} of {names([*map(str, inputs or outputs)])[:80]} {names(types)[:80]}".removesuffix(" of  ")
            text += place(entry.get("frames"))
            group = "the default group" if description == "default_pg" else f"group {name[:40]} {description[:40]}"
            transfer = _RECEIVE.sub(r"send \2->\1", kind)
            if transfer.startswith("send "):  # is like a collective of its two ranks
                return _Call(f"{transfer} in {group}", (), None, kind, (*types,), waits, text)
            agree = (kind, *types, *(() if _UNEVEN.search(kind) else elements))
            if entry.get("is_p2p") is not True:
                return _Call(group, groups.get(name, ()), number(position), kind, agree, waits, text)
            return None
    raise ValueError("a call has no name, group, number, state or sizes")


def _differences(recordings: Mapping[int, list[_Call]], complete: set[int]) -> Iterator[Fact]:
    """Yield the first call of each group that differs between ranks, that a rank has not made, or that waits.

    `complete` has the ranks whose recordings have all calls since the start of the process.
    """
    groups: dict[Any, dict[int, dict[int, _Call]]] = {}
    for rank, recording in recordings.items():
        for call in recording:
            # Transfers have no numbers. Without the old ones, they cannot be counted.
            alone = rank if call.number is None and rank not in complete else None
            numbers = groups.setdefault((call.group, call.ranks, alone), {}).setdefault(rank, {})
            each = len(numbers) + 1 if call.number is None else call.number
            if each in numbers:  # of coalesced calls, only the kinds must agree
                kind = f"{numbers[each].kind} {call.kind}"
                call = call._replace(kind=kind, must_agree=(kind,))
            numbers[each] = call
    for (group, members, _), calls in groups.items():
        ranks = {*members, *calls, *(range(max(recordings) + 1) if group == "the default group" else ())}
        for rank in ranks & complete:
            calls.setdefault(rank, {})
        last = {rank: max(numbers, default=-1) for rank, numbers in calls.items()}
        first = max(0 if rank in complete else min(numbers) for rank, numbers in calls.items())
        for each in sorted({each for numbers in calls.values() for each in numbers if each >= first}):
            made = {rank: numbers[each] for rank, numbers in calls.items() if each in numbers}
            behind = [rank for rank in calls if last[rank] < each]
            waiting = [rank for rank in made if made[rank].waits]
            kinds: dict[Any, list[int]] = {}
            for rank in made:
                kinds.setdefault(made[rank].must_agree, []).append(rank)
            if len(kinds) == 1 and not waiting and not behind:
                continue
            texts = [f"{_ranks(kind)} made {made[kind[0]].text}" for kind in kinds.values()]
            because = ""
            happened = f"In call {each} of {group}, {names(texts, 4)}."
            if len(waiting) == len(members) > 1 == len(kinds):
                happened += f" All {len(members)} ranks of this group wait in the same call."
            elif waiting:
                happened += f" It is not complete on {_ranks(waiting) if len(waiting) < len(made) else 'any of them'}."
            if behind:
                happened += f" When the recordings were written, {_ranks(behind)} had not made this call."
                because = "A collective ends only after all ranks of its group have made it." if waiting else ""
            if len(kinds) > 1:
                because = "The calls of a group that have the same number belong together, and these do not match."
            for rank in behind[:3]:
                end = f"ends with call {last[rank]}" if last[rank] >= 0 else "has no call"
                happened += f" The recording of rank {rank} {end} of this group."
                for call in [call for call in recordings[rank] if call.waits][:1] or recordings[rank][-1:]:
                    does = "waits in" if call.waits else "last made"
                    happened += f" Rank {rank} {does} a call of {call.group}: {call.text}."
            id = "hang/recorded-calls" if behind or because else "hang/recorded-waiting"
            # The ranks that have not made the call wait in another one.
            is_consequence = behind != [] and all(any(call.waits for call in recordings[rank]) for rank in behind)
            yield replace(Fact(id, "hang", happened, because, "computed"), is_consequence=is_consequence)
            break


def _ranks(ranks: Collection[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {names([str(rank) for rank in sorted(ranks)], 8)}"
