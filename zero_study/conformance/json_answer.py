"""Make what `zero-study conformance --json` prints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..answers import envelope
from ..answers.envelope import Answer
from ..verdict import Verdict
from . import results

IDS = {"wrong": "conformance/wrong-training", "crashed": "conformance/crashed-cell"}
KNOWN = "conformance/known-failure"  # a cell that failed in the same way in the file of --known


def of(matrix: Mapping[str, Any], verdict: Verdict, earlier: Mapping[str, Any] | None = None) -> Answer:
    """Return the answer for a conformance matrix. `earlier` is the matrix that --known names."""
    return envelope.answer("conformance", verdict, findings(matrix, earlier), matrix)


def findings(matrix: Mapping[str, Any], earlier: Mapping[str, Any] | None = None) -> Iterator[envelope.Finding]:
    """Yield a finding for each wrong or crashed configuration. It is a note if `earlier` has the same failure."""
    new = set(results.failed_cells(matrix, earlier))
    for name in results.failed_cells(matrix):
        cell = matrix["cells"][name]
        identifier = IDS[cell["verdict"]] if name in new else KNOWN
        severity: envelope.Severity = "error" if name in new else "note"
        yield envelope.Finding(identifier, severity, results.explanation(cell), name=name)
