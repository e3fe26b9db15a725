"""Make a row of the table of all runs from the record of one run.

Predictions, and facts that depend on other runs, are added by other modules.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from study.config import NOT_TRAINED, RunConfig
from study.records import machine
from study.records.find import RecordFile
from study.records.schema import ModelStateBytes, Outcome, Proof, Record
from study.records.steps import steps_of
from zero_study.engines.readback.dtypes import TORCH_NAMES
from zero_study.errors import Refusal
from zero_study.models import SIZES, suited_buckets, swap_buffer_size

TRAINING_PHASES = ("first_step", "settling_steps", "steady_steps")
CURVE = ("step", "loss", "grad_norm", "learning_rate", "seconds", "tokens")
LIBRARIES = ("torch", "accelerate", "deepspeed", "transformers")
PARTS = tuple(name for name in ModelStateBytes.model_fields if name not in ("swapped", "by_device"))
STEPS_FIELDS = {"max_steps", "epochs"}  # replaced by `num_steps`, the resulting number of steps
STEPS_AT_AN_END = 10  # over which losses are averaged, because one small batch is noisy; fewer in a short run

# Settings that do not change what is trained: where a run writes, what it measures, and how the global batch is
# divided. The folder of the data does not count either, because the digest of the data is compared.
NOT_COMPARED = NOT_TRAINED | {"micro_batch_size"}

# The largest share of a machine's processor time that other programs may use. On an idle machine, the kernel and the
# runner of the study use 0.01 or 0.02.
MAX_FOREIGN_CPU_SHARE = 0.05

NO_TIME = "no step was timed"
REAL = 100e6  # parameters; smaller models only test the engines
SMALL = "Times of models under 100 million parameters say little about larger ones."

_shared: dict[str, dict[str, Any]] = {}  # thousands of runs have equal settings and share one dictionary


def row(file: RecordFile, outcome: Outcome | None) -> dict[str, Any]:
    """Return the row of a run in the table of all runs, as values by column.

    `outcome` is what the runner observed. Unless the outcome is ok, its status and message replace those of the record.
    """
    r = file.record
    config = RunConfig.model_validate(r.config)
    failure = r.failure.error.splitlines()[0] if r.failure and r.failure.error else None
    device = r.device
    return {
        "run_id": r.run_id,
        "study": outcome.study if outcome else None,
        "record": r,
        "command": r.command,
        "machine": r.machine,
        "box": r.box,
        "device": device,
        "workload": r.workload,
        "size": r.size,
        "strategy": r.strategy,
        "world_size": r.world_size,
        "seed": r.seed,
        "status": r.status if outcome is None or outcome.status == "ok" else outcome.status,
        "message": failure if outcome is None or (outcome.status == "ok" and failure) else outcome.message,
        "started_at": r.started_at,
        "share_of_others": share_of_others(r),
        "oversubscribed": _is_oversubscribed(r, device),
        "is_unproven": is_unproven(r),
        "mixed_code": r.mixed_code,
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
        **settings(config, r),
        **_learning(file, config),
        **_speed(r, device),
        **_memory(r, device),
        **_model_states(r),
        "rank_parts": _rank_parts(r, device),
        **_communication(r),
        **({name: getattr(r.proof, name) for name in _OF_PROOF} if r.proof else {}),
        "engine_fingerprint": engine_fingerprint(r),
    }


# ---------------------------------------------------------------- requested settings, and the verified engine


def settings(config: RunConfig, r: Record | Outcome) -> dict[str, Any]:
    """Return the requested settings of a run, and a digest that is equal for runs with equal settings.

    The digest covers everything that determines what a run trains, except for the seed, the global batch and the number
    of steps.
    """
    micro_batch_size, accumulation = config.batches(r.world_size)
    decisive = config.model_dump(mode="json", exclude={*NOT_COMPARED, "seed", "global_batch_size", *STEPS_FIELDS})
    decisive["init"] = config.effective_init
    weights_sha256 = r.weights_sha256 if isinstance(r, Record) else None
    since = {"weights": weights_sha256, "nudge_seed": config.nudge_seed, "perturb": config.perturb}
    since["fixed_order"] = config.fixed_order
    for name, value in since.items():
        if value is None:  # older records do not have these settings
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


def libraries(of_machine: dict[str, Any]) -> str | None:
    versions = of_machine.get("libraries", {})
    return ", ".join(f"{name} {versions[name]}" for name in LIBRARIES if versions.get(name)) or None


def require_proof(r: Record) -> Proof:
    """Return the proof of a run, which describes its verified engine. Raises Refusal if the record has no proof."""
    if r.proof is None:
        raise Refusal(f"{r.run_id}: its record does not describe the engine, so it cannot be compared. Run it again.")
    return r.proof


_OF_PROOF = (
    "zero_stage", "offload_optimizer_device", "offload_param_device", "engine_class", "optimizer_class", "backend",
    "overlap_comm", "reduce_bucket_size", "partitioned_parameters", "gradient_clipping", "precision",
    "micro_batch_size", "gradient_accumulation_steps",
)  # fmt: skip


def engine_kind(proof: Proof) -> str:
    """Return the kind of engine that a run used: deepspeed, fsdp, ddp or torch."""
    if proof.zero_stage is not None:
        return "deepspeed"
    if proof.distributed_type == "FSDP":
        return "fsdp"
    return "ddp" if proof.engine_class == "DistributedDataParallel" else "torch"


def is_unproven(r: Record) -> bool:
    """Return whether the record of an FSDP2 run does not say what was sharded. Older records do not say it."""
    return r.proof is not None and r.proof.distributed_type == "FSDP" and r.proof.sharding is None


def has_computed_buckets(r: Record) -> bool:
    """Return whether the bytes of DDP's buckets were computed from the parameters, not measured.

    This is so in older records. Their proof does not have `gradient_as_bucket_view`.
    """
    proof = require_proof(r)
    return engine_kind(proof) == "ddp" and proof.gradient_as_bucket_view is None


def computed_buckets(runs: Iterable[Record]) -> list[str]:
    """Return lines that list the runs in which DDP's bucket sizes were computed. Empty if all were measured."""
    old = sorted({r.run_id for r in runs if has_computed_buckets(r)})
    reason = "In these older runs, DDP's buckets were not measured, but computed from the parameters"
    return [f"{reason}: {', '.join(old)}.", ""] if old else []


def shown_adapter(r: Record) -> list[str]:
    """Return the words that describe a run's adapter in a heading. Empty if the run trained all weights."""
    if r.config["lora_rank"] is None:
        return []
    return [f"LoRA of rank {r.config['lora_rank']}", *(["weights in 4 bits"] if r.config["load_in_4bit"] else [])]


def model_heading(r: Record) -> str:
    return f"{r.workload} {r.size}, {require_proof(r).precision}, {r.num_params:,} parameters"


def hidden_size(r: Record) -> int:
    return SIZES.get(r.workload, {}).get(r.size, {}).get("hidden", 0)


# Settings in a proof that belong to the run, not to the strategy.
_OF_THE_RUN = {"gradient_accumulation_steps", "gradient_clipping", "train_micro_batch_size_per_gpu", "train_batch_size"}
_OF_THE_RUN |= {"bf16.enabled", "fp16.enabled"}


def engine_fingerprint(r: Record) -> dict[str, Any] | None:
    """Return whether the sizes of DDP's buckets were computed from the parameters, not measured.

    Runs of one strategy have equal fingerprints, even if their model, precision and number of processes differ. Values
    that depend on these are replaced by words such as "auto". The proof of older records lacks the settings.
    """
    if r.proof is None or r.proof.settings is None:
        return None
    proof, sharding, hidden = r.proof, r.proof.sharding, hidden_size(r)
    suited = {f"zero_optimization.{key}": value for key, value in suited_buckets(hidden).items()}
    suited["zero_optimization.offload_param.buffer_size"] = swap_buffer_size(hidden, r.world_size)
    engines = {
        key: "auto" if value == suited.get(key) else value
        for key, value in r.proof.settings.items()
        if key not in _OF_THE_RUN
    }
    if engines.get("communication_data_type") == TORCH_NAMES.get(proof.precision, "float32"):
        engines["communication_data_type"] = "as computed"
    return {
        "engine": engine_kind(proof),
        "stage": proof.zero_stage,
        "offload_optimizer": proof.offload_optimizer_device,
        "offload_param": proof.offload_param_device,
        "gradient_as_bucket_view": bool(proof.gradient_as_bucket_view),
        "reshard_after_forward": sharding and sharding.reshard_after_forward,
        "replicas": num_replicas(proof),
        **engines,
    }


def num_replicas(proof: Proof) -> int:
    """Return how many complete copies of the model FSDP2 keeps, each sharded over a group of ranks."""
    return proof.sharding.mesh[0] if proof.sharding and len(proof.sharding.mesh) > 1 else 1


# ---------------------------------------------------------------- learning


def steps_at_an_end(num_steps: int) -> int:
    """Return over how many steps the losses at the beginning, or at the end, of a run are averaged."""
    return max(1, min(STEPS_AT_AN_END, num_steps // 3))


def _learning(file: RecordFile, config: RunConfig) -> dict[str, Any]:
    """Return the losses of a run by step, and the metrics of learning.

    Means over the curve are included only if the run took all its steps.
    """
    r = file.record
    if r.steps_sha256 is None or not r.steps_done:
        return {}
    lines = steps_of(file)
    curve = np.array([[line[name] for name in CURVE] for line in lines], dtype=float)
    losses, grad_norms = curve[:, 1], curve[:, 2]
    facts: dict[str, Any] = {"curve": curve, "last_loss": losses[-1]}
    if len(curve) == config.num_steps:
        finite_norms = grad_norms[~np.isnan(grad_norms)]  # a step that was skipped because of an overflow has no norm
        facts["mean_final_loss"] = losses[-steps_at_an_end(len(losses)) :].mean()
        facts["loss_area"] = losses.mean()
        facts["mean_grad_norm"] = finite_norms.mean() if finite_norms.size else None
    if r.evaluation:
        last = r.evaluation[-1]
        facts |= {"eval_loss": last.get("loss"), "accuracy": last.get("accuracy"), "perplexity": last.get("perplexity")}
    return facts


# ---------------------------------------------------------------- speed


def share_of_others(r: Record) -> float | None:
    """Return the share of processor time that other programs and virtual machines used while a run trained.

    None if the share is not known. None on a GPU, because other processes do not slow it down. None on several
    machines, because the record covers only the first of them.
    """
    if r.load is None or r.device != "cpu" or r.other_machines:
        return None
    return (r.load.other_seconds + r.load.stolen_seconds) / (r.load.seconds * r.load.num_processors)


def why_untimed(r: Record) -> str | None:
    """Return why a run's times are not compared with those of other runs. None if they are compared."""
    if r.timing is None or r.timing.median_seconds is None:
        return NO_TIME
    if (share_of_others(r) or 0.0) > MAX_FOREIGN_CPU_SHARE:  # an unknown share counts as 0
        return f"other programs took more than {100 * MAX_FOREIGN_CPU_SHARE:g} % of the processors"
    if math.isfinite(r.network_rate or math.inf):
        return "the network had a limited rate (--view communication compares such runs)"
    return None


def _is_oversubscribed(r: Record, device: str) -> bool:
    if r.world_size > 1 and r.config.get("share_device"):
        return True
    places: float | None
    if device == "cpu":
        places, needed = r.usable_cores, r.world_size * (r.machine.get("num_threads_per_process") or 1)
    else:
        places, needed = len(r.machine.get("gpus", [])), r.world_size
    return bool(places) and needed > (places or 0)


def _speed(r: Record, device: str) -> dict[str, Any]:
    facts: dict[str, Any] = {"model_flops_per_sequence": r.model_flops_per_sequence}
    # Each of several ranks that share a GPU would count the energy of the whole GPU.
    joules = [joules_of_rank for joules_of_rank in r.energy_joules or () if joules_of_rank is not None]
    if joules and len(joules) == len(r.energy_joules or ()) and not _is_oversubscribed(r, device):
        facts["energy_joules"] = sum(joules)
        facts["joules_per_token"] = facts["energy_joules"] / r.tokens if r.tokens else None
    if reason := why_untimed(r):
        return facts | {"why_untimed": reason}
    timing = r.timing
    assert timing is not None  # `why_untimed` has checked this
    assert timing.samples_per_second is not None
    assert timing.tokens_per_second is not None
    facts["seconds_per_step"] = timing.median_seconds
    facts["seconds_lower"] = timing.lower_quartile_seconds
    facts["seconds_upper"] = timing.upper_quartile_seconds
    facts |= {name: getattr(timing, name) for name in ("samples_per_second", "tokens_per_second")}
    facts["tokens_per_second_per_gpu"] = timing.tokens_per_second / r.world_size
    if r.model_flops_per_sequence is not None:
        facts["model_flops_per_second"] = r.model_flops_per_sequence * timing.samples_per_second
    return facts


# ---------------------------------------------------------------- bytes


def _memory(r: Record, device: str) -> dict[str, Any]:
    """Return the memory of the device, and the peaks of the rank with the largest peak during training.

    Building and evaluating the model do not count.
    """
    gpus = r.machine.get("gpus", [])
    limit = (
        r.machine.get("host_memory_bytes") if device == "cpu" else min((g["memory_bytes"] for g in gpus), default=None)
    )
    facts: dict[str, Any] = {"device_memory_bytes": limit}
    if not r.peak_memory:
        return facts
    alive: list[int] | None = None  # peak bytes of each rank
    for kind in ("allocated_bytes", "reserved_bytes", "tensor_bytes", "resident_bytes"):
        ranks = [peak for peak in _peaks(r, kind) if peak is not None]
        if len(ranks) < len(r.peak_memory):
            continue
        facts[f"peak_{kind}"] = max(ranks)
        if kind in ("allocated_bytes", "tensor_bytes"):
            facts["rank_tensor_bytes"] = ranks
            alive = ranks
        elif kind == "resident_bytes" and alive is None:
            alive = ranks
    if alive and (least := min(alive)):
        facts["memory_imbalance"] = max(alive) / least
    return facts


def _peaks(r: Record, kind: str) -> list[int | None]:
    """Return the peak of each rank during training, in bytes. None for a rank that did not measure it."""
    highest: list[int | None] = []
    for phases in r.peak_memory or ():
        measured = [getattr(phases[name], kind) for name in TRAINING_PHASES if name in phases]
        highest.append(max((value for value in measured if value is not None), default=None))
    if kind == "tensor_bytes" and r.proof and r.proof.engine_class == "DistributedDataParallel":
        # Live tensors are those that Python can reach. DDP's flat buckets are C++ tensors, so they have to be added.
        # Only buckets of which no gradient is a view are added, because Python reaches the others through the gradient.
        if r.model_state_bytes is None:
            return [None] * len(highest)
        ranks = zip(highest, r.model_state_bytes, strict=True)
        return [None if peak is None else peak + rank.communication_buffers for peak, rank in ranks]
    return highest


def process_bytes(r: Record) -> int | None:
    """Return the memory of the largest process of a run during training, in bytes. None if it was not measured."""
    return max((peak for peak in _peaks(r, "resident_bytes") if peak is not None), default=None)


def _model_states(r: Record) -> dict[str, Any]:
    if not r.model_state_bytes:
        return {}
    largest = max(r.model_state_bytes, key=lambda rank: rank.model_states)
    return {
        "model_state_bytes": largest.model_states,
        "parameter_bytes": largest.parameters,
        "gradient_bytes": largest.gradients,
        "optimizer_state_bytes": largest.optimizer_states,
        "communication_buffer_bytes": largest.communication_buffers,
        "num_ranks_proved": len(r.model_state_bytes),
        "has_computed_buckets": has_computed_buckets(r) if r.proof else None,
    }


def _rank_parts(r: Record, device: str) -> list[dict[str, Any]] | None:
    """Return each rank's bytes of model states by part, and its peaks. None if they were not measured.

    The parts are those at the moment when the optimizer steps. `host` is the number of these bytes that are in host
    memory instead of on the GPU, None on a CPU. `resting` has the same parts between two steps.
    """
    if not r.model_state_bytes or not r.resting_state_bytes or not r.peak_memory:
        return None
    on_gpu = device != "cpu"
    highest, reserved = _peaks(r, "allocated_bytes" if on_gpu else "tensor_bytes"), _peaks(r, "reserved_bytes")
    moments = zip(r.model_state_bytes, r.resting_state_bytes, highest, reserved, strict=True)
    ranks = [
        {**_parts(stepping, on_gpu), "resting": _parts(resting, on_gpu), "peak": peak, "reserved": reserved_bytes}
        for stepping, resting, peak, reserved_bytes in moments
    ]
    return None if None in highest else ranks


def _parts(states: ModelStateBytes, on_gpu: bool) -> dict[str, int | None]:
    host = states.by_device.get("cpu", 0) if on_gpu else None
    return {**{part: getattr(states, part) for part in PARTS}, "host": host}


def _communication(r: Record) -> dict[str, Any]:
    """Return the bytes and the number of the collective operations of rank 0 in one step.

    Empty if they were not measured.
    """
    if r.collectives_per_step is None:
        return {}
    return {
        "collective_bytes": sum(c.moved_bytes for c in r.collectives_per_step),
        "collective_count": sum(c.count for c in r.collectives_per_step),
    }
