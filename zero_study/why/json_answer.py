"""Make the answer of `zero-study why --json`."""

from __future__ import annotations

import re
from collections.abc import Iterator

from zero_study.answers import envelope
from zero_study.answers.envelope import Severity
from zero_study.why import answer as answers
from zero_study.why import known
from zero_study.why.answer import Answer


def of(answer: Answer, file: str | None = None) -> envelope.Answer:
    """Return the answer with its findings. `file` is the log file, if there is only one."""
    return envelope.answer("why", answer.verdict, findings(answer, file), answers.content(answer))


def findings(answer: Answer, file: str | None = None) -> Iterator[envelope.Finding]:
    """Yield the causes as findings. The first cause is an error; if it is not known, all causes are notes."""
    for cause in answer.causes:
        severity: Severity = "error" if cause is answer.cause else "warning"
        if cause.is_note or answer.cause is None:
            severity = "note"
        yield envelope.Finding(
            id_of(cause.id),
            severity,
            f"{cause.happened} {cause.because}".strip(),
            "; ".join(cause.changes),
            file=file,
            line=cause.line or None,
            rank=next((line.rank for line in cause.evidence), None),
        )


def id_of(cause: str) -> str:
    """Return the stable id of the finding that a cause makes, such as "why/memory/logits"."""
    return f"why/{cause}"


def ids() -> dict[str, str]:
    """Return the ids of all known causes with their meaning, without values from a log."""
    return {id_of(rule.id): re.sub(r"\{\w+\}", "...", rule.because) for rule in known.rules()}
