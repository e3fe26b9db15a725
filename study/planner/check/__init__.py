"""Does a table of training results hold together? Held against physics and the planner, row by row.

What `zero-study check` answers. It says what is suspicious; that it says nothing is no proof.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from study.planner.check import memory, speed
from study.planner.check.known import Reported
from study.planner.check.suspicion import Outcome, Suspicion
from study.planner.check.table import read

CHECKS: dict[str, Callable[[Sequence[Reported]], Outcome]] = {
    "FLOP/s against the card": speed.above_the_peak,
    "fit": memory.does_not_fit,
    "precision classes": memory.mixed_classes,
    "memory against states": memory.too_little,
    "differences between rows": memory.differences,
    "batch, steps and rates": speed.disagreeing,
    "formulas": memory.formulas,
    "speed against the planner": speed.far_from_the_planner,
}
MOST_UNREAD = 5  # cells that are named


@dataclass(frozen=True)
class Checked:
    """What came of a table."""

    num_rows: int
    outcomes: dict[str, Outcome]
    unread: dict[str, list[int]]  # cells that are not understood, with their rows

    @property
    def suspicions(self) -> list[Suspicion]:
        """All of them, in the order of the rows, the surest of a row first."""
        found = [suspicion for outcome in self.outcomes.values() for suspicion in outcome.suspicions]
        impossible = {row for suspicion in found if suspicion.certainty == "certain" for row in suspicion.rows}
        # That the planner does not expect what cannot be is no news.
        found = [one for one in found if one.certainty != "unexpected" or not impossible & {*one.rows}]
        order = ("certain", "likely", "unexpected")
        return sorted(found, key=lambda suspicion: (suspicion.rows, order.index(suspicion.certainty)))

    @property
    def is_suspicious(self) -> bool:
        """Whether there is more than what the planner alone did not expect."""
        return any(suspicion.certainty != "unexpected" for suspicion in self.suspicions)


def check(path: Path) -> Checked:
    """Check a table; raises Refusal where it cannot be read."""
    table = read(path)
    cases = [Reported(row) for row in table.rows]
    unread = {what: [*rows] for what, rows in table.unread.items()}
    for case in cases:
        for what in case.unread:
            unread.setdefault(what, []).append(case.row.number)
    return Checked(len(cases), {name: make(cases) for name, make in CHECKS.items()}, unread)


def text(checked: Checked) -> str:
    """Say each suspicion in one line, and at the end what was looked at."""
    lines = [f"{_rows(found.rows)}: {found.certainty}: {found.text}" for found in checked.suspicions]
    if unread := checked.unread:
        commonest = sorted(unread.items(), key=lambda item: -len(item[1]))[:MOST_UNREAD]
        named = ", ".join(f"{what} ({_some(rows)})" for what, rows in commonest)
        more = f" and {len(unread) - MOST_UNREAD} more" if len(unread) > MOST_UNREAD else ""
        lines.append(f"Not understood, so not used: {named}{more}.")
    looked = ", ".join(f"{name} {len(outcome.looked_at)}" for name, outcome in checked.outcomes.items())
    number = checked.num_rows
    lines.append(
        f"Looked at {number:,} row{'s' if number > 1 else ''}; rows of which each check could be made: {looked}. "
        "Silence is no proof."
    )
    return "\n".join(lines)


def _rows(numbers: Sequence[int]) -> str:
    return f"row{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _some(numbers: Sequence[int]) -> str:
    more = f" and {len(numbers) - MOST_UNREAD} more" if len(numbers) > MOST_UNREAD else ""
    return f"{_rows(numbers[:MOST_UNREAD])}{more}"
