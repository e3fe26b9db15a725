"""Predict the bytes of one rank's model states: by the ZeRO paper, and as DeepSpeed 0.19 and accelerate store them.

The engine's bytes are the paper's bytes plus differences, each with a named reason. If a measurement differs from this
sum, its difference is unexplained. Sources in the comments are below deepspeed/runtime/ of release 0.19.8.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

from zero_study.theory.engine import Engine, Optimizer, parameter_bytes
from zero_study.theory.shapes import ParameterSizes

StepPhase = Literal["stepping", "resting"]  # just before the optimizer step; between two steps
STEP_PHASES: tuple[StepPhase, ...] = get_args(StepPhase)
StatePart = Literal["parameters", "gradients", "optimizer_states", "communication_buffers"]
STATE_PARTS: tuple[StatePart, ...] = get_args(StatePart)

MASTER_BYTES = 4  # DeepSpeed's masters and Adam's moments are fp32 in every precision of this project
MOMENTS_BYTES = 8
# The states of other optimizers relative to Adam's two moments of 4 bytes per element. bitsandbytes needs one byte per
# moment, and 4 bytes for every 256 of them. Muon has one moment for matrices, and Adam's two for embedding, head and
# vectors. Adafactor has sums of rows and columns, which are neglected. SGD without momentum has none.
STATE_SHARE: dict[Optimizer, float] = {
    "adamw": 1.0, "lamb": 1.0, "adamw-8bit": 2 * (1 + 4 / 256) / 8, "muon": 0.5, "adafactor": 0.0, "sgd": 0.0,
}  # fmt: skip
SWAP_AT_LEAST_BYTES = 1 << 20  # swap_tensor/constants.py, MIN_AIO_BYTES; the strategy's aio.block_size is not larger
SWAP_ALIGNMENT_BYTES = 1024  # the same, AIO_ALIGNED_BYTES, with one thread for a request

REASONS: dict[str, str] = {
    "ddp-buckets": "DistributedDataParallel keeps flat buckets in addition to the gradients. The buckets are as large "
    "as the gradients, and exist because `gradient_as_bucket_view` is off by default.",
    "ddp-buckets-stay": "DistributedDataParallel's buckets stay allocated between steps, even if the gradients are "
    "views of them (`gradient_as_bucket_view`).",
    "master-copy": "DeepSpeed keeps a master copy of every partition, even if the parameters are already in fp32. "
    "Therefore, in fp32, the optimizer states take 12 bytes per parameter before sharding, and not 8. Stage 3 is meant "
    "to use the parameters themselves as the master copy. But DeepSpeed's check compares a device object with a device "
    "name, and therefore always fails.",
    "stage1-partition": "At stages 1 and 2, a DeepSpeed process has already freed the gradients outside its own "
    "partition when the optimizer's step begins. In the paper, stage 1 keeps all gradients.",
    "fp32-gradients": "Gradients are accumulated in fp32 (`accumulation_dtype`), which takes 4 bytes per parameter. "
    "The paper counts 2.",
    "bf16-optimizer": "Stage 1 with bf16 parameters and fp32 accumulation is another engine (`BF16_Optimizer`). This "
    "engine permanently keeps fp32 gradients of the whole model, in addition to the bf16 gradients.",
    "fp32-gradient-copy": "The optimizer uses an fp32 copy of the 16-bit gradients of the first parameter group.",
    "gradient-buffer": "Stages 1 and 2 copy the gradients of the first parameter group into one flat tensor. The "
    "buffer with all gradients of the rank stays allocated, because gradients of the second group are views of it. The "
    "buffer contains the whole gradient of a parameter that crosses the edge of a partition.",
    "flat-gradient-copy": "At stage 3, DeepSpeed copies the gradients of the parameter group that it is updating into "
    "one flat tensor. This copy exists in addition to the gradient buffer.",
    "offload-gradients-stay": "If the optimizer is offloaded, the fp32 gradient buffer on the host stays allocated.",
    "offload-second-gradients": "If the optimizer is offloaded, gradients are stored twice: in the buffer where they "
    "were accumulated, and in an fp32 buffer on the host.",
    "offload-accumulated": "With gradient accumulation and an offloaded optimizer, stage 2 permanently keeps another "
    "copy of gradients on the host (`accumulated_grads_in_cpu`). If the rank's partition has a part of a gradient, "
    "the whole gradient is copied. There is no copy if 16-bit gradients are accumulated in fp32.",
    "stage3-gradients-stay": "Stage 3 keeps the buffer of its partition's gradients between steps.",
    "on-disk": "Shards of at least 1 MiB are swapped to NVMe, and are then not in memory. The exception is the "
    "parameter group that is updated next: it has already been read back into memory.",
    "swap-buffers": "Shards that are read back from NVMe are stored in buffers as large as the largest parameter "
    "group, even if the group is smaller.",
    "reduce-bucket": "Stage 3 permanently allocates a buffer of `reduce_bucket_size` elements. The default is 5e8 "
    "elements for every model.",
    "persistent-parameters": "Between steps, stage 3 keeps parameters of at most `param_persistence_threshold` "
    "elements unsharded, in addition to their shards.",
    "fsdp-masters": "FSDP2's fp32 shards are both the parameters and the masters, and gradients are reduced to fp32 "
    "shards. Parameters, gradients and optimizer states therefore take 4, 4 and 8 bytes. The paper counts 2, 2 and 12.",
    "uneven-rows": "FSDP2 shards by rows. If the number of rows is not divisible by the number of ranks, the ranks "
    "hold unequal shares of gradients and of optimizer states, and pad their parameters to the largest share.",
    "step-counts": "torch's AdamW counts the steps of each parameter, in 4 bytes.",
    "secondary-partition": "With ZeRO++'s hpZ (`zero_hpz_partition_size`), a parameter is stored a second time, "
    "sharded over a group of ranks. This copy exists from the first release of the gathered parameter to the optimizer "
    "step.",
    "padding": "Partitions are padded to equal lengths.",
    "optimizer": "The paper counts the states of Adam. Other optimizers keep fewer states per parameter.",
}


@dataclass(frozen=True)
class StateBytes:
    """The model states of one rank by part, in bytes or in bytes per parameter."""

    parameters: float
    gradients: float
    optimizer_states: float
    communication_buffers: float = 0.0

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer_states + self.communication_buffers


@dataclass(frozen=True)
class Difference:
    """A number of bytes by which the engine's model states differ from the paper's formula, with its reason."""

    part: StatePart
    reason: str  # a key of REASONS
    num_bytes: float


def paper_bytes_per_parameter(zero_stage: int, world_size: int, precision: str) -> StateBytes:
    """Return one rank's model states with Adam by the ZeRO paper, in bytes per parameter.

    Source: arXiv:1910.02054, sec. 3.1 and 5. Parameters, gradients and optimizer states take 2 + 2 + 12 bytes with
    16-bit parameters. With fp32 parameters, which includes autocast, they take 4 + 4 + 8 bytes, because there is no
    master copy. If everything is in bf16, they take 2 + 2 + 4 bytes. The paper does not state the last two cases. Stage
    0 is data parallelism. Stages 1, 2 and 3 are P_os, P_os+g and P_os+g+p. Raises ValueError for another stage and for
    a world_size below 1.
    """
    if zero_stage not in (0, 1, 2, 3):
        raise ValueError(f"zero_stage {zero_stage}: must be 0, 1, 2 or 3")
    if world_size < 1:
        raise ValueError(f"world_size {world_size}: must be at least 1")
    size = parameter_bytes(precision)
    optimizer_states = _optimizer_bytes(precision)
    return StateBytes(
        parameters=size / world_size if zero_stage == 3 else size,
        gradients=size / world_size if zero_stage >= 2 else size,
        optimizer_states=optimizer_states / world_size if zero_stage >= 1 else optimizer_states,
    )


def _optimizer_bytes(precision: str) -> int:
    """Return the bytes per parameter of Adam's moments and of the fp32 masters of 16-bit parameters."""
    if precision == "pure-bf16":
        return 4
    return MOMENTS_BYTES + (MASTER_BYTES if parameter_bytes(precision) == 2 else 0)


def paper_bytes(engine: Engine, num_params: int, phase: StepPhase) -> StateBytes:
    """Return the bytes of one rank's model states by the paper. Between steps, gradients are assumed to be freed."""
    per_parameter = paper_bytes_per_parameter(engine.zero_stage, engine.num_shards, engine.precision)
    gradients = per_parameter.gradients if phase == "stepping" else 0.0
    return StateBytes(
        parameters=per_parameter.parameters * num_params,
        gradients=gradients * num_params,
        optimizer_states=per_parameter.optimizer_states * num_params,
    )


@dataclass(frozen=True)
class Places:
    """The bytes of one rank by storage place: GPU, host memory, or disk."""

    device: float
    host: float
    disk: float


def paper_bytes_by_place(engine: Engine, num_params: int) -> Places:
    """Return the bytes of one rank's model states by the papers and by storage place, just before the optimizer step.

    Optimizer offload moves Adam's states, masters and fp32 gradients (arXiv:2101.06840, sec. 4). Parameter offload
    moves the parameters (arXiv:2104.07857, sec. 5). Both move them to the host, or to a disk without a copy in memory.
    """
    per_parameter = paper_bytes_per_parameter(engine.zero_stage, engine.num_shards, engine.precision)
    places = {"none": 0.0, "cpu": 0.0, "nvme": 0.0}
    places[engine.offload_param] += per_parameter.parameters
    places[engine.offload_optimizer] += per_parameter.optimizer_states
    is_offloaded = engine.offload_optimizer != "none"
    masters = master_bytes(engine) / engine.num_shards
    places[engine.offload_optimizer] += masters if is_offloaded else per_parameter.gradients
    return Places(*(value * num_params for value in places.values()))


def engine_differences(
    engine: Engine, sizes: ParameterSizes, rank: int, phase: StepPhase, accumulates: bool = False
) -> list[Difference]:
    """Return the differences between the engine's bytes of one rank and `paper_bytes`.

    The predicted bytes are `paper_bytes` plus these differences. `accumulates` is True if an optimizer step has more
    than one micro step.
    """
    if engine.zero_stage == 0:
        differences = []
        if engine.kind == "ddp" and not (engine.gradient_as_bucket_view and phase == "stepping"):
            reason = "ddp-buckets-stay" if engine.gradient_as_bucket_view else "ddp-buckets"
            size = engine.parameter_bytes * sizes.num_params
            differences.append(Difference("communication_buffers", reason, size))
    else:
        stage = _stage_3 if engine.zero_stage == 3 else _stages_1_and_2
        find = _fsdp if engine.kind == "fsdp" else stage
        differences = find(engine, sizes, rank, phase)
    differences.append(Difference("optimizer_states", "optimizer", _beyond_adam(engine, sizes)))
    if accumulates:
        accumulated = accumulated_on_host(engine, sizes, rank)
        differences.append(Difference("gradients", "offload-accumulated", accumulated))
    return [difference for difference in differences if difference.num_bytes]


def _beyond_adam(engine: Engine, sizes: ParameterSizes) -> float:
    """Return the bytes of one rank's share of an optimizer's states, minus the bytes that Adam's states would need."""
    share, moments = STATE_SHARE[engine.optimizer], _moment_bytes(engine)
    if engine.optimizer == "adamw-8bit":  # its moments do not depend on the type of the parameters
        share = share * MOMENTS_BYTES / moments
    elements = float(sizes.num_params)
    if engine.optimizer == "muon":
        largest = max(sizes.matrices)  # the embedding, and the head
        elements = float(sum(n for n in sizes.matrices if n < largest))
    return (share - 1) * moments * elements / (engine.num_shards if engine.zero_stage else 1)


def accumulated_on_host(engine: Engine, sizes: ParameterSizes, rank: int) -> float:
    """Return the bytes of one rank's host buffers for adding up the gradients of micro steps.

    The gradients that the optimizer reads are not counted here. Each buffer has the length and type of its parameter.
    Source: zero/stage_1_and_2.py, async_accumulate_grad_in_cpu_via_gpu.
    """
    if engine.offload_optimizer == "none" or engine.zero_stage != 2 or _has_own_fp32_buffer(engine):
        return 0.0
    shares = (_share(group, engine.num_shards, rank) for group in sizes.groups)
    return engine.parameter_bytes * sum(share.whole for share in shares)


def reduced_gradient_bytes(engine: Engine, sizes: ParameterSizes, rank: int) -> float:
    """Return the bytes of one rank's reduced gradients at stages 1 and 2, before the optimizer flattens them.

    A parameter that crosses the edge of the partition is in the buffer as a whole (copy_grads_in_partition).
    """
    shares = [_share(group, engine.num_shards, rank) for group in sizes.groups]
    if _has_own_fp32_buffer(engine):
        return engine.accumulation_bytes * sum(share.elements for share in shares)
    return engine.parameter_bytes * sum(share.whole for share in shares)


def _has_own_fp32_buffer(engine: Engine) -> bool:
    """Return whether stages 1 and 2 accumulate 16-bit gradients in fp32 (_use_compact_grad_partition_buffer)."""
    return engine.parameter_bytes == 2 and engine.accumulation_bytes == 4


@dataclass(frozen=True)
class _Share:
    """The part of one parameter group that one rank owns at stages 1 and 2, which is called its partition."""

    elements: int  # elements of the partition, with padding
    views: int  # elements of the partition, without padding
    whole: int  # elements of all parameters that are at least partly in the partition
    pieces: int  # number of tensors in the partition, with the padding


@lru_cache(maxsize=4096)
def _share(group: tuple[int, ...], world_size: int, rank: int) -> _Share:
    alignment = 2 * world_size  # zero/stage_1_and_2.py: nccl_start_alignment_factor
    elements = -(-sum(group) // alignment) * alignment // world_size
    start, end = elements * rank, elements * (rank + 1)
    views = whole = pieces = at = 0
    for size in group:
        inside = min(at + size, end) - max(at, start)
        if inside > 0:
            views += inside
            whole += size
            pieces += 1
        at += size
    return _Share(elements, views, whole, pieces + (views < elements))


def is_bf16_optimizer(engine: Engine) -> bool:
    """Return whether DeepSpeed runs stage 1 with bf16_optimizer.py (engine.py, _do_optimizer_sanity_check)."""
    in_fp32 = engine.precision == "bf16" and engine.accumulation_bytes == 4
    return engine.zero_stage == 1 and in_fp32 and engine.offload_optimizer == "none"


def _stages_1_and_2(engine: Engine, sizes: ParameterSizes, rank: int, phase: StepPhase) -> list[Difference]:
    first, second = (_share(group, engine.num_shards, rank % engine.num_shards) for group in sizes.groups)
    owned = first.elements + second.elements
    fair = sizes.num_params / engine.num_shards
    size, accumulated = engine.parameter_bytes, engine.accumulation_bytes
    paper_optimizer_states = _optimizer_bytes(engine.precision)
    differences = [
        Difference("parameters", "padding", size * (owned * engine.num_shards - sizes.num_params)),
        Difference("optimizer_states", "padding", paper_optimizer_states * (owned - fair)),
    ]
    if size == 4 or engine.precision == "pure-bf16":
        differences.append(Difference("optimizer_states", "master-copy", size * owned))
    if is_bf16_optimizer(engine):
        return [*differences, Difference("gradients", "bf16-optimizer", accumulated * owned * engine.num_shards)]
    if phase == "resting":
        if engine.offload_optimizer != "none":  # initialize_optimizer_states
            differences.append(Difference("gradients", "offload-gradients-stay", master_bytes(engine) * owned))
        return differences

    paper_gradients = size * (sizes.num_params if engine.zero_stage == 1 else fair)
    partition = size * owned
    name = "stage1-partition" if engine.zero_stage == 1 else "padding"
    differences.append(Difference("gradients", name, partition - paper_gradients))
    own_fp32_buffer = _has_own_fp32_buffer(engine)
    if engine.offload_optimizer != "none":
        differences.append(Difference("gradients", "fp32-gradients", (master_bytes(engine) - size) * owned))
        if own_fp32_buffer:
            differences.append(Difference("gradients", "offload-second-gradients", accumulated * owned))
    elif own_fp32_buffer:
        differences.append(Difference("gradients", "fp32-gradients", (accumulated - size) * owned))
    else:
        differences.append(
            Difference("gradients", "fp32-gradient-copy", (master_bytes(engine) - size) * first.elements)
        )
        # Flattening a single fp32 tensor gives a view of it, not a copy.
        in_buffer = second.views + (first.views if size == 4 and first.pieces == 1 else 0)
        if in_buffer:  # the buffer of copy_grads_in_partition lives as long as a view of it
            differences.append(
                Difference("communication_buffers", "gradient-buffer", size * (first.whole + second.whole - in_buffer))
            )
    return differences


@dataclass(frozen=True)
class _Stage3Shards:
    """The parameters that one rank owns at stage 3, in elements.

    All ranks have equal shares, because they are padded.
    """

    groups: list[list[int]]  # share of each parameter, by parameter group
    sub_groups: list[int]  # sizes of sub-groups, which are updated one after another
    padding: float  # elements beyond 1 / world_size of all parameters

    @classmethod
    def of(cls, engine: Engine, sizes: ParameterSizes) -> _Stage3Shards:
        groups = _shards(engine, sizes)
        sub_groups = [elements for group in groups for elements in _sub_groups(group, engine.sub_group_size)]
        return cls(groups, sub_groups, sum(sub_groups) - sizes.num_params / engine.world_size)

    @property
    def owned(self) -> int:
        """Number of elements in the rank's shares of all parameters, with padding."""
        return sum(self.sub_groups)

    def on_disk(self, engine: Engine, phase: StepPhase) -> int:
        """Return the number of elements whose fp32 states and gradients are on a disk.

        Just before the optimizer step, the first sub-group is already back in memory.
        """
        if engine.offload_optimizer != "nvme":
            return 0
        swapped_out = self.sub_groups[1:] if phase == "stepping" else self.sub_groups
        return sum(elements for elements in swapped_out if elements * MASTER_BYTES >= SWAP_AT_LEAST_BYTES)


def _stage_3(engine: Engine, sizes: ParameterSizes, rank: int, phase: StepPhase) -> list[Difference]:
    del rank  # all ranks have equal shares
    shards = _Stage3Shards.of(engine, sizes)
    in_phase = _stage_3_stepping if phase == "stepping" else _stage_3_resting
    return [
        *_stage_3_always(engine, shards),
        *_stage_3_swapped(engine, shards, phase),
        *in_phase(engine, sizes, shards),
    ]


def _stage_3_always(engine: Engine, shards: _Stage3Shards) -> list[Difference]:
    size = engine.parameter_bytes
    differences = [
        Difference("parameters", "padding", size * shards.padding),
        Difference("optimizer_states", "padding", _optimizer_bytes(engine.precision) * shards.padding),
        Difference("communication_buffers", "reduce-bucket", _bucket_bytes(engine) * engine.reduce_bucket_size),
    ]
    if size == 4 or engine.precision == "pure-bf16":  # zero/stage3.py, _create_fp32_partitions
        differences.append(Difference("optimizer_states", "master-copy", size * shards.owned))
    return differences


def _stage_3_swapped(engine: Engine, shards: _Stage3Shards, phase: StepPhase) -> list[Difference]:
    """Return the differences of swapping to a disk.

    They are the bytes that are on the disk instead of in memory, and the buffers into which the first sub-group is
    read.
    """
    size, masters = engine.parameter_bytes, master_bytes(engine)
    states = masters + _moment_bytes(engine)
    differences = []
    if engine.offload_param == "nvme":
        swapped = sum(shard for group in shards.groups for shard in group if shard * size >= SWAP_AT_LEAST_BYTES)
        differences.append(Difference("parameters", "on-disk", -size * swapped))
    if engine.offload_optimizer != "nvme":
        return differences
    differences.append(Difference("optimizer_states", "on-disk", -states * shards.on_disk(engine, phase)))
    first = shards.sub_groups[0]
    if phase == "stepping" and first * masters >= SWAP_AT_LEAST_BYTES:
        aligned = SWAP_ALIGNMENT_BYTES // masters
        spare = -(-max(shards.sub_groups) // aligned) * aligned - first  # unused: swap_tensor/optimizer_utils.py
        differences += [
            Difference("optimizer_states", "swap-buffers", states * spare),
            Difference("communication_buffers", "swap-buffers", masters * spare),  # buffers with the gradients
        ]
    return differences


def _stage_3_resting(engine: Engine, sizes: ParameterSizes, shards: _Stage3Shards) -> list[Difference]:
    differences = [Difference("gradients", "stage3-gradients-stay", engine.accumulation_bytes * shards.owned)]
    if engine.offload_optimizer != "none":
        in_memory = shards.owned - shards.on_disk(engine, "resting")
        differences.append(Difference("gradients", "offload-gradients-stay", master_bytes(engine) * in_memory))
    if engine.world_size > 1:  # _post_step
        persistent = (n for group in sizes.groups for n in group if n <= engine.persistence_threshold)
        whole = engine.world_size * sum(-(-n // engine.world_size) for n in persistent)
        differences.append(Difference("parameters", "persistent-parameters", engine.parameter_bytes * whole))
    return differences


def _stage_3_stepping(engine: Engine, sizes: ParameterSizes, shards: _Stage3Shards) -> list[Difference]:
    size, masters = engine.parameter_bytes, master_bytes(engine)
    differences = [
        Difference("gradients", "padding", size * shards.padding),
        Difference("gradients", "fp32-gradients", (engine.accumulation_bytes - size) * shards.owned),
        Difference("parameters", "secondary-partition", secondary_bytes(engine, sizes)),
    ]
    if engine.offload_optimizer != "none":
        in_memory = shards.owned - shards.on_disk(engine, "stepping")
        differences.append(Difference("gradients", "offload-second-gradients", masters * in_memory))
    elif size == 2 or len(shards.groups[0]) > 1:  # _prepare_fp32_grad_for_sub_group, for the first sub-group
        differences.append(Difference("gradients", "flat-gradient-copy", masters * shards.sub_groups[0]))
    return differences


def _fsdp(engine: Engine, sizes: ParameterSizes, rank: int, phase: StepPhase) -> list[Difference]:
    """Return the differences of FSDP2.

    Source: torch/distributed/fsdp/_fully_shard/_fsdp_param.py, _init_sharded_param, and _fsdp_collectives.py.
    """
    fair, shards = sizes.num_params / engine.num_shards, engine.num_shards
    # The length of rows: the hidden size. Adapters have rows of other lengths, whose padding is neglected.
    width = statistics.mode(sizes.vectors) if sizes.vectors else 1
    largest = own = 0
    for numel, row in [*((n, width) for n in sizes.matrices), *((n, 1) for n in sizes.vectors)]:
        rows_per_rank = -(-numel // row // shards)
        largest += rows_per_rank * row
        own += row * max(0, min(numel // row - rows_per_rank * (rank % shards), rows_per_rank))
    paper = paper_bytes_per_parameter(3, 1, engine.precision)
    master = master_bytes(engine)
    differences = [
        Difference("parameters", "fsdp-masters", (master - paper.parameters) * fair),
        Difference("parameters", "uneven-rows", master * (largest - fair)),
        Difference("optimizer_states", "fsdp-masters", (_moment_bytes(engine) - paper.optimizer_states) * fair),
        Difference("optimizer_states", "uneven-rows", _moment_bytes(engine) * (own - fair)),
        Difference("optimizer_states", "step-counts", 4 * (len(sizes.matrices) + len(sizes.vectors))),
    ]
    if phase == "stepping":
        differences += [
            Difference("gradients", "fsdp-masters", (master - paper.gradients) * fair),
            Difference("gradients", "uneven-rows", master * (own - fair)),
            Difference("communication_buffers", "uneven-rows", master * (largest - own)),
        ]
    return differences


def secondary_bytes(engine: Engine, sizes: ParameterSizes) -> float:
    """Return the bytes of one rank's share of the complete secondary copy of the parameters (ZeRO++'s hpZ)."""
    if engine.secondary_partition_size == 1:
        return 0.0
    whole = engine.world_size * sum(map(sum, _shards(engine, sizes)))
    return engine.parameter_bytes * whole / engine.secondary_partition_size


def master_bytes(engine: Engine) -> int:
    """Return the bytes per element of the weights that the optimizer updates, and of the gradients that it reads."""
    return 2 if engine.precision == "pure-bf16" else MASTER_BYTES


def _moment_bytes(engine: Engine) -> int:
    """Return the bytes per element of Adam's two moments together."""
    return 2 * master_bytes(engine)


def _shards(engine: Engine, sizes: ParameterSizes) -> list[list[int]]:
    """Return the elements of each parameter on one rank at stage 3, with padding, by group."""
    return [[-(-size // engine.world_size) for size in group] for group in sizes.groups]


def _sub_groups(shards: list[int], sub_group_size: int) -> list[int]:
    """Return the elements of each sub-group of a parameter group.

    No shard is divided between two sub-groups (stage3.py, _create_fp16_sub_groups).
    """
    sub_groups, filled = [], 0
    for shard in shards:
        filled += shard
        if filled >= sub_group_size:
            sub_groups.append(filled)
            filled = 0
    return [*sub_groups, filled] if filled else sub_groups


def largest_sub_group(engine: Engine, sizes: ParameterSizes) -> int:
    """Return the number of elements in one rank's largest sub-group at stage 3. The swap buffers have this size."""
    return max(elements for group in _shards(engine, sizes) for elements in _sub_groups(group, engine.sub_group_size))


def elements_per_update(engine: Engine, sizes: ParameterSizes) -> float:
    """Return how many elements one call of DeepSpeed's optimizer updates on one rank.

    At stage 3, every sub-group has a call of its own (stage3.py, step). At the other stages, one call updates all
    elements that the rank owns.
    """
    if engine.zero_stage == 3:
        return largest_sub_group(engine, sizes)
    return sum(map(sum, sizes.groups)) / (engine.num_shards if engine.zero_stage else 1)


def _bucket_bytes(engine: Engine) -> int:
    """Return the bytes per element of stage 3's reduce buckets. There is one bucket for each communicated type."""
    if engine.reduces_in_fp32:  # with sequence parallelism
        return 4
    size = engine.parameter_bytes
    return size + 2 if engine.precision.endswith("-autocast") else size
