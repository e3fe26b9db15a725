"""What does theory need to know of a recorded run: its engine, its model's shape and its job?"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from study.models import SIZES, suited_buckets, swap_buffer_size
from study.records.schema import Record
from study.theory import shapes
from study.theory.case import Engine, Job, parameter_bytes
from study.theory.shapes import ModelShape


def engine_of(r: Record) -> Engine:
    """The engine as the run proved it."""
    proof = r.proof
    kind = "ddp" if proof.engine_class == "DistributedDataParallel" else "torch"
    hidden = _hidden(r)
    sharding, is_fsdp = proof.sharding, proof.distributed_type == "FSDP"
    accumulation = "fp32" if parameter_bytes(proof.precision) == 4 else r.config["accumulation_dtype"]
    return Engine(
        kind="deepspeed" if proof.zero_stage is not None else "fsdp" if is_fsdp else kind,
        zero_stage=3 if is_fsdp else proof.zero_stage or 0,
        world_size=r.world_size,
        precision=proof.precision,
        accumulation_bytes=4 if accumulation == "fp32" else 2,
        offload_optimizer=proof.offload_optimizer_device,
        offload_param=proof.offload_param_device,
        reduce_bucket_size=proof.reduce_bucket_size or 0,
        persistence_threshold=proof.param_persistence_threshold or 0,
        prefetch_bucket_size=proof.prefetch_bucket_size or 0,
        max_live_parameters=proof.max_live_parameters or 0,
        max_reuse_distance=proof.max_reuse_distance or 0,
        sub_group_size=proof.sub_group_size or Engine.sub_group_size,  # records from before the proof had it
        secondary_partition_size=proof.secondary_partition_size or 1,
        param_swap_buffer_size=swap_buffer_size(hidden, r.world_size) if proof.offload_param_device == "nvme" else 0,
        overlap_comm=bool(proof.overlap_comm),
        multi_rank_allreduce=proof.use_multi_rank_bucket_allreduce is not False,
        reshard_after_forward=sharding is None or sharding.reshard_after_forward,
        replicas=sharding.mesh[0] if sharding and len(sharding.mesh) > 1 else 1,
        reduces_in_fp32=sharding is not None and sharding.reduce_dtypes == ["float32"],
        gradient_as_bucket_view=bool(proof.gradient_as_bucket_view),
    )


def accumulates(r: Record) -> bool:
    """Whether a step of a run has more than one micro step."""
    return r.proof.gradient_accumulation_steps > 1


def _hidden(r: Record) -> int:
    return SIZES.get(r.workload, {}).get(r.size, {}).get("hidden", 0)


# Of the settings in a proof: what the run says for every strategy, not what tells one strategy from another.
_OF_THE_RUN = {"gradient_accumulation_steps", "gradient_clipping", "train_micro_batch_size_per_gpu", "train_batch_size"}
_OF_THE_RUN |= {"bf16.enabled", "fp16.enabled"}
_COMPUTED_IN = {"bf16": "bfloat16", "fp16": "float16"}


def proven_strategy(r: Record) -> dict[str, Any] | None:
    """What the engine was, whatever the strategy is called; None in records from before the proof had all of it.

    Equal for runs of one strategy whatever their model, precision and number of processes: what follows from these
    is written as such.
    """
    if r.proof is None or r.proof.settings is None:
        return None
    engine, sharding, settings = engine_of(r), r.proof.sharding, dict(r.proof.settings)
    hidden = _hidden(r)
    suited = {f"zero_optimization.{key}": value for key, value in suited_buckets(hidden).items()}
    suited["zero_optimization.offload_param.buffer_size"] = swap_buffer_size(hidden, r.world_size)
    settings = {
        key: "auto" if value == suited.get(key) else value for key, value in settings.items() if key not in _OF_THE_RUN
    }
    if settings.get("communication_data_type") == _COMPUTED_IN.get(r.proof.precision, "float32"):
        settings["communication_data_type"] = "as computed"
    return {
        "engine": engine.kind,
        "stage": r.proof.zero_stage,
        "offload_optimizer": engine.offload_optimizer,
        "offload_param": engine.offload_param,
        "gradient_as_bucket_view": engine.gradient_as_bucket_view,
        "reshard_after_forward": sharding and sharding.reshard_after_forward,
        "replicas": engine.replicas,
        **settings,
    }


def is_unproven(r: Record) -> bool:
    """Say whether FSDP2 ran before the proof said what it sharded."""
    return r.proof is not None and r.proof.distributed_type == "FSDP" and r.proof.sharding is None


def computed_buckets(records: Iterable[Record]) -> list[str]:
    """Lines for a page, none where all is measured: in which runs were DDP's buckets computed?"""
    old = sorted({r.run_id for r in records if has_computed_buckets(r)})
    said = "DDP's buckets are computed from the parameters, not measured, in these runs, which are older than that"
    return [f"{said} measurement: {', '.join(old)}.", ""] if old else []


def has_computed_buckets(r: Record) -> bool:
    """Whether a run is from before DDP's buckets were measured, which is when the proof began to tell their kind."""
    return engine_of(r).kind == "ddp" and r.proof.gradient_as_bucket_view is None


def shape_of(r: Record) -> ModelShape | None:
    """The shape of a run's model; None where the record's number of parameters is not the workload's model.

    Also None where FSDP2 ran and its proof does not say what it sharded: theory has no engine to hold it against.
    """
    known = SIZES.get(r.workload, {}).get(r.size)
    if known is None or is_unproven(r):
        return None
    architecture = shapes.architecture_of(r.workload, r.size)
    shape = (architecture, known["layers"], known["hidden"])
    try:
        sizes = shapes.parameter_sizes(*shape, known["positions"], r.num_params)
    except ValueError:
        return None
    vocabulary = sizes.matrices[0] // known["hidden"]  # rows of the embedding, which comes first
    return shapes.plain(f"{r.workload} {r.size}", *shape, known["heads"], known["positions"], vocabulary)


def job_of(r: Record) -> Job:
    """What a run computed in a step."""
    return Job(
        micro_batch_size=r.proof.micro_batch_size,
        sequence_length=r.config["sequence_length"],
        gradient_accumulation_steps=r.proof.gradient_accumulation_steps,
        activation_checkpointing=r.config["activation_checkpointing"],
        attention=r.config["attention"],
        dropout=r.config["dropout"] > 0,
        device="cpu" if r.proof.device == "cpu" else "gpu",
    )
