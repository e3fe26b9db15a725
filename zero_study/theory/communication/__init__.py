"""Predict the collectives and bytes of an optimizer step, by the ZeRO paper and by simulating the engines.

The steps of the engines are simulated. `model_order` has the order in which a pass visits modules. `buckets` decides
when a bucket is full (DDP, stages 0 to 2). `sharded` decides which parameters are gathered, prefetched and released
(stage 3, FSDP2). `sequence` has the messages of ranks that share a sequence. Sources in the comments are below
deepspeed/runtime/ of release 0.19.8, torch/ of 2.13 and accelerate/ of 1.15.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from zero_study.theory import adapters
from zero_study.theory.communication import buckets, sequence, sharded
from zero_study.theory.communication.buckets import Collective
from zero_study.theory.communication.model_order import model_of
from zero_study.theory.engine import Engine, StepConfig
from zero_study.theory.model_states import is_bf16_optimizer
from zero_study.theory.shapes import ModelShape


@dataclass(frozen=True)
class ExpectedCollective:
    """The predicted calls of one kind of collective by rank 0 in an optimizer step after the warm-up."""

    kind: str
    count: int
    bytes: int  # of the whole tensor: the input of all-reduce and reduce-scatter, the output of all-gather

    @property
    def moved_bytes(self) -> int:
        """The bytes that a rank sends. An all-reduce sends its bytes twice (arXiv:1910.02054, sec. 7.1)."""
        return self.bytes * (2 if self.kind.endswith("all_reduce") else 1)


def paper_volume(zero_stage: int, num_params: int, gradient_accumulation_steps: int = 1) -> int:
    """Return the elements that a rank sends in an optimizer step by the ZeRO paper (arXiv:1910.02054, sec. 7).

    Multiplied by the bytes of an element, the result is comparable with the sum of `ExpectedCollective.moved_bytes`.
    Like the paper, it omits the factor (N - 1) / N of a ring. The paper counts a step with one micro step. Data
    parallelism, P_os and P_os+g send 2 Psi, and P_os+g+p sends 3 Psi, for Psi parameters. This function extends the
    count to gradient accumulation. Stages 0 and 1 keep full gradients and average them once per step. Stage 2 sends the
    gradients that a rank does not own in every micro step, and gathers the parameters once per step. Stage 3 reduces
    gradients and gathers the parameters twice in every micro step. Activation checkpointing adds nothing, because the
    recomputation uses the gather of the backward pass. Raises ValueError for another stage.
    """
    if zero_stage in (0, 1):
        return 2 * num_params
    if zero_stage == 2:
        return num_params * (gradient_accumulation_steps + 1)
    if zero_stage == 3:
        return 3 * num_params * gradient_accumulation_steps
    raise ValueError(f"zero_stage {zero_stage}: must be 0, 1, 2 or 3")


def collectives(engine: Engine, shape: ModelShape, job: StepConfig) -> list[ExpectedCollective]:
    """Return the collectives that rank 0 issues in an optimizer step after the warm-up, one entry per kind.

    Steps are steady from the third step on, because stage 3 first records the order of the modules. The collectives
    include the gradient norm that this project's trainer computes. DeepSpeed's own norm at stage 0 would add an
    all-reduce of 4 bytes. Each of stage 3's sub-groups has its own norm.
    """
    per_step, per_micro_step = parts(engine, shape, bool(job.activation_checkpointing), job.dropout)
    exchanged = (each for of_pass in sequence.exchanges(engine, shape, job) for each in of_pass)
    per_micro_step = _sums(exchanged, per_micro_step)
    steps = job.gradient_accumulation_steps
    expected = []
    for kind in sorted({*per_step, *per_micro_step}):
        (count, size), (micro_count, micro_size) = per_step.get(kind, (0, 0)), per_micro_step.get(kind, (0, 0))
        if count + steps * micro_count:
            expected.append(ExpectedCollective(kind, count + steps * micro_count, size + steps * micro_size))
    return expected


Sums = dict[str, tuple[int, int]]  # kind -> count, bytes


@lru_cache(maxsize=4096)
def parts(
    engine: Engine, shape: ModelShape, checkpointing: bool, dropout: bool, is_frozen: bool = False
) -> tuple[Sums, Sums]:
    """Return the collectives that are issued once per optimizer step, and those per micro step, summed by kind.

    If the first micro step differs from the later ones, the second sum is that of a later one. The difference of the
    first one is in the first sum. `is_frozen` is for the frozen weights under an adapter.
    """
    if shape.adapter is not None:
        return _parts_of_adapters(engine, shape, checkpointing, dropout)
    model = model_of(shape, autocast=engine.precision.endswith("-autocast"))
    per_step: list[Collective] = []
    per_micro_step: list[Collective] = []
    if engine.kind == "ddp":
        per_step += buckets.ddp_step(engine, shape, model)
    elif engine.kind == "fsdp":
        gathered, reduced = sharded.fsdp_micro_step(engine, shape, model, checkpointing)
        per_micro_step += gathered
        (per_micro_step if engine.syncs_each_micro_step else per_step).extend(reduced)
        # The norm of the gradients, in fp64, among the ranks that share a replica.
        per_step += [("subgroup_all_reduce" if engine.replicas > 1 else "all_reduce", 8)]
    elif engine.kind == "deepspeed" and engine.zero_stage == 0:
        per_step += buckets.stage_0_step(engine, model)
    elif engine.kind == "deepspeed" and engine.zero_stage == 3:
        if engine.world_size > 1:
            per_micro_step += sharded.gathers(engine, shape, checkpointing, dropout, is_frozen=is_frozen)
        per_micro_step += sharded.reductions(engine, model)
        per_step += sharded.step(engine, model)
        if engine.secondary_partition_size > 1:
            first, later = (
                _sums(sharded.gathers(engine, shape, checkpointing, dropout, is_first, is_frozen))
                for is_first in (True, False)
            )
            return _added(_sums(per_step), first, later), _sums(per_micro_step)
    elif is_bf16_optimizer(engine):
        per_step += buckets.bf16_reductions(engine, model)
        per_step += buckets.partitioned_step(engine, model)
    elif engine.kind == "deepspeed":
        (per_micro_step if engine.zero_stage == 2 else per_step).extend(buckets.partitioned_reductions(engine, model))
        per_step += buckets.partitioned_step(engine, model)
    return _sums(per_step), _sums(_gathers_of_frozen(engine, shape), _sums(per_micro_step))


def _gathers_of_frozen(engine: Engine, shape: ModelShape) -> list[Collective]:
    """Return the gathers of a frozen part, block by block. It is gathered once, because it has no backward pass."""
    counts = shape.counts.frozen
    if counts is None or engine.zero_stage != 3 or engine.num_shards == 1:
        return []
    kind = "subgroup_all_gather" if engine.kind == "fsdp" and engine.replicas > 1 else "all_gather"
    size = engine.compute_bytes if engine.kind == "fsdp" else engine.parameter_bytes
    blocks = [counts.kinds[kind].num_params for kind in counts.executed]
    return [(kind, size * elements) for elements in [counts.outside.num_params, *blocks] if elements]


def _parts_of_adapters(engine: Engine, shape: ModelShape, checkpointing: bool, dropout: bool) -> tuple[Sums, Sums]:
    """Return the sums as `parts` does, for a model with adapters.

    Stage 3 and FSDP2 gather all weights, frozen ones too. Only the gradients of adapters are reduced, in one collective
    for each full bucket. FSDP2 reduces each block alone. The padding of adapters and collectives of a few bytes are
    neglected, so that the number of collectives is only a lower bound.
    """
    base = adapters.base_of(shape)
    psi, bucket = adapters.num_trainable(shape), max(engine.reduce_bucket_size, buckets.ENGINE_BUCKET_ELEMENTS)
    per_step: Sums = {}
    per_micro_step: Sums = {}
    if engine.zero_stage == 3:
        of_step, of_micro_step = parts(engine, base, checkpointing, dropout, is_frozen=True)
        share = adapters.frozen_share(shape, engine) if adapters.quantized_elements(shape) else 1.0
        share += psi / shape.num_params
        gathers = [kind for kind in of_micro_step if kind.endswith("all_gather")]
        for kind in gathers:
            count, size = of_micro_step[kind]
            per_micro_step[kind] = count, round(share * size)
        if engine.kind == "deepspeed":  # persistent parameters, after the step
            per_step = {kind: of_step[kind] for kind in of_step if kind.endswith("all_gather")}
    if engine.kind == "ddp":
        size = psi * adapters.engine_of_trained(engine, shape.adapter).parameter_bytes if shape.adapter else 0
        return {"all_reduce": (-(-size // buckets.DDP_BUCKET_BYTES), size)}, {}
    if engine.kind == "torch":
        return {}, {}
    reduced = engine.reduced_bytes if engine.kind == "fsdp" else engine.parameter_bytes
    among = "subgroup_" if engine.replicas > 1 and engine.kind == "fsdp" else ""
    kind = f"{among}reduce_scatter" if engine.zero_stage == 3 else "all_reduce"
    if engine.zero_stage in (1, 2) and not engine.multi_rank_allreduce:
        kind = "reduce"  # to the rank that owns the partition
    sums = {kind: (shape.layers if engine.kind == "fsdp" else -(-psi // bucket), reduced * psi)}
    in_micro_step = engine.syncs_each_micro_step if engine.kind == "fsdp" else engine.zero_stage >= 2
    if in_micro_step:
        per_micro_step = {**per_micro_step, **sums}
    else:
        per_step = {**per_step, **sums}
    if engine.kind == "deepspeed" and engine.zero_stage in (1, 2) and engine.num_shards > 1:  # the updated adapters
        per_step = {**per_step, "all_gather": (1, engine.parameter_bytes * psi)}
    return per_step, per_micro_step


def _added(sums: Sums, first: Sums, later: Sums) -> Sums:
    """Return `sums` plus the difference between the first micro step and later ones, which can be negative."""
    added = {}
    for kind in {*sums, *first, *later}:
        (count, size), (more, more_size), (less, less_size) = (s.get(kind, (0, 0)) for s in (sums, first, later))
        added[kind] = count + more - less, size + more_size - less_size
    return added


def _sums(collectives: Iterable[Collective], more: Sums | None = None) -> Sums:
    """Return the sums of collectives, together with those of others."""
    sums: Sums = dict(more or {})
    for kind, size in collectives:
        count, total = sums.get(kind, (0, 0))
        sums[kind] = count + 1, total + size
    return sums
