"""Describe the cause of a failure: what happened, why, how certain this is, what to change, and how to check it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from zero_study.why.log import Line, mask

Kind = Literal["memory", "hang", "wrong", "slow", "start-up", "save", "launch"]
# certain: the log says it. likely: the usual cause of what the log says. possible: one of several causes.
Certainty = Literal["certain", "likely", "possible"]
CERTAINTIES: tuple[Certainty, ...] = ("certain", "likely", "possible")


@dataclass(frozen=True)
class Cause:
    """A possible cause of a failure. `rank_causes` orders several causes."""

    id: str  # such as "memory/logits"
    kind: Kind
    happened: str  # one sentence with the numbers of the log
    because: str  # the cause, in one or two sentences
    certainty: Certainty  # that this is the cause; causes are ordered by it
    basis: str  # from what it follows
    evidence: tuple[Line, ...] = ()  # the lines that show it
    changes: tuple[str, ...] = ()  # the smallest first, with the line to write
    check: str = ""  # how to check it
    documented: str = ""  # an address
    is_consequence: bool = False  # something else in the log came first, if the log has it
    is_open: bool = False  # the log states what happened, and not why
    is_note: bool = False  # it explains what the log shows, and nothing is wrong
    reason: Certainty | None = None  # certainty of `because`, if it is lower than `certainty`
    symptom: Certainty = "certain"  # certainty of `happened`, which the log nearly always states
    strength: int = 0  # if two causes are equally certain, the one with the higher number comes first

    @property
    def line(self) -> int:
        return min((line.number for line in self.evidence), default=0)

    @property
    def sureness(self) -> Certainty:
        """How certain the reason is. It is never more certain than the description of what happened."""
        return max(self.certainty, self.reason or self.certainty, self.symptom, key=CERTAINTIES.index)

    def content(self) -> dict[str, Any]:
        """Return the cause as a dictionary that can be written as JSON."""
        return {
            "id": self.id, "kind": self.kind, "what_happened": self.happened, "why": self.because,
            "certainty": self.sureness, "certainty_of_what_happened": self.symptom,
            "certainty_of_why": self.sureness, "basis": self.basis, "is_open": self.is_open,
            "is_note": self.is_note,
            "evidence": [
                {"line": line.number, "rank": line.rank, "text": mask(line.text)} for line in self.evidence
            ],
            "changes": list(self.changes), "check": self.check, "documented": self.documented,
        }  # fmt: skip


def rank_causes(causes: Iterable[Cause]) -> list[Cause]:
    """Return the causes without duplicates, sorted so that the most certain cause comes first.

    Consequences of another failure come last, such as the time-out of ranks that wait for a rank that ended. If two
    causes are equally certain, the one with the earlier line comes first.
    """
    ranked = sorted(
        causes,
        key=lambda cause: (
            cause.is_note, cause.is_consequence, CERTAINTIES.index(cause.certainty), -cause.strength, cause.line,
            cause.id,
        ),
    )  # fmt: skip
    return list({cause.id: cause for cause in reversed(ranked)}.values())[::-1]
