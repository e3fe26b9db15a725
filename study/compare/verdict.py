"""Two one-sided tests (TOST) and permutation tests of a study that was fixed in advance, corrected by Holm.

A seed has an ensemble: the control's own run, and neighbours, runs of the control whose initial weights differ by one
unit in the last place. Two questions are asked of each arm, endpoint by endpoint, and neither stands for the other: is
the mean difference from the ensembles within a margin that was fixed beforehand (two one-sided tests), and are the
arm's runs further from the neighbours than these are from one another (a test that exchanges runs within each seed)?
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from scipy import stats

from study.compare import differences
from study.compare.admitted import Runs, Trained
from study.compare.words import in_order
from study.errors import Refusal
from study.running.studies import Endpoint, Protocol

EXCHANGES = 20_000  # random ones, from a fixed seed: a p of 0.05 is known to 0.003

Equivalence = Literal["same within the margin", "higher", "lower", "undecided"]
SAME: Equivalence = "same within the margin"


class Judged(NamedTuple):
    """One arm on one endpoint."""

    strategy: str
    world_size: int
    endpoint: Endpoint
    seeds: tuple[int, ...]
    differences: np.ndarray  # of each seed, in the margin's unit
    mean: float
    low: float  # the interval that the test of the margin is made with: 90 % where each of its sides is at 5 %
    high: float
    equivalence: Equivalence
    distance: float  # from the neighbours, root mean square, over the neighbours' own; 1: as far as they are
    p_neighbour: float  # of being so far by chance, were it one; after Holm's correction over the arms
    further: bool  # than a neighbour, shown
    power: float  # of the test of equivalence at the spread that was found, were there no difference


# ---------------------------------------------------------------- the tests


def judge(runs: Runs, protocol: Protocol, control: str) -> list[Judged]:
    """Judge every arm on every endpoint; arms in the order of tables, the control's other numbers of processes too.

    Raises Refusal where a planned run has no outcome yet, and where too few seeds are left for the tests.
    """
    require_whole(runs)
    ensembles = find_ensembles(runs, protocol, control)
    size = next(iter(ensembles.values()))[0].world_size
    names = {(run.strategy, run.world_size) for run in runs.taken if not run.label} - {(control, size)}
    order = in_order(strategy for strategy, _ in names)
    arms = sorted(names, key=lambda arm: (arm[1], order.index(arm[0])))
    judged = []
    for endpoint in protocol.endpoints:
        rows = [_judge_arm(arm, runs.of(*arm), ensembles, endpoint, protocol) for arm in arms]
        corrected = holm([row.p_neighbour for row in rows])
        judged += [
            row._replace(p_neighbour=p, further=p < protocol.significance)
            for row, p in zip(rows, corrected, strict=True)
        ]
    return judged


def require_whole(runs: Runs) -> None:
    """Raise Refusal where a planned run has no outcome yet: who looks before can stop where it pleases."""
    if runs.missing:
        raise Refusal(
            f"{len(runs.missing)} planned runs have no outcome yet, {runs.missing[0]} among them; a study that was "
            "fixed in advance is judged when it is whole"
        )


def find_ensembles(runs: Runs, protocol: Protocol, control: str) -> dict[int, list[Trained]]:
    """Of each seed that has them all: the control's run, then its neighbours."""
    sizes = {run.world_size for run in runs.taken if run.label in protocol.neighbours}
    if len(sizes) != 1:
        raise Refusal(f"neighbours of {control} are here on {len(sizes)} numbers of processes; the tests need one")
    (size,) = sizes
    members = [runs.of(control, size, label) for label in ("", *protocol.neighbours)]
    whole = sorted(set.intersection(*(set(each) for each in members)))
    if len(whole) < 2:
        raise Refusal(f"{len(whole)} seeds have {control} with all its neighbours; the tests need two")
    return {seed: [each[seed] for each in members] for seed in whole}


def _judge_arm(
    arm: tuple[str, int],
    by_seed: dict[int, Trained],
    ensembles: dict[int, list[Trained]],
    endpoint: Endpoint,
    protocol: Protocol,
) -> Judged:
    seeds = tuple(sorted(by_seed.keys() & ensembles.keys()))
    if len(seeds) < 2:
        raise Refusal(f"{arm[0]} on {arm[1]} processes: {len(seeds)} seeds have a control; the tests need two")
    values = np.array([[value(run, endpoint) for run in (*ensembles[seed], by_seed[seed])] for seed in seeds])
    scaled = relative(values, values[:, :-1], endpoint)
    each = scaled[:, -1] - scaled[:, :-1].mean(axis=1)
    each[np.abs(each) < differences.CONSTANT] = 0.0
    low, high = differences.interval_of_mean(each, 1 - 2 * protocol.significance)
    # Neighbours and arm are perturbations of the control's own run, which is in their midst and so is no member here.
    distance, p_neighbour = exchange(scaled[:, 1:])
    return Judged(
        *arm,
        endpoint,
        seeds,
        each,
        float(each.mean()),
        low,
        high,
        _equivalence(each, endpoint.margin, protocol.significance),
        distance,
        p_neighbour,
        False,
        power(float(each.std(ddof=1)), endpoint.margin, len(each), protocol.significance),
    )


def value(run: Trained, endpoint: Endpoint) -> float:
    """A run's endpoint."""
    return run.held_out[endpoint.step][endpoint.metric]


def relative(values: np.ndarray, control: np.ndarray, endpoint: Endpoint) -> np.ndarray:
    """Values in the margin's unit, (seeds, runs): loss as a share of the mean of each seed's `control`."""
    return values if endpoint.metric == "accuracy" else values / control.mean(axis=1, keepdims=True)


def _equivalence(each: np.ndarray, margin: float, significance: float) -> Equivalence:
    low, high = differences.interval_of_mean(
        each, 1 - 2 * significance
    )  # two one-sided tests are one interval (Schuirmann, 1987)
    if -margin < low and high < margin:
        return SAME
    low, high = differences.interval_of_mean(each, 1 - significance)
    return "higher" if low > 0 else "lower" if high < 0 else "undecided"


def exchange(scaled: np.ndarray) -> tuple[float, float]:
    """A permutation test within each seed: how far the last column is from the others, over theirs, and its p.

    Were the arm another neighbour, any run of a seed could be in its place. Two statistics are exchanged, the sum of
    squares, which sees scatter, and the square of the sum, which sees a shift; p is twice the smaller of theirs.
    `scaled`: (seeds, runs).
    """
    apart = from_others(scaled)
    found, shift = (apart[:, -1] ** 2).sum(), apart[:, -1].sum() ** 2
    # A run is further from the mean of few than from that of many; as if the neighbours had as many others.
    members = scaled.shape[1] - 1
    as_many = (1 + 1 / members) / (1 + 1 / (members - 1))
    own = as_many * (from_others(scaled[:, :-1]) ** 2).mean()
    distance = float(np.sqrt(found / len(scaled) / own)) if own > 0 else float("inf") if found > 0 else 1.0
    drawn = np.random.default_rng(0).integers(members + 1, size=(EXCHANGES, len(scaled)))
    chosen = apart[np.arange(len(scaled)), drawn]
    chances = ((chosen**2).sum(axis=1) >= found).sum(), (chosen.sum(axis=1) ** 2 >= shift).sum()
    return distance, min(1.0, 2 * (1 + int(min(chances))) / (1 + EXCHANGES))


def from_others(values: np.ndarray) -> np.ndarray:
    """How far each run of a seed is from the mean of that seed's others: (seeds, runs)."""
    others = (values.sum(axis=1, keepdims=True) - values) / (values.shape[1] - 1)
    return np.asarray(values - others)


def holm(ps: Sequence[float]) -> list[float]:
    """Correct p for the number of tests (Holm, 1979)."""
    corrected, largest = [0.0] * len(ps), 0.0
    for rank, index in enumerate(np.argsort(ps, kind="stable")):
        largest = max(largest, min(1.0, (len(ps) - rank) * ps[index]))
        corrected[index] = largest
    return corrected


def power(sd: float, margin: float, num_seeds: int, significance: float) -> float:
    """The power of two one-sided paired tests where there is no difference (Chow, Shao and Wang, 2008, section 3.1)."""
    if sd == 0:
        return 1.0
    degrees = num_seeds - 1
    quantile = stats.t.ppf(1 - significance, degrees)
    return max(0.0, 2 * float(stats.t.cdf(margin * np.sqrt(num_seeds) / sd - quantile, degrees)) - 1)


def neighbours_apart(runs: Runs, protocol: Protocol, endpoint: Endpoint, control: str) -> np.ndarray:
    """How far each neighbour is from the mean of its seed's others, in the margin's unit: (seeds, neighbours)."""
    members = find_ensembles(runs, protocol, control).values()
    values = np.array([[value(run, endpoint) for run in each[1:]] for each in members])
    return from_others(relative(values, values, endpoint))


def reached(run: Trained, protocol: Protocol) -> int | None:
    """The first step looked at on which the held-out loss is at the target; None: it was not reached."""
    steps = sorted(step for step in run.held_out if step % protocol.target.every == 0)
    return next((step for step in steps if run.held_out[step]["loss"] <= protocol.target.loss), None)


def same_weights(runs: Runs, protocol: Protocol) -> dict[tuple[str, str], bool | None]:
    """Whether strategies that were to end with an arm's weights to the bit did, by (arm, strategy); None: not shown."""
    ends = {(run.strategy, run.seed, run.world_size): run.final_sha256 for run in runs.taken if not run.label}
    found: dict[tuple[str, str], bool | None] = {}
    for arm, others in protocol.same_as.items():
        for other in others:
            shown = [
                ends[arm, run.seed, run.world_size] == run.final_sha256
                for run in runs.taken
                if run.strategy == other and run.label == protocol.once and (arm, run.seed, run.world_size) in ends
            ]
            found[arm, other] = all(shown) if shown else None
    return found


def arms_of_same(runs: Runs, protocol: Protocol) -> dict[str, str]:
    """The arm whose runs tell of a strategy that was shown to end with its weights to the bit, by strategy."""
    return {other: arm for (arm, other), shown in same_weights(runs, protocol).items() if shown}
