"""What does a check find, and of how many rows could it be made?"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from study.planner.check.known import Reported

# certain: what is printed contradicts itself, arithmetic or the card. likely: it takes a usual assumption, which the
# line names. unexpected: only the planner says otherwise.
Certainty = Literal["certain", "likely", "unexpected"]


@dataclass(frozen=True)
class Suspicion:
    """One line: of which rows, how sure, and the arithmetic."""

    rows: tuple[int, ...]
    certainty: Certainty
    text: str


@dataclass
class Outcome:
    """What one check has found, and the rows that it could look at."""

    suspicions: list[Suspicion] = field(default_factory=list)
    looked_at: set[int] = field(default_factory=set)

    def look(self, cases: Iterable[Reported]) -> None:
        """Count rows as looked at."""
        self.looked_at |= {case.row.number for case in cases}

    def suspect(self, cases: Iterable[Reported], certainty: Certainty, text: str) -> None:
        """Add a suspicion of these rows."""
        self.suspicions.append(Suspicion(tuple(sorted({case.row.number for case in cases})), certainty, text))
