"""Make the answer of `zero-study why --json`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import yaml

from zero_study.answers import envelope
from zero_study.answers.envelope import Severity
from zero_study.terminal import mask
from zero_study.why import answer as answers
from zero_study.why import rules
from zero_study.why.answer import Answer

FIRST_FAILURE = "first-failure"
COMPUTED = Path(__file__).with_name("computed.yaml")  # the meanings of the facts that no rule states


def of(answer: Answer, file: str | None = None) -> envelope.Answer:
    """Return the answer with its findings. `file` is the log file, if there is only one."""
    return envelope.answer("why", answer.verdict, findings(answer, file), answers.content(answer))


def findings(answer: Answer, file: str | None = None) -> Iterator[envelope.Finding]:
    """Yield the first failure and all facts as findings. The first one is an error, and notes are notes."""
    first = answer.first_failure
    if first is not None:
        name, line = answer.log.place(first.number)
        yield envelope.Finding(
            id_of(FIRST_FAILURE), "error", mask(first.first_line), "", file=file or name, line=line, rank=first.rank
        )
    for fact in answer.facts:
        severity: Severity = "note" if fact.is_note else "warning"
        if first is None and fact is next((each for each in answer.facts if not each.is_note), None):
            severity = "error"
        name, line = answer.log.place(fact.line)
        yield envelope.Finding(
            id_of(fact.id), severity, mask(f"{fact.happened} {fact.because}".strip()), "; ".join(fact.changes),
            file=file or name, line=line or None, rank=next((line.rank for line in fact.evidence), None),
        )  # fmt: skip


def id_of(fact: str) -> str:
    """Return the stable id of the finding that a fact makes, such as "why/memory/request"."""
    return f"why/{fact}"


def ids() -> dict[str, str]:
    """Return the ids of all facts with their meaning, without values from a log."""
    of_rules = {rule.id: re.sub(r"\{\w+\}", "...", rule.happened) for rule in rules.rules()}
    computed = yaml.safe_load(COMPUTED.read_text(encoding="utf-8"))
    return {id_of(id): meaning for id, meaning in sorted((computed | of_rules).items())}
