"""Decide claims by training runs that others published. Compare pairs that differ only in what the claim is about.

The runs are those in reports/public, and no value is written into the ledger. A verdict is about these runs: they have
certain models, GPUs and releases, which the reason and the evidence name. Runs of an engine or a setting that the
sentence is not about belong under `aside` of the sentence, where they decide nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from study.claims.rules import Observed, Text, around, log_distance_outside, selected
from zero_study.files import FROM_LIST, StrictModel

if TYPE_CHECKING:
    from study.compare.public_pairs import Pair, PairedComparison

Names = Annotated[tuple[Text, ...], FROM_LIST]


class Between(StrictModel):
    """Two groups of runs of one publisher, which train the same models with different options."""

    source: Text
    control: dict[str, Any]  # field of the setting -> value
    arm: dict[str, Any]
    by: Names  # both sides of a pair have the same values of these fields


class ByPublicRuns(StrictModel):
    """A rule that compares the claim with public runs, in pairs of a run with the tested option and one without it."""

    type: Literal["public"]
    quantity: Literal["speed", "peak", "loss"]  # ratios of the arm; loss: largest relative difference of any step
    asks: Literal["every", "one"]  # every: the worst pair decides; one: the best pair decides
    margin: Annotated[float, Field(ge=0, lt=1)]  # relative: repeats, and the rounding of what was published
    comparisons: Names = ()  # names in study/compare/public_comparisons.yaml
    between: Between | None = None

    @model_validator(mode="after")
    def _of_one_kind(self) -> ByPublicRuns:
        if bool(self.comparisons) == (self.between is not None):
            raise ValueError("comparisons, between: give one of the two, not both")
        return self


def observe(rule: ByPublicRuns, band: tuple[float, float]) -> Observed:
    """Return the observed value of all pairs. `band` is the expected range, which decides which pair is worst or best.

    `band` is the expected range, which decides which pair is the worst or the best. Raises ValueError if a comparison
    is unknown or no pair has the quantity.
    """
    from study.compare.public_pairs import also_differs, pairs_of
    from study.public_runs import archive

    values: list[float] = []
    evidence: list[str] = []
    sources: list[str] = []
    for comparison in _comparisons(rule):
        runs = archive.source(comparison.source)
        pairs = [pair for pair in pairs_of(comparison, runs) if pair.is_whole]
        found = [(pair, value) for pair in pairs if (value := _value(pair, rule.quantity)) is not None]
        values += [value for _, value in found]
        evidence += [f"{_sides(comparison)}: {pair.entry}: {rule.quantity} {value:.4g}" for pair, value in found]
        origin = runs[0].source
        differing = also_differs(comparison, runs)
        sources.append(
            " ".join(
                [
                    f"{comparison.source}: https://github.com/{origin.repository}/tree/{origin.commit}:",
                    f"The runs also differ in: {'; '.join(differing) or 'nothing that is stated'}.",
                    *comparison.caveats,
                ]
            )
        )
    if not values:
        raise ValueError(f"no two public runs that can be compared have a {rule.quantity}. Name other runs.")
    ordered = sorted(values, key=lambda value: log_distance_outside(value, band))
    decides = ordered[-1 if rule.asks == "every" else 0]
    told = f"{selected(values, rule.asks)}, with a margin of {100 * rule.margin:g} %"
    return Observed(decides, (*evidence, *dict.fromkeys(sources)), around(decides, 1 + rule.margin), told=told)


def _comparisons(rule: ByPublicRuns) -> list[PairedComparison]:
    from study.compare import public_comparisons
    from study.compare.public_pairs import PairedComparison

    if rule.between is not None:
        content = rule.between.model_dump() | {"by": [*rule.between.by]}
        return [PairedComparison.model_validate({"name": "of a claim", "label": "none", **content})]
    known = {comparison.name: comparison for comparison in public_comparisons.paired()}
    if unknown := sorted({*rule.comparisons} - known.keys()):
        raise ValueError(f"comparisons: {public_comparisons.FILE.name} has no comparison of pairs named {unknown[0]}")
    return [known[name] for name in rule.comparisons]


def _value(pair: Pair, quantity: str) -> float | None:
    if quantity == "speed":
        return None if pair.time is None else 1 / pair.time
    return pair.peak if quantity == "peak" else pair.largest


def _sides(comparison: PairedComparison) -> str:
    if comparison.name != "of a claim":
        return f"{comparison.source}, {comparison.name}"
    arm, control = (", ".join(f"{value}" for value in side.values()) for side in (comparison.arm, comparison.control))
    return f"{comparison.source}, {arm} over {control}"
