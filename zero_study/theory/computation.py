"""Compute the work of one rank in a micro step: the bytes saved for the backward pass, the FLOPs, and the moved bytes.

All of it follows from the counts of a model (shapes/counts.py), which are numbers of a traced forward and backward
pass. arXiv:1910.02054, sec. 3.2, calls activations, logits and temporary tensors residual states. For BERT in 16 bits
with dropout and eager attention, the bytes of a block are those of the formula s b h (34 + 5 a s / h) of
arXiv:2205.05198.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from zero_study.theory import adapters, frozen
from zero_study.theory.adapters import Adapter
from zero_study.theory.engine import Engine, LossKernel, StepConfig
from zero_study.theory.shapes import ModelShape
from zero_study.theory.shapes.counts import ModelCounts, PartCounts, Polynomial, SettingCounts

# fp32: everything is fp32. autocast: parameters are fp32, matrix products are in 16 bits. half: everything is in 16
# bits.
Arithmetic = Literal["fp32", "autocast", "half"]

# Bytes per logit at the start of the backward pass, by the kernel of the loss. eager: the saved log-softmax, its
# gradient and the gradient of the logits, all in fp32. upcast: fp32 logits, and a copy that becomes their gradient.
# fused: 16-bit logits and their gradient. chunked: the logits of a few tokens at a time, which are neglected.
LOGIT_BYTES: dict[LossKernel, int] = {"eager": 12, "upcast": 8, "fused": 4, "chunked": 0}

# With one kernel for scaling, mask and softmax, eager attention moves these shares of the bytes of its matrices. Of
# nine passes over them in forward and eight in backward, four and six are left.
FUSED_FORWARD_SHARE = 4 / 9
FUSED_BACKWARD_SHARE = 6 / 8
# Bytes per element of an attention matrix that softmax in fp32 and its 16-bit copy save.
CAST_SOFTMAX_BYTES = 4 + 2
# PyTorch's CPU kernel of attention has no dropout. The operators in its place save softmax, mask and product in fp32.
CPU_SCORE_BYTES = 12


def arithmetic(engine: Engine, adapter: Adapter | None = None) -> Arithmetic:
    """Return in which precision the operators inside a block compute: "fp32", "half" or "autocast".

    FSDP2's mixed precision casts whole modules, so nothing inside a block is fp32. Neither is anything if the frozen
    weights under adapters are in 16 bits, because autocast changes no 16-bit tensor.
    """
    if engine.compute_bytes == 4:
        return "fp32"
    if adapter is not None and adapter.frozen != "fp32" and not adapter.has_fp32_stream(engine):
        return "half"
    return "autocast" if engine.precision.endswith("-autocast") and engine.kind != "fsdp" else "half"


def is_eager(shape: ModelShape, job: StepConfig) -> bool:
    """Return whether attention stores its score matrices although the model could use a fused kernel."""
    return any(_is_eager(kind, job) for kind in shape.counts.kinds)


def _is_eager(part: PartCounts, job: StepConfig) -> bool:
    return job.attention == "eager" and "half eager" in part.settings


def setting_of(part: PartCounts, computed_in: Arithmetic, job: StepConfig) -> SettingCounts:
    """Return the counts of a part of a model for the precision and the attention of a job."""
    return part.settings[f"{computed_in} {'eager' if _is_eager(part, job) else 'sdpa'}"]


def _mean(counts: ModelCounts, value: Callable[[PartCounts], float]) -> float:
    """Return the mean of a value over all blocks."""
    blocks = counts.executed
    if not blocks:
        return 0.0
    return sum(blocks.count(kind) / len(blocks) * value(part) for kind, part in enumerate(counts.kinds))


def _executed(counts: ModelCounts) -> list[PartCounts]:
    return [counts.kinds[kind] for kind in sorted(set(counts.executed))]


# ---------------------------------------------------------------- saved for the backward pass


def block_bytes(shape: ModelShape, engine: Engine, job: StepConfig) -> float:
    """Return the bytes that one block saves for its backward pass, per rank and micro step, as a mean over blocks.

    Frozen weights need no gradients, so what is saved only for these is left out, and what adapters save is added.
    """
    saved = _mean(shape.counts, lambda part: _saved_bytes(part, shape, engine, job))
    saved += _saved_by_exchange(shape, engine, job)
    return saved if shape.adapter is None else saved + _change_by_adapters(shape, engine, job)


def largest_block_bytes(shape: ModelShape, engine: Engine, job: StepConfig) -> float:
    """Return the largest number of bytes that any block saves for its backward pass."""
    largest = max((_saved_bytes(part, shape, engine, job) for part in _executed(shape.counts)), default=0.0)
    largest += _saved_by_exchange(shape, engine, job)
    return largest if shape.adapter is None else largest + _change_by_adapters(shape, engine, job)


def _saved_bytes(part: PartCounts, shape: ModelShape, engine: Engine, job: StepConfig) -> float:
    """Return the bytes that a part without adapters saves for the backward pass.

    With fused kernels, only the inputs of norms and activation functions are saved, and in 16 bits no fp32 casts. Texts
    are packed then, so that attention between all tokens has no mask of their padding.
    """
    computed_in, size = arithmetic(engine, shape.adapter), engine.compute_bytes
    batch, length = job.micro_batch_size, job.rank_length
    dropped = _saved_by_dropout(part, computed_in, size, job)
    saved = setting_of(part, computed_in, job).saved
    if not job.is_fused:
        return saved.of(batch, length) + dropped
    # The mask of padding is the only matrix that a fused kernel of attention saves.
    is_packed = job.kernels == "fused" and bool(part.attention.per_pair) and part.causal == 1.0
    per_pair = 0.0 if is_packed and not _is_eager(part, job) else saved.per_pair
    saved = Polynomial(saved.constant, saved.per_token, per_pair)
    if computed_in == "half":  # what is saved in fp32, in half the bytes; but softmax stays in fp32
        full = setting_of(part, "fp32", job).saved
        saved = Polynomial(full.constant * size / 4, full.per_token * size / 4, per_pair)
    composed = part.composed.of(batch, length)
    if job.kernels == "fused" and not job.has_separate_gates:  # the output of the activation function is not saved
        composed += part.gated.of(batch, length)
    return saved.of(batch, length) - size * composed + dropped


def _saved_by_exchange(shape: ModelShape, engine: Engine, job: StepConfig) -> float:
    """Return the bytes that a block saves more if ranks share a sequence.

    The output of attention is saved twice: by attention itself, and by the next product after Ulysses' exchange, or in
    another layout after the ring has put its parts together (on all ranks but the last). With more ranks than heads of
    keys, Ulysses repeats these heads.
    """
    if job.sequence_ranks == 1:
        return 0.0
    repeated = 0 if engine.kind == "fsdp" else 2 * max(0, job.sequence_ranks - shape.kv_heads)
    return job.tokens * engine.compute_bytes * shape.head_size * (shape.heads + repeated)


def _dropped_scores(part: PartCounts, job: StepConfig) -> Polynomial:
    """Return the elements of attention's matrices that pass through dropout, apart from those in a fused kernel."""
    more = part.dropped_scores if _is_eager(part, job) else Polynomial()
    return Polynomial(more.constant, more.per_token, more.per_pair + part.dropped.per_pair)


def _dropped_elements(part: PartCounts, job: StepConfig) -> tuple[float, float]:
    """Return the elements that pass through dropout in a micro step: those of attention's matrices, and all others."""
    batch, length = job.micro_batch_size, job.rank_length
    others = Polynomial(part.dropped.constant, part.dropped.per_token)
    return _dropped_scores(part, job).of(batch, length), others.of(batch, length)


def _saved_by_dropout(part: PartCounts, computed_in: Arithmetic, size: int, job: StepConfig) -> float:
    """Return the bytes that a part saves more with dropout.

    Each dropout saves its mask, which has one byte per element on a GPU, and the type of the input on a CPU. A fused
    kernel of attention keeps only the seed of its mask. With eager attention, the product with the values saves the
    output of dropout. If softmax is cast, this replaces the cast matrix.
    """
    if not job.dropout:
        return 0.0
    scores, others = _dropped_elements(part, job)
    saved = (1 if job.device == "gpu" else size) * (scores + others)
    without = setting_of(part, computed_in, job).saved.per_pair
    if size == 4 or without < CAST_SOFTMAX_BYTES * _dropped_scores(part, job).per_pair:
        saved += size * scores
    return saved + (_more_without_fused_attention(part, without, size, job) if _is_composed_on_cpu(part, job) else 0)


def _is_composed_on_cpu(part: PartCounts, job: StepConfig) -> bool:
    """Return whether PyTorch composes attention of operators because its CPU kernel has no dropout."""
    has_dropout = job.dropout and bool(part.attention.per_pair) and bool(part.dropped_scores.per_pair)
    return job.device == "cpu" and has_dropout and not _is_eager(part, job)


def _more_without_fused_attention(part: PartCounts, saved_per_pair: float, size: int, job: StepConfig) -> float:
    """Return the bytes that operators of attention in fp32 save more than a fused kernel, whose mask they do not save.

    The kernel also saves one fp32 number per token and head. Queries, keys and values are cast to fp32.
    """
    heads, queries = part.dropped_scores.per_pair, part.attention.per_pair / 4
    of_token = CPU_SCORE_BYTES * heads * job.rank_length - 4 * heads + 3 * (4 - size) * queries
    return job.tokens * (of_token - saved_per_pair * job.rank_length)


def outside_bytes(shape: ModelShape, engine: Engine, job: StepConfig) -> float:
    """Return the bytes that the layers outside the blocks save for the backward pass, except those of the loss.

    These are embeddings, the last norm, and a layer before the output layer.
    """
    return _saved_bytes(shape.counts.outside, shape, engine, job)


def checkpoint_bytes(shape: ModelShape, engine: Engine, job: StepConfig) -> float:
    """Return the bytes that a checkpointed block saves. This is its input, as a mean over all blocks."""
    computed_in, batch, length = arithmetic(engine, shape.adapter), job.micro_batch_size, job.rank_length
    return _mean(shape.counts, lambda part: setting_of(part, computed_in, job).entering.of(batch, length))


# Checkpoints that stay on the GPU if the others are moved to the host: the last ones, whose copies may not have arrived
# yet when the backward pass begins. DeepSpeed 0.19.8 keeps 3 (keep_last_count and max_fwd_stash_count of
# offload_activations.py). TRL and axolotl keep 5 tensors (max_fwd_stash_size), some of which are saved after the last
# block. ArcticTraining copies without overlap, and keeps none. In the backward pass, the GPU has the checkpoint of the
# block that is recomputed, which is among the tensors of this block.
KEPT_CHECKPOINTS = 3


def offloaded_bytes(shape: ModelShape, engine: Engine, job: StepConfig) -> float:
    """Return the bytes of the checkpoints that a micro step copies to the host, and back in its backward pass."""
    return shape.layers * checkpoint_bytes(shape, engine, job) if job.activation_checkpointing == "offload" else 0.0


def selective_op_bytes(shape: ModelShape, engine: Engine, job: StepConfig) -> float:
    """Return the bytes that one block saves with torchtitan's selective checkpointing of operators.

    These are the block's input, the output of fused attention, which has the same width, and the outputs of the first,
    third, fifth ... matrix product (torchtitan, function _get_custom_policy). Products read and write about as many
    elements, so half of their outputs are a quarter of both.
    """
    batch, length = job.micro_batch_size, job.rank_length
    moved = _mean(shape.counts, lambda part: part.product_elements.of(batch, length))
    return engine.compute_bytes * moved / 4 + 2 * checkpoint_bytes(shape, engine, job)


def cast_bytes(shape: ModelShape, engine: Engine) -> int:
    """Return the bytes of autocast's 16-bit copies of the weights, which exist as long as the saved tensors.

    Quantized weights have none. Frozen weights of Linear modules have none under DeepSpeed's stage 3, whose function
    saves the weights themselves (`adapters.saves_frozen_inputs`).
    """
    if arithmetic(engine, shape.adapter) != "autocast" or adapters.is_quantized(shape):
        return 0
    if adapters.saves_frozen_inputs(shape, engine):
        return 0
    counts = shape.counts
    blocks = sum(
        copies * kind.settings["autocast sdpa"].casts for copies, kind in zip(counts.copies, counts.kinds, strict=True)
    )
    return counts.outside.settings["autocast sdpa"].casts + blocks


def activation_bytes(shape: ModelShape, engine: Engine, job: StepConfig, logits: float) -> tuple[float, float, float]:
    """Return the activation bytes at three moments: at the loss, and in the backward pass of the last and first block.

    They include autocast's copies of the weights.
    """
    block = block_bytes(shape, engine, job)
    outside = outside_bytes(shape, engine, job)
    casts = cast_bytes(shape, engine)
    recomputed = job.recomputed
    saved = computed = block  # of all blocks, and of the one whose backward pass runs
    if job.activation_checkpointing == "selective-op":
        saved = min(selective_op_bytes(shape, engine, job), block)
        at_loss = shape.layers * saved + outside + casts
        return at_loss, at_loss + block - saved, outside + casts + block
    if recomputed:
        computed = largest_block_bytes(shape, engine, job)
        saved = recomputed * checkpoint_bytes(shape, engine, job) + (1 - recomputed) * block
    # Autocast's 16-bit weights exist as long as the tensors that are saved for the backward pass. Checkpointed blocks
    # save none, so the copies are freed when the forward pass ends, before the loss makes most of its copies of the
    # logits.
    until_loss = max(casts - (1 - 4 / LOGIT_BYTES["eager"]) * logits, 0.0) if recomputed else casts
    layers = min(shape.layers, KEPT_CHECKPOINTS) if job.activation_checkpointing == "offload" else shape.layers
    at_loss = layers * saved + outside + until_loss
    # A checkpointed block is recomputed while the inputs of all blocks are still saved.
    in_last = layers * saved + outside + (recomputed * (computed + casts / shape.layers) if recomputed else casts)
    in_first = outside + (0 if recomputed else casts) + computed
    return at_loss, in_last, in_first


def _change_by_adapters(shape: ModelShape, engine: Engine, job: StepConfig) -> float:
    """Return the bytes that a block with adapters saves more than one without. Usually they are negative.

    Norms that are one kernel save only their input, which the gradient of the input needs too. Then only the inputs of
    Linear modules are left out.
    """
    computed_in, batch, length = arithmetic(engine, shape.adapter), job.micro_batch_size, job.rank_length
    left_out = _mean(shape.counts, lambda part: setting_of(part, computed_in, job).for_weights.of(batch, length))
    if job.is_fused:
        left_out = min(left_out, adapters.saved_inputs(shape, engine, job))
    more = adapters.adapter_bytes(shape, engine, job) - left_out
    return more + adapters.copied_weight_bytes(shape, engine)


# ---------------------------------------------------------------- temporary tensors and logits


def temporary_bytes(shape: ModelShape, engine: Engine, job: StepConfig) -> float:
    """Return the temporary bytes at the peak of a block's backward pass, without the block's saved tensors.

    This is the block that needs most. The peak is usually in the feed-forward part. If the matrices of attention are
    materialized, or if ranks exchange keys and values, the peak can be in attention instead. At that time, the saved
    tensors of the feed-forward part are already freed.
    """
    computed_in = arithmetic(engine, shape.adapter)
    parts = _executed(shape.counts) or [shape.counts.outside]
    temporary = max(_temporary_bytes(part, computed_in, job, shape.adapter is not None) for part in parts)
    if job.sequence_ranks > 1:
        freed = job.tokens * engine.compute_bytes * 2 * shape.feed_forward  # at least
        temporary = max(temporary, _exchange_bytes(shape, engine, job) - freed)
    if shape.adapter is None:
        return temporary
    temporary -= adapters.saved_before_peak(shape, engine, job)
    return temporary + adapters.forward_temporaries(shape, engine)


def _exchange_bytes(shape: ModelShape, engine: Engine, job: StepConfig) -> float:
    """Return the temporary bytes of attention's backward pass if ranks share a sequence.

    The ring has the gathered keys and values of all ranks and a copy of its own, the gradients that it adds up, sends
    and receives in fp32, and the gradients that the kernel returns. Ulysses has the gradient of the output before and
    after its exchange, and those of queries, keys and values.
    """
    size, of_query, of_key = engine.compute_bytes, shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    if engine.kind != "fsdp":
        return job.tokens * size * (4 * of_query + 4 * of_key)
    gathered = size * 2 * of_key * (job.sequence_ranks + 1)
    added = 4 * (of_query + 3 * 2 * of_key)
    return job.tokens * (gathered + added + size * (of_query + 2 * of_key))


def _temporary_bytes(part: PartCounts, computed_in: Arithmetic, job: StepConfig, is_frozen: bool) -> float:
    """Return the temporary bytes of a kind of block, whose weights may be frozen, without its adapters."""
    batch, length = job.micro_batch_size, job.rank_length
    size = 2 if computed_in == "half" else 4
    # The matrices of eager attention are needed at another time than the largest tensors of fused attention's step.
    settings = (setting_of(part, computed_in, job), part.settings[f"{computed_in} sdpa"])
    peaks = [peak for setting in settings for peak in (setting.temporary, setting.temporary_elsewhere)]
    if job.dropout:  # in attention, one matrix less is temporary, because dropout's output is saved
        less = (4 if computed_in == "fp32" else 2) * _dropped_scores(part, job).per_pair
        peaks = [Polynomial(peak.constant, peak.per_token, max(0.0, peak.per_pair - less)) for peak in peaks]
    if _is_composed_on_cpu(part, job):
        eager = part.settings[f"{computed_in} eager"].temporary
        peaks.append(Polynomial(eager.constant, eager.per_token, 4 * part.dropped_scores.per_pair))
    highest = max(peak.of(batch, length) for peak in peaks)
    # A single kernel needs the gradients of its input and its output. Several kernels need those of each result.
    temporary = max(highest - size * part.composed.of(batch, length), highest / 2) if job.is_fused else highest
    return temporary + (settings[0].freed_early.of(batch, length) if is_frozen else 0.0)


def num_logits(shape: ModelShape, job: StepConfig) -> float:
    """Return the number of logits of a micro batch."""
    return shape.counts.logits.of(job.micro_batch_size, job.rank_length)


# ---------------------------------------------------------------- moved bytes


def moved_bytes(part: PartCounts, computed_in: Arithmetic, size: int, job: StepConfig) -> tuple[float, float]:
    """Return the bytes that a part's kernels read and write in both passes, without products and fused attention.

    `size` is the bytes per element of the inputs of products. Dropout reads its input, and writes its output and a
    mask. With fused kernels, the dropout of attention's matrices writes only these.
    """
    batch, length = job.micro_batch_size, job.rank_length
    counts = setting_of(part, computed_in, job)
    scores, others = _dropped_elements(part, job) if job.dropout else (0.0, 0.0)
    dropped = (2 * size + 1) * others + ((1 if job.is_fused else 2) * size + 1) * scores
    if job.is_fused:
        pairs = batch * length * length
        forward = FUSED_FORWARD_SHARE * counts.moved_forward.per_pair * pairs
        backward = FUSED_BACKWARD_SHARE * counts.moved_backward.per_pair * pairs
        forward += size * part.fused_forward.of(batch, length)
        return forward + dropped, backward + size * part.fused_backward.of(batch, length) + dropped
    return counts.moved_forward.of(batch, length) + dropped, counts.moved_backward.of(batch, length) + dropped


# ---------------------------------------------------------------- FLOPs


def head_flops_per_sequence(shape: ModelShape, sequence_length: float) -> float:
    """Return the FLOPs of everything outside the blocks in the forward pass."""
    outside = shape.counts.outside
    return outside.products.of(1, sequence_length) + outside.attention.of(1, sequence_length)


def blocks_flops_per_sequence(shape: ModelShape, sequence_length: float) -> float:
    """Return the FLOPs of all blocks in the forward pass. Activation checkpointing computes this twice."""
    counts = shape.counts
    return sum(
        counts.executed.count(kind) * (part.products.of(1, sequence_length) + part.attention.of(1, sequence_length))
        for kind, part in enumerate(counts.kinds)
    )


def model_flops_per_sequence(shape: ModelShape, sequence_length: float) -> float:
    """Return the FLOPs of all matrix products for one sequence, forward and backward, with two FLOPs per multiply-add.

    Recomputation is not included. The backward pass needs twice as many FLOPs as the forward pass, because every
    product has a gradient for each of its two factors. This is true for the first block too, because embeddings are
    trained. study/training/optimizer_steps.py measures the same number with PyTorch's counter, which ignores rotary
    positions.

    Products with frozen weights have no gradient of the weight, so their backward pass needs as many FLOPs as the
    forward pass. Attention has no weights, and adapters are trained. Experts with an adapter have a gradient of the
    weight too (adapters.adapted_parameters). A frozen part runs in the forward pass only.
    """
    forward = blocks_flops_per_sequence(shape, sequence_length) + head_flops_per_sequence(shape, sequence_length)
    part = frozen.part_of(shape)
    of_frozen = 0.0 if part is None else blocks_flops_per_sequence(part, sequence_length)
    if shape.adapter is None:
        return 3 * forward + of_frozen
    attention = sum(
        shape.counts.executed.count(kind) * of_kind.attention.of(1, sequence_length)
        for kind, of_kind in enumerate(shape.counts.kinds)
    )
    of_experts = adapters.expert_gradient_flops(shape, sequence_length)
    return 2 * forward + attention + of_experts + 3 * adapters.adapter_flops(shape, sequence_length) + of_frozen


def hardware_flops_per_sequence(shape: ModelShape, sequence_length: float, recomputed: float) -> float:
    """Return the FLOPs that a GPU executes: model FLOPs, plus the `recomputed` share of the blocks' forward pass."""
    again = recomputed * blocks_flops_per_sequence(shape, sequence_length)
    return model_flops_per_sequence(shape, sequence_length) + again
