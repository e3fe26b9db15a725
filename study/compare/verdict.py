"""Compute the statistics of a study with a protocol: permutation tests, equivalence tests and exact intervals.

Each seed has a run of the control, and runs of the null. These are trainings of the control with other rounding errors.
An arm is a strategy that is compared with the control by its held-out loss. Each arm has three results:

- whether its losses are further from the control's than those of the null (a test that permutes runs within each seed)
- whether the mean difference is within the margin
- for how many seeds its loss is further from the control's than that of every run of the null

Trainings with a planted fault are tested in the same way. If one of them is not detected, the test is too weak, and
there is no verdict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from study.compare.differences import bootstrap_interval
from study.compare.eligible_runs import AdmittedRun, Runs
from study.running.studies import Protocol
from zero_study.engines.strategy_names import in_order
from zero_study.errors import Refusal
from zero_study.terminal import percent

EXCHANGES = 20_000  # random permutations, from a fixed seed; a p-value of 0.05 is known to within 0.003
RESAMPLES = 10_000
LEAST = 1e-9  # relative; smaller distances count as this one, because fp32 losses do not resolve them

Differences = Mapping[int, float]  # by seed: held-out loss divided by the control's, minus 1


class Arm(NamedTuple):
    """The test results of one strategy, or of one training with an injected fault, compared with the baseline."""

    name: str
    is_broken: bool
    differences: dict[int, float]  # by seed, relative
    mean: float
    low: float  # lower bound of the interval for the test of the margin: 90 % if each side is tested at 5 %
    high: float
    distance: float  # geometric mean over seeds, divided by that of the null in the same seeds
    p: float  # p-value of so large a difference if the arm were a run of the null; with Holm's correction
    is_further: bool  # whether it is shown to be further from the control than the null
    is_within: bool  # whether the mean difference is shown to be within the margin
    num_parted: int  # seeds in which it is further from the control than any run of the null in any seed
    most_parted: float  # upper 95 % bound of the share of such seeds (Clopper and Pearson, 1934)


class Verdict(NamedTuple):
    """The test results of a study whose protocol was fixed before its runs."""

    arms: list[Arm]
    null: dict[str, dict[int, float]]  # differences of the null by variant and seed
    share_noticed: float  # share of seeds in which a run of the null visibly differs from the control
    falls: dict[int, tuple[float, float]]  # by seed: the control's held-out loss before step 1, and at the endpoint
    still: list[int]  # seeds in which that loss does not fall as far as the protocol requires
    lacks: list[str]  # reasons why there is no verdict; empty if there is one


def judge(runs: Runs, protocol: Protocol, control: str, elsewhere: Mapping[str, Differences] | None = None) -> Verdict:
    """Return the verdict on every strategy and injected fault of a study that has a protocol.

    `elsewhere`: the arms of the protocol's `broken_study`, by name. Raises Refusal if a planned run has no outcome yet,
    if a variant of the null was not run, or if fewer than two seeds are left for a test.
    """
    require_whole(runs.missing)
    controls, differences = differences_from_control(runs, protocol.step, control)
    null = {name: differences[name] for name in protocol.variants if name in differences}
    if missing := set(protocol.variants) - null.keys():
        raise Refusal(
            f"no run of the variation {min(missing)!r} was found. The tests need all of: {', '.join(protocol.variants)}"
        )
    broken = {name: differences[name] for name in protocol.broken if name in differences} | dict(elsewhere or {})
    strategies = {
        name: each for name, each in differences.items() if name not in (*protocol.variants, *protocol.broken)
    }
    # The distance from the control of the null's furthest run, for each seed in which no run of the null is missing.
    starts = sorted(set.intersection(*(set(arm) for arm in null.values())))
    furthest = {start: max(abs(arm[start]) for arm in null.values()) for start in starts}
    arms = [
        *_judge_arms({name: strategies[name] for name in in_order(strategies)}, False, null, furthest, protocol),
        *_judge_arms(broken, True, null, furthest, protocol),
    ]
    share_noticed = float(np.mean([distance >= protocol.noticed for distance in furthest.values()]))
    falls = {start: (run.held_out[0]["loss"], run.held_out[protocol.step]["loss"]) for start, run in controls.items()}
    still = [start for start, (first, last) in falls.items() if last > protocol.falls_to * first]
    lacks = _unfound_faults(arms, protocol)
    if share_noticed <= 0.5:  # rounding changes the losses too little for the tests to be meaningful
        lacks.append(
            f"rounding changes the loss by {percent(protocol.noticed)} or more with only {percent(share_noticed)} of "
            "the seeds, which is too rare for the tests"
        )
    lacks += _no_learning(controls, still, protocol, control)
    return Verdict(arms, null, share_noticed, falls, still, lacks)


def _judge_arms(
    arms: Mapping[str, Differences],
    are_broken: bool,
    null: Mapping[str, Differences],
    furthest: Mapping[int, float],
    protocol: Protocol,
) -> list[Arm]:
    """Return the test results of all strategies, or of all planted faults, with p-values corrected for their number."""
    judged = [_judge_arm(name, are_broken, differences, null, furthest, protocol) for name, differences in arms.items()]
    corrected = holm([arm.p for arm in judged])
    return [arm._replace(p=p, is_further=p < protocol.significance) for arm, p in zip(judged, corrected, strict=True)]


def _unfound_faults(arms: Sequence[Arm], protocol: Protocol) -> list[str]:
    """Return a line for each planted fault that was not run, or that the tests did not detect."""
    broken = {arm.name: arm for arm in arms if arm.is_broken}
    planned = {*protocol.broken, *([protocol.broken_study] if protocol.broken_study else [])}
    return [
        *(f"the planted fault {name} was not run" for name in sorted(planned - broken.keys())),
        *(f"the test did not detect the planted fault {name}" for name, arm in broken.items() if not arm.is_further),
    ]


def _no_learning(controls: Mapping[int, AdmittedRun], still: list[int], protocol: Protocol, control: str) -> list[str]:
    """Return lines about the seeds in which the control hardly learns.

    If runs learn nothing, every strategy gives the same loss.
    """
    lines = []
    if still:
        goal = f"{protocol.falls_to:g} times its first value"
        lines += [f"the held-out loss of {control} does not fall to {goal} with {_seeds(still)}"]
    if rises := sorted(start for start, run in controls.items() if run.training[1] >= run.training[0]):
        lines += [f"the training loss of {control} does not fall with {_seeds(rises)}"]
    return lines


def _seeds(numbers: Sequence[int]) -> str:
    return f"seed{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def require_whole(missing: Sequence[str]) -> None:
    """Raise Refusal if some planned runs of a study have no outcome yet.

    A verdict on an incomplete study would allow stopping as soon as the result looks good.
    """
    if missing:
        raise Refusal(
            f"{len(missing)} planned runs have no outcome yet, {missing[0]} among them. A study with a "
            "protocol can be judged only when all of its runs have ended. Finish the study with `zero-study run`."
        )


def differences_from_control(
    runs: Runs, step: int, control: str
) -> tuple[dict[int, AdmittedRun], dict[str, dict[int, float]]]:
    """Return the baseline's run by seed, and the difference of each strategy's held-out loss from it by seed.

    The differences are relative, at step `step`. A strategy whose runs have a label is named by the label.
    """
    controls = {run.seed: run for run in runs.taken if run.strategy == control and not run.label}
    differences: dict[str, dict[int, float]] = {}
    for run in runs.taken:
        if run.run_id != (of_start := controls.get(run.seed, run)).run_id:
            relative = run.held_out[step]["loss"] / of_start.held_out[step]["loss"] - 1
            differences.setdefault(run.label or run.strategy, {})[run.seed] = relative
    return controls, differences


def _judge_arm(
    name: str,
    is_broken: bool,
    differences: Differences,
    null: Mapping[str, Differences],
    furthest: Mapping[int, float],  # largest distance of the null, in each seed that has all its variants
    protocol: Protocol,
) -> Arm:
    starts = [start for start in furthest if start in differences]
    if len(starts) < 2:
        raise Refusal(
            f"{name}: the variations were run with {len(starts)} of its seeds, but the tests need at least two."
        )
    beside = np.array([[each[start] for each in null.values()] for start in starts])
    own = np.array([differences[start] for start in starts])
    distance, p = permutation_test(own, beside)
    low, high = mean_interval(own, 1 - 2 * protocol.significance)
    num_parted = int((np.abs(own) > max(furthest.values())).sum())
    within = -protocol.margin < low and high < protocol.margin
    most = float(stats.beta.ppf(0.95, num_parted + 1, len(own) - num_parted)) if num_parted < len(own) else 1.0
    each = dict(zip(starts, own.tolist(), strict=True))
    return Arm(name, is_broken, each, float(own.mean()), low, high, distance, p, False, within, num_parted, most)


def permutation_test(own: np.ndarray, null: np.ndarray) -> tuple[float, float]:
    """Test whether a strategy is further from the baseline than trainings that differ from it only by rounding.

    Return the strategy's distance from the control divided by that of the other trainings (the null), and the p-value.

    If the strategy were a run of the null, it could be exchanged with any other run of the same seed. The test uses two
    statistics. In the mean of the log distances, a single seed with a large difference does not outweigh the others.
    The mean difference detects a small shift that occurs in all seeds. The p-value is twice the smaller one of the two.

    `own` has the shape (seeds,), and `null` has the shape (seeds, runs).
    """
    pooled = np.column_stack([own, null])
    logs = np.log10(np.maximum(np.abs(pooled), LEAST))
    drawn = np.random.default_rng(0).integers(pooled.shape[1], size=(EXCHANGES, len(pooled)))
    rows = np.arange(len(pooled))
    further = (logs[rows, drawn].sum(axis=1) >= logs[:, 0].sum()).sum()
    shifted = (np.abs(pooled[rows, drawn].sum(axis=1)) >= abs(own.sum())).sum()
    p = min(1.0, 2 * (1 + int(min(further, shifted))) / (1 + EXCHANGES))
    return float(10 ** (logs[:, 0].mean() - logs[:, 1:].mean())), p


def mean_interval(values: np.ndarray, confidence: float) -> tuple[float, float]:
    """Return the confidence interval of a mean by the bootstrap (BCa). If all values are equal, it is that value."""
    if np.ptp(values) == 0:
        return float(values[0]), float(values[0])
    return bootstrap_interval(values, confidence, RESAMPLES)


def holm(ps: Sequence[float]) -> list[float]:
    """Return p-values corrected for the number of tests by Holm's method (1979)."""
    corrected, largest = [0.0] * len(ps), 0.0
    for rank, index in enumerate(np.argsort(ps, kind="stable")):
        largest = max(largest, min(1.0, (len(ps) - rank) * ps[index]))
        corrected[index] = largest
    return corrected


def power(null: np.ndarray, starts: int, share: float, parting: float, protocol: Protocol, studies: int = 400) -> float:
    """Return the power of a study: the share of simulated studies that detect a strategy with a real difference.

    The strategy's losses differ by `parting` (relative) in a `share` of the seeds. `null` has the relative differences
    of control runs with other rounding errors, in the shape (seeds, runs). Each of the `starts` simulated seeds is
    drawn from these seeds, and the strategy's run is drawn from its runs. A study detects the strategy if the
    permutation test is significant, or if one of the strategy's runs is further from the control than every run of the
    null.
    """
    draw = np.random.default_rng(0)
    noticed = 0
    for _ in range(studies):
        of = null[draw.integers(len(null), size=starts)]
        beside = draw.permuted(of, axis=1) * draw.choice([-1, 1], size=of.shape)
        own = beside[np.arange(starts), draw.integers(of.shape[1], size=starts)]
        own = own + np.where(draw.random(starts) < share, parting, 0.0)
        is_beyond_null = bool(np.abs(own).max() > np.abs(beside).max())
        noticed += is_beyond_null or permutation_test(own, beside)[1] < protocol.significance
    return noticed / studies
