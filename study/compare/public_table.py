"""Make the table of `zero-study compare` for runs that were imported from logs. It has no runs of this project."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from zero_study.public_runs.quantities import QUANTITIES, logged, points
from zero_study.public_runs.schema import PublicRun
from zero_study.terminal import bytes_text, escape_markdown, markdown, percent, significant

HEAD = ["runs", "n", "GPUs", "strategy", "logged", "last loss", "at", "loss", "difference", "s/step", "peak, tensors"]

EXPLANATION = """\
These runs were imported from logs, so this project did not measure them. Runs of one entry that
differ only in the seed share one row, which shows their medians. A run whose log ended early has no row, and is listed
below the table.

- logged: the number of training steps in the log, which may be fewer than were made.
- last loss: the mean of the last tenth of the logged training losses (at most ten losses).
- at, loss, difference: the training loss at the last step (or sample) that this row and the reference both logged, and
  its relative difference from that of the reference. The reference is the first row, unless a line below the table
  names another one. Two trainings are comparable only if their options are. The options that differ are listed below
  each table."""
LEAST_LOGGED = 2  # losses of a reference
LEAST_SHARE = 0.1  # of the losses that the other rows logged
MLPERF = "MLPerf"
MLPERF_NOTE = (
    "Results of different benchmarks, or of MLPerf and of another source, must not be ranked against "
    "each other. Numbers "
    "that are derived from MLPerf logs are not verified by the MLCommons Association."
)


def page(runs: Sequence[PublicRun]) -> str:
    """Return a page in Markdown with a table of imported runs for each model and data set."""
    lines = ["# Imported runs", "", EXPLANATION, ""]
    benchmarks = {run.setting.benchmark for run in runs}
    if len(benchmarks) > 1 and any(name and name.startswith(MLPERF) for name in benchmarks):
        lines += [f"**{MLPERF_NOTE}**", ""]
    tables: dict[str, list[PublicRun]] = {}  # in the order in which the runs were given, like the rows of a table
    for run in runs:
        names = (run.setting.benchmark, run.setting.model, run.setting.program)
        tables.setdefault(", ".join(filter(None, names)) or "unknown model", []).append(run)
    for title, members in tables.items():
        lines += [f"## {escape_markdown(title)}", "", *_table(members), ""]
    if left_out := [f"- {escape_markdown(run.name)}: {run.why_not_counted}" for run in runs if not run.counts]:
        lines += ["These runs are not averaged with others:", "", *left_out, ""]
    if marked := [
        f"- {escape_markdown(run.name)}: {escape_markdown('; '.join(run.marks))}" for run in runs if run.marks
    ]:
        lines += ["Unusual values in the logs:", "", *marked, ""]
    return "\n".join(lines).rstrip()


def _table(runs: list[PublicRun]) -> list[str]:
    rows: dict[str, list[PublicRun]] = {}  # in the order in which the runs were given
    for run in runs:
        if run.ending != "ended early":
            rows.setdefault(_setting(run), []).append(run)
    if not rows:
        return ["The log of every run ended early."]
    counted = [*rows.values()]
    reference, why_not_first = _reference(counted)
    lines = list(markdown(HEAD, (_row(members, reference) for members in counted)))
    if why_not_first:
        lines += [
            "",
            f"The reference is {escape_markdown(_name(reference))}, because "
            f"{escape_markdown(_name(counted[0]))} {why_not_first}.",
        ]
    if differing := _differing([members[0] for members in counted]):
        lines += ["", f"These settings differ: {escape_markdown(', '.join(differing))}."]
    return lines


def _reference(rows: list[list[PublicRun]]) -> tuple[list[PublicRun], str]:
    """Return the first row with enough losses to compare others with, and why an earlier row was not used.

    If no row has enough losses, the first row is the reference.
    """
    numbers = [statistics.median(len(logged(run.training, "loss")) for run in members) for members in rows]
    reasons: list[str] = []
    for place, (members, number) in enumerate(zip(rows, numbers, strict=True)):
        others = numbers[:place] + numbers[place + 1 :]
        reason = ""
        if members[0].not_finite_since:
            reason = "has a loss that is not finite at its end"
        elif number < LEAST_LOGGED or number < LEAST_SHARE * statistics.median(others or [0]):
            reason = f"logged only {number:,.0f} training loss{'es' * (number != 1)}"
        if not reason:
            return members, reasons[0] if reasons else ""
        reasons.append(reason)
    return rows[0], ""


def _name(members: list[PublicRun]) -> str:
    return members[0].name if len(members) == 1 else f"{members[0].name} ..."


def _setting(run: PublicRun) -> str:
    """Return a key that is equal for runs that repeat one setting.

    Runs without the entry of a source are not repeats, even if their settings are equal. A training that diverged has a
    row of its own.
    """
    if run.setting.entry is None or run.not_finite_since:
        return run.name
    return run.setting.model_copy(update={"seed": None, "other": {}}).model_dump_json()


def _differing(runs: Iterable[PublicRun]) -> list[str]:
    settings = [run.setting.model_dump(exclude={"seed", "other", "versions"}) | run.setting.versions for run in runs]
    names = dict.fromkeys(name for setting in settings for name in setting)
    return [name.replace("_", " ") for name in names if len({str(setting.get(name)) for setting in settings}) > 1]


def _row(members: list[PublicRun], reference: list[PublicRun]) -> list[Any]:
    setting = members[0].setting
    steps = [len(run.training) for run in members if run.training is not None]
    place, losses, others = _at_last_common(members, reference)
    loss = statistics.median(losses) if losses else None
    difference = statistics.median(losses) / statistics.median(others) - 1 if losses and any(others) else None
    numbers = [
        _median(members, "last loss", significant),
        place,
        "unknown" if loss is None else f"{loss:.5g}",
        "unknown" if difference is None else "" if members is reference else percent(difference),
    ]
    if members[0].not_finite_since:
        since = f"not finite from {members[0].not_finite_since} on"
        numbers = [since, since, "not finite", since]
    gpus = f"{setting.num_gpus} {setting.gpu or 'unknown'}" if setting.num_gpus else setting.gpu or "unknown"
    return [
        escape_markdown(_name(members)),
        len(members),
        escape_markdown(gpus),
        escape_markdown(setting.strategy or "unknown"),
        statistics.median(steps) if steps else "unknown",
        *numbers,
        _median(members, "seconds per step", significant),
        _median(members, "peak of tensors", bytes_text),
    ]


def _median(members: list[PublicRun], quantity: str, text: Callable[[float], str]) -> str:
    known = [value for run in members if (value := QUANTITIES[quantity](run)) is not None]
    return text(statistics.median(known)) if known else "unknown"


def _at_last_common(members: Sequence[PublicRun], first: Sequence[PublicRun]) -> tuple[str, list[float], list[float]]:
    """Return the last step (or number of samples or tokens) that all these runs logged, with the losses there."""
    for by in ("step", "samples", "tokens"):
        curves = [dict(points(run.training, by, "loss")) for run in (*members, *first)]
        common = set.intersection(*map(set, curves)) if curves and all(curves) else set()
        if common:
            last = max(common)
            losses = [curve[last] for curve in curves]
            return f"{by} {last:,.0f}", losses[: len(members)], losses[len(members) :]
    return "nothing in common", [], []
