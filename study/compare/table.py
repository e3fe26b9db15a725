"""What did every run do, as one tidy table? One row per run; nothing is averaged, and unknown is NaN, never 0."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from pydantic import ValidationError

from study.compare import peaks, quiet
from study.compare.cases import engine_of, has_computed_buckets, is_unproven, proven_strategy
from study.compare.losses import steps_at_an_end
from study.compare.order import in_order
from study.compare.parity import NOT_COMPARED
from study.config import RunConfig, build_config, parse_flags
from study.errors import Refusal
from study.records import find as records
from study.records import machine
from study.records.schema import ModelStateBytes, Outcome, PeakMemory, Record
from study.theory import hardware
from study.theory.communication.on_wire import moved_by_gloo
from study.theory.model_states import PARTS, paper_bytes

TRAINING_PHASES = ("first_step", "settling_steps", "steady_steps")

# In the order of the table. Floats may be NaN: unknown.
COLUMNS: dict[str, str] = {
    # Identity
    "run_id": "str",
    "study": "str",  # None: no outcome says it
    "box": "str",
    "device": "str",
    "workload": "str",
    "size": "str",
    "strategy": "str",
    "world_size": "int64",
    "seed": "int64",
    "repeat": "int64",  # of equal runs on one box, in the order in which they started
    "status": "str",
    "message": "str",
    "started_at": "str",
    "share_of_others": "float64",  # of a CPU's processors, by others; above quiet.QUIET the run has no times
    "why_untimed": "object",  # None where the run has times
    "oversubscribed": "bool",  # more threads than cores, or processes than GPUs: its times say nothing of the strategy
    "is_unproven": "bool",  # FSDP2, and its proof does not say what it sharded
    "share_device": "bool",  # asked to be on one GPU, for bytes alone
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
    "final_loss": "float64",
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
    "mfu": "float64",
    "wall_seconds": "float64",
    "energy_joules": "float64",
    "joules_per_token": "float64",
    # Memory: the largest rank's
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
    "has_computed_buckets": "object",  # DDP's, in records from before they were measured; None: no buffers are known
    "paper_state_bytes": "float64",
    "paper_parameter_bytes": "float64",
    "paper_gradient_bytes": "float64",
    "paper_optimizer_state_bytes": "float64",
    "rank_tensor_bytes": "object",  # of each rank: allocated on a GPU, live tensors on a CPU; None: not measured
    "rank_parts": "object",  # of each rank: its model states by part at two moments, and its peak; None: not measured
    "predicted_parts": "object",  # bytes of the largest rank's peak, as theory says; None: of no model that it knows
    # Communication
    "collective_bytes": "float64",
    "gloo_bytes": "float64",  # that gloo sends for them; NaN: another backend carried them
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
    "settings": "object",  # what `config_digest` is the digest of
    "libraries": "str",
    # What the record has of them as it is; None: there is no record
    "command": "object",
    "machine": "object",
    # Curves
    "curve": "object",  # (steps, len(CURVE)); None: no step was taken
}
CURVE = ("step", "loss", "grad_norm", "learning_rate", "seconds", "tokens")
LIBRARIES = ("torch", "accelerate", "deepspeed", "transformers")
STEPS_FIELDS = {"max_steps", "epochs"}  # `num_steps` says what comes of them
CELL = ("box", "workload", "size", "precision", "init", "data_digest", "config_digest", "num_steps", "libraries")
EQUAL = (*CELL, "global_batch_size", "micro_batch_size", "strategy", "world_size", "seed")

_shared: dict[str, dict[str, Any]] = {}  # settings by their text: thousands of runs have the same


def read(folders: Iterable[Path], boxes: Sequence[str] | None = None) -> pd.DataFrame:
    """Read all runs below the folders, of these boxes or of all, into one table; its columns are `COLUMNS`.

    A run of which there is only an outcome is a row too: its status and message, and NaN for what a record would say. A
    record's status is the outcome's where that says more. Such a row has the box of the runs around it.

    Raises Refusal for a record or an outcome that does not hold the schema, and for steps that are missing or altered.
    """
    by_run: dict[tuple, dict[str, Any]] = {}
    for run in records.find_runs(folders):
        row = _row_of_outcome(run.outcome) if run.record is None else _row(run.record, run.outcome)
        known = by_run.get(run.identity)
        # Of two copies the one that lies beside its outcome.
        if known is None or (known["study"] is None and row["study"] is not None):
            by_run[run.identity] = {**row, "folder": run.folder}
    rows = list(by_run.values())
    _place_outcomes(rows)
    _tell_apart(rows)
    if boxes is not None:
        there = {row["box"] for row in rows}
        if missing := sorted(set(boxes) - there):
            raise Refusal(f"box {missing[0]!r} has no run here; the boxes are {', '.join(map(repr, sorted(there)))}")
        rows = [row for row in rows if row["box"] in boxes]
    known = {name: kind for name, kind in COLUMNS.items() if name != "repeat"}
    table = pd.DataFrame({name: pd.Series([row.get(name) for row in rows], dtype=known[name]) for name in known})
    order = table.sort_values(["started_at", "run_id"], kind="stable")
    repeats = order.groupby(list(EQUAL), dropna=False, sort=False).cumcount()
    table.insert(list(COLUMNS).index("repeat"), "repeat", repeats)
    return table


def check_control(table: pd.DataFrame, control: str) -> None:
    """Raise Refusal where no run is of the strategy that others are to be compared with."""
    names = in_order(table["strategy"])
    if control not in names:
        raise Refusal(f"--control {control}: no run of it here; the strategies are {', '.join(names)}")


def steps(table: pd.DataFrame) -> pd.DataFrame:
    """Spread the runs' curves: one row per run and optimizer step."""
    names = ["run_id", "box", "strategy", "world_size", "seed", "repeat", "workload", "size", "global_batch_size"]
    names += ["precision", "num_steps", "config_digest", "data_digest", "libraries"]
    known = table[table["curve"].notna()]
    if known.empty:
        return pd.DataFrame(columns=[*names, *CURVE])
    lengths = [len(curve) for curve in known["curve"]]
    long = known[names].loc[known.index.repeat(lengths)].reset_index(drop=True)
    values = pd.DataFrame(np.concatenate(list(known["curve"])), columns=list(CURVE))
    return pd.concat([long, values.astype({"step": "int64"})], axis=1)


def _row(file: records.RecordFile, outcome: Outcome | None) -> dict[str, Any]:
    r = file.record
    config = RunConfig.model_validate(r.config)
    status = r.status if outcome is None or outcome.status == "ok" else outcome.status
    failure = r.failure.error.splitlines()[0] if r.failure and r.failure.error else None
    device = records.device_of(r)
    return {
        "run_id": r.run_id,
        "study": outcome.study if outcome else None,
        "command": r.command,
        "machine": r.machine,
        "box": records.box_of(r),
        "device": device,
        "workload": r.workload,
        "size": r.size,
        "strategy": r.strategy,
        "world_size": r.world_size,
        "seed": r.seed,
        "status": status,
        "message": failure if outcome is None or (outcome.status == "ok" and failure) else outcome.message,
        "started_at": r.started_at,
        "share_of_others": quiet.share_of_others(r),
        "oversubscribed": _is_oversubscribed(r, device),
        "is_unproven": is_unproven(r),
        "share_device": config.share_device,
        "threads_per_process": r.machine.get("num_threads_per_process"),
        "init": r.init,
        "global_batch_size": config.global_batch_size,
        "num_params": r.num_params,
        "wall_seconds": r.wall_seconds,
        "data_digest": (r.data or {}).get("digest"),
        "initial_sha256": r.initial_parameters.sha256 if r.initial_parameters else None,
        "final_sha256": r.final_parameters.sha256 if r.final_parameters else None,
        "libraries": libraries(r.machine),
        **_settings(config, r),
        **_learning(file, config),
        **_speed(r, device),
        **_memory(r, device),
        **_model_states(r),
        "rank_parts": _rank_parts(r, device),
        "predicted_parts": (found := peaks.cell(r)) and found.parts,
        **_communication(r),
        **_proof(r),
        "proven_strategy": proven_strategy(r),
    }


def _row_of_outcome(outcome: Outcome) -> dict[str, Any]:
    """What the runner saw of a run without a record, with its settings; of an older outcome those of its command."""
    identity = ("run_id", "study", "workload", "size", "strategy", "world_size", "seed", "status", "message")
    row = {name: getattr(outcome, name) for name in (*identity, "started_at", "global_batch_size", "wall_seconds")}
    row["oversubscribed"] = row["share_device"] = row["is_unproven"] = False
    try:
        config = _config_of(outcome)
        if config is not None:
            row |= {"init": config.effective_init, **_settings(config, outcome)}
    except (Refusal, ValidationError):  # of another version of the program, or just what was wrong with the run
        pass
    return row


def _config_of(outcome: Outcome) -> RunConfig | None:
    """The configuration that an outcome keeps; the 448 committed before they kept it have it in their command only."""
    if outcome.config is not None:
        return RunConfig.model_validate(outcome.config)
    program = next((i for i, word in enumerate(outcome.command) if Path(word).name == "train.py"), None)
    return None if program is None else build_config(**parse_flags(outcome.command[program + 1 :]))


def _tell_apart(rows: Iterable[dict[str, Any]]) -> None:
    """Add to a strategy's name what its engines differ in, where runs of one name had others: they are not one.

    A run whose proof does not say all of it, because it is older or has none, keeps the name alone.
    """
    proven: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row.get("proven_strategy") is not None:
            proven.setdefault(row["strategy"], []).append(row)
    for name, same in proven.items():
        kinds = [row["proven_strategy"] for row in same]
        differ = [key for key in kinds[0] if any(kind.get(key) != kinds[0][key] for kind in kinds)]
        for row in same if differ else ():
            said = ", ".join(f"{key.rpartition('.')[2]} {row['proven_strategy'].get(key)}" for key in differ)
            row["strategy"] = f"{name} ({said})"


def _place_outcomes(rows: list[dict[str, Any]]) -> None:
    """Give each run without a record the box of the runs around it, if these are of one box."""
    around: dict[Path, set[tuple[str, str]]] = {}
    for row in rows:
        if "box" in row:
            around.setdefault(row["folder"], set()).add((row["box"], row["device"]))
    for row in rows:
        if "box" not in row:
            boxes = around.get(row["folder"], set())
            row["box"], row["device"] = next(iter(boxes)) if len(boxes) == 1 else (records.UNKNOWN_BOX, None)


def _is_oversubscribed(r: Record, device: str) -> bool:
    if r.world_size > 1 and r.config.get("share_device"):
        return True
    if device == "cpu":
        places, wanted = records.usable_cores(r), r.world_size * (r.machine.get("num_threads_per_process") or 1)
    else:
        places, wanted = len(r.machine.get("gpus", [])), r.world_size
    return bool(places) and wanted > places


def libraries(machine: dict[str, Any]) -> str | None:
    known = machine.get("libraries", {})
    return ", ".join(f"{name} {known[name]}" for name in LIBRARIES if known.get(name)) or None


def _settings(config: RunConfig, r: Record | Outcome) -> dict[str, Any]:
    micro_batch_size, accumulation = config.batches(r.world_size)
    decisive = config.model_dump(mode="json", exclude={*NOT_COMPARED, "seed", "global_batch_size", *STEPS_FIELDS})
    decisive["init"] = config.effective_init
    weights_sha256 = r.weights_sha256 if isinstance(r, Record) else None
    for name, value in (("weights", weights_sha256), ("nudge_seed", config.nudge_seed)):
        if value is None:  # as in records from before there were these
            del decisive[name]
        else:
            decisive[name] = value
    if isinstance(r, Record):
        decisive |= {} if r.continues is None else {"continues": r.continues.model_dump()}
        decisive |= machine.arithmetic(r.machine)
    text = json.dumps(decisive, sort_keys=True)
    return {
        "precision": config.precision,
        "dropout": config.dropout,
        "micro_batch_size": micro_batch_size,
        "gradient_accumulation_steps": accumulation,
        "sequence_length": config.sequence_length,
        "num_steps": config.num_steps,
        "gradient_clipping": config.gradient_clipping,
        "config_digest": hashlib.sha256(text.encode()).hexdigest(),
        "settings": _shared.setdefault(text, decisive),
    }


def _learning(file: records.RecordFile, config: RunConfig) -> dict[str, Any]:
    """The curve, and what sums it up; the sums only of a run that took all its steps."""
    r = file.record
    if r.steps_sha256 is None or not r.steps_done:
        return {}
    lines = records.steps_of(file)
    curve = np.array([[line[name] for name in CURVE] for line in lines], dtype=float)
    losses, grad_norms = curve[:, 1], curve[:, 2]
    facts: dict[str, Any] = {"curve": curve, "last_loss": losses[-1]}
    if len(curve) == config.num_steps:
        known = grad_norms[~np.isnan(grad_norms)]  # a step that an overflow skipped has none
        facts["final_loss"] = losses[-steps_at_an_end(len(losses)) :].mean()
        facts["loss_area"] = losses.mean()
        facts["mean_grad_norm"] = known.mean() if known.size else None
    if r.evaluation:
        last = r.evaluation[-1]
        facts |= {"eval_loss": last.get("loss"), "accuracy": last.get("accuracy"), "perplexity": last.get("perplexity")}
    return facts


def _speed(r: Record, device: str) -> dict[str, Any]:
    facts: dict[str, Any] = {"model_flops_per_sequence": r.model_flops_per_sequence}
    oversubscribed = _is_oversubscribed(r, device)
    # Ranks that share a GPU would each count the whole of its energy.
    if r.energy_joules and None not in r.energy_joules and not oversubscribed:
        facts["energy_joules"] = sum(r.energy_joules)
        facts["joules_per_token"] = facts["energy_joules"] / r.tokens if r.tokens else None
    if why := quiet.why_untimed(r):
        return facts | {"why_untimed": why}
    facts["seconds_per_step"] = r.timing.median_seconds
    facts["seconds_lower"] = r.timing.lower_quartile_seconds
    facts["seconds_upper"] = r.timing.upper_quartile_seconds
    facts |= {name: getattr(r.timing, name) for name in ("samples_per_second", "tokens_per_second")}
    facts["tokens_per_second_per_gpu"] = r.timing.tokens_per_second / r.world_size
    if r.model_flops_per_sequence is not None:
        facts["model_flops_per_second"] = r.model_flops_per_sequence * r.timing.samples_per_second
        peak = peak_flops_per_second(r)
        if peak is not None and not oversubscribed:
            facts["mfu"] = facts["model_flops_per_second"] / r.world_size / peak
    return facts


def peak_flops_per_second(r: Record) -> float | None:
    """Of each GPU; None on a CPU, and where the GPUs are not known or differ."""
    names = {gpu["name"] for gpu in r.machine.get("gpus", [])}
    if r.proof is None or r.proof.device == "cpu" or len(names) != 1:
        return None
    gpu = hardware.find(names.pop())
    return gpu and hardware.peak_flops_per_second(gpu, r.proof.precision, r.machine.get("tf32"))


def _memory(r: Record, device: str) -> dict[str, Any]:
    """Peaks of the largest rank while it trained, not of building or evaluating the model."""
    gpus = r.machine.get("gpus", [])
    limit = (
        r.machine.get("host_memory_bytes") if device == "cpu" else min((g["memory_bytes"] for g in gpus), default=None)
    )
    facts: dict[str, Any] = {"device_memory_bytes": limit}
    if not r.peak_memory:
        return facts
    alive = None
    for kind in ("allocated_bytes", "reserved_bytes", "tensor_bytes", "resident_bytes"):
        ranks = _peaks(r, kind)
        if None in ranks:
            continue
        facts[f"peak_{kind}"] = max(ranks)
        if kind in ("allocated_bytes", "tensor_bytes"):
            facts["rank_tensor_bytes"] = alive = ranks
        elif kind == "resident_bytes" and alive is None:
            alive = ranks
    if alive and min(alive):
        facts["memory_imbalance"] = max(alive) / min(alive)
    return facts


def _peaks(r: Record, kind: str) -> list[int | None]:
    """Of each rank while it trained; None: not measured."""
    highest = [_peak(phases, kind) for phases in r.peak_memory]
    if kind == "tensor_bytes" and r.proof and r.proof.engine_class == "DistributedDataParallel":
        # Live tensors are those that Python reaches. The reducer's flat buckets, which live as long as the model, are
        # C++ tensors; `model_state_bytes` has those that no gradient is a view of, which Python would reach.
        states = r.model_state_bytes or [None] * len(highest)
        ranks = zip(highest, states, strict=True)
        return [None if None in (p, rank) else p + rank.communication_buffers for p, rank in ranks]
    return highest


def _peak(phases: dict[str, PeakMemory], kind: str) -> int | None:
    known = [getattr(phases[name], kind) for name in TRAINING_PHASES if name in phases]
    return max((value for value in known if value is not None), default=None)


def _model_states(r: Record) -> dict[str, Any]:
    if not r.model_state_bytes:
        return {}
    largest = max(r.model_state_bytes, key=lambda rank: rank.model_states)
    facts = {
        "model_state_bytes": largest.model_states,
        "parameter_bytes": largest.parameters,
        "gradient_bytes": largest.gradients,
        "optimizer_state_bytes": largest.optimizer_states,
        "communication_buffer_bytes": largest.communication_buffers,
        "num_ranks_proved": len(r.model_state_bytes),
    }
    if r.proof:
        facts["has_computed_buckets"] = has_computed_buckets(r)
    if r.proof and r.num_params:
        paper = paper_bytes(engine_of(r), r.num_params, "stepping")
        facts["paper_state_bytes"] = paper.total
        facts["paper_parameter_bytes"] = paper.parameters
        facts["paper_gradient_bytes"] = paper.gradients
        facts["paper_optimizer_state_bytes"] = paper.optimizer_states
    return facts


def _rank_parts(r: Record, device: str) -> list[dict[str, Any]] | None:
    """Of each rank: bytes by part as the optimizer steps, `host` of them off the GPU, and the peaks of the training.

    `resting`: the same parts between two steps.
    """
    if not r.model_state_bytes or not r.resting_state_bytes or not r.peak_memory:
        return None
    on_gpu = device != "cpu"
    highest, reserved = _peaks(r, "allocated_bytes" if on_gpu else "tensor_bytes"), _peaks(r, "reserved_bytes")
    ranks = []
    for stepping, resting, peak, kept in zip(
        r.model_state_bytes, r.resting_state_bytes, highest, reserved, strict=True
    ):
        ranks.append({**_parts(stepping, on_gpu), "resting": _parts(resting, on_gpu), "peak": peak, "reserved": kept})
    return None if any(rank["peak"] is None for rank in ranks) else ranks


def _parts(states: ModelStateBytes, on_gpu: bool) -> dict[str, int | None]:
    host = states.by_device.get("cpu", 0) if on_gpu else None
    return {**{part: getattr(states, part) for part in PARTS}, "host": host}


def _communication(r: Record) -> dict[str, Any]:
    """Of rank 0 in one step."""
    if r.collectives_per_step is None:
        return {}
    by_gloo = r.proof is not None and r.proof.backend == "gloo"
    return {
        "collective_bytes": sum(c.moved_bytes for c in r.collectives_per_step),
        "gloo_bytes": moved_by_gloo(r.collectives_per_step, r.world_size) if by_gloo else None,
        "collective_count": sum(c.count for c in r.collectives_per_step),
    }


def _proof(r: Record) -> dict[str, Any]:
    if r.proof is None:
        return {}
    names = ("zero_stage", "offload_optimizer_device", "offload_param_device", "engine_class", "optimizer_class")
    names += ("backend", "overlap_comm", "reduce_bucket_size", "partitioned_parameters", "gradient_clipping")
    names += ("precision", "micro_batch_size", "gradient_accumulation_steps")
    return {name: getattr(r.proof, name) for name in names}
