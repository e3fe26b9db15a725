"""The answer of `zero-study prove --json`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..answers import envelope
from ..answers.envelope import Answer
from ..verdict import Verdict
from .text import NOT_CHECKED

NOT_TRAINED, NOTE = "prove/nothing-trained", "prove/note"
# The id and the severity of the entries of a list in proof.json.
IDS: dict[str, tuple[str, envelope.Severity]] = {
    "known_wrong": ("prove/known-fault", "error"),
    "findings": ("prove/training-fault", "error"),
    "not_as_asked": ("prove/not-as-requested", "warning"),
    "notes": (NOTE, "note"),
}


def of(verdict: Verdict, proofs: Sequence[Mapping[str, Any]], why_not_made: str | None, status: int) -> Answer:
    """Return the answer on a script that ended with a status. `proofs` has the content of each proof.json."""
    found = list(findings(proofs))
    if verdict.num_findings and not found and why_not_made is not None:
        found.append(envelope.Finding(NOT_TRAINED, "error", f"{why_not_made}."))
    fields = {"proofs": list(proofs), "why_not_made": why_not_made}
    return envelope.answer("prove", verdict, found, fields, status)


def findings(proofs: Sequence[Mapping[str, Any]]) -> Iterator[envelope.Finding]:
    """Yield the faults, the differences from the request, and the notes of each proof."""
    for proof in proofs:
        step = (proof.get("step") or {}).get("number")
        for kind, (identifier, severity) in IDS.items():
            for text in proof.get(kind, []):
                if not text.startswith(NOT_CHECKED):
                    yield envelope.Finding(identifier, severity, text, step=step)
