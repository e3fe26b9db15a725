"""Make tidy tables of runs for the notebooks, with one row per observation. Column names end with the unit.

The functions with a parameter `records` take one or several folders of runs or of collected records, as names or paths.
Values that were not measured are NaN.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from study.compare import facts, frontier, memory_views, table
from study.compare.predicted import with_theory
from study.records.schema import Record
from zero_study.engines.strategy_names import in_order
from zero_study.files import ROOT, require_clone
from zero_study.terminal import GIB

MIB = 2.0**20

# The quantities by which strategies are compared: columns of `runs`, and their heads in tables.
COMPARED = {
    "peak_gib": "peak memory",
    "step_seconds": "step time",
    "model_states_gib": "model states",
    "sent_gib_per_step": "data sent",
}
# The columns that define a setting. Strategies are compared within one setting.
SETTING = ["workload", "size", "precision", "batch_sequences", "sequence_tokens", "processes", "options"]
# The columns that identify a run, in every table.
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
    """Return a table with one row per run: setting, outcome, losses, memory, data sent and time per step."""
    table_of_runs = with_theory(table.read(folders(records))).rename(columns=_RUNS)
    for name, column in _GIB.items():
        table_of_runs[column] = table_of_runs[name] / GIB
    on_gpu = table_of_runs["device"] == "cuda"
    table_of_runs["peak_gib"] = table_of_runs["peak_allocated_gib"].where(on_gpu, table_of_runs["peak_tensors_gib"])
    share_gpu = table_of_runs["share_device"] & (table_of_runs["processes"] > 1)
    table_of_runs["options"] = list(map(_options, table_of_runs["record"], share_gpu))
    table_of_runs.loc[share_gpu, "why_untimed"] = "several ranks share a GPU"
    table_of_runs.loc[share_gpu, ["step_seconds", "sequences_per_second"]] = float("nan")
    columns = [*_RUNS.values(), *_GIB.values(), "peak_gib", "options", "device", "status", "message"]
    columns = list(dict.fromkeys([*KEYS, *columns, "record", "curve"]))
    return _escaped(_ordered(table_of_runs[columns]))


def _options(record: Record | None, share_gpu: bool) -> str:
    """Return what a run has beyond its model, precision and batch, such as torch.compile or an adapter.

    The text is empty for a run that has none of them, or no record.
    """
    if record is None:
        return ""
    options = {
        "torch.compile": record.config.get("compile"),
        "activation checkpointing": record.config.get("activation_checkpointing"),
        "ranks that share a GPU": share_gpu,
    }
    return ", ".join([*(name for name, is_on in options.items() if is_on), *facts.shown_adapter(record)])


def steps(records: str | Path | Sequence[str | Path]) -> pd.DataFrame:
    """Return a table with one row per run and optimizer step: loss, gradient norm, learning rate, seconds, tokens."""
    return steps_of(runs(records))


def steps_of(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the table of `steps` for the runs in some rows of the table of `runs`."""
    parts = []
    for run in runs.to_dict("records"):
        if run["curve"] is None:
            continue
        frame = pd.DataFrame(run["curve"], columns=list(facts.CURVE)).rename(columns={"seconds": "step_seconds"})
        parts.append(frame.assign(**{key: run[key] for key in KEYS}))
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=[*KEYS, "step", "loss"])


def states(records: str | Path | Sequence[str | Path]) -> pd.DataFrame:
    """Return the bytes of model states as a table with a row per run, rank, moment of the step, and part of the states.

    The moment is "updating" (just before the optimizer step) or "resting" (between two steps).
    """
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
    """Return a table of rank 0's collectives in one step, with one row per run and kind.

    `mib` counts whole tensors, in MiB.
    """
    rows: list[dict[str, Any]] = []
    for run, record in _recorded(records):
        for collective in record.collectives_per_step or []:
            rows.append({**run, "kind": collective.kind, "count": collective.count, "mib": collective.bytes / MIB})
    return pd.DataFrame(rows)


def largest(records: str | Path | Sequence[str | Path]) -> pd.DataFrame:
    """Return a table of the largest model or batch per strategy and memory limit, as trained and as predicted."""
    return _escaped(pd.DataFrame(frontier.largest(folders(records)), columns=list(frontier.Largest._fields)))


def speeds(records: str | Path | Sequence[str | Path], control: str = "ddp") -> pd.DataFrame:
    """Return each strategy's speed under a memory limit: with the baseline's batch, and with its own largest batch."""
    return _escaped(pd.DataFrame(frontier.speeds(folders(records), control), columns=list(frontier.Speed._fields)))


def crossings(records: str | Path | Sequence[str | Path]) -> pd.DataFrame:
    """Return a table of the model size from which on each strategy uses less memory than DDP.

    Only strategies that ran with at least three model sizes are included.
    """
    return _escaped(pd.DataFrame(memory_views.crossings(folders(records)), columns=list(memory_views.Crossing._fields)))


def settings(runs: pd.DataFrame, control: str) -> list[pd.DataFrame]:
    """Return the runs of each setting that includes the baseline, in the order in which pages show the settings.

    Settings with large models come first, and among those the settings with many strategies.
    """
    groups = [rows for _, rows in runs.groupby(SETTING) if control in set(rows["strategy"])]
    return sorted(groups, key=lambda rows: (rows["parameters"].max() < facts.REAL, -rows["strategy"].nunique(),
                                           -rows["parameters"].max(), rows["processes"].max()))  # fmt: skip


def without_control(runs: pd.DataFrame, control: str) -> list[pd.DataFrame]:
    """Return the runs of each setting that does not include the baseline."""
    return [rows for _, rows in runs.groupby(SETTING) if control not in set(rows["strategy"])]


def with_other_processes(rows: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """Return the runs of a setting, and those of strategies such as `single` that need another number of processes."""
    setting = [name for name in SETTING if name != "processes"]
    alike = runs.set_index(setting).index.isin(rows.set_index(setting).index)
    return runs[runs.index.isin(rows.index) | (alike & ~runs["strategy"].isin(rows["strategy"]))]


def of_one_setting(runs: pd.DataFrame, control: str) -> pd.DataFrame:
    """Return, for each model, the runs of the setting in which most strategies ran, with any number of processes.

    Settings in which the control ran are preferred.
    """
    setting = [name for name in SETTING if name != "processes"]
    by_setting = runs.groupby(setting)["strategy"]
    sizes = by_setting.agg(has_control=lambda names: control in set(names), number="nunique").reset_index()
    in_order_of_choice = sizes.sort_values(["has_control", "number"], ascending=False, kind="stable")
    most = in_order_of_choice.drop_duplicates(["workload", "size"])
    return runs[runs.set_index(setting).index.isin(most.set_index(setting).index)]


def relative(rows: pd.DataFrame, control: str) -> pd.DataFrame:
    """Return each strategy's means divided by the baseline's, and the largest relative difference of its losses.

    `rows` are the runs of one setting. If they have the columns of `with_ratios`, the step times are those of
    `centers`. Columns without a value are left out, and those in which the control has 0.
    """
    means = mean(rows, *COMPARED).rename(columns=COMPARED)
    if "ratio" in rows:
        means["step time"] = centers(rows)
        means.loc[control, "step time"] = 1.0 if means["step time"].notna().any() else float("nan")
    means = means.loc[:, means.loc[control] != 0]
    losses = rows.groupby(["seed", "strategy"])["loss"].mean().unstack()
    differences = losses.sub(losses[control], axis=0).div(losses[control], axis=0).abs().max()
    more = {"loss difference": differences, "runs": rows.groupby("strategy").size()}
    return means.div(means.loc[control]).assign(**more).loc[rows["strategy"].unique()].dropna(axis="columns", how="all")


def lowest(ratios: pd.DataFrame, column: str, control: str) -> str:
    """Return the lowest ratio of a strategy except the baseline, such as "0.56x (fsdp2)". Empty if there is none."""
    others = ratios[column].drop(control).dropna()
    return f"{others.min():.2f}x ({others.idxmin()})" if len(others) else ""


def with_ratios(rows: pd.DataFrame, speeds: pd.DataFrame, control: str) -> pd.DataFrame:
    """Return the runs of one setting with the column `ratio`: the step time relative to the baseline's.

    A run of `speeds`, the table of the function `speeds`, has its ratio to the control's runs just before and just
    after it; then the ratio of the control's own runs is 1. Any other run has its ratio to the median of the control's
    runs. The column `is_alternated` says which.
    """
    nearest = {
        seconds: ratio
        for _, speed in speeds.iterrows()
        for seconds, ratio in zip(speed["equal_seconds"], speed["equal_ratios"], strict=True)
    }
    is_control = rows["strategy"] == control
    ratios = rows["step_seconds"].map(nearest).astype(float).where(~is_control)
    own = rows["step_seconds"] / rows.loc[is_control, "step_seconds"].median()
    own = own.mask(is_control & ratios.notna().any(), 1.0)
    return rows.assign(ratio=ratios.fillna(own), is_alternated=ratios.notna())


def centers(rows: pd.DataFrame) -> pd.Series:
    """Return the typical step time of each strategy relative to the baseline's, from the columns of `with_ratios`.

    For series of runs that alternated with the control's, it is the geometric mean, and otherwise the median. The ratio
    of the control is 1.
    """
    by_strategy = rows.dropna(subset=["ratio"]).groupby("strategy", sort=False)
    ratios = {name: center(of["ratio"]) if of["is_alternated"].all() else of["ratio"].median()
              for name, of in by_strategy}  # fmt: skip
    return pd.Series(ratios, dtype=float)


def center(ratios: Iterable[float]) -> float:
    """Return the geometric mean of ratios. NaN if there are none."""
    values = [float(ratio) for ratio in ratios]
    return math.exp(sum(map(math.log, values)) / len(values)) if values else float("nan")


def capped(runs: pd.DataFrame, gib: float | None = None) -> pd.DataFrame:
    """Return the runs whose processes had a memory limit. If `gib` is given, only runs with this limit in GiB."""
    limits = pd.Series([record and record.config.get("memory_cap") for record in runs["record"]], index=runs.index)
    return runs[limits.notna() if gib is None else limits == gib]


def millions(size: str | None) -> float:
    """Return the number of parameters, in millions, that the name of a size such as 124m or 1.3b states.

    NaN if there is no name.
    """
    return float(size[:-1]) * {"m": 1, "b": 1000}[size[-1]] if isinstance(size, str) else float("nan")


def median(values: Sequence[float]) -> float:
    """Return the median. NaN if there are no values."""
    return float(pd.Series(values, dtype=float).median())


def merged(table: pd.DataFrame) -> pd.DataFrame:
    """Merge equal neighboring rows of a table.

    The name of a merged row has the first and the last name, such as "0.15.4 to 0.17.5".
    """
    blocks = [block for _, block in table.groupby((table != table.shift()).any(axis=1).cumsum())]
    names = [" to ".join(dict.fromkeys([str(block.index[0]), str(block.index[-1])])) for block in blocks]
    return pd.concat([block.iloc[:1] for block in blocks]).set_axis(names)


def mean(runs: pd.DataFrame, *columns: str) -> pd.DataFrame:
    """Return the means of columns by strategy, taken over the repeats of each seed and then over seeds."""
    return runs.groupby(["strategy", "seed"])[list(columns)].mean().groupby("strategy").mean()


def control_of(table: pd.DataFrame, control: str) -> str:
    """Return the strategy that others are compared with: `control`, or the first strategy if `control` was not run."""
    return control if control in set(table["strategy"]) else str(table["strategy"].iloc[0])


def folders(records: str | Path | Sequence[str | Path]) -> list[Path]:
    """Return the folders of runs that the parameter of a notebook lists.

    The parameter is a list, one name, or a list as JSON text, which papermill's -p passes. A name that does not exist
    in the current folder is looked up in the project, so that notebooks also run in their own folder. Raises Refusal if
    it is a folder of stored results, and these are missing because this is not a clone.
    """
    if isinstance(records, str):
        records = json.loads(records) if records.startswith("[") else [records]
    elif isinstance(records, Path):
        records = [records]
    for name in records:
        if not Path(name).exists() and str(name).startswith("reports/"):
            require_clone(f"The stored results in {name}, which this notebook shows unless you name your own runs,")
    return [ROOT / name if not Path(name).exists() and (ROOT / name).exists() else Path(name) for name in records]


def _recorded(records: str | Path | Sequence[str | Path]) -> Iterable[tuple[dict[str, Any], Record]]:
    for run in runs(records).to_dict("records"):
        if run["record"] is not None:
            yield {key: run[key] for key in KEYS}, run["record"]


def _escaped(table: pd.DataFrame) -> pd.DataFrame:
    """Return a table with escaped texts, because notebooks and the site would interpret HTML from a record."""
    texts = {
        name: column.map(lambda value: html.escape(value, quote=False) if isinstance(value, str) else value)
        for name, column in table.items()
        if column.dtype == object or pd.api.types.is_string_dtype(column.dtype)
    }
    return table.assign(**texts)


def _ordered(table: pd.DataFrame) -> pd.DataFrame:
    """Return a table sorted by workload, size, precision and batch, with strategies from unsharded to offloaded."""
    place = {name: number for number, name in enumerate(in_order(table["strategy"]))}
    by = ["workload", "parameters", "precision", "batch_sequences", "processes", "strategy", "seed", "repeat"]
    return table.sort_values(by, key=lambda column: column.map(place) if column.name == "strategy" else column,
                             ignore_index=True, na_position="last")  # fmt: skip
