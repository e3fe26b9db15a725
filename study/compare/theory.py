"""How far is theory off, strategy by strategy, over every run there is? Model states, messages and peaks."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from study.compare import communication, markdown, model_states, peaks
from study.compare.order import in_order
from study.records import find as records
from study.records.find import RecordFile

EXPLANATION = """\
Every run that ended well and whose model theory knows, none left out. Errors are theory's, relative to what was
measured; the median is of their absolute values, and the worst is named with its run. A strategy stands in a table
where its runs measured it."""
PEAKS_NOTE = """\
A peak on a CPU is counted by PyTorch's profiler, which never hears of what a thread of gloo's is the last to let go of,
and counts it to the end of the step. Runs since then wait for these threads and record what was missed; for older runs
of several processes it is at most what the step's collectives worked on. Counted too much, at most: the largest share
of a measured peak. Beyond it: the worst error that this cannot explain; theory above the measurement always counts."""


class Error(NamedTuple):
    """Theory's about one run."""

    strategy: str
    run: str
    error: float  # relative
    overcount: float = 0.0  # of the measurement, relative, at most
    beyond: float = 0.0  # what is left of the error where the measurement is as much too large


class Errors(NamedTuple):
    """Of every run that measured it."""

    states: list[Error]
    messages: list[Error]
    peaks: list[Error]


def errors(folders: Sequence[Path]) -> Errors:
    """Hold every run below the folders against theory."""
    found = Errors([], [], [])
    for file in records.find(folders):
        r, run = file.record, _name(file)
        if r.status != "ok":
            continue
        if (error := model_states.error(r)) is not None:
            found.states.append(Error(r.strategy, run, error))
        if r.world_size > 1 and r.collectives_per_step is not None and (sent := communication.cell(r)):
            found.messages.append(Error(r.strategy, run, sent.error))
        if peak := peaks.cell(r):
            share = peak.overcount / peak.measured
            found.peaks.append(Error(r.strategy, run, peak.error, share, peak.error_beyond))
    return found


def table(folders: Sequence[Path]) -> str:
    """Make the page: three tables, one row per strategy and one of all."""
    found = errors(folders)
    lines = ["# Theory against every run", "", EXPLANATION, "", *by_strategy(found), ""]
    return "\n".join([*lines, f"Made by `{markdown.command('compare --view theory', folders)}`."])


def by_strategy(found: Errors) -> list[str]:
    """The three tables."""
    head = ["strategy", "runs", "median error", "worst error", "the worst run"]
    lines = ["## Model states and buffers, of the worse moment", "", *_table(head, found.states, 4), ""]
    lines += ["## Messages of a step, in bytes", "", *_table(head, found.messages, 4), ""]
    more = ["counted too much, at most", "worst beyond it"]
    return [*lines, "## Peak of a step", "", PEAKS_NOTE, "", *_table([*head, *more], found.peaks, 1)]


def _table(head: list[str], found: list[Error], digits: int) -> list[str]:
    names = [*in_order({error.strategy for error in found})]
    rows = [_row(name, [error for error in found if error.strategy == name], head, digits) for name in names]
    return markdown.markdown(head, [*rows, _row("all", found, head, digits)])


def _row(name: str, found: list[Error], head: list[str], digits: int) -> list[str]:
    worst = max(found, key=lambda error: abs(error.error))
    median = statistics.median(abs(error.error) for error in found)
    exact = round(worst.error, digits + 2) == 0
    cells = [name, str(len(found)), f"{median:.{digits}%}", f"{worst.error:+.{digits}%}", "" if exact else worst.run]
    if len(head) > len(cells):
        beyond = max((error.beyond for error in found), key=abs)
        cells += [f"{max(error.overcount for error in found):.0%}", f"{beyond:+.{digits}%}"]
    return cells


def _name(file: RecordFile) -> str:
    """A run with the folder that its study's runs lie in: ids are unique within it."""
    folder = file.path.parent.parent if file.path.name == "record.json" else file.path.parent
    return f"{folder.parent.name if folder.name == 'records' else folder.name}/{file.record.run_id}"
