"""FLOPs of training on one sequence, computed from the shape of the model."""

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
    """List the products of the router, and of the experts that a token uses."""
    per_token, experts = shape.experts_per_token, shape.experts
    return [
        Product(1, shape.hidden, experts),
        Product(per_token, shape.hidden, 2 * shape.feed_forward, experts),
        Product(per_token, shape.feed_forward, shape.hidden, experts),
    ]


def head_products(shape: ModelShape) -> list[Product]:
    """List the products after the last block, with a row per token; in a pooled head, with a row per sequence."""
    first = [Product(1, shape.hidden, shape.hidden)] if shape.is_pooled or shape.has_transform else []
    return [*first, Product(1, shape.hidden, shape.output_width)] if shape.output_width else first


def attention_flops_per_sequence(shape: ModelShape, sequence_length: Numbers, causal: bool = False) -> Numbers:
    """Count the two products of attention (queries with keys, weights with values) of one block, forward.

    With `causal`, only unmasked scores count, as in FlashAttention: half of all, plus the diagonal.
    """
    pairs = sequence_length * (sequence_length + 1) / 2 if causal else sequence_length * sequence_length
    return 4 * shape.heads * shape.head_size * pairs


def head_flops_per_sequence(shape: ModelShape, sequence_length: Numbers) -> Numbers:
    """Count the head, forward: on every token, except that BERT's pooler and classes read one token."""
    elements = sum(product.count * product.inner * product.columns for product in head_products(shape))
    return 2 * elements * (1 if shape.is_pooled else sequence_length)


def blocks_flops_per_sequence(shape: ModelShape, sequence_length: Numbers) -> Numbers:
    """Count all blocks, forward. Activation checkpointing computes this twice."""
    elements = sum(product.count * product.inner * product.columns for product in block_products(shape))
    return shape.layers * (2 * sequence_length * elements + attention_flops_per_sequence(shape, sequence_length))


def model_flops_per_sequence(shape: ModelShape, sequence_length: Numbers) -> Numbers:
    """Count the matrix products of one sequence, forward and backward, with two FLOPs per multiply-add.

    Recomputation is not included. study/training/optimizer_steps.py counts the same with PyTorch's counter. The
    backward pass takes twice as many as the forward pass, because every product has a gradient for each of its two
    factors. This includes the first block, because embeddings are trained. That counter ignores rotary positions.
    """
    return 3 * (blocks_flops_per_sequence(shape, sequence_length) + head_flops_per_sequence(shape, sequence_length))


def hardware_flops_per_sequence(shape: ModelShape, sequence_length: Numbers, recomputed: float) -> Numbers:
    """Count the FLOPs that a GPU executes: model FLOPs, plus the `recomputed` share of the blocks' forward pass."""
    again = recomputed * blocks_flops_per_sequence(shape, sequence_length)
    return model_flops_per_sequence(shape, sequence_length) + again
