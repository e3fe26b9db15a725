"""Predict the peak memory of one rank in an optimizer step: model states, buffers and activations.

The memory of a step can be highest at seven moments: in the forward pass of the embedding, at the loss, in the backward
passes of the output layer, of the last block and of the first block, at the end of the backward pass, and in the
optimizer step. The bytes of each moment are a sum, and the peak is the largest sum. The embedding and the output layer
matter under stage 3 with frozen weights only, which are gathered for these layers. Comments name the files below
deepspeed/runtime/zero/ of release 0.19.8 in which DeepSpeed allocates its buffers.
"""

from __future__ import annotations

import dataclasses
import operator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

from zero_study.theory import adapters, computation, frozen
from zero_study.theory.communication.buckets import ENGINE_BUCKET_ELEMENTS
from zero_study.theory.communication.model_order import model_of
from zero_study.theory.communication.sharded import whole_elements
from zero_study.theory.engine import Engine, StepConfig
from zero_study.theory.model_states import (
    MASTER_BYTES,
    STATE_PARTS,
    StatePart,
    StepPhase,
    accumulated_on_host,
    elements_per_update,
    engine_differences,
    is_bf16_optimizer,
    largest_sub_group,
    master_bytes,
    paper_bytes,
    reduced_gradient_bytes,
    secondary_bytes,
)
from zero_study.theory.shapes import ModelShape

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
PEAK_MOMENTS = (
    "embedding", "loss", "output layer", "last block", "first block", "end of backward", "optimizer step",
)  # fmt: skip
# Pinned buffers on the host. For parameters: buffer_count in zero/offload_config.py. For the optimizer: 4 by default,
# and 2 more that were measured.
PARAM_SWAP_BUFFERS = 5
OPTIMIZER_SWAP_BUFFERS = 6


@dataclass(frozen=True)
class Peak:
    """The bytes of one rank at its peak, by part and by the device that stores them."""

    parts: dict[PeakPart, float]  # bytes on the device that computes
    moment: int  # index into PEAK_MOMENTS
    host_bytes: float  # bytes offloaded to the host, at the host's own peak
    host_bytes_then: float  # bytes offloaded to the host at the moment of the peak
    disk_bytes: float  # bytes offloaded to a disk
    totals: tuple[float, ...]  # bytes on the device at each of PEAK_MOMENTS
    frozen_bytes: float = 0.0  # of the device's parameters, those of frozen weights

    @property
    def total(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True)
class States:
    """The bytes of one rank's model states, by device."""

    device: dict[StatePart, float]
    host: float
    disk: float


@lru_cache(maxsize=4096)
def states(engine: Engine, shape: ModelShape, phase: StepPhase, rank: int = 0) -> States:
    """Return the bytes of one rank's model states and permanent buffers, by device.

    model_states.py has the formulas. The host buffers of gradient accumulation are not included, because `peak` adds
    them.
    """
    sizes, trained = adapters.trained_sizes(shape), adapters.engine_of_trained(engine, shape.adapter)
    paper = paper_bytes(trained, sizes.num_params, phase)
    on_device: dict[StatePart, float] = {part: getattr(paper, part) for part in STATE_PARTS}
    disk = 0.0
    for difference in engine_differences(trained, sizes, rank, phase, accumulates=False):
        if difference.reason != "swap-buffers":  # all swap buffers are counted below
            on_device[difference.part] += difference.num_bytes
        if difference.reason == "on-disk":
            disk -= difference.num_bytes
    on_device["parameters"] += adapters.frozen_bytes_of_rank(shape, engine)
    host = 0.0
    persistent = 0.0
    if engine.offload_optimizer != "none":  # gradients are offloaded together with the optimizer states
        host += on_device["optimizer_states"] + on_device["gradients"]
        on_device["optimizer_states"] = on_device["gradients"] = 0.0
        if engine.zero_stage < 3:  # stage_1_and_2.py: buffers for arriving and accumulated gradients
            host += engine.parameter_bytes * (max(sizes.matrices) + sizes.num_params / engine.world_size)
        if engine.offload_optimizer == "nvme":
            host += OPTIMIZER_SWAP_BUFFERS * 4 * largest_sub_group(engine, sizes)
    if engine.offload_param == "nvme":
        host += PARAM_SWAP_BUFFERS * engine.parameter_bytes * engine.param_swap_buffer_size
    if engine.offload_param != "none":
        if engine.world_size > 1 and phase == "resting":  # persistent parameters of stage 3
            small = sum(n for group in shape.parameters.groups for n in group if n <= engine.persistence_threshold)
            persistent = engine.parameter_bytes * small
        host += on_device["parameters"] - persistent
        on_device["parameters"] = persistent
    return States(on_device, host, disk)


RANKS_LOOKED_AT = 64  # enough, because parameters larger than a partition come first


@lru_cache(maxsize=4096)
def fullest_rank(engine: Engine, shape: ModelShape) -> int:
    """Return the rank that uses the most memory at its peak.

    Usually this is rank 0, which has the largest shares. At stages 1 and 2, all shares have the same size, and the rank
    with the largest buffer of reduced gradients uses the most. The buffer contains parameters as a whole if they cross
    an edge of the rank's partition. If several ranks have equally large buffers, the last of them is returned, because
    its gradients are computed first and its buffer exists for the longest time.
    """
    if engine.kind != "deepspeed" or engine.zero_stage not in (1, 2):
        return 0
    ranks = {*range(min(engine.world_size, RANKS_LOOKED_AT)), engine.world_size - 1}
    sizes = adapters.trained_sizes(shape)
    return int(max(ranks, key=lambda rank: (reduced_gradient_bytes(engine, sizes, rank), rank)))


def peak(shape: ModelShape, engine: Engine, job: StepConfig, rank: int | None = None) -> Peak:
    """Return the predicted peak of an optimizer step after the warm-up.

    If `rank` is None, this is the peak of the rank that uses the most memory.
    """
    rank = fullest_rank(engine, shape) if rank is None else rank
    resting = states(engine, shape, "resting", rank)
    stepping = states(engine, shape, "stepping", rank)
    rows = _moments(shape, engine, job, rank, resting, stepping)
    sizes = adapters.trained_sizes(shape)
    accumulated = accumulated_on_host(engine, sizes, rank) if job.gradient_accumulation_steps > 1 else 0.0
    totals = tuple(sum(row.values()) for row in rows)
    checkpoints = computation.offloaded_bytes(shape, engine, job)
    on_host = [*[resting.host + accumulated + checkpoints] * (len(rows) - 1), stepping.host + accumulated]
    # On a CPU, offloaded bytes are in the same memory.
    used = list(map(operator.add, totals, on_host)) if job.device == "cpu" else totals
    moment = used.index(max(used))
    host = max(resting.host + checkpoints, stepping.host) + accumulated
    of_frozen = adapters.frozen_bytes_of_rank(shape, engine) if engine.offload_param == "none" else 0.0
    return Peak(rows[moment], moment, host, on_host[moment], resting.disk, totals, of_frozen)


def _moments(
    shape: ModelShape, engine: Engine, job: StepConfig, rank: int, resting: States, stepping: States
) -> list[dict[PeakPart, float]]:
    """Return the bytes in memory at each of PEAK_MOMENTS, by part."""
    whole = _whole_bytes(shape, engine, job)
    temporary = computation.temporary_bytes(shape, engine, job)
    num_logits, logit_size = computation.num_logits(shape, job), computation.LOGIT_BYTES[job.loss]
    logits = num_logits * logit_size  # with the copies that the loss makes of them
    at_loss, in_last, in_first = computation.activation_bytes(shape, engine, job, logits)
    gradients = _gradients(shape, engine, job, rank)
    secondary = secondary_bytes(engine, shape.parameters)  # this copy is made when parameters are released
    # If the forward pass releases nothing, there is no secondary copy until the backward pass releases parameters.
    released = secondary if engine.max_live_parameters < shape.num_params else 0.0
    bucket = gradients.bucket
    is_frozen = shape.adapter is not None  # embedding and head have no gradients then
    head = 0 if is_frozen else gradients.size * shape.output_params
    # The gradient of the embedding is computed last. If the embedding is the head too, its gradient is computed first.
    embeddings: float = 0 if shape.has_tied_head or not gradients.unreduced else gradients.size * shape.embedding_params
    if is_frozen:
        embeddings = 0
    elif engine.kind == "fsdp":  # the parameters outside the blocks are reduced together with it
        embeddings += gradients.sharded * (shape.outside_params - _tied_unit(shape, engine)) / shape.num_params
    # Accumulated gradients exist from the first micro step on.
    is_accumulating = job.gradient_accumulation_steps > 1
    before = gradients.accumulated * is_accumulating
    # With gradients as views of buckets, the backward pass copies accumulated gradients to the buckets and frees them.
    still_apart = 0.0 if engine.gradient_as_bucket_view else before
    return [
        _row(resting, gathered=whole.embedding + released, gradients=before),
        _row(resting, activations=at_loss, logits=logits, gathered=whole.at_loss + released, gradients=before),
        _row(
            resting,
            activations=at_loss,
            logits=num_logits * min(engine.compute_bytes, logit_size),  # their gradient, which the output layer reads
            gathered=whole.output + released,
            gradients=before,
        ),
        _row(
            resting,
            activations=in_last,
            temporary=max(temporary, whole.gathering - whole.last_block),
            gathered=whole.last_block + released,
            gradients=before + head + gradients.early,
            buffers=bucket if gradients.first_bucket is None else gradients.first_bucket,
        ),
        _row(
            resting,
            activations=in_first,
            temporary=max(temporary, whole.gathering - whole.first_block),
            gathered=whole.first_block + secondary,
            gradients=max(still_apart, gradients.unreduced - embeddings),
            buffers=bucket,
        ),
        _row(
            resting,
            gathered=whole.at_end + secondary,
            gradients=max(still_apart, gradients.unreduced),
            buffers=0.0 if engine.kind == "fsdp" else bucket,
            temporary=gradients.flushed + gradients.added * is_accumulating,
        ),
        _row(stepping, temporary=gradients.stepping + _optimizer_bytes(engine, shape)),
    ]


def _optimizer_bytes(engine: Engine, shape: ModelShape) -> float:
    """Return the bytes that torch's unfused AdamW allocates in its step for the root of all second moments.

    Sources: torch/optim/adam.py, _multi_tensor_adam. For single tensors, _single_tensor_adam makes the root and its
    quotient. That matters under DeepSpeed only, whose parameters are a few flat fp32 tensors for the optimizer.
    """
    if engine.optimizer_kernel == "fused" or engine.offload_optimizer != "none":
        return 0.0
    sizes, engine = adapters.trained_sizes(shape), adapters.engine_of_trained(engine, shape.adapter)
    if engine.kind == "deepspeed":
        copies = 1 if engine.optimizer_kernel == "foreach" else 2
        return copies * MASTER_BYTES * elements_per_update(engine, sizes)
    if engine.optimizer_kernel == "loop":
        return 0.0
    size = master_bytes(engine) if engine.kind == "fsdp" else engine.parameter_bytes
    return size * sizes.num_params / (engine.num_shards if engine.zero_stage else 1)


def _row(
    model_states: States,
    *,
    activations: float = 0.0,
    logits: float = 0.0,
    temporary: float = 0.0,
    gathered: float = 0.0,
    gradients: float = 0.0,
    buffers: float = 0.0,
) -> dict[PeakPart, float]:
    """Return the bytes at one moment by part, in the order of PEAK_PARTS: model states and the other parts together."""
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
    """The bytes that the backward pass adds to the memory that is in use between steps."""

    size: int  # bytes per element of the gradients that autograd makes
    accumulated: float  # gradients that exist between micro steps
    unreduced: float  # all gradients before they are reduced
    bucket: float  # buckets that are allocated when the backward pass begins
    flushed: float  # additional bytes at the end of the backward pass
    first_bucket: float | None = None  # bucket in the backward pass of the last block, if it differs
    early: float = 0.0  # allocated in the last block's backward pass, before it is filled
    stepping: float = 0.0  # additional bytes in the optimizer step, beyond model_states.py
    added: float = 0.0  # at the end of backward, gradients to be added to earlier ones
    sharded: float = 0.0  # fsdp: the rank's shard of all reduced gradients


def _gradients(shape: ModelShape, engine: Engine, job: StepConfig, rank: int) -> _Gradients:
    engine, sizes = adapters.engine_of_trained(engine, shape.adapter), adapters.trained_sizes(shape)
    psi, size = sizes.num_params, engine.parameter_bytes
    largest = size * max(sizes.matrices)
    # The two gradients of a tied embedding exist at the same time as their sum.
    tied = 2 * size * shape.embedding_params if shape.has_tied_head and shape.adapter is None else 0
    if engine.gradient_as_bucket_view:  # permanent buckets: gradients are copied there and freed
        return _Gradients(size, size * psi, 0, 0, max(tied, largest), added=largest)
    if engine.kind in ("torch", "ddp"):
        return _Gradients(size, size * psi, size * psi, 0, tied, added=largest)
    if engine.kind == "fsdp":
        of_kind = _fsdp_gradients if shape.adapter is None else _fsdp_adapter_gradients
        return of_kind(shape, engine, job)
    if engine.zero_stage == 0:
        flat = size * min(psi, ENGINE_BUCKET_ELEMENTS)
        stepping = flat if engine.world_size > 1 else 0
        return _Gradients(size, size * psi, size * psi, 0, tied, stepping=stepping, added=largest)
    if engine.zero_stage == 3:
        return _stage_3_gradients(shape, engine, job, tied)
    return _stage_1_and_2_gradients(shape, engine, rank, tied)


def _stage_1_and_2_gradients(shape: ModelShape, engine: Engine, rank: int, tied: float) -> _Gradients:
    """Return the bytes of gradients at stages 1 and 2, as in DeepSpeed's stage_1_and_2.py."""
    sizes = adapters.trained_sizes(shape)
    psi, size = sizes.num_params, engine.parameter_bytes
    largest = max(sizes.matrices)
    in_fp32 = size == 2 and engine.accumulation_bytes == 4
    # average_tensor flattens the bucket and casts it to the communicated type.
    copies = size + (4 if in_fp32 or (size == 2 and engine.reduces_in_fp32) else 0)
    if is_bf16_optimizer(engine):  # this optimizer has no bucket, and its fp32 gradients are permanent
        return _Gradients(size, 0, size * psi, 0, max(tied, copies * min(psi, ENGINE_BUCKET_ELEMENTS)))
    staged, reduced = 0, reduced_gradient_bytes(engine, sizes, rank)
    if engine.offload_optimizer != "none":  # buffer for one gradient (temp_grad_buffer_for_gpu_offload)
        staged, reduced = size * largest, 0.0
    in_bucket = min(psi, engine.reduce_bucket_size)
    bucket = (2 if engine.overlap_comm else 1) * size * engine.reduce_bucket_size + staged
    if engine.zero_stage == 1 and not engine.overlap_comm:
        # All gradients are reduced after the backward pass, when the gradients of a tied embedding still exist. If bf16
        # gradients are accumulated in fp32, these are not freed while the bucket fills, and the bucket is fp32.
        if in_fp32:
            bucket = 4 * engine.reduce_bucket_size + staged
            return _Gradients(size, 4 * psi, 4 * psi, bucket, tied + 4 * in_bucket)
        flushed = tied + max(0, copies * in_bucket - size * psi)
        return _Gradients(size, size * psi, size * psi, bucket, flushed, added=size * largest)
    if engine.zero_stage == 1 and not in_fp32:
        # Stage 1 reduces in the last micro step, and frees no gradient when it is reduced (reduce_ipg_grads).
        return _Gradients(size, size * psi, size * psi, bucket, 0, added=size * largest)
    if not engine.multi_rank_allreduce:
        # Each bucket is reduced to its owners. An owner copies its part to a buffer that has its full size from the
        # first bucket on (copy_grads_in_partition), in addition to the accumulated gradients. The largest gradient
        # comes last and is reduced in place. If gradients are added in fp32, the rank's share of it is cast before
        # (_add_to_grad_partition_buffer).
        early = reduced if _owns_last_block(shape, engine, rank) else 0.0
        cast = 4 * min(largest, -(-psi // engine.world_size)) if in_fp32 else 0
        return _Gradients(
            size, reduced, 0, bucket, reduced + tied + size * largest + (0 if tied else cast), early=early
        )
    return _Gradients(size, reduced, 0, bucket, max(tied + size * largest, copies * in_bucket))


def _owns_last_block(shape: ModelShape, engine: Engine, rank: int) -> bool:
    """Return whether a rank owns gradients of the last block and this block does not fit into one bucket.

    The gradients of the last block are computed first. Those of adapters fit into one bucket.
    """
    if shape.adapter is not None:
        return False
    model = model_of(shape, autocast=False)
    last = [item for item in model.blocks[-1] if not isinstance(item, str)]
    if sum(p.numel for module in last for p in module) <= engine.reduce_bucket_size:
        return False
    shares = [-(-sum(p.numel for p in group) // engine.world_size) for group in model.groups]
    return any(
        p.start < shares[p.group] * (rank + 1) and p.end > shares[p.group] * rank for module in last for p in module
    )


def _stage_3_gradients(shape: ModelShape, engine: Engine, job: StepConfig, tied: float) -> _Gradients:
    """Return the bytes of gradients at stage 3, as in DeepSpeed's stage3.py.

    The bucket is permanent, and reduce_scatter_coalesced copies its content.
    """
    sizes = adapters.trained_sizes(shape)
    size, psi = engine.parameter_bytes, sizes.num_params
    largest = size * max(sizes.matrices)
    on_gloo = job.device == "cpu" and engine.world_size > 1
    reduced = 4 if engine.reduces_in_fp32 else size  # bytes per element of the bucket
    if largest > size * engine.reduce_bucket_size:  # reduced alone and in place, while its parameter is gathered
        cast = reduced // size * largest if reduced > size else 0
        flushed = 2 * largest + cast + max(tied, largest if on_gloo else 0)
    else:
        in_bucket = size * min(psi, engine.reduce_bucket_size)
        copied = in_bucket * reduced // size
        flushed = max(largest + tied, copied + largest + (in_bucket if on_gloo and reduced == size else 0))
    return _Gradients(size, 0, 0, 0, flushed)


def _around(shape: ModelShape) -> int:
    """Return the elements outside the blocks that FSDP2 keeps gathered during a whole micro step.

    An embedding that is not tied to the head is a unit of its own and is not included.
    """
    return shape.outside_params - (0 if shape.has_tied_head else shape.embedding_params)


def _tied_unit(shape: ModelShape, engine: Engine) -> int:
    """Return the elements of FSDP2's last unit if the head is tied to the embedding, otherwise 0.

    This unit stays gathered until the backward pass ends, and has no shard of its gradients until then. With one rank,
    there is no such unit.
    """
    return _last_unit(shape) if shape.has_tied_head and engine.num_shards > 1 else 0


def _last_unit(shape: ModelShape) -> int:
    """Return the elements of the unit whose gradients FSDP2 reduces last.

    This is the embedding, or everything outside the blocks.
    """
    return max(shape.outside_params - _around(shape), _around(shape))


def _fsdp_gradients(shape: ModelShape, engine: Engine, job: StepConfig) -> _Gradients:
    """Return the bytes of gradients under FSDP2, as in torch.distributed.fsdp.

    The gradients of a unit and their copy exist until those of the next unit exist. The parameters outside the blocks
    come last: the embedding alone, or together with the others if it is tied to the head.

    If gradients are reduced only in the last micro step, the whole gradients of the earlier ones are added up on every
    rank, in the type in which they are reduced (_fsdp_param.py, to_accumulated_grad_if_needed). They stay on the GPU
    even if parameters are offloaded.
    """
    size, master = engine.compute_bytes, master_bytes(engine)
    on_gloo = job.device == "cpu" and engine.num_shards > 1
    reduced = engine.reduced_bytes
    sharded = 0.0 if engine.offload_param != "none" else master * shape.num_params / engine.num_shards
    last, tied = _last_unit(shape), _tied_unit(shape, engine)
    return _Gradients(
        size,
        accumulated=sharded if engine.syncs_each_micro_step else reduced * shape.num_params,
        sharded=sharded,
        # With several ranks, a loop copies the gradients of a unit. Its variable keeps the last gradient alive, which
        # is the embedding's (foreach_reduce).
        unreduced=sharded * (1 - tied / shape.num_params)
        + size * (shape.outside_params if engine.num_shards > 1 else _around(shape)),
        # The gradients of one block's feed-forward part, and the reduced gradients of the block that was computed
        # before.
        bucket=size * shape.feed_forward_params + reduced * shape.block_params,
        first_bucket=size * shape.feed_forward_params,
        # The first block's reduction keeps its buffers until the next reduction waits for it (ReduceScatterState).
        flushed=reduced * (last * (2 if on_gloo else 1) + (shape.block_params if tied else 0)),
        # The all-reduces of replicas keep their buffers until backward ends (_fsdp_param_group.py, AllReduceState).
        added=master * (last if engine.replicas == 1 else shape.num_params) / engine.num_shards,
    )


def _fsdp_adapter_gradients(shape: ModelShape, engine: Engine, job: StepConfig) -> _Gradients:
    """Return the bytes of the gradients of adapters under FSDP2.

    They are reduced block by block, and only adapters are in the collective. Without reduction in every micro step,
    whole gradients are added up as in `_fsdp_gradients`.
    """
    psi = adapters.trained_sizes(shape).num_params
    sharded = 0.0 if engine.offload_param != "none" else master_bytes(engine) * psi / engine.num_shards
    of_block = (engine.compute_bytes + engine.reduced_bytes) * psi / shape.layers
    return _Gradients(
        engine.compute_bytes,
        accumulated=sharded if engine.syncs_each_micro_step else engine.reduced_bytes * psi,
        sharded=sharded,
        unreduced=sharded,
        bucket=of_block,
        flushed=of_block,
        added=sharded,
    )


@dataclass(frozen=True)
class _Whole:
    """The bytes of gathered parameters by moment. They exist in addition to the shards."""

    at_loss: float = 0.0
    last_block: float = 0.0
    first_block: float = 0.0
    embedding: float = 0.0  # in the forward pass of the embedding, with the copies that its gather makes
    output: float = 0.0  # in the backward pass of the output layer, with these copies
    gathering: float = 0.0  # while a block gathers or recomputes, when it has no temporary tensors
    at_end: float = 0.0


def _whole_bytes(shape: ModelShape, engine: Engine, job: StepConfig) -> _Whole:
    """Return the bytes of gathered parameters by moment, without the secondary copy.

    Those of adapters are neglected. Quantized weights are gathered as they are stored. Embedding and output layer are
    never quantized.
    """
    if shape.adapter is not None:
        of_base = _whole_of_base(adapters.base_of(shape), engine, job, is_frozen=True)
        share = adapters.frozen_share(shape, engine) if shape.adapter.is_quantized else 1.0
        scaled = _Whole(*(share * each for each in dataclasses.astuple(of_base)))
        return dataclasses.replace(scaled, embedding=of_base.embedding, output=of_base.output)
    return _whole_of_base(shape, engine, job, is_frozen=False)


def _whole_of_base(shape: ModelShape, engine: Engine, job: StepConfig, is_frozen: bool) -> _Whole:
    """Return the bytes of gathered parameters of a model without adapters, whose weights may be frozen."""
    if engine.kind == "fsdp":
        # Parameters outside the blocks stay gathered. In the backward pass, one block computes while the next is
        # prefetched.
        size, around = engine.compute_bytes, _around(shape)
        ahead = shape.outside_params - around if engine.num_shards > 1 else 0  # a separate embedding is prefetched
        first = size * (around + ahead + shape.block_params)
        if not engine.reshard_after_forward:
            # A frozen part has no backward pass that would release its parameters.
            of_part = size * frozen.num_params(shape)
            everything = size * shape.num_params + of_part
            return _Whole(everything, everything, first + of_part, at_end=size * around + of_part)
        return _Whole(size * around, size * (around + 2 * shape.block_params), first, at_end=size * around)
    if engine.zero_stage != 3 or (engine.world_size == 1 and engine.offload_param == "none"):
        return _Whole()  # one process uses its shards directly
    whole = _Whole(*(engine.parameter_bytes * each for each in whole_elements(engine, shape, job, is_frozen)))
    # With trained weights, the gradients at the end of the backward pass usually need more than these three moments.
    return whole if is_frozen else dataclasses.replace(whole, embedding=0.0, output=0.0, gathering=0.0)
