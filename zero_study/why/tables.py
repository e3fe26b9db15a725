"""Find signs in tables of numbers: columns that become NaN or stay constant, and rows that differ by a factor.

People paste such tables from dashboards and scripts, with cells between bars or with columns below a header.
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from zero_study.why.cause import Cause
from zero_study.why.known import conclude
from zero_study.why.log import Line

MOST_ROWS = 400  # of tables that are kept
GAP = 2  # lines between rows of one table
FEW = 4  # numbers of which something is concluded
RATIO = 0.02  # relative difference of ratios that are the same
SLOWER = 0.05  # share by which a later release is slower in each row
GROWS = 1.2  # times the first difference that the last one is if it grows
LARGEST = 64  # factor of which a number of ranks is a usual reason
_NUMBER = re.compile(r"^[-+]?(?:\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?|\.\d+|nan|inf(?:inity)?)$", re.IGNORECASE)
# Names of what must not stand still, and of steps.
_MOVES = re.compile(r"(?i)norm|trust|ratio|loss|stage\d|zero\d|grad")
_STEPS = re.compile(r"(?i)^(?:step|iter(?:ation)?|epoch|global.?step|#|)$")
# The release that a column is of, and what it measures.
_RELEASE = re.compile(r"(?<![\d.])v?(\d+\.\d+(?:\.\d+)?)(?![\d.]|\s?(?:[KMGT]i?B\b|m?s\b|%|[bB]\b))")
_SPEED = re.compile(r"(?i)(?:tok\w*|samples?|it\w*|steps?|examples?)\s?(?:/|per )\s?s|throughput|tflops|mfu")
_TIME = re.compile(r"(?i)(?:seconds|secs?|ms|\bs)\b|time|latency")


@dataclass
class _Table:
    lines: list[Line] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)


@dataclass
class Tables:
    """Reads the lines of a log, and keeps those that are rows of tables."""

    tables: list[_Table] = field(default_factory=list)
    _num_rows: int = 0

    wants_all = False

    @staticmethod
    def concerns(text: str) -> bool:
        """Return whether a line may be a row of a table. The result does not depend on its digits."""
        return text.count("|") >= 1 and "%|" not in text and "://" not in text and len(text) < 500

    def take(self, line: Line) -> None:
        """Read a row of a table."""
        cells = [cell.strip(" *`") for cell in line.text.strip().strip("|").split("|")]
        if len(cells) < 2 or self._num_rows >= MOST_ROWS or not any(cells):
            return
        if all(re.fullmatch(r"[:\-= ]*", cell) for cell in cells):
            cells = []  # the line below the header
        last = self.tables[-1] if self.tables else None
        fits = last is not None and line.number - last.lines[-1].number <= GAP
        if last is None or not fits or (cells and last.rows and _begins_another(cells, last.rows)):
            last = _Table()
            self.tables.append(last)
        last.lines.append(line)
        self._num_rows += 1
        if cells:
            last.rows.append(cells)

    def causes(self) -> Iterator[Cause]:
        """Yield the causes that the tables show."""
        for table in self.tables:
            yield from list(_of(table))[:1]
            yield from _releases(table)


def _begins_another(cells: Sequence[str], rows: Sequence[Sequence[str]]) -> bool:
    """Return whether a row is the header of another table: it has another number of cells, or words below numbers."""
    if len(cells) != len(rows[0]):
        return True
    has_numbers = len(rows) > 1 and any(_value(cell) is not None for cell in rows[-1])
    return has_numbers and all(_value(cell) is None for cell in cells)


def _value(cell: str) -> float | None:
    text = cell.replace(",", "").split(" ")[0]
    return float(text) if _NUMBER.match(text) else None


@dataclass(frozen=True)
class _Series:
    name: str
    values: tuple[float, ...]
    line: Line


def _of(table: _Table) -> Iterator[Cause]:
    series = _series(table)
    for numbers in series:
        bad = next((place for place, value in enumerate(numbers.values) if not math.isfinite(value)), None)
        if bad is not None and bad >= 2 and not all(map(math.isfinite, numbers.values)):
            yield conclude("wrong/table-not-finite", (numbers.line,), name=numbers.name, place=str(bad + 1))
        finite = [value for value in numbers.values if math.isfinite(value)]
        if len(finite) >= FEW and _MOVES.search(numbers.name) and _stands_still(finite):
            yield conclude("wrong/table-stands-still", (numbers.line,), name=numbers.name, value=f"{finite[-1]:.8g}")
    for first, second in itertools.combinations(series, 2):
        if (factor := _factor(first, second)) is not None:
            smaller, larger = (first, second) if sum(first.values) < sum(second.values) else (second, first)
            yield conclude(
                "wrong/table-factor", (smaller.line, larger.line), smaller=smaller.name, larger=larger.name,
                factor=f"{factor:g}", values=str(len(first.values)),
            )  # fmt: skip


def _releases(table: _Table) -> Iterator[Cause]:
    """Yield the cause that a later release is slower in all rows of a table with the speeds of two releases."""
    series = _series(table)
    named = [(column, release[1]) for column in series if (release := _RELEASE.search(column.name)) is not None]
    if len(named) != 2 or len({release for _, release in named}) != 2:
        return
    (old, _), (new, _) = sorted(named, key=lambda pair: tuple(map(int, pair[1].split("."))))
    is_speed = all(_SPEED.search(column.name) for column in (old, new))
    is_time = not is_speed and all(_TIME.search(column.name) for column in (old, new))
    if not (is_speed or is_time) or not all(math.isfinite(value) and value > 0 for value in (*old.values, *new.values)):
        return
    pairs = list(zip(old.values, new.values, strict=True))
    shares = [1 - after / before if is_speed else after / before - 1 for before, after in pairs]
    if min(shares) < SLOWER:
        return
    labels = next((column for column in series if column.name and column not in (old, new)), None)
    at = [f" at {labels.name} {value:,.6g}" for value in labels.values] if labels is not None else [""] * len(shares)
    is_length = labels is not None and re.search(r"(?i)len|seq|token|context", labels.name) is not None
    grows = is_length and len(shares) > 1 and shares == sorted(shares) and shares[-1] > GROWS * shares[0]
    yield conclude(
        "slow/later-release", (new.line,), new=new.name, old=old.name,
        differences=", ".join(f"{100 * share:.0f} %{place}" for share, place in zip(shares, at, strict=True)),
        growth=(
            " The difference grows with the length, which points to attention: an explicit mask, or another default, "
            "keeps scaled_dot_product_attention from its flash kernel."
        ) if grows else "",
    )  # fmt: skip


def _stands_still(values: Sequence[float]) -> bool:
    """Return whether the last numbers are equal in all digits and have decimals, which gradients never do."""
    last = values[-FEW:]
    return bool(last[-1]) and len({f"{value:.9g}" for value in last}) == 1 and last[-1] != int(last[-1])


def _factor(first: _Series, second: _Series) -> float | None:
    """Return the whole number by which two series differ in all steps. None if there is none."""
    if len(first.values) != len(second.values) or len(first.values) < FEW:
        return None
    if not all(math.isfinite(value) and value > 0 for value in (*first.values, *second.values)):
        return None
    if not (_MOVES.search(first.name) and _MOVES.search(second.name)):
        return None
    ratios = [larger / smaller for larger, smaller in zip(first.values, second.values, strict=True)]
    ratio = statistics.median(ratios)
    if ratio < 1:
        ratios, ratio = [1 / number for number in ratios], 1 / ratio
    whole = round(ratio)
    is_constant = all(math.isclose(number, ratio, rel_tol=RATIO) for number in ratios)
    is_varied = max(first.values) > min(first.values) * (1 + 2 * RATIO)
    return (
        float(whole)
        if is_constant and is_varied and 2 <= whole <= LARGEST and abs(ratio - whole) < RATIO * whole
        else None
    )


def _series(table: _Table) -> list[_Series]:
    """Return the columns of a table with their headers, or its rows if their first cells are names."""
    if len(table.rows) < 2:
        return []
    header, *body = table.rows
    if any(_value(cell) is not None for cell in header):
        header, body = [""] * len(header), table.rows
    by_row = [_numbers(row[1:]) for row in body]
    if all(by_row) and all(_value(row[0]) is None for row in body) and len(header) > FEW:
        return [
            _Series(f"{header[0]} {row[0]}".strip(), tuple(values), table.lines[-len(body) + place])
            for place, (row, values) in enumerate(zip(body, by_row, strict=True))
            if values
        ]
    columns = []
    for column, name in enumerate(header):
        values = _numbers([row[column] for row in body])
        if values and not _STEPS.match(name):
            columns.append(_Series(name, tuple(values), table.lines[-1]))
    return columns


def _numbers(cells: Sequence[str]) -> list[float] | None:
    values = [value for cell in cells if (value := _value(cell)) is not None]
    return values if cells and len(values) == len(cells) else None
