"""Collect what a log says about its runs. A draft is a run that is still being read."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from zero_study.errors import Refusal
from zero_study.logs.reading import Number, cleaned
from zero_study.public_runs.schema import COLUMNS, Ending, Series, Setting

MOST_ROWS = 200_000  # of all tables of a file; if there are more, the largest table drops every second row
MOST_CELLS = 2_000_000  # rows times columns, likewise
MOST_COLUMNS = 1_000
MOST_NOTES = 200  # values of a setting in the log's own words
MOST_RUNS = 1_000  # in one file
MOST_FALLS = 0.1  # of the changes of a clock; a resumed training may set it back
CLOCK_JUMPS = "the clock jumps back"
MISSING_STEPS = "steps are missing in the middle: some logged steps are further apart than most"
MOST_INTERVALS = 64  # between steps, of different lengths
MOST_GAPS = 1 / 3  # longer intervals per usual interval; a log with more of them has no regular steps

_ORDER = {name: place for place, name in enumerate(COLUMNS)}  # of the columns in a public run
EXACT = 1 << 53  # larger integers cannot be stored as floats
_MISSING = math.nan
_NOT_FINITE = math.inf  # stands for every value that is no finite number

Place = str | int | None  # the number of a line, or another place in a file


class Space:
    """The tables of a file, which share MOST_ROWS and MOST_CELLS, so that restarts need no more memory."""

    def __init__(self) -> None:
        self.tables: list[Table] = []
        self.num_rows = self.num_cells = 0

    def shrink(self) -> None:
        """Let the largest tables drop every second row until all tables have enough space."""
        while self.num_rows > MOST_ROWS or self.num_cells > MOST_CELLS:
            largest = max(self.tables, key=lambda table: table.num_cells)
            if largest.num_kept < 2:
                return
            largest.halve()


class Table:
    """Columns of numbers that grow row by row. If its file has too many rows, every second row is dropped."""

    def __init__(self, space: Space) -> None:
        self._space = space
        space.tables.append(self)
        self._columns: dict[str, array[float]] = {}
        self._with_fractions: set[str] = set()  # columns that do not consist of integers
        self.num_kept = 0
        self._stride = 1  # every row whose number is a multiple of it is kept
        self._last: Mapping[str, Number] | None = None  # the last row, if it is not kept
        self.num_rows = 0  # that were added

    def add(self, row: Mapping[str, Number]) -> None:
        """Add a row. A column that is not in the row gets a missing value."""
        if not row:
            return
        self.num_rows += 1
        if (self.num_rows - 1) % self._stride:
            self._last = row
        else:
            self._last = None
            self._keep(row)
            self._space.shrink()

    @property
    def num_cells(self) -> int:
        return self.num_kept * len(self._columns)

    def halve(self) -> None:
        """Drop every second row, but keep the last one for `series`."""
        if self._last is None and self.num_kept % 2 == 0:
            last = {name: column[-1] for name, column in self._columns.items() if not math.isnan(column[-1])}
            whole = {name for name, value in last.items() if math.isfinite(value)} - self._with_fractions
            self._last = {name: int(value) if name in whole else value for name, value in last.items()}
        rows, cells = self.num_kept, self.num_cells
        self._columns = {name: column[::2] for name, column in self._columns.items()}
        self.num_kept = (self.num_kept + 1) // 2
        self._stride *= 2
        self._space.num_rows += self.num_kept - rows
        self._space.num_cells += self.num_cells - cells

    def _keep(self, row: Mapping[str, Number]) -> None:
        cells = self.num_cells
        for name, value in row.items():
            if name not in self._columns:
                self._columns[name] = array("d", [_MISSING]) * self.num_kept
            if not math.isfinite(value):
                self._columns[name].append(_NOT_FINITE)
                continue
            if isinstance(value, float) or abs(value) > EXACT:
                self._with_fractions.add(name)
            self._columns[name].append(value)
        self.num_kept += 1
        for column in self._columns.values():
            if len(column) < self.num_kept:
                column.append(_MISSING)
        self._space.num_rows += 1
        self._space.num_cells += self.num_cells - cells

    def rename(self, name: str, to: str) -> None:
        """Give a column another name."""
        if name in self._columns:
            self._columns = {to if each == name else each: column for each, column in self._columns.items()}
            self._with_fractions |= {to} if name in self._with_fractions else set()
        if self._last is not None:
            self._last = {to if each == name else each: value for each, value in self._last.items()}

    def largest(self, name: str) -> float:
        """Return the largest finite value of a column, or minus infinity if there is none."""
        return max((value for value in self._columns.get(name, ()) if math.isfinite(value)), default=-math.inf)

    @property
    def kept_one_in(self) -> int:
        """Return 1 if all rows were kept, 2 if every second row was kept, and so on."""
        return self._stride

    @property
    def names(self) -> set[str]:
        return set(self._columns)

    def series(self) -> Series | None:
        """Return the columns with the rows that were kept, and the last row. None if there is no row."""
        if self._last is not None:
            self._keep(self._last)
            self._last = None
        if not self.num_kept:
            return None
        not_finite = {
            name: [place for place, value in enumerate(column) if value == _NOT_FINITE]
            for name, column in self._columns.items()
        }
        in_order = sorted(self._columns, key=lambda name: _ORDER.get(name, len(_ORDER)))
        columns: dict[str, list[Number | None]] = {}
        for name in in_order:
            convert = float if name in self._with_fractions else int
            columns[name] = [convert(value) if math.isfinite(value) else None for value in self._columns[name]]
        return Series(
            columns=columns,
            not_finite={name: places for name, places in not_finite.items() if places},
        )


class Marks:
    """What is unusual about a log. Each kind is counted, and only the first location of each kind is kept."""

    def __init__(self) -> None:
        self._places: dict[str, tuple[Place, int]] = {}

    def add(self, kind: str, where: Place = None, times: int = 1) -> None:
        first, count = self._places.get(kind, (where, 0))
        self._places[kind] = (first, count + times)

    def remove(self, kind: str) -> None:
        self._places.pop(kind, None)

    def texts(self) -> list[str]:
        return [self._text(kind, *place) for kind, place in self._places.items()]

    @staticmethod
    def _text(kind: str, where: Place, count: int) -> str:
        if where is None:
            return kind
        place = f"line {where}" if isinstance(where, int) else where
        return f"{kind} ({place})" if count == 1 else f"{kind} ({count:,} times, first at {place})"


@dataclass
class Draft:
    """One run that is being read from a log."""

    setting: dict[str, Any] = field(default_factory=dict)
    other: dict[str, str | int | float | bool | None] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    totals: dict[str, Number] = field(default_factory=dict)
    ending: Ending = "unknown"
    last_planned: int | None = None  # the number of the last step, if the log states it
    label: str = ""  # the name of this run in its file, if the file has several
    space: Space = field(default_factory=Space)
    training: Table = field(init=False)
    evaluation: Table = field(init=False)
    marks: Marks = field(default_factory=Marks)
    not_read: Marks = field(default_factory=Marks)  # the marks of what could not be read
    first_line: int | None = None
    last_line: int | None = None
    _several: set[str] = field(default_factory=set)  # fields for which the log states several values
    began: float | None = None  # the time from which `seconds` counts, in seconds since 1970
    _first_step: Number | None = None
    _last_step: Number | None = None
    _last_trained: Number | None = None
    _last_seconds: Number = -math.inf
    _clock_rises: int = 0
    _clock_falls: int = 0  # while the step did not fall
    _intervals: dict[Number, tuple[Place, int]] = field(default_factory=dict)  # between steps -> first place and count
    _last_interval: Number = 0

    def __post_init__(self) -> None:
        self.training, self.evaluation = Table(self.space), Table(self.space)

    # ------------------------------------------------ setting

    def state(self, name: str, value: object) -> None:
        """Record a setting of the run that the log states. If its value is not valid, keep it as a note."""
        value = cleaned(value) if isinstance(value, str) else value
        if value in (None, "") or name in self._several or self.setting.get(name) == value:
            return
        if name in self.setting:
            del self.setting[name]
            self._several.add(name)
            self.marks.add(f"the log states several values of {name}, so none of them was imported")
            return
        try:
            self.setting[name] = getattr(Setting.model_validate({name: value}), name)
        except ValidationError:
            self.note(name, value)

    def note(self, name: str, value: object) -> None:
        """Keep a training option under the log's name for it. Later values of the same name are ignored."""
        if isinstance(value, str):
            value = cleaned(value)
        elif isinstance(value, int) and abs(value) > EXACT:
            value = float(value) if abs(value) < 1e300 else None
        elif isinstance(value, float) and not math.isfinite(value):
            value = str(value)
        elif not isinstance(value, (int, float)):  # a list, or nothing
            return
        if len(self.other) < MOST_NOTES and value not in (None, ""):
            self.other.setdefault(cleaned(name), value)

    def version(self, package: str, version: str) -> None:
        """Note the version of a package that the run used."""
        if len(self.versions) < MOST_NOTES:
            self.versions.setdefault(cleaned(package), cleaned(version))

    def total(self, name: str, value: Number | None) -> None:
        """Note a value of the whole run, such as its duration. A later value replaces an earlier one.

        `name` is one of the names of `COLUMNS`.
        """
        if value is not None and math.isfinite(value):
            self.totals[name] = value if isinstance(value, float) or abs(value) <= EXACT else float(value)

    def largest(self, name: str, value: Number | None) -> None:
        """Note a value of the whole run, such as a memory peak. If there are several values, keep the largest one."""
        if value is not None and value > self.totals.get(name, -math.inf):
            self.total(name, value)

    def absorb(self, later: Draft) -> None:
        """Add what a log stated about this run after its first rows, for instance when it was resumed."""
        for name, value in later.setting.items():
            self.state(name, value)
        for name, value in later.other.items():
            self.note(name, value)
        for package, version in later.versions.items():
            self.version(package, version)
        for name, total in later.totals.items():
            self.largest(name, total)
        self.last_planned = later.last_planned or self.last_planned

    # ------------------------------------------------ rows

    def begin_clock(self, time: float) -> None:
        """Count the seconds of the run from this time on, given in seconds since 1970."""
        self.began = time

    def begins_another_run(self, step: Number | None) -> bool:
        """Return whether a row with this step must belong to another run, because the step numbers restart.

        That is so if it is not after the first step, but before the last.
        """
        if step is None or self._first_step is None or self._last_step is None:
            return False
        return step <= self._first_step and step < self._last_step

    def train(self, row: Mapping[str, Number], where: Place, time: float | None = None) -> None:
        """Add a logged training step. `time` is the time of the row, in seconds since 1970."""
        row = self._noticed(row, where, time)
        step = row.get("step")
        if step is not None and self._last_trained is not None:
            if step == self._last_trained:
                self.marks.add("a step is logged more than once", where)
            elif step < self._last_trained:
                self.marks.add("the steps go back: the training was resumed, or logged out of order", where)
            elif math.isfinite(step):
                self._last_interval = step - self._last_trained
                if len(self._intervals) < MOST_INTERVALS or self._last_interval in self._intervals:
                    first, count = self._intervals.get(self._last_interval, (where, 0))
                    self._intervals[self._last_interval] = first, count + 1
        self._last_trained = step if step is not None and math.isfinite(step) else self._last_trained
        self.training.add(row)

    def evaluate(self, row: Mapping[str, Number], where: Place, time: float | None = None) -> None:
        """Add an evaluation. `time` is the time of the row, in seconds since 1970."""
        self.evaluation.add(self._noticed(row, where, time))

    def _noticed(self, row: Mapping[str, Number], where: Place, time: float | None) -> Mapping[str, Number]:
        """Return a row with its seconds added, and note what is unusual about its position among the other rows."""
        if time is not None and math.isfinite(time) and "seconds" not in row:
            if self.began is None:
                self.began = time
                self.marks.add("seconds count from the first logged entry")
            row = {**row, "seconds": round(time - self.began, 6)}
        seconds, step = row.get("seconds", math.nan), row.get("step", math.nan)
        if seconds < self._last_seconds:
            self.marks.add(CLOCK_JUMPS, where)
            self._clock_falls += self._last_step is None or not step < self._last_step  # else it was resumed
        self._clock_rises += seconds > self._last_seconds > -math.inf
        if math.isfinite(seconds):
            self._last_seconds = seconds
        if math.isfinite(step):
            self._first_step = step if self._first_step is None else min(step, self._first_step)
            self._last_step = step
            if step < 0:
                self.not_read.add("the number of a step is negative", where)
        for name, value in row.items():
            if not math.isfinite(value):
                self.marks.add(f"{name} is not a finite number", where)
        return row

    def rename_if_no_clock(self, to: str) -> None:
        """Rename the column `seconds` to `to` if its values cannot be elapsed time.

        They are not if they fall too often while the steps rise, or never rise.
        """
        intervals = self._clock_rises + self._clock_falls
        if self._clock_falls > MOST_FALLS * intervals or (self._clock_falls and not self._clock_rises):
            for table in (self.training, self.evaluation):
                table.rename("seconds", to)
            self.marks.remove(CLOCK_JUMPS)
            self.marks.add(
                f"the values of the column seconds fall while the steps rise, so they are not used as "
                f"times. The column is imported as {to}"
            )

    def _note_missing_steps(self) -> None:
        """Note whether regular steps are interrupted. A log that goes on with longer intervals is not."""
        usual = max(self._intervals, key=lambda each: self._intervals[each][1], default=0)
        gaps = [self._intervals[each] for each in self._intervals if each > usual]
        num_gaps, num_usual = sum(count for _, count in gaps), self._intervals.get(usual, (None, 0))[1]
        is_regular = 2 * num_usual > sum(count for _, count in self._intervals.values())
        if gaps and is_regular and num_gaps <= MOST_GAPS * num_usual and self._last_interval <= usual:
            self.not_read.add(MISSING_STEPS, gaps[0][0], num_gaps)

    @property
    def has_rows(self) -> bool:
        return bool(self.training.num_rows or self.evaluation.num_rows)

    def finish(self) -> None:
        """Conclude how the run ended, and note whether steps are missing and whether rows were dropped."""
        self._note_missing_steps()
        if self.ending == "unknown" and self.last_planned is not None and self._last_step is not None:
            self.ending = "finished" if self._last_step >= self.last_planned else "ended early"
        for table, noun in ((self.training, "training step"), (self.evaluation, "evaluation")):
            if (stride := table.kept_one_in) > 1:
                self.marks.add(
                    f"only every {stride}th of the {table.num_rows:,} logged {noun}s was imported, and the last one"
                )


class Runs:
    """The runs in one log. A run begins when a format says so, or when the step numbers restart."""

    def __init__(self, space: Space | None = None) -> None:
        self._space = space or Space()
        self.current = Draft(space=self._space)
        self._before: list[Draft] = []
        self._next: Draft | None = None  # what is stated after rows: it belongs to the next run, if there is one

    @property
    def draft_for_statements(self) -> Draft:
        """The run to which a statement in the log belongs. A statement after logged rows may begin another run."""
        if not self.current.has_rows:
            return self.current
        self._next = self._next or Draft(space=self._space)
        return self._next

    @property
    def latest(self) -> Draft:
        """The run to which a value belongs if the log may state it before or during the training."""
        return self._next or self.current

    def begin(self) -> Draft:
        """Begin another run, and return it. Raises Refusal if the file has too many runs."""
        if len(self._before) + 1 >= MOST_RUNS:
            raise Refusal(
                f"its steps begin again more than {MOST_RUNS:,} times, which would be too many runs. "
                "Divide it into several files"
            )
        self._before.append(self.current)
        self.current, self._next = self._next or Draft(space=self._space), None
        return self.current

    def train(self, row: Mapping[str, Number], where: Place, time: float | None = None) -> Draft:
        """Add a logged training step, and return the run to which it belongs."""
        self._begin_if_before(row, where)
        self.current.train(row, where, time)
        return self.current

    def evaluate(self, row: Mapping[str, Number], where: Place, time: float | None = None) -> Draft:
        """Add an evaluation, and return the run to which it belongs."""
        self._begin_if_before(row, where)
        self.current.evaluate(row, where, time)
        return self.current

    def _begin_if_before(self, row: Mapping[str, Number], where: Place) -> None:
        if self.current.begins_another_run(row.get("step")):
            self.begin()
        self._absorb()
        self.current.ending = "unknown"  # it was resumed
        if isinstance(where, int):
            self.current.first_line = min(self.current.first_line or where, where)
            self.current.last_line = max(self.current.last_line or where, where)

    def _absorb(self) -> None:
        if self._next is not None:
            self.current.absorb(self._next)
            self._next = None

    def finished(self) -> list[Draft]:
        """Return the runs that have at least one row."""
        self._absorb()
        drafts = [draft for draft in (*self._before, self.current) if draft.has_rows]
        for draft in drafts:
            draft.finish()
        return drafts
