"""Compare A100 with H100 by all public trainings that ran on both: one row per source and pair of machines.

The rows are all comparisons of public_comparisons.yaml whose baseline has H100 and whose other side has A100. A ratio
is the time of the A100, divided by that of the H100, which is the speed of an H100 relative to an A100.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

from study.compare import public_comparisons, public_pairs
from study.compare.public_comparisons import Comparison
from study.compare.public_pairs import PairedComparison, Spread, spread
from study.public_runs import archive


class Row(NamedTuple):
    """The speeds of an H100 relative to an A100: of pairs of single trainings, or of one pair of machines."""

    comparison: Comparison | PairedComparison
    baseline: str  # the machine with H100
    quantity: str
    ratios: list[float]
    repeats: dict[str, int]  # runs by machine, of one pair of machines
    also_differs: list[str]

    @property
    def is_registered(self) -> bool:
        """Whether the times have the intervals with an evaluation, which were registered and later left out."""
        return self.quantity.endswith("all intervals")

    @property
    def name(self) -> str:
        """The trainings and the machines."""
        if isinstance(self.comparison, PairedComparison):
            return f"{self.baseline} and 8 A100 ({len(self.ratios)} pairs)"
        return f"{self.comparison.label}: {self.baseline} and {self.comparison.arms[0].name.split(', ')[-1]}"

    @property
    def spread(self) -> Spread:
        """The median and the ranges of the ratios."""
        known = spread(self.ratios)
        assert known is not None
        return known


@cache
def rows() -> tuple[Row, ...]:
    """Return the rows, those with the most pairs of one source first."""
    pairs = [_of_pairs(each) for each in public_comparisons.paired() if _is_of_cards(each.control, each.arm)]
    machines = [
        row
        for each in public_comparisons.comparisons()
        if _is_of_cards(each.control.where, each.arms[0].where)
        for row in _of_machines(each)
    ]
    return (*pairs, *machines)


def _is_of_cards(control: Mapping[str, Any], arm: Mapping[str, Any]) -> bool:
    return [str(side.get("gpu"))[:4].upper() for side in (control, arm)] == ["H100", "A100"]


def _of_pairs(comparison: PairedComparison) -> Row:
    runs = archive.source(comparison.source)
    ratios = [pair.time for pair in public_pairs.pairs_of(comparison, runs) if pair.time is not None]
    also_differs = public_pairs.also_differs(comparison, runs)
    return Row(comparison, comparison.baseline, "seconds per step", ratios, {}, also_differs)


def _of_machines(comparison: Comparison) -> list[Row]:
    result = public_comparisons.answer(comparison)
    also_differs = [fact.partition(":")[0] for fact in result.also_differs]
    return [
        Row(comparison, comparison.control.name, each.quantity, [1 + each.relative], result.num_runs, also_differs)
        for each in result.differences
        if each.quantity.startswith("GPU seconds per sample")
    ]
