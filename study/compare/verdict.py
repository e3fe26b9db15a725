"""The statistics of a study with a protocol: a permutation test, an equivalence test (BCa bootstrap), exact intervals.

Each seed has a run of the control, and runs of the null: the control's training with other rounding errors. Three
questions are asked of each arm. Is its held-out loss further from the control's than the null's is (by a test that
exchanges runs within each seed)? Is the mean difference within the margin? For how many seeds is it further away than
every run of the null? Arms that are wrong on purpose are tested in the same way. If one of them is not detected, the
test could not have failed, and there is no verdict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from study.compare.differences import bootstrap_interval
from study.compare.eligible_runs import Runs, Trained
from study.engines.strategy_names import in_order
from study.errors import Refusal
from study.running.studies import Protocol

EXCHANGES = 20_000  # random ones, from a fixed seed: a p of 0.05 is known to 0.003
RESAMPLES = 10_000
LEAST = 1e-9  # relative: what is nearer counts as this near, as no fp32 loss tells them apart

Differences = Mapping[int, float]  # by start: held-out loss over the control's, less 1


class Arm(NamedTuple):
    """A strategy, or a training that is wrong on purpose, beside the control."""

    name: str
    is_broken: bool
    differences: dict[int, float]  # by start
    mean: float
    low: float  # of the interval that the test of the margin is made with: 90 % where each of its sides is at 5 %
    high: float
    distance: float  # geometric mean over starts, over that of the null in the same starts
    p: float  # of being so far by chance, were it one of the null; after Holm's correction over arms of its kind
    is_further: bool  # than the null, shown
    is_within: bool  # the margin, shown
    num_parted: int  # starts in which it is further away than every run of the null is in any start
    most_parted: float  # the largest share of all starts that might part, at 95 % (Clopper and Pearson, 1934)


class Verdict(NamedTuple):
    """What a study that was fixed in advance says."""

    arms: list[Arm]
    null: dict[str, dict[int, float]]  # by label, by start
    share_noticed: float  # of starts in which a run of the null has parted from the control's: is the training quiet?
    falls: dict[int, tuple[float, float]]  # by start: the control's held-out loss before step 1, and at the endpoint
    still: list[int]  # starts in which that loss does not fall as far as the protocol asks
    lacks: list[str]  # why there is no verdict; empty: there is one


def judge(runs: Runs, protocol: Protocol, control: str, elsewhere: Mapping[str, Differences] | None = None) -> Verdict:
    """Judge every arm. `elsewhere`: arms of `broken_study`, by name.

    Raises Refusal if a planned run has no outcome yet, and if too few starts are left for the tests.
    """
    require_whole(runs.missing)
    controls, differences = beside_control(runs, protocol.step, control)
    null = _null_of(differences, protocol)
    broken = {name: differences[name] for name in protocol.broken if name in differences} | dict(elsewhere or {})
    strategies = {
        name: each for name, each in differences.items() if name not in (*protocol.variants, *protocol.broken)
    }
    furthest = _furthest(null)
    arms = [
        *_judge_arms({name: strategies[name] for name in in_order(strategies)}, False, null, furthest, protocol),
        *_judge_arms(broken, True, null, furthest, protocol),
    ]
    share_noticed = float(np.mean([distance >= protocol.noticed for distance in furthest.values()]))
    falls = {start: (run.held_out[0]["loss"], run.held_out[protocol.step]["loss"]) for start, run in controls.items()}
    still = [start for start, (first, last) in falls.items() if last > protocol.falls_to * first]
    lacks = [
        *_unfound_faults(arms, protocol),
        *_insensitive(share_noticed),
        *_no_learning(controls, still, protocol, control),
    ]
    return Verdict(arms, null, share_noticed, falls, still, lacks)


def _null_of(differences: Mapping[str, dict[int, float]], protocol: Protocol) -> dict[str, dict[int, float]]:
    """The runs of the null by variant and start. Raises Refusal if a variant was not run."""
    null = {name: differences[name] for name in protocol.variants if name in differences}
    if missing := set(protocol.variants) - null.keys():
        raise Refusal(
            f"no run of the null {min(missing)!r} is here. The tests need all of: {', '.join(protocol.variants)}"
        )
    return null


def _furthest(null: Mapping[str, Differences]) -> dict[int, float]:
    """How far the null's furthest run is from the control's, by start, in the starts that have all of the null."""
    starts = sorted(set.intersection(*(set(arm) for arm in null.values())))
    return {start: max(abs(arm[start]) for arm in null.values()) for start in starts}


def _judge_arms(
    arms: Mapping[str, Differences],
    are_broken: bool,
    null: Mapping[str, Differences],
    furthest: Mapping[int, float],
    protocol: Protocol,
) -> list[Arm]:
    """Judge arms of one kind together: their p are corrected for the number of tests."""
    judged = [_judge_arm(name, are_broken, differences, null, furthest, protocol) for name, differences in arms.items()]
    corrected = holm([arm.p for arm in judged])
    return [arm._replace(p=p, is_further=p < protocol.significance) for arm, p in zip(judged, corrected, strict=True)]


def _unfound_faults(arms: Sequence[Arm], protocol: Protocol) -> list[str]:
    """Trainings that are wrong on purpose, which the tests must flag, and did not."""
    broken = {arm.name: arm for arm in arms if arm.is_broken}
    planned = {*protocol.broken, *([protocol.broken_study] if protocol.broken_study else [])}
    return [
        *(f"{name}, which is wrong on purpose, was not run" for name in sorted(planned - broken.keys())),
        *(f"{name}, which is wrong on purpose, was not flagged" for name, arm in broken.items() if not arm.is_further),
    ]


def _insensitive(share_noticed: float) -> list[str]:
    """Whether rounding alone changes too little of the losses for the tests to mean anything."""
    if share_noticed > 0.5:
        return []
    return [f"rounding is noticed in {share_noticed:.0%} of starts: the training is too quiet to ask"]


def _no_learning(controls: Mapping[int, Trained], still: list[int], protocol: Protocol, control: str) -> list[str]:
    """The starts in which the control hardly learns: of runs that learn nothing, all strategies are alike."""
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
    """Raise Refusal where a planned run has no outcome yet: who looks before can stop where it pleases."""
    if missing:
        raise Refusal(
            f"{len(missing)} planned runs have no outcome yet, {missing[0]} among them. A study with a protocol is "
            "judged only when all of its runs have ended."
        )


def beside_control(runs: Runs, step: int, control: str) -> tuple[dict[int, Trained], dict[str, dict[int, float]]]:
    """The control's run by start; and of each other arm or label, by start, how far its held-out loss is, relative."""
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
    furthest: Mapping[int, float],  # of the null, in each start that has all of it
    protocol: Protocol,
) -> Arm:
    starts = [start for start in furthest if start in differences]
    if len(starts) < 2:
        raise Refusal(f"{name}: {len(starts)} starts have the null; the tests need two")
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
    """A permutation test within each start: how far the arm is from the control, over the null's distance; and its p.

    Were the arm one of the null, any of a start's runs could be in its place. Two statistics are exchanged: the mean of
    log distances, in which no single start that parts outweighs the others, and the mean difference, which sees a small
    shift that is in all starts; p is twice the smaller of theirs. `own`: (starts,); `null`: (starts, runs).
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
    """The interval of a mean, by the bootstrap (BCa); of equal values, that value."""
    if np.ptp(values) == 0:
        return float(values[0]), float(values[0])
    return bootstrap_interval(values, confidence, RESAMPLES)


def holm(ps: Sequence[float]) -> list[float]:
    """Correct p for the number of tests (Holm, 1979)."""
    corrected, largest = [0.0] * len(ps), 0.0
    for rank, index in enumerate(np.argsort(ps, kind="stable")):
        largest = max(largest, min(1.0, (len(ps) - rank) * ps[index]))
        corrected[index] = largest
    return corrected


def power(null: np.ndarray, starts: int, share: float, parting: float, protocol: Protocol, studies: int = 400) -> float:
    """The share of simulated studies that notice an arm whose runs part in a share of starts, by so much (relative).

    `null`: (starts, runs) of a pilot. A simulated start takes one of the pilot's, and its arm is as far away as one of
    the null's runs there. Noticed: the arm is shown to be further, or a run is beyond the null.
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
