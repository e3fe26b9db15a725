"""Read JSON and JSON lines with named columns: one object per logged step, or one list per column."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from zero_study.errors import Refusal
from zero_study.logs import json_parts, reading, trainer
from zero_study.logs.columns import REVERSED, Meaning, Rows, as_number, is_newest_first, reverse, rows_for
from zero_study.logs.draft import MOST_NOTES, Draft
from zero_study.logs.reading import GIB, cleaned

DEEPEST = 3  # levels of objects in a row whose names are joined
MOST_VALUES = 8_000_000  # in a document with one list per column
_MISSING, _NOT_FINITE = math.nan, math.inf

# NeMo Automodel: tps is the sum over all GPUs, because tps_per_gpu is beside it. mem is max_memory_allocated() / 2^30.
AUTOMODEL = {"tps", "tps_per_gpu", "mem", "num_label_tokens"}
_AUTOMODEL_KNOWN = {
    "mem": Meaning("peak_allocated_bytes", "training", GIB),
    "tps": Meaning("tokens_per_second"),
    "mfu": Meaning("mfu_percent"),
}


def flat(row: Mapping[str, Any], prefix: str = "", depth: int = 1) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of a row. A name in a nested object begins with the object's name and a slash."""
    for name, value in row.items():
        if isinstance(value, dict) and depth < DEEPEST:
            yield from flat(value, f"{prefix}{name}/", depth + 1)
        else:
            yield f"{prefix}{name}", value


def is_column(value: object) -> bool:
    """Return whether a value is a column in the form of pandas: an object whose keys count the rows."""
    return isinstance(value, dict) and bool(value) and all(map(str.isdigit, value))


def read_lines(path: Path) -> list[Draft]:
    """Return the runs in a file of JSON lines."""
    rows: Rows | None = None
    content: Iterable[tuple[reading.Line, Any]] = _entries(path)
    is_reversed = is_newest_first(flat(entry) for _, entry in _entries(path) if isinstance(entry, dict))
    for line, entry in reverse(content) if is_reversed else content:
        rows = rows or _rows_for(entry)
        if isinstance(entry, dict) and trainer.ENTRIES in entry:  # the last line of ms-swift
            for name, value in flat(entry):
                rows.runs.current.note(name, value)
        elif isinstance(entry, dict):
            trainer.add(rows, flat(entry), line.number)
        else:
            kind = "a line that is not a JSON object was left out" if line.is_whole else "the last line is cut off"
            rows.runs.current.not_read.add(kind, line.number)
    if rows is None:
        raise Refusal("it is empty")
    return _finished(rows, is_reversed)


def _rows_for(entry: object) -> Rows:
    """Return an empty collector for rows with the names of this one."""
    entry = entry if isinstance(entry, dict) else {}
    names = entry.keys()
    if set(names) >= AUTOMODEL:
        return Rows(_AUTOMODEL_KNOWN)
    is_progress = set(names) >= trainer.OF_PROGRESS and isinstance(entry["elapsed_time"], str)
    return rows_for(names, trainer.PROGRESS if is_progress else None)


def _entries(path: Path) -> Iterator[tuple[reading.Line, Any]]:
    """Yield the lines that are not blank, each with its JSON value. The value is None if the line is not JSON."""
    for line in reading.lines(path):
        if not line.text.strip():
            continue
        try:
            yield line, json_parts.decoded(line.text)
        except ValueError:
            yield line, None


def _finished(rows: Rows, is_reversed: bool) -> list[Draft]:
    drafts = rows.finish()
    for draft in drafts[:1] if is_reversed else ():
        draft.marks.add(REVERSED)
    return drafts


def read(path: Path) -> list[Draft]:
    """Return the runs in a JSON document: a list of objects, an object with such a list, or an object of columns."""
    documents = (part.value for part in json_parts.parts(path) if part.is_element and isinstance(part.value, dict))
    rows = _rows_for(next(documents, None))
    columns: dict[str, array[float]] = {}
    key_of_rows: str | None = ""  # the key of the list whose elements are rows; None if the document is this list
    notes: list[tuple[str, Any]] = []
    num_values = 0
    content: Iterable[tuple[int, json_parts.Part]] = enumerate(json_parts.parts(path), start=1)
    is_reversed = is_newest_first(
        flat(part.value) for part in json_parts.parts(path) if part.is_element and isinstance(part.value, dict)
    )
    for place, (key, value, is_element) in reverse(content) if is_reversed else content:
        if is_element and isinstance(value, dict) and key_of_rows in ("", key):
            key_of_rows = key
            trainer.add(rows, flat(value), f"entry {place:,}")
        elif is_element and key is not None and not isinstance(value, (dict, list)):
            num_values += 1
            _append(columns, key, value)
        elif is_column(value) and key is not None:
            num_values += len(value)
            for each in value.values():
                _append(columns, key, each)
        elif key is not None and not is_element:
            notes += flat({key: value}) if len(notes) < MOST_NOTES else ()
        else:
            rows.runs.current.not_read.add("a part that is neither a row nor a column was left out", f"entry {place:,}")
        if num_values > MOST_VALUES:
            raise Refusal(f"it has more than {MOST_VALUES:,} values. Write one JSON object per line instead")
    if not rows.runs.current.has_rows:
        _add_columns(rows, columns)
    drafts = _finished(rows, is_reversed)
    for draft in drafts[:1]:
        for name, value in notes:
            draft.note(name, value)
    return drafts


def _append(columns: dict[str, array[float]], name: str, value: object) -> None:
    converted = as_number(value)
    if converted is not None and not math.isfinite(converted):
        converted = _NOT_FINITE
    columns.setdefault(name, array("d")).append(_MISSING if converted is None else converted)


def _add_columns(rows: Rows, columns: Mapping[str, array[float]]) -> None:
    """Add the rows of an object whose values are columns. A list that is shorter is not a column."""
    length = max(map(len, columns.values()), default=0)
    whole = {name: column for name, column in columns.items() if len(column) == length}
    if shorter := sorted(columns.keys() - whole.keys()):
        rows.runs.current.not_read.add(cleaned(f"lists that are shorter than other lists were left out: {shorter}"))
    for place, values in enumerate(zip(*whole.values(), strict=True), start=1):
        numbers = ((name, value) for name, value in zip(whole, values, strict=True) if not math.isnan(value))
        pairs = [(name, int(value) if value.is_integer() else value) for name, value in numbers]
        rows.add(pairs, f"entry {place:,}")
