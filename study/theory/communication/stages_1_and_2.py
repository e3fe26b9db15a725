"""What do DeepSpeed's stages 1 and 2 send? zero/stage_1_and_2.py and bf16_optimizer.py; all sizes in bytes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from study.theory.case import Engine
from study.theory.communication.buckets import ENGINE_BUCKET_ELEMENTS, Collective, chunks, full_buckets
from study.theory.communication.model_order import Model, Parameter
from study.theory.model_states import is_bf16_optimizer


def reductions(engine: Engine, model: Model) -> Iterator[Collective]:
    """Follow average_tensor: a bucket goes to every rank, or its slices to their owners.

    Stage 2 reduces in hooks of the backward pass; stage 1 when it is over and by group, unless it overlaps.
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
    """Follow bf16_optimizer.py, whose fp32 gradients are flat, padded and cast to be averaged."""
    flat = [_partition_elements(engine, group) * engine.num_shards for group in model.groups]
    for elements in chunks(flat, ENGINE_BUCKET_ELEMENTS):
        yield "all_reduce", elements * engine.parameter_bytes


def step(engine: Engine, model: Model) -> Iterator[Collective]:
    """Follow the optimizer's step: norms, the check for overflow, and the gather of the parameters."""
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
    """Elements of a group's flat buffer that one rank owns; nccl_start_alignment_factor."""
    alignment = 2 * engine.num_shards
    return -(-sum(p.numel for p in group) // alignment) * alignment // engine.num_shards
