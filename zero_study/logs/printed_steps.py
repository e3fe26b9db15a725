"""Read the training steps that any program printed: losses, gradient norms, learning rates, times and memory, by rank.

Each reader of `zero-study import` knows the whole format of one program. The logs of failed runs mix the output of
several programs, so that this module reads every line independently. The names of columns are those of `columns`.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from zero_study.logs.columns import meaning

FIRST = 2000  # lines of steps that are read before only some are; as many last ones are read
MOST_ODD = 500  # lines with NaN or infinity that are read besides
MOST_PRINTED = 60  # lines of a dictionary
MOST_BARS = 50
LONGEST = 1000  # characters of the first line of a dictionary
WARM_UP = 2  # steps that start the workers which load data

_NUMBER = (
    r"([-+]?(?:\d[\d,]{0,24}(?:\.\d{0,24})?(?:e[-+]?\d{1,3})?|\.\d{1,24}|nan|inf(?:inity)?))"
    r"((?-i:[kKMB]|m?s|secs?|seconds)\b)?"
)
# A pair such as 'loss': 1.5, lm loss: 1.5E+00, loss=1.5 or "grad_norm": "nan", whose name may contain / and _.
_PAIR = re.compile(
    r"""(?i)(?<![\w/.\-])["']?([a-z][\w/.\-()]{0,80}(?: [a-z]{1,20}(?: \((?:ms|s|tokens)\))?)*)["']?\s*"""
    r"""[:=]\s*(?:tensor\()?["'\[]?""" + _NUMBER
)
# Without a colon, such as loss 1.5, iteration 12/ 300 or gradient-norm 0.3.
_SPACED = re.compile(
    r"(?i)(?<![\w-])((?:[a-z-]+[ _-])?(?:loss|norm|learning[ _-]rate|lr|step|iter|iteration|time|data|dt))\s+"
    rf"{_NUMBER}(?![\w%])"
)
# A line that has values of a step. This is fast, because it is searched in each line. (trl is of llm.c.)
_ROW = re.compile(
    r"""(?:(?<=[lLnN])o(?:ss|rm)[\w/]{0,6}(?: train)?|trl)["')]{0,2} ?[:= ]\s*(?:tensor\()?["'\[]?[-+]?"""
    r"(?:[.\d]|(?i:nan|inf))"
)
_NOT_FINITE = re.compile(r"""(?:[:=(\[]\s?["']?|oss |orm )[-+]?(?:nan|NaN|inf|Inf)""")
_COUNTED = re.compile(r"step(?:=(\d{1,15}), skipped=|[: ] ?(\d{1,15})/\d)")
_OVERFLOW = re.compile(
    r"OVERFLOW!.{0,80}?[Ll]oss scale:? ?(\d{1,24}(?:\.\d{0,9})?(?:e\+?\d{1,3})?),? (?:but hysteresis|reducing to)|"
    r"overflow.{0,60}reducing loss scale (?:from \S+ )?to (\d{1,24}(?:\.\d{0,9})?(?:e\+?\d{1,3})?)"
)
_BAR = re.compile(
    r"\d{1,3}%\|[^|]*\|\s{0,4}(\d{1,15}(?:\.\d{0,9})?)([kM]?)/(\d{1,15}(?:\.\d{0,9})?)([kM]?)\s{0,4}"
    r"\[[\d:]{1,15}<[\d:?]{1,15}[^\],]*,\s{0,4}(\d{1,15}(?:\.\d{0,9})?|\?)\s?(s/\w+|\w+/s)"
)
# Words of bars that count examples of the data set, files or weights, not steps.
_NOT_STEPS = re.compile(
    r"map|tokeniz|download|load|fetch|generat|filter|pack|shard|convert|resolv|adding|process|saving|eval|predict|"
    r"compil|rollout|captur|sanity|validat|testing|running|extract|writ", re.IGNORECASE,
)  # fmt: skip
_OF_STEPS = ("%|", "step", "verflow", "OVERFLOW", "oss", "norm", "Norm", "trl")
# Columns that are kept, by their names in `columns`.
_KEPT = {
    "loss": "loss", "gradient_norm": "norm", "learning_rate": "rate", "step": "step", "epoch": "epoch",
    "seconds_per_step": "seconds",
}  # fmt: skip
# Names that `columns` does not know, because another program may use them for something else. `data` is the time for
# which a step waited for its data, `rest` that of the rest of the step, and `whole` that of the whole step.
_OWN = {
    name: (column, factor)
    for column, factor, names in (
        ("loss", 1.0, "total_loss loss_train step_loss act_loss reduced_train_loss cross_entropy_loss trl"),
        ("norm", 1.0, "gnorm gradnorm grdn norm global_grad_norm actor_grad_norm"),
        ("rate", 1.0, "actor_lr"),
        ("scale", 1.0, "loss_scale scale"),
        ("memory", 1.0, "memory_gib max_memory"),
        (
            "seconds",
            1.0,
            "step_time train_step_time time_per_step perf_time_per_step timing_s_step iter_time time_step",
        ),
        ("seconds", 1e-3, "elapsed_time_per_iteration_ms"),
        ("seconds", 1.0, "iter_time_s"),
        (
            "data",
            1.0,
            "data data_s data_time data_times data_wait dataloading_s data_loading_time time_data timing_s_data",
        ),
        ("rest", 1.0, "updt_s update_s model_times compute_s"),
        ("whole", 1.0, "time dt batch_time step_s"),
    )
    for name in names.split()
}
_SPEED = re.compile(
    r"(?<![\w.])([\d,]{1,24}(?:\.\d{1,9})?) ?(?:samples|sequences|examples|images|tokens|tok|img)/s(?:ec)?\b"
)
_UNITS = {"k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "ms": 1e-3}
_FILLERS = re.compile(r"(?i)(?:info|debug|with|current|batch|step|and|at|train|training) ")


class Line(NamedTuple):
    """A line of a log, without the prefix of its rank and without control characters."""

    number: int
    rank: int | None  # None if the line does not say it
    text: str


class Row(NamedTuple):
    """The values of a step in one line of a log. None if the line does not contain the value."""

    line: Line
    loss: float | None = None
    norm: float | None = None
    rate: float | None = None
    scale: float | None = None
    step: float | None = None
    epoch: float | None = None
    memory: float | None = None
    seconds: float | None = None
    speed: float | None = None  # samples or tokens per second


class Bar(NamedTuple):
    """The last state of a progress bar."""

    line: Line
    name: str
    done: float
    total: float
    seconds: float  # per unit, as the bar shows it


@dataclass
class Series:
    """The rows of a rank: in a long log the first and the last ones, ever fewer between them, and those with NaN."""

    rows: list[Row] = field(default_factory=list)


@dataclass
class Waiting:
    """The time for which steps waited for data. The first steps, which start the workers, are left out."""

    line: Line  # of the longest wait
    longest: float = 0.0
    data: float = 0.0  # seconds of all steps
    total: float = 0.0
    count: int = 0

    @property
    def share(self) -> float:
        return self.data / self.total if self.total else 0.0


@dataclass
class _Thinned:
    """Says which lines of a long log are read: in number, about the logarithm of all. Keeps the last of the others."""

    last: deque[Line] = field(default_factory=lambda: deque(maxlen=FIRST))
    count: int = 0
    _next: int = 0

    def is_read(self, line: Line, is_odd: bool = False) -> bool:
        self.count += 1
        if self.count >= self._next:
            self._next = self.count + (self.count // FIRST | 1)  # odd, so that it finds all of 2, 4, 8, ... ranks
            return True
        if not is_odd:
            self.last.append(line)
        return is_odd


@dataclass
class Steps:
    """Reads the lines of a log, and keeps its steps and progress bars."""

    by_rank: dict[int | None, Series] = field(default_factory=dict)
    bars: dict[str, Bar] = field(default_factory=dict)  # by what they count
    bar_times: list[tuple[int, float]] = field(default_factory=list)  # steps and their seconds, of the bar of steps
    recent: deque[tuple[Line, int, int]] = field(default_factory=lambda: deque(maxlen=8))  # states of bars of steps
    overflows: list[tuple[Line, float]] = field(default_factory=list)  # and the loss scale that was too large
    num_overflows: int = 0
    num_engine_steps: int = 0  # as DeepSpeed and others count them
    waiting: Waiting | None = None
    _lines: _Thinned = field(default_factory=_Thinned)
    _bar_lines: _Thinned = field(default_factory=_Thinned)
    _num_odd: int = 0
    _printed: dict[int | None, list[Line]] = field(default_factory=dict)  # lines of a dictionary that has not ended

    @property
    def wants_all(self) -> bool:
        """Whether the reader is inside a dictionary that is printed on several lines."""
        return bool(self._printed)

    @staticmethod
    def concerns(text: str) -> bool:
        """Return whether a line may contain values of a step. The result does not depend on its digits."""
        return any(word in text for word in _OF_STEPS) or text.rstrip().endswith("{")

    def take(self, line: Line) -> None:
        """Read the values of a step from a line."""
        text = line.text
        if self._printed or text.endswith(("{", "{ ")):
            line = self._join(line) or line
            if line.rank in self._printed:
                return
            text = line.text
        if "%|" in text and self._bar_lines.is_read(line):
            self._take_bar(line)
        if "step" in text and (match := _COUNTED.search(text)):
            self.num_engine_steps = max(self.num_engine_steps, int(match[1] or match[2]))
        if ("verflow" in text or "OVERFLOW" in text) and (match := _OVERFLOW.search(text)):
            self.num_overflows += 1
            scale = float(match[1] or match[2])
            if len(self.overflows) < FIRST or scale < self.overflows[-1][1]:
                self.overflows.append((line, scale))
        place = text.find("oss")
        may_be_row = place >= 0 or "orm" in text or "trl:" in text
        if may_be_row and _ROW.search(text, max(0, place - 1)) and "rror" not in text:
            text = text.replace("number of nan", "")
            has_nan = "nan" in text or "inf" in text or "NaN" in text or "Inf" in text
            is_odd = has_nan and self._num_odd < MOST_ODD and _NOT_FINITE.search(text) is not None
            self._num_odd += is_odd
            if self._lines.is_read(line, is_odd):
                self._take_pairs(line)

    def finish(self) -> None:
        """Read the last lines of a long log. Call this once, after all lines were passed to `take`."""
        while self._bar_lines.last:
            self._take_bar(self._bar_lines.last.popleft())
        while self._lines.last:
            self._take_pairs(self._lines.last.popleft())
        for series in self.by_rank.values():
            series.rows.sort(key=lambda row: row.line.number)

    def add_series(self, columns: Mapping[str, Sequence[Any]]) -> None:
        """Add rows from the columns of an imported log, which have no line numbers."""
        own = {_KEPT[name]: column for name, column in columns.items() if name in _KEPT}
        rows = self.by_rank.setdefault(None, Series()).rows
        for place in range(max(map(len, columns.values()), default=0)):
            values = {name: column[place] for name, column in own.items() if place < len(column)}
            if values.get("loss") is not None or values.get("norm") is not None:
                rows.append(Row(Line(0, None, f"row {place + 1}: {values}"), **values))

    @property
    def rows(self) -> list[Row]:
        """The rows of the rank that logged the most steps."""
        return max((series.rows for series in self.by_rank.values()), key=len, default=[])

    @property
    def num_steps(self) -> int:
        """A lower bound of the number of trained steps, from the logged rows and the progress bars."""
        rows, bar = self.rows, self.step_bar
        steps = [int(row.step) for row in rows if row.step is not None and math.isfinite(row.step)]
        return max(len(rows), int(bar.done) if bar else 0, max(steps, default=0), self.num_engine_steps)

    @property
    def usual_seconds(self) -> float | None:
        """The usual seconds per step, from the logged rows or the progress bar. None if the log does not state them."""
        times = [row.seconds for row in self.rows if row.seconds] or [seconds for _, seconds in self.bar_times]
        return statistics.median(times) if times else None

    @property
    def step_bar(self) -> Bar | None:
        """The progress bar of the training steps, or None."""
        return self.bars.get("steps")

    def _join(self, line: Line) -> Line | None:
        """Join a dictionary that is printed on several lines. Return it as one line when it ends, and None before."""
        text = line.text.rstrip()
        if text.endswith("{") and len(text) < LONGEST:
            self._printed[line.rank] = [line._replace(text="{")]
        elif (lines := self._printed.get(line.rank)) is not None:
            lines.append(line)
            if text.strip() in ("}", "},") or len(lines) > MOST_PRINTED or not text[:1].isspace():
                del self._printed[line.rank]
                return lines[0]._replace(text=" ".join(each.text.strip() for each in lines))
        return None

    def _take_bar(self, line: Line) -> None:
        end = 0
        for match in _BAR.finditer(line.text):
            name, end = line.text[end : match.start()].strip()[-60:], match.end()
            done, thousands, total, of_total, rate, unit = match.groups()
            shown = math.nan if rate == "?" else float(rate)
            seconds = shown if unit.startswith("s/") else 1 / shown if shown else math.inf
            is_of_steps = not _NOT_STEPS.search(name) or name.lower().startswith("train")
            bar = Bar(line, name, _value(done, thousands), _value(total, of_total), seconds)
            key = "steps" if is_of_steps else name
            if key in self.bars or len(self.bars) < MOST_BARS:
                self.bars[key] = bar
            if is_of_steps:
                self.recent.append((line, int(bar.done), int(bar.total)))
                if math.isfinite(seconds) and len(self.bar_times) < 2 * FIRST:
                    self.bar_times.append((int(bar.done), seconds))

    def _take_pairs(self, line: Line) -> None:
        """Add the row that a line contains, if it has a loss or a gradient norm."""
        values: dict[str, float] = {}
        for name, text, unit in (*_PAIR.findall(line.text), *_SPACED.findall(line.text)):
            column, factor = _column(name)
            if column == "whole" and unit.endswith("s"):  # without a unit, it may be the time since the start
                values.setdefault("seconds", _value(text, unit))
            if column is not None:
                values.setdefault(column, _value(text, unit) * factor)
        if "loss" not in values and "norm" not in values:
            return
        data, rest, whole = (values.pop(name, math.nan) for name in ("data", "rest", "whole"))
        whole = whole if math.isfinite(whole) else values.get("seconds", data + rest)
        if not math.isnan(data):
            self._take_waiting(line, data, max(whole, data), values.get("step"))
        if "/s" in line.text and (speed := _SPEED.search(line.text)):
            values["speed"] = _value(speed[1], "")
        self.by_rank.setdefault(line.rank, Series()).rows.append(Row(line, **values))

    def _take_waiting(self, line: Line, data: float, total: float, step: float | None) -> None:
        """Add the time for which a step waited for data. Some programs log it together with the rest of the step."""
        is_first = self.waiting is None if step is None else step <= WARM_UP
        self.waiting = waiting = self.waiting or Waiting(line)
        if math.isfinite(total) and not is_first:
            waiting.data += data
            waiting.total += total
            waiting.count += 1
            if data > waiting.longest:
                waiting.line, waiting.longest = line, data


@lru_cache(maxsize=4096)
def _column(name: str) -> tuple[str | None, float]:
    """Return the column of a row to which a name in a log belongs, and the factor of its unit. None if it has none."""
    plain = re.sub("[^a-z0-9]+", "_", name.lower()).strip("_")
    known = meaning(name)
    if plain not in _OWN and known.column in _KEPT and known.role in ("training", "position"):
        return _KEPT[known.column], known.factor
    match = None if plain in _OWN else _FILLERS.match(name)
    return _OWN.get(plain, (None, 1.0)) if match is None else _column(name[match.end() :])


def _value(text: str, unit: str) -> float:
    """Return a number such as 1,024, or 1.5 with the unit K."""
    return float(text.replace(",", "")) * _UNITS.get(unit, 1.0)
