"""Make the table of all runs: one row per run, with the facts of its record.

Nothing is averaged. An unknown number is NaN, never 0.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from pydantic import ValidationError

from study.compare import facts
from study.compare.facts import CURVE
from study.config import RunConfig, build_config, parse_flags
from study.records import find as records
from study.records import schema
from study.records.schema import Outcome
from zero_study.engines.strategy_names import in_order
from zero_study.errors import Refusal

# The columns in the order of the table. An unknown float is NaN.
COLUMNS: dict[str, str] = {
    # Identity
    "run_id": "str",
    "study": "str",  # None if no outcome names it
    "box": "str",
    "device": "str",
    "workload": "str",
    "size": "str",
    "strategy": "str",
    "world_size": "int64",
    "seed": "int64",
    "repeat": "int64",  # number of the run among equal runs on one machine, by the time of its start
    "status": "str",
    "message": "str",
    "started_at": "str",
    "share_of_others": "float64",  # used by other programs; above facts.MAX_FOREIGN_CPU_SHARE the run has no times
    "why_untimed": "object",  # None if the run has times
    "oversubscribed": "bool",  # more threads than cores, or more processes than GPUs: times do not measure the strategy
    "is_unproven": "bool",  # an FSDP2 run whose proof does not say what was sharded
    "mixed_code": "object",  # None if one version of the code trained the whole run, else a sentence
    "share_device": "bool",  # all processes were requested on one GPU, to measure only bytes
    "threads_per_process": "float64",
    # Settings
    "precision": "str",
    "init": "str",
    "dropout": "float64",
    "global_batch_size": "int64",
    "micro_batch_size": "float64",
    "gradient_accumulation_steps": "float64",
    "sequence_length": "float64",
    "num_params": "float64",
    "num_steps": "float64",
    # Learning
    "mean_final_loss": "float64",  # over the last steps (facts.steps_at_an_end); Record.final_loss is only the last
    "last_loss": "float64",
    "eval_loss": "float64",
    "accuracy": "float64",
    "perplexity": "float64",
    "loss_area": "float64",
    "mean_grad_norm": "float64",
    # Speed
    "seconds_per_step": "float64",
    "seconds_lower": "float64",
    "seconds_upper": "float64",
    "samples_per_second": "float64",
    "tokens_per_second": "float64",
    "tokens_per_second_per_gpu": "float64",  # per process
    "model_flops_per_sequence": "float64",
    "model_flops_per_second": "float64",
    "wall_seconds": "float64",
    "energy_joules": "float64",
    "joules_per_token": "float64",
    # Memory of the largest rank
    "peak_allocated_bytes": "float64",
    "peak_reserved_bytes": "float64",
    "peak_tensor_bytes": "float64",
    "peak_resident_bytes": "float64",
    "memory_imbalance": "float64",
    "device_memory_bytes": "float64",
    "model_state_bytes": "float64",
    "parameter_bytes": "float64",
    "gradient_bytes": "float64",
    "optimizer_state_bytes": "float64",
    "communication_buffer_bytes": "float64",
    "has_computed_buckets": "object",  # DDP's buckets, in older records; None if no buffers are known
    "rank_tensor_bytes": "object",  # of each rank: allocated on a GPU, live tensors on a CPU; None if not measured
    "rank_parts": "object",  # of each rank: model states by part at two moments, and peak; None if not measured
    # Communication
    "collective_bytes": "float64",
    "collective_count": "float64",
    # Proof
    "zero_stage": "float64",
    "offload_optimizer_device": "str",
    "offload_param_device": "str",
    "engine_class": "str",
    "optimizer_class": "str",
    "backend": "str",
    "overlap_comm": "object",
    "reduce_bucket_size": "float64",
    "partitioned_parameters": "float64",
    "gradient_clipping": "float64",
    "num_ranks_proved": "float64",
    # Keys
    "data_digest": "str",
    "initial_sha256": "str",
    "final_sha256": "str",
    "config_digest": "str",
    "settings": "object",  # the settings of which `config_digest` is the digest
    "libraries": "str",
    # Unchanged from the record; None if there is no record
    "record": "object",  # the record itself, which `predicted.with_theory` reads
    "command": "object",
    "machine": "object",
    # Curves
    "curve": "object",  # shape (steps, len(CURVE)); None if no step was taken
}
CELL = ("box", "workload", "size", "precision", "init", "data_digest", "config_digest", "num_steps", "libraries")
EQUAL = (*CELL, "global_batch_size", "micro_batch_size", "strategy", "world_size", "seed")


def read(folders: Iterable[Path], boxes: Sequence[str] | None = None) -> pd.DataFrame:
    """Return the table of all runs below the folders, with the columns `COLUMNS`.

    `boxes`: the machines whose runs are read, by default all. Predictions are not included (see
    `predicted.with_theory`).

    A run that has an outcome but no record has a row too: its status, its message, and NaN for the facts of a record.
    Its machine is that of the other runs in the same folder, if these ran on one machine.

    Raises Refusal if a record or an outcome does not match the schema, if steps are missing or were altered, or if one
    of `boxes` has no run.
    """
    by_run: dict[tuple[Hashable, ...], dict[str, Any]] = {}
    for run in records.find_runs(folders):
        if run.record is not None:
            row = facts.row(run.record, run.outcome)
        else:
            assert run.outcome is not None  # a run has one of the two
            row = _row_of_outcome(run.outcome)
        earlier = by_run.get(run.identity)
        # If a run has two copies, the one with an outcome is used.
        if earlier is None or (earlier["study"] is None and row["study"] is not None):
            by_run[run.identity] = {**row, "folder": run.folder}
    rows = list(by_run.values())
    _place_outcomes(rows)
    _tell_apart(rows)
    if boxes is not None:
        boxes_found = {row["box"] for row in rows}
        if missing := sorted(set(boxes) - boxes_found):
            raise Refusal(
                f"there is no run of the machine {missing[0]!r} in these folders. The machines are "
                f"{', '.join(map(repr, sorted(boxes_found)))}."
            )
        rows = [row for row in rows if row["box"] in boxes]
    kinds: dict[str, Any] = {name: kind for name, kind in COLUMNS.items() if name != "repeat"}
    table = pd.DataFrame({name: pd.Series([row.get(name) for row in rows], dtype=kinds[name]) for name in kinds})
    order = table.sort_values(["started_at", "run_id"], kind="stable")
    repeats = order.groupby(list(EQUAL), dropna=False, sort=False).cumcount()
    table.insert(list(COLUMNS).index("repeat"), "repeat", repeats)
    return table


def check_control(table: pd.DataFrame, control: str) -> None:
    """Raise Refusal if the table has no run of the control, which is the baseline of all comparisons."""
    names = in_order(table["strategy"])
    if control not in names:
        raise Refusal(
            f"--control {control}: there is no run of this strategy in these folders. The strategies "
            f"are: {', '.join(names)}"
        )


def steps(table: pd.DataFrame) -> pd.DataFrame:
    """Return a table of losses and other values by step, with one row per run and optimizer step."""
    names = ["run_id", "box", "strategy", "world_size", "seed", "repeat", "workload", "size", "global_batch_size"]
    names += ["precision", "num_steps", "config_digest", "data_digest", "libraries"]
    with_curve = table[table["curve"].notna()]
    if with_curve.empty:
        return pd.DataFrame(columns=[*names, *CURVE])
    lengths = [len(curve) for curve in with_curve["curve"]]
    long = with_curve[names].loc[with_curve.index.repeat(lengths)].reset_index(drop=True)
    values = pd.DataFrame(np.concatenate(list(with_curve["curve"])), columns=list(CURVE))
    return pd.concat([long, values.astype({"step": "int64"})], axis=1)


def _row_of_outcome(outcome: Outcome) -> dict[str, Any]:
    """Return the row of a run without a record: what the runner observed, and the settings of the run."""
    identity = ("run_id", "study", "workload", "size", "strategy", "world_size", "seed", "status", "message")
    row = {name: getattr(outcome, name) for name in (*identity, "started_at", "global_batch_size", "wall_seconds")}
    row["oversubscribed"] = row["share_device"] = row["is_unproven"] = False
    try:
        config = _config_of(outcome)
        if config is not None:
            row |= {"init": config.effective_init, **facts.settings(config, outcome)}
    except (Refusal, ValidationError):  # of another version of the program, or invalid, which may be why the run failed
        pass
    return row


def _config_of(outcome: Outcome) -> RunConfig | None:
    """Return the configuration of an outcome. None if it is not known.

    The 448 oldest committed outcomes have no configuration of their own. It is read from their command.
    """
    if outcome.config is not None:
        return RunConfig.model_validate(outcome.config)
    program = next((i for i, word in enumerate(outcome.command) if Path(word).name == "train.py"), None)
    return None if program is None else build_config(**parse_flags(outcome.command[program + 1 :]))


def _tell_apart(rows: Iterable[dict[str, Any]]) -> None:
    """Extend the name of a strategy by its engine's settings if runs of one strategy had different engines.

    A run keeps the plain name if it has no proof, or an older proof that lacks some of the settings.
    """
    proven: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row.get("engine_fingerprint") is not None:
            proven.setdefault(row["strategy"], []).append(row)
    for name, rows_alike in proven.items():
        kinds = [row["engine_fingerprint"] for row in rows_alike]
        differ = [key for key in kinds[0] if any(kind.get(key) != kinds[0][key] for kind in kinds)]
        for row in rows_alike if differ else ():
            differences = ", ".join(f"{key.rpartition('.')[2]} {row['engine_fingerprint'].get(key)}" for key in differ)
            row["strategy"] = f"{name} ({differences})"


def _place_outcomes(rows: list[dict[str, Any]]) -> None:
    """Assign runs without a record to the machine of the other runs in their folder, if these ran on one machine."""
    around: dict[Path, set[tuple[str, str]]] = {}
    for row in rows:
        if "box" in row:
            around.setdefault(row["folder"], set()).add((row["box"], row["device"]))
    for row in rows:
        if "box" not in row:
            boxes = around.get(row["folder"], set())
            row["box"], row["device"] = next(iter(boxes)) if len(boxes) == 1 else (schema.UNKNOWN_BOX, None)
