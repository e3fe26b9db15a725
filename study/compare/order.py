"""In what order do strategies stand, in every table and figure?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

STAGES = ("single", "ddp", "zero0", "zero1", "zero2", "zero3", "fsdp2")
KINDS = ("", "cpu_offload", "nvme_offload", "tuned")  # of a stage: what follows the first underscore of a name


def in_order(strategies: Iterable[str]) -> list[str]:
    """Sort from nothing sharded to everything offloaded; strategies of a user's own come last, by name."""

    def place(strategy: str) -> tuple[int, int, str]:
        stage, _, kind = strategy.partition("_")
        return _place(stage, STAGES), _place(kind, KINDS), strategy

    return sorted(set(strategies), key=place)


def _place(word: str, known: Sequence[str]) -> int:
    return known.index(word) if word in known else len(known)
