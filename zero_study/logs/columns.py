"""Translate the names of columns in logs to those of imported runs, and separate training steps from evaluations.

A name is only translated if it says what it means, with its unit. All other columns keep the log's name, because a
guess could be wrong: "GB" is 10^9 bytes in one program and 2^30 in another.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple, TypeVar

from zero_study.errors import Refusal
from zero_study.logs import draft as draft_module
from zero_study.logs.draft import EXACT, MISSING_STEPS, MOST_COLUMNS, Draft, Place, Runs, Space
from zero_study.logs.reading import GIB, MIB, Number, cleaned, duration, number, seconds_since_1970
from zero_study.public_runs.schema import COLUMNS

# A position is the number of the step or the time, for instance. Training steps and evaluations have it.
Role = Literal["position", "date", "run", "planned", "training", "evaluation", "internal"]


class Meaning(NamedTuple):
    """The meaning of a column of a log: the name of the column in an imported run, its role, and its unit."""

    column: str  # its name in the public run
    role: Role = "training"
    factor: Number = 1  # from the log's unit to the unit of `COLUMNS`


_POSITIONS = {
    "step": (
        "step", "steps", "global_step", "current_step", "current_steps", "iter", "iter_num", "iteration",
        "global_step_max_steps",
    ),
    "samples": ("samples", "consumed_samples", "samples_seen"),
    "tokens": ("tokens", "consumed_tokens", "tokens_seen", "num_input_tokens_seen"),
    "seconds": ("seconds", "runtime", "elapsed_seconds"),
    "epoch": ("epoch",),
}  # fmt: skip
_DATES = ("timestamp", "wall_time")
_TRAINING = {
    "loss": ("loss", "lm_loss", "loss_step", "global_avg_loss"),
    "seconds_per_step": ("seconds_per_step", "step_seconds", "step_time_s", "step_time_seconds"),
    "learning_rate": ("learning_rate", "lr"),
    "gradient_norm": ("gradient_norm", "grad_norm"),
    "tokens_per_second": ("tokens_per_second",),
    "tokens_per_second_per_gpu": ("tokens_per_second_per_gpu", "tps_per_gpu"),
    "samples_per_second": ("samples_per_second",),
    "training_accuracy": ("accuracy",),  # `accuracy` is of held-out data
    "used_bytes": ("used_bytes",),
    "host_bytes": ("host_bytes",),
}
_EVALUATION = {"evaluation_loss": ("loss", "lm_loss", "loss_epoch"), "accuracy": ("accuracy", "acc")}
_MEMORY = {
    "allocated_bytes": ("allocated", "memory_allocated", "mem_allocated"),
    "peak_allocated_bytes": (
        "peak_allocated", "max_allocated", "peak_memory_allocated", "max_memory_allocated", "mem_max_allocated",
        "memory_max_allocated",
    ),
    "reserved_bytes": ("reserved", "memory_reserved", "mem_reserved"),
    "peak_reserved_bytes": (
        "peak_reserved", "max_reserved", "peak_memory_reserved", "max_memory_reserved", "memory_max_reserved"
    ),
}  # fmt: skip
Row = TypeVar("Row")
NAMES_OF_METRICS = ("key", "metric", "metric_name", "tag", "variable")  # the column of a long table that names metrics
MOST_VALUES = 1_000_000  # of a long table, because all of them are in memory
MOST_REVERSED = 200_000  # rows, because all of them are in memory
REVERSED = "the newest row was first, so the rows were read in reverse order"
LONGEST_COLUMN = 1_000  # characters of a name
LARGEST = 10**300  # of an integer of a log that is a finite number
_UNITS = {"bytes": 1, "mib": MIB, "gib": GIB}


def _by_name(names: Mapping[str, Iterable[str]]) -> dict[str, str]:
    return {name: column for column, several in names.items() for name in several}


_POSITION_OF, _TRAINING_OF, _EVALUATION_OF = map(_by_name, (_POSITIONS, _TRAINING, _EVALUATION))
_MEMORY_OF = {
    f"{name}_{unit}": Meaning(column, "training", factor)
    for name, column in _by_name(_MEMORY).items()
    for unit, factor in _UNITS.items()
}
_OF_EVALUATION = re.compile(r"(?:eval|evaluation|val|valid|validation|validation_metrics|test)_(.+)")
_OF_RUN = re.compile("(?:run|experiment|exp|trial|job)(?:_?(?:id|uuid|name|number))?|seed")
_PROGRESS = re.compile(r"([0-9]{1,15}) ?/ ?([0-9]{1,15})")  # 10/300, for a step and the planned number of steps
LATEST = 1e11  # seconds since 1970; a larger time is in milliseconds, microseconds or nanoseconds
_OF_TRAINING = re.compile(r"(?:train|training|trainer|loss_metrics)_(.+)")


def meaning(name: str) -> Meaning:
    """Return what a column of a log means, judged by its name.

    An unknown column counts as a value of a training step.
    """
    plain = re.sub("[^a-z0-9]+", "_", name.lower()).strip("_")
    if name.startswith("_wandb"):  # what Weights & Biases notes for itself
        return Meaning(cleaned(name), "internal")
    if name == "_step":  # Weights & Biases counts entries of the log, see `Rows.add`
        return Meaning(name, "position")
    if plain == "evaluation_loss":
        return Meaning(plain, "evaluation")
    if match := _OF_EVALUATION.fullmatch(plain):
        return Meaning(_EVALUATION_OF.get(match[1], cleaned(name)), "evaluation")
    match = _OF_TRAINING.fullmatch(plain)
    plain = match[1] if match else plain
    if plain in _POSITION_OF:
        return Meaning(_POSITION_OF[plain], "position")
    if _OF_RUN.fullmatch(plain):
        return Meaning(cleaned(name), "run")
    if plain in _DATES:
        return Meaning(plain, "date")
    if plain in _MEMORY_OF:
        return _MEMORY_OF[plain]
    return Meaning(_TRAINING_OF.get(plain, cleaned(name)))


class Rows:
    """A collector of a log's rows, which adds them to the log's runs as training steps and evaluations.

    A column such as `run_id` says to which run a row belongs, so that the rows of several runs may alternate.
    `known` are names that a format defines differently from `meaning`.
    """

    def __init__(self, known: Mapping[str, Meaning] | None = None, space: Space | None = None) -> None:
        self._space = space or Space()
        self.runs = Runs(self._space)
        self._known = known or {}
        self._meanings: dict[str, Meaning] = {}
        self._taken: set[str] = set()
        self._texts: dict[str, tuple[Place, int]] = {}  # column -> where its first text is, and how many there are
        self._too_many = False
        self._counts_entries = False
        self._label: dict[str, str] = {}  # the values of the columns that name the current run
        self._by_label: dict[tuple[tuple[str, str], ...], Runs] = {}

    def meaning(self, name: str) -> Meaning | None:
        """Return the meaning of a column. None if the log has too many columns, or if the column's name is too long.

        If several columns have the same meaning, it belongs to the first one, and the others keep the log's name.
        """
        if name not in self._meanings:
            if len(self._meanings) >= MOST_COLUMNS or len(name) > LONGEST_COLUMN:
                self._too_many = True
                return None
            known = self._known.get(name) or meaning(name)
            if known.column in self._taken:
                own = cleaned(name)
                others = itertools.chain([own], (f"{own} ({number})" for number in itertools.count(2)))
                free = next(each for each in others if each not in self._taken and each not in COLUMNS)
                known = Meaning(free, known.role)
            self._taken.add(known.column)
            self._meanings[name] = known
        return self._meanings[name]

    def add(self, values: Iterable[tuple[str, object]], where: Place, is_trained: bool = False) -> Draft:
        """Add one row of the log, and return the run to which it belongs.

        A row has pairs of a name and a value, which is a number or a text. A row that has only a position is left out,
        unless it is the row of a training step.
        """
        position: dict[str, Number] = {}
        trained: dict[str, Number] = {}
        evaluated: dict[str, Number] = {}
        rows = {"position": position, "training": trained, "evaluation": evaluated}
        time: float | None = None
        planned: Number | None = None
        label: dict[str, str] = {}
        for name, value in values:
            known = self._meanings.get(name) or self.meaning(name)
            if known is None or known.role == "internal":
                continue
            if known.role == "run":
                if text := "" if value is None else cleaned(str(value)):
                    label[name] = text
                continue
            converted = value if type(value) is float else as_number(value)
            if converted is None and isinstance(value, str):
                if known.column == "seconds":
                    converted = duration(value)
                elif known.column == "step" and (match := _PROGRESS.fullmatch(value.strip())):
                    converted, planned = int(match[1]), int(match[2])
            if known.role == "date":
                time = seconds_since_1970(value) if converted is None and isinstance(value, str) else converted
                while time is not None and LATEST < time < math.inf:
                    time /= 1_000
            elif known.role == "planned":
                planned = converted
            elif converted is not None:
                is_same = known.factor == 1
                rows[known.role][known.column] = converted if is_same else _in_unit(converted, known.factor)
            elif value not in (None, [], {}) and not (isinstance(value, str) and not value.strip()):
                first, count = self._texts.get(known.column, (where, 0))
                self._texts[known.column] = first, count + 1
        if "_step" in position and "step" not in self._taken:
            position["step"] = position["_step"]
            self._counts_entries = True
        if label and (trained or evaluated) and not label.items() <= self._label.items():
            self._choose(label)
        if trained or is_trained:
            self.runs.train(position | trained, where, time)
        if evaluated:
            self.runs.evaluate(position | evaluated, where, time)
        if isinstance(planned, int) and planned > 0 and (trained or evaluated):
            self.runs.current.state("planned_steps", planned)
            self.runs.current.last_planned = planned
        return self.runs.current

    def _choose(self, label: dict[str, str]) -> None:
        """Continue with the run that has this label. Raises Refusal if there are too many runs."""
        key = tuple(sorted(label.items()))
        if key not in self._by_label:
            if len(self._by_label) >= draft_module.MOST_RUNS:
                names = " and ".join(label)
                raise Refusal(
                    f"its column {cleaned(names)} has more than {draft_module.MOST_RUNS:,} values, which "
                    "would be too many runs. Rename the column if its values are not names of runs"
                )
            self._by_label[key] = Runs(self._space) if self._by_label else self.runs
        self.runs, self._label = self._by_label[key], label

    def finish(self) -> list[Draft]:
        """Return all runs in the log. Raises Refusal if no column has a known name."""
        columns = {known.column for known in self._meanings.values()}
        if not columns & {*COLUMNS, "_step"}:
            shown = ", ".join(map(repr, list(self._meanings)[:8])) or "none"
            raise Refusal(
                f"the import knows none of its columns: {shown}. Rename those that you need to known "
                "names, such as step, loss and learning_rate"
            )
        drafts = self._finished()
        for draft in drafts if self._counts_entries else ():  # entries of evaluations are counted, too
            draft.not_read.remove(MISSING_STEPS)
        for draft in drafts[:1]:
            self._mark(draft, drafts)
        own = {known.column: name for name, known in self._meanings.items() if name not in self._known}
        for draft in drafts:
            if "seconds" in own:
                draft.rename_if_no_clock(self._own_name(own["seconds"]))
        is_above_1 = any(draft.evaluation.largest("accuracy") > 1 for draft in drafts)
        for draft in drafts if "accuracy" in own and is_above_1 else ():  # a percentage, perhaps
            draft.evaluation.rename("accuracy", self._own_name(own["accuracy"]))
        return drafts

    def _finished(self) -> list[Draft]:
        """Return the drafts of all runs, with their labels if a column contains them."""
        drafts: list[Draft] = []
        for label, runs in (self._by_label or {(): self.runs}).items():
            several = runs.finished()
            for place, draft in enumerate(several, 1):
                if label and len(self._by_label) > 1:
                    values = [value for _, value in label]
                    draft.label = "-".join([*values, *[str(place)] * (len(several) > 1)])
                for name, value in label:
                    draft.note(name, value)
            drafts += several
        if len(drafts) > draft_module.MOST_RUNS:
            raise Refusal(f"it seems to have more than {draft_module.MOST_RUNS:,} runs. Divide it into several files")
        return drafts

    def _own_name(self, name: str) -> str:
        """Return the name that the log uses for a column, changed so that comparisons ignore it."""
        own = cleaned(name)
        return own if own not in COLUMNS and own not in self._taken else f"{own} (as logged)"

    def _mark(self, draft: Draft, drafts: list[Draft]) -> None:
        """Note in the first run what is unusual about the columns of the file."""
        if self._too_many:
            draft.not_read.add(
                f"there are more than {MOST_COLUMNS:,} columns, or very long names, so some columns were left out"
            )
        if self._counts_entries:
            draft.marks.add(
                "the steps are numbers of entries that Weights & Biases counted, which may differ from optimizer steps"
            )
        with_numbers = {name for each in drafts for table in (each.training, each.evaluation) for name in table.names}
        for column, (where, count) in self._texts.items():
            if column in with_numbers:
                draft.not_read.add(f"values of {column} that are not numbers were left out", where, count)
        if texts := sorted(self._texts.keys() - with_numbers):
            draft.not_read.add(cleaned(f"columns without numbers were left out: {', '.join(texts)}"))


class LongRows(Rows):
    """A collector of the rows of a long table, which has one row per value, as MLflow exports it.

    The rows of each run and step are joined. A value that a run has twice for a step begins another row.
    """

    def __init__(self, metric: str, value: str) -> None:
        super().__init__()
        self._metric, self._value = metric, value
        self._joined: dict[tuple[int, int, Number], tuple[Place, dict[str, object]]] = {}
        self._runs_of: dict[tuple[object, ...], int] = {}
        self._times: dict[tuple[int, str, Number], int] = {}
        self._num_values = 0

    def add(self, values: Iterable[tuple[str, object]], where: Place, is_trained: bool = False) -> Draft:
        row = dict(values)
        metric, value = str(row.pop(self._metric, None) or ""), row.pop(self._value, None)
        known = {name: meaning(name) for name in row}
        step = next((as_number(row[name]) for name, each in known.items() if each.column == "step"), None)
        if metric.startswith("system/"):
            kind = "metrics of the system were left out, because MLflow counts its measurements and not the steps"
            self.runs.current.not_read.add(kind, where)
        elif step is None or not metric:
            self.runs.current.not_read.add("a value without a step or without a name was left out", where)
        else:
            label = tuple(str(row[name]) for name, each in known.items() if each.role == "run")
            run = self._runs_of.setdefault(label, len(self._runs_of))
            repeated = self._times[run, metric, step] = self._times.get((run, metric, step), -1) + 1
            kept = {name: row[name] for name, each in known.items() if each.role in ("run", "date", "position")}
            joined = self._joined.setdefault((run, repeated, step), (where, kept))[1]
            joined[metric] = "nan" if str(row.get("is_nan")).lower() in ("1", "true") else value
            self._num_values += 1
            if self._num_values > MOST_VALUES:
                raise Refusal(f"it has more than {MOST_VALUES:,} values. Write a column for each metric instead")
        return self.runs.current

    def finish(self) -> list[Draft]:
        for place in sorted(self._joined):
            where, row = self._joined[place]
            super().add(row.items(), where)
        self._joined.clear()
        return super().finish()


def rows_for(names: Iterable[str], known: Mapping[str, Meaning] | None = None) -> Rows:
    """Return an empty collector for a table with columns of these names, which may be a long table."""
    by_plain = {name.strip().lower(): name for name in names}
    metric = next((by_plain[name] for name in NAMES_OF_METRICS if name in by_plain), None)
    if metric is None or "value" not in by_plain or not any(meaning(name).column == "step" for name in by_plain):
        return Rows(known)
    return LongRows(metric, by_plain["value"])


def is_newest_first(rows: Iterable[Iterable[tuple[str, object]]]) -> bool:
    """Return whether rows are sorted from the last to the first step, within each run."""
    roles: dict[str, str] = {}  # of the columns that matter here
    last: dict[tuple[object, ...], Number] = {}
    falls = False
    for row in rows:
        steps: dict[str, Number] = {}
        label: tuple[object, ...] = ()
        for name, value in row:
            if name not in roles and len(roles) < MOST_COLUMNS:
                known = meaning(name)
                roles[name] = "run" if known.role == "run" else known.column
            if (role := roles.get(name)) == "run":
                label += (value,)
            elif role in ("step", "_step") and (step := as_number(value)) is not None and math.isfinite(step):
                steps.setdefault(role, step)
        if steps:
            step = steps.get("step", next(iter(steps.values())))
            before = last.get(label, math.inf)
            if step > before:
                return False
            falls = falls or step < before < math.inf
            last[label] = step
    return falls


def reverse(rows: Iterable[Row]) -> list[Row]:
    """Return rows in reverse order. Raises Refusal if there are too many."""
    kept: list[Row] = []
    for row in rows:
        kept.append(row)
        if len(kept) > MOST_REVERSED:
            raise Refusal(
                f"its rows begin with the newest one, and it has more rows than can be reversed "
                f"({MOST_REVERSED:,}). Sort its rows by step"
            )
    kept.reverse()
    return kept


def as_number(value: object) -> Number | None:
    """Return a value of a log as a number. None for texts, truth values, lists and missing values."""
    if isinstance(value, str):
        return number(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if isinstance(value, int) and abs(value) > EXACT:
        return float(value) if abs(value) < LARGEST else math.inf
    return value


def _in_unit(value: Number, factor: Number) -> Number:
    """Return a value converted to the unit of `COLUMNS`. Bytes are rounded to whole bytes."""
    converted = value * factor
    return round(converted) if isinstance(factor, int) and math.isfinite(converted) else converted
