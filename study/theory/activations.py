"""Bytes of activations, logits and temporary tensors, which arXiv:1910.02054, sec. 3.2, calls residual states.

The tensors that autograd saves were counted in the modules of transformers 5.23. Tests count them again. For BERT in
16 bits with dropout and eager attention, the sum equals the formula s b h (34 + 5 a s / h) of arXiv:2205.05198.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from study.theory import adapters, flops, from_counts
from study.theory.adapters import Adapter
from study.theory.engine import Engine, Job, LossKernel
from study.theory.shapes import Architecture, ModelShape

# fp32: everything is fp32. autocast: parameters are fp32, matrix products are in 16 bits. half: everything is in 16
# bits.
Arithmetic = Literal["fp32", "autocast", "half"]


@dataclass(frozen=True)
class BlockBytes:
    """Counts of the tensors that one transformer block saves for its backward pass, by the size of a tensor.

    A pair of counts is for tensors in fp32 and tensors in the type of the matrix products. Masks of dropout are counted
    separately.
    """

    hidden: dict[Arithmetic, tuple[int, int]]  # tensors of the hidden size
    outside: dict[Arithmetic, tuple[int, int]]  # the same outside the blocks, once per model
    wide: int  # tensors of the feed-forward size, if the activation function is one kernel
    softmax: dict[Arithmetic, tuple[int, int]]  # matrices of eager attention
    norms: int  # numbers per token that the norms save
    dropouts: int  # dropout masks of the hidden size
    temporaries: dict[Arithmetic, float]  # temporary bytes in backward, per token and hidden element


_SOFTMAX_IN_FP32: dict[Arithmetic, tuple[int, int]] = {"fp32": (0, 1), "autocast": (1, 1), "half": (1, 1)}
_GPT_NEO = BlockBytes(
    hidden={"fp32": (0, 8), "autocast": (2, 8), "half": (2, 6)},
    outside={"fp32": (0, 2), "autocast": (1, 1), "half": (0, 2)},
    wide=2,
    softmax=_SOFTMAX_IN_FP32,
    norms=4,
    dropouts=2,
    temporaries={"fp32": 13.0, "autocast": 15.0, "half": 13.0},
)
BLOCKS: dict[Architecture, BlockBytes] = {
    "bert": replace(
        _GPT_NEO,
        hidden={"fp32": (0, 8), "autocast": (2, 8), "half": (0, 8)},
        outside={"fp32": (0, 2), "autocast": (1, 0), "half": (0, 2)},
        softmax=dict.fromkeys(get_args(Arithmetic), (0, 1)),
    ),
    "gpt2": replace(
        _GPT_NEO,
        hidden={"fp32": (0, 8), "autocast": (2, 6), "half": (0, 8)},
        softmax={"fp32": (0, 1), "autocast": (1, 1), "half": (0, 1)},
    ),
    "gpt-neo": _GPT_NEO,
    "gpt-j": replace(_GPT_NEO, hidden={"fp32": (0, 6), "autocast": (1, 8), "half": (2, 4)}, norms=2),
}
TRANSFORM_HIDDEN = 3  # tensors of the hidden size that the layer before the output layer saves
# transformers has only eager attention for these architectures.
EAGER_ONLY = ("gpt-neo", "gpt-j")
# transformers composes this activation function of several PyTorch operators, each of which saves its input. The others
# are a single kernel.
COMPOSED_ACTIVATION = "gelu_new"
COMPOSED_WIDE = 3  # additional saved tensors of the feed-forward size
COMPOSED_TEMPORARIES = {"fp32": 16.0, "autocast": 0.0, "half": 1.7}

# Bytes per logit at the start of the backward pass, by the kernel of the loss. eager: the saved log-softmax, its
# gradient and the gradient of the logits, all in fp32. upcast: fp32 logits, and a copy that becomes their gradient.
# fused: 16-bit logits and their gradient. chunked: the logits of a few tokens at a time, which are neglected.
LOGIT_BYTES: dict[LossKernel, int] = {"eager": 12, "upcast": 8, "fused": 4, "chunked": 0}


def arithmetic(engine: Engine, adapter: Adapter | None = None) -> Arithmetic:
    """Return the arithmetic of the blocks.

    FSDP2's mixed precision casts whole modules, so nothing inside a block is fp32. Neither is anything if the frozen
    weights under adapters are in 16 bits, because autocast changes no 16-bit tensor.
    """
    if engine.compute_bytes == 4:
        return "fp32"
    if adapter is not None and adapter.frozen != "fp32" and not adapter.has_fp32_stream(engine):
        return "half"
    return "autocast" if engine.precision.endswith("-autocast") and engine.kind != "fsdp" else "half"


def block_bytes(shape: ModelShape, engine: Engine, job: Job) -> float:
    """Return the bytes that one block saves for its backward pass, per rank and micro step.

    If the blocks differ, this is their mean. Frozen weights need no gradients, so what is saved only for these is left
    out, and what adapters save is added.
    """
    saved = _trained_block_bytes(shape, engine, job)
    return saved if shape.adapter is None else saved + _change_by_adapters(shape, engine, job)


def _change_by_adapters(shape: ModelShape, engine: Engine, job: Job) -> float:
    """Return the bytes that a block with adapters saves more than one without. Usually they are negative.

    Norms that are one kernel save only their input, which the gradient of the input needs too. Then only the inputs of
    Linear modules are left out.
    """
    left_out = adapters.saved_for_weights(shape, arithmetic(engine, shape.adapter))
    if job.is_fused:
        left_out = min(left_out, engine.compute_bytes * (2 * shape.hidden + shape.feed_forward))
    more = adapters.adapter_bytes(shape, engine, job) - left_out
    return job.tokens * more + adapters.copied_weight_bytes(shape, engine)


def _trained_block_bytes(shape: ModelShape, engine: Engine, job: Job) -> float:
    """Return the bytes that one block without adapters saves for its backward pass."""
    if shape.counts is not None:
        return from_counts.block_bytes(shape.counts, arithmetic(engine, shape.adapter), engine.compute_bytes, job)
    block, computed_in = BLOCKS[shape.architecture], arithmetic(engine, shape.adapter)
    size = engine.compute_bytes
    full, short = block.hidden[computed_in]
    if computed_in == "half" and job.is_fused:  # inputs of norms too
        full, short = 0, sum(block.hidden["fp32"])
    eager = is_eager(shape, job)
    token_bytes: float = shape.hidden * (4 * full + size * short) + 4 * block.norms
    token_bytes += size * shape.feed_forward * _wide(shape, job)
    if job.dropout:
        token_bytes += block.dropouts * shape.hidden * _mask_bytes(job, size)
    if eager:
        matrices = _softmax_bytes(shape, engine, job)
    elif job.dropout and job.device == "cpu":
        # PyTorch's CPU kernel has no dropout. The composed attention saves softmax, mask and product, all in fp32.
        matrices = 12
        token_bytes += 3 * (4 - size) * shape.head_size * shape.heads
    else:
        matrices = 0
        token_bytes += 4 * shape.heads  # the logarithm of softmax's sum
        if shape.is_encoder and job.kernels == "transformers":  # padded reviews: every block saves its mask
            token_bytes = token_bytes + size * job.sequence_length
    return job.tokens * (token_bytes + matrices * shape.heads * job.sequence_length)


def largest_block_bytes(shape: ModelShape, engine: Engine, job: Job) -> float:
    """Return the bytes that the block that saves most saves for its backward pass."""
    if shape.counts is None:
        return block_bytes(shape, engine, job)
    kind = arithmetic(engine, shape.adapter)
    largest = from_counts.largest_block_bytes(shape.counts, kind, engine.compute_bytes, job)
    return largest if shape.adapter is None else largest + _change_by_adapters(shape, engine, job)


def _wide(shape: ModelShape, job: Job) -> int:
    """Return the number of saved tensors of a block that have the feed-forward width."""
    more = COMPOSED_WIDE if _is_composed(shape, job) else 0
    return BLOCKS[shape.architecture].wide + more


def outside_bytes(shape: ModelShape, engine: Engine, job: Job) -> float:
    """Return the bytes that the layers outside the blocks save for the backward pass.

    These are embeddings, the last norm, and a layer before the output layer.
    """
    if shape.counts is not None:
        return from_counts.outside_bytes(shape.counts, arithmetic(engine, shape.adapter), job)
    size = engine.compute_bytes
    full, short = BLOCKS[shape.architecture].outside[arithmetic(engine, shape.adapter)]
    masks = _mask_bytes(job, size) if job.dropout and BLOCKS[shape.architecture].dropouts else 0
    short += TRANSFORM_HIDDEN if shape.has_transform else 0
    return job.tokens * shape.hidden * (4 * full + size * short + masks)


def temporary_bytes(shape: ModelShape, engine: Engine, job: Job) -> float:
    """Return the temporary bytes at the peak of a block's backward pass, without the block's saved tensors.

    The peak is usually in the feed-forward part. If the matrices of attention are materialized, the peak can be in
    attention instead. At that time, the saved tensors of the feed-forward part are already freed.
    """
    temporary = _trained_temporary_bytes(shape, engine, job)
    if shape.adapter is None:
        return temporary
    temporary += job.tokens * adapters.freed_before_peak(shape, engine, arithmetic(engine, shape.adapter))
    return temporary + adapters.forward_temporaries(shape, engine)


def _trained_temporary_bytes(shape: ModelShape, engine: Engine, job: Job) -> float:
    """Return the temporary bytes of a block without adapters."""
    if shape.counts is not None:
        return from_counts.temporary_bytes(shape.counts, arithmetic(engine, shape.adapter), job)
    block, computed_in, size = BLOCKS[shape.architecture], arithmetic(engine, shape.adapter), engine.compute_bytes
    composed = COMPOSED_TEMPORARIES[computed_in] if _is_composed(shape, job) else 0
    wide = job.tokens * shape.hidden * (block.temporaries[computed_in] + composed)
    if is_eager(shape, job):
        full, _ = block.softmax[computed_in]
        matrices = (4 if full else size) + (0 if job.dropout else size)
    else:
        matrices = 4 if job.dropout and job.device == "cpu" else 0
    block_inside = size * (shape.feed_forward * _wide(shape, job) + 3.5 * shape.hidden)
    attention = job.tokens * (matrices * shape.heads * job.sequence_length - block_inside)
    return max(wide, attention)


def num_logits(shape: ModelShape, job: Job) -> float:
    """Return the number of logits of a micro batch. 0 for a head that reads one token per sequence, which has few."""
    if shape.counts is not None:
        return shape.counts.logits.of(job.micro_batch_size, job.sequence_length)
    return 0 * job.tokens if shape.is_pooled else job.tokens * shape.output_width


def logit_bytes(shape: ModelShape, job: Job) -> float:
    """Return the bytes of the logits and of the copies that the loss makes of them."""
    return num_logits(shape, job) * LOGIT_BYTES[job.loss]


def logit_gradient_bytes(shape: ModelShape, engine: Engine, job: Job) -> float:
    """Return the bytes of the gradient of the logits, which the backward pass of the output layer reads."""
    return num_logits(shape, job) * min(engine.compute_bytes, LOGIT_BYTES[job.loss])


def checkpoint_bytes(shape: ModelShape, engine: Engine, job: Job) -> float:
    """Return the bytes that a checkpointed block saves. This is its input, which is fp32 under autocast."""
    if shape.counts is not None:
        return from_counts.checkpoint_bytes(shape.counts, arithmetic(engine, shape.adapter), job)
    size = 4 if arithmetic(engine, shape.adapter) == "autocast" else engine.compute_bytes
    return job.tokens * shape.hidden * size


def selective_op_bytes(shape: ModelShape, engine: Engine, job: Job) -> float:
    """Return the bytes that one block saves with torchtitan's selective checkpointing of operators.

    These are the block's input, the output of fused attention, and the outputs of the first, third, fifth ... matrix
    product (torchtitan, function _get_custom_policy).
    """
    if shape.counts is not None:
        return from_counts.selective_op_bytes(
            shape.counts, arithmetic(engine, shape.adapter), engine.compute_bytes, job
        )
    outputs = [product.columns for product in flops.block_products(shape) for _ in range(product.count)]
    width = sum(outputs[::2]) + shape.heads * shape.head_size
    saved = job.tokens * (engine.compute_bytes * width + 4 * shape.heads)
    return saved + checkpoint_bytes(shape, engine, job)


def cast_bytes(shape: ModelShape, engine: Engine) -> int:
    """Return the bytes of autocast's 16-bit copies of the weights, which exist as long as the saved tensors.

    Quantized weights have none. Frozen weights of Linear modules have none under DeepSpeed's stage 3, whose function
    saves the weights themselves (`adapters.saves_frozen_inputs`).
    """
    if arithmetic(engine, shape.adapter) != "autocast" or adapters.is_quantized(shape):
        return 0
    if adapters.saves_frozen_inputs(shape, engine):
        return 0
    if shape.counts is not None:
        return from_counts.cast_bytes(shape.counts)
    # Embeddings are not multiplied, so they are not cast, unless the embedding is the output layer too.
    rows = 0 if shape.has_tied_head else shape.vocabulary
    rows += shape.position_rows
    rows += 2 if shape.architecture == "bert" else 0  # token types
    return 2 * (sum(shape.parameters.matrices) - rows * shape.hidden)


def is_eager(shape: ModelShape, job: Job) -> bool:
    """Return whether attention's matrices are materialized, instead of being computed inside one fused kernel."""
    if shape.counts is not None:  # without an eager setting, the model has one kind of attention
        return job.attention == "eager" and any("half eager" in kind.settings for kind in shape.counts.kinds)
    return job.attention == "eager" or (job.kernels == "transformers" and shape.architecture in EAGER_ONLY)


def _is_composed(shape: ModelShape, job: Job) -> bool:
    return not job.is_fused and shape.activation == COMPOSED_ACTIVATION


def _mask_bytes(job: Job, size: int) -> int:
    """Return the bytes per element of a dropout mask: 1 on a GPU; on a CPU, the mask has the type of its input."""
    return 1 if job.device == "gpu" else size


def _softmax_bytes(shape: ModelShape, engine: Engine, job: Job) -> int:
    """Return the saved bytes per element of the matrices of eager attention."""
    full, short = BLOCKS[shape.architecture].softmax[arithmetic(engine, shape.adapter)]
    size = engine.compute_bytes
    saved = 4 * full + size * short
    if not job.dropout:
        return saved
    # The product with the values saves the output of dropout. If softmax is cast, this replaces the cast matrix.
    return saved + _mask_bytes(job, size) + (0 if full else size)
