"""Make what `zero-study compare --json` prints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from study.compare import plain_text
from study.compare.verdict_text import Judged
from zero_study.answers import envelope
from zero_study.answers.envelope import Answer

NOT_SHOWN = "compare/not-shown-to-train-the-same"


def of(view: str, pages: Iterable[str], fields: Mapping[str, Any] | None = None) -> Answer:
    """Return the answer of `compare --json` for a view: the view's numbers, if it has any, and its tables as texts."""
    own = {"groups": [], "not_ok": [], **(fields or {})}
    return envelope.answer("compare", None, (), {"view": view, "tables": _tables(pages), **own})


def of_verdict(study: str, judged: Judged) -> Answer:
    """Return the answer of `compare --json` for a study that has a protocol."""
    text = f"The study {study} does not show that this strategy trains to the same loss as its control."
    found = [envelope.Finding(NOT_SHOWN, "error", text, name=name) for name in judged.not_shown]
    fields = {"view": "verdict", "tables": _tables([judged.page]), "groups": [], "not_ok": []}
    return envelope.answer("compare", judged.verdict, found, fields)


def _tables(pages: Iterable[str]) -> list[dict[str, Any]]:
    return [
        {"heading": heading, "columns": head, "rows": rows}
        for page in pages
        for heading, head, rows in plain_text.tables(page)
    ]  # fmt: skip
