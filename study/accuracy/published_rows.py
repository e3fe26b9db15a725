"""Compare predictions with published runs: step times, memory, and the errors under cross-validation."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from zero_study.files import ROOT, require_clone
from zero_study.theory import measured_by_others, peaks, prediction, step_time
from zero_study.theory.measured_by_others import MeasuredCase

VALIDATION = ROOT / "reports" / "predicted" / "validation" / "published_throughput.json"
COMMAND = "python tools/derive/planner_accuracy.py"  # the command that writes the file

NINE_OF_TEN = 0.9
DIGITS = 4  # decimal places of the errors in the results


def summarize(errors: Iterable[tuple[str, float]]) -> dict[str, Any]:
    """Return statistics of the errors of named cases.

    They include the median and the 90th percentile of the absolute errors. The worst error keeps its sign.
    """
    errors = list(errors)
    sizes = np.abs([error for _, error in errors])
    worst, error = errors[int(sizes.argmax())]
    return {
        "count": len(errors),
        "median": round(float(np.median(sizes)), DIGITS),
        "percentile_90": round(float(np.quantile(sizes, NINE_OF_TEN)), DIGITS),
        "worst": round(error, DIGITS),
        "worst_case": worst,
        "too_slow": sum(error > 0 for _, error in errors),
        "too_fast": sum(error < 0 for _, error in errors),
    }


# ---------------------------------------------------------------- errors of step times, as committed


def load() -> dict[str, Any]:
    """Read the committed results of the cross-validation. Raises Refusal if this is not a clone."""
    require_clone("the stored errors of predictions")
    content: dict[str, Any] = json.loads(VALIDATION.read_text(encoding="utf-8"))
    return content


# ---------------------------------------------------------------- adapters


@dataclass(frozen=True)
class AdapterError:
    """A published value for a training with adapters, and the errors of the prediction."""

    case: MeasuredCase
    error: float  # of the predicted quantity
    printed_error: float | None  # of memory at the peak: of the value that `advise` prints


@cache
def adapter_errors() -> tuple[AdapterError, ...]:
    """Return the prediction errors for all published times and amounts of memory of trainings with adapters."""
    found = []
    for case in measured_by_others.cases_of("adapters"):
        if case.quantity in measured_by_others.TIMES:
            seconds = step_time.seconds(case.shape, case.engine, case.job, case.box).total
            found.append(AdapterError(case, seconds / case.seconds - 1, None))
        elif case.quantity != "fits":
            printed = prediction.needed_for(peaks.peak(case.shape, case.engine, case.job)) / case.published - 1
            predicted = float(prediction.predicted_memory(case))
            at_peak = case.quantity != "allocated_bytes"
            found.append(AdapterError(case, predicted / case.published - 1, printed if at_peak else None))
    return tuple(found)


# ---------------------------------------------------------------- memory


def by_deepspeed(case: MeasuredCase) -> float:
    """Return the model states in bytes per GPU that DeepSpeed's own estimator predicts for 16-bit training.

    The source is runtime/zero/stage_1_and_2.py and stage3.py, functions estimate_zero2_model_states_mem_needs and
    estimate_zero3_model_states_mem_needs. Training without ZeRO is estimated as stage 2 on one GPU, and FSDP as stage
    3.
    """
    psi, gpus = case.shape.num_params, case.engine.world_size
    if case.engine.zero_stage == 3:
        return 18 * psi / gpus + 4 * max(case.shape.parameters.matrices)
    return 4 * psi + 16 * psi / (gpus if case.engine.zero_stage else 1)


RESERVED_OR_USED = ("peak_reserved_bytes", "used_bytes")


def source_of(case: MeasuredCase) -> str:
    """Return who published a measured case.

    All families of one source have the same name. torchao's rows count as torchtitan's, because they are trainings with
    torchtitan.
    """
    return case.family.partition(" ")[0].replace("torchao", "torchtitan")


@cache
def reserve_by_source() -> dict[str, float]:
    """Return the median ratio of reserved memory to the predicted peak of the tensors, for each publisher.

    The rows have grades A and B. Of the memory of the whole card, what is used outside the allocator is subtracted.
    """
    ratios: dict[str, list[float]] = {}
    for case in amounts():
        if case.quantity in RESERVED_OR_USED and case.grade != "C":
            peak = peaks.peak(case.shape, case.engine, case.job)
            outside = prediction.outside_bytes(case.box) if case.quantity == "used_bytes" else 0
            ratios.setdefault(source_of(case), []).append((case.published - outside) / float(peak.total))
    return {source: float(np.median(values)) for source, values in ratios.items()}


def fitted_reserve(without: str = "") -> float:
    """Fit the ratio of reserved memory to the peak of tensors (`prediction.RESERVED`), without one publisher's rows.

    It is the factor that makes the largest error of a source's median as small as possible. Any other fit would be
    decided by the sources with the most rows, because the sources differ too much. The empty string leaves no source
    out.
    """
    medians = [median for source, median in reserve_by_source().items() if source != without]
    return math.sqrt(min(medians) * max(medians))


def without_its_source(case: MeasuredCase) -> float:
    """Return the bytes predicted for a published case, with parameters that were fitted to other publishers' rows.

    Only reserved and used memory have a fitted parameter. Other quantities are predicted as usual.
    """
    if case.quantity not in RESERVED_OR_USED:
        return float(prediction.predicted_memory(case))
    peak = peaks.peak(case.shape, case.engine, case.job)
    return prediction.shown_bytes(peak, case.box, case.quantity == "used_bytes", fitted_reserve(source_of(case)))


ESTIMATORS: dict[str, Callable[[MeasuredCase], float]] = {
    "planner": without_its_source,
    "DeepSpeed's estimator": by_deepspeed,
    # `accelerate estimate-memory` assumes four times the parameters for training with Adam.
    "accelerate's estimator": lambda case: 4.0 * case.engine.parameter_bytes * case.shape.num_params,
}
METRICS = {
    "peak_allocated_bytes": "peak of tensors",
    "peak_unknown_bytes": "peak, instrument not named",
    "peak_reserved_bytes": "peak reserved by the allocator",
    "used_bytes": "whole card",
    "allocated_bytes": "tensors between steps",
}
ACTIVATIONS = "of these, peaks that activations decide"


def amounts() -> list[MeasuredCase]:
    """List the published amounts of memory, without duplicates.

    If a family reports the same amount for settings with the same prediction, the case counts once.
    """
    cases: dict[Any, MeasuredCase] = {}
    for case in measured_by_others.cases("memory"):
        if case.quantity != "fits":
            alike = case.family, case.quantity, case.published, float(prediction.predicted_memory(case))
            cases.setdefault(alike, case)
    return list(cases.values())


# What the memory that `advise` prints is compared with. Other published amounts are of other moments or unknown tools.
COMPARED_WITH_PRINTED = ("peak_allocated_bytes", "peak_reserved_bytes", "used_bytes")


def printed_memory() -> list[tuple[MeasuredCase, float]]:
    """Return the error of the memory that `advise` prints, for each published amount of grade A or B.

    The error is relative to the published amount. It is positive if the printed value is larger.
    """
    return [
        (case, prediction.needed_for(peaks.peak(case.shape, case.engine, case.job)) / case.published - 1)
        for case in amounts()
        if case.quantity in COMPARED_WITH_PRINTED and case.grade != "C"
    ]


def activations_decide(case: MeasuredCase) -> bool:
    """Return whether the predicted peak is in the forward or backward pass, so that activations determine it.

    In the optimizer step, model states determine the peak.
    """
    moment = int(peaks.peak(case.shape, case.engine, case.job).moment)
    return peaks.PEAK_MOMENTS[moment] != "optimizer step"


def memory() -> list[dict[str, Any]]:
    """Return statistics of the relative errors of predicted memory, by metric and grade, and by publisher.

    An error is predicted over published bytes, minus one. For peaks of tensors, the errors of DeepSpeed's and
    accelerate's estimators are added. Reserved and used memory are predicted without the case's own source.
    """
    cases = amounts()
    kinds = [(name, [case for case in cases if case.quantity == quantity]) for quantity, name in METRICS.items()]
    tensors = kinds[0][1]
    kinds.insert(1, (ACTIVATIONS, [case for case in tensors if activations_decide(case)]))
    groups: dict[tuple[str, str], list[MeasuredCase]] = {}
    for name, members in kinds:
        for case in sorted(members, key=lambda case: case.grade):
            groups.setdefault(("metric", f"{name}, grade {case.grade}"), []).append(case)
    for case in tensors:
        groups.setdefault(("source", f"{source_of(case)}, {case.grade}"), []).append(case)
    rows = []
    for (by, group), members in groups.items():
        for estimator, estimate in ESTIMATORS.items():
            if estimator == "planner" or members[0].quantity == "peak_allocated_bytes":
                errors = [(case.name, estimate(case) / case.published - 1) for case in members]
                rows.append({"by": by, "group": group, "predictor": estimator, **summarize(errors)})
    return rows


@dataclass(frozen=True)
class Verdict:
    """A published configuration, whether it is predicted to fit, and whether it really trained."""

    case: MeasuredCase
    predicted: bool

    @property
    def trained(self) -> bool:
        return bool(self.case.published)


def fits_verdicts() -> list[Verdict]:
    """Compare, for every published configuration, whether it is predicted to fit and whether it really trained."""
    verdicts: dict[Any, Verdict] = {}
    for case in (*measured_by_others.cases("times"), *measured_by_others.cases("memory")):
        predicted = bool(prediction.fits(peaks.peak(case.shape, case.engine, case.job), case.box))
        verdicts.setdefault((case.shape, case.engine, case.job, case.box), Verdict(case, predicted))
    return list(verdicts.values())
