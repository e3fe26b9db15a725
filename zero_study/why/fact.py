"""Describe one thing that a log, a recording or an installed package shows about a failed run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from zero_study.logs.printed_steps import Line

Kind = Literal["memory", "hang", "wrong", "slow", "start-up", "save", "launch"]
# stated: the log or a library says it. computed: it follows from stated numbers.
Certainty = Literal["stated", "computed"]


@dataclass(frozen=True)
class Fact:
    """What a log shows: what happened, and the cause if it is certain. Nothing in it is a guess."""

    id: str  # such as "memory/request"
    kind: Kind
    happened: str  # what the log states, with its numbers, in complete sentences
    because: str = ""  # the cause, only if it is certain
    certainty: Certainty = "stated"
    basis: str = "the message"  # from what it follows
    evidence: tuple[Line, ...] = ()  # the lines that show it
    changes: tuple[str, ...] = ()  # that remove the cause: the smallest first, with the line to write
    check: str = ""  # how to check it
    documented: str = ""  # an address
    is_consequence: bool = False  # of another failure, such as a lost connection
    is_note: bool = False  # it explains what the log shows, and nothing is wrong

    @property
    def is_open(self) -> bool:
        """Whether the fact leaves open why it happened."""
        return not self.because

    @property
    def line(self) -> int:
        """The number of the first line that shows it. 0 if no line of a log does."""
        return min((line.number for line in self.evidence), default=0)

    def content(self) -> dict[str, Any]:
        """Return the fact as a dictionary that can be written as JSON."""
        return {
            "id": self.id, "kind": self.kind, "what_happened": self.happened, "why": self.because,
            "certainty": self.certainty, "certainty_of_what_happened": self.certainty,
            "certainty_of_why": self.certainty if self.because else None, "basis": self.basis,
            "is_open": self.is_open, "is_note": self.is_note,
            "evidence": [{"line": line.number, "rank": line.rank, "text": line.text} for line in self.evidence],
            "changes": list(self.changes), "check": self.check, "documented": self.documented,
        }  # fmt: skip
