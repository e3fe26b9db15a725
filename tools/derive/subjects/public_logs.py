"""How far predictions that were committed before public logs were read are from these logs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from wording import percent, tabulate, whole_percent

from study.accuracy import public_errors
from study.public_runs import archive
from zero_study.theory import step_time

PUBLIC_QUANTITIES = {
    "seconds_per_step": "time",
    "tokens_per_second_per_gpu": "tokens per second",
    "peak_allocated_bytes": "peak of tensors",
    "peak_reserved_bytes": "peak reserved",
    "fits": "whether it fits",
}
TIMES = ("seconds_per_step", "tokens_per_second_per_gpu")
PEAK = "peak_allocated_bytes"


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
    of_today = [row for row in public_errors.compared(is_today=True) if row.quantity in TIMES and row.error is not None]
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
    case = next(case for case in public_errors.cases(public_errors.PREDICTIONS.stem) if case.name == row.id)
    return not step_time.seconds(case.shape, case.engine, case.job, case.box).launching


def _blind() -> list[public_errors.Compared]:
    """Return all predictions of trainings of which no constant was fitted to rows of the same table."""
    return [*public_errors.compared(), *public_errors.compared(public_errors.LATER)]


def _fits(rows: Sequence[public_errors.Compared]) -> tuple[list[public_errors.Compared], int]:
    """Return the predictions whether a training fits, and how many of these trainings ran out of memory."""
    fits = [row for row in rows if row.quantity == "fits"]
    return fits, sum(not row.measured for row in fits)


def blind_memory() -> str:
    """Say how far peaks of tensors are off, by source, that were predicted before their logs were read."""
    return f"by {_range(_medians_by_source(PEAK))} in the median, depending on the source"


def _errors_by_source(*quantities: str) -> list[list[float]]:
    """Return the absolute errors of each source."""
    errors: dict[str, list[float]] = {}
    for row in _blind():
        if row.quantity in quantities and row.error is not None:
            errors.setdefault(public_errors.SOURCES[row.family], []).append(abs(row.error))
    return list(errors.values())


def _medians_by_source(*quantities: str) -> list[float]:
    """Return the median of the absolute errors of each source, the smallest first."""
    return sorted(map(statistics.median, _errors_by_source(*quantities)))


GOOD_TIME = 0.3  # median error of the times of a source; the sources are far from it on either side


def blind_times() -> str:
    """Say how far times are off, by source, that were predicted before their logs were read."""
    medians = _medians_by_source(*TIMES)
    sides = [[median for median in medians if (median <= GOOD_TIME) == is_good] for is_good in (True, False)]
    good, bad = map(_range, sides)
    numbers = {3: "three", 4: "four", 5: "five"}
    return (
        f"by {good} in the median for the trainings of {numbers[len(sides[0])]} publishers, and by {bad} for those of "
        f"{numbers[len(sides[1])]} other publishers"
    )


PROGRAMS = (
    "MLPerf Juniper Llama 2 70B LoRA",
    "fsdp_qlora benchmarks",
    "prime-rl baselines, dense models",
    "NeMo Automodel golden values",
)
SPECIAL = ("Lightning largest models", "Megatron-LM golden values of H100", "MLPerf NVIDIA BERT")


def num_trainings() -> str:
    """Return for how many trainings a committed prediction could be compared with the log."""
    return f"{len({(row.family, row.id) for row in _blind()})}"


def num_public() -> str:
    """Return the number of public runs in the archive."""
    return f"{sum(len(archive.source(name)) for name in archive.sources()):,}"


def trust() -> str:
    """Compare, for README, what was predicted before the logs were read with the logs."""
    fits, num_failed = _fits(_blind())
    num_right = sum(row.predicted == row.measured for row in fits)
    times, later = (
        {each.group: each for each in public_errors.summaries(source) if each.quantity in TIMES}
        for source in (public_errors.PREDICTIONS, public_errors.LATER)
    )
    ddp, fsdp = (times.pop(f"ptd_benchmark {engine}, one machine") for engine in ("DDP", "FSDP"))
    slow_network = [times.pop(f"ptd_benchmark {engine}, several machines") for engine in ("DDP", "FSDP")]
    experts = times.pop("prime-rl baselines, mixtures of experts")
    assert {*times} == {*PROGRAMS, *SPECIAL}
    peaks = [(statistics.median(errors), float(np.quantile(errors, 0.9))) for errors in _errors_by_source(PEAK)]

    def row(what: str, errors: Iterable[tuple[float, float]]) -> list[str]:
        return [what, *map(_range, zip(*errors, strict=True))]

    def of_times(what: str, *groups: public_errors.Summary) -> list[str]:
        return row(f"time: {what}", ((each.median or 0, each.ninetieth or 0) for each in groups))

    rows = [
        row("peak of allocated memory, by source", peaks),
        of_times("fine-tuning on A100 with accelerate", *later.values()),
        of_times("LoRA of a 70B model, QLoRA, dense models of prime-rl, NeMo", *(times[name] for name in PROGRAMS)),
        of_times("DDP and FSDP on one machine with A100", ddp, fsdp),
        of_times("mixtures of experts", experts),
        of_times(
            "slow networks, very short steps, specialized programs", *slow_network, *(times[name] for name in SPECIAL)
        ),
    ]
    return (
        f"We committed predictions of {num_trainings()} published trainings before we read their logs. For "
        f"{len(fits)}, we predicted whether they fit, and {num_right} were right ({num_failed} did not fit). Errors of "
        "the other predictions:\n\n" + tabulate(["predicted", "median error", "90th percentile"], rows)
    )


def _range(values: Sequence[float]) -> str:
    least, most = whole_percent(min(values)), whole_percent(max(values))
    return most if least == most else f"{least.removesuffix(' %')} to {most}"


TABLES: dict[tuple[str, str], Callable[[], str]] = {
    ("README.md", "trust"): trust,
    ("reports/planner-accuracy.md", "public"): public_predictions,
    ("reports/planner-accuracy.md", "effects"): added_effects,
    ("reports/planner-accuracy.md", "later_public"): partial(public_predictions, public_errors.LATER),
    ("reports/planner-accuracy.md", "public_overall"): public_overall,
    ("reports/planner-accuracy.md", "foundry"): partial(public_predictions, public_errors.REST),
}


NUMBERS: dict[tuple[str, str], Callable[[], str]] = {
    ("README.md", "num_public"): num_public,
    ("docs/planner.md", "blind_memory"): blind_memory,
    ("docs/planner.md", "blind_times"): blind_times,
}
