"""Tidy tables of what runs left, for notebooks: one row per observation, one unit per column, in the column's name.

Each takes folders of runs or of collected records, one or several, by name or path; what was not measured is NaN.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from study import formatting
from study.compare import facts, frontier, memory_views, table
from study.compare.predicted import with_theory
from study.engines.strategy_names import in_order
from study.files import ROOT
from study.formatting import GIB
from study.records.schema import Record

MIB = 2.0**20

SETTING = ["workload", "size", "precision", "batch_sequences", "processes"]  # within which strategies are compared
REAL = 100e6  # parameters: smaller models are for tests of engines
# What tells runs apart, in every table.
KEYS = ["study", "run", "box", "workload", "size", "precision", "strategy", "processes", "seed", "repeat"]
_RUNS = {
    "run_id": "run",
    "world_size": "processes",
    "global_batch_size": "batch_sequences",
    "sequence_length": "sequence_tokens",
    "num_params": "parameters",
    "num_steps": "steps",
    "last_loss": "loss",
    "eval_loss": "held_out_loss",
    "accuracy": "held_out_accuracy",
    "perplexity": "held_out_perplexity",
    "seconds_per_step": "step_seconds",
    "samples_per_second": "sequences_per_second",
    "why_untimed": "why_untimed",
}
_GIB = {
    "peak_tensor_bytes": "peak_tensors_gib",
    "peak_allocated_bytes": "peak_allocated_gib",
    "peak_resident_bytes": "peak_process_gib",
    "predicted_peak_bytes": "theory_peak_gib",
    "model_state_bytes": "model_states_gib",
    "collective_bytes": "sent_gib_per_step",
}


def runs(records: str | Path | Sequence[str | Path]) -> pd.DataFrame:
    """One row per run: what it was, how it ended, what it learned, held, sent, and how long a step took."""
    table_of_runs = with_theory(table.read(folders(records))).rename(columns=_RUNS)
    for name, column in _GIB.items():
        table_of_runs[column] = table_of_runs[name] / GIB
    on_gpu = table_of_runs["device"] == "cuda"
    table_of_runs["peak_gib"] = table_of_runs["peak_allocated_gib"].where(on_gpu, table_of_runs["peak_tensors_gib"])
    columns = [*_RUNS.values(), *_GIB.values(), "peak_gib", "device", "status", "message"]
    columns = list(dict.fromkeys([*KEYS, *columns, "record", "curve"]))
    return _escaped(_ordered(table_of_runs[columns]))


def steps(records: str | Path | Sequence[str | Path]) -> pd.DataFrame:
    """One row per run and optimizer step: loss, gradient norm, learning rate, seconds, tokens."""
    parts = []
    for run in runs(records).to_dict("records"):
        if run["curve"] is None:
            continue
        frame = pd.DataFrame(run["curve"], columns=list(facts.CURVE)).rename(columns={"seconds": "step_seconds"})
        parts.append(frame.assign(**{key: run[key] for key in KEYS}))
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=[*KEYS, "step", "loss"])


def states(records: str | Path | Sequence[str | Path]) -> pd.DataFrame:
    """One row per run, rank, moment (updating, resting) and part of the model states: GiB, and bytes per parameter."""
    rows = []
    for run, record in _recorded(records):
        moments = {"updating": record.model_state_bytes, "resting": record.resting_state_bytes}
        for moment, ranks in moments.items():
            for rank, state_bytes in enumerate(ranks or []):
                for part in facts.PARTS:
                    num_bytes = getattr(state_bytes, part)
                    of = {"bytes_per_parameter": num_bytes / record.num_params if record.num_params else None}
                    rows.append({**run, "rank": rank, "moment": moment, "part": part, "gib": num_bytes / GIB, **of})
    return pd.DataFrame(rows)


def collectives(records: str | Path | Sequence[str | Path]) -> pd.DataFrame:
    """One row per run and kind of collective in one step of rank 0: how many, and MiB of their whole tensors."""
    rows: list[dict[str, Any]] = []
    for run, record in _recorded(records):
        for collective in record.collectives_per_step or []:
            rows.append({**run, "kind": collective.kind, "count": collective.count, "mib": collective.bytes / MIB})
    return pd.DataFrame(rows)


def largest(records: str | Path | Sequence[str | Path]) -> pd.DataFrame:
    """One row per strategy and cap: the largest model, or batch, that trained, the smallest that did not, predicted."""
    return _escaped(pd.DataFrame(frontier.largest(folders(records)), columns=list(frontier.Largest._fields)))


def speeds(records: str | Path | Sequence[str | Path], control: str = "ddp") -> pd.DataFrame:
    """One row per strategy that was timed beside the control under a cap: at its batch, and at the strategy's own."""
    return _escaped(pd.DataFrame(frontier.speeds(folders(records), control), columns=list(frontier.Speed._fields)))


def crossings(records: str | Path | Sequence[str | Path]) -> pd.DataFrame:
    """One row per strategy that ran with three sizes or more: from which on it holds less than DDP, and by theory."""
    return _escaped(pd.DataFrame(memory_views.crossings(folders(records)), columns=list(memory_views.Crossing._fields)))


def settings(runs: pd.DataFrame, control: str) -> list[pd.DataFrame]:
    """The runs of each setting that the control ran in; models of a real size first, then those of most strategies."""
    groups = [rows for _, rows in runs.groupby(SETTING) if control in set(rows["strategy"])]
    return sorted(groups, key=lambda rows: (rows["parameters"].max() < REAL, -rows["strategy"].nunique(),
                                           -rows["parameters"].max(), rows["processes"].max()))  # fmt: skip


def name_of(rows: pd.DataFrame) -> str:
    """A setting in words."""
    of, size = rows.iloc[0], f"{rows['parameters'].max() / 1e6:,.1f} million parameters"
    setting = f"{of['precision']}, {formatting.processes(of['processes'])}, {of['batch_sequences']} sequences a step"
    return f"{of['workload']} {of['size']} ({size}), {setting}"


def mean(runs: pd.DataFrame, *columns: str) -> pd.DataFrame:
    """By strategy, the mean over seeds of the mean of each seed's repeats."""
    return runs.groupby(["strategy", "seed"])[list(columns)].mean().groupby("strategy").mean()


def control_of(table: pd.DataFrame, control: str) -> str:
    """What the others are compared with: the strategy that is asked for, or where it did not run, the first."""
    return control if control in set(table["strategy"]) else str(table["strategy"].iloc[0])


def folders(records: str | Path | Sequence[str | Path]) -> list[Path]:
    """The folders that a notebook's parameter names: a list, one name, or a list as papermill's -p passes it.

    One that is not where it is named is looked for in the project, so that a notebook opens in its own folder too.
    """
    if isinstance(records, str):
        records = json.loads(records) if records.startswith("[") else [records]
    elif isinstance(records, Path):
        records = [records]
    return [ROOT / name if not Path(name).exists() and (ROOT / name).exists() else Path(name) for name in records]


def _recorded(records: str | Path | Sequence[str | Path]) -> Iterable[tuple[dict[str, Any], Record]]:
    for run in runs(records).to_dict("records"):
        if run["record"] is not None:
            yield {key: run[key] for key in KEYS}, run["record"]


def _escaped(table: pd.DataFrame) -> pd.DataFrame:
    """A table whose texts are shown as they stand: a notebook and the site would take what records say for HTML."""
    texts = {
        name: column.map(lambda value: html.escape(value, quote=False) if isinstance(value, str) else value)
        for name, column in table.items()
        if column.dtype == object or pd.api.types.is_string_dtype(column.dtype)
    }
    return table.assign(**texts)


def _ordered(table: pd.DataFrame) -> pd.DataFrame:
    """By workload, size and precision, strategies from nothing sharded to everything offloaded."""
    place = {name: number for number, name in enumerate(in_order(table["strategy"]))}
    by = ["workload", "parameters", "precision", "batch_sequences", "processes", "strategy", "seed", "repeat"]
    return table.sort_values(by, key=lambda column: column.map(place) if column.name == "strategy" else column,
                             ignore_index=True, na_position="last")  # fmt: skip
