"""What fits, holds and takes, computed again from committed lines, without the project's code."""

from __future__ import annotations

import gzip
import json
import math
import statistics
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from study.compare import frontier, verdict_text
from study.report import tables
from study.running import studies

pytestmark = pytest.mark.pages

CPU = Path(__file__).resolve().parents[2] / "reports" / "cpu" / "records"
FRONTIER, PEAKS = CPU / "frontier", CPU / "peaks-real"
QUIET = 0.05  # of the processors' time, for others at most


def lines(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as result:
        yield from map(json.loads, result)


def millions(size: str) -> float:
    return float(size[:-1]) * (1000 if size[-1] == "b" else 1)


def recomputed() -> dict[tuple[float, str], tuple[str | None, str | None]]:
    """By cap and strategy: the largest size that ended ok, and the smallest that ran out of memory."""
    ended: dict[tuple[float, str], dict[str, list[str]]] = {}
    for outcome in lines(FRONTIER / "outcomes.jsonl.gz"):
        requested = outcome["config"]
        key = requested["memory_cap"], outcome["strategy"]
        ended.setdefault(key, {}).setdefault(outcome["status"], []).append(requested["size"])
    return {key: (most(of.get("ok", [])), least(of.get("out_of_memory", []))) for key, of in ended.items()}


def most(sizes: list[str]) -> str | None:
    return max(sizes, key=millions, default=None)


def least(sizes: list[str]) -> str | None:
    return min(sizes, key=millions, default=None)


def test_what_fits_is_what_the_lines_say():
    result = recomputed()
    assert len(result) == 26
    displayed = {
        (row.cap_gib, row.strategy): (row.trained, row.not_trained)
        for row in tables.largest(FRONTIER).astype(object).where(lambda table: table.notna(), None).itertuples()
    }
    assert displayed == result
    for trained, ended in result.values():
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
        requested = record["config"]
        if (record["workload"], requested["precision"], record["world_size"]) == ("gpt-wikitext", "fp32", 2):
            peaks.setdefault(record["strategy"], {})[record["num_params"]] = record["size"], highest(record)
    ladder = sorted(peaks["ddp"])
    assert len(ladder) == 6
    displayed = {row.strategy: row.measured for row in tables.crossings(PEAKS).itertuples()}
    for strategy, sizes in peaks.items():
        if strategy == "ddp" or len(sizes) < 3:
            continue
        saves = [sizes[each][1] < peaks["ddp"][each][1] for each in ladder]
        first = next((at for at in range(len(ladder)) if all(saves[at:])), None)
        output = "not up to the largest" if first is None else sizes[ladder[first]][0] if first else "from the smallest"
        assert displayed[strategy] == output, strategy
    assert displayed.keys() >= {"zero1", "zero2", "zero2_tuned", "zero3", "zero3_tuned", "fsdp2"}


@pytest.mark.parametrize("study", ["equal-memory", "equal-memory-again"])
def test_times_at_equal_memory_are_what_the_lines_say(study):
    runs = sorted(lines(CPU / study / "records.jsonl.gz"), key=lambda record: record["started_at"])
    displayed = tables.speeds(CPU / study).set_index("strategy")
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
    for (strategy, larger), result in rates.items():
        row = displayed.loc[strategy]
        output = row["own_ratios"] if larger else [1 / ratio for ratio in row["equal_ratios"]]
        assert sorted(output) == pytest.approx(sorted(result))
        if len(output) > 1:
            middle, low, high = frontier.mean_over_series(output)
            assert middle == pytest.approx(statistics.geometric_mean(output))
            assert low * high == pytest.approx(middle**2)
            beyond = (math.log(high / middle) / statistics.stdev(map(math.log, output))) ** 2 / (1 + 1 / len(output))
            assert 2 * stats.t.sf(beyond**0.5, len(output) - 1) == pytest.approx(0.05)


def rate(run: dict[str, Any]) -> float:
    """Sequences a second; nothing but this ran."""
    load = run["load"]
    assert load["other_seconds"] + load["stolen_seconds"] <= QUIET * load["seconds"] * load["num_processors"]
    return float(run["config"]["global_batch_size"] / run["timing"]["median_seconds"])


def endpoints(folders: list[Path], step: int) -> dict[str, dict[int, float]]:
    """By arm (a strategy, or what its run is called beside it), by seed: the held-out loss over DDP's, less 1.

    All that a second folder has is an arm of its name.
    """
    lost: dict[str, dict[int, float]] = {}
    for folder, record in ((each, record) for each in folders for record in lines(each / "records.jsonl.gz")):
        label = record["run_id"].partition(f"-seed{record['seed']}")[2].lstrip("-")
        label = label if folder == folders[0] else folder.name
        (loss,) = (each["loss"] for each in record["evaluation"] if each["step"] == step)
        lost.setdefault(label or record["strategy"], {})[record["seed"]] = loss
    control = lost.pop("ddp")
    return {arm: {seed: loss / control[seed] - 1 for seed, loss in each.items()} for arm, each in lost.items()}


def exchanged(own: list[float], beside: list[list[float]], draws: int = 20_000) -> tuple[float, float]:
    """Times the null's distance (geometric), and p, by random exchanges within each start."""
    far = [[max(abs(value), 1e-9) for value in (mine, *others)] for mine, others in zip(own, beside, strict=True)]
    size = len(far[0])
    place = np.random.default_rng(11).integers(size, size=(draws, len(far)))
    logs = np.log([[row[at] for row in far] for at in range(size)])  # (place, start)
    signed = np.array([[(mine, *others)[at] for mine, others in zip(own, beside, strict=True)] for at in range(size)])
    starts = range(len(far))
    further = sum(logs[draw, starts].sum() >= logs[0].sum() for draw in place)
    shifted = sum(abs(signed[draw, starts].sum()) >= abs(signed[0].sum()) for draw in place)
    p = min(1.0, 2 * (1 + min(further, shifted)) / (1 + draws))
    return math.exp(logs[0].mean() - logs[1:].mean()), p


def accelerated(values: list[float], confidence: float = 0.9, draws: int = 20_000) -> list[float]:
    """Efron's BCa interval of a mean (1987): bias by the bootstrap, acceleration by the jackknife."""
    normal, each = statistics.NormalDist(), np.array(values)
    drawn = np.sort(np.random.default_rng(12).choice(each, size=(draws, len(each))).mean(axis=1))
    bias = normal.inv_cdf(
        float(np.clip(((drawn < each.mean()).mean() + (drawn <= each.mean()).mean()) / 2, 1 / draws, 1 - 1 / draws))
    )
    left = (each.sum() - each) / (len(each) - 1)
    gap = left.mean() - left
    skew = (gap**3).sum() / (6 * (gap**2).sum() ** 1.5)
    shifts = [bias + normal.inv_cdf(tail) for tail in ((1 - confidence) / 2, (1 + confidence) / 2)]
    return [float(np.quantile(drawn, normal.cdf(bias + shift / (1 - skew * shift)))) for shift in shifts]


@pytest.mark.parametrize("study", ["learned-pilot", "learned", "learned-gpt", "learned-bf16"])
def test_a_verdict_is_what_the_lines_say(study):
    of, folders = studies.find(study), [CPU / study, *([CPU / "learned-release"] if study == "learned" else [])]
    result, judged = endpoints(folders, of.protocol.step), verdict_text.decide(folders, of).verdict
    null = [result[name] for name in ("single", "cut", "rounding") if name in result]
    ps: dict[bool, list[float]] = {}
    for arm in judged.arms:
        own = result[arm.name]
        seeds = sorted(own)
        assert arm.differences == pytest.approx(own)
        distance, p = exchanged([own[seed] for seed in seeds], [[each[seed] for each in null] for seed in seeds])
        ps.setdefault(arm.is_broken, []).append(p)
        assert arm.distance == pytest.approx(distance)
        if len(seeds) >= 8:  # of fewer a mean's bootstrap has few values
            low, high = accelerated([own[seed] for seed in seeds])
            assert [arm.low, arm.high] == pytest.approx([low, high], abs=0.1 * (high - low))
        furthest = max(abs(value) for each in null for value in each.values())
        assert arm.num_parted == sum(abs(value) > furthest for value in own.values())
        starts, most = len(seeds), arm.most_parted
        tail = sum(math.comb(starts, k) * most**k * (1 - most) ** (starts - k) for k in range(arm.num_parted + 1))
        assert arm.num_parted == starts or tail == pytest.approx(0.05)
    for is_broken, each in ps.items():
        output = [arm.p for arm in judged.arms if arm.is_broken == is_broken]
        for place, (at, p) in enumerate(sorted(enumerate(each), key=lambda pair: pair[1])):
            holm = min(1.0, (len(each) - place) * p)  # below 1 both have the error of 20,000 draws, times up to six
            assert output[at] >= holm - 0.01 - 0.1 * holm * (holm < 1)
        least = min(1.0, len(each) * min(each))
        assert min(output) == pytest.approx(least, abs=0.01 + 0.1 * least * (least < 1))
