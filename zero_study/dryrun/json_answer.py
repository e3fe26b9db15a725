"""Make what `zero-study dry-run --json` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
) -> list[envelope.Finding]:
    """Return findings: where ranks would wait forever or reduce wrongly, and which ranks failed.

    A failure comes before the hangs that follow from it.
    """
    found = [
        (VALUES if mismatch.is_only_operation else HANG, mismatch.ranks[0], text.mismatches([mismatch]))
        for mismatch in mismatches
    ]
    found += [(LOST, message.sender, text.lost_messages([message])) for message in lost]
    found += [(WAITING, rank, text.waiting({rank: calls})) for rank, calls in waiting.items()]
    failed = [(FAILED, rank, iter([f"Rank {rank} {reason}."])) for rank, reason in failures.items()]
    ordered = [*failed, *found] if deadlock.follow_from(failures, mismatches) else [*found, *failed]
    return [
        envelope.Finding(identifier, "error", " ".join(map(str.strip, lines)), rank=rank)
        for identifier, rank, lines in ordered
    ]
