"""FLOPs of training on one sequence, by the shape of the model."""

from __future__ import annotations

from dataclasses import dataclass

from study.theory.engine import Numbers
from study.theory.shapes import GATED, ModelShape


@dataclass(frozen=True)
class Product:
    """One kind of matrix product of a forward pass: `count` products of (rows, inner) with (inner, columns)."""

    count: int  # that a token takes part in
    inner: int
    columns: int
    experts: int = 0  # the matrices are so many, where a token is sent to some of them

    @property
    def num_matrices(self) -> int:
        return self.experts or self.count


def block_products(shape: ModelShape) -> list[Product]:
    """List the products of one transformer block with its weights; each has a row per token."""
    queries, keys = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    if shape.architecture in ("gpt2", "gpt-neox"):  # one matrix for query, key and value
        attention = [Product(1, shape.hidden, queries + 2 * keys)]
    else:
        attention = [Product(1, shape.hidden, queries), Product(2, shape.hidden, keys)]
    attention.append(Product(1, queries, shape.hidden))
    if shape.experts:
        return [*attention, *_expert_products(shape)]
    inwards = 2 if shape.architecture in GATED else 1
    inside = [Product(inwards, shape.hidden, shape.feed_forward), Product(1, shape.feed_forward, shape.hidden)]
    return [*attention, *inside]


def _expert_products(shape: ModelShape) -> list[Product]:
    """List the products of the router, and of the experts that a token is sent to."""
    per_token, experts = shape.experts_per_token, shape.experts
    return [
        Product(1, shape.hidden, experts),
        Product(per_token, shape.hidden, 2 * shape.feed_forward, experts),
        Product(per_token, shape.feed_forward, shape.hidden, experts),
    ]


def head_products(shape: ModelShape) -> list[Product]:
    """List the products of what follows the last block, with a row per token, or, of a pooled one, per sequence."""
    first = [Product(1, shape.hidden, shape.hidden)] if shape.is_pooled or shape.has_transform else []
    return [*first, Product(1, shape.hidden, shape.output_width)] if shape.output_width else first


def attention_flops_per_sequence(shape: ModelShape, sequence_length: Numbers, causal: bool = False) -> Numbers:
    """Count queries times keys and weights times values of one block, forward.

    `causal`: only what a causal mask leaves, as FlashAttention computes it. The mask leaves half, plus the diagonal.
    """
    pairs = sequence_length * (sequence_length + 1) / 2 if causal else sequence_length * sequence_length
    return 4 * shape.heads * shape.head_size * pairs


def head_flops_per_sequence(shape: ModelShape, sequence_length: Numbers) -> Numbers:
    """Count what follows the last block, forward: on every token, but BERT's pooler and classes on one."""
    elements = sum(product.count * product.inner * product.columns for product in head_products(shape))
    return 2 * elements * (1 if shape.is_pooled else sequence_length)


def blocks_flops_per_sequence(shape: ModelShape, sequence_length: Numbers) -> Numbers:
    """Count all blocks, forward: what activation checkpointing does twice."""
    elements = sum(product.count * product.inner * product.columns for product in block_products(shape))
    return shape.layers * (2 * sequence_length * elements + attention_flops_per_sequence(shape, sequence_length))


def model_flops_per_sequence(shape: ModelShape, sequence_length: Numbers) -> Numbers:
    """Count forward and backward of one sequence: matrix products, a multiply-add as two; nothing recomputed.

    The same count as study/training/optimizer_steps.py makes with PyTorch's counter. Backward takes twice forward:
    every product has a gradient to each of its two factors, the first block's too, since embeddings are trained.
    Rotary positions are no product to that counter.
    """
    return 3 * (blocks_flops_per_sequence(shape, sequence_length) + head_flops_per_sequence(shape, sequence_length))


def hardware_flops_per_sequence(shape: ModelShape, sequence_length: Numbers, recomputed: float) -> Numbers:
    """Count what a GPU multiplies: model FLOPs, and the share of the blocks' forward pass that is `recomputed`."""
    again = recomputed * blocks_flops_per_sequence(shape, sequence_length)
    return model_flops_per_sequence(shape, sequence_length) + again
