"""Read CSV files with named columns, also those of Lightning and TensorBoard."""

from __future__ import annotations

import csv
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from zero_study.errors import Refusal
from zero_study.logs import reading
from zero_study.logs.columns import REVERSED, Meaning, Rows, is_newest_first, meaning, reverse, rows_for
from zero_study.logs.draft import Draft
from zero_study.public_runs.schema import COLUMNS

_SEPARATORS = (",", "\t", ";")
_DECIMAL_COMMA = re.compile(r"[-+]?[0-9]+,[0-9]+(?:[eE][-+]?[0-9]+)?")
_TAG = re.compile(r"-tag-(.+)\.csv")  # in the name of a file that TensorBoard exports


def header(line: str) -> list[str]:
    """Return the names of the columns in the first line of a CSV file. A repeated name gets a number."""
    try:
        cells = next(csv.reader([line], delimiter=_separator(line)), [])
    except csv.Error:
        return []
    names: list[str] = []
    for name in map(str.strip, cells):
        others = (f"{name} ({number})" for number in itertools.count(2))
        names.append(name if name not in names or not name else next(each for each in others if each not in names))
    return names


def _separator(line: str) -> str:
    return max(_SEPARATORS, key=line.count)


def is_known(names: list[str]) -> bool:
    """Return whether at least one of these column names has a known meaning."""
    return any(meaning(name).column in COLUMNS or name == "_step" for name in names)


def is_lightning(names: list[str], path: Path) -> bool:
    """Return whether a file is a metrics.csv that Lightning's CSVLogger wrote."""
    return path.name == "metrics.csv" and {"epoch", "step"} <= set(names)


def is_tensorboard(names: list[str]) -> bool:
    """Return whether column names are those of a scalar that TensorBoard exported as CSV."""
    return names == ["Wall time", "Step", "Value"]


def table(path: Path) -> Iterator[tuple[int, list[str], bool]]:
    """Yield the rows of a CSV file, the header first: the line number, the cells, and whether the row is complete.

    Raises Refusal if the file is no CSV.
    """
    file = reading.lines(path)
    first = next(file, None)
    if first is None:
        raise Refusal("the file is empty")
    yield first.number, header(first.text), first.is_whole
    last = first

    def texts() -> Iterator[str]:
        nonlocal last
        for line in file:
            last = line
            yield line.text + "\n"

    try:
        for cells in csv.reader(texts(), delimiter=_separator(first.text)):
            if cells:
                yield last.number, cells, last.is_whole
    except csv.Error as error:
        raise Refusal(f"line {last.number} is damaged: {error}") from None


def read(path: Path, known: Mapping[str, Meaning] | None = None, names: list[str] | None = None) -> list[Draft]:
    """Return the runs in a CSV file that has one row per logged step.

    `names` replaces the names in its first line.
    """
    file = table(path)
    _, own_names, _ = next(file)
    names = names or own_names
    rows = rows_for(names, known)
    for name in filter(None, names):
        rows.meaning(name)
    num_whole = num_longer = 0
    content: Iterable[tuple[int, list[str], bool]] = file
    if is_newest_first(
        _pairs(names, cells) for _, cells, _ in itertools.islice(table(path), 1, None) if len(cells) == len(names)
    ):
        content = reverse(file)
        rows.runs.current.marks.add(REVERSED)
    for line, cells, is_whole in content:
        if len(cells) != len(names):
            num_longer += len(cells) > len(names)
            kind = "a line with a different number of columns was left out" if is_whole else "the last line is cut off"
            rows.runs.current.not_read.add(kind, line)
            continue
        if not is_whole:
            rows.runs.current.marks.add("the last line has no line break, so its last value may be cut off", line)
        num_whole += 1
        _check_decimal_points(rows, names, cells, line)
        rows.add(_pairs(names, cells), line)
    if num_longer and not num_whole:
        raise Refusal(
            "its lines have more values than its first line has names. If its numbers have decimal commas, write them"
            " with points, such as 3.5"
        )
    return rows.finish()


def _pairs(names: list[str], cells: list[str]) -> Iterator[tuple[str, str]]:
    return ((name, cell) for name, cell in zip(names, cells, strict=True) if name)


def _check_decimal_points(rows: Rows, names: list[str], cells: list[str], line: int) -> None:
    """Raise Refusal if a cell of a known column has a decimal comma."""
    for name, cell in _pairs(names, cells):
        if "," in cell and _DECIMAL_COMMA.fullmatch(cell.strip()):
            known = rows.meaning(name)
            if known is not None and known.column in COLUMNS:
                raise Refusal(
                    f"line {line} has the number {cell.strip()[:40]} with a decimal comma. Write numbers with decimal"
                    " points, such as 3.5"
                )


def read_tensorboard(path: Path) -> list[Draft]:
    """Return the run in a CSV file with one scalar that TensorBoard exported.

    Only the name of the file says which scalar it is.
    """
    match = _TAG.search(path.name)
    if match is None:
        raise Refusal(
            "it is a scalar that TensorBoard exported, but its name was changed. Give it a name that "
            "ends with -tag-NAME.csv, where NAME is the metric"
        )
    return read(path, names=["Wall time", "Step", match[1]])
