"""Compare published runs that differ in one option, with intervals and stated margins.

Each comparison of public_comparisons.yaml names a control, the groups of runs (arms) that are compared with it, and the
quantities. The margin of losses and accuracies is stated there, in their unit. Other differences between the groups are
derived from the settings of the runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from study.compare.differences import CEILING, CONSTANT, repeatability_limit, unpaired
from study.compare.public_pairs import PairedComparison
from study.public_runs import archive
from zero_study import files, terminal
from zero_study.errors import Refusal, refusing
from zero_study.public_runs.quantities import BYTES, QUANTITIES, TIMES, at
from zero_study.public_runs.schema import PublicRun

FILE = Path(__file__).with_name("public_comparisons.yaml")
NOT_COMPARED = {"entry", "system"}  # fields of a setting whose differences say nothing by themselves

FEWEST_REPEATS = 3  # that gave a margin until 30 November 2026
MANY_REPEATS, SPLITS, NATS = 10, 200, 0.005  # of the test of the rule in `of_repeats`
ONE_RUN = "undecided (one run)"
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
    label: str = ""  # the training, in tables that show several comparisons
    in_overview: bool = False  # shown on the first page
    source: str  # name of the file in the archive
    quantities: list[str] = Field(default_factory=list)  # of quantities.QUANTITIES
    evaluations: Evaluations | None = None
    margin: float | None = Field(default=None, gt=0)  # of learned quantities, in their unit: nats, or share of accuracy
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
    low: float | None  # 95 % interval; None if a side has one run, or equal repeats
    high: float | None
    margin: float | None  # relative to the control's mean; None if the comparison states none for the quantity
    verdict: str

    @property
    def is_detected(self) -> bool:
        """Whether the interval excludes 0."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)

    @property
    def is_equivalent(self) -> bool:
        """Whether the whole interval is within the margin. A detected difference can be equivalent."""
        if self.low is None or self.high is None or self.margin is None:
            return False
        return -self.margin < self.low and self.high < self.margin


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
                margin = comparison.margin if is_learned(quantity) else None
                differences.append(difference(quantity, control_values, values, arm.name, margin))
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
    functions = dict(sorted(functions.items(), key=lambda item: item[0].startswith("last")))  # in order of the training
    return [(name, _known(function, control), _known(function, arm)) for name, function in functions.items()]


def _known(function: Callable[[PublicRun], float | None], runs: Sequence[PublicRun]) -> list[float]:
    return [value for run in runs if (value := function(run)) is not None]


def is_learned(quantity: str) -> bool:
    """Return whether a quantity is a loss or an accuracy."""
    return "loss" in quantity or quantity.startswith("accuracy")


def difference(
    quantity: str, control: Sequence[float], arm: Sequence[float], arm_name: str, margin: float | None = None
) -> Difference:
    """Compare two groups of independent runs by Welch's interval. `margin` has the unit of the quantity.

    Times are compared by their logarithms. Bytes are counted: they are equal, or the verdict names the larger side if
    all its runs are larger.
    """
    margin = None if margin is None else margin / abs(float(np.mean(control)))
    ours, theirs, is_time = _scaled(quantity, control, arm)
    bounds = unpaired(theirs, ours, None).bounds
    relative, *interval = (
        float(np.expm1(each)) if is_time else float(each) for each in (theirs.mean() - ours.mean(), *(bounds or ()))
    )
    relative = 0.0 if abs(relative) < CONSTANT else relative
    low, high = interval or (None, None)
    found = Difference(quantity, control, arm, arm_name, relative, low, high, margin, "")
    if quantity in BYTES or bounds is None:
        is_equal = quantity not in BYTES and not np.ptp([*ours, *theirs])
        return found._replace(verdict="equal in all logged digits" if is_equal else _counted(control, arm))
    return found._replace(verdict=_verdict(found))


def _scaled(quantity: str, control: Sequence[float], arm: Sequence[float]) -> tuple[np.ndarray, np.ndarray, bool]:
    """Return both groups' values, relative to the control or as logarithms of times, and whether they are times."""
    ours, theirs = np.array(control, float), np.array(arm, float)
    if quantity in TIMES or quantity == "samples to the target":
        return np.log(ours), np.log(theirs), True
    return ours / ours.mean(), theirs / ours.mean(), False


def _verdict(found: Difference) -> str:
    """Return whether a difference is detected, and whether it is smaller than the margin."""
    if not found.is_detected:
        return "equivalent" if found.is_equivalent else "undecided"
    direction = "higher" if found.relative > 0 else "lower"
    if found.is_equivalent:
        return f"{direction}, by less than the margin"
    nearest = min(abs(bound) for bound in (found.low, found.high) if bound is not None)
    return f"{direction}, by more than the margin" if found.margin is not None and nearest > found.margin else direction


def earlier_verdict(found: Difference) -> str:
    """Return the verdict by the margin that was used until 30 November 2026. Empty if no margin was used.

    It was the repeatability limit of the control's own repeats, and decided nothing above `differences.CEILING`. The
    verdict stays reported because the definition was changed after values were known.
    """
    if found.quantity in BYTES or found.low is None:
        return ""
    if len(found.control) < FEWEST_REPEATS:
        return "not decided (too few repeats for a margin)"
    ours, theirs, is_time = _scaled(found.quantity, found.control, found.arm)
    margin, ceiling = repeatability_limit(ours.var(ddof=1), len(ours) - 1), CEILING["times" if is_time else "learned"]
    estimate = unpaired(theirs, ours, margin)
    if estimate.equivalent and (margin <= ceiling or max(map(abs, estimate.bounds or ())) <= ceiling):
        return "within the margin, but the interval excludes 0" if found.is_detected else "within the margin"
    if found.is_detected:
        return "higher" if found.relative > 0 else "lower"
    return "not decided (wide margin)" if estimate.equivalent else "not decided"


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


class OfRepeats(NamedTuple):
    """How often the rule finds a difference where there is none, and how often between programs."""

    num_programs: int
    num_runs: int
    halves: Counter[str]  # verdicts on random halves of the repeats of one program
    programs: Counter[str]  # verdicts on pairs of programs


def share_detected(verdicts: Counter[str]) -> float:
    """Return the share of verdicts that state a difference."""
    return sum(number for verdict, number in verdicts.items() if verdict.startswith(("higher", "lower"))) / sum(
        verdicts.values()
    )


def of_repeats(quantity: str, value: Callable[[PublicRun], float | None], splits: int = SPLITS) -> OfRepeats:
    """Apply the rule of `difference` to the programs of modded-nanogpt that were trained ten times or more."""
    runs: dict[str, list[PublicRun]] = {}
    for run in (*archive.source("modded-nanogpt"), *archive.source("modded-nanogpt-repeats")):
        if run.counts:
            runs.setdefault(f"{run.setting.entry}", []).append(run)
    values = [known for members in runs.values() if len(known := _known(value, members)) >= MANY_REPEATS]
    draw = np.random.default_rng(0)
    halves = (np.array_split(draw.permutation(each), 2) for each in values for _ in range(splits))
    compared = [
        Counter(difference(quantity, control.tolist(), arm.tolist(), "", NATS).verdict for control, arm in pairs)
        for pairs in (halves, ((np.array(a), np.array(b)) for a, b in combinations(values, 2)))
    ]
    return OfRepeats(len(values), sum(map(len, values)), *compared)
