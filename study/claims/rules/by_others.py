"""Decide claims by published measurements. Compare pairs that differ only in what the claim is about.

Each published measurement is a row of a table. No row is picked by hand: all pairs of rows of one source are used that
differ only in the conditions that the rule names. Rows of grade C, which need too many assumptions, are not used. A row
is a single run, so every rate has the uncertainty REPEAT. Rows show what happened in these runs, not what happens
elsewhere. One pair can contradict a claim about all cases. If no pair contradicts it, the claim holds for these rows
only.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import model_validator

from study.claims.rules import Observed, Text, around, log_distance_outside, selected
from zero_study.files import FROM_LIST, StrictModel
from zero_study.theory import measured_by_others
from zero_study.theory.measured_by_others import TIMES, MeasuredCase
from zero_study.theory.step_time import tokens_per_second_per_gpu

REPEAT = 0.02  # relative; repeated measurements of one source differ by up to 1.7 %

Condition = Literal[  # conditions in which two rows may differ
    "model", "engine", "precision", "gpus", "micro_batch", "accumulation", "batch", "sequence_length", "checkpointing"
]
Several = Annotated[tuple[Text, ...], FROM_LIST]


class Rows(StrictModel):
    """A selection of published measurements by their properties. A property that is None selects any value."""

    model: Text | None = None
    engine: Text | Several | None = None  # as named on the page of measurements by others
    precision: Text | Several | None = None
    gpu: Text | None = None
    micro_batch: int | None = None
    sequence_length: int | None = None

    def has(self, case: MeasuredCase) -> bool:
        """Return whether a published measurement belongs to the selection."""
        facts = _facts(case)
        conditions = self.model_dump(exclude_none=True)
        return all(
            facts[name] in (accepted if isinstance(accepted, tuple) else (accepted,))
            for name, accepted in conditions.items()
        )


class ByOthers(StrictModel):
    """A rule that compares the claim with measurements that others published."""

    type: Literal["others"]
    quantity: Literal["speed", "fits"]  # speed: tokens/s per GPU of `of` over `to`; fits: whether `of` trained
    asks: Literal["every", "one"]  # every: the worst pair decides; one: the best pair decides
    grade: Literal["A", "B"]  # the lowest grade that is used
    of: Rows
    to: Rows | None = None
    differs: Annotated[tuple[Condition, ...], FROM_LIST] = ()  # batch: sequences per GPU and step; equal unless listed

    @model_validator(mode="after")
    def _whole(self) -> ByOthers:
        if (self.quantity == "speed") != (self.to is not None and bool(self.differs)):
            raise ValueError("to, differs: write both if the quantity is speed, and neither if it is fits")
        return self


class Pair(NamedTuple):
    """Two published measurements of one source, and the ratio of their speeds."""

    of: MeasuredCase
    to: MeasuredCase
    ratio: float


def observe(rule: ByOthers, band: tuple[float, float] | None) -> Observed:
    """Return the observed value of the selected rows, with its interval and evidence.

    `band` is the range of expected ratios, which decides which pair is the worst or the best. It is not used for a rule
    about `fits`. Raises ValueError if no row or no pair matches the rule.
    """
    if rule.quantity == "fits":
        return _fits(rule)
    assert band is not None
    ordered = sorted(pairs(rule), key=lambda pair: log_distance_outside(pair.ratio, band))
    if not ordered:
        raise ValueError(
            f"no two rows of grade {_grades(rule)} differ only in {', '.join(rule.differs)}. Name other rows."
        )
    decides = ordered[-1 if rule.asks == "every" else 0]
    pair = selected([pair.ratio for pair in ordered], rule.asks)
    description = f"{pair}, with a margin of {100 * REPEAT:g} % for each run, from {_scope(decides.of)}"
    evidence = (*map(_in_words, reversed(ordered)), *_sources([pair.of for pair in ordered]))
    return Observed(decides.ratio, evidence, around(decides.ratio, (1 + REPEAT) ** 2), told=description)


def pairs(rule: ByOthers) -> Iterator[Pair]:
    """Yield all pairs of measurements of one source that differ only in the conditions that the rule names."""
    assert rule.to is not None
    rows = [case for case in measured_by_others.cases() if case.quantity in TIMES and case.grade in _grades(rule)]
    rows = [case for case in rows if not case.outside]  # their times vary by more than REPEAT between runs
    for of, to in itertools.permutations(rows, 2):
        if of.family == to.family and rule.of.has(of) and rule.to.has(to) and _differ(of, to) <= {*rule.differs}:
            yield Pair(of, to, _speed(of) / _speed(to))


def _fits(rule: ByOthers) -> Observed:
    rows = [case for case in measured_by_others.cases("memory") if case.quantity == "fits"]
    rows = [case for case in rows if case.grade in _grades(rule) and rule.of.has(case)]
    if not rows:
        raise ValueError(f"no row of grade {_grades(rule)} says whether this fits. Name other rows.")
    values = [bool(case.published) for case in rows]
    evidence = [f"{case.family}, grade {case.grade}: {case.name}: {'trained' if fits else 'out of memory'}"
            for case, fits in zip(rows, values, strict=True)]  # fmt: skip
    description = f"{'the only run' if len(rows) == 1 else f'one of {len(rows)} runs'}, from {_scope(rows[0])}"
    return Observed(values[0], (*evidence, *_sources(rows)), (all(values), any(values)), told=description)


def _grades(rule: ByOthers) -> str:
    return "A" if rule.grade == "A" else "AB"


def _speed(case: MeasuredCase) -> float:
    """Return the published speed of a measurement in tokens per second and GPU."""
    return float(tokens_per_second_per_gpu(case.job, case.seconds))


def _facts(case: MeasuredCase) -> dict[str, Any]:
    """Return the conditions of a measurement by name. No condition repeats another one."""
    engine, job, box = case.engine, case.job, case.box
    return {
        "model": case.shape.name,
        "engine": _engine_words(case),
        "precision": engine.precision,
        "gpu": box.gpu.name,
        "gpus": box.num_gpus,
        "micro_batch": job.micro_batch_size,
        "accumulation": job.gradient_accumulation_steps,
        "batch": job.micro_batch_size * job.gradient_accumulation_steps,
        "sequence_length": job.sequence_length,
        "checkpointing": job.activation_checkpointing,
    }


def _differ(first_case: MeasuredCase, second_case: MeasuredCase) -> set[str]:
    """Return the names of the conditions in which two measurements differ."""

    def parts(case: MeasuredCase) -> dict[str, Any]:
        settings = dataclasses.replace(case.engine, precision="fp32", world_size=1, accumulation_bytes=0)
        kernels = dataclasses.replace(
            case.job,
            micro_batch_size=1,
            gradient_accumulation_steps=1,
            sequence_length=1,
            activation_checkpointing=False,
        )
        box = dataclasses.replace(case.box, num_gpus=1)
        return _facts(case) | {"model": case.shape, "engine": settings, "kernels": kernels, "box": box}

    first, second = parts(first_case), parts(second_case)
    return {name for name, value in first.items() if value != second[name]}


def _scope(case: MeasuredCase) -> str:
    """Return a description of the deciding measurement: its source, its grade and its setting."""
    facts = _facts(case)
    setting = (
        f"{facts['model']} in {facts['precision']}, {facts['gpus']} x {facts['gpu']}, {facts['sequence_length']} tokens"
    )
    return f"{case.family} (grade {case.grade}: {setting})"


def _in_words(pair: Pair) -> str:
    sides = (f"{case.name}: {_speed(case):,.0f} tokens/s per GPU" for case in (pair.of, pair.to))
    grade = max(pair.of.grade, pair.to.grade)
    return f"{pair.of.family}, grade {grade}: {' over '.join(sides)} = {pair.ratio:.4g}"


def _sources(cases: Sequence[MeasuredCase]) -> list[str]:
    """Return the address of each source, with its software and the assumptions that were made about it."""
    return list(dict.fromkeys(f"{case.family}: {case.url}: {' '.join(case.conditions.split())}" for case in cases))


def _engine_words(case: MeasuredCase) -> str:
    engine = case.engine
    within = " within nodes" if engine.replicas > 1 else ""
    offloads = (("optimizer", engine.offload_optimizer), ("parameters", engine.offload_param))
    offloaded = [states for states, place in offloads if place != "none"]
    return engine.name + within + (f", {' and '.join(offloaded)} on the host" if offloaded else "")
