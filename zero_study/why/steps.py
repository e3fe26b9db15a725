"""Read the training steps in a log: losses, gradient norms, learning rates, loss scales, times and memory, by rank.

Each reader of `zero-study import` knows the whole format of one program. The logs of failed runs mix the output of
several programs, so that this module reads every line independently.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from zero_study.why.log import Line

MOST_CONSTANTS = 100  # names of norms and ratios that are kept
FIRST_STEPS = 2  # that start the workers which load data
MOST_PRINTED = 60  # lines of a dictionary
FIRST, LAST = 2000, 2000  # rows that are kept of a long log
MOST_ODD = 500  # rows with NaN or 0.0 that are kept besides
# Lines of steps, and of progress bars, after which only the last ones are read, at the end, and those that are odd.
MANY = 4 * FIRST

_NUMBER = r"[-+]?(?:\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?|\.\d+|nan|inf(?:inity)?)"
# A pair such as 'loss': 1.5, lm loss: 1.5E+00, loss=1.5 or "grad_norm": "nan". Names of metrics may contain / and _.
_PAIR = re.compile(
    rf"""["']?([A-Za-z][\w/.\-()]*(?:\ [a-z]+(?:\ \(ms\)|\ \(tokens\))?)*)["']?\s*[:=]\s*
    (?:tensor\()?["'\[]?({_NUMBER})([KMBk]\b)?""",
    re.IGNORECASE | re.VERBOSE,
)
_BAR = re.compile(
    r"(?P<name>[^|\r]*?)\s*\d{1,3}%\|[^|]*\|\s*(?P<done>[\d.]+[kM]?)/(?P<all>[\d.]+[kM]?)\s*"
    r"\[(?P<spent>[\d:]+)<(?P<left>[\d:?]+)[^\],]*,\s*(?P<rate>[\d.]+|\?)\s?(?P<unit>s/\w+|\w+/s)"
)
_OVERFLOW = re.compile(
    r"OVERFLOW!.*?[Ll]oss scale:? ?(?P<scale>[\d.e+]+),? (?:but hysteresis|reducing to (?P<next>[\d.e+]+))"
)
# Words of bars that count examples of the data set, files or weights, not steps.
_NOT_STEPS = re.compile(
    r"map|tokeniz|download|load|fetch|generat|filter|pack|shard|convert|resolv|adding|process|saving|eval|predict|"
    r"compil|rollout|captur|sanity|validat|testing|running|extract|writ", re.IGNORECASE,
)  # fmt: skip

# What a program says when it does something else than training.
_ACTIVITY = re.compile(
    r"(?i:\b(?:running (?:evaluation|predictions?|validation|inference)|evaluating|validating|saving|saved|generating|"
    r"predicting|testing|checkpointing|sanity checking|merging|training (?:completed|finished|ended)))\b[^|{\n]{0,60}"
    r"|`Trainer\.fit` stopped[^|{\n]{0,40}"
)
_DURATION = re.compile(
    r"(?i)\b((?:finished )?(?:saving|saved|evaluat\w+|validat\w+)\b[^.]{0,70}?)\s*(?:in|took) ([\d.]+) seconds"
)
_SECONDS_TEXT = re.compile(r"\b(?:step[-_ ]?time|time|dt|elapsed)[:=]?\s+([\d.]+)\s?(ms|s|secs?|seconds)\b")
_COUNTED = re.compile(r"\bstep=(\d+), skipped=\d+|\bstep[: ] ?(\d+)/\d+")
_NOT_FINITE = re.compile(r"(?i)\bnan\b|\binf")
_ZERO = re.compile(r"(?<![\d.])0\.0(?!\d)")
# Words of which one is in every line that says something of a step, besides what a program does.
_CONCERNING = ("%|", "step", "OVERFLOW", "oss", "norm", "ratio", "len", "second")
_COLUMNS_SPACED = {
    "loss": "loss",
    "cross-entropy-loss": "loss",
    "gradient-norm": "norm",
    "learning-rate": "rate",
    "lr": "rate",
}
_SPACED = re.compile(
    rf"(?<![\w-])(loss|cross-entropy-loss|gradient-norm|learning-rate|lr)\s+({_NUMBER})(?![\w%])", re.IGNORECASE
)
# Names of norms and ratios that are set, or that may be 0 or 1 for a whole training.
_SET = re.compile(
    r"max|clip|eps|warm|drop|mask|lora|rms_norm|layer_?norm|rmsnorm|epoch|mix|finish|trunc|valid|aspect|sample"
)
_NUMBERED = re.compile(r"\b(?:iter(?:ation)?|step)[ :]\s*(\d+)(?=[:/ ,|])")
LONGEST_ACTIVITY = 1000  # characters of a line that says what the program does
_LOSSES = {
    "loss",
    "lm loss",
    "lm_loss",
    "train_loss",
    "train/loss",
    "total_loss",
    "training_loss",
    "step_loss",
    "act_loss",
    "reduced_train_loss",
}
_EVALUATIONS = {"eval_loss", "eval/loss", "val_loss", "val/loss", "validation_loss", "valid_loss"}
_NORMS = {"grad_norm", "grad norm", "gnorm", "train/grad_norm", "gradient_norm", "global_grad_norm", "actor/grad_norm"}
_RATES = {"learning_rate", "lr", "learning rate", "train/learning_rate", "actor/lr", "train/lr"}
_SCALES = {"loss_scale", "loss scale", "scale"}
_STEPS = {"step", "global_step", "iteration", "iter", "training/global_step", "train/global_step"}
_SECONDS = {
    "step_time": 1.0, "time_per_step": 1.0, "elapsed time per iteration (ms)": 1e-3, "timing_s/step": 1.0,
    "elapsed_time_per_iteration_ms": 1e-3, "iter_time": 1.0, "perf/time_per_step": 1.0, "time/step": 1.0,
}  # fmt: skip
_COLUMNS = {
    **dict.fromkeys(_LOSSES, "loss"), **dict.fromkeys(_NORMS, "norm"), **dict.fromkeys(_RATES, "rate"),
    **dict.fromkeys(_SCALES, "scale"), **dict.fromkeys(_STEPS, "step"), "epoch": "epoch",
    "memory(gib)": "memory", "max_memory": "memory",
}  # fmt: skip


# The time for which a step waited for its data, the rest of the step, or the whole step, with what makes seconds of it.
_TIMED = {
    **dict.fromkeys(
        ("data_s", "data_time", "data time", "dataloading_s", "data_loading_time", "dataload_time", "time/data",
         "timing_s/data", "data_times", "data_wait"), ("data", 1.0),
    ),
    **dict.fromkeys(("updt_s", "update_s", "model_times", "compute_s"), ("rest", 1.0)),
    **dict.fromkeys(("time", "batch_time", "step_s"), ("whole", 1.0)),
    **{name: ("whole", factor) for name, factor in _SECONDS.items()},
}  # fmt: skip
# Log probabilities of whole answers, in trainings on preferences.
_ANSWERS = ("logps/chosen", "logps/rejected")


# Columns of `study.public_runs`, by those of a row.
_IMPORTED = {
    "loss": "loss", "norm": "gradient_norm", "rate": "learning_rate", "step": "step", "seconds": "seconds_per_step",
}  # fmt: skip


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


class Bar(NamedTuple):
    """The last state of a progress bar."""

    line: Line
    name: str
    done: float
    total: float
    seconds: float  # per unit, as the bar shows it


@dataclass
class Series:
    """The first and the last logged rows of a rank."""

    first: list[Row] = field(default_factory=list)
    last: deque[Row] = field(default_factory=lambda: deque(maxlen=LAST))
    odd: list[Row] = field(default_factory=list)  # with NaN or 0.0, between the first and the last rows
    count: int = 0

    def add(self, row: Row, is_odd: bool = False) -> None:
        self.count += 1
        if len(self.first) < FIRST:
            self.first.append(row)
        elif is_odd and len(self.odd) < MOST_ODD:
            self.odd.append(row)
        else:
            self.last.append(row)

    @property
    def rows(self) -> list[Row]:
        return [*self.first, *sorted([*self.odd, *self.last], key=lambda row: row.line.number)]


class Lengths(NamedTuple):
    """The typical and the longest length of the samples, as a metric of a log states them."""

    line: Line
    typical: float
    longest: float


@dataclass
class Constant:
    """A value that was logged several times. It is constant as long as `differs` is false."""

    line: Line
    value: float
    count: int = 1
    differs: bool = False


@dataclass
class Waiting:
    """The time for which steps waited for data. The first steps, which start the workers, are left out."""

    line: Line  # of the longest wait
    longest: float
    data: float = 0.0  # seconds of all steps
    total: float = 0.0
    count: int = 0

    @property
    def share(self) -> float:
        return self.data / self.total if self.total else 0.0


@dataclass
class Steps:
    """Reads the lines of a log, and keeps its steps, progress bars and metrics."""

    by_rank: dict[int | None, Series] = field(default_factory=dict)
    bars: dict[str, Bar] = field(default_factory=dict)  # by what they count
    bar_times: list[tuple[int, float]] = field(default_factory=list)  # steps and their seconds, of the bar of steps
    overflows: list[tuple[Line, float]] = field(default_factory=list)  # and the loss scale that was too large
    num_overflows: int = 0
    constants: dict[str, Constant] = field(default_factory=dict)  # norms and ratios beside those of rows
    num_engine_steps: int = 0  # as DeepSpeed counts them
    lengths: Lengths | None = None
    waiting: Waiting | None = None
    answers: tuple[Line, bool] | None = None  # where log probabilities of answers are logged, and whether all are 0.0
    activities: deque[tuple[Line, str]] = field(default_factory=lambda: deque(maxlen=20))
    _lines_of_steps: int = 0
    _lines_of_bars: int = 0
    _last_lines: deque[Line] = field(default_factory=lambda: deque(maxlen=2 * LAST))  # of steps, not read yet
    _last_bars: deque[Line] = field(default_factory=lambda: deque(maxlen=64))
    _printed: dict[int | None, list[Line]] = field(default_factory=dict)  # lines of a dictionary that has not ended
    evaluations: list[tuple[Line, float]] = field(default_factory=list)  # losses of evaluations
    durations: list[tuple[Line, str, float]] = field(default_factory=list)  # what a log says of other work, in seconds
    recent: deque[tuple[Line, int, int]] = field(default_factory=lambda: deque(maxlen=8))  # states of bars of steps

    @property
    def wants_all(self) -> bool:
        """Whether the reader is inside a dictionary that is printed on several lines."""
        return bool(self._printed)

    @staticmethod
    def concerns(text: str) -> bool:
        """Return whether a line may contain values of a step. The result does not depend on its digits."""
        if any(word in text for word in _CONCERNING) or text.rstrip().endswith("{"):
            return True
        may_be_activity = "ing" in text or "aved" in text or "fit" in text
        return may_be_activity and _ACTIVITY.search(text[:LONGEST_ACTIVITY]) is not None

    def take(self, line: Line) -> None:
        """Read the values of a step from a line."""
        text = line.text
        joined = self._join(line)
        if joined is not None:
            self._take_pairs(joined)
            return
        if line.rank in self._printed:
            return
        if "%|" in text:
            self._lines_of_bars += 1
            if self._lines_of_bars < MANY:
                self._take_bar(line)
            else:
                self._last_bars.append(line)
        if "step" in text and (match := _COUNTED.search(text)):
            self.num_engine_steps = max(self.num_engine_steps, int(match[1] or match[2]))
        if "OVERFLOW" in text and (match := _OVERFLOW.search(text)):
            self.num_overflows += 1
            if len(self.overflows) < FIRST:
                self.overflows.append((line, float(match["scale"])))
        if ("oss" in text or "norm" in text or "len" in text or "ratio" in text) and "rror" not in text:
            self._lines_of_steps += 1
            is_odd = "0.0" in text and _ZERO.search(text)
            if not is_odd and ("nan" in text or "NaN" in text or "inf" in text or "Inf" in text):
                is_odd = _NOT_FINITE.search(text)
            if self._lines_of_steps < MANY or is_odd:
                self._take_pairs(line, bool(is_odd))
            else:
                self._last_lines.append(line)
        if "second" in text and (match := _DURATION.search(text)) and len(self.durations) < FIRST:
            self.durations.append((line, match[1], float(match[2])))
        if "ing" in text or "aved" in text or "fit" in text:
            match = _ACTIVITY.search(text) if len(text) < LONGEST_ACTIVITY else None
            if match:
                self.activities.append((line, match[0]))

    def _take_constant(self, line: Line, name: str, value: float) -> None:
        constant = self.constants.get(name)
        if constant is not None:
            constant.count += 1
            constant.differs = constant.differs or value != constant.value
        elif len(self.constants) < MOST_CONSTANTS and not _SET.search(name):
            self.constants[name] = Constant(line, value)

    def finish(self) -> None:
        """Read the last lines of a long log. Call this once, after all lines were passed to `take`."""
        for line in self._last_bars:
            self._take_bar(line)
        for line in self._last_lines:
            self._take_pairs(line)
        self._last_bars.clear()
        self._last_lines.clear()

    def _join(self, line: Line) -> Line | None:
        """Join a dictionary that is printed on several lines. Return it as one line when it ends, and None before."""
        text = line.text.rstrip()
        if text.endswith("{") and len(text) < LONGEST_ACTIVITY:
            self._printed[line.rank] = [line._replace(text="{")]
        elif line.rank in self._printed:
            lines = self._printed[line.rank]
            lines.append(line)
            if text.strip() in ("}", "},") or len(lines) > MOST_PRINTED or not text[:1].isspace():
                del self._printed[line.rank]
                return lines[0]._replace(text=" ".join(each.text.strip() for each in lines))
        return None

    def add_series(self, columns: Mapping[str, Sequence[Any]]) -> None:
        """Add rows from the columns of an imported log, which have no line numbers."""
        count = max(map(len, columns.values()), default=0)
        numbered = {own: columns.get(name, ()) for own, name in _IMPORTED.items()}
        series = self.by_rank.setdefault(None, Series())
        for place in range(count):
            values = {own: column[place] for own, column in numbered.items() if place < len(column)}
            if values.get("loss") is not None or values.get("norm") is not None:
                series.add(Row(Line(0, None, f"row {place + 1}: {values}"), **values))

    @property
    def rows(self) -> list[Row]:
        """The rows of the rank that logged the most steps."""
        series = max(self.by_rank.values(), key=lambda each: each.count, default=None)
        return [] if series is None else series.rows

    @property
    def num_steps(self) -> int:
        """A lower bound of the number of trained steps, from the logged rows and the progress bars."""
        bar = self.step_bar
        steps = [int(row.step) for row in self.rows if row.step is not None and math.isfinite(row.step)]
        return max(len(self.rows), int(bar.done) if bar else 0, max(steps, default=0), self.num_engine_steps)

    @property
    def usual_seconds(self) -> float | None:
        """The usual seconds per step, from the logged rows or the progress bar. None if the log does not state them."""
        times = [row.seconds for row in self.rows if row.seconds] or [seconds for _, seconds in self.bar_times]
        return statistics.median(times) if times else None

    @property
    def step_bar(self) -> Bar | None:
        """The progress bar of the training steps, or None."""
        return self.bars.get("steps")

    def _take_bar(self, line: Line) -> None:
        for match in _BAR.finditer(line.text):
            name = match["name"].strip()[-60:]
            key = name if _NOT_STEPS.search(name) and not name.lower().startswith("train") else "steps"
            shown, unit = match["rate"], match["unit"]
            rate = math.nan if shown == "?" else float(shown)
            seconds = rate if unit.startswith("s/") else (1 / rate if rate else math.inf)
            bar = Bar(line, name, _amount(match["done"]), _amount(match["all"]), seconds)
            if key in self.bars or len(self.bars) < 50:
                self.bars[key] = bar
            if key == "steps":
                self.recent.append((line, int(bar.done), int(bar.total)))
            if key == "steps" and math.isfinite(seconds) and len(self.bar_times) < FIRST:
                self.bar_times.append((int(bar.done), seconds))

    def _take_pairs(self, line: Line, is_odd: bool = False) -> None:
        values: dict[str, float] = {}
        lower = line.text.lower()
        if any(word in lower for word in ("loss ", "norm ", "rate ", "lr ")):
            for name, text in _SPACED.findall(line.text):
                values.setdefault(_COLUMNS_SPACED[name.lower()], _value(text, ""))
        seconds = None
        lengths: dict[str, float] = {}
        times: dict[str, float] = {}
        for name, text, factor in _PAIR.findall(line.text):
            name = name.lower()
            value = _value(text, factor)
            column = _COLUMNS.get(name)
            if (timed := _TIMED.get(name)) is not None:
                times.setdefault(timed[0], value * timed[1])
            if name in _EVALUATIONS and len(self.evaluations) < FIRST:
                self.evaluations.append((line, value))
            if column is not None and not (column == "step" and "step" in values):
                values.setdefault(column, value)
            elif name in _SECONDS:
                seconds = value * _SECONDS[name]
            elif name in _ANSWERS:
                self.answers = (line, value == 0 and (self.answers is None or self.answers[1]))
            elif ("norm" in name or "ratio" in name) and column is None:
                self._take_constant(line, name, value)
            elif "len" in name:
                lengths[name.rpartition("/")[2].rpartition("_")[2]] = value
        typical, longest = lengths.get("median") or lengths.get("mean"), lengths.get("max")
        if (
            typical
            and longest
            and (self.lengths is None or longest / typical > self.lengths.longest / self.lengths.typical)
        ):
            self.lengths = Lengths(line, typical, longest)
        if "loss" not in values and "norm" not in values:
            return
        if "data" in times:
            self._take_waiting(line, times, values.get("step"))
        if "step" not in values and (numbered := _NUMBERED.search(line.text)):
            values["step"] = float(numbered[1])
        if seconds is None and (stated := _SECONDS_TEXT.search(line.text)):
            seconds = float(stated[1]) * (1e-3 if stated[2] == "ms" else 1.0)
        self.by_rank.setdefault(line.rank, Series()).add(Row(line, **values, seconds=seconds), is_odd)

    def _take_waiting(self, line: Line, times: Mapping[str, float], step: float | None) -> None:
        """Add the time for which a step waited for data. Some programs log it together with the rest of the step."""
        data, whole = times["data"], times.get("whole")
        if whole is None and "rest" not in times:
            return
        total = max(whole, data) if whole is not None else data + times["rest"]
        if self.waiting is None:
            self.waiting = Waiting(line, 0.0)
            if step is None:
                return
        if not math.isfinite(total) or (step is not None and step <= FIRST_STEPS):
            return
        waiting = self.waiting
        waiting.data += data
        waiting.total += total
        waiting.count += 1
        if data > waiting.longest:
            waiting.line, waiting.longest = line, data


def _amount(text: str) -> float:
    factor = {"k": 1e3, "M": 1e6}.get(text[-1], 1.0)
    return float(text.rstrip("kM") or 0) * factor


def _value(text: str, suffix: str) -> float:
    return float(text.replace(",", "")) * {"k": 1e3, "m": 1e6, "b": 1e9}.get(suffix.lower(), 1.0)
