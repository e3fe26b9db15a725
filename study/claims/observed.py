"""What did a rule find of a claim?"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Observed:
    """A value with its interval, and what it rests on. Bytes are bytes, whatever the unit of the claim."""

    value: float | bool | str
    evidence: tuple[str, ...]  # run ids of records, a formula with its numbers, or a result
    interval: tuple[float, float] | None = None  # of a yes or no: what the two ends of the amount behind it say
    in_bytes: bool = False
    told: str = ""  # how the interval came about, or what shows the outcome
