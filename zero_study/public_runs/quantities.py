"""Compute the losses, times and memory of a public run, to compare them with those of another run.

A quantity is None if the log does not state what it needs.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from itertools import pairwise

from zero_study.public_runs.schema import PublicRun, Series

LAST = 10  # the most logged losses over which the last training loss is averaged


def values(series: Series | None, name: str) -> Sequence[float | int | None]:
    """Return the values of a column of the log. Empty if the column was not logged."""
    return [] if series is None else series.columns.get(name, [])


def logged(series: Series | None, name: str) -> list[float | int]:
    """Return the logged values of a column, without missing values and losses that are not finite."""
    return [value for value in values(series, name) if value is not None]


def _without_warm_up(run: PublicRun, name: str) -> list[float | int]:
    """Return the logged values of a column of the training, without the first tenth: warm-up and compilation."""
    known = logged(run.training, name)
    return known[len(known) // 10 :]


def points(series: Series | None, by: str, name: str) -> list[tuple[float, float]]:
    """Return the logged values of a column as pairs with their position, such as (samples, loss)."""
    pairs = zip(values(series, by), values(series, name), strict=False)
    return [(position, value) for position, value in pairs if position is not None and value is not None]


def at(series: Series | None, by: str, position: float, name: str, tolerance: float = 0.0) -> float | None:
    """Return the value that was logged nearest to a position. None if its distance exceeds the relative tolerance."""
    known = points(series, by, name)
    if not known:
        return None
    nearest, value = min(known, key=lambda point: abs(point[0] - position))
    return value if abs(nearest - position) <= tolerance * position else None


def gpu_seconds_per_sample(run: PublicRun) -> float | None:
    """Return the GPU seconds per trained sequence: the median over the intervals between log lines.

    Intervals with a logged evaluation are left out. None if only evaluations were logged.
    """
    return _per_gpu(run, _slope(points(run.training, "samples", "seconds"), logged(run.evaluation, "seconds")))


def gpu_seconds_per_sample_in_all_intervals(run: PublicRun) -> float | None:
    """Return the GPU seconds per trained sequence: the median over all intervals between log lines."""
    return _per_gpu(run, _slope(points(run.training, "samples", "seconds")))


def gpu_seconds_per_sample_with_evaluation(run: PublicRun) -> float | None:
    """Return the GPU seconds per sequence: the median over the intervals between evaluations.

    Each interval includes the time of an evaluation.
    """
    return _per_gpu(run, _slope(points(run.evaluation, "samples", "seconds")))


def _per_gpu(run: PublicRun, seconds: float | None) -> float | None:
    return None if seconds is None or run.setting.num_gpus is None else seconds * run.setting.num_gpus


def seconds_per_step(run: PublicRun) -> float | None:
    """Return the median time of an optimizer step, as logged or from the time stamps of the steps."""
    if known := _without_warm_up(run, "seconds_per_step"):
        return statistics.median(known)
    return run.totals.get("seconds_per_step", _slope(points(run.training, "step", "seconds")))


def _slope(moments: Sequence[tuple[float, float]], evaluated: Sequence[float] = ()) -> float | None:
    """Return the median of seconds per unit of the position, over the intervals without an evaluation."""
    slopes = [
        (next_second - second) / (next_position - position)
        for (position, second), (next_position, next_second) in pairwise(moments)
        if next_position > position
        and next_second > second
        and not any(second < moment <= next_second for moment in evaluated)
    ]
    return statistics.median(slopes) if slopes else None


def seconds_in_all(run: PublicRun) -> float | None:
    """Return the time from the first to the last step, as logged."""
    moments = logged(run.training, "seconds") + logged(run.evaluation, "seconds")
    return run.totals.get("seconds", max(moments, default=None))


def gpu_seconds(run: PublicRun) -> float | None:
    """Return the time of the training, multiplied by the number of GPUs."""
    seconds, num_gpus = seconds_in_all(run), run.setting.num_gpus
    return None if seconds is None or num_gpus is None else seconds * num_gpus


def seconds_to_target(run: PublicRun) -> float | None:
    """Return the time until the run reached its benchmark's target. None if it never did."""
    return seconds_in_all(run) if _reached(run) else None


def samples_to_target(run: PublicRun) -> float | None:
    """Return the number of sequences until the run reached its benchmark's target. None if it never did."""
    evaluated = logged(run.evaluation, "samples")
    return run.totals.get("samples", max(evaluated, default=None)) if _reached(run) else None


def _reached(run: PublicRun) -> bool:
    return run.setting.benchmark is not None and run.ending == "finished"


def last_loss(run: PublicRun) -> float | None:
    """Return the mean of the last tenth of the logged training losses. At most `LAST` losses are averaged.

    None if the last losses are not finite.
    """
    if run.not_finite_since:
        return None
    losses = logged(run.training, "loss")
    return statistics.fmean(losses[-max(1, min(LAST, len(losses) // 10)) :]) if losses else None


def last_evaluation_loss(run: PublicRun) -> float | None:
    """Return the loss of the last evaluation. None if it is not finite."""
    if run.evaluation is not None and run.evaluation.not_finite_since("evaluation_loss"):
        return None
    losses = logged(run.evaluation, "evaluation_loss")
    return losses[-1] if losses else None


def _peak(name: str) -> Callable[[PublicRun], float | None]:
    def peak(run: PublicRun) -> float | None:
        if name in run.totals:
            return run.totals[name]
        return max(logged(run.training, name), default=None)

    return peak


QUANTITIES: dict[str, Callable[[PublicRun], float | None]] = {
    "seconds per step": seconds_per_step,
    "GPU seconds per sample": gpu_seconds_per_sample,
    "GPU seconds per sample, all intervals": gpu_seconds_per_sample_in_all_intervals,
    "GPU seconds per sample, with evaluation": gpu_seconds_per_sample_with_evaluation,
    "seconds in all": seconds_in_all,
    "GPU seconds": gpu_seconds,
    "seconds to the target": seconds_to_target,
    "samples to the target": samples_to_target,
    "last loss": last_loss,
    "last evaluation loss": last_evaluation_loss,
    "peak of tensors": _peak("peak_allocated_bytes"),
    "peak reserved": _peak("peak_reserved_bytes"),
    "tokens per second": lambda run: _middle(run, "tokens_per_second"),
    "tokens per second per GPU": lambda run: _middle(run, "tokens_per_second_per_gpu"),
}
TIMES = {
    "seconds per step",
    "GPU seconds per sample",
    "GPU seconds per sample, all intervals",
    "GPU seconds per sample, with evaluation",
    "seconds in all",
    "GPU seconds",
    "seconds to the target",
    "tokens per second",
    "tokens per second per GPU",
}
BYTES = {"peak of tensors", "peak reserved"}


def _middle(run: PublicRun, name: str) -> float | None:
    known = _without_warm_up(run, name)
    return statistics.median(known) if known else run.totals.get(name)
