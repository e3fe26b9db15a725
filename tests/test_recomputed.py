"""What fits, computed again from the committed lines by a program that shares no code with the project's."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from study.report import tables

FRONTIER = Path(__file__).resolve().parents[1] / "reports" / "cpu" / "records" / "frontier"


def millions(size: str) -> float:
    return float(size[:-1]) * (1000 if size[-1] == "b" else 1)


def recomputed() -> dict[tuple[float, str], tuple[str | None, str | None]]:
    """By cap and strategy: the largest size that ended ok, and the smallest that ran out of memory."""
    ended: dict[tuple[float, str], dict[str, list[str]]] = {}
    with gzip.open(FRONTIER / "outcomes.jsonl.gz", "rt", encoding="utf-8") as lines:
        for line in lines:
            outcome = json.loads(line)
            asked = outcome["config"]
            key = asked["memory_cap"], outcome["strategy"]
            ended.setdefault(key, {}).setdefault(outcome["status"], []).append(asked["size"])
    return {key: (most(of.get("ok", [])), least(of.get("out_of_memory", []))) for key, of in ended.items()}


def most(sizes: list[str]) -> str | None:
    return max(sizes, key=millions, default=None)


def least(sizes: list[str]) -> str | None:
    return min(sizes, key=millions, default=None)


def test_what_fits_is_what_the_lines_say():
    found = recomputed()
    assert len(found) == 26
    shown = {
        (row.cap_gib, row.strategy): (row.trained, row.not_trained)
        for row in tables.largest(FRONTIER).astype(object).where(lambda table: table.notna(), None).itertuples()
    }
    assert shown == found
    for trained, ended in found.values():
        assert trained is None or ended is None or millions(trained) < millions(ended)
