"""Bytes of activations, logits and temporary tensors: the residual states of arXiv:1910.02054, sec. 3.2.

The tensors that autograd saves were counted on the modules of transformers 5.23, and tests count them again. For BERT
in 16 bits with dropout and eager attention, the sum equals that of arXiv:2205.05198: s b h (34 + 5 a s / h).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import numpy as np

from study.theory.engine import Engine, Job, LossKernel, Numbers
from study.theory.shapes import GATED, Architecture, ModelShape
from study.theory.shapes.shape import HEAD_NORMS

# How a precision class computes: all in fp32; 16-bit products between fp32 parameters; all in 16 bits.
Arithmetic = Literal["fp32", "autocast", "half"]


@dataclass(frozen=True)
class BlockBytes:
    """The tensors that one transformer block without dropout saves for its backward pass, by their size per token."""

    hidden: dict[Arithmetic, tuple[int, int]]  # of the hidden size: in fp32, and in the type of the products
    outside: dict[Arithmetic, tuple[int, int]]  # the same outside the blocks, once per model
    projections: tuple[int, int]  # of the queries' size and of the keys', where `hidden` does not count them
    wide: int  # of the feed-forward size, in the products' type; with an activation function of one kernel
    softmax: dict[Arithmetic, tuple[int, int]]  # eager attention's matrices: in fp32, and in the products' type
    norms: int  # numbers that the norms keep
    dropouts: int  # masks of the hidden size
    temporaries: dict[Arithmetic, float]  # bytes per token and hidden element that its backward holds beside all that
    head_norms: dict[Arithmetic, tuple[int, int]] = field(default_factory=lambda: _NONE)  # of queries' and keys' size
    viewed: int = 0  # of the hidden size: one kernel's attention reads parts of it, so that all of it is kept


_NONE: dict[Arithmetic, tuple[int, int]] = dict.fromkeys(get_args(Arithmetic), (0, 0))
_SOFTMAX_IN_FP32: dict[Arithmetic, tuple[int, int]] = {"fp32": (0, 1), "autocast": (1, 1), "half": (1, 1)}
_LLAMA = BlockBytes(
    hidden={"fp32": (0, 6), "autocast": (4, 5), "half": (2, 4)},
    outside={"fp32": (0, 3), "autocast": (2, 1), "half": (1, 2)},
    projections=(2, 2),
    wide=4,
    softmax=_SOFTMAX_IN_FP32,
    norms=2,
    dropouts=0,
    temporaries={"fp32": 25.0, "autocast": 14.0, "half": 16.0},
)
_QWEN3 = replace(_LLAMA, head_norms={"fp32": (0, 2), "autocast": (1, 1), "half": (1, 1)})
_EXPERTS_HIDDEN: dict[Arithmetic, tuple[int, int]] = {"fp32": (0, 6), "autocast": (4, 4), "half": (2, 4)}
_GEMMA2 = BlockBytes(
    hidden={"fp32": (0, 10), "autocast": (8, 5), "half": (8, 2)},
    outside={"fp32": (0, 3), "autocast": (2, 1), "half": (2, 1)},
    projections=(2, 2),
    wide=4,
    softmax={"fp32": (0, 2), "autocast": (1, 2), "half": (1, 2)},  # one more: the cap on attention's logits
    norms=4,
    dropouts=0,
    temporaries={"fp32": 17.0, "autocast": 14.0, "half": 14.0},
)
_GPT_NEO = BlockBytes(
    hidden={"fp32": (0, 8), "autocast": (2, 8), "half": (2, 6)},
    outside={"fp32": (0, 2), "autocast": (1, 1), "half": (0, 2)},
    projections=(0, 0),
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
    "gpt-neox": replace(_GPT_NEO, hidden={"fp32": (0, 7), "autocast": (1, 6), "half": (0, 7)}, viewed=3),
    "opt": replace(
        _GPT_NEO,
        hidden={"fp32": (0, 8), "autocast": (2, 8), "half": (0, 8)},
        temporaries={"fp32": 36.0, "autocast": 17.0, "half": 18.0},
    ),
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _QWEN3,
    "mixtral": replace(_LLAMA, hidden=_EXPERTS_HIDDEN),
    "qwen3-moe": replace(_QWEN3, hidden=_EXPERTS_HIDDEN),
    "gemma2": _GEMMA2,
    "gemma3": replace(
        _GEMMA2, softmax=_SOFTMAX_IN_FP32, head_norms={"fp32": (0, 2), "autocast": (2, 0), "half": (2, 0)}
    ),
}
TRANSFORM_HIDDEN = 3  # tensors of the hidden size that the layer before the output layer keeps
EXPERT_HIDDEN = 2  # tensors of the hidden size that a token's every expert keeps: what goes in, what comes out
DENSE_WIDE = 2.7  # a feed-forward's width over the hidden size, where temporaries were measured
# These have no other attention in transformers than the eager one.
EAGER_ONLY = ("gpt-neo", "gpt-j", "gemma2")
# transformers composes this of PyTorch's operators, each of which keeps its input; others are one kernel.
COMPOSED_ACTIVATION = "gelu_new"
COMPOSED_WIDE = 3  # more tensors of the feed-forward size
OUTPUT_IS_ENOUGH = "relu"  # its backward needs no input: one tensor less
COMPOSED_TEMPORARIES = {"fp32": 16.0, "autocast": 0.0, "half": 1.7}

# Of a logit at the start of backward, by what becomes of the logits. eager, all fp32: log-softmax, which is kept, its
# gradient, and that of the logits. upcast: fp32 logits, and a copy that becomes their gradient. fused: 16-bit logits
# and their gradient. chunked: no more than a few tokens' at once.
LOGIT_BYTES: dict[LossKernel, int] = {"eager": 12, "upcast": 8, "fused": 4, "chunked": 0}


def arithmetic(engine: Engine) -> Arithmetic:
    """Return the arithmetic of the blocks. FSDP2's mixed precision casts the module, so nothing in it is fp32."""
    if engine.compute_bytes == 4:
        return "fp32"
    return "autocast" if engine.precision.endswith("-autocast") and engine.kind != "fsdp" else "half"


def block_bytes(shape: ModelShape, engine: Engine, job: Job) -> Numbers:
    """Predict the bytes that one block saves for its backward pass, per rank and micro step."""
    block, computed_in = BLOCKS[shape.architecture], arithmetic(engine)
    size = engine.compute_bytes
    full, short = block.hidden[computed_in]
    normed_full, normed_short = block.head_norms[computed_in]
    if computed_in == "half" and job.is_fused:  # norms' inputs too; an RMSNorm of operators also keeps what it weighs
        full, short = 0, sum(block.hidden["fp32"]) - (block.norms if shape.architecture in GATED else 0)
        normed_full, normed_short = 0, sum(block.head_norms["fp32"]) // 2
    queries, keys = block.projections
    eager = is_eager(shape, job)
    if eager:  # keys and values are repeated for every query head
        queries, keys = queries + keys, 0
    token_bytes: Numbers = shape.hidden * (4 * full + size * short) + 4 * block.norms
    token_bytes += size * shape.head_size * (queries * shape.heads + keys * shape.kv_heads)
    token_bytes += _inside_bytes(shape, engine, job)
    if shape.architecture in HEAD_NORMS:
        per_head = shape.head_size * (4 * normed_full + size * normed_short) + 4
        token_bytes += per_head * (shape.heads + shape.kv_heads)
    if job.dropout:
        token_bytes += block.dropouts * shape.hidden * _mask_bytes(job, size)
    if eager:
        matrices = _softmax_bytes(shape, engine, job)
    elif job.dropout and job.device == "cpu":
        # PyTorch's CPU kernel has no dropout: its composed one keeps softmax, mask and product, and all in fp32.
        matrices = 12
        token_bytes += 3 * (4 - size) * shape.head_size * shape.heads
    else:
        matrices = 0
        token_bytes += size * block.viewed * shape.hidden
        token_bytes += 4 * shape.heads  # the logarithm of softmax's sum
        if shape.is_encoder and job.kernels == "transformers":  # reviews are padded: every block keeps its mask
            token_bytes = token_bytes + size * job.sequence_length
    return job.tokens * (token_bytes + matrices * shape.heads * job.sequence_length)


def _inside_bytes(shape: ModelShape, engine: Engine, job: Job) -> float:
    """Count the bytes per token that a block's feed-forward layer saves, over all experts that receive the token."""
    size = engine.compute_bytes
    wide = size * shape.feed_forward * _wide(shape, job)
    if not shape.experts:
        return wide
    if arithmetic(engine) == "autocast":  # which does not cast a grouped product
        size, wide = 4, 2 * wide
    return shape.experts_per_token * (wide + EXPERT_HIDDEN * size * shape.hidden) + 4 * shape.experts


def _wide(shape: ModelShape, job: Job) -> int:
    """Count the saved tensors of a block that have the feed-forward width."""
    more = COMPOSED_WIDE if _is_composed(shape, job) else 0
    return BLOCKS[shape.architecture].wide + more - (1 if shape.activation == OUTPUT_IS_ENOUGH else 0)


def outside_bytes(shape: ModelShape, engine: Engine, job: Job) -> Numbers:
    """Predict the bytes that embeddings, the last norm and a layer before the output layer save for backward."""
    size = engine.compute_bytes
    full, short = BLOCKS[shape.architecture].outside[arithmetic(engine)]
    masks = _mask_bytes(job, size) if job.dropout and BLOCKS[shape.architecture].dropouts else 0
    short += TRANSFORM_HIDDEN if shape.has_transform else 0
    return job.tokens * shape.hidden * (4 * full + size * short + masks)


def temporary_bytes(shape: ModelShape, engine: Engine, job: Job) -> Numbers:
    """Predict the temporary bytes at the peak of a block's backward pass, without the block's saved tensors.

    The peak is in the feed-forward part. If attention's matrices are materialized, it can be in attention instead, when
    the saved tensors of the feed-forward part are already freed.
    """
    block, computed_in, size = BLOCKS[shape.architecture], arithmetic(engine), engine.compute_bytes
    composed = COMPOSED_TEMPORARIES[computed_in] if _is_composed(shape, job) else 0
    wide = job.tokens * shape.hidden * (block.temporaries[computed_in] + composed)
    if shape.experts:  # in fp32 under autocast, too; and as much more as experts are wider together
        wide = job.tokens * shape.hidden * block.temporaries["fp32" if computed_in == "autocast" else computed_in]
        wide = wide * max(1.0, shape.feed_forward_per_token / (DENSE_WIDE * shape.hidden))
    if is_eager(shape, job):
        full, _ = block.softmax[computed_in]
        matrices = (4 if full else size) + (0 if job.dropout else size)
    else:
        matrices = 4 if job.dropout and job.device == "cpu" else 0
    block_inside = size * (shape.feed_forward_per_token * _wide(shape, job) + 3.5 * shape.hidden)
    attention = job.tokens * (matrices * shape.heads * job.sequence_length - block_inside)
    return np.maximum(wide, attention)


def logit_bytes(shape: ModelShape, job: Job) -> Numbers:
    """Predict the bytes of the logits and of the copies that the loss makes of them; 0 for a model that classifies."""
    if shape.is_pooled:
        return 0 * job.tokens
    return job.tokens * shape.output_width * LOGIT_BYTES[job.loss]


def checkpoint_bytes(shape: ModelShape, engine: Engine, job: Job) -> Numbers:
    """Predict the bytes that a checkpointed block saves: its input, which is fp32 under autocast."""
    size = 4 if arithmetic(engine) == "autocast" else engine.compute_bytes
    return job.tokens * shape.hidden * size


def cast_bytes(shape: ModelShape, engine: Engine) -> int:
    """Count autocast's 16-bit copies of the weights, which live as long as the saved tensors."""
    if arithmetic(engine) != "autocast":
        return 0
    # An embedding is looked up, not multiplied, unless it is the head too.
    rows = 0 if shape.has_tied_head else shape.vocabulary
    rows += shape.position_rows
    rows += 2 if shape.architecture == "bert" else 0  # token types
    experts = shape.layers * shape.experts * 3 * shape.feed_forward  # their product is not cast
    return 2 * (sum(shape.parameters.matrices) - (rows + experts) * shape.hidden)


def is_eager(shape: ModelShape, job: Job) -> bool:
    """Return whether attention's matrices are materialized, instead of being computed inside one fused kernel."""
    return job.attention == "eager" or (job.kernels == "transformers" and shape.architecture in EAGER_ONLY)


def _is_composed(shape: ModelShape, job: Job) -> bool:
    return not job.is_fused and shape.activation == COMPOSED_ACTIVATION


def _mask_bytes(job: Job, size: int) -> int:
    """Bytes per element of a dropout mask: one byte on a GPU; on a CPU, the mask has the type of its input."""
    return 1 if job.device == "gpu" else size


def _softmax_bytes(shape: ModelShape, engine: Engine, job: Job) -> int:
    """Bytes per element of attention's matrices."""
    full, short = BLOCKS[shape.architecture].softmax[arithmetic(engine)]
    size = engine.compute_bytes
    saved = 4 * full + size * short
    if not job.dropout:
        return saved
    # The product with the values reads what dropout left; where softmax is cast, the cast is gone for it.
    return saved + _mask_bytes(job, size) + (0 if full else size)
