"""Compare the collectives in which ranks waited for each other, from the messages of PyTorch's watchdogs.

NCCL's collectives have no time-out. PyTorch's watchdog ends a process whose collective took too long, and prints the
number of the collective in its sequence, its kind and its size.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from zero_study.logs.printed_failures import Log
from zero_study.logs.printed_steps import Bar, Line, Steps
from zero_study.why.fact import Fact

_WORK = re.compile(
    r"WorkNCCL\((?:SeqNum=(?P<number>\d{1,15})|\.\.\.)?,? ?OpType=(?P<operation>\w+)"
    r"(?:, TensorShape=\[(?P<shape>[\d, ]*)\])?(?:, Numel[Il]n=(?P<inputs>\d{1,18}), NumelOut=(?P<outputs>\d{1,18}))?"
    r"[^)]*?Timeout\(ms\)=(?P<limit>\d{1,15})\)(?: ran for (?P<ran>\d{1,15}))?"
)
# Lines that say that a rank waited, without its call.
_WAITED = re.compile(
    r"Timeout at NCCL work: (\d+)|Received a dump signal due to a collective timeout from this local rank|"
    r"failure detected by watchdog at work sequence id: \d+|NCCL operations have failed or timed out"
)
_WAITED_IN = re.compile(r"(?:watchdog at work(?: sequence id)?|Timeout at NCCL work): (\d{1,15})")
_ENQUEUED = re.compile(r"[Ll]ast enqueued(?: NCCL)? work: (\d{1,15})(?:, last completed(?: NCCL)? work: (\d{1,15}))?")
_OWN_RANK = re.compile(r"\[(?:PG [^\[\]]*?)?(?:Global )?Rank (\d{1,6})\]|\bRank (\d{1,6})\b")
_GROUP = re.compile(
    r"\[PG (?:ID )?([^\]]*?) Rank \d+\].*?(?:detected by watchdog|terminated with exception|Timeout at NCCL work)"
)
# Words of progress bars of data and files that are prepared before the training.
_DATA = re.compile(
    r"map|tokeniz|download|load|filter|pack|shard|convert|resolv|process|generating \w+ split|adding|cache",
    re.IGNORECASE,
)
_STORE_TIMEOUT = re.compile(
    r"waitForInput: socket .* timed out|wait timeout after \d+ ?ms|Timed out waiting \d+ ?ms for (?:recv|send)"
)
# Kinds whose sizes may differ between the ranks of one call.
_UNEVEN = ("ALLTOALL", "ALLTOALL_BASE", "GATHER", "SCATTER", "SEND", "RECV", "COALESCED", "UNKNOWN")
MOST_RANKS = 1 << 20
# Ranks that are listed, whose queues are, and whose calls are compared with each other.
_SHOWN, MOST_QUEUES, MOST_COMPARED = 8, 4, 256


class Waiting(NamedTuple):
    """The collective in which a rank waited until the time-out."""

    line: Line
    rank: int | None
    number: int  # in the sequence of its group; 0 if the line does not state it
    operation: str
    elements: int | None
    milliseconds: int
    group: str = ""  # of processes; empty if the log does not state it

    @property
    def call(self) -> tuple[int, str, int | None]:
        """The collective's number, its kind and, for most kinds, its size. They must agree on all of its ranks."""
        return self.number, self.operation, None if self.operation in _UNEVEN else self.elements

    def __str__(self) -> str:
        number = f"collective number {self.number:,}" if self.number else "a collective"
        size = "" if self.elements is None else f", {self.elements:,} element{'s' * (self.elements != 1)}"
        return f"{number} ({self.operation}{size})" if self.operation else number


def waiting(log: Log) -> list[Waiting]:
    """Return the first collective in which each rank's watchdog gave up."""
    waits: dict[int | None, Waiting] = {}
    lines = {line.number: line for line in log.of_watchdogs}
    groups = _numbers(log, _GROUP)
    for line, match in log.search(_WORK, log.of_watchdogs):
        before = lines.get(line.number - 1, line)  # the message may be wrapped
        own = _OWN_RANK.search(line.text[: match.start()]) or _OWN_RANK.search(before.text)
        elements = int(match["inputs"]) if match["inputs"] else None
        if elements is None and match["shape"]:
            elements = math.prod(int(size) for size in match["shape"].split(",") if size.strip())
        # The prefix has the global rank, and the message that of the process group.
        prefixed = before.rank if line.rank is None and "atchdog" in before.text else line.rank
        rank = prefixed if prefixed is not None or not own else int(own[1] or own[2])
        entry = Waiting(
            line, rank, int(match["number"] or 0), match["operation"].lstrip("_"), elements,
            int(match["ran"] or match["limit"]), groups[rank][1][1] if rank in groups else "",
        )  # fmt: skip
        waits.setdefault(rank, entry)
    numbers = _numbers(log, _WAITED_IN) or _numbers(log, _ENQUEUED)
    for rank, (line, _) in _numbers(log, _WAITED).items():  # whose lines do not name the call
        number = int(numbers[rank][1][1]) if rank in numbers else 0
        alike = [wait for wait in waits.values() if wait.number == number > 0]
        call = alike[0] if alike else Waiting(line, rank, number, "", None, 0)
        waits.setdefault(rank, call._replace(line=line, rank=rank))
    return sorted(waits.values(), key=lambda wait: wait.line.number)


def _numbers(log: Log, pattern: re.Pattern[str]) -> dict[int, tuple[Line, re.Match[str]]]:
    """Return the first line of each rank in which a pattern is waits."""
    waits: dict[int, tuple[Line, re.Match[str]]] = {}
    for line, match in log.search(pattern, log.of_watchdogs):
        own = _OWN_RANK.search(line.text)
        rank = line.rank if line.rank is not None or not own else int(own[1] or own[2])
        if rank is not None:
            waits.setdefault(rank, (line, match))
    return waits


def facts(log: Log, steps: Steps) -> Iterator[Fact]:
    """Yield the table of waiting ranks, the ranks that are absent from it, and what was unfinished."""
    waits = waiting(log)
    if waits:
        yield _table(waits, log, steps)
        evidence: tuple[Line, ...] = tuple(wait.line for wait in waits[:1])
    elif line := next((line for line, _ in log.search(_STORE_TIMEOUT)), None):
        evidence = (line,)
    else:
        return
    if (bar := _preparation(steps)) is not None:
        yield Fact(
            "hang/preparation", "hang",
            f"In the last line that the log has of it, the progress bar {bar.name or 'of the data'!r} is at "
            f"{bar.done:,.0f} of {bar.total:,.0f}. No step was logged.",
            "", "computed", "an unfinished progress bar", (bar.line, *evidence),
        )  # fmt: skip


def _table(waits: Sequence[Waiting], log: Log, steps: Steps) -> Fact:
    by_call: dict[object, list[Waiting]] = {}
    for wait in waits:
        by_call.setdefault(wait.call, []).append(wait)
    ranks = {wait.rank for wait in waits if wait.rank is not None}
    rows = []
    for alike in [*by_call.values()][:_SHOWN]:
        limit = f" for {_duration(alike[0].milliseconds)}" if alike[0].milliseconds else ""
        rows.append(f"{_names(alike)} waited{limit} in {alike[0]}.")
    rows += [f"There are {len(by_call) - _SHOWN:,} more calls."] if len(by_call) > _SHOWN else []
    queues = _numbers(log, _ENQUEUED)
    for rank, (_, match) in sorted(queues.items(), key=lambda item: int(item[1][1][2] or 0))[:MOST_QUEUES]:
        done = f" and completed {int(match[2]):,}" if match[2] else ""
        rows.append(f"Rank {rank} had put {int(match[1]):,} calls into its queue{done}.")
    text = " ".join([*rows, *_silence(ranks, log), *_before(waits[0].line, steps)])
    evidence = tuple(alike[0].line for alike in by_call.values())[:_SHOWN]
    groups = {wait.group for wait in waits}
    id, because = "hang/waiting", ""
    if unlike := _unlike(waits):
        first, second = unlike
        id = "hang/different-calls"
        text += f" {_names([first])} and {_names([second]).lower()} made different calls with the same number"
        text += f": {first}, and {second}."
        if len(groups) == 1 and "" not in groups:
            because = (
                "All ranks of a process group must make the same call. These ranks took different paths through the "
                "program before it, or used tensors of different sizes."
            )
        else:
            text += " The log does not say whether the calls are of the same process group."
    elif len(groups) == 1 and 0 < (least := min(wait.number for wait in waits)) < max(wait.number for wait in waits):
        id = "hang/rank-behind"
        behind = [wait for wait in waits if wait.number == least]
        text += f" The smallest number is that of {_names(behind).lower()}."
    return Fact(id, "hang", text, because, "computed", "the watchdogs' messages", evidence)


def _silence(ranks: set[int], log: Log) -> Iterator[str]:
    """Yield a sentence on the ranks of which the log has no time-out."""
    if not ranks or len(log.ranks | ranks) < 2 or max(log.ranks | ranks) > MOST_RANKS:
        return
    silent = sorted(set(range(max(log.ranks | ranks) + 1)) - ranks)
    printed = [rank for rank in silent if rank in log.ranks]
    if printed:
        yield f"The log has lines of {_list(printed).lower()}, and none of them names a time-out."
    if rest := [rank for rank in silent if rank not in log.ranks]:
        yield f"The log has no line of {_list(rest).lower()}."


def _before(line: Line, steps: Steps) -> Iterator[str]:
    """Yield where the progress bar of the steps stood before the time-out."""
    if (bar := steps.step_bar) is not None and bar.line.number <= line.number:
        yield f"The progress bar of the steps stood at {bar.done:,.0f} of {bar.total:,.0f}."


def _preparation(steps: Steps) -> Bar | None:
    """Return the unfinished progress bar of data preparation. None without one, or if training had begun."""
    if steps.rows:
        return None
    bars = [bar for name, bar in steps.bars.items() if _DATA.search(name) and bar.done < bar.total]
    return max(bars, key=lambda bar: bar.line.number, default=None)


def _unlike(waits: Sequence[Waiting]) -> tuple[Waiting, Waiting] | None:
    """Return two ranks of a group that made different calls with the same number, or None."""
    for first, second in itertools.combinations(waits[:MOST_COMPARED], 2):
        if first.number == second.number > 0 and first.group == second.group and first.call != second.call:
            return first, second
    return None


def _duration(milliseconds: int) -> str:
    return f"{milliseconds / 60_000:,.3g} minutes" if milliseconds >= 60_000 else f"{milliseconds:,} ms"


def _names(waits: Sequence[Waiting]) -> str:
    ranks = sorted(wait.rank for wait in waits if wait.rank is not None)
    return _list(ranks) if ranks else "A rank"


def _list(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"Rank {ranks[0]}"
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"Ranks {ranks[0]} to {ranks[-1]}"
    more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    return f"Ranks {', '.join(map(str, ranks[:_SHOWN]))}{more}"
