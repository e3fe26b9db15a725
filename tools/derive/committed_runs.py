"""Committed runs and results of this project that several pages and pictures show."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pandas as pd

from study.claims import defects
from study.compare import frontier, memory_views, verdict_text
from study.records import find as records
from study.records.schema import Record
from study.report import plots, tables
from study.running import studies
from zero_study.conformance import results
from zero_study.files import ROOT

CPU = ROOT / "reports" / "cpu" / "records"
SEEDS = ROOT / "reports" / "cpu" / "published" / "seeds.json"
PROTOCOL = ROOT / "reports" / "cpu" / "published" / "protocol.json"


def benchmark(name: str) -> dict[str, Any]:
    """Return the committed results of a program in tools/measure."""
    return json.loads((ROOT / "reports" / "cpu" / "benchmarks" / f"{name}.json").read_text())


@cache
def runs() -> list[Record]:
    """Return every committed run that ended well."""
    return [file.record for file in records.find([CPU]) if file.record.status == "ok"]


@cache
def against_theory() -> memory_views.Errors:
    """Return how far predicted states and peaks of these runs are from the measured ones."""
    return memory_views.errors([CPU])


@cache
def _peak_runs() -> pd.DataFrame:
    runs = plots.filter_runs(tables.runs(CPU / "peaks-real"), status="ok", seed=0)
    runs["precision"] = runs["precision"].str.removesuffix("-autocast")  # all that DDP has in 16 bits
    return runs


def peak_runs() -> pd.DataFrame:
    """Return the runs of `peaks-real`, in a copy that the caller may change."""
    return _peak_runs().copy()


def runs_by_strategy(size: str, precision: str = "fp32", processes: int = 2) -> pd.DataFrame:
    """Return the runs of `peaks-real` with one model, by strategy."""
    runs = plots.filter_runs(_peak_runs(), size=size, precision=precision, processes=processes)
    return runs.set_index("strategy")


@cache
def largest_models() -> dict[tuple[float, str], str | None]:
    """Return the largest model that trained, such as "124m", by the limit in GiB per process and the strategy."""
    return {(row.cap_gib, row.strategy): row.trained for row in frontier.largest([CPU / "frontier"])}


@cache
def speeds_by_strategy() -> dict[str, frontier.Speed]:
    """Return times and throughputs compared with DDP over six series of runs, by strategy without DDP."""
    return {row.strategy: row for row in frontier.speeds([CPU / "equal-memory-again"])}


@cache
def learned(study: str = "learned") -> verdict_text.Decided:
    """Return the verdict of a study that compares what is learned."""
    return verdict_text.decide([CPU / study, CPU / "learned-release"], studies.find(study))


def releases_with_fault(fault_id: str) -> str:
    """Return the first and the last release of DeepSpeed with a fault that `zero-study conformance` found."""
    (fault,) = (fault for fault in results.faults() if fault.id == fault_id)
    return f"{fault.introduced} to {fault.last}"


@cache
def adapter_runs() -> pd.DataFrame:
    """Return the runs of `lora`. The column `kind` has what they train: whole, lora, in_4_bits, or bf16 (LoRA)."""
    runs = plots.filter_runs(tables.runs(CPU / "lora"), status="ok")
    return runs.assign(kind=[name.rpartition("-")[2] for name in runs["run"]])


def of_published_program(comparison: defects.Comparison, metric: defects.Metric) -> defects.Effect:
    """Return the effect of ZeRO on a metric of the published program."""
    effect = defects.effect(defects.read(PROTOCOL), comparison, metric)
    assert effect is not None
    return effect
