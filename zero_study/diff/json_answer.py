"""Make what `zero-study diff --json` prints."""

from __future__ import annotations

from collections.abc import Iterator

from ..answers import envelope
from ..answers.envelope import Answer
from . import text
from .compare import Result

# The ids of findings, by the kind of the first tensor that differs.
IDS = {
    "batch": "diff/different-batch",
    "weights": "diff/different-first-weights",
    "held": "diff/different-weights",
    "forward": "diff/different-output",
    "gradient": "diff/different-gradient",
    "norm": "diff/different-gradient-norm",
    "clipped": "diff/different-clipped-gradient",
    "update": "diff/different-update",
    "whole": "diff/different-update-length",
}
OTHER, RANKS = "diff/different-tensor", "diff/ranks-differ"


def of(result: Result) -> Answer:
    """Return the answer for two recordings. `differences` lists all differences, `findings` the first of each kind."""
    return envelope.answer("diff", result.verdict, findings(result), text.content(result))


def findings(result: Result) -> Iterator[envelope.Finding]:
    """Yield ranks that differ within one training, then the first difference of each kind, with likely causes."""
    for line in result.replicas:
        yield envelope.Finding(RANKS, "error", f"{line}.")
    seen: set[str] = set()
    for difference in result.differences:
        if difference.kind in seen:
            continue
        alike = [each for each in result.differences if each[:2] == difference[:2]]
        causes = "" if seen or not result.causes else f"Likely causes: {'; '.join(result.causes)}."
        seen.add(difference.kind)
        yield envelope.Finding(
            IDS.get(difference.kind, OTHER),
            "error",
            f"{text.describe(difference, alike)}.",
            causes,
            name=difference.name or None,
            step=difference.step,
            rank=difference.ranks[0] if difference.ranks else None,
        )
