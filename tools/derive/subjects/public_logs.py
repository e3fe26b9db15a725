"""How far predictions are from public logs, and from the trainings of the benchmark for planners."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import planner_benchmark
from wording import percent, tabulate, whole_percent

from study.accuracy import public_errors
from study.public_runs import archive
from zero_study.theory import measured_by_others, step_time

PUBLIC_QUANTITIES = {
    "seconds_per_step": "time",
    "tokens_per_second_per_gpu": "tokens per second",
    "peak_allocated_bytes": "peak of tensors",
    "peak_reserved_bytes": "peak reserved",
    "used_bytes": "whole card",
    "fits": "whether it fits",
}
TIMES_AND_PEAK = ("seconds", "peak_allocated_bytes")


def public_predictions(predictions: Path = public_errors.PREDICTIONS) -> str:
    """Compare the predictions that were committed before the logs were read, and today's predictions, with the logs."""
    head = [
        "trainings",
        "what",
        "values",
        "error as committed: median / 90th percentile / worst",
        "error of today's planner",
        "inside the interval",
        "expected",
        "met",
    ]
    rows = []
    today_too = public_errors.summaries(predictions, is_today=True)
    for each, today in zip(public_errors.summaries(predictions), today_too, strict=True):
        inside = f"{each.inside[0]} of {each.inside[1]}" if each.inside else ""
        if each.too_fast:
            inside = "; ".join(filter(None, [inside, f"no upper end: {each.too_fast[1]}"]))
        met = "" if each.is_met is None else "yes" if each.is_met else "**no**"
        errors = [_errors(each), _errors(today)]
        rows.append([each.group, PUBLIC_QUANTITIES[each.quantity], each.num, *errors, inside, _expected(each), met])
    return tabulate(head, rows)


def _errors(each: public_errors.Summary) -> str:
    if each.median is None:
        return f"right: {each.right[0]} of {each.right[1]}" if each.right else ""
    return f"{percent(each.median)} / {percent(each.ninetieth)} / {100 * each.worst:+.0f} %"


def _expected(each: public_errors.Summary) -> str:
    limit = each.limit
    if limit is None:
        return ""
    parts = {
        "at least {:.0f} % of times inside": limit.inside and 100 * limit.inside,
        "median error at most {:.0f} %": limit.median and 100 * limit.median,
        "every error at most {:.0f} %": limit.most and 100 * limit.most,
        "80 % of errors at most {:.0f} %": limit.fourth_fifth and 100 * limit.fourth_fifth,
        "measured at least {:g} times as long as predicted": limit.too_short,
    }
    said = [text.format(value) for text, value in parts.items() if value]
    return ", ".join([*said, *(["all predictions right"] if limit.is_right else [])])


def public_overall() -> str:
    """Judge the expectations about all sources together."""
    inside: dict[str, list[bool]] = {}
    for row in public_errors.compared():
        if row.is_inside is not None:
            inside.setdefault(public_errors.SOURCES[row.family], []).append(row.is_inside)
    share = statistics.median(sum(answers) / len(answers) for answers in inside.values())
    too_fast = [row.is_too_fast for row in public_errors.compared() if row.is_too_fast is not None]
    met = [summary.is_met for summary in public_errors.summaries() if summary.is_met is not None]
    fits, num_failed = _fits(public_errors.compared())
    return (
        f"{sum(met)} of the {len(met)} expectations in the table were met. For {len(inside)} sources, we know how many "
        f"times are inside their intervals: the median share is {100 * share:.0f} % (expected: at least 75 %). For "
        f"{len(too_fast)} steps, the interval has no upper end. {sum(too_fast)} of these steps are faster than the "
        f"lower end (expected: at most 5 %). We predicted for {len(fits)} trainings whether they fit into memory; "
        f"{num_failed} of them ran out of memory."
    )


# The physical effects that were added on 30 November 2026: the trainings that show them, the errors of step times
# before, and what was expected. Both were committed before the planner was changed.
EFFECTS = (
    ("networks without RDMA", "ptd_benchmark DDP, several machines", "67 % / 73 %", "at most 12 % / 30 %"),
    ("", "ptd_benchmark FSDP, several machines", "73 % / 79 %", "at most 20 % / 35 %"),
    ("kernels that are launched too slowly", "Megatron-LM golden values of H100", "82 % / 84 %", "at most 12 % / 25 %"),
    ("", "NeMo Automodel golden values", "26 % / 47 %", "at most 18 % / 35 %"),
    ("", "ptd_benchmark DDP, one machine", "13 % / 56 %", "at most 10 % / 25 %"),
    ("", "ptd_benchmark FSDP, one machine", "39 % / 81 %", "at most 12 % / 25 %"),
    ("sizes of heads that are no multiple of 8", "GPTXL", "26 % / 29 %", "at most 8 % / 15 %"),
    ("cuDNN's attention", "prime-rl baselines, dense models", "19 % / 54 %", "at most 3 points worse in the median"),
)


def added_effects() -> str:
    """Compare what was expected of the effects that were added to the time model with what they achieve today."""
    rows = []
    rows_of_times = (row for row in public_errors.compared(is_today=True) if row.quantity in measured_by_others.TIMES)
    of_today = [row for row in rows_of_times if row.error is not None]
    for effect, group, before, expected in EFFECTS:
        if group == "GPTXL":
            own = [row for row in of_today if _is_long_gptxl(row)]
            group = "GPTXL of ptd_benchmark on one machine, if computing takes longer than launching"
        else:
            own = [row for row in of_today if public_errors.group_of(row) == group]
        errors = [abs(row.error or 0.0) for row in own]
        after = " / ".join(f"{100 * value:.0f} %" for value in (np.median(errors), np.quantile(errors, 0.9)))
        rows.append([effect, group, str(len(own)), before, expected, after])
    return tabulate(["effect", "trainings", "times", "before", "expected", "today"], rows)


def _is_long_gptxl(row: public_errors.Compared) -> bool:
    if "-GPTXL-" not in row.id or not public_errors.group_of(row).endswith("one machine"):
        return False
    case = next(case for case in measured_by_others.cases_of("public_logs") if case.name == row.id)
    return not step_time.seconds(case.shape, case.engine, case.job, case.box).launching


def _fits(rows: Sequence[public_errors.Compared]) -> tuple[list[public_errors.Compared], int]:
    """Return the predictions whether a training fits, and how many of these trainings ran out of memory."""
    fits = [row for row in rows if row.quantity == "fits"]
    return fits, sum(not row.measured for row in fits)


def num_public() -> str:
    """Return the number of public runs in the archive."""
    return f"{sum(len(archive.source(name)) for name in archive.sources()):,}"


def trust() -> str:
    """Say how many predictions were committed before the logs were read, and how good today's planner is."""
    rows = [*public_errors.compared(), *public_errors.compared(public_errors.LATER)]
    fits, num_failed = _fits(rows)
    num_right = sum(row.predicted == row.measured for row in fits)
    return (
        f"We committed predictions of {len({(row.family, row.id) for row in rows})} published trainings before we read "
        f"their logs. For {len(fits)}, we predicted whether they fit, and {num_right} were right ({num_failed} did not "
        "fit). Today's errors, without fitted times (several machines: tables that were half fitted):\n\n"
        f"{scores(is_short=True)}"
    )


@cache
def _answers() -> list[tuple[planner_benchmark.Setting, Mapping[str, Any]]]:
    return planner_benchmark.answers(planner_benchmark.planner)


def scores(is_short: bool = False) -> str:
    """Tabulate the scores of today's planner by class of trainings."""
    rows = [
        [each.trainings if each.quantity == "seconds" else PUBLIC_QUANTITIES[each.quantity], each.count,
         *([] if is_short else [each.sources]), *map(whole_percent, (each.median, each.percentile_90)),
         "" if each.inside is None else whole_percent(each.inside)]
        for each in planner_benchmark.scores(_answers())
        if not is_short or (each.quantity in TIMES_AND_PEAK and each.trainings != "all times")
    ]  # fmt: skip
    head = [
        "predicted",
        "trainings",
        *([] if is_short else ["sources"]),
        "median error",
        "90th percentile",
        "in the range",
    ]
    return tabulate(head, rows)


def other_planners() -> str:
    """Tabulate how far other tools were from published times, as a reviewer measured."""
    with open(planner_benchmark.OTHERS, encoding="utf-8", newline="") as file:
        lines = [*csv.DictReader(file)]
    rows = [
        [line["tool"], line["times"], *(whole_percent(float(line[name])) for name in ("median", "percentile_90"))]
        for line in lines
    ]
    return tabulate(["tool", "times", "median error", "90th percentile"], rows)


def calibrations() -> str:
    """Compare times that are calibrated with one or two other trainings: all by one factor, and by component."""
    of_groups = planner_benchmark.groups()
    errors = {
        name: [share for num_logs in (1, 2) for share in planner_benchmark.calibrated(trainings, num_logs)]
        for name, trainings in of_groups.items()
    }
    mixed = {name: errors[name] for name in errors if planner_benchmark.is_mixed(of_groups[name])}
    others = [errors[name] for name in errors.keys() - mixed.keys()]
    rows = [
        [
            f"{words} (median of {len(members)} groups)",
            *(statistics.median(column) for column in zip(*members, strict=True)),
        ]
        for words, members in (("the same largest component", others), ("different ones", [*mixed.values()]))
    ]
    rows += [[", ".join(name), *members] for name, members in sorted(mixed.items())]
    ways = [f"{steps}: {way}" for steps in ("one step", "two steps") for way in ("one factor", "by component")]
    # Uncalibrated errors are the same for one step and two, apart from which trainings count how often.
    cells = [[name, *map(whole_percent, (*found[:3], *found[4:]))] for name, *found in rows]
    return tabulate(["trainings", "uncalibrated", *ways], cells)


TABLES: dict[tuple[str, str], Callable[[], str]] = {
    ("README.md", "trust"): trust,
    ("docs/planner.md", "scores"): partial(scores, True),
    ("reports/planner-accuracy.md", "scores"): scores,
    ("reports/planner-accuracy.md", "other_planners"): other_planners,
    ("reports/planner-accuracy.md", "calibrations"): calibrations,
    ("reports/planner-accuracy.md", "public"): public_predictions,
    ("reports/planner-accuracy.md", "effects"): added_effects,
    ("reports/planner-accuracy.md", "later_public"): partial(public_predictions, public_errors.LATER),
    ("reports/planner-accuracy.md", "public_overall"): public_overall,
    ("reports/planner-accuracy.md", "foundry"): partial(public_predictions, public_errors.REST),
}


NUMBERS: dict[tuple[str, str], Callable[[], str]] = {
    ("README.md", "num_public"): num_public,
}
