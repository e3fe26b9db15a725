"""Make what `zero-study dry-run --json` prints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from zero_study.answers import envelope
from zero_study.answers.envelope import Answer
from zero_study.dryrun import deadlock, text
from zero_study.dryrun.deadlock import LostMessage, Mismatch
from zero_study.dryrun.tracker import Call
from zero_study.verdict import Verdict

HANG, VALUES = "dry-run/hang", "dry-run/wrong-values"
LOST, WAITING, FAILED = "dry-run/lost-message", "dry-run/waiting-rank", "dry-run/failed-rank"


def of(
    verdict: Verdict,
    content: Mapping[str, Any],
    mismatches: Sequence[Mismatch],
    lost: Sequence[LostMessage],
    waiting: Mapping[int, Sequence[Call]],
    failures: Mapping[int, str],
) -> Answer:
    """Return the answer for a dry run. `content` is what --output writes."""
    return envelope.answer("dry-run", verdict, findings(mismatches, lost, waiting, failures), content)


def findings(
    mismatches: Sequence[Mismatch],
    lost: Sequence[LostMessage],
    waiting: Mapping[int, Sequence[Call]],
    failures: Mapping[int, str],
) -> Iterator[envelope.Finding]:
    """Yield findings: where ranks would wait forever or reduce wrongly, and which ranks failed.

    A failure comes before the hangs that follow from it.
    """
    failed = [envelope.Finding(FAILED, "error", f"Rank {rank} {why}.", rank=rank) for rank, why in failures.items()]
    is_cause = deadlock.follow_from(failures, mismatches)
    if is_cause:
        yield from failed
    for mismatch in mismatches:
        lines = " ".join(line.strip() for line in text.mismatches([mismatch]))
        identifier = VALUES if mismatch.is_only_operation else HANG
        yield envelope.Finding(identifier, "error", lines, rank=mismatch.ranks[0])
    for message in lost:
        lines = " ".join(line.strip() for line in text.lost_messages([message]))
        yield envelope.Finding(LOST, "error", lines, rank=message.sender)
    for rank, calls in waiting.items():
        lines = " ".join(line.strip() for line in text.waiting({rank: calls}))
        yield envelope.Finding(WAITING, "error", lines, rank=rank)
    if not is_cause:
        yield from failed
