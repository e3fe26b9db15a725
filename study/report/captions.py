"""Make captions of figures: model, precision, number of processes, hardware, and the source of the numbers.

The rows that the functions take are rows of `tables.runs`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pandas as pd

from zero_study import terminal

MEASURED = "Measured by this project."
LINE_AND_BARS = (
    "Lines and numbers: peaks that this project measured. Bars: the predicted peaks, divided into their parts."
)
OVERVIEW = (
    "Measured by this project: losses, times, and peaks (lines and numbers). Predicted: the parts of a peak (bars)."
)
PREDICTED = "Predicted, not measured."
PUBLISHED = "Others measured and published the times. This project made the predictions."
MEASURED_BY_OTHERS = "Measured by others."
KINDS = ("measured by this project", "measured by others", "traced", "predicted")  # of numbers
FAMILIES = {"bert-imdb": "BERT", "gpt-wikitext": "GPT"}  # by workload


@dataclass(frozen=True)
class Head:
    """The texts above a figure: its title, whether its numbers are measured or predicted, and what was run.

    Raises ValueError if the title is empty, or if `kind` names none of `KINDS`.
    """

    title: str
    kind: str
    setting: str = ""

    def __post_init__(self) -> None:
        if not self.title.strip() or not any(kind in self.kind.lower() for kind in KINDS):
            raise ValueError(f"a figure needs a title, and one of these kinds of numbers: {', '.join(KINDS)}")


def head(title: str, rows: pd.DataFrame, kind: str = MEASURED) -> Head:
    """Return the texts above a figure: title, whether numbers are measured, the settings of the runs, and hardware."""
    return Head(title, kind, f"{setting(rows)}, {hardware(rows)}")


def figure(title: str, rows: pd.DataFrame, source: str = MEASURED) -> str:
    """Return the caption of a figure or table as Markdown: a bold title, the settings, the hardware and the source."""
    return f"**{title}.** {setting(rows)}, {hardware(rows)}. {source}"


def scope(rows: pd.DataFrame) -> str:
    """Return a sentence about the runs of a page: their number, studies, models, settings and hardware."""
    names = _unique(rows["study"])
    studies = f"{'study' if len(names) == 1 else 'studies'} {joined(names)}"
    steps = _span(rows["steps"].dropna())
    trained = [f"trained for {steps} steps"] if steps else []
    seeds = terminal.count(rows["seed"].nunique(), "seed")
    details = [model(rows), *_precision_and_processes(rows), *_options(rows), *trained, seeds, hardware(rows)]
    return f"{terminal.count(len(rows), 'run')} of the {studies}: {'; '.join(details)}."


def setting(rows: pd.DataFrame) -> str:
    """Return the settings of these runs in words: model, precision, number of processes, options and batch."""
    sequences = joined(f"{count:.0f}" for count in _unique(rows["batch_sequences"]))
    batch = [f"{sequences} sequences per step"] if sequences else []
    parts = [model(rows), *_precision_and_processes(rows), *_options(rows), *batch]
    has_lists = any(" and " in part or ", " in part for part in parts)
    return ("; " if has_lists else ", ").join(parts)


def model(rows: pd.DataFrame) -> str:
    """Return the models and their numbers of parameters in words, such as "GPT with 124 million parameters"."""
    names = []
    for workload, of_workload in rows.groupby("workload", sort=False):
        family = FAMILIES.get(str(workload), str(workload))
        parameters = of_workload["parameters"].dropna()
        if parameters.empty:
            names.append(f"{family} {joined(_unique(of_workload['size']))}")
        elif (lowest := _millions(parameters.min())) == (highest := _millions(parameters.max())):
            names.append(f"{family} with {highest} million parameters")
        else:
            names.append(f"{family} with {lowest} to {highest} million parameters")
    return joined(names)


def short_names(rows: pd.DataFrame) -> pd.Series:
    """Return a short name of the model in each row, such as "GPT 124m", for table headers."""
    return rows["workload"].map(FAMILIES).fillna(rows["workload"]) + " " + rows["size"]


def readable(heading: str) -> str:
    """Replace the names of workloads in a heading by names of model families."""
    for workload, family in FAMILIES.items():
        heading = heading.replace(workload, family)
    return heading


def hardware(rows: pd.DataFrame) -> str:
    """Return the hardware in words, such as "on a CPU (AMD EPYC, 2 cores)"."""
    devices = {"cpu": "a CPU", "cuda": "GPUs"}
    named = [devices.get(device, "unknown hardware") for device in _unique(rows["device"])]
    return f"on {joined(named) or 'unknown hardware'} ({'; '.join(_unique(rows['box'].dropna()))})"


def joined(words: Iterable[Any]) -> str:
    """Join words as in a sentence, such as "a, b and c"."""
    *others, last = [str(word) for word in words] or [""]
    return f"{', '.join(others)} and {last}" if others else last


def _precision_and_processes(rows: pd.DataFrame) -> list[str]:
    counts = [int(count) for count in _unique(rows["processes"])]
    processes = [f"{joined(counts)} {'process' if counts == [1] else 'processes'}"] if counts else []
    return [joined(_unique(rows["precision"])), *processes]


def _options(rows: pd.DataFrame) -> list[str]:
    """Return the options of the runs in words. If the runs differ, the words say that some of them have the options."""
    found = _unique(rows["options"])
    named = [f"with {options.replace(', ', ' and ')}" for options in found if options]
    return named if len(found) == 1 else [f"some {words}" for words in named]


def _unique(values: pd.Series) -> list[Any]:
    return sorted(values.dropna().unique())


def _span(values: pd.Series) -> str:
    """Return the lowest and the highest number as text, such as "3 to 50", or "3" if they are equal.

    The text is empty if there are no values.
    """
    return " to ".join(dict.fromkeys([f"{values.min():.0f}", f"{values.max():.0f}"])) if len(values) else ""


def _millions(count: float) -> str:
    return f"{count / 1e6:,.0f}" if count >= 10e6 else f"{count / 1e6:.1f}"
