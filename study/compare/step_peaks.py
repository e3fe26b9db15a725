"""The views `peaks`, run by run, and `theory`, by strategy: theory's errors about states, messages and peaks."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from study.compare import expected, words
from study.compare.expected import StepPeak
from study.compare.facts import computed_buckets, model_heading, proven
from study.records import find as records
from study.records.find import RecordFile
from study.records.schema import Record

WANTED = 0.05  # relative error
AT_MOST = 0.10

EXPLANATION = """\
Training takes the most memory at one moment of a step. Measured: what the tensors of the fullest rank took then, in a
steady step, on GPU and host together. Theory: what they should take, and at which moment (study/theory/peaks.py)."""
COLUMNS = """\
On a CPU its allocator counts, and DDP's buckets are added where no gradient lies in them. Too large by, at most: what
gloo's threads are the last to let go of, counted to the step's end; in older records all that its collectives worked
on."""

BY_STRATEGY = """\
Theory says what a rank holds and sends and how high a step is, before anything runs. Each table holds it against every
run here that ended well and measured it, of all models that theory knows, none left out. Errors are theory's, relative
to what was measured; the median is of their absolute values, and the worst is named with its run."""
PEAKS_NOTE = """\
A peak on a CPU is counted by PyTorch's profiler, which never hears of what a thread of gloo's is the last to let go of,
and counts it to the end of the step. Runs since then wait for these threads and record what was missed; for older runs
of several processes it is at most what the step's collectives worked on. Counted too much, at most: the largest share
of a measured peak. Beyond it: the worst error that this cannot explain; theory above the measurement always counts."""


def table(folders: Sequence[Path]) -> str:
    """Make the page of peaks: one block per model, precision and number of processes."""
    record_files = records.find(folders)
    found = [expected.step_peak(file.record) for file in record_files if file.record.status == "ok"]
    cells = [cell for cell in found if cell is not None]
    lines = [_summary(cells), "", COLUMNS, ""] if cells else []
    head = ["strategy", "batch x tokens", "measured, MB", "theory, MB", "error", "too large by, MB", "differs in"]
    for heading, members in groupby(sorted(cells, key=_order), key=_heading):
        lines += [f"## {words.shown(heading)}", "", *words.markdown([*head, "highest at"], map(_row, members)), ""]
    lines += computed_buckets(c.record for c in cells if proven(c.record).device == "cpu")
    title = "How much does a step hold at its highest?"
    return words.page(title, EXPLANATION, lines, "--view peaks", folders, record_files)


def _summary(cells: list[StepPeak]) -> str:
    worst = max(cells, key=lambda c: abs(c.error))
    within, nearly = (sum(abs(c.error) <= limit for c in cells) for limit in (WANTED, AT_MOST))
    return (
        f"{len(cells)} runs: {within} within {WANTED:.0%}, {len(cells) - nearly} beyond {AT_MOST:.0%}; the worst is "
        f"{worst.record.run_id}, {worst.error:+.1%}. Beyond what may be counted too much the worst is "
        f"{max((c.error_beyond for c in cells), key=abs):+.1%}."
    )


def _heading(c: StepPeak) -> str:
    return f"{model_heading(c.record)}, {words.processes(c.record.world_size)}"


def _order(c: StepPeak) -> tuple[object, ...]:
    r, stage = c.record, proven(c.record).zero_stage
    batch = (r.config["sequence_length"], r.config["global_batch_size"])
    return _heading(c), _computed(r), *batch, -1 if stage is None else stage, r.strategy


def _computed(r: Record) -> str:
    """How a run computed, where it is not the usual way: SDPA, with dropout, no checkpointing."""
    said = ["eager attention"] if r.config["attention"] == "eager" else []
    said += ["no dropout"] if not r.config["dropout"] else []
    said += ["checkpointed"] if r.config["activation_checkpointing"] else []
    steps = proven(r).gradient_accumulation_steps
    return ", ".join([*said, *([f"{steps} micro steps"] if steps > 1 else [])])


def _row(c: StepPeak) -> list[str]:
    r = c.record
    batch = f"{r.config['global_batch_size']} x {r.config['sequence_length']}"
    measured, overcount, predicted = (f"{value / 1e6:,.1f}" for value in (c.measured, c.overcount, c.predicted))
    return [r.strategy, batch, measured, predicted, f"{c.error:+.1%}", overcount, _computed(r), c.moment]


# ---------------------------------------------------------------- by strategy


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
        if (error := expected.states_error(r)) is not None:
            found.states.append(Error(r.strategy, run, error))
        if r.world_size > 1 and (sent := expected.messages(r)):
            found.messages.append(Error(r.strategy, run, sent.error))
        if peak := expected.step_peak(r):
            share = peak.overcount / peak.measured
            found.peaks.append(Error(r.strategy, run, peak.error, share, peak.error_beyond))
    return found


def by_strategy(folders: Sequence[Path]) -> str:
    """Make the page of errors: three tables, one row per strategy and one of all."""
    found = errors(folders)
    head = ["strategy", "runs", "median error", "worst error", "the worst run"]
    lines = ["## Model states and buffers, of the worse moment", "", *_table(head, found.states, 4), ""]
    lines += ["## Messages of a step, in bytes", "", *_table(head, found.messages, 4), ""]
    more = ["counted too much, at most", "worst beyond it"]
    lines += ["## Peak of a step", "", PEAKS_NOTE, "", *_table([*head[:-1], *more, head[-1]], found.peaks, 1), ""]
    return words.page("How far is theory off?", BY_STRATEGY, lines, "--view theory", folders)


def _table(head: list[str], found: list[Error], digits: int) -> list[str]:
    if not found:
        return ["No run here measured it."]
    names = words.in_order({error.strategy for error in found})
    rows = [_of_strategy(name, [error for error in found if error.strategy == name], head, digits) for name in names]
    return words.markdown(head, [*rows, _of_strategy("all", found, head, digits)])


def _of_strategy(name: str, found: list[Error], head: list[str], digits: int) -> list[str]:
    worst = max(found, key=lambda error: abs(error.error))
    median = statistics.median(abs(error.error) for error in found)
    exact = round(worst.error, digits + 2) == 0
    cells = [name, str(len(found)), f"{median:.{digits}%}", f"{worst.error:+.{digits}%}"]
    if len(head) > len(cells) + 1:
        beyond = max((error.beyond for error in found), key=abs)
        cells += [f"{max(error.overcount for error in found):.0%}", f"{beyond:+.{digits}%}"]
    return [*cells, "" if exact else worst.run]


def _name(file: RecordFile) -> str:
    """A run with the folder that its study's runs lie in: ids are unique within it."""
    folder = file.path.parent.parent if file.path.name == "record.json" else file.path.parent
    return f"{folder.parent.name if folder.name == 'records' else folder.name}/{file.record.run_id}"
