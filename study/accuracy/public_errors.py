"""Compare predictions with the measurements of public runs, which others trained.

The predictions in `PREDICTIONS`, `LATER` and `REST` were committed before a measured value of these trainings was read
into the project. `predict_all` predicts the same trainings with the planner as it is today, whose constants were fitted
again after the logs of `PREDICTIONS` were read. The limits that were expected are in `LIMITS`, and explained in the
head comments of public_logs.yaml and later_public_logs.yaml.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from study.public_runs import archive
from zero_study.files import ROOT
from zero_study.public_runs import quantities
from zero_study.public_runs.schema import PublicRun
from zero_study.theory import measured_by_others, peaks, prediction, step_time
from zero_study.theory.measured_by_others import MeasuredCase

PREDICTIONS = ROOT / "reports" / "predicted" / "public_logs.json"
LATER = PREDICTIONS.with_name("later_public_logs.json")
# Of rows whose tables have other rows to which constants are fitted: the errors say less about unknown trainings.
REST = ROOT / "reports" / "predicted" / "mpt_throughput_rest.json"
# The archive that has the logs of a family of predictions.
SOURCES = {
    "MLPerf Juniper Llama 2 70B LoRA": "mlperf-llama2-lora",
    "NeMo Automodel golden values": "automodel",
    "ptd_benchmark DDP": "ptd-benchmark",
    "ptd_benchmark FSDP": "ptd-benchmark",
    "Lightning largest models": "lightning-largest",
    "MLPerf NVIDIA BERT": "mlperf-bert",
    "Megatron-LM golden values of H100": "megatron",
    "prime-rl baselines": "prime-rl",
    "fsdp_qlora benchmarks": "fsdp-qlora",
    "fms-acceleration, full fine-tuning": "fms-acceleration",
    "fms-acceleration, adapters": "fms-acceleration",
    "ds_verify_loss": "ds-verify-loss",
    **{f"LLM Foundry, {gpu}": "llm-foundry" for gpu in ("a100-40gb", "a100-80gb", "h100-sxm")},
}
DIGITS = 4  # significant digits of predicted seconds and rates
SKIPPED = 10  # steps of warm-up, as the conditions of the families say


class Compared(NamedTuple):
    """A predicted value of one training, and the measured one."""

    id: str
    family: str
    quantity: str
    predicted: float | bool
    measured: float | bool | None  # None: the logs do not have it
    is_inside: bool | None  # whether a time is in its interval; None if the interval has no upper end, or for memory
    is_too_fast: bool | None  # for times whose interval has no upper end: whether the step is faster than its lower end

    @property
    def error(self) -> float | None:
        """Return predicted over measured, minus one. None unless both are numbers."""
        if self.measured is None or isinstance(self.predicted, bool) or isinstance(self.measured, bool):
            return None
        return self.predicted / self.measured - 1


@cache
def compared(predictions: Path = PREDICTIONS, is_today: bool = False) -> tuple[Compared, ...]:
    """Return every prediction of a file that counts in the comparison, with the measured value.

    With `is_today`, the predictions are those of the planner as it is now, instead of the committed ones.
    """
    committed = json.loads(predictions.read_text(encoding="utf-8"))["predictions"]
    rows = predict_all(measured_by_others.cases_of(predictions.stem)) if is_today else committed
    return tuple(each for row in rows if row["is_judged"] for each in _of_row(row))


def predict_all(trainings: Iterable[MeasuredCase]) -> list[dict[str, Any]]:
    """Predict trainings with the planner as it is now."""
    by_training = itertools.groupby(trainings, key=lambda case: case.name)
    return [_predict(list(members)) for _, members in by_training]


def measured_cases(predictions: Path) -> list[MeasuredCase]:
    """Return the trainings of a file of predictions that count, with what was measured in them."""
    values = {(each.id, each.quantity): each.measured for each in compared(predictions)}
    cases = measured_by_others.cases_of(predictions.stem)
    known = ((case, values.get((case.name, case.quantity))) for case in cases)
    return [dataclasses.replace(case, published=value) for case, value in known if value is not None]


def _predict(cases: Sequence[MeasuredCase]) -> dict[str, Any]:
    """Predict one training. It has one case for each quantity that its log states."""
    case = cases[0]
    step = step_time.seconds(case.shape, case.engine, case.job, case.box)
    row: dict[str, Any] = {
        "id": case.name,
        "family": case.family,
        "log": case.log,
        "compare": [measurement.quantity for measurement in cases],
        "is_judged": not case.outside,
        "seconds_per_step": _short(step.total),
        "interval": [_short(step.low), None if math.isinf(step.high) else _short(step.high)],
        "tokens_per_second_per_gpu": _short(step_time.tokens_per_second_per_gpu(case.job, step.total)),
        "peak_allocated_bytes": round(float(peaks.peak(case.shape, case.engine, case.job).total)),
    }
    for measurement in cases:
        if measurement.quantity not in (*row, *measured_by_others.TIMES):
            value = prediction.predicted_memory(measurement)
            row[measurement.quantity] = value if isinstance(value, bool) else round(value)
    return row


def _short(value: float) -> float:
    return float(f"{float(value):.{DIGITS}g}")


def _of_row(row: dict[str, Any]) -> Iterable[Compared]:
    # A log is a path, or the path of a table and the name of one of its rows.
    path, _, name = row["log"].partition(", ")
    runs = [
        run
        for run in archive.source(SOURCES[row["family"]])
        if fnmatchcase(run.source.path, path) and (not name or run.name.endswith(name.replace(" ", "-")))
    ]
    for quantity in row["compare"]:
        values = [value for run in runs if (value := measured(run, quantity)) is not None]
        value = statistics.median(values) if values else None
        value = bool(value) if quantity == "fits" and value is not None else value
        is_inside = is_too_fast = None
        if quantity in ("seconds_per_step", "tokens_per_second_per_gpu") and value:
            low, high = row["interval"]
            seconds = value if quantity == "seconds_per_step" else row["seconds_per_step"] * row[quantity] / value
            is_inside = None if high is None else low <= seconds <= high
            is_too_fast = seconds < low if high is None else None
        yield Compared(row["id"], row["family"], quantity, row[quantity], value, is_inside, is_too_fast)


def measured(run: PublicRun, quantity: str) -> float | bool | None:
    """Return the measured value of a public run, calculated as the conditions in public_logs.yaml say."""
    function = _MEASURED.get(quantity)
    return None if function is None else function(run)


def _seconds_per_step(run: PublicRun) -> float | None:
    setting = run.setting
    for per_sample in (quantities.gpu_seconds_per_sample, quantities.gpu_seconds_per_sample_with_evaluation):
        seconds = per_sample(run)
        if seconds is not None and setting.global_batch_size and setting.num_gpus:
            return seconds * setting.global_batch_size / setting.num_gpus
    tokens, rates = (quantities.values(run.training, name) for name in ("num_tokens_per_step", "tokens_per_second"))
    if tokens and rates:
        return _median([count / rate for count, rate in zip(tokens, rates, strict=True) if count and rate])
    if logged := quantities.values(run.training, "seconds_per_step"):
        return _median(logged)
    seconds, steps = (run.totals.get(name) for name in ("seconds", "step"))
    return run.totals.get("seconds_per_step", seconds / steps if seconds and steps else None)


def _rate(run: PublicRun) -> float | None:
    """Return tokens per second and GPU, as logged or from the samples and the time of the whole run."""
    setting, totals = run.setting, run.totals
    rate = totals.get("tokens_per_second_per_gpu")
    if rate is None and setting.num_gpus and "tokens_per_second" in totals:
        rate = totals["tokens_per_second"] / setting.num_gpus
    if rate is None and setting.num_gpus and setting.sequence_length and totals.get("seconds") and "samples" in totals:
        rate = totals["samples"] * setting.sequence_length / totals["seconds"] / setting.num_gpus
    return rate


def _bytes(run: PublicRun, name: str) -> float | None:
    return run.totals.get(name, _median(quantities.logged(run.training, name)))


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values[SKIPPED:] or values if value is not None]
    return statistics.median(known) if known else None


_MEASURED: dict[str, Callable[[PublicRun], float | bool | None]] = {
    "seconds_per_step": _seconds_per_step,
    "tokens_per_second_per_gpu": _rate,
    "peak_allocated_bytes": partial(_bytes, name="peak_allocated_bytes"),
    "peak_reserved_bytes": partial(_bytes, name="peak_reserved_bytes"),
    # Whether a training ran to its end. Sources of which this is asked log nothing of one that did not fit.
    "fits": lambda run: bool(run.totals),
}


# ---------------------------------------------------------------- summaries


class Limit(NamedTuple):
    """The expected limits of the errors of a group, from the top of public_logs.yaml. None means no limit."""

    inside: float | None = None  # smallest share of times inside their interval
    median: float | None = None  # largest median of the absolute errors
    most: float | None = None  # largest absolute error
    fourth_fifth: float | None = None  # largest absolute error of 80 % of the rows
    too_short: float | None = None  # smallest ratio of a measured time to the predicted one
    is_right: bool = False  # every "fits" is right


_PTD_MEMORY = {"DDP": Limit(median=0.10), "FSDP": Limit(median=0.15)}
LIMITS: dict[tuple[str, str], Limit] = {
    ("MLPerf Juniper Llama 2 70B LoRA", "seconds_per_step"): Limit(inside=1.0, most=0.35),
    ("NeMo Automodel golden values", "seconds_per_step"): Limit(inside=0.6),
    ("NeMo Automodel golden values", "peak_allocated_bytes"): Limit(median=0.15, fourth_fifth=0.30),
    **{
        (f"ptd_benchmark {engine}, {machines}", quantity): limit
        for engine, memory in _PTD_MEMORY.items()
        for machines, share in (("one machine", 0.8), ("several machines", 0.5))
        for quantity, limit in (("seconds_per_step", Limit(inside=share)), ("peak_allocated_bytes", memory))
    },
    ("prime-rl baselines, dense models", "tokens_per_second_per_gpu"): Limit(inside=0.8),
    ("prime-rl baselines, dense models", "peak_reserved_bytes"): Limit(median=0.20),
    ("prime-rl baselines, dense models", "fits"): Limit(is_right=True),
    ("prime-rl baselines, mixtures of experts", "peak_reserved_bytes"): Limit(median=0.25),
    ("fsdp_qlora benchmarks", "tokens_per_second_per_gpu"): Limit(inside=0.6),
    ("fsdp_qlora benchmarks", "peak_reserved_bytes"): Limit(median=0.25),
    ("fsdp_qlora benchmarks", "peak_allocated_bytes"): Limit(median=0.15),
    ("Lightning largest models", "seconds_per_step"): Limit(inside=0.6),
    ("MLPerf NVIDIA BERT", "seconds_per_step"): Limit(inside=0.75),
    ("Megatron-LM golden values of H100", "seconds_per_step"): Limit(too_short=1.5),
    ("Megatron-LM golden values of H100", "peak_allocated_bytes"): Limit(most=0.15),
    ("fms-acceleration, full fine-tuning", "tokens_per_second_per_gpu"): Limit(inside=0.8),
    ("fms-acceleration, full fine-tuning", "peak_allocated_bytes"): Limit(median=0.10),
    ("fms-acceleration, adapters", "tokens_per_second_per_gpu"): Limit(inside=0.6),
    ("fms-acceleration, adapters", "peak_allocated_bytes"): Limit(median=0.15),
    ("ds_verify_loss", "peak_allocated_bytes"): Limit(most=0.15),
    # The constants are fitted to other rows of the same tables, so the errors are expected to be small.
    **{
        (f"LLM Foundry, {gpu}", "tokens_per_second_per_gpu"): Limit(inside=0.9, median=0.08, fourth_fifth=0.15)
        for gpu in ("a100-40gb", "a100-80gb", "h100-sxm")
    },
}


class Summary(NamedTuple):
    """The errors of one group of trainings in one quantity."""

    group: str
    quantity: str
    num: int
    missing: int  # predictions whose measured value is not in the logs
    median: float | None  # of the absolute errors
    ninetieth: float | None
    worst: float | None  # with its sign
    worst_id: str
    inside: tuple[int, int] | None  # of times with an upper end: how many are inside, of how many
    too_fast: tuple[int, int] | None  # of times without one: how many are faster than the lower end, of how many
    right: tuple[int, int] | None  # of "fits"
    limit: Limit | None
    is_met: bool | None  # None if nothing was expected


def summaries(predictions: Path = PREDICTIONS, is_today: bool = False) -> list[Summary]:
    """Return a summary for each group and quantity, in the order of the predictions."""
    groups: dict[tuple[str, str], list[Compared]] = {}
    for each in compared(predictions, is_today):
        groups.setdefault((group_of(each), each.quantity), []).append(each)
    return [_summary(*key, members) for key, members in groups.items()]


def group_of(each: Compared) -> str:
    """Return the name of the group of trainings in whose statistics an error counts."""
    if each.family.startswith("ptd_benchmark"):
        world_size, per_machine = re.match(r"ptd-\w+-\w+-(\d+)-.*?(?:_np(\d+))?$", each.id).groups()  # type: ignore[union-attr]
        is_one = int(world_size) <= int(per_machine or 8)
        return f"{each.family}, {'one machine' if is_one else 'several machines'}"
    if each.family.startswith("prime-rl"):
        return f"{each.family}, {'mixtures of experts' if re.search('-a[0-9]+b-', each.id) else 'dense models'}"
    return each.family


def _summary(group: str, quantity: str, members: Sequence[Compared]) -> Summary:
    known = [each for each in members if each.measured is not None]
    errors = [(each.error, each.id) for each in known if each.error is not None]
    sizes = np.abs([error for error, _ in errors])
    worst, worst_id = max(errors, key=lambda pair: abs(pair[0])) if errors else (None, "")
    inside = _share([each.is_inside for each in known])
    right = _share([each.predicted == each.measured for each in known]) if quantity == "fits" else None
    limit = LIMITS.get((group, quantity))
    return Summary(
        group,
        quantity,
        len(known),
        len(members) - len(known),
        float(np.median(sizes)) if errors else None,
        float(np.quantile(sizes, 0.9)) if errors else None,
        worst,
        worst_id,
        inside,
        _share([each.is_too_fast for each in known]),
        right,
        limit,
        None if limit is None else bool(known) and _is_met(limit, [error for error, _ in errors], inside, right),
    )


def _is_met(
    limit: Limit, errors: Sequence[float], inside: tuple[int, int] | None, right: tuple[int, int] | None
) -> bool:
    sizes = np.abs(errors)
    return (
        (limit.inside is None or (inside is not None and inside[0] >= limit.inside * inside[1]))
        and (limit.median is None or bool(np.median(sizes) <= limit.median))
        and (limit.most is None or bool(sizes.max() <= limit.most))
        and (limit.fourth_fifth is None or bool(np.quantile(sizes, 0.8) <= limit.fourth_fifth))
        and (limit.too_short is None or all(1 / (1 + error) >= limit.too_short for error in errors))
        and (not limit.is_right or (right is not None and right[0] == right[1]))
    )


def _share(answers: Iterable[bool | None]) -> tuple[int, int] | None:
    known = [answer for answer in answers if answer is not None]
    return (sum(known), len(known)) if known else None
