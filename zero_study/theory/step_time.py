"""Predict the time of an optimizer step in seconds: computation, communication and offload.

A GPU multiplies at a share of its peak rate and moves bytes at a share of its memory bandwidth. The times of both are
added, and so is the part of communication that does not overlap with them. Five constants per generation of GPUs are
fitted to published throughput (tools/derive/planner_accuracy.py). The sources of all other constants are given below.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass

from zero_study.theory import adapters, cards, communication, computation, frozen, intervals, model_states
from zero_study.theory.communication import sequence
from zero_study.theory.communication.buckets import Collective
from zero_study.theory.communication.sharded import gathered_elements
from zero_study.theory.engine import Engine, LossKernel, StepConfig
from zero_study.theory.gpus import LIKE
from zero_study.theory.hardware import Cluster, product_flops_per_second
from zero_study.theory.intervals import Evidence
from zero_study.theory.shapes import ModelShape


@dataclass(frozen=True)
class Constants:
    """The fitted constants of one generation of GPUs, mostly shares of the rates in the data sheet."""

    product_efficiency: float  # share of the peak: matrix products, without the time of their bytes
    attention_efficiency: float  # share of the peak: the attention kernel of LLM Foundry's tables
    memory_efficiency: float  # share of the memory bandwidth: operands of matrix products, as if they were read apart
    hop_seconds: float  # seconds per node of a ring, for each collective between nodes
    unhidden: float  # like UNHIDDEN, for several nodes, whose collectives wait for a network


# tools/derive/planner_accuracy.py fitted these constants to the rows of grades A and B of measured_by_others. Ampere
# uses A100 with 40 and 80 GB, Hopper uses H100 and H200, and Volta uses V100. The shares are those of an A100 with
# 80 GB and of an H100. cards.py says how they differ on other cards. Only the constants of several nodes are fitted to
# the rows of V100, which are of two machines with slow networks: fitted to them, the share of products would be 0.42,
# while a V100 was measured at 0.68.
AMPERE = Constants(0.870, 0.341, 0.240, 176e-6, 0.170)
HOPPER = Constants(0.815, 0.181, 0.254, 54.7e-6, 0.460)
VOLTA = dataclasses.replace(AMPERE, hop_seconds=2.12e-3, unhidden=1.0)
FITTED = {"Ampere": AMPERE, "Hopper": HOPPER, "Volta": VOLTA}
# A generation without fitted constants uses those of the first generation in its list. Cards with the chips GA102, Ada
# and RTX Blackwell have tensor cores that are programmed like those of Ampere. B200 and the accelerators of other
# vendors with HBM3 resemble Hopper, because their peak rates are as high relative to their memory bandwidth.
_NEAREST = {
    **dict.fromkeys(("Ampere", "GA102", "Ada", "RTX Blackwell", "CDNA 2", "Gaudi 2"), ("Ampere", "Hopper")),
    **dict.fromkeys(("Hopper", "Blackwell", "CDNA 3", "CDNA 4", "Gaudi 3"), ("Hopper", "Ampere")),
    **dict.fromkeys(("Volta", "Turing"), ("Volta", "Ampere", "Hopper")),
}
# The share of the dense bf16 peak that the best matrix product in PyTorch reaches: stas00/ml-engineering, table
# "Maximum Achievable Matmul FLOPS", of A100, H100, B200, MI250X, MI325X (of 1,307 TFLOP/s), MI355X (of 2,517), Gaudi 2
# and 3. (MI300X has the same chip as MI325X. Two measurements of it give 0.60 and 0.51.) A generation without fitted
# constants has the share of products of its nearest generation, times the ratio of these two numbers. For cards that
# are neither in that table nor in the one of cards.py, the ratio is 1.
ACHIEVABLE = {
    "Ampere": 0.869, "Hopper": 0.803, "Blackwell": 0.776, "CDNA 2": 0.767, "CDNA 3": 0.600, "CDNA 4": 0.622,
    "Gaudi 2": 0.969, "Gaudi 3": 0.741,
}  # fmt: skip

# Kernels that compute little (norms, activation functions, softmax and masks of eager attention, the loss, casts, and
# the optimizer) stream through large tensors, as a copy does, and reach this share of the memory bandwidth. PyTorch's
# pull request 119842 measured fused AdamW in bf16 on 1/128 of Llama-2-70B's parameters on an H100 with HBM2e: 4.5 ms
# before and 3.6 ms after, which at 14 bytes per parameter is 1.7 and 2.1 TB/s. The data sheet of the H100 with HBM2e
# (PCIe) has 2.0 TB/s. The constant is not fitted: with 0.80 to 0.90, the errors of published times are nearly the same.
# With the fitted efficiency of products instead, models with eager attention would be predicted 20 to 40 % too slow,
# because their products need few bytes and these kernels many.
STREAM_EFFICIENCY = 0.85
# Products in fp32 do not use tensor cores and come nearer to their (lower) peak. Assumed: published rows in fp32 are
# described equally well by 0.85 to 1.0. With one efficiency for both, the many fp32 rows of V100 decide that of its
# tensor cores, which are then predicted twice as fast as they were.
FP32_EFFICIENCY = 0.93

# The products of eager attention need a size of the heads that is a multiple of 8, or tensor cores cannot read their
# operands. The share of the peak that they reach otherwise is fitted to the trainings of ptd_benchmark's GPTXL on one
# machine, whose heads have 86 values. Fused attention fills the heads up with zeros instead.
ALIGNED_HEAD = 8
UNALIGNED_SHARE = 0.02
# FlashAttention-2 with a causal mask, forward and backward, reaches 180 to 200 of 312 TFLOP/s on A100
# (arXiv:2307.08691, figure 4), and about 35 % of the peak on H100 (arXiv:2407.08608, abstract). All other generations
# have the share of their nearest one. (Volta and Turing have no FlashAttention-2.)
FLASH_EFFICIENCY = {"Ampere": 0.6, "Hopper": 0.35}
# How much faster than FlashAttention-2 other kernels are on Hopper's and Blackwell's data center GPUs, forward and
# backward together. sdpa is cuDNN's kernel, which PyTorch prefers there if cuDNN is newer than 9.15, as since PyTorch
# 2.11 (sdp_utils.cpp, check_prefer_cudnn_attention). FlashAttention-3 is 1.5 to 2.0 times as fast forward and 1.5 to
# 1.75 times backward (arXiv:2407.08608, section 4.1), and cuDNN is as fast forward (pytorch issue 142132). The lower
# end is assumed for cuDNN, and a tenth more for the newer kernels. These numbers are not fitted. With them, the rows of
# stas00 with 262,144 tokens, where attention takes nearly all of the time, are predicted within 6 %.
FASTER_THAN_FLASH_2 = {"sdpa": 1.5, "flash-3": 1.65, "flash-4": 1.65}

# NCCL's bandwidth relative to that of the link. All-reduces of nccl-tests reach 200 to 235 of 300 GB/s on 8 x A100
# (issues 149 and 178 of NVIDIA/nccl-tests), and 85 to 96 of 100 GB/s on 3 nodes with 4 x 200 Gbit/s (issue 119). This
# constant is not fitted, because the fit cannot separate it from the share of communication that overlaps.
LINK_EFFICIENCY = 0.75
# What NCCL sends from one node per second over TCP, in bytes: the fit to the times of ptd_benchmark's DDP, on machines
# with 100 Gbit/s. It is the speed of the kernel that copies the data, and not a share of the link, which has 12.5e9.
TCP_BANDWIDTH = 2.25e9
# The share of the shorter of computation and communication that is not hidden by the longer one, within a node. There,
# collectives use multiprocessors and memory bandwidth that computation needs too. This is assumed, because the rows
# hardly determine it.
UNHIDDEN = 0.5
# Assumed orders of magnitude: the time of a NCCL call, the share of PCIe's rate that a copy reaches, and the time that
# PyTorch needs to launch a kernel of a compiled graph. The published rows are too large to determine the first and the
# third.
COLLECTIVE_SECONDS = 20e-6
PCIE_EFFICIENCY = 0.8
KERNEL_SECONDS = 6e-6
KERNELS_PER_COMPILED_BLOCK = 14  # forward; twice as many backward
# Seconds per block and micro step that a process needs to launch forward, backward and optimizer without torch.compile.
# If the GPU computes faster, it waits. The constant is fitted to the small steps of ptd_benchmark's DDP. A third of it
# is the forward pass, which checkpointing repeats.
LAUNCHING_SECONDS = 5.8e-3
# If a GPU computes less than this per block and micro step with torch.compile, the time is only a guess, because nobody
# published one.
SMALLEST_COMPILED_SECONDS = 4e-3
# What the hooks of FSDP1 add, fitted to the small steps of ptd_benchmark's FSDP.
FSDP1_SECONDS = 5.9e-3

# Bytes per parameter that an optimizer step on the GPU reads and writes if it is one kernel and everything is fp32.
# AdamW reads parameter, gradient and two moments, and writes all but the gradient. LAMB reads its update and the
# parameter two more times for their norms. 8-bit moments take one byte each. Clipping reads the gradient twice and
# writes it once.
FUSED_BYTES = {"adamw": 28, "lamb": 44, "adamw-8bit": 16, "muon": 36, "adafactor": 20, "sgd": 12}
CLIPPING_BYTES = 12
# The same for AdamW operation by operation: torch/optim/adamw.py, _multi_tensor_adamw.
FOREACH_BYTES = 80
# Muon's five Newton-Schulz iterations (kellerjordan.github.io/posts/muon). Each has products of a matrix with itself
# and with the result, which need at most 6 FLOPs per element, times the hidden size.
MUON_FLOPS = 5 * 6
# Additional bytes with 16-bit parameters: the gradient is cast to fp32, and the new parameter is cast to 16 bits.
MASTER_CAST_BYTES = 12
# Bytes per parameter of AdamW in host memory, with these casts and a copy of the gradient.
HOST_STEP_BYTES = 28 + 12 + 6
# The published CPU-Adam updates 1e10 parameters in 2.57 s on a host with 256 GB/s (arXiv:2101.06840, table of Adam
# latencies, from memory, not looked up). This is 30 bytes per parameter at 0.46 of the bandwidth.
HOST_MEMORY_EFFICIENCY = 0.46
# Bytes per second and thread. tools/derive/planner_accuracy.py fitted it to the published times with offload
# (measured_by_others/published.yaml).
HOST_THREAD_BANDWIDTH = 2.04e9


@dataclass(frozen=True)
class StepTime:
    """The time of one optimizer step in seconds, by part."""

    forward: float
    backward: float
    recompute: float  # activation checkpointing's second forward pass
    optimizer: float  # on the GPU
    launching: float  # added if the process launches kernels more slowly than the GPU computes
    exposed_communication: float  # the part of communication that does not overlap
    offload: float  # added by transfers, the host's optimizer step and the disk
    evidence: Evidence  # the published times that the interval of the total is based on

    @property
    def total(self) -> float:
        computed = self.forward + self.backward + self.recompute + self.optimizer + self.launching
        return computed + self.exposed_communication + self.offload

    @property
    def low(self) -> float:
        return self.total / self.evidence.spread

    @property
    def high(self) -> float:
        """The upper end of the interval. Infinite if the time is only a guess (`Evidence.is_rough`)."""
        return self.total * (math.inf if self.evidence.is_rough else self.evidence.spread)


def tokens_per_second_per_gpu(job: StepConfig, step_seconds: float) -> float:
    """Return the tokens per second and GPU from the seconds of an optimizer step."""
    return job.tokens * job.gradient_accumulation_steps / step_seconds


def nearest_generations(generation: str) -> tuple[str, ...]:
    """Return the generations whose fitted constants suit a GPU's generation, the best one first."""
    return _NEAREST[generation.removeprefix(LIKE)]


def constants_of(generation: str) -> Constants:
    """Return the fitted constants of a GPU's generation, or those of the nearest generation."""
    return FITTED[nearest_generations(generation)[0]]


def seconds(
    shape: ModelShape,
    engine: Engine,
    job: StepConfig,
    box: Cluster,
    constants: Constants | None = None,
    host_thread_bandwidth: float | None = None,
) -> StepTime:
    """Return the predicted time of one optimizer step on all GPUs of a machine.

    `constants` and `host_thread_bandwidth` replace the fitted values. The fit itself needs this. Raises ValueError if
    the GPU cannot multiply in the engine's precision, if engine and machine have different numbers of GPUs, or if the
    host or the disk of an offload is not known.
    """
    if engine.world_size != box.num_gpus:
        raise ValueError(
            f"world_size is {engine.world_size}, but the machine has {box.num_gpus} GPUs. Change one of them"
        )
    constants = constants or constants_of(box.gpu.generation)
    speed = _Speed.of(engine, job, box, constants)
    compute = _compute(shape, engine, job, speed)
    micro_steps = job.gradient_accumulation_steps
    moved = _communication(shape, engine, job, box, constants.hop_seconds)
    pcie = _pcie(shape, engine, job, box)

    # Transfers of parameters overlap with the same computation as gathers, and transfers of gradients as reductions.
    forward_hidden = moved.forward + pcie.forward
    backward_hidden = moved.backward + pcie.backward
    recomputed_and_backward = compute.recompute + compute.backward
    unhidden = UNHIDDEN if box.num_nodes == 1 else constants.unhidden
    exposed_forward = exposed(compute.forward, forward_hidden, unhidden)
    exposed_backward = exposed(recomputed_and_backward, backward_hidden, unhidden)
    last_hidden = moved.last_backward + pcie.last_backward
    exposed_last = exposed(recomputed_and_backward, backward_hidden + last_hidden, unhidden)
    added = micro_steps * exposed_forward + (micro_steps - 1) * exposed_backward + exposed_last
    # The share of PCIe transfers in the time of all transfers decides which part of the exposed time counts as offload.
    transferred = pcie.overlapped(micro_steps)
    by_pcie = added * transferred / max(moved.overlapped(micro_steps) + transferred, 1e-30)

    num_owned = adapters.num_trainable(shape) / (engine.num_shards if engine.zero_stage else 1)
    if engine.offload_optimizer == "none":
        optimizer, host = _optimizer_step(shape, num_owned, engine, speed), 0.0
    else:
        optimizer, host = 0.0, _host_step(num_owned, engine, box, host_thread_bandwidth or HOST_THREAD_BANDWIDTH)
    communicated = added - by_pcie + micro_steps * moved.serial + moved.step
    on_gpu = micro_steps * (compute.forward + recomputed_and_backward) + optimizer + communicated
    launching = max(0.0, micro_steps * _launching(shape, engine, job) - on_gpu)
    smallest = SMALLEST_COMPILED_SECONDS * len(shape.counts.executed)
    is_small = compute.forward + recomputed_and_backward < smallest if job.compiled else launching > 0
    return StepTime(
        forward=micro_steps * compute.forward,
        backward=micro_steps * compute.backward,
        recompute=micro_steps * compute.recompute,
        optimizer=optimizer,
        launching=launching,
        exposed_communication=communicated,
        offload=by_pcie + host + _disk(shape, engine, box, micro_steps * _num_gathers(shape, engine, job)),
        evidence=intervals.evidence(shape, engine, box, job, is_small),
    )


def _launching(shape: ModelShape, engine: Engine, job: StepConfig) -> float:
    """Return the seconds that a process needs to launch the kernels of a micro step and its share of the optimizer."""
    if job.compiled:
        return 0.0
    of_block = (1 + job.recomputed / 3) * LAUNCHING_SECONDS + engine.is_fsdp1 * FSDP1_SECONDS
    return len(shape.counts.executed) * of_block


def _optimizer_step(shape: ModelShape, num_owned: float, engine: Engine, speed: _Speed) -> float:
    """Return the seconds of the optimizer step on the GPU."""
    moved: float = CLIPPING_BYTES + FUSED_BYTES[engine.optimizer]
    if engine.optimizer_kernel != "fused":
        moved += FOREACH_BYTES - FUSED_BYTES["adamw"]
    engine = adapters.engine_of_trained(engine, shape.adapter)
    moved *= model_states.master_bytes(engine) / model_states.MASTER_BYTES
    if engine.parameter_bytes == 2 and engine.precision != "pure-bf16" and engine.kind != "fsdp":
        moved += MASTER_CAST_BYTES
    multiplied = MUON_FLOPS * shape.hidden if engine.optimizer == "muon" else 0
    return num_owned * (moved / speed.stream + multiplied / speed.products)


def exposed(compute: float, hidden: float, unhidden: float) -> float:
    """Return the seconds that communication adds to a step after its overlap with computation.

    `compute` and `hidden` are the seconds of computation and of communication that can overlap. `unhidden` is the share
    of the shorter one that does not overlap.
    """
    return max(hidden - compute, 0.0) + unhidden * min(compute, hidden)


@dataclass(frozen=True)
class _Speed:
    """The rates that a GPU reaches with one engine."""

    peak: float  # FLOP/s
    products: float  # FLOP/s
    attention: float  # FLOP/s
    flash: float  # FLOP/s of the job's kernel of attention
    operands: float  # bytes/s of the operands of products
    stream: float  # bytes/s of all other kernels

    @classmethod
    def of(cls, engine: Engine, job: StepConfig, box: Cluster, constants: Constants) -> _Speed:
        gpu = box.gpu
        peak = product_flops_per_second(gpu, engine.precision)
        attention = gpu.peak_flops_per_second["bf16"] if engine.precision == "fp8" else peak
        own = gpu.resembled
        nearest = nearest_generations(own)[0]
        # The share of the peak in products, relative to the card of the fitted constants.
        relative = cards.relative_share(gpu, nearest)
        if relative is None:
            relative = ACHIEVABLE[own] / ACHIEVABLE[nearest] if own in ACHIEVABLE else 1.0
        flash = constants.attention_efficiency
        if nearest in FLASH_EFFICIENCY:
            flash = cards.flash_share(gpu, nearest, FLASH_EFFICIENCY[nearest])
        if own in ("Hopper", "Blackwell"):
            flash *= FASTER_THAN_FLASH_2.get(job.attention, 1.0)
        operands = cards.operand_share(gpu, nearest, constants.memory_efficiency, STREAM_EFFICIENCY)
        return cls(
            peak,
            peak * (FP32_EFFICIENCY if engine.precision == "fp32" else constants.product_efficiency * relative),
            attention * constants.attention_efficiency,
            attention * flash,
            gpu.memory_bandwidth * operands,
            gpu.memory_bandwidth * STREAM_EFFICIENCY,
        )


# ---------------------------------------------------------------- computing


@dataclass(frozen=True)
class _Compute:
    """The seconds of computation in one micro step, by pass."""

    forward: float
    backward: float
    recompute: float


def _compute(shape: ModelShape, engine: Engine, job: StepConfig, speed: _Speed) -> _Compute:
    blocks, size = _blocks(shape, engine, job, speed), engine.compute_bytes
    # The products outside the blocks.
    outside, batch, length = shape.counts.outside, job.micro_batch_size, job.rank_length
    operands = outside.product_elements.of(batch, length) + outside.weights
    head = outside.products.of(batch, length) / speed.products + size * operands / speed.operands
    logits = computation.num_logits(shape, job)
    logit_read, logit_read_backward = _logit_bytes_moved(job.loss, size)
    is_autocast = computation.arithmetic(engine, shape.adapter) == "autocast"
    casts = 0.0
    if is_autocast and not adapters.is_quantized(shape):
        # Casts of fp32 weights in the forward pass; casts and additions of their gradients in the backward pass.
        casts = shape.num_params / speed.stream
    forward = blocks.forward + head + logits * logit_read / speed.stream
    added = _adapters(shape, engine, job, speed)
    of_frozen = 0.0
    if (part := frozen.part_of(shape)) is not None:  # it runs in the forward pass only
        of_frozen = _blocks(part, engine, job, speed).forward
        of_frozen += 6 * part.num_params / speed.stream if is_autocast else 0.0
    return _Compute(
        forward=forward + 6 * casts + added.forward + of_frozen,
        backward=blocks.backward
        + _backward_products(shape) * head
        + logits * logit_read_backward / speed.stream
        + 18 * casts
        + added.backward,
        recompute=blocks.recompute + added.recompute,
    )


def _backward_products(shape: ModelShape) -> int:
    """Return the products of the backward pass for each product of the forward pass. Frozen weights need one."""
    return 2 if shape.adapter is None else 1


# Passes over the input and the output of a Linear that its adapter adds in forward, besides its own products, by the
# forward method of PEFT. Of the input: a cast, and dropout. Of the output: scaling, addition, and a cast. Compiled or
# written as one kernel, only the addition is left.
ADAPTER_INPUT_PASSES = {False: 2, True: 4}  # without and with dropout
ADAPTER_OUTPUT_PASSES = {"lora": 6, "dora": 12}
FUSED_OUTPUT_PASSES = 2
ADAPTER_KERNELS = 6


def _adapters(shape: ModelShape, engine: Engine, job: StepConfig, speed: _Speed) -> _Compute:
    """Return the seconds that adapters add to a micro step, and those of dequantizing the frozen weights."""
    adapter = shape.adapter
    if adapter is None:
        return _Compute(0.0, 0.0, 0.0)
    size = 4 if adapter.in_fp32 and engine.kind in ("torch", "ddp") else engine.compute_bytes
    forward, gradients = 0.0, 0.0

    def product(rows: float, inner: int, columns: int) -> float:
        """Return the seconds of a matrix product of (rows, inner) with (inner, columns)."""
        elements = rows * (inner + columns) + inner * columns
        return 2 * rows * inner * columns / speed.products + engine.compute_bytes * elements / speed.operands

    for linear in adapters.targeted(shape, adapter):
        if linear.is_parameter:  # the adapter is added to the whole weight, which then has a gradient
            added = linear.num_experts * product(linear.inner, linear.num_fused * adapter.rank, linear.outer)
            forward += linear.count * max(added, ADAPTER_KERNELS * KERNEL_SECONDS)
            tokens = job.tokens * (shape.experts_per_token if linear.num_experts > 1 else 1)
            gradients += linear.count * product(tokens, linear.inner, linear.outer)
            continue
        rows = linear.rows.of(job.micro_batch_size, job.rank_length)
        products = product(rows, linear.inner, adapter.rank) + product(rows, adapter.rank, linear.outer)
        passes = ADAPTER_INPUT_PASSES[adapter.has_dropout] * linear.inner
        passes += ADAPTER_OUTPUT_PASSES[adapter.kind] * linear.outer
        if job.is_fused:
            passes = FUSED_OUTPUT_PASSES * linear.outer
        others = rows * size * passes / speed.stream
        forward += linear.executions * max(products + others, ADAPTER_KERNELS * KERNEL_SECONDS)
    bytes_per_weight = adapters.NF4_BITS / 8 + engine.compute_bytes
    dequantized = adapters.quantized_elements(shape) * bytes_per_weight / speed.stream
    again = job.recomputed * (forward + dequantized)
    return _Compute(forward + dequantized, 2 * forward + gradients + dequantized, again)


# Passes of eager attention's products over the matrices of scores. Forward: the first product writes the scores, and
# the second one reads the probabilities. Backward: one product writes the gradient of the probabilities, one reads the
# probabilities, and two read the gradient of the scores.
SCORE_PASSES_FORWARD, SCORE_PASSES_BACKWARD = 2, 4


def has_unaligned_heads(shape: ModelShape, engine: Engine, job: StepConfig) -> bool:
    """Return whether tensor cores cannot compute the products of attention, because of the size of the heads."""
    is_misfit = engine.compute_bytes == 2 and shape.head_size % ALIGNED_HEAD != 0
    return is_misfit and computation.is_eager(shape, job)


# The bytes of operands at a fitted efficiency may also stand for other kernels, some of which torch.compile fuses. But
# compiled jobs have no efficiency of their own: refitted with 0.3 to 0.7 for them, the model describes the published
# rows worse as a whole, and its 90th percentile of compiled ones is no better. Their interval is wider instead
# (intervals.py).
def _blocks(shape: ModelShape, engine: Engine, job: StepConfig, speed: _Speed) -> _Compute:
    """Return the seconds of all blocks.

    A fused kernel of attention computes only unmasked scores. It saves no scores, so its backward pass has five
    products where the forward pass has two. Eager attention computes all scores like any other product. Its products
    write and read the matrices of scores, which are larger than their other operands.
    """
    size, batch, length = engine.compute_bytes, job.micro_batch_size, job.rank_length
    arithmetic, is_eager = computation.arithmetic(engine, shape.adapter), computation.is_eager(shape, job)
    launched = KERNELS_PER_COMPILED_BLOCK * KERNEL_SECONDS if job.compiled else 0.0
    forward = backward = recompute = 0.0
    for kind, part in enumerate(shape.counts.kinds):
        count = shape.counts.executed.count(kind)
        operands = part.product_elements.of(batch, length) + part.weights
        products = part.products.of(batch, length) / speed.products + size * operands / speed.operands
        multiplied = job.sequence_ranks * part.attention.of(batch, length)  # with the tokens of all ranks
        if is_eager:  # the kernels between its two products are among the others
            scores = size * part.dropped_scores.of(batch, length) / speed.stream
            multiplied /= UNALIGNED_SHARE * speed.peak if has_unaligned_heads(shape, engine, job) else speed.products
            attention = multiplied + SCORE_PASSES_FORWARD * scores
            attention_backward = 2 * multiplied + SCORE_PASSES_BACKWARD * scores
        else:
            attention = part.causal * multiplied / (speed.attention if job.attention == "flash-1" else speed.flash)
            attention_backward = 2.5 * attention
        of_kernels = computation.moved_bytes(part, arithmetic, size, job)
        moved, moved_backward = (num_bytes / speed.stream for num_bytes in of_kernels)
        # A process launches kernels while the GPU computes, so the slower of the two counts.
        block = max(products + attention + moved, launched)
        again = job.recomputed * block
        if job.activation_checkpointing == "selective-op":  # half of the products, no attention, all other kernels
            again = job.recomputed * products + moved
        block_backward = _backward_products(shape) * products + attention_backward + moved_backward
        forward += count * block
        backward += count * max(block_backward, 2 * launched)
        recompute += count * again
    return _Compute(forward, backward, recompute)


# Bytes per logit that are moved in forward and backward, without the product. `size` is the bytes per logit. fused and
# chunked: the loss reads the logits, and the gradient replaces them. eager: cast to fp32, log-softmax, gradient, cast
# back. upcast: cast to fp32, read, the gradient replaces the logits, cast back.
def _logit_bytes_moved(loss: LossKernel, size: int) -> tuple[int, int]:
    match loss:
        case "upcast":
            return (size + 8, size + 12) if size == 2 else (4, 8)
        case "eager":
            return (size + 12, size + 16) if size == 2 else (8, 12)
    return size, 2 * size


# ---------------------------------------------------------------- communicating


@dataclass(frozen=True)
class _Transfers:
    """The seconds of communication, or of transfers over PCIe, by the computation with which they overlap.

    They overlap with the forward or backward pass of a micro step, or with the last backward pass. Those of `serial`,
    in a micro step, and of `step`, after the last one, overlap with nothing.
    """

    forward: float = 0.0
    backward: float = 0.0
    last_backward: float = 0.0
    serial: float = 0.0
    step: float = 0.0

    def overlapped(self, micro_steps: int) -> float:
        """Return the seconds in an optimizer step of the transfers that can overlap with computation."""
        return micro_steps * (self.forward + self.backward) + self.last_backward


# Collectives in subgroups. If a subgroup does not fit into a node, its collectives take as long as those of all ranks.
SUBGROUPS = ("subgroup_all_gather", "subgroup_reduce_scatter")
GATHERS = ("all_gather", "subgroup_all_gather", "broadcast")


def _num_gathers(shape: ModelShape, engine: Engine, job: StepConfig) -> float:
    """Return how often a micro step gathers all parameters at stage 3.

    The number is fractional if some parameters stay gathered, and 0 at other stages.
    """
    if engine.zero_stage != 3:
        return 0.0
    if engine.kind == "fsdp":
        return 1.0 + engine.reshard_after_forward * (2 if engine.is_fsdp1 and job.recomputed else 1)
    return gathered_elements(engine, adapters.base_of(shape), job) / shape.num_params


def _communication(shape: ModelShape, engine: Engine, job: StepConfig, box: Cluster, hop_seconds: float) -> _Transfers:
    """Return the seconds of the collectives of theory/communication/, by the computation with which they overlap."""
    world_size = engine.world_size
    if world_size == 1:
        return _Transfers()
    nodes = box.num_nodes
    link, latency = box.gpu.link_bandwidth, COLLECTIVE_SECONDS
    if nodes > 1:  # a ring leaves and enters each node once and uses all its network adapters
        link, latency = min(link, _network(box)), latency + nodes * hop_seconds
    subgroup = engine.secondary_partition_size if engine.secondary_partition_size > 1 else engine.num_shards

    def link_rate(kind: str) -> tuple[float, float]:
        """Return the bytes per second and the latency in seconds of one collective.

        In a ring of n ranks, n - 1 of n parts of a tensor pass over each link.
        """
        if kind == "subgroup_all_reduce":  # across replicas: one ring per shard; all rings share a node's adapters
            at_once = min(engine.num_shards, box.gpus_per_node) if nodes > 1 else 1
            return LINK_EFFICIENCY * link / at_once * engine.replicas / (engine.replicas - 1), latency
        if kind in SUBGROUPS and subgroup <= box.gpus_per_node:
            return LINK_EFFICIENCY * box.gpu.link_bandwidth * subgroup / (subgroup - 1), COLLECTIVE_SECONDS
        return LINK_EFFICIENCY * link * world_size / (world_size - 1), latency

    def spent(sums: communication.Sums) -> tuple[float, float]:
        """Return the seconds of gathers and the seconds of reductions. An all-reduce sends its bytes twice."""
        seconds = [0.0, 0.0]
        for kind, (count, num_bytes) in sums.items():
            passes = 2 if kind.endswith("all_reduce") else 1
            rate, delay = link_rate(kind)
            seconds[kind not in GATHERS] += passes * num_bytes / rate + count * delay
        return seconds[0], seconds[1]

    per_step, per_micro_step = communication.parts(engine, shape, job.activation_checkpointing, job.dropout)
    (gathered_once, reduced_once), (gathered, reduced) = spent(per_step), spent(per_micro_step)
    if engine.kind == "ddp":
        return _Transfers(last_backward=gathered_once + reduced_once)
    moved = _of_parameters(shape, engine, job, (gathered_once, reduced_once), (gathered, reduced))
    if job.sequence_ranks == 1:
        return moved
    of_forward, *others = (
        _exchanged_seconds(each, job, engine, box, hop_seconds) for each in sequence.exchanges(engine, shape, job)
    )
    if engine.kind == "fsdp":  # the ring computes with the keys of one rank while those of the others arrive
        return dataclasses.replace(moved, forward=moved.forward + of_forward, backward=moved.backward + sum(others))
    return dataclasses.replace(moved, serial=moved.serial + of_forward + sum(others))


def _network(box: Cluster) -> float:
    """Return the bytes per second that would leave a node if NCCL reached `LINK_EFFICIENCY` of them."""
    return min(box.node_bandwidth, TCP_BANDWIDTH / LINK_EFFICIENCY if box.network == "tcp" else math.inf)


def _of_parameters(
    shape: ModelShape, engine: Engine, job: StepConfig, once: tuple[float, float], each: tuple[float, float]
) -> _Transfers:
    """Return when parameters are gathered and gradients are reduced, from the seconds per step and per micro step.

    Both pairs have the seconds of the gathers and those of the reductions.
    """
    (gathered_once, reduced_once), (gathered, reduced) = once, each
    forward = gathered / max(1.0, _num_gathers(shape, engine, job))
    if engine.kind == "fsdp" and not engine.syncs_each_micro_step:
        return _Transfers(forward=forward, backward=gathered - forward, last_backward=reduced_once)
    if engine.kind == "fsdp":
        return _Transfers(forward=forward, backward=gathered - forward + reduced, step=reduced_once)
    if engine.zero_stage == 1 and engine.overlap_comm:
        return _Transfers(last_backward=reduced_once, step=gathered_once)
    moved = _Transfers(forward=forward, backward=gathered - forward, step=gathered_once + reduced_once)
    if engine.overlap_comm:
        return dataclasses.replace(moved, backward=moved.backward + reduced)
    return dataclasses.replace(moved, serial=reduced)


def _exchanged_seconds(
    collectives: Iterable[Collective], job: StepConfig, engine: Engine, box: Cluster, hop_seconds: float
) -> float:
    """Return the seconds of collectives among the ranks that share a sequence.

    They have the same constants as other collectives, and were never compared with a measurement. In a gather, and if
    the ring passes gradients on, each node sends through all of its adapters what one GPU sends. In an exchange of
    Ulysses, every GPU of a node sends a part to every other node.
    """
    ranks, link, latency = job.sequence_ranks, box.gpu.link_bandwidth, COLLECTIVE_SECONDS
    outside = max(0.0, 1 - box.gpus_per_node / ranks)  # the share of the ranks that is on other nodes
    if outside:
        latency += ranks / box.gpus_per_node * hop_seconds
    seconds = 0.0
    for kind, num_bytes in collectives:
        passes_on = engine.kind == "fsdp" and kind.endswith("all_to_all")
        sent = num_bytes if passes_on else num_bytes * (ranks - 1) / ranks
        if not outside:
            needed = sent / link
        elif engine.kind == "fsdp":
            needed = sent / min(link, _network(box))
        else:
            needed = max(sent / link, outside * num_bytes * box.gpus_per_node / _network(box))
        seconds += needed / LINK_EFFICIENCY + latency
    return seconds


# ---------------------------------------------------------------- offloading


def _pcie(shape: ModelShape, engine: Engine, job: StepConfig, box: Cluster) -> _Transfers:
    """Return the seconds of the transfers over PCIe that offload needs.

    Source for DeepSpeed 0.19.8: runtime/zero/stage_1_and_2.py and stage3.py.
    """
    # Bytes per trained parameter, divided by this rate, are the seconds in which a rank's share is sent.
    rate = PCIE_EFFICIENCY * box.gpu.pcie_bandwidth * engine.num_shards / adapters.num_trainable(shape)
    once = engine.parameter_bytes / rate
    # Checkpoints are copied to the host in the forward pass, and back in the backward pass.
    forward = backward = computation.offloaded_bytes(shape, engine, job) / (PCIE_EFFICIENCY * box.gpu.pcie_bandwidth)
    if engine.offload_param != "none":  # a shard is sent to the GPU before each gather
        of_frozen = adapters.frozen_bytes_of_rank(shape, engine)
        sent = once + of_frozen / (PCIE_EFFICIENCY * box.gpu.pcie_bandwidth)
        forward += sent
        backward += max(0.0, _num_gathers(shape, engine, job) - 1) * sent
    if engine.offload_optimizer == "none":
        return _Transfers(forward, backward)
    if engine.kind == "fsdp":  # after each reduction, gradients are sent to the host and added there
        if not engine.syncs_each_micro_step:
            return _Transfers(forward, backward, once)
        return _Transfers(forward, backward + once)
    last_backward = 4 / rate  # gradients are sent to the host in fp32, which the host's optimizer reads
    if engine.zero_stage == 2:
        # Gradients are added up through host memory. Each micro step sends them to the host, and all but the first
        # micro step fetch them before (async_accumulate_grad_in_cpu_via_gpu). A single micro step does neither.
        micro_steps = job.gradient_accumulation_steps
        if micro_steps > 1:
            backward = backward + (2 - 1 / micro_steps) * once
    elif engine.zero_stage == 3:
        # The same, in the type of accumulation. Here, the first micro step fetches them too (partition_grads).
        backward = backward + 2 * engine.accumulation_bytes / rate
    return _Transfers(forward, backward, last_backward)


def _host_step(num_owned: float, engine: Engine, box: Cluster, thread_bandwidth: float) -> float:
    """Return the seconds of the optimizer step in host memory and of the transfer of the new parameters to the GPU.

    Raises ValueError if the host of the machine is not known.
    """
    if box.host_memory_bandwidth is None or box.host_cores is None:
        raise ValueError(
            f"no typical machine with {box.gpu.name} is known. Add --host-memory, --host-cores and --host-bandwidth"
        )
    ranks = box.gpus_of_node
    by_memory = ranks * num_owned * HOST_STEP_BYTES / (HOST_MEMORY_EFFICIENCY * box.host_memory_bandwidth)
    threads = max(1, box.host_cores // ranks)
    by_threads = num_owned * HOST_STEP_BYTES / (threads * thread_bandwidth)
    size = engine.parameter_bytes if engine.offload_param == "none" else 0
    up = num_owned * size / (PCIE_EFFICIENCY * box.gpu.pcie_bandwidth)
    return max(by_memory, by_threads) + up


def _disk(shape: ModelShape, engine: Engine, box: Cluster, num_gathers: float) -> float:
    """Return the seconds of a node's disks.

    They do not overlap with anything, because DeepSpeed's pipelined swapping is off by default. Raises ValueError if
    the machine has no known disk.
    """
    if "nvme" not in (engine.offload_optimizer, engine.offload_param):
        return 0.0
    if not box.disk_read_bandwidth or not box.disk_write_bandwidth:
        raise ValueError(
            f"no machine with {box.gpu.name} and a local disk is known. If you have a disk, add --disk and "
            "--disk-bandwidth"
        )
    of_node = box.gpus_of_node / engine.num_shards
    share = adapters.num_trainable(shape) * of_node
    read: float = 0.0
    written = 0.0
    if engine.offload_optimizer == "nvme":  # reads and writes gradient, master and moments in fp32
        read, written = 16 * share, 16 * share
    if engine.offload_param == "nvme":
        size = engine.parameter_bytes
        of_frozen = size * frozen.num_params(shape) * of_node
        of_frozen += 0.0 if shape.adapter is None else adapters.frozen_bytes(shape, engine) * of_node
        read, written = read + num_gathers * (size * share + of_frozen), written + size * share
    return read / box.disk_read_bandwidth + written / box.disk_write_bandwidth
