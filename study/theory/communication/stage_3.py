"""What does DeepSpeed's stage 3 send, and how much of the model is whole at once? zero/stage3.py.

What is gathered when is followed by the coordinator; here it becomes bytes, with reductions and the optimizer's step.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from study.theory.case import Engine, Job
from study.theory.communication.buckets import Collective, chunks, full_buckets, sent_bytes
from study.theory.communication.coordinator import Coordinator, Gather, Limits, sections
from study.theory.communication.model_order import Model, Parameter, model_of
from study.theory.shapes import ModelShape


class Whole(NamedTuple):
    """Elements that stage 3 has gathered beside those that stay whole between steps, the most at a time."""

    at_loss: int  # between forward and backward
    last_block: int  # in its backward
    first_block: int


def whole_elements(engine: Engine, shape: ModelShape, job: Job) -> Whole:
    """Count what stage 3 has gathered at three moments of a micro step."""
    limits = Limits.of(engine)
    # Blocks are alike: more of them than fill the limits three times over change nothing but the time that this takes.
    filled = 3 * (limits.max_live_parameters + limits.prefetch_bucket_size) // shape.block_params + 8
    fewer = dataclasses.replace(shape, layers=min(shape.layers, filled))
    return _gathered(fewer, _autocast(engine), limits, job.activation_checkpointing, job.dropout)[1]


def gathered_elements(engine: Engine, shape: ModelShape, job: Job) -> int:
    """Count the elements that a micro step gathers, on one process from where they are offloaded to."""
    gathered, _ = _gathered(shape, _autocast(engine), Limits.of(engine), job.activation_checkpointing, job.dropout)
    return sum(parameter.numel for gather in gathered for parameter in gather.parameters)


def gathers(
    engine: Engine, shape: ModelShape, checkpointing: bool, dropout: bool, is_first: bool = False
) -> Iterator[Collective]:
    """List the gathers of a micro step, in bytes; the first of a step where there is a secondary copy is another.

    A parameter's secondary copy is made as it is first released, and gathered from the group of ranks that shares it
    until the optimizer steps (partition_parameters.py, _partition_param_sec; stage3.py, invalidate_secondary_tensor).
    """
    has_secondary = engine.secondary_partition_size > 1
    apart = has_secondary and is_first
    gathered, _ = _gathered(shape, _autocast(engine), Limits.of(engine), checkpointing, dropout, apart)
    within = "subgroup_all_gather" if engine.secondary_partition_size < engine.world_size else "all_gather"
    for gather in gathered:
        kind = within if has_secondary and (gather.were_released or not is_first) else "all_gather"
        sizes: dict[int, int] = defaultdict(int)  # one collective for each type
        for parameter in gather.parameters:
            size = sent_bytes(engine, parameter)
            sizes[size] += size * _padded_elements(engine, parameter)
        yield from ((kind, num_bytes) for num_bytes in sizes.values())


def reductions(engine: Engine, model: Model) -> Iterator[Collective]:
    """List the reductions of a micro step, in bytes."""
    for size, bucket in full_buckets(engine, model.gradient_order()):
        yield "reduce_scatter", size * sum(_padded_elements(engine, p) for p in bucket)


def step(engine: Engine, model: Model) -> Iterator[Collective]:
    """Follow the optimizer's step: norms, and the gather of what stays whole between steps (_post_step)."""
    norm_bytes = 4 if engine.offload_optimizer != "none" else 8
    for group in model.groups:  # _create_fp16_sub_groups
        shards = [_padded_elements(engine, p) // engine.world_size for p in group]
        for _ in chunks(shards, engine.sub_group_size - 1):
            yield "all_reduce", norm_bytes
    if engine.precision == "fp16":
        yield "all_reduce", 1
    if engine.world_size > 1:
        for parameter in model.parameters:
            if parameter.numel <= engine.persistence_threshold:
                yield "all_gather", engine.parameter_bytes * _padded_elements(engine, parameter)


@lru_cache(maxsize=256)
def _gathered(
    shape: ModelShape, autocast: bool, limits: Limits, checkpointing: bool, dropout: bool, apart: bool = False
) -> tuple[list[Gather], Whole]:
    """List what is gathered together in one micro step, and count how much is there at once; on any ranks."""
    model = model_of(shape, autocast)
    followed = sections(model, checkpointing, dropout)
    coordinator = Coordinator(limits, model, followed.visits, apart)
    gathered, live = coordinator.gathered(), coordinator.live
    backward = len(followed.forward)
    blocks = backward + len(followed.after)
    end = len(live) - len(followed.before)
    last = live[blocks : blocks + len(followed.blocks[0])]
    return gathered, Whole(live[backward - 1], max(last), max(live[end - len(followed.blocks[-1]) : end]))


def _padded_elements(engine: Engine, parameter: Parameter) -> int:
    return -(-parameter.numel // engine.world_size) * engine.world_size


def _autocast(engine: Engine) -> bool:
    return engine.precision.endswith("-autocast")
