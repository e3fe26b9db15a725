"""Predict the collectives of gradient buckets in DistributedDataParallel and DeepSpeed's stages 0 to 2.

DeepSpeed implements them in engine.py, zero/stage_1_and_2.py and bf16_optimizer.py.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from zero_study.theory.communication.model_order import Model, Parameter, modules_of
from zero_study.theory.engine import Engine
from zero_study.theory.model_states import is_bf16_optimizer
from zero_study.theory.shapes import ModelShape

Collective = tuple[str, int]  # the kind, and the bytes of the whole tensor

ENGINE_BUCKET_ELEMENTS = 500_000_000  # engine.py, MEMORY_OPT_ALLREDUCE_SIZE: fixed, without ZeRO
DDP_FIRST_BUCKET_BYTES = 1 << 20  # torch/csrc/distributed/c10d/reducer.hpp, kDefaultFirstBucketBytes
DDP_BUCKET_BYTES = 25 << 20  # default of bucket_cap_mb, which this project does not change


def sent_bytes(engine: Engine, parameter: Parameter) -> int:
    """Return the bytes per element in which a parameter or its gradient is sent.

    Source: communication_data_type in DeepSpeed's engine.py, and torch_autocast.py.
    """
    return 2 if parameter.is_lowered else engine.parameter_bytes


def reduced_bytes(engine: Engine, parameter: Parameter) -> int:
    """Return the bytes per element with which DeepSpeed reduces a gradient.

    With sequence parallelism, this is fp32 (SEQ_PARALLEL_COMMUNICATION_DATA_TYPE_DEFAULT in runtime/constants.py).
    """
    return 4 if engine.reduces_in_fp32 else sent_bytes(engine, parameter)


def chunks(numels: Iterable[int], limit: int) -> Iterator[int]:
    """Yield the sizes of the flat tensors into which tensors are packed until a limit is exceeded (engine.py)."""
    filled = 0
    for numel in numels:
        filled += numel
        if filled > limit:
            yield filled
            filled = 0
    if filled:
        yield filled


def full_buckets(engine: Engine, order: Sequence[Parameter]) -> Iterator[tuple[int, list[Parameter]]]:
    """Yield the bytes per element and the parameters of each full bucket. Each data type has its own buckets."""
    pending: dict[int, list[Parameter]] = defaultdict(list)
    elements: dict[int, int] = defaultdict(int)
    for parameter in order:
        size = reduced_bytes(engine, parameter)
        if pending[size] and elements[size] + parameter.numel > engine.reduce_bucket_size:
            yield size, pending.pop(size)
            elements[size] = 0
        pending[size].append(parameter)
        elements[size] += parameter.numel
    yield from pending.items()


# ---------------------------------------------------------------- nothing sharded


def ddp_step(engine: Engine, shape: ModelShape, model: Model) -> Iterator[Collective]:
    """Yield the collectives of DistributedDataParallel in one step.

    Its buckets are in the order in which gradients are complete, because DDP rebuilds them after the first step.
    """
    filled, limit = 0, DDP_FIRST_BUCKET_BYTES
    for parameter in model.gradient_order():
        filled += parameter.numel * engine.parameter_bytes
        if filled >= limit:
            yield "all_reduce", filled
            filled, limit = 0, DDP_BUCKET_BYTES
    if filled:
        yield "all_reduce", filled
    if buffers := shape.counts.buffers:  # rank 0 sends them in the first forward pass after a reduction
        yield "broadcast", buffers


def stage_0_step(engine: Engine, model: Model) -> Iterator[Collective]:
    """Yield the gradient reductions of stage 0 (engine.py, allreduce_no_retain), in the order of the parameters."""
    order = dict.fromkeys(p for module in modules_of(model.layout) for p in module)
    for elements in chunks((p.numel for p in order), ENGINE_BUCKET_ELEMENTS):
        yield "all_reduce", elements * engine.parameter_bytes


# ---------------------------------------------------------------- stages 1 and 2


def partitioned_reductions(engine: Engine, model: Model) -> Iterator[Collective]:
    """Yield the reductions of DeepSpeed's average_tensor: one per bucket to all ranks, or one per slice to its owner.

    Stage 2 reduces in hooks of the backward pass. Stage 1 reduces after the backward pass, group by group, unless
    overlap_comm is set.
    """
    in_hooks = engine.zero_stage == 2 or engine.overlap_comm
    order = model.gradient_order() if in_hooks else model.parameters
    partitions = [_partition_elements(engine, group) for group in model.groups]
    for size, bucket in full_buckets(engine, order):
        if engine.multi_rank_allreduce:
            yield "all_reduce", size * sum(p.numel for p in bucket)
            continue
        owned: dict[int, int] = defaultdict(int)  # owner -> elements
        for p in bucket:
            partition = partitions[p.group]
            for owner in range(p.start // partition, -(-p.end // partition)):
                inside = min(p.end, partition * (owner + 1)) - max(p.start, partition * owner)
                owned[owner] += inside
        for elements in owned.values():
            yield "reduce", size * elements


def bf16_reductions(engine: Engine, model: Model) -> Iterator[Collective]:
    """Yield the gradient reductions of bf16_optimizer.py. It averages flat fp32 gradients, padded and cast."""
    flat = [_partition_elements(engine, group) * engine.num_shards for group in model.groups]
    for elements in chunks(flat, ENGINE_BUCKET_ELEMENTS):
        yield "all_reduce", elements * engine.parameter_bytes


def partitioned_step(engine: Engine, model: Model) -> Iterator[Collective]:
    """Yield the collectives of the optimizer step: norms, the overflow check, and the gather of the parameters."""
    if not is_bf16_optimizer(engine):
        yield from [("all_reduce", 4)] * len(model.groups)  # the norm of each group
        if engine.parameter_bytes == 2:  # check_grad_overflow
            yield "all_reduce", 1
    if engine.num_shards > 1:
        among = "subgroup_" if engine.replicas > 1 else ""
        for group in model.groups:
            size = engine.parameter_bytes * _partition_elements(engine, group) * engine.num_shards
            yield f"{among}all_gather", size


def _partition_elements(engine: Engine, group: Sequence[Parameter]) -> int:
    """Return the aligned elements of a group's flat buffer that one rank owns (nccl_start_alignment_factor)."""
    alignment = 2 * engine.num_shards
    return -(-sum(p.numel for p in group) // alignment) * alignment // engine.num_shards
