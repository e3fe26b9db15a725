"""How tables, percentages, ranges and errors are written in guides and reports."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

import numpy as np

from study.accuracy import published_rows

STRATEGY_NAMES = {"ddp": "DDP", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3", "fsdp2": "FSDP2"}
OF_SOURCES = "median of the sources' medians"


def tabulate(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """Return a table in Markdown with all columns aligned to the left. Cells are written as they are."""
    head = list(head)
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in [head, ["---"] * len(head), *rows])


def percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f} %"


def errors_in_short(errors: Iterable[float]) -> str:
    """Return the median, the 90th percentile and the worst of errors; the worst has its sign."""
    summary = published_rows.summarize((str(index), error) for index, error in enumerate(errors))
    return summary_in_short(summary)


def summary_in_short(summary: dict[str, Any]) -> str:
    """Return the same of errors that are summed up already."""
    return f"{percent(summary['median'])} / {percent(summary['percentile_90'])} / {100 * summary['worst']:+.0f} %"


def first_and_last(versions: list[str]) -> str:
    """Name neighboring releases by the first and the last."""
    return versions[0] if len(versions) == 1 else f"{versions[0]} to {versions[-1]} ({len(versions)})"


def whole_percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def one_of(texts: Iterable[str]) -> str:
    """Return the text that all of them have in common."""
    (text,) = {*texts}
    return text


def percents(shares: Iterable[float]) -> str:
    """Return the different percentages of several shares."""
    return " and ".join(dict.fromkeys(map(whole_percent, shares)))


def span(values: Iterable[float], digits: int = 1) -> str:
    """Return the smallest and the largest value."""
    values = list(values)
    return " to ".join(dict.fromkeys(f"{value:.{digits}f}" for value in (min(values), max(values))))


def too_high_or_low(error: float) -> str:
    """Say by how much a predicted value differs from a measured one."""
    return f"{whole_percent(abs(error))} too {'low' if error < 0 else 'high'}"


def median_and_worst(errors: Iterable[float]) -> str:
    errors = list(errors)
    median = whole_percent(statistics.median(map(abs, errors)))
    return f"a median error of {median}, and the worst value is {too_high_or_low(max(errors, key=abs))}"


def number_of(part: int, whole: int) -> str:
    """Return a number of cases out of all cases."""
    return f"all {whole}" if part == whole else f"{part} of {whole}"


def median_of_sources(by_source: dict[str, list[float]]) -> str:
    """Return the median of the median errors of the sources, so that all of them have the same weight."""
    return percent(float(np.median([np.median(np.abs(errors)) for errors in by_source.values()])))
