"""Define what all rules for claims share. Each kind of rule has a module of its own in this folder."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from zero_study.errors import Refusal

Text = Annotated[str, Field(min_length=1)]


@dataclass(frozen=True)
class Observed:
    """The value that a rule computed for a claim, with its interval and its evidence.

    If `in_bytes` is set, the value is in bytes, even if the claim uses another unit.
    """

    value: float | bool | str
    evidence: tuple[str, ...]  # run ids of records, a formula with its numbers, or a result
    interval: tuple[float, float] | None = None  # for yes or no: the answers at the two ends
    in_bytes: bool = False
    told: str = ""  # how the interval was computed, or the evidence of the outcome

    @property
    def number(self) -> float:
        assert not isinstance(self.value, str)
        return self.value

    @property
    def ends(self) -> tuple[float, float]:
        """The lower and the upper end of the interval. Both equal the value if there is no interval."""
        return self.interval or (self.number, self.number)


class MissingEvidence(Refusal):
    """The error for a claim that cannot be decided because the records or results that its rule needs are missing."""


def around(value: float, factor: float) -> tuple[float, float]:
    """Return the interval from value / factor to value * factor."""
    return value / factor, value * factor


def log_distance_outside(ratio: float, band: tuple[float, float]) -> float:
    """Return how far a ratio is outside the expected range, as a logarithm. It is negative inside the range."""
    below = math.log(band[0] / ratio) if band[0] > 0 else -math.inf
    return max(below, math.log(ratio / band[1]) if ratio > 0 else -math.inf)


def selected(ratios: Sequence[float], asks: Literal["every", "one"]) -> str:
    """Return which of several pairs of runs decides, as text: the pair that agrees least if every one has to agree."""
    if len(ratios) == 1:
        return "the only pair of runs"
    extreme = "least" if asks == "every" else "most"
    return f"the pair of runs that agrees {extreme}, out of {len(ratios)} ({min(ratios):.3g} to {max(ratios):.3g})"
