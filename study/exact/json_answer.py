"""Make what `zero-study exact --json` prints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from zero_study.answers import envelope
from zero_study.answers.envelope import Answer
from zero_study.verdict import Verdict

if TYPE_CHECKING:
    from study.exact.runner import Outcome

OTHER_BITS, UNSEEN = "exact/other-bits", "exact/unseen-fault"


def of(verdict: Verdict, outcomes: Sequence[Outcome], faulty: Sequence[Outcome], content: Mapping[str, Any]) -> Answer:
    """Return the answer for exact trainings. `content` is what --output writes."""
    return envelope.answer("exact", verdict, findings(outcomes, faulty), content)


def findings(outcomes: Sequence[Outcome], faulty: Sequence[Outcome]) -> Iterator[envelope.Finding]:
    """Yield the trainings whose bits differ from the reference, and the injected faults that were not detected."""
    for outcome in outcomes:
        if not (outcome.is_same or outcome.refusal):
            step = outcome.difference["step"] if outcome.difference else None
            yield envelope.Finding(OTHER_BITS, "error", outcome.text, name=outcome.cell.name, step=step)
    for outcome in faulty:
        if not outcome.is_seen:
            text = f"The planted fault was not found: {outcome.cell.fault}."
            yield envelope.Finding(UNSEEN, "error", text, name=outcome.cell.name)
