"""Cross-validation of predicted step times with published ones, compared with two rules of thumb.

Every published time is predicted by constants that were fitted without some of the times: without its whole source (all
that the same people measured, called "family" in the results), its model size, its number of GPUs, its GPU, or its
generation of GPUs. The planner's model and two rules of thumb are fitted to the same rows. The error is the predicted
time divided by the published time, less one. An error above 0 means that the prediction is too slow.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Any, get_args

import numpy as np

from study.accuracy.public_errors import LATER, PREDICTIONS, measured_cases
from study.accuracy.published_rows import NINE_OF_TEN, summarize
from zero_study.theory import computation, hardware, measured_by_others, shapes, step_time
from zero_study.theory.intervals import TimingClass, name_of
from zero_study.theory.measured_by_others import MeasuredCase
from zero_study.theory.step_time import Constants

# Beyond this relative error a row pulls on the fit no more than in proportion: a few published rows are odd.
ROBUST_SCALE = 0.03
# Where rows say nothing of a constant, as those of one node say nothing of hops, it stays near what one would guess. A
# factor of e away from the guess counts as much as one row that is 3 % off.
GUESS = Constants(0.8, 0.35, 0.6, 50e-6, step_time.UNHIDDEN)
# Generations whose rows determine only the constants of several nodes. The others are those of the nearest generation.
OF_NETWORK_ONLY = {"Volta"}
NETWORK_CONSTANTS = ("hop_seconds", "unhidden")
# A source with more rows than this weighs no more than this many, because its rows share a program and machines.
MOST_OF_SOURCE = 10
# The fewest degrees of freedom of Student's t. Assumed: two sources say more than one degree does, because the errors
# of all classes are similar.
FEWEST_FREEDOMS = 3
NAMES = ("125m", "350m", "760m", "1b", "3b", "7b", "13b", "30b", "70b")  # the published tables' models
SIZES = {name: shapes.find(f"mpt-{name}").num_params for name in NAMES}

Errors = Mapping[str, float | None]  # by predictor; None: it cannot predict


@dataclass(frozen=True)
class Timed(MeasuredCase):
    """A published step time, with what the fit and the tables need."""

    @property
    def fitted(self) -> bool:
        """Whether constants are fitted to this time.

        They are not if much is assumed, if the host determines the time, if the model does not cover the case, or if
        the generation has too few times for constants of its own.
        """
        has_constants = self.generation in step_time.FITTED
        return has_constants and self.grade != "C" and self.kind != "offload" and not self.outside

    @property
    def generation(self) -> str:
        return self.box.gpu.generation

    @property
    def kind(self) -> str:
        """The engine's name in tables."""
        return name_of(self.shape, self.engine)

    @property
    def strategy(self) -> str:
        """The engine's name, and for engines that gather parameters whether there are several nodes."""
        if self.kind not in ("FSDP", "ZeRO-3"):
            return self.kind
        return f"{self.kind}, {'one node' if self.box.num_nodes == 1 else 'several nodes'}"

    @property
    def size(self) -> str:
        """The model of the published tables with the nearest number of parameters."""
        return min(SIZES, key=lambda size: abs(math.log(self.shape.num_params / SIZES[size])))

    @property
    def flops_per_token(self) -> float:
        """The model's FLOPs per token, without recomputation."""
        return float(
            computation.model_flops_per_sequence(self.shape, self.job.sequence_length) / self.job.sequence_length
        )

    @property
    def tokens(self) -> float:
        """Tokens per GPU and step."""
        return float(self.job.tokens * self.job.gradient_accumulation_steps)

    @property
    def peak(self) -> float:
        return hardware.product_flops_per_second(self.box.gpu, self.engine.precision)


def published() -> list[Timed]:
    """List every published time, except rows of LLM Foundry that the model does not cover."""
    rows = [case for case in measured_by_others.cases_of("mpt_throughput") if not case.outside]
    return [of_case(case) for case in (*rows, *measured_by_others.cases())]


def of_case(case: MeasuredCase) -> Timed:
    return Timed(**vars(case))


# ---------------------------------------------------------------- what is fitted


@dataclass(frozen=True)
class Fitted:
    """All constants that a set of published times determines."""

    constants: dict[str, Constants]  # by generation
    host_thread_bandwidth: float  # bytes/s
    share: float  # of the peak: what the median row reaches
    lines: dict[str, np.ndarray]  # by GPU, of `regressors`


def fit(times: list[Timed]) -> Fitted:
    """Fit the planner's constants and both rules of thumb."""
    rows = [timed for timed in times if timed.fitted]
    rows_of: dict[str, tuple[Timed, ...]] = {}
    for row in rows:
        rows_of[row.generation] = (*rows_of.get(row.generation, ()), row)
    constants = {name: fit_constants(own) for name, own in rows_of.items() if name not in OF_NETWORK_ONLY}
    for name in OF_NETWORK_ONLY & rows_of.keys():
        base = next(each for each in step_time.nearest_generations(name) if each in constants)
        constants[name] = fit_constants(rows_of[name], constants[base])
    lines = {}
    for gpu in {row.box.gpu.name for row in rows}:
        own = [row for row in rows if row.box.gpu.name == gpu]
        matrix = np.array([regressors(row) for row in own])
        if len(own) > matrix.shape[1] == np.linalg.matrix_rank(matrix):
            lines[gpu] = np.linalg.lstsq(matrix, np.log([row.seconds / row.tokens for row in own]))[0]
    share = float(np.median([row.flops_per_token * row.tokens / row.seconds / row.peak for row in rows]))
    offloaded = [timed for timed in times if timed.engine.offload_optimizer != "none"]
    return Fitted(constants, _fit_host(offloaded, constants), share, lines)


@cache  # what is left out is mostly of one generation, and leaves the others' rows as they are
def fit_constants(rows: tuple[Timed, ...], base: Constants | None = None) -> Constants:
    """Fit the constants of one generation by robust least squares of the relative errors.

    With `base`, only the constants of several nodes are fitted, and the others are those of `base`.
    """
    from scipy.optimize import least_squares

    names = NETWORK_CONSTANTS if base else tuple(field.name for field in dataclasses.fields(Constants))
    start = np.log([getattr(GUESS, name) for name in names])
    of_source = Counter(row.measured_by for row in rows)
    weights = [min(1.0, MOST_OF_SOURCE / of_source[row.measured_by]) ** 0.5 for row in rows]

    def constants_of(logarithms: np.ndarray) -> Constants:
        return dataclasses.replace(base or GUESS, **dict(zip(names, map(float, np.exp(logarithms)), strict=True)))

    def errors(logarithms: np.ndarray) -> np.ndarray:
        constants = constants_of(logarithms)
        of_rows = np.log([_seconds(row, constants) / row.seconds for row in rows])
        return np.concatenate([weights * of_rows, ROBUST_SCALE * (logarithms - start)])

    best = least_squares(errors, start, loss="soft_l1", f_scale=ROBUST_SCALE, bounds=(-np.inf, np.log(1.0)))
    return constants_of(best.x)


def _fit_host(offloaded: list[Timed], constants: dict[str, Constants]) -> float:
    """Fit the speed of a host thread by the least sum of relative errors, because the few times have outliers."""
    from scipy.optimize import minimize_scalar

    def badness(logarithm: float) -> float:
        bandwidth = float(np.exp(logarithm))
        times = [_seconds(timed, _nearest(timed, constants), bandwidth) / timed.seconds for timed in offloaded]
        return float(np.abs(np.log(times)).sum())

    return float(np.exp(minimize_scalar(badness, bounds=np.log([5e8, 5e10]), method="bounded").x))


def _seconds(timed: Timed, constants: Constants, host: float | None = None) -> float:
    return float(step_time.seconds(timed.shape, timed.engine, timed.job, timed.box, constants, host).total)


def _nearest(timed: Timed, constants: Mapping[str, Constants]) -> Constants:
    """Return the constants of the GPU's generation, or of the nearest generation that was fitted."""
    return constants[next(name for name in step_time.nearest_generations(timed.generation) if name in constants)]


def regressors(timed: Timed) -> list[float]:
    """Return the inputs of the linear model of one GPU, which predicts the logarithm of the seconds per token."""
    job = timed.job
    flops_per_sequence = computation.hardware_flops_per_sequence(timed.shape, job.sequence_length, job.recomputed)
    values = (flops_per_sequence / job.sequence_length, job.sequence_length, timed.box.num_gpus, job.tokens)
    return [1.0, *map(math.log, values)]


def by_planner(fitted: Fitted, timed: Timed) -> float:
    """Predict the seconds of a step by the models of theory."""
    return _seconds(timed, _nearest(timed, fitted.constants), fitted.host_thread_bandwidth)


def by_share(fitted: Fitted, timed: Timed) -> float:
    """Predict the seconds of a step as if every GPU always reached the same share of its peak FLOPS."""
    return timed.flops_per_token * timed.tokens / (fitted.share * timed.peak)


def by_line(fitted: Fitted, timed: Timed) -> float | None:
    """Predict by the linear model of that GPU, which ignores the engine. None if too few rows of the GPU remain."""
    line = fitted.lines.get(timed.box.gpu.name)
    return None if line is None else timed.tokens * float(np.exp(np.array(regressors(timed)) @ line))


PREDICT: dict[str, Callable[[Fitted, Timed], float | None]] = {
    "planner": by_planner, "constant share of peak": by_share, "line per GPU": by_line,
}  # fmt: skip


# ---------------------------------------------------------------- what is left out

# The properties by which times are left out of a fit.
GROUP_OF: dict[str, Callable[[Timed], Any]] = {
    "family": attrgetter("measured_by"), "model size": attrgetter("size"), "GPU count": attrgetter("box.num_gpus"),
    "card": attrgetter("box.gpu.name"), "generation": attrgetter("generation"),
}  # fmt: skip


@dataclass(frozen=True)
class Judged:
    """One published time, and the errors of its predictions."""

    timed: Timed
    in_sample: Errors
    left_out: dict[str, Errors]  # by what was left out of the fit with it


def judge(times: list[Timed]) -> list[Judged]:
    """Predict every time by a fit to all times, and by fits without its group, for each way to group them.

    A GPU is left out only if its generation has another one, because otherwise the whole generation is left out.
    """
    everything = fit(times)
    left_out: list[dict[str, Errors]] = [{} for _ in times]
    for split, group in GROUP_OF.items():
        groups = [group(timed) for timed in times]
        for name in dict.fromkeys(groups):
            training = [timed for timed, own in zip(times, groups, strict=True) if own != name]
            members = [index for index, own in enumerate(groups) if own == name]
            generation = times[members[0]].generation
            if split == "card" and not any(row.fitted and row.generation == generation for row in training):
                continue
            fitted = fit(training)
            for index in members:
                left_out[index][split] = _errors(fitted, times[index])
    return [Judged(timed, _errors(everything, timed), errors) for timed, errors in zip(times, left_out, strict=True)]


def _errors(fitted: Fitted, timed: Timed) -> Errors:
    predicted = {name: predict(fitted, timed) for name, predict in PREDICT.items()}
    return {name: None if value is None else value / timed.seconds - 1 for name, value in predicted.items()}


# ---------------------------------------------------------------- tables

# Its rows vary sizes, lengths and counts on purpose, so that little is left for a fit without them.
FOUNDRY = "LLM Foundry"
# The planner's errors for the times that the linear model predicts, to be compared with it.
COMPARED = "planner, where the line predicts"
OUTSIDE = "outside what the model describes"


def _grades(timed: Timed) -> list[str]:
    """Return the groups of a time: its grade if the model covers it, its whole grade, and the grade as collected."""
    if timed.family == FOUNDRY:
        return [FOUNDRY]
    described = [f"{timed.grade}, {OUTSIDE}" if timed.outside else timed.grade]
    return [*described, f"{timed.grade}, all", f"{timed.collected_as}, all, as collected"]


def _family(timed: Timed) -> str:
    return f"{timed.family}, {timed.grade}{', outside' if timed.outside else ''}"


# Each time is in one or more groups.
GROUPINGS: dict[str, Callable[[Timed], list[Any]]] = {
    "grade": _grades, "family": lambda timed: [_family(timed)], "generation": lambda timed: [timed.generation],
    "engine": lambda timed: [timed.kind], "model size": lambda timed: [timed.size],
    "strategy": lambda timed: [] if timed.grade == "C" else [timed.strategy],
    "source": lambda timed: [] if timed.grade == "C" else [timed.measured_by],
    "GPU count": lambda timed: [timed.box.num_gpus],
}  # fmt: skip


def tables(judged: list[Judged]) -> list[dict[str, Any]]:
    """Summarize the errors of every predictor, in sample and by the group left out, over all times and over groups."""
    rows = []
    for split in ("nothing", *GROUP_OF):
        for predictor in (*PREDICT, COMPARED):
            for grouping, group in GROUPINGS.items():
                if predictor != "planner" and grouping not in ("grade", "engine"):  # what pages compare
                    continue
                groups: dict[Any, list[tuple[str, float]]] = {}
                for judgment in judged:
                    errors = judgment.in_sample if split == "nothing" else judgment.left_out.get(split, {})
                    if predictor == COMPARED:
                        errors = {COMPARED: errors["planner"]} if errors.get("line per GPU") is not None else {}
                    if (error := errors.get(predictor)) is not None:
                        for name in group(judgment.timed):
                            groups.setdefault(name, []).append((judgment.timed.name, error))
                for name, of_group in sorted(groups.items()):
                    head = {"left_out": split, "predictor": predictor, "by": grouping, "group": str(name)}
                    rows.append(head | summarize(of_group))
    return rows


# ---------------------------------------------------------------- intervals


Missed = tuple[Timed, float]  # a time, and the error of its prediction by a fit without its source


def predicted_apart(judged: list[Judged], others: list[Timed]) -> list[Missed]:
    """Predict times by fits without their source. `others` are times to which nothing is fitted."""
    times = [judgment.timed for judgment in judged]
    found = [(each.timed, each.left_out["family"]["planner"]) for each in judged if not _is_sole(each.timed, times)]
    fits = {}
    for timed in others:
        source = timed.measured_by
        if source not in fits:
            fits[source] = fit([each for each in times if each.measured_by != source])
        found.append((timed, by_planner(fits[source], timed) / timed.seconds - 1))
    return [(timed, float(error)) for timed, error in found if error is not None]


def _is_sole(timed: Timed, times: list[Timed]) -> bool:
    """Return whether only the source of a time determines a constant that the time needs: that of FlashAttention 1."""
    if timed.job.attention != "flash-1":
        return False
    of_others = (each for each in times if each.fitted and each.measured_by != timed.measured_by)
    return not any(each.job.attention == "flash-1" and each.generation == timed.generation for each in of_others)


def further() -> list[Timed]:
    """List published times to which nothing is fitted: those of trainings with adapters, and those in public logs."""
    logs = [case for path in (PREDICTIONS, LATER) for case in measured_cases(path)]
    cases = (*measured_by_others.cases_of("adapters"), *logs)
    return [of_case(case) for case in cases if case.quantity in measured_by_others.TIMES]


# Classes that are never narrower than another one, because less is known of them.
NOT_NARROWER: dict[TimingClass, TimingClass] = {
    "several nodes": "one node", "other arithmetic": "one node", "compiled": "one node",
    "several workstation cards": "one workstation card",
}  # fmt: skip


def intervals(missed: list[Missed]) -> list[dict[str, Any]]:
    """Find, for each class of trainings, the factor within which nine of ten predictions lie, in both directions.

    "held" counts the times within the factor that the times of other sources give.
    """
    of_kind: dict[TimingClass, list[Missed]] = {kind: [] for kind in get_args(TimingClass)}
    for timed, error in missed:
        evidence = step_time.seconds(timed.shape, timed.engine, timed.job, timed.box).evidence
        if timed.grade != "C" and not timed.outside and not evidence.is_rough:
            of_kind[evidence.kind].append((timed, error))
    results: dict[str, dict[str, Any]] = {}
    for kind, own in of_kind.items():
        least = results[NOT_NARROWER[kind]]["spread"] if kind in NOT_NARROWER else 1.0
        spread = max(least, _bound(own))
        held = 0
        for source in {timed.measured_by for timed, _ in own}:
            others = [each for each in own if each[0].measured_by != source]
            bound = max(least, _bound(others)) if others else least
            held += sum(_factor(error) <= bound for timed, error in own if timed.measured_by == source)
        results[kind] = {
            "kind": kind, "spread": spread, "cases": len(own), "sources": len({timed.measured_by for timed, _ in own}),
            "inside": sum(_factor(error) <= spread for _, error in own), "held": held,
            **summarize((timed.name, error) for timed, error in own),
        }  # fmt: skip
    return list(results.values())


def _factor(error: float) -> float:
    """Return the factor between predicted and published, which is at least 1."""
    return max(1 + error, 1 / (1 + error))


def _bound(missed: list[Missed]) -> float:
    """Bound nine of ten errors of a source that is not among the predictions, rounded up to 0.05.

    A source weighs no more than MOST_OF_SOURCE times. The factor within which nine tenths of this weight lie is made
    wider for few sources, as the interval of Student's t for the next of `num_sources` normal values is wider than that
    of a known distribution.
    """
    from scipy.stats import norm, t

    of_source = Counter(timed.measured_by for timed, _ in missed)
    num_sources = len(of_source)
    weight_of = {name: min(1.0, MOST_OF_SOURCE / count) for name, count in of_source.items()}
    by_size = sorted((_factor(error), weight_of[timed.measured_by]) for timed, error in missed)
    weights = np.cumsum([weight for _, weight in by_size])
    factor = by_size[int(np.searchsorted(weights, NINE_OF_TEN * weights[-1] - 1e-9))][0]
    both_sides = (1 + NINE_OF_TEN) / 2
    quantile = t.ppf(both_sides, max(FEWEST_FREEDOMS, num_sources - 1)) * math.sqrt(1 + 1 / num_sources)
    return _round_up(factor ** float(quantile / norm.ppf(both_sides)))


def _round_up(factor: float) -> float:
    return math.ceil(round(20 * factor, 9)) / 20
