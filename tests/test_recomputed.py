"""What fits, holds and takes, computed again from committed lines, without the project's code."""

from __future__ import annotations

import gzip
import json
import statistics
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from study.report import tables

CPU = Path(__file__).resolve().parents[1] / "reports" / "cpu" / "records"
FRONTIER, PEAKS, TIMES = CPU / "frontier", CPU / "peaks-real", CPU / "equal-memory"
QUIET = 0.05  # of the processors' time, for others at most


def lines(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as found:
        yield from map(json.loads, found)


def millions(size: str) -> float:
    return float(size[:-1]) * (1000 if size[-1] == "b" else 1)


def recomputed() -> dict[tuple[float, str], tuple[str | None, str | None]]:
    """By cap and strategy: the largest size that ended ok, and the smallest that ran out of memory."""
    ended: dict[tuple[float, str], dict[str, list[str]]] = {}
    for outcome in lines(FRONTIER / "outcomes.jsonl.gz"):
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


def highest(record: dict[str, Any]) -> int:
    """Bytes of the fullest rank in a steady step. DDP's buckets are not torch's tensors, and are counted apart."""
    held = [rank["steady_steps"]["tensor_bytes"] for rank in record["peak_memory"]]
    if record["strategy"].startswith("ddp"):
        states = record["model_state_bytes"]
        held = [peak + rank["communication_buffers"] for peak, rank in zip(held, states, strict=True)]
    return max(held)


def test_from_which_size_on_a_strategy_saves_is_what_the_lines_say():
    peaks: dict[str, dict[int, tuple[str, int]]] = {}
    for record in lines(PEAKS / "records.jsonl.gz"):
        asked = record["config"]
        if (record["workload"], asked["precision"], record["world_size"]) == ("gpt-wikitext", "fp32", 2):
            peaks.setdefault(record["strategy"], {})[record["num_params"]] = record["size"], highest(record)
    ladder = sorted(peaks["ddp"])
    assert len(ladder) == 6
    shown = {row.strategy: row.measured for row in tables.crossings(PEAKS).itertuples()}
    for strategy, sizes in peaks.items():
        if strategy == "ddp" or len(sizes) < 3:
            continue
        saves = [sizes[each][1] < peaks["ddp"][each][1] for each in ladder]
        first = next((at for at in range(len(ladder)) if all(saves[at:])), None)
        said = "not up to the largest" if first is None else sizes[ladder[first]][0] if first else "from the smallest"
        assert shown[strategy] == said, strategy
    assert shown.keys() >= {"zero1", "zero2", "zero2_tuned", "zero3", "zero3_tuned", "fsdp2"}


def test_times_at_equal_memory_are_what_the_lines_say():
    runs = sorted(lines(TIMES / "records.jsonl.gz"), key=lambda record: record["started_at"])
    shown = tables.speeds(TIMES).set_index("strategy")
    rates: dict[tuple[str, bool], list[float]] = {}
    for cap in (3.0, 6.0):
        of_cap = [run for run in runs if run["config"]["memory_cap"] == cap]
        controls = [at for at, run in enumerate(of_cap) if run["strategy"] == "ddp"]
        for before, after in pairwise(controls):
            around = statistics.mean(rate(of_cap[at]) for at in (before, after))
            for run in of_cap[before + 1 : after]:
                larger = run["config"]["global_batch_size"] > of_cap[before]["config"]["global_batch_size"]
                rates.setdefault((run["strategy"], larger), []).append(rate(run) / around)
    assert len(rates) == 11
    for (strategy, larger), found in rates.items():
        row = shown.loc[strategy]
        said = row["own_ratios"] if larger else [1 / ratio for ratio in row["equal_ratios"]]
        assert sorted(said) == pytest.approx(sorted(found))


def rate(run: dict[str, Any]) -> float:
    """Sequences a second; nothing but this ran."""
    load = run["load"]
    assert load["other_seconds"] + load["stolen_seconds"] <= QUIET * load["seconds"] * load["num_processors"]
    return float(run["config"]["global_batch_size"] / run["timing"]["median_seconds"])
