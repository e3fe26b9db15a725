"""The table of `zero-study compare` for public runs: what others measured, never in one table with own runs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any

from study.formatting import bytes_text, markdown, percent, shown, three_digits
from study.public_runs.quantities import QUANTITIES, points
from study.public_runs.schema import PublicRun

HEAD = ["runs", "n", "GPUs", "strategy", "steps", "last loss", "at", "loss", "difference", "s/step", "peak, tensors"]

EXPLANATION = """\
These runs were imported from logs. They were **measured by others**, and not by this project's trainer. Repeats of one
entry of a source, which differ in the seed only, are one row with the median of each column. A run whose log ended
early is listed below and in no row.

- last loss: the mean of the last logged training losses.
- at, loss, difference: the training loss at the last step (or sample) that the first row and this row both logged, and
  its relative difference from that of the first row. Two trainings are comparable only as far as their settings are:
  what differs is listed below each table."""
MLPERF = "MLPerf"
MLPERF_NOTE = (
    "Results of different benchmarks, or of MLPerf and something else, must not be ranked against each other. Numbers "
    "that are derived from MLPerf logs are not verified by the MLCommons Association."
)


def page(runs: Sequence[PublicRun]) -> str:
    """Return a page in Markdown with a table for each thing that was trained."""
    lines = ["# Imported runs", "", EXPLANATION, ""]
    benchmarks = {run.setting.benchmark for run in runs}
    if len(benchmarks) > 1 and any(name and name.startswith(MLPERF) for name in benchmarks):
        lines += [f"**{MLPERF_NOTE}**", ""]
    for title, members in groupby(sorted(runs, key=_title), key=_title):
        lines += [f"## {shown(title)}", "", *_table(list(members)), ""]
    if early := [f"- {shown(run.name)}: {run.ending}" for run in runs if not run.counts]:
        lines += ["Not averaged:", "", *early, ""]
    if marked := [f"- {shown(run.name)}: {shown('; '.join(run.marks))}" for run in runs if run.marks]:
        lines += ["Odd in the logs:", "", *marked, ""]
    return "\n".join(lines).rstrip()


def _title(run: PublicRun) -> str:
    setting = run.setting
    return ", ".join(part for part in (setting.benchmark, setting.model, setting.program) if part) or "unknown model"


def _table(runs: list[PublicRun]) -> list[str]:
    rows: dict[str, list[PublicRun]] = {}  # in the order in which the runs were given
    for run in runs:
        if run.counts:
            rows.setdefault(_setting(run), []).append(run)
    if not rows:
        return ["No run has a log that did not end early."]
    counted = [*rows.values()]
    first = counted[0]
    lines = list(markdown(HEAD, (_row(members, first) for members in counted)))
    differing = _differing([members[0] for members in counted])
    return [*lines, "", f"These settings differ: {shown(', '.join(differing))}."] if differing else lines


def _setting(run: PublicRun) -> str:
    """Return a key that is equal for repeats. Without the entry of a source, equal settings are no sign of repeats."""
    if run.setting.entry is None:
        return run.name
    return run.setting.model_copy(update={"seed": None, "other": {}}).model_dump_json()


def _differing(runs: Iterable[PublicRun]) -> list[str]:
    settings = [run.setting.model_dump(exclude={"seed", "other", "versions"}) | run.setting.versions for run in runs]
    names = dict.fromkeys(name for setting in settings for name in setting)
    return [name.replace("_", " ") for name in names if len({str(setting.get(name)) for setting in settings}) > 1]


def _row(members: list[PublicRun], first: list[PublicRun]) -> list[Any]:
    setting = members[0].setting
    steps = [len(run.training) for run in members if run.training is not None]
    place, losses, others = _at_last_common(members, first)
    loss = statistics.median(losses) if losses else None
    difference = statistics.median(losses) / statistics.median(others) - 1 if losses and others else None
    gpus = f"{setting.num_gpus} {setting.gpu or 'unknown'}" if setting.num_gpus else setting.gpu or "unknown"
    return [
        shown(members[0].name if len(members) == 1 else f"{members[0].name} ..."),
        len(members),
        shown(gpus),
        shown(setting.strategy or "unknown"),
        statistics.median(steps) if steps else "unknown",
        _median(members, "last loss", three_digits),
        place,
        "unknown" if loss is None else f"{loss:.5g}",
        "unknown" if difference is None else "" if members is first else percent(difference),
        _median(members, "seconds per step", three_digits),
        _median(members, "peak of tensors", bytes_text),
    ]


def _median(members: list[PublicRun], quantity: str, text: Callable[[float], str]) -> str:
    known = [value for run in members if (value := QUANTITIES[quantity](run)) is not None]
    return text(statistics.median(known)) if known else "unknown"


def _at_last_common(members: Sequence[PublicRun], first: Sequence[PublicRun]) -> tuple[str, list[float], list[float]]:
    """Return the last place that all these runs logged, with the losses there."""
    for by in ("step", "samples", "tokens"):
        curves = [dict(points(run.training, by, "loss")) for run in (*members, *first)]
        common = set.intersection(*map(set, curves)) if curves and all(curves) else set()
        if common:
            last = max(common)
            losses = [curve[last] for curve in curves]
            return f"{by} {last:,.0f}", losses[: len(members)], losses[len(members) :]
    return "nothing in common", [], []
