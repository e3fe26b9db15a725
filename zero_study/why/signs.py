"""Find signs of trouble without an exception: long compilations, recompilations, slow ranks, slow data preparation.

A log with such a sign is never called sound.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from zero_study.why.cause import Cause
from zero_study.why.known import conclude
from zero_study.why.log import Line
from zero_study.why.steps import Steps

LONG = 10.0  # seconds of compilation that are worth a word
SHARE = 0.1  # of the time of the logged steps from which compilation is the cause of a slow run
MANY_STEPS = 20  # of unknown time, after which a compilation at the start is little
MOST = 200  # lines of a kind that are kept
OFTEN = 3  # recompilations that are a pattern
SLOW_RANK = 1.25  # times the time of the middle rank
FEW_RANKS = 3  # that are compared
SLOW_SAMPLE = 1.0  # seconds to prepare one sample
FEW_SAMPLES = 20
MANY_ACTIVATIONS = 3.0  # times what stays allocated that the peak is if activations take most of the memory
LARGE_PEAK = 10.0  # GiB from which this is worth a note

_OF_COMPILERS = ("ompil", "aptur", "utotun", "ytecode")
_COMPILED = re.compile(
    r"(?i)(?P<what>dynamo bytecode transform time|torch\.compile (?:takes|took)|"
    r"compil(?:ing a graph|ation)\b[^.\n]{0,60}?(?:takes|took|time|finished in|in)|compile[ds]?(?:_| )?time|"
    r"compiled (?:the )?(?:model|graph|function)?\s?(?:in|took)|"
    r"graph captur(?:ing|e)[^.\n]{0,20}?(?:finished in|took|takes|in)|cuda ?graphs? captur\w+[^.\n]{0,20}?(?:in|took)|"
    r"(?:backend_)?compile_inner|autotun\w+[^.\n]{0,30}?(?:takes|took|in))[:=]?\s*(?P<seconds>\d+(?:\.\d+)?) ?"
    r"(?P<unit>s\b|secs?\b|seconds\b|min\b|minutes\b)?"
)
_CAPTURED = re.compile(
    r"(?i)(?P<what>captur\w+ (?:cuda ?)?graphs?|compiling|autotuning)[^|\n]{0,60}100%\|[^\n]*?"
    r"\[(?P<spent>(?:\d+:)?\d+:\d+)<"
)
_RECOMPILED = re.compile(r"Recompiling function (?P<function>\S+)|__recompiles|recompil\w+ (?:due to|because|reason)")
_GUARD = re.compile(r"-\s+(?:\d+/\d+:\s+)?(?P<guard>(?:L\[|tensor |___|G\[|len\().{3,120})")
_RANK_TIME = re.compile(
    r"(?i)\brank[ _=:]{0,2}(?P<rank>\d{1,4})\b[^\n]{0,48}?\b"
    r"(?P<time>\d+(?:\.\d+)?) ?(?P<unit>ms\b|s\b|secs?\b|seconds\b)"
)
_SPREAD = re.compile(
    r"(?P<what>forward-backward|forward-compute|backward-compute|data[\w-]*|optimizer) ?\.*: "
    r"\((?P<min>[\d.]+), (?P<max>[\d.]+)\)"
)
_PEAK = re.compile(
    r"(?i)\balloc(?:ated)?(?:_memory)?\s?[=:]\s?(?P<stays>[\d.]+) ?(?:GiB|GB)?[ ,|]+"
    r"(?:max_?|peak_?)\w*\s?[=:]\s?(?P<peak>[\d.]+) ?Gi?B"
)
_STRAGGLER = re.compile(
    r"(?i)straggler (?:detected|found|rank)|stragglers?: \[?\d|slow(?:est)? rank\b|GPU relative performance"
)


class _Time(NamedTuple):
    line: Line
    label: str
    seconds: float


@dataclass
class Signs:
    """Reads the lines of a log, and keeps signs of trouble."""

    compiled: list[_Time] = field(default_factory=list)
    recompiled: list[Line] = field(default_factory=list)
    functions: set[str] = field(default_factory=set)
    guards: list[str] = field(default_factory=list)
    of_rank: dict[int, list[float]] = field(default_factory=dict)
    rank_lines: dict[int, Line] = field(default_factory=dict)
    spread: list[tuple[Line, str, float, float]] = field(default_factory=list)
    stragglers: list[Line] = field(default_factory=list)

    peaks: list[tuple[Line, float, float]] = field(default_factory=list)  # what stays allocated, and the peak, in GiB

    wants_all = False

    @staticmethod
    def concerns(text: str) -> bool:
        """Return whether a line may show a sign. The result does not depend on its digits."""
        if "traggler" in text or any(word in text for word in _OF_COMPILERS):
            return True
        if "peak" in text and "alloc" in text:
            return True
        if "L['" in text or "tensor '" in text or ": (" in text:
            return True
        return ("ank" in text and (" s" in text or "ms" in text or "s " in text)) or "slow" in text

    def take(self, line: Line) -> None:
        """Read the sign that a line shows."""
        text = line.text[:1000]
        may_be_compiled = any(word in text for word in _OF_COMPILERS)
        if may_be_compiled and (match := _COMPILED.search(text) or _CAPTURED.search(text)):
            self._take_compiled(line, match)
        if may_be_compiled and (match := _RECOMPILED.search(text)):
            if len(self.recompiled) < MOST:
                self.recompiled.append(line)
            self.functions.update(filter(None, [match["function"]]))
        if ("L[" in text or "tensor " in text) and (guard := _GUARD.search(text)) and len(self.guards) < MOST:
            self.guards.append(guard["guard"].split("  #")[0].strip())
        if "ank" in text and "Watchdog" not in text and "NCCL" not in text:
            for match in _RANK_TIME.finditer(text):
                self._take_rank(line, int(match["rank"]), float(match["time"]), match["unit"])
        if ": (" in text and (match := _SPREAD.search(text)) and len(self.spread) < MOST:
            self.spread.append((line, match["what"], float(match["min"]), float(match["max"])))
        if "peak" in text and (match := _PEAK.search(text)) and len(self.peaks) < MOST:
            self.peaks.append((line, float(match["stays"]), float(match["peak"])))
        if (
            ("traggler" in text or "slow" in text)
            and _STRAGGLER.search(text)
            and "No straggler" not in text
            and "no straggler" not in text
        ):
            self.stragglers.append(line) if len(self.stragglers) < MOST else None

    def _take_compiled(self, line: Line, match: re.Match[str]) -> None:
        groups = match.groupdict()
        if groups.get("spent"):
            parts = [int(part) for part in groups["spent"].split(":")]
            seconds = float(sum(part * 60**power for power, part in enumerate(reversed(parts))))
        else:
            seconds = float(groups["seconds"]) * (60 if (groups["unit"] or "").startswith("min") else 1)
        if len(self.compiled) < MOST and seconds < 86_400:
            self.compiled.append(_Time(line, match["what"], seconds))

    def _take_rank(self, line: Line, rank: int, time: float, unit: str) -> None:
        times = self.of_rank.setdefault(rank, []) if len(self.of_rank) < MOST else self.of_rank.get(rank)
        if times is not None and len(times) < MOST:
            times.append(time * (1e-3 if unit.lower() == "ms" else 1.0))
            self.rank_lines.setdefault(rank, line)

    @property
    def are_there(self) -> bool:
        """Whether the log shows a sign, so that it must not be called sound."""
        return (
            sum(time.seconds for time in self.compiled) >= LONG
            or len(self.recompiled) >= OFTEN
            or bool(self.stragglers)
        )

    def causes(self, steps: Steps) -> Iterator[Cause]:
        """Yield the causes that the signs show."""
        yield from self._compilation(steps)
        if len(self.recompiled) >= OFTEN:
            guard = max(set(self.guards), key=self.guards.count, default="")
            yield conclude(
                "slow/recompiled", tuple(self.recompiled[:3]), count=f"{len(self.recompiled):,}",
                function=", ".join(sorted(self.functions)[:3]) or "a function",
                guard=f" The condition that failed most often is {guard[:120]}." if guard else "",
            )  # fmt: skip
        yield from self._slow_rank(steps)
        yield from self._peak()
        yield from _slow_data(steps)

    def _compilation(self, steps: Steps) -> Iterator[Cause]:
        total = sum(time.seconds for time in self.compiled)
        if total < LONG:
            return
        longest = sorted(self.compiled, key=lambda time: -time.seconds)[:3]
        trained = (steps.usual_seconds or 0.0) * steps.num_steps
        labels = "; ".join(f"{time.label.strip()} {time.seconds:,.3g} s" for time in longest)
        is_little = trained * SHARE >= total or (not trained and steps.num_steps >= MANY_STEPS)
        id = "slow/compilation-noted" if is_little else "slow/compilation"
        yield conclude(id, tuple(time.line for time in longest), what=labels, total=f"{total:,.3g}")

    def _peak(self) -> Iterator[Cause]:
        """Yield a note that activations take most memory, if the log states the peak and the memory between steps."""
        line, stays, peak = max(self.peaks, key=lambda peak_of_line: peak_of_line[2], default=(None, 0.0, 0.0))
        if line is not None and peak > max(MANY_ACTIVATIONS * stays, LARGE_PEAK):
            yield conclude("memory/peak-of-activations", (line,), stays=f"{stays:.1f}", peak=f"{peak:.1f}")

    def _slow_rank(self, steps: Steps) -> Iterator[Cause]:
        times = {rank: statistics.median(values) for rank, values in self.of_rank.items()}
        for rank, series in steps.by_rank.items():
            seconds = [row.seconds for row in series.rows[:MOST] if row.seconds]
            if rank is not None and seconds:
                times.setdefault(rank, statistics.median(seconds))
                self.rank_lines.setdefault(rank, series.rows[0].line)
        if len(times) >= FEW_RANKS:
            middle = statistics.median(times.values())
            slowest = max(times, key=lambda rank: times[rank])
            faster = [value for rank, value in times.items() if rank != slowest]
            if middle > 0 and times[slowest] > SLOW_RANK * middle and max(faster) < times[slowest]:
                yield conclude(
                    "slow/rank", (self.rank_lines[slowest],), rank=str(slowest), seconds=f"{times[slowest]:,.4g}",
                    usual=f"{middle:,.4g}", factor=f"{times[slowest] / middle:.2g}",
                )  # fmt: skip
                return
        wide = [times for times in self.spread if times[3] > 2 * times[2] and times[3] > 100]
        if len(wide) > max(1, len(self.spread) // 2):
            line, label, least, most = wide[0]
            yield conclude("slow/ranks-differ", (line,), what=label, least=f"{least:,.4g}", most=f"{most:,.4g}")
        elif self.stragglers:
            yield conclude("slow/straggler", tuple(self.stragglers[:3]), what=self.stragglers[0].text.strip()[:120])


def _slow_data(steps: Steps) -> Iterator[Cause]:
    """Yield the cause that data preparation is far slower than usual for texts."""
    for name, bar in steps.bars.items():
        is_of_samples = name != "steps" and re.search(r"(?i)map|filter|tokeni|process|convert|pack", name)
        if is_of_samples and bar.seconds >= SLOW_SAMPLE and bar.done >= FEW_SAMPLES and bar.seconds < float("inf"):
            several = re.search(r"num_proc=(\d+)", name)
            id = "slow/preparation-of-workers" if several and several[1] != "1" else "slow/preparation"
            yield conclude(
                id, (bar.line,), name=repr(bar.name), seconds=f"{bar.seconds:,.3g}", done=f"{bar.done:,.0f}",
                workers=several[1] if several else "1",
            )  # fmt: skip
            return
