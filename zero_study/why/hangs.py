"""Explain why ranks waited for each other, from the messages of PyTorch's watchdogs and from its flight recorder.

NCCL's collectives have no time-out. PyTorch's watchdog ends a process whose collective took too long, and prints the
number of the collective in its sequence, its kind and its size. If all ranks wait in the same collective, the network
or a GPU has failed. If they wait in different collectives, the ranks took different code paths.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from zero_study.terminal import count
from zero_study.why.cause import Cause, Certainty
from zero_study.why.known import conclude
from zero_study.why.log import Failure, Line, Log
from zero_study.why.setting import Setting
from zero_study.why.steps import Bar, Steps

_WORK = re.compile(
    r"WorkNCCL\((?:SeqNum=(?P<number>\d+)|\.\.\.)?,? ?OpType=(?P<operation>\w+)"
    r"(?:, TensorShape=\[(?P<shape>[\d, ]*)\])?(?:, Numel[Il]n=(?P<inputs>\d+), NumelOut=(?P<outputs>\d+))?"
    r"[^)]*?Timeout\(ms\)=(?P<limit>\d+)\)"
)
# Lines that say that a rank waited, without its call, and that a rank ended because others waited.
_WAITED = re.compile(
    r"Timeout at NCCL work: (\d+)|Received a dump signal due to a collective timeout from this local rank|"
    r"failure detected by watchdog at work sequence id: \d+"
)
# The collective in which a rank waited, and the last one that it had put into its queue.
_WAITED_IN = re.compile(r"(?:watchdog at work(?: sequence id)?|Timeout at NCCL work): (\d+)")
_ENQUEUED = re.compile(r"[Ll]ast enqueued(?: NCCL)? work: (\d+)")
# Without its message, the frames of PyTorch's library tell that a watchdog ended the process.
_WATCHDOG_FRAME = re.compile(
    r"WorkNCCL::checkTimeout|Watchdog caught collective operation timeout|watchdog thread terminated"
)
_OWN_RANK = re.compile(r"\[(?:PG [^\]]*?)?(?:Global )?Rank (\d+)\]|\bRank (\d+)\b")
_GROUP = re.compile(r"\[PG (?:ID )?([^\]]*?) Rank \d+\]")
# Words of progress bars of data and files that are prepared before the training.
_DATA = re.compile(
    r"map|tokeniz|download|load|filter|pack|shard|convert|resolv|process|generating \w+ split|adding|cache",
    re.IGNORECASE,
)
_TRACE = re.compile(r"Invalidate trace cache @ step")
_MILLISECONDS = re.compile(r"(\d+) ?ms\b")
_STORE_TIMEOUT = re.compile(
    r"waitForInput: socket .* timed out|wait timeout after \d+ ?ms|Timed out waiting \d+ ?ms for (?:recv|send)"
)

_WATCHDOG_STUCK = re.compile(r"watchdog (?:thread )?got stuck for (\d+) seconds")

END_OF_EPOCH = 0.97  # share of the steps from which a hang is at the end
FEW_STEPS = 100  # by which ranks that wait for each other may differ
FEW = 16  # elements of a collective that is of a number, such as a metric, and not of weights
NEAR = 40  # lines between an activity and a time-out
START = 5  # collectives after which the groups of a run have worked together
_GATHERS = ("ALLGATHER", "ALLGATHER_BASE", "COALESCED")
# Kinds whose sizes may differ between the ranks of one call.
_UNEVEN = ("ALLTOALL", "ALLTOALL_BASE", "GATHER", "SCATTER", "SEND", "RECV", "COALESCED", "UNKNOWN")
_REDUCTIONS = ("ALLREDUCE", "REDUCE", "REDUCE_SCATTER", "REDUCE_SCATTER_BASE")


class Waiting(NamedTuple):
    """The collective in which a rank waited until the time-out."""

    line: Line
    rank: int | None
    number: int  # in the sequence of its group
    operation: str
    elements: int | None
    milliseconds: int
    group: str = ""

    @property
    def call(self) -> tuple[int, str, int | None]:
        """The collective's number, its kind and, for most kinds, its size. They must agree on all of its ranks."""
        return self.number, self.operation, None if self.operation in _UNEVEN else self.elements

    def __str__(self) -> str:
        if not self.operation:
            return f"collective number {self.number:,}"
        noun = "element" if self.elements == 1 else "elements"
        if not self.number:
            return f"a call of {self.operation}" + (f" with {self.elements:,} {noun}" if self.elements else "")
        size = "" if self.elements is None else f", a call of {self.operation} with {self.elements:,} {noun}"
        return f"collective number {self.number:,}{size or f' ({self.operation})'}"


@dataclass(frozen=True)
class _Picture:
    """The waiting, silent and failed ranks of a log."""

    waiting: tuple[Waiting, ...]
    ranks: tuple[int, ...]  # that waited
    absent: tuple[int, ...]  # ranks of which the log has no time-out
    failures: tuple[Failure, ...]  # of ranks that ended by themselves
    enqueued: Mapping[int, int]  # the last call that a rank had put into its queue

    @property
    def calls(self) -> Counter[tuple[int, str, int | None]]:
        return Counter(wait.call for wait in self.waiting)


def waiting(log: Log) -> list[Waiting]:
    """Return the first collective in which each rank's watchdog gave up."""
    found: dict[int | None, Waiting] = {}
    for line, match in log.search(_WORK):
        rank = _rank_of(line, match.start(), log)
        elements = int(match["inputs"]) if match["inputs"] else None
        if elements is None and match["shape"]:
            elements = math.prod(int(size) for size in match["shape"].split(",") if size.strip())
        group = _GROUP.search(line.text)
        entry = Waiting(
            line, rank, int(match["number"] or 0), match["operation"].lstrip("_"), elements, int(match["limit"]),
            group[1] if group else "",
        )  # fmt: skip
        found.setdefault(rank, entry)
    return list(found.values())


def _rank_of(line: Line, end: int, log: Log) -> int | None:
    """Return the rank in a watchdog's line, or in the line before it if the message is wrapped."""
    before = next((each.text for each in log.lines if each.number == line.number - 1), "")
    for text in (line.text[:end], before if "Watchdog" in before else ""):
        if own := _OWN_RANK.search(text):
            return int(own[1] or own[2])
    return line.rank


def _silent_ranks(log: Log) -> dict[int, Line]:
    """Return the ranks whose messages do not name the call in which they waited, each with its line."""
    ranks: dict[int, Line] = {}
    for line, _ in log.search(_WAITED):
        own = _OWN_RANK.search(line.text)
        rank = int(own[1] or own[2]) if own else line.rank
        if rank is not None:
            ranks.setdefault(rank, line)
    return ranks


def _without_call(rank: int, line: Line) -> Waiting:
    """Return the collective in which a rank waited, from a line that contains at most its number."""
    number = _WAITED_IN.search(line.text) or _ENQUEUED.search(line.text)
    return Waiting(line, rank, int(number[1]) if number else 0, "", None, 0)


def causes(log: Log, steps: Steps, setting: Setting) -> list[Cause]:
    """Return the causes for which collectives timed out."""
    found, silent = waiting(log), _silent_ranks(log)
    if not found and silent:
        found = [_without_call(rank, line) for rank, line in sorted(silent.items())]
    if not found:
        return [*_without_numbers(log, steps), *_stuck(log, steps)]
    ranks = {wait.rank for wait in found if wait.rank is not None} | silent.keys()
    known = log.ranks | ranks
    last = max(known, default=0)
    # Lines that do not state the call are often quoted of a few ranks only. Then a rank of which nothing is quoted may
    # have waited, too.
    examined = set(range(last + 1)) if any(wait.operation for wait in found) else log.ranks
    absent = tuple(sorted(examined - ranks)) if len(known) > 1 else ()
    first_line = min(wait.line.number for wait in found)
    failures = tuple(
        failure for failure in log.failures
        if failure.number < first_line and not failure.is_handled and not _is_of_waiting(failure)
    )  # fmt: skip
    picture = _Picture(tuple(found), tuple(sorted(ranks)), absent, failures, _last_enqueued(log))
    return list(_conclude(picture, steps, log, setting))


def _last_enqueued(log: Log) -> dict[int, int]:
    """Return the number of the last collective that each rank had enqueued, for the ranks whose watchdog prints it."""
    numbers: dict[int, int] = {}
    for line, match in log.search(_ENQUEUED):
        own = _OWN_RANK.search(line.text)
        rank = int(own[1] or own[2]) if own else line.rank
        if rank is not None:
            numbers.setdefault(rank, int(match[1]))
    return numbers


def _stuck(log: Log, steps: Steps) -> Iterator[Cause]:
    """Yield the cause if the log says that the watchdog itself was blocked."""
    line = next((line for line, _ in log.search(_WATCHDOG_STUCK)), None)
    if line is None:
        return
    number = _WATCHDOG_STUCK.search(line.text)
    seconds = number[1] if number else "many"
    done = steps.num_steps
    id = "hang/watchdog-stuck" if done else "hang/watchdog-stuck-at-start"
    yield conclude(id, (line,), seconds=seconds, steps=count(done, "step"))


def _without_numbers(log: Log, steps: Steps) -> Iterator[Cause]:
    """Yield the causes of a time-out if the log lacks its message, or if it is not a time-out of NCCL."""
    line = next((line for line, _ in log.search(_STORE_TIMEOUT)), None) or next(
        (line for line, _ in log.search(_WATCHDOG_FRAME)), None
    )
    if line is None:
        return
    rank = "A rank" if line.rank is None else f"Rank {line.rank}"
    limit = _MILLISECONDS.search(line.text)
    time = f" for {float(limit[1]) / 1000:,.0f} seconds" if limit else ""
    happened = f"{rank} waited{time} for the other ranks, until the time-out."
    if (bar := _preparation(steps)) is not None:
        yield _prepared(bar, happened, (line,))
        return
    yield from _alone(steps, line, happened, (line,))
    yield conclude("hang/time-out", (line,), happened=happened, absent="")


def _prepared(bar: Bar, happened: str, evidence: tuple[Line, ...]) -> Cause:
    return conclude(
        "hang/preparation", (bar.line, *evidence), happened=happened, bar=repr(bar.name or "of the data"),
        done=f"{bar.done:,.0f}", total=f"{bar.total:,.0f}",
    )  # fmt: skip


def _alone(steps: Steps, line: Line, happened: str, evidence: tuple[Line, ...]) -> Iterator[Cause]:
    """Yield the cause that only some ranks evaluate, generate or save, if the log shows it."""
    before = [(each, text) for each, text in steps.activities if each.number <= line.number]
    bars = [
        (bar.line, bar.name) for name, bar in steps.bars.items() if name != "steps" and bar.line.number <= line.number
    ]
    activity = max([*before, *bars], key=lambda pair: pair[0].number, default=None)
    if activity is None or line.number - activity[0].number > NEAR:
        return
    where = re.search(r"(?i)rank\W?(\d+)", activity[1] + activity[0].text)
    only = f" on rank {where[1]}" if where else ""
    evidence = (activity[0], *evidence)
    yield conclude(
        "hang/activity-of-some-ranks", evidence, happened=happened, activity=repr(activity[1].strip()), only=only
    )


def _is_of_waiting(failure: Failure) -> bool:
    return failure.kind in ("DistBackendError", "ChildFailedError") or "Watchdog" in failure.text


def _conclude(picture: _Picture, steps: Steps, log: Log, setting: Setting) -> Iterator[Cause]:
    first = min(picture.waiting, key=lambda wait: wait.line.number)
    evidence = tuple(wait.line for wait in picture.waiting[:4])
    minutes = first.milliseconds / 60000
    who, time = (
        _list("Rank", picture.ranks) if picture.ranks else "A rank",
        f" {minutes:,.0f} minutes" if minutes else "",
    )
    happened = f"{who} waited{time} in {first}."
    if picture.failures:
        return  # a rank ended before: what it raised is the cause
    yield from _different_calls(picture, evidence, minutes)
    if (bar := _preparation(steps)) is not None:
        yield _prepared(bar, happened, evidence)
    elif 0 < first.number <= START and first.operation and not steps.num_steps and len(picture.calls) == 1:
        is_number = first.elements is not None and first.elements <= FEW
        if is_number and first.operation == "ALLREDUCE" and 0 not in picture.ranks:
            certainty: Certainty = "likely" if picture.ranks or first.number > 1 else "possible"
            yield conclude("hang/barrier-at-start", evidence, certainty, happened=happened)
        if not picture.absent:
            yield conclude("hang/first-collective", evidence, "possible" if is_number else None, happened=happened)
    is_at_end = bool(_end_of_epoch(steps)) and (bool(steps.num_steps) or first.number > START)
    if is_at_end and 0 < len(picture.absent) <= len(picture.ranks):
        silent = _list("rank", picture.absent)
        yield conclude("hang/silent-at-end", evidence, happened=happened, silent=silent, where=_end_of_epoch(steps))
    elif picture.absent == (0,) and not steps.bars:
        yield conclude("hang/rank-0-elsewhere", evidence, happened=happened)
    if len(picture.calls) == 1:
        yield from _different_steps(steps, first.line, happened, evidence)
        yield from _alone(steps, first.line, happened, evidence)
        yield from _by_setting(picture, first, happened, evidence, steps, setting)
    yield from _by_size(picture, first, happened, evidence, log)


def _by_setting(
    picture: _Picture, first: Waiting, happened: str, evidence: tuple[Line, ...], steps: Steps, setting: Setting
) -> Iterator[Cause]:
    """Yield usual causes for the model, the data and the position in the epoch that the log states."""
    features = setting.features
    is_of_weights = (first.elements or 0) > FEW and first.operation in (*_GATHERS, *_REDUCTIONS)
    has_begun = bool(steps.num_steps) or first.number > START
    if is_of_weights and has_begun and "vision" in features:
        yield conclude("hang/mixed-modalities", evidence, happened=happened)
    if is_of_weights and has_begun and "experts" in features and first.operation != "ALLREDUCE":
        yield conclude("hang/experts", evidence, happened=happened)
    if (where := _end_of_epoch(steps)) and has_begun:
        # Ranks of which the log has no time-out may also save, evaluate, or have failed at the end of the epoch.
        certainty: Certainty | None = "possible" if picture.absent else None
        yield conclude("hang/uneven-batches", evidence, certainty, happened=happened, where=where)
    elif has_begun and "stream" in features:
        where = "The data are a stream without a known length."
        yield conclude("hang/uneven-batches", evidence, happened=happened, where=where)
    if "reinforcement" in features and not picture.failures:
        yield conclude("hang/rollout", evidence, happened=happened)


def _end_of_epoch(steps: Steps) -> str:
    """Return a sentence that says that the log stops at the end of an epoch. Empty if it does not."""
    bar = steps.step_bar
    if bar is not None and bar.total >= FEW and END_OF_EPOCH * bar.total <= bar.done <= bar.total:
        return f"The progress bar stops at {bar.done:,.0f} of {bar.total:,.0f} steps."
    epochs = [row.epoch for row in steps.rows if row.epoch is not None]
    if len(epochs) > 1 and epochs[-1] >= 0.9 and abs(epochs[-1] - round(epochs[-1])) <= 1 - END_OF_EPOCH:
        return f"The last logged step is at epoch {epochs[-1]:g}."
    return ""


def _preparation(steps: Steps) -> Bar | None:
    """Return the unfinished progress bar of data preparation. None without one, or if training had begun."""
    if steps.rows:
        return None
    bars = [bar for name, bar in steps.bars.items() if _DATA.search(name) and bar.done < bar.total]
    return max(bars, key=lambda bar: bar.line.number, default=None)


def _different_calls(picture: _Picture, evidence: tuple[Line, ...], minutes: float) -> Iterator[Cause]:
    """Yield the cause that ranks wait in different collectives."""
    groups = {wait.group for wait in picture.waiting}
    if len(picture.calls) < 2 or len(groups) > 1:
        return
    unlike = _unlike(picture)
    usual = picture.calls.most_common(1)[0][0] if unlike is None else unlike[0].call
    same = [wait for wait in picture.waiting if wait.call == usual]
    others = [[wait for wait in picture.waiting if wait.call == call] for call in picture.calls if call != usual]
    if unlike is not None:
        is_of_sizes = unlike[0].operation == unlike[1].operation
        kind = "hang/different-sizes" if is_of_sizes else "hang/different-calls"
    else:
        kind = "hang/rank-behind"
    yield conclude(
        kind, evidence, minutes=f"{minutes:,.0f}", same=f"{_ranks_text(same)} waited in {same[0]}",
        other="; ".join(f"{_ranks_text(each)[0].lower()}{_ranks_text(each)[1:]} in {each[0]}" for each in others),
        behind=_ranks_text(_behind(picture)), what=_of_sizes(same[0]),
    )  # fmt: skip


def _unlike(picture: _Picture) -> tuple[Waiting, Waiting] | None:
    """Return two ranks that made different calls with the same number, or None.

    At this call, the ranks took different code paths. Ranks that wait in a later call have completed this one, because
    a rank that only sends need not wait for all others.
    """
    for first, second in itertools.combinations(picture.waiting, 2):
        if first.number == second.number and first.call != second.call:
            return first, second
    return None


def _behind(picture: _Picture) -> list[Waiting]:
    """Return the ranks that are behind, by the last call that each rank enqueued if all of them print it."""
    ranks = [wait.rank for wait in picture.waiting]
    queued = [picture.enqueued[rank] for rank in ranks if rank is not None and rank in picture.enqueued]
    places = queued if len(queued) == len(ranks) and len(set(queued)) > 1 else [wait.number for wait in picture.waiting]
    return [wait for wait, place in zip(picture.waiting, places, strict=True) if place == min(places)]


def _of_sizes(call: Waiting) -> str:
    """Return a sentence on what usually differs in size between ranks for this kind of call, or an empty text."""
    if call.operation == "BROADCAST":
        return (
            " A broadcast in each step usually comes from DDP, which sends the buffers of the model to all ranks "
            "before each forward pass. A buffer whose size depends on the sample has grown on only some of the ranks."
        )
    if call.operation in _REDUCTIONS and (call.elements or 0) > FEW:
        return (
            " A reduction of this kind reduces gradients. Only some ranks used every module of the model: a batch "
            "without images, for instance, does not use the vision tower."
        )
    return ""


def _different_steps(steps: Steps, line: Line, happened: str, evidence: tuple[Line, ...]) -> Iterator[Cause]:
    """Yield the cause that ranks were at different steps, if their progress bars show it."""
    states = [(each, done, total) for each, done, total in steps.recent if each.number <= line.number]
    totals = {total for _, _, total in states}
    for total in totals:
        done = [count for _, count, each in states if each == total]
        fell = any(later < earlier for earlier, later in itertools.pairwise(done))
        if fell and 2 <= max(done) - min(done) <= FEW_STEPS:
            shown = next(each for each, _, each_total in states if each_total == total)
            yield conclude(
                "hang/different-steps", (shown, *evidence), happened=happened, least=f"{min(done):,}",
                most=f"{max(done):,}", total=f"{total:,}",
            )  # fmt: skip
            return


def _by_size(picture: _Picture, first: Waiting, happened: str, evidence: tuple[Line, ...], log: Log) -> Iterator[Cause]:
    """Yield the cause that the kind and size of the collective suggest."""
    operation, elements = first.operation, first.elements
    absent = (
        f" The log has no time-out of {_list('rank', picture.absent)}."
        if picture.absent and len(picture.absent) < 8
        else ""
    )
    strength = 1 if picture.absent else 0
    changed = next((line for line, _ in log.search(_TRACE)), None)
    if elements is not None and elements <= FEW and operation in (*_REDUCTIONS, *_GATHERS, "BROADCAST"):
        certainty: Certainty = "likely" if picture.absent else "possible"
        size = count(elements, "element")
        yield conclude(
            "hang/number", evidence, happened=happened, absent=absent, elements=size, certainty=certainty,
            strength=strength,
        )  # fmt: skip
    elif operation in _GATHERS:
        if changed is not None:
            yield conclude("hang/gather-in-another-order", (changed, *evidence), happened=happened, absent=absent)
        elif {wait.rank for wait in picture.waiting} == {0}:
            yield conclude("hang/gather-on-rank-0", evidence, happened=happened, absent=absent)
        else:
            yield conclude("hang/gather", evidence, happened=happened, absent=absent, strength=strength)
    elif operation in _REDUCTIONS:
        yield conclude("hang/gradients", evidence, happened=happened, absent=absent, strength=strength)
    else:
        yield conclude("hang/time-out", evidence, happened=happened, absent=absent)


def _ranks_text(waiting_ranks: Sequence[Waiting]) -> str:
    ranks = sorted(wait.rank for wait in waiting_ranks if wait.rank is not None)
    return _list("Rank", ranks) if ranks else "A rank"


def _list(noun: str, ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"{noun} {ranks[0]}"
    if len(ranks) > 4 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{noun}s {ranks[0]} to {ranks[-1]}"
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"{noun}s {shown}"


# ---------------------------------------------------------------- the flight recorder


def causes_of_recordings(entries: Mapping[int, Sequence[Mapping[str, object]]]) -> list[Cause]:
    """Return the cause that recordings of several ranks show: the first call that differs between ranks.

    `entries` has the list of calls of each rank, as PyTorch's flight recorder writes it.
    """
    by_group: dict[str, dict[int, dict[int, Mapping[str, object]]]] = {}
    for rank, calls in entries.items():
        for call in calls:
            number = call.get("collective_seq_id")
            if isinstance(number, int) and not call.get("is_p2p"):
                by_group.setdefault(str(call.get("process_group")), {}).setdefault(rank, {})[number] = call
    for group, ranks in by_group.items():
        first = max(min(calls) for calls in ranks.values())  # the buffers forget the oldest calls
        for number in range(first, max(max(calls) for calls in ranks.values()) + 1):
            made = {rank: _described(calls[number]) for rank, calls in ranks.items() if number in calls}
            without = sorted(set(ranks) - set(made))
            if without or len(set(made.values())) > 1:
                return [_recorded_cause(group, number, made, without, ranks)]
    stuck = [
        call for ranks in by_group.values() for calls in ranks.values() for call in calls.values()
        if call.get("state") == "started"
    ]  # fmt: skip
    if not stuck:
        return []
    return [conclude("hang/network", (), call=_described(stuck[0]))]


def _recorded_cause(
    group: str, number: int, made: Mapping[int, str], without: Sequence[int], ranks: Mapping[int, object]
) -> Cause:
    kinds: dict[str, list[int]] = {}
    for rank, text in made.items():
        kinds.setdefault(text, []).append(rank)
    calls = "; ".join(f"{_list('rank', sorted(each))} made {text}" for text, each in kinds.items())
    missing = f"; {_list('rank', without)} made no such call" if without else ""
    return conclude(
        "hang/recorded-calls", (), number=f"{number:,}", group=group, calls=calls, missing=missing,
        basis=f"the recordings of {count(len(ranks), 'rank')}",
    )  # fmt: skip


def _described(call: Mapping[str, object]) -> str:
    name = str(call.get("profiling_name", "a collective")).removeprefix("nccl:")
    frames = call.get("frames")
    where = ""
    if isinstance(frames, list):
        own = next((f for f in frames if isinstance(f, dict) and "/torch/" not in str(f.get("filename"))), None)
        where = f" at {own.get('filename')}:{own.get('line')}" if own else ""
    return f"{name} of {call.get('input_sizes')}{where}"
