"""Collectives of an optimizer step and their bytes, by the paper and as engines run them.

The engines' steps are followed rather than summed up: which module a pass visits (`model_order`), where a bucket is
full (`buckets`: DDP, stages 0 to 2), and what is gathered, prefetched and let go of (`sharded`: stage 3, FSDP2).
Sources in the comments are below deepspeed/runtime/ of release 0.19.8, torch/ of 2.13 and accelerate/ of 1.15.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from study.theory.communication import buckets, sharded
from study.theory.communication.buckets import Collective
from study.theory.communication.model_order import model_of
from study.theory.engine import Engine, Job, Numbers
from study.theory.model_states import is_bf16_optimizer
from study.theory.shapes import ModelShape


@dataclass(frozen=True)
class ExpectedCollective:
    """One kind of collective in one steady optimizer step of rank 0; arrays where the job is a grid."""

    kind: str
    count: Numbers
    bytes: Numbers  # of the whole tensor: the input of all-reduce and reduce-scatter, the output of all-gather

    @property
    def moved_bytes(self) -> Numbers:
        """What is sent; an all-reduce sends its bytes twice (arXiv:1910.02054, sec. 7.1)."""
        return self.bytes * (2 if self.kind.endswith("all_reduce") else 1)


def paper_volume(zero_stage: int, num_params: int, gradient_accumulation_steps: Numbers = 1) -> Numbers:
    """Count the elements that a rank moves in an optimizer step (arXiv:1910.02054, sec. 7).

    Times the bytes of an element it compares with the sum of `ExpectedCollective.moved_bytes`; like the paper it leaves
    out the factor (N - 1) / N of a ring. The paper counts one micro step: 2 Psi to average gradients under data
    parallelism and P_os, as much for P_os+g, 3 Psi for P_os+g+p. Its accounting is carried on to accumulation: where a
    rank keeps whole gradients (stages 0 and 1) they are averaged once; stage 2 gives away what it does not own, so its
    gradients move at every micro step and the parameters once; at stage 3 both parameters' gathers do, too.
    Checkpointing adds nothing: the gather of the backward pass serves the recomputation.
    """
    if zero_stage in (0, 1):
        return 2 * num_params + 0 * gradient_accumulation_steps
    if zero_stage == 2:
        return num_params * (gradient_accumulation_steps + 1)
    if zero_stage == 3:
        return 3 * num_params * gradient_accumulation_steps
    raise ValueError(f"zero_stage {zero_stage}: must be 0, 1, 2 or 3")


def collectives(engine: Engine, shape: ModelShape, job: Job) -> list[ExpectedCollective]:
    """List what rank 0 runs in a steady optimizer step, by kind; counts and bytes are arrays where accumulation is.

    Steady: stage 3 has seen the order of the modules and follows it, which is from the third step on. The norm of the
    gradients counts as the study takes it; DeepSpeed's own at stage 0 would add an all-reduce of 4 bytes. Sub-groups
    of stage 3, each with a norm of its own, are taken to be DeepSpeed's default of 1e9 elements.
    """
    per_step, per_micro_step = parts(engine, shape, bool(job.activation_checkpointing), job.dropout)
    steps = job.gradient_accumulation_steps
    expected = []
    for kind in sorted({*per_step, *per_micro_step}):
        (count, size), (micro_count, micro_size) = per_step.get(kind, (0, 0)), per_micro_step.get(kind, (0, 0))
        if np.any(count + steps * micro_count):
            expected.append(ExpectedCollective(kind, count + steps * micro_count, size + steps * micro_size))
    return expected


Sums = dict[str, tuple[int, int]]  # kind -> count, bytes


@lru_cache(maxsize=4096)
def parts(engine: Engine, shape: ModelShape, checkpointing: bool, dropout: bool) -> tuple[Sums, Sums]:
    """Sum up what is done once in a step, and what in each of its micro steps.

    Where the first micro step is another than those after it, these count, and once the difference.
    """
    model = model_of(shape, autocast=engine.precision.endswith("-autocast"))
    per_step: list[Collective] = []
    per_micro_step: list[Collective] = []
    if engine.kind == "ddp":
        per_step += buckets.ddp_step(engine, shape, model)
    elif engine.kind == "fsdp":
        per_micro_step += sharded.fsdp_micro_step(engine, shape, model)
        # The norm of the gradients, in double precision, among the ranks that share a replica.
        per_step += [("subgroup_all_reduce" if engine.replicas > 1 else "all_reduce", 8)]
    elif engine.kind == "deepspeed" and engine.zero_stage == 0:
        per_step += buckets.stage_0_step(engine, model)
    elif engine.kind == "deepspeed" and engine.zero_stage == 3:
        if engine.world_size > 1:
            per_micro_step += sharded.gathers(engine, shape, checkpointing, dropout)
        per_micro_step += sharded.reductions(engine, model)
        per_step += sharded.step(engine, model)
        if engine.secondary_partition_size > 1:
            first, later = (_sums(sharded.gathers(engine, shape, checkpointing, dropout, at)) for at in (True, False))
            return _added(_sums(per_step), first, later), _sums(per_micro_step)
    elif is_bf16_optimizer(engine):
        per_step += buckets.bf16_reductions(engine, model)
        per_step += buckets.partitioned_step(engine, model)
    elif engine.kind == "deepspeed":
        (per_micro_step if engine.zero_stage == 2 else per_step).extend(buckets.partitioned_reductions(engine, model))
        per_step += buckets.partitioned_step(engine, model)
    return _sums(per_step), _sums(per_micro_step)


def _added(sums: Sums, first: Sums, later: Sums) -> Sums:
    """Add what the first micro step of a step has more than later ones, or, below 0, less."""
    added = {}
    for kind in {*sums, *first, *later}:
        (count, size), (more, more_size), (less, less_size) = (s.get(kind, (0, 0)) for s in (sums, first, later))
        added[kind] = count + more - less, size + more_size - less_size
    return added


def _sums(collectives: Iterable[Collective]) -> Sums:
    sums: Sums = {}
    for kind, size in collectives:
        count, total = sums.get(kind, (0, 0))
        sums[kind] = count + 1, total + size
    return sums
