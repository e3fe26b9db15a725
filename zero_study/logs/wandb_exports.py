"""Read what Weights & Biases exports: the CSV file of a chart, and the history of a run as CSV or JSON lines."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from zero_study.errors import Refusal
from zero_study.logs import csv_tables
from zero_study.logs.columns import Meaning, Rows
from zero_study.logs.draft import MOST_RUNS, Draft, Space

# The columns of a chart are the position, and "RUN - METRIC", "RUN - METRIC__MIN" and "RUN - METRIC__MAX" of each run.
_OF_CHART = re.compile(r"(.+) - (.+?)(__MIN|__MAX)?", re.DOTALL)
_KNOWN = {"Step": Meaning("_step", "position")}
_OF_HISTORY = ("_step", "_runtime", "_timestamp")
_OF_RUNS = {"Name", "State", "Created"}


def is_chart(names: list[str]) -> bool:
    """Return whether column names are those of an exported chart of Weights & Biases."""
    return any(" - " in name and f"{name}__MIN" in names for name in names[1:])


def is_history(names: Iterable[str]) -> bool:
    """Return whether column names are those of an exported history of a run of Weights & Biases."""
    return sum(name in _OF_HISTORY for name in names) >= 2


def is_list_of_runs(names: list[str]) -> bool:
    """Return whether column names are those of the table of all runs in a project of Weights & Biases."""
    return set(names) >= _OF_RUNS


def refuse_list_of_runs(path: Path) -> list[Draft]:
    raise Refusal("it is a table that has only the last values of each run. Export the history of each run, or a chart")


def read_chart(path: Path) -> list[Draft]:
    """Return the runs in an exported chart of Weights & Biases."""
    file = csv_tables.table(path)
    _, names, _ = next(file)
    places = [(place, match) for place, name in enumerate(names) if (match := _OF_CHART.fullmatch(name))]
    space = Space()
    runs = {match[1]: Rows(_KNOWN, space) for _, match in places}
    if len(runs) > MOST_RUNS:
        raise Refusal(f"it has more than {MOST_RUNS:,} runs")
    for line, cells, is_whole in file:
        if len(cells) != len(names):
            kind = "a line with a different number of columns was left out" if is_whole else "the last line is cut off"
            next(iter(runs.values())).runs.current.not_read.add(kind, line)
            continue
        values: dict[str, dict[str, str]] = {run: {} for run in runs}
        for place, match in places:
            if cells[place]:
                values[match[1]][match[2] + (match[3] or "")] = cells[place]
        for run, metrics in values.items():
            _add(runs[run], (names[0], cells[0]), metrics, line)
    drafts = []
    for label, rows in runs.items():
        for draft in rows.finish() if rows.runs.current.has_rows else ():
            draft.label = label
            drafts.append(draft)
    if not drafts:
        raise Refusal("the chart has no values")
    return drafts


def _add(rows: Rows, position: tuple[str, str], metrics: dict[str, str], line: int) -> None:
    """Add the row of one run in a chart."""
    edges = ("__MIN", "__MAX")
    own = {name: value for name, value in metrics.items() if not name.endswith(edges)}
    if any(metrics.get(name + edge, value) != value for name, value in own.items() for edge in edges):
        rows.runs.current.marks.add("the chart shows means over several steps, so a value can be such a mean", line)
    if own:
        rows.add([position, *own.items()], line)
