"""The rules that decide claims, one module for each kind of rule, and the observation that all of them return."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

Text = Annotated[str, Field(min_length=1)]


@dataclass(frozen=True)
class Observed:
    """An observed value with its interval and its evidence. Bytes are bytes, whatever the unit of the claim."""

    value: float | bool | str
    evidence: tuple[str, ...]  # run ids of records, a formula with its numbers, or a result
    interval: tuple[float, float] | None = None  # of a yes or no: what the two ends of the amount behind it say
    in_bytes: bool = False
    told: str = ""  # how the interval came about, or what shows the outcome

    @property
    def number(self) -> float:
        assert not isinstance(self.value, str)
        return self.value

    @property
    def ends(self) -> tuple[float, float]:
        """The interval; without one, the value twice."""
        return self.interval or (self.number, self.number)


def around(value: float, factor: float) -> tuple[float, float]:
    """The interval from a factor below a value to the factor above it."""
    return value / factor, value * factor
