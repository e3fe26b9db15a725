"""What came of a study that was fixed in advance: is any strategy further from the control than rounding carries it?

The control of a seed is the mean of its ensemble: its own run, and runs of the control whose initial weights differ by
one unit in the last place. Two questions are asked of each arm, endpoint by endpoint, and neither stands for the other:
is the difference within a margin that was fixed beforehand (two one-sided tests), and are its runs further from the
ensemble than the ensemble's own are (a test that exchanges runs within each seed)?
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from scipy import stats

from study.compare import differences
from study.compare.order import in_order
from study.errors import Refusal
from study.records import find as records
from study.records.protocol import Endpoint, Protocol
from study.records.schema import Record

EXCHANGES = 20_000  # random ones, from a fixed seed: a p of 0.05 is known to 0.003

Equivalence = Literal["same within the margin", "higher", "lower", "undecided"]


class Trained(NamedTuple):
    """What the protocol asks of one run."""

    run_id: str
    strategy: str
    world_size: int
    seed: int
    is_null: bool
    is_once: bool
    held_out: dict[int, dict[str, float]]  # step -> metric -> value
    final_sha256: str
    initial_sha256: str
    started_at: str


class Runs(NamedTuple):
    """A study's runs, as far as the protocol lets them in."""

    taken: list[Trained]
    left_out: dict[str, str]  # run_id -> why
    deviating: dict[str, str]  # run_id -> digest of the study's file that it was started under, not today's


class Judged(NamedTuple):
    """One arm on one endpoint."""

    strategy: str
    world_size: int
    endpoint: Endpoint
    seeds: tuple[int, ...]
    differences: np.ndarray  # of each seed, in the margin's unit
    mean: float
    low: float  # 95 %
    high: float
    equivalence: Equivalence
    distance: float  # root mean square of the differences over that of the ensembles' own; 1: as far as rounding goes
    p_null: float  # of being this far by rounding alone, after Holm's correction over the arms
    further: bool  # than rounding carries the control
    power: float  # of the test of equivalence at the spread that was found, were there no difference


def read(folders: Sequence[Path], protocol: Protocol, study: str, sha256: str) -> Runs:
    """Read the study's runs. Raises Refusal where there are none."""
    taken: list[Trained] = []
    left_out: dict[str, str] = {}
    deviating: dict[str, str] = {}
    for run in records.find_runs(folders):
        outcome = run.outcome
        if outcome is None or outcome.study != study:
            continue
        record = None if run.record is None or outcome.status != "ok" else run.record.record
        if record is None:
            left_out[outcome.run_id] = outcome.status
        elif record.weights_sha256 != protocol.weights_sha256:
            left_out[outcome.run_id] = "it started from another body"
        else:
            taken.append(_trained(record, protocol))
            if outcome.study_sha256 != sha256:
                deviating[outcome.run_id] = outcome.study_sha256 or "none"
    if not taken:
        raise Refusal(f"{' '.join(map(str, folders))}: no run of study {study} to judge; `zero-study run {study}`")
    return Runs(taken, left_out, deviating)


def _trained(record: Record, protocol: Protocol) -> Trained:
    assert record.initial_parameters is not None  # every ok record has both
    assert record.final_parameters is not None
    return Trained(
        run_id=record.run_id,
        strategy=record.strategy,
        world_size=record.world_size,
        seed=record.seed,
        is_null=any(record.run_id.endswith(f"-{label}") for label in protocol.neighbours),
        is_once=record.run_id.endswith(f"-{protocol.once}"),
        held_out={
            int(line["step"] or 0): {name: value for name, value in line.items() if value is not None}
            for line in record.evaluation
        },
        final_sha256=record.final_parameters.sha256,
        initial_sha256=record.initial_parameters.sha256,
        started_at=record.started_at,
    )


# ---------------------------------------------------------------- the tests


def judge(runs: Runs, protocol: Protocol, control: str) -> list[Judged]:
    """Judge every arm on every endpoint; arms in the order of tables, the control's other numbers of processes too."""
    ensembles = _ensembles(runs, control)
    arms: dict[tuple[str, int], dict[int, Trained]] = {}
    for run in runs.taken:
        if not run.is_null and not run.is_once and run not in _flat(ensembles):
            arms.setdefault((run.strategy, run.world_size), {})[run.seed] = run
    order = in_order(strategy for strategy, _ in arms)
    judged = []
    for endpoint in protocol.endpoints:
        rows = [
            _judge_arm(arm, arms[arm], ensembles, endpoint, protocol)
            for arm in sorted(arms, key=lambda arm: (arm[1], order.index(arm[0])))
        ]
        corrected = holm([row.p_null for row in rows])
        judged += [
            row._replace(p_null=p, further=p < protocol.significance) for row, p in zip(rows, corrected, strict=True)
        ]
    return judged


def _ensembles(runs: Runs, control: str) -> dict[int, list[Trained]]:
    """Of each seed the control's run and its neighbours, on the processes that these ran on."""
    sizes = {run.world_size for run in runs.taken if run.is_null}
    ensembles: dict[int, list[Trained]] = {}
    for run in runs.taken:
        if run.strategy == control and not run.is_once and run.world_size in sizes:
            ensembles.setdefault(run.seed, []).append(run)
    whole = max((len(members) for members in ensembles.values()), default=0)
    if whole < 2:
        raise Refusal(f"no run of {control} from neighbouring weights is here, so nothing is known of rounding")
    return {seed: members for seed, members in sorted(ensembles.items()) if len(members) == whole}


def _flat(ensembles: dict[int, list[Trained]]) -> list[Trained]:
    return [run for members in ensembles.values() for run in members]


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
    values = np.array([[_value(run, endpoint) for run in (*ensembles[seed], by_seed[seed])] for seed in seeds])
    scaled = relative(values, endpoint)
    each = scaled[:, -1] - scaled[:, :-1].mean(axis=1)
    mean, low, high = differences.t_interval(each)
    assert low is not None  # of two seeds at least
    assert high is not None
    distance, p_null = exchange(scaled)
    return Judged(
        *arm,
        endpoint,
        seeds,
        each,
        mean,
        low,
        high,
        _equivalence(each, endpoint.margin, protocol.significance, low, high),
        distance,
        p_null,
        False,
        power(float(each.std(ddof=1)), endpoint.margin, len(each), protocol.significance),
    )


def _value(run: Trained, endpoint: Endpoint) -> float:
    return run.held_out[endpoint.step][endpoint.metric]


def relative(values: np.ndarray, endpoint: Endpoint) -> np.ndarray:
    """Values in the margin's unit: (seeds, ensemble and arm); loss as a share of the ensemble's mean."""
    return values if endpoint.metric == "accuracy" else values / values[:, :-1].mean(axis=1, keepdims=True)


def _equivalence(each: np.ndarray, margin: float, significance: float, low: float, high: float) -> Equivalence:
    if np.ptp(each) <= differences.CONSTANT:
        within = abs(each[0]) <= margin
    else:  # two one-sided tests are one interval (Schuirmann, 1987)
        narrow = stats.ttest_1samp(each, 0).confidence_interval(1 - 2 * significance)
        within = -margin < narrow.low and narrow.high < margin
    if within:
        return "same within the margin"
    return "higher" if low > 0 else "lower" if high < 0 else "undecided"


def exchange(scaled: np.ndarray) -> tuple[float, float]:
    """How far is the last column from the others' mean, against each other column; and how often by chance?

    Were the arm another member of the ensemble, any run of a seed could be in its place. `scaled`: (seeds, runs).
    """
    num_runs = scaled.shape[1]
    squares = _from_others(scaled) ** 2
    found = squares[:, -1].sum()
    # A run is further from the mean of few than from that of many; as if the ensemble's own had as many others.
    members = num_runs - 1
    as_many = (1 + 1 / members) / (1 + 1 / (members - 1))
    own = as_many * (_from_others(scaled[:, :-1]) ** 2).mean()
    distance = float(np.sqrt(found / len(scaled) / own)) if own > 0 else float(found > 0)
    drawn = np.random.default_rng(0).integers(num_runs, size=(EXCHANGES, len(scaled)))
    by_chance = squares[np.arange(len(scaled)), drawn].sum(axis=1)
    return distance, float((1 + (by_chance >= found).sum()) / (1 + EXCHANGES))


def _from_others(values: np.ndarray) -> np.ndarray:
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


def null_spread(runs: Runs, endpoint: Endpoint, control: str) -> tuple[float, float]:
    """Root mean square, and largest, distance of the control's runs from the others of their ensemble."""
    values = np.array([[_value(run, endpoint) for run in members] for members in _ensembles(runs, control).values()])
    scaled = values if endpoint.metric == "accuracy" else values / values.mean(axis=1, keepdims=True)
    distances = np.abs(_from_others(scaled))
    return float(np.sqrt((distances**2).mean())), float(distances.max())


def reached(run: Trained, protocol: Protocol) -> int | None:
    """The first step looked at on which the held-out loss is at the target; None: it was not reached."""
    steps = sorted(step for step in run.held_out if step % protocol.target.every == 0)
    return next((step for step in steps if run.held_out[step]["loss"] <= protocol.target.loss), None)


def same_weights(runs: Runs, protocol: Protocol, control: str) -> dict[str, dict[str, bool]]:
    """Of each arm: which strategies were to end with its weights to the bit, and whether they did; by one seed."""
    by_start = {
        (run.strategy, run.initial_sha256): run.final_sha256
        for run in runs.taken
        if not run.is_null and run.world_size == _main_size(runs, control)
    }
    found: dict[str, dict[str, bool]] = {}
    for arm, others in protocol.same_as.items():
        for other in others:
            ends = {
                by_start.get((arm, start)) == end for (strategy, start), end in by_start.items() if strategy == other
            }
            if ends:
                found.setdefault(arm, {})[other] = ends == {True}
    return found


def _main_size(runs: Runs, control: str) -> int:
    return next(iter(_ensembles(runs, control).values()))[0].world_size
