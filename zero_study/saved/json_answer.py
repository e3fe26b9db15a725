"""Make the answer of `zero-study saved --json`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

from ..answers import envelope
from ..answers.envelope import Answer
from . import text
from .against import Comparison
from .content import Finding, Kind, Saved

IDS: dict[Kind, str] = {kind: f"saved/{kind.replace(' ', '-')}" for kind in get_args(Kind)}


def of(folder: Path, saved: Sequence[Saved], compared: Sequence[Comparison], is_strict: bool) -> Answer:
    """Return the JSON answer on a saved folder, and on its comparisons."""
    result = text.verdict(saved, compared, is_strict)
    return envelope.answer(
        "saved", result, findings(folder, saved, compared), text.content(folder, saved, compared, is_strict)
    )


def findings(folder: Path, saved: Sequence[Saved], compared: Sequence[Comparison]) -> Iterator[envelope.Finding]:
    """Yield the faults and notes on a saved folder. Each names the first tensor or file that it concerns."""
    for part in saved:
        yield from (_finding(part.folder, finding) for finding in part.findings)
    for comparison in compared:
        yield from (_finding(folder, finding) for finding in comparison.findings)


def _finding(folder: Path, finding: Finding) -> envelope.Finding:
    return envelope.Finding(
        IDS[finding.kind],
        "error" if finding.is_wrong else "note",
        finding.text,
        file=str(folder),
        name=finding.names[0] if finding.names else None,
    )
