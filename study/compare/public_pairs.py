"""Compare published runs in pairs: the same training was run once with each of two settings.

A single pair has no repeats. Therefore, the differences of all pairs of a comparison are shown next to those of pairs
in which only the cluster differs.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from study.compare.differences import t_interval
from zero_study.public_runs.quantities import logged, points
from zero_study.public_runs.schema import PublicRun

WARM_UP = 5  # logged steps whose times are left out
# Fields that are not named as further differences: they identify the run, or the label of the comparison names them.
NOT_NAMED = ("entry", "seed", "log", "date", "strategy", "engine")


class PairedComparison(BaseModel):
    """Two variants of a training, which are compared by pairs of published runs, one run of each variant."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    label: str  # in tables and pictures: what is compared, and with what
    source: str
    control: dict[str, str | int | bool | None]  # field of the setting, or of its other facts -> value
    arm: dict[str, str | int | bool | None]
    by: list[str] = Field(
        default_factory=lambda: ["entry"]
    )  # both sides of a pair have the same values of these fields
    pairs: dict[str, str | list[str]] = Field(
        default_factory=dict
    )  # entry of the control -> of the arms, instead of `by`
    baseline: str = ""  # the machine with H100, if A100 is compared with it
    in_overview: bool = False  # shown on the first page
    left_out: dict[str, str] = Field(default_factory=dict)  # entry of the control -> why its pair is not compared
    is_late: bool = False  # written when values of its source were known
    is_null: bool = False  # nothing that should matter differs
    margin: float | None = Field(default=None, gt=0)  # of the mean training loss, in nats per token
    caveats: list[str] = Field(default_factory=list)


class Pair(NamedTuple):
    """The differences between two runs of one pair. None for values that a log lacks."""

    entry: str
    num_steps: int  # with a loss on both sides
    first: float | None  # relative difference of the first loss, in absolute value
    largest: float | None  # the largest relative difference of the losses of all steps
    last: float | None  # relative difference of the last common loss, with its sign
    time: float | None  # seconds per step of the arm relative to those of the control
    peak: float | None  # peak of the tensors of the arm relative to that of the control
    is_whole: bool  # whether neither log ended early; the steps that both logged are compared anyway
    # The relative difference of the mean of the losses, with its sign: of all common steps, or as stated by the source.
    mean: float | None = None
    nats: float | None = None  # the same difference, not relative
    model: str | None = None


class LossDifference(NamedTuple):
    """A difference of losses in nats per token, with its 95 % interval."""

    mean: float
    low: float | None
    high: float | None
    num_pairs: int = 0  # if it is the mean of pairs of single runs
    num_models: int = 0

    @property
    def shown(self) -> str:
        """The difference as text, such as "+0.0047"."""
        return _signed(self.mean)

    @property
    def interval(self) -> str:
        """The interval as text, such as "+0.0017 to +0.0078". Empty if there is none."""
        return "" if self.low is None or self.high is None else f"{_signed(self.low)} to {_signed(self.high)}"


def _signed(value: float) -> str:
    return f"{value:+.4f}".replace("-", "\N{MINUS SIGN}")


class Spread(NamedTuple):
    """The median of the values of several pairs, the range of the middle 80 % of them, and the range of all."""

    num: int
    median: float
    tenth: float
    ninetieth: float
    least: float
    most: float


def pairs_of(comparison: PairedComparison, runs: Sequence[PublicRun]) -> list[Pair]:
    """Return the differences of all pairs of a comparison, sorted by name."""
    return sorted((_pair(control, arm) for control, arm in _partners(comparison, runs)), key=lambda pair: pair.entry)


def _partners(comparison: PairedComparison, runs: Sequence[PublicRun]) -> list[tuple[PublicRun, PublicRun]]:
    controls, arms = (
        {_key(run, comparison.by): run for run in runs if _has(run, side)}
        for side in (comparison.control, comparison.arm)
    )
    partners = [(key, key) for key in controls]
    if comparison.pairs:
        lists = {entry: [each] if isinstance(each, str) else each for entry, each in comparison.pairs.items()}
        partners = [((entry,), (each,)) for entry, listed in lists.items() for each in listed]
    pairs = [(controls[ours], arms[theirs]) for ours, theirs in partners if ours in controls and theirs in arms]
    return [pair for pair in pairs if pair[0].setting.entry not in comparison.left_out]


def also_differs(comparison: PairedComparison, runs: Sequence[PublicRun]) -> list[str]:
    """Return the training options that differ within pairs, besides the compared option."""
    counts: Counter[str] = Counter()
    total = 0
    for control, arm in _partners(comparison, runs):
        ours, theirs = _facts(control), _facts(arm)
        names = (ours.keys() | theirs.keys()) - {*comparison.control, *comparison.arm, *NOT_NAMED}
        counts.update(name for name in names if ours.get(name) != theirs.get(name))
        total += 1
    return [f"{name.replace('_', ' ')} in {count} of {total} pairs" for name, count in sorted(counts.items())]


def _facts(run: PublicRun) -> dict[str, object]:
    return run.setting.model_dump(exclude={"other"}) | run.setting.other


def _key(run: PublicRun, names: Sequence[str]) -> tuple[object, ...]:
    facts = _facts(run)
    return tuple(facts.get(name) for name in names)


def _has(run: PublicRun, facts: Mapping[str, object]) -> bool:
    own = _facts(run)
    return all(own.get(name) == value for name, value in facts.items())


def _pair(control: PublicRun, arm: PublicRun) -> Pair:
    losses, others = (dict(points(run.training, "step", "loss")) for run in (control, arm))
    steps = sorted(losses.keys() & others.keys())
    relative = [others[step] / losses[step] - 1 for step in steps if losses[step]]
    mean, other_mean = (
        statistics.fmean(side[step] for step in steps) if steps else run.totals.get("loss")
        for side, run in ((losses, control), (others, arm))
    )
    times, other_times = (_seconds(run) for run in (control, arm))
    peak, other_peak = (
        max(logged(run.training, "peak_allocated_bytes"), default=run.totals.get("peak_allocated_bytes"))
        for run in (control, arm)
    )
    entry, partner = control.setting.entry, arm.setting.entry
    return Pair(
        f"{entry}" if entry == partner else f"{entry} against {partner}",
        len(relative),
        abs(relative[0]) if relative else None,
        max(map(abs, relative), default=None),
        relative[-1] if relative else None,
        other_times / times if times and other_times else None,
        other_peak / peak if peak and other_peak else None,
        control.counts and arm.counts,
        other_mean / mean - 1 if mean and other_mean else None,
        other_mean - mean if mean and other_mean else None,
        control.setting.model,
    )


def _seconds(run: PublicRun) -> float | None:
    known = [value for _, value in points(run.training, "step", "seconds_per_step")][WARM_UP:]
    if known or "seconds_per_step" in run.totals:
        return statistics.median(known) if known else run.totals["seconds_per_step"]
    setting, rate = run.setting, run.totals.get("tokens_per_second_per_gpu")
    if not (rate and setting.global_batch_size and setting.sequence_length and setting.num_gpus):
        return None
    return setting.global_batch_size * setting.sequence_length / setting.num_gpus / rate


def spread(values: Sequence[float | None]) -> Spread | None:
    """Return the median and the ranges of the values of several pairs. None if no pair has a value."""
    known = np.array([value for value in values if value is not None], float)
    if not len(known):
        return None
    return Spread(len(known), *(float(np.quantile(known, share)) for share in (0.5, 0.1, 0.9, 0, 1)))


def in_nats(pairs: Sequence[Pair]) -> LossDifference | None:
    """Return the mean difference of the losses of pairs. None if no pair has a loss.

    The pairs of a model often differ only in the batch and in kernels, so each model counts once.
    """
    models: dict[str, list[float]] = {}
    for pair in pairs:
        if pair.nats is not None:
            models.setdefault(pair.model or pair.entry, []).append(pair.nats)
    if not models:
        return None
    means = np.array([np.mean(values) for values in models.values()])
    return LossDifference(*t_interval(means), sum(map(len, models.values())), len(means))
