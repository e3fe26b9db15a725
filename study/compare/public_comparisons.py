"""Compare published runs that differ in one option, with intervals and equivalence tests.

Each comparison of public_comparisons.yaml names a control, the groups of runs (arms) that are compared with it, and a
quantity. The margin of equivalence is the repeatability limit of the control's own repeats (ISO 5725-6, as in
`differences`), so it is known before an arm is read. Other differences between the groups are derived from the settings
of the runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from study import files, terminal
from study.compare.differences import CEILING, CONSTANT, Estimate, repeatability_limit, unpaired
from study.compare.public_pairs import PairedComparison
from study.errors import Refusal, refusing
from study.public_runs import archive
from study.public_runs.quantities import BYTES, QUANTITIES, TIMES, at
from study.public_runs.schema import PublicRun

FILE = Path(__file__).with_name("public_comparisons.yaml")
NOT_COMPARED = {"entry", "system"}  # fields of a setting whose differences say nothing by themselves

FEWEST_REPEATS = 3  # that give a margin
ONE_RUN = "not decided (one run)"
FIELD_NAMES = {
    "cuda": "CUDA",
    "python": "Python",
    "torch": "PyTorch",
    "gpu": "GPU",
    "num_gpus": "number of GPUs",
    "num_nodes": "number of nodes",
    "accumulation_steps": "number of accumulation steps",
    "warmup_steps": "number of warm-up steps",
    "planned_steps": "number of planned steps",
    "parameters": "number of parameters",
    "seed": "information about the seed",
}

Selection = dict[str, str | int | float | bool | list[str | int | float | bool]]


class Group(BaseModel):
    """Runs that repeat the same training."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str  # such as "8 H100"
    where: Selection  # field of the setting -> the value that all runs of the group have


class Evaluations(BaseModel):
    """The points of a training at which a held-out metric, or the training loss, is compared."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    column: str  # of the runs' evaluations; "loss" is the training loss
    by: str  # the column in which positions are given
    positions: list[int]
    tolerance: float = 0.0  # relative; the evaluation next to a position counts if it is this close

    def quantities(self) -> dict[str, Callable[[PublicRun], float | None]]:
        """For each step or number of samples to compare at, a function that returns a run's value there."""
        noun = self.column.replace("_", " ")
        return {
            f"{noun} at step {place:,}" if self.by == "step" else f"{noun} after {place:,} {self.by}": partial(
                self._value, place
            )
            for place in self.positions
        }

    def _value(self, place: int, run: PublicRun) -> float | None:
        series = run.training if self.column == "loss" else run.evaluation
        return at(series, self.by, place, self.column, self.tolerance)


class Comparison(BaseModel):
    """A question that published runs of one publisher can answer, and the groups of runs that are compared for it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    question: str
    source: str  # name of the file in the archive
    quantities: list[str] = Field(default_factory=list)  # of quantities.QUANTITIES
    evaluations: Evaluations | None = None
    control: Group
    arms: list[Group]
    varied: list[str]  # the fields of the setting that the comparison is about
    caveats: list[str] = Field(default_factory=list)  # what else may differ and is not a field of the setting
    is_late: bool = False  # written when values of its source were known


class Difference(NamedTuple):
    """The difference between a group of runs and the baseline in one quantity, with its interval and its verdict."""

    quantity: str
    control: Sequence[float]
    arm: Sequence[float]
    arm_name: str
    relative: float  # of the means, or of the geometric means of times
    low: float | None  # 95 % interval; None if a side has one run
    high: float | None
    margin: float | None  # relative; None if the control has one run
    verdict: str  # equal, equivalent, higher, lower, not decided


class Result(NamedTuple):
    """The result of a comparison: its differences, the excluded runs, and what else differs between the groups."""

    comparison: Comparison
    num_runs: dict[str, int]  # by group
    left_out: list[str]  # runs that are not averaged, with the reason
    also_differs: list[str]  # fields of the setting that differ beside the compared ones
    benchmark: str | None  # if all runs are of one benchmark
    differences: list[Difference]
    not_compared: list[str]  # what was asked for, but is not in the logs of both sides


@cache
def comparisons() -> tuple[Comparison, ...]:
    """Return all comparisons between groups of repeated runs. Raises Refusal if their file is not valid."""
    with refusing(FILE.name):
        return tuple(Comparison.model_validate(entry) for entry in _content()["comparisons"])


@cache
def paired() -> tuple[PairedComparison, ...]:
    """Return all comparisons between pairs of single runs. Raises Refusal if their file is not valid."""
    with refusing(FILE.name):
        return tuple(PairedComparison.model_validate(entry) for entry in _content()["paired"])


def _content() -> dict[str, Any]:
    return files.read_yaml(FILE, FILE)


def answer(comparison: Comparison, runs: Sequence[PublicRun] | None = None) -> Result:
    """Carry out a comparison, by default with the published runs in reports/public, and return the result."""
    members_of = groups(comparison, runs)
    left_out = [
        f"{run.name}: {run.why_not_counted}" for members in members_of.values() for run in members if not run.counts
    ]
    counted = {name: [run for run in members if run.counts] for name, members in members_of.items()}
    differences, not_compared = [], []
    for arm in comparison.arms:
        for quantity, control_values, values in _values(
            comparison, counted[comparison.control.name], counted[arm.name]
        ):
            if control_values and values:
                differences.append(difference(quantity, control_values, values, arm.name))
            else:
                not_compared.append(f"{quantity} of {arm.name}")
    num_runs = {name: len(members) for name, members in counted.items()}
    benchmarks = {run.setting.benchmark for members in counted.values() for run in members}
    benchmark = benchmarks.pop() if len(benchmarks) == 1 else None
    also_differs = _also_differs(comparison, counted)
    return Result(comparison, num_runs, left_out, also_differs, benchmark, differences, not_compared)


def groups(comparison: Comparison, runs: Sequence[PublicRun] | None = None) -> dict[str, list[PublicRun]]:
    """Return the runs of a comparison by the name of their group: the baseline, and each group compared with it."""
    runs = archive.source(comparison.source) if runs is None else runs
    return {group.name: _select(runs, group) for group in (comparison.control, *comparison.arms)}


def _select(runs: Sequence[PublicRun], group: Group) -> list[PublicRun]:
    unknown = set(group.where) - set(PublicRun.model_fields["setting"].annotation.model_fields)  # type: ignore[union-attr]
    if unknown:
        raise Refusal(f"{FILE.name}: {group.name}: the field {min(unknown)!r} of a setting is unknown")
    selected = [run for run in runs if all(_is(run, name, value) for name, value in group.where.items())]
    if not selected:
        raise Refusal(f"{FILE.name}: no run has the values that {group.name!r} requires")
    return selected


def _is(run: PublicRun, name: str, value: Any) -> bool:
    own = getattr(run.setting, name)
    return own in value if isinstance(value, list) else own == value


def _values(
    comparison: Comparison, control: Sequence[PublicRun], arm: Sequence[PublicRun]
) -> list[tuple[str, list[float], list[float]]]:
    """Return the values of the control and of a group, for each requested quantity.

    Runs whose logs lack it have no value.
    """
    functions = {name: QUANTITIES[name] for name in comparison.quantities}
    if comparison.evaluations is not None:
        functions |= comparison.evaluations.quantities()
    return [(name, _known(function, control), _known(function, arm)) for name, function in functions.items()]


def _known(function: Callable[[PublicRun], float | None], runs: Sequence[PublicRun]) -> list[float]:
    return [value for run in runs if (value := function(run)) is not None]


def difference(quantity: str, control: Sequence[float], arm: Sequence[float], arm_name: str) -> Difference:
    """Compare two groups of independent runs: Welch's interval, and an equivalence test against the margin (TOST).

    Times are compared by their logarithms. Bytes are counted: they are equal, or the verdict names the larger side if
    all its runs are larger.
    """
    ours, theirs = np.array(control, float), np.array(arm, float)
    is_time = quantity in TIMES or quantity == "samples to the target"
    if is_time:
        ours, theirs = np.log(ours), np.log(theirs)
        relative = float(np.expm1(theirs.mean() - ours.mean()))
    else:
        relative = float(theirs.mean() / ours.mean() - 1)
        ours, theirs = ours / ours.mean(), theirs / ours.mean()
    # The repeatability limit: 95 of 100 pairs of repeats differ by less.
    margin = None
    if len(ours) >= FEWEST_REPEATS and np.ptp(ours):
        margin = repeatability_limit(ours.var(ddof=1), len(ours) - 1)
    estimate = unpaired(theirs, ours, margin)
    bounds, ceiling = estimate.bounds, CEILING["times" if is_time else "learned"]
    verdict = _counted(control, arm) if quantity in BYTES else _verdict(ours, theirs, margin, estimate, ceiling)
    relative = 0.0 if abs(relative) < CONSTANT else relative
    low, high = (None, None) if bounds is None else (float(np.expm1(bound) if is_time else bound) for bound in bounds)
    shown_margin = None if margin is None else float(np.expm1(margin)) if is_time else margin
    return Difference(quantity, control, arm, arm_name, relative, low, high, shown_margin, verdict)


def _verdict(ours: np.ndarray, theirs: np.ndarray, margin: float | None, estimate: Estimate, ceiling: float) -> str:
    """Return the verdict on two groups. A margin above the ceiling decides nothing (see `differences.CEILING`)."""
    if not np.ptp([*ours, *theirs]):
        return "equal in all logged digits"
    if min(len(ours), len(theirs)) < 2:
        return ONE_RUN
    bounds = estimate.bounds
    if bounds is None:  # all repeats of a side are equal in their logged digits
        return _counted(ours.tolist(), theirs.tolist())
    if margin is None:
        return "not decided (too few repeats for a margin)"
    excludes_0 = bounds[0] > 0 or bounds[1] < 0
    if estimate.equivalent:
        if margin <= ceiling or max(-bounds[0], bounds[1]) <= ceiling:
            return "within the margin, but the interval excludes 0" if excludes_0 else "within the margin"
        if not excludes_0:
            return "not decided (wide margin)"
    if excludes_0:
        return "higher" if bounds[0] > 0 else "lower"
    return "not decided"


def _counted(control: Sequence[float], arm: Sequence[float]) -> str:
    if min(len(control), len(arm)) < 2:
        return ONE_RUN
    if min(arm) > max(control):
        return "higher in every run"
    if max(arm) < min(control):
        return "lower in every run"
    return "equal" if min(arm) == max(arm) == min(control) == max(control) else "overlapping"


def _value_text(value: Any) -> str:
    is_count = isinstance(value, int) and not isinstance(value, bool)
    return "unknown" if value is None else f"{value:,}" if is_count else f"{value}"


def _also_differs(comparison: Comparison, counted: Mapping[str, Sequence[PublicRun]]) -> list[str]:
    """Return the fields of the setting that differ between the groups, other than the compared fields."""
    facts: dict[str, dict[str, set[str]]] = {}
    packages: set[str] = set()
    for name, members in counted.items():
        for run in members:
            setting = run.setting.model_dump(exclude={"other", "versions"}) | run.setting.versions
            setting["seed"] = None if setting["seed"] is None else "stated"
            packages |= run.setting.versions.keys()
            for field, value in setting.items():
                facts.setdefault(field, {}).setdefault(name, set()).add(_value_text(value))
    differing = []
    for field, by_group in sorted(facts.items()):
        values = {name: " or ".join(sorted(by_group.get(name, {"unknown"}))) for name in counted}
        is_in_names = field == "submitter" and all(name.startswith(value) for name, value in values.items())
        if field in (*comparison.varied, *NOT_COMPARED) or is_in_names:
            continue
        names_of: dict[str, list[str]] = {}
        for name, value in values.items():
            names_of.setdefault(value, []).append(name)
        if len(names_of) > 1:
            title = FIELD_NAMES.get(field, field.replace("_", " "))
            shown = terminal.listed([f"{value} ({'; '.join(names)})" for value, names in names_of.items()])
            differing.append(f"{f'version of {title}' if field in packages else title}: {shown}")
    return differing
