"""The peak memory of one rank in an optimizer step: model states, buffers and activations together.

The memory of a step can be highest at five moments: at the start of the backward pass, in the backward pass of the
last block, in that of the first block, at the end of the backward pass, and in the optimizer step. The bytes of each
moment are a sum, and the peak is the largest sum. Comments name the files below deepspeed/runtime/zero/ of release
0.19.8 in which DeepSpeed allocates its buffers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from study.theory import activations
from study.theory.communication.buckets import ENGINE_BUCKET_ELEMENTS
from study.theory.communication.model_order import model_of
from study.theory.communication.sharded import whole_elements
from study.theory.engine import Engine, Job, Numbers
from study.theory.model_states import (
    STATE_PARTS,
    StatePart,
    StepPhase,
    accumulated_on_host,
    engine_differences,
    is_bf16_optimizer,
    largest_sub_group,
    master_bytes,
    paper_bytes,
    reduced_gradient_bytes,
    secondary_bytes,
)
from study.theory.shapes import ModelShape

PeakPart = Literal[
    "parameters",
    "gradients",
    "optimizer_states",
    "communication_buffers",
    "gathered_parameters",
    "activations",
    "logits",
    "temporary_buffers",
]
PEAK_PARTS: tuple[PeakPart, ...] = get_args(PeakPart)
PEAK_MOMENTS = ("loss", "last block", "first block", "end of backward", "optimizer step")
# Pinned on the host: zero/offload_config.py, buffer_count of parameters; of the optimizer 4, and as measured 2 more.
PARAM_SWAP_BUFFERS = 5
OPTIMIZER_SWAP_BUFFERS = 6


@dataclass(frozen=True)
class Peak:
    """Bytes of one rank at the moment of its peak, by part."""

    parts: dict[PeakPart, Numbers]  # on the device that computes
    moment: Numbers  # index into PEAK_MOMENTS
    host_bytes: Numbers  # offloaded to the host, at the host's own highest
    host_bytes_then: Numbers  # at this moment
    disk_bytes: float  # offloaded to a disk

    @property
    def total(self) -> Numbers:
        return sum(self.parts.values())


@dataclass(frozen=True)
class States:
    """Model states of one rank in bytes, by the device that stores them."""

    device: dict[StatePart, float]
    host: float
    disk: float


def states(engine: Engine, shape: ModelShape, phase: StepPhase, rank: int = 0) -> States:
    """Predict one rank's model states and permanent buffers, by device (model_states.py has the formulas).

    The host buffers of gradient accumulation are not included; `peak` adds them.
    """
    paper = paper_bytes(engine, shape.num_params, phase)
    on_device: dict[StatePart, float] = {part: getattr(paper, part) for part in STATE_PARTS}
    disk = 0.0
    for difference in engine_differences(engine, shape.parameters, rank, phase, accumulates=False):
        if difference.reason != "swap-buffers":  # all of them are counted below
            on_device[difference.part] += difference.num_bytes
        if difference.reason == "on-disk":
            disk -= difference.num_bytes
    host = 0.0
    persistent = 0.0
    if engine.offload_optimizer != "none":  # gradients move with the states that they update
        host += on_device["optimizer_states"] + on_device["gradients"]
        on_device["optimizer_states"] = on_device["gradients"] = 0.0
        if engine.zero_stage < 3:  # stage_1_and_2.py: what arrives is staged, and accumulated beside the fp32 gradients
            host += engine.parameter_bytes * (max(shape.parameters.matrices) + shape.num_params / engine.world_size)
        if engine.offload_optimizer == "nvme":
            host += OPTIMIZER_SWAP_BUFFERS * 4 * largest_sub_group(engine, shape.parameters)
    if engine.offload_param == "nvme":
        host += PARAM_SWAP_BUFFERS * engine.parameter_bytes * engine.param_swap_buffer_size
    if engine.offload_param != "none":
        if engine.world_size > 1 and phase == "resting":  # what of stage 3 stays whole, as model_states.py counts it
            small = sum(n for group in shape.parameters.groups for n in group if n <= engine.persistence_threshold)
            persistent = engine.parameter_bytes * small
        host += on_device["parameters"] - persistent
        on_device["parameters"] = persistent
    return States(on_device, host, disk)


RANKS_LOOKED_AT = 64  # parameters that are larger than a partition lie in front


def fullest_rank(engine: Engine, shape: ModelShape) -> int:
    """Return the rank that uses the most memory.

    Usually this is the first rank, which has the largest shares. At stages 1 and 2 all shares are equally large. There
    it is the rank with the most parameters that cross an edge of its partition. If several ranks have as many, it is
    the last of them: its gradients are computed first, so its buffer for them exists for the longest time.
    """
    if engine.kind != "deepspeed" or engine.zero_stage not in (1, 2):
        return 0
    ranks = {*range(min(engine.world_size, RANKS_LOOKED_AT)), engine.world_size - 1}
    return int(max(ranks, key=lambda rank: (reduced_gradient_bytes(engine, shape.parameters, rank), rank)))


def peak(shape: ModelShape, engine: Engine, job: Job, rank: int | None = None) -> Peak:
    """Predict the peak of a steady optimizer step, of one rank or of the rank that uses the most memory."""
    rank = fullest_rank(engine, shape) if rank is None else rank
    resting = states(engine, shape, "resting", rank)
    stepping = states(engine, shape, "stepping", rank)
    rows = _moments(shape, engine, job, rank, resting, stepping)
    accumulated: Numbers = accumulated_on_host(engine, shape.parameters, rank)
    if accumulated:
        accumulated = accumulated * (np.asarray(job.gradient_accumulation_steps) > 1)
    grid = np.broadcast_shapes(np.shape(job.tokens), np.shape(job.gradient_accumulation_steps))
    stacked = np.array([[np.broadcast_to(value, grid) for value in row.values()] for row in rows], dtype=float)
    on_host = [*[resting.host + accumulated] * (len(rows) - 1), stepping.host + accumulated]
    hosts = np.array([np.broadcast_to(host, grid) for host in on_host])
    # A CPU's "device" is the host.
    highest = (stacked.sum(axis=1) + (hosts if job.device == "cpu" else 0.0)).argmax(axis=0)
    chosen = np.take_along_axis(stacked, highest[None, None], axis=0)[0]
    parts = {part: value if grid else float(value) for part, value in zip(PEAK_PARTS, chosen, strict=True)}
    then = np.take_along_axis(hosts, highest[None], axis=0)[0]
    host = max(resting.host, stepping.host) + (accumulated if np.ndim(accumulated) else float(accumulated))
    return Peak(parts, highest if grid else int(highest), host, then, resting.disk)


def _moments(
    shape: ModelShape, engine: Engine, job: Job, rank: int, resting: States, stepping: States
) -> list[dict[PeakPart, Numbers]]:
    """List the bytes in memory at each of PEAK_MOMENTS."""
    temporary = activations.temporary_bytes(shape, engine, job)
    logits = activations.logit_bytes(shape, job)
    at_loss, in_last, in_first = _activations(shape, engine, job, logits)
    gradients = _gradients(shape, engine, job, rank)
    secondary = secondary_bytes(engine, shape.parameters)  # made as parameters are released
    whole = _whole_bytes(shape, engine, job)
    # Where forward releases nothing, there is no secondary copy before backward does.
    released = secondary if engine.max_live_parameters < shape.num_params else 0.0
    bucket = gradients.bucket
    head = 0 if shape.is_pooled else gradients.size * shape.output_width * shape.hidden
    # The embedding's gradient is the last to come, unless the embedding is the head too, whose comes first.
    embeddings: float = (
        0 if shape.has_tied_head or not gradients.unreduced else gradients.size * shape.vocabulary * shape.hidden
    )
    if engine.kind == "fsdp":  # and with it what surrounds the blocks is reduced
        embeddings += gradients.accumulated * (shape.outside_params - _tied_unit(shape, engine)) / shape.num_params
    # An accumulated gradient is there from the first micro step on.
    is_accumulating = np.asarray(job.gradient_accumulation_steps) > 1
    before = gradients.accumulated * is_accumulating
    # With views, what was accumulated apart is let go of as backward copies it into the buckets.
    still_apart = 0.0 if engine.gradient_as_bucket_view else before
    return [
        _row(resting, activations=at_loss, logits=logits, gathered=whole.at_loss + released, gradients=before),
        _row(
            resting,
            activations=in_last,
            temporary=temporary,
            gathered=whole.last_block + released,
            gradients=before + head + gradients.early,
            buffers=bucket if gradients.first_bucket is None else gradients.first_bucket,
        ),
        _row(
            resting,
            activations=in_first,
            temporary=temporary,
            gathered=whole.first_block + secondary,
            gradients=np.maximum(still_apart, gradients.unreduced - embeddings),
            buffers=bucket,
        ),
        _row(
            resting,
            gathered=whole.at_end + secondary,
            gradients=np.maximum(still_apart, gradients.unreduced),
            buffers=0.0 if engine.kind == "fsdp" else bucket,
            temporary=gradients.flushed + gradients.added * is_accumulating,
        ),
        _row(stepping, temporary=gradients.stepping + _optimizer_bytes(engine, shape)),
    ]


def _activations(shape: ModelShape, engine: Engine, job: Job, logits: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    """Bytes of activations, with autocast's casts, at the loss and in backward of the last and of the first block."""
    block = activations.block_bytes(shape, engine, job)
    outside = activations.outside_bytes(shape, engine, job)
    casts = activations.cast_bytes(shape, engine)
    recomputed = job.recomputed
    saved = block
    if recomputed:
        saved = recomputed * activations.checkpoint_bytes(shape, engine, job) + (1 - recomputed) * block
    # Autocast's 16-bit weights live as long as what is kept for backward; checkpointed blocks keep none, so that they
    # go as forward ends, before the loss makes more of the logits than a cast.
    until_loss = np.maximum(casts - (1 - 4 / activations.LOGIT_BYTES["eager"]) * logits, 0.0) if recomputed else casts
    at_loss = shape.layers * saved + outside + until_loss
    # A checkpointed block is computed again, beside its input, which all others still keep.
    in_last = shape.layers * saved + outside + (recomputed * (block + casts / shape.layers) if recomputed else casts)
    in_first = outside + (0 if recomputed else casts) + block
    return at_loss, in_last, in_first


def _optimizer_bytes(engine: Engine, shape: ModelShape) -> float:
    """Bytes that torch's unfused AdamW allocates in its step: the root of all second moments.

    torch/optim/adamw.py, _multi_tensor_adamw. DeepSpeed brings fused kernels of its own.
    """
    if engine.optimizer_kernel != "foreach" or engine.kind == "deepspeed" or engine.offload_optimizer != "none":
        return 0.0
    size = master_bytes(engine) if engine.kind == "fsdp" else engine.parameter_bytes
    return size * shape.num_params / (engine.num_shards if engine.zero_stage else 1)


def _row(
    model_states: States,
    *,
    activations: Numbers = 0.0,
    logits: Numbers = 0.0,
    temporary: Numbers = 0.0,
    gathered: Numbers = 0.0,
    gradients: Numbers = 0.0,
    buffers: Numbers = 0.0,
) -> dict[PeakPart, Numbers]:
    """Add up one moment: the model states in memory and the other parts, in the order of PEAK_PARTS."""
    return {
        "parameters": model_states.device["parameters"],
        "gradients": model_states.device["gradients"] + gradients,
        "optimizer_states": model_states.device["optimizer_states"],
        "communication_buffers": model_states.device["communication_buffers"] + buffers,
        "gathered_parameters": gathered,
        "activations": activations,
        "logits": logits,
        "temporary_buffers": temporary,
    }


@dataclass(frozen=True)
class _Gradients:
    """Bytes that the backward pass adds to the memory that is in use between steps."""

    size: int  # per element, as autograd makes them
    accumulated: float  # there between micro steps
    unreduced: float  # all of them, before they are reduced
    bucket: float  # allocated as backward begins
    flushed: float  # at the end of backward, beside bucket and gradients
    first_bucket: float | None = None  # in the last block's backward, the first of all; None: as in every other's
    early: float = 0.0  # allocated whole in the last block's backward, before most of it is filled
    stepping: float = 0.0  # as the optimizer steps, beside what model_states.py says
    added: float = 0.0  # at the end of backward, of the micro step that is added to those before


def _gradients(shape: ModelShape, engine: Engine, job: Job, rank: int) -> _Gradients:
    psi, size = shape.num_params, engine.parameter_bytes
    largest = size * max(shape.parameters.matrices)
    # A tied embedding's two gradients are there at once with their sum.
    tied = 2 * size * shape.vocabulary * shape.hidden if shape.has_tied_head else 0
    if engine.gradient_as_bucket_view:  # which rest: what backward makes is copied there, and let go of
        return _Gradients(size, size * psi, 0, 0, max(tied, largest), added=largest)
    if engine.kind in ("torch", "ddp"):
        return _Gradients(size, size * psi, size * psi, 0, tied, added=largest)
    if engine.kind == "fsdp":
        return _fsdp_gradients(shape, engine, job)
    if engine.zero_stage == 0:
        flat = size * min(psi, ENGINE_BUCKET_ELEMENTS)
        stepping = flat if engine.world_size > 1 else 0
        return _Gradients(size, size * psi, size * psi, 0, tied, stepping=stepping, added=largest)
    if engine.zero_stage == 3:
        return _stage_3_gradients(shape, engine, job, tied)
    return _stage_1_and_2_gradients(shape, engine, rank, tied)


def _stage_1_and_2_gradients(shape: ModelShape, engine: Engine, rank: int, tied: float) -> _Gradients:
    """Follow DeepSpeed's stage_1_and_2.py."""
    psi, size = shape.num_params, engine.parameter_bytes
    largest = max(shape.parameters.matrices)
    in_fp32 = size == 2 and engine.accumulation_bytes == 4
    # average_tensor flattens the bucket, and casts that to the type that is communicated.
    copies = size + (4 if in_fp32 else 0)
    if is_bf16_optimizer(engine):  # has no bucket, and its fp32 gradients rest
        return _Gradients(size, 0, size * psi, 0, max(tied, copies * min(psi, ENGINE_BUCKET_ELEMENTS)))
    staged, reduced = 0, reduced_gradient_bytes(engine, shape.parameters, rank)
    if engine.offload_optimizer != "none":  # one parameter's gradient (temp_grad_buffer_for_gpu_offload)
        staged, reduced = size * largest, 0.0
    in_bucket = min(psi, engine.reduce_bucket_size)
    bucket = (2 if engine.overlap_comm else 1) * size * engine.reduce_bucket_size + staged
    if engine.zero_stage == 1 and not engine.overlap_comm:
        # After backward, all at once; what is tied is still there. What bf16 gradients were added to in fp32 is not let
        # go of as the bucket fills, and the bucket is of its type.
        if in_fp32:
            bucket = 4 * engine.reduce_bucket_size + staged
            return _Gradients(size, 4 * psi, 4 * psi, bucket, tied + 4 * in_bucket)
        return _Gradients(size, size * psi, size * psi, bucket, tied + max(0, copies * in_bucket - size * psi))
    if not engine.multi_rank_allreduce:
        # Bucket by bucket to the owners, who put what is theirs into a buffer that is as large as all of it from the
        # first on (copy_grads_in_partition), beside what was accumulated. At the end the largest is left, which is
        # reduced in place; what is added in fp32 is cast before, a rank's share of it (_add_to_grad_partition_buffer).
        early = reduced if _owns_last_block(shape, engine, rank) else 0.0
        cast = 4 * min(largest, -(-psi // engine.world_size)) if in_fp32 else 0
        return _Gradients(
            size, reduced, 0, bucket, reduced + tied + size * largest + (0 if tied else cast), early=early
        )
    return _Gradients(size, reduced, 0, bucket, max(tied + size * largest, copies * in_bucket))


def _owns_last_block(shape: ModelShape, engine: Engine, rank: int) -> bool:
    """Return whether a rank's partition has the gradients that are computed first, more than fit into a bucket."""
    model = model_of(shape, autocast=False)
    last = [item for item in model.blocks[-1] if not isinstance(item, str)]
    if sum(p.numel for module in last for p in module) <= engine.reduce_bucket_size:
        return False
    shares = [-(-sum(p.numel for p in group) // engine.world_size) for group in model.groups]
    return any(
        p.start < shares[p.group] * (rank + 1) and p.end > shares[p.group] * rank for module in last for p in module
    )


def _stage_3_gradients(shape: ModelShape, engine: Engine, job: Job, tied: float) -> _Gradients:
    """Follow stage3.py: the bucket is permanent, and reduce_scatter_coalesced copies its content."""
    size, psi = engine.parameter_bytes, shape.num_params
    largest = size * max(shape.parameters.matrices)
    on_gloo = job.device == "cpu" and engine.world_size > 1
    if largest > size * engine.reduce_bucket_size:  # reduced by itself and in place, beside its parameter
        flushed = 2 * largest + max(tied, largest if on_gloo else 0)
    else:
        in_bucket = size * min(psi, engine.reduce_bucket_size)
        flushed = max(largest + tied, in_bucket + largest + (in_bucket if on_gloo else 0))
    return _Gradients(size, 0, 0, 0, flushed)


def _around(shape: ModelShape) -> int:
    """Elements outside the blocks that FSDP2 keeps gathered throughout a micro step, without a separate embedding."""
    return shape.outside_params - (0 if shape.has_tied_head else shape.vocabulary * shape.hidden)


def _tied_unit(shape: ModelShape, engine: Engine) -> int:
    """Elements of FSDP2's last unit if the head is tied to the embedding.

    This unit stays gathered until the backward pass ends, and has no shard of its gradients until then. Runs and traces
    without tied weights, and those on one rank, have no such unit.
    """
    return _last_unit(shape) if shape.has_tied_head and engine.num_shards > 1 else 0


def _last_unit(shape: ModelShape) -> int:
    """Elements of the unit whose gradients FSDP2 reduces last: the embedding, or everything outside the blocks."""
    return max(shape.outside_params - _around(shape), _around(shape))


def _fsdp_gradients(shape: ModelShape, engine: Engine, job: Job) -> _Gradients:
    """Follow torch.distributed.fsdp: a unit's gradients and their copy exist until the next unit's do.

    The parameters outside the blocks come last: the embedding by itself, or with the others if it is tied to the head.
    """
    size, master = engine.compute_bytes, master_bytes(engine)
    on_gloo = job.device == "cpu" and engine.num_shards > 1
    reduced = 4 if engine.reduces_in_fp32 else size
    sharded = 0.0 if engine.offload_param != "none" else master * shape.num_params / engine.num_shards
    last, tied = _last_unit(shape), _tied_unit(shape, engine)
    return _Gradients(
        size,
        accumulated=sharded,
        # Several ranks copy a unit's gradients in a loop, whose variable keeps the last: the embedding's
        # (foreach_reduce).
        unreduced=sharded * (1 - tied / shape.num_params)
        + size * (shape.outside_params if engine.num_shards > 1 else _around(shape)),
        # One block's gradients, as far as its feed-forward part, and what was made of the block's before it.
        bucket=size * _feed_forward(shape) + reduced * shape.block_params,
        first_bucket=size * _feed_forward(shape),
        # Beside what the first block's reduction worked on, kept until the next waits for it (ReduceScatterState).
        flushed=reduced * (last * (2 if on_gloo else 1) + (shape.block_params if tied else 0)),
        # Replicas' all-reduces keep what they worked on until backward ends (_fsdp_param_group.py, AllReduceState).
        added=master * (last if engine.replicas == 1 else shape.num_params) / engine.num_shards,
    )


def _feed_forward(shape: ModelShape) -> int:
    """Elements of a block without its attention. The gradients of attention are computed after these."""
    return shape.block_params - 2 * shape.hidden * shape.head_size * (shape.heads + shape.kv_heads)


@dataclass(frozen=True)
class _Whole:
    """Bytes of gathered parameters, which exist in addition to their shards, by moment."""

    at_loss: float = 0.0
    last_block: float = 0.0
    first_block: float = 0.0
    at_end: float = 0.0


def _whole_bytes(shape: ModelShape, engine: Engine, job: Job) -> _Whole:
    """Return the bytes of gathered parameters by moment, without the secondary copy."""
    if engine.kind == "fsdp":
        # What surrounds the blocks stays; in backward one block computes, and the next is there ahead of it.
        size, around = engine.compute_bytes, _around(shape)
        ahead = shape.outside_params - around if engine.num_shards > 1 else 0  # an embedding, before its turn
        first = size * (around + ahead + shape.block_params)
        if not engine.reshard_after_forward:
            return _Whole(size * shape.num_params, size * shape.num_params, first, size * around)
        return _Whole(size * around, size * (around + 2 * shape.block_params), first, size * around)
    if engine.zero_stage != 3 or (engine.world_size == 1 and engine.offload_param == "none"):
        return _Whole()  # one process uses its shards themselves
    whole = whole_elements(engine, shape, job)
    return _Whole(*(engine.parameter_bytes * elements for elements in whole))
