"""The FLOPs of training on one sequence, computed from the shape of the model."""

from __future__ import annotations

from dataclasses import dataclass

from study.theory import adapters, from_counts
from study.theory.shapes import ModelShape


@dataclass(frozen=True)
class Product:
    """One kind of matrix product in a forward pass: `count` products of (rows, inner) with (inner, columns)."""

    count: int  # products per token
    inner: int
    columns: int


def block_products(shape: ModelShape) -> list[Product]:
    """Return the products of one transformer block with its weights. Each has one row per token."""
    queries, keys = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    if shape.architecture == "gpt2":  # one matrix for query, key and value
        attention = [Product(1, shape.hidden, queries + 2 * keys)]
    else:
        attention = [Product(1, shape.hidden, queries), Product(2, shape.hidden, keys)]
    attention.append(Product(1, queries, shape.hidden))
    return [*attention, Product(1, shape.hidden, shape.feed_forward), Product(1, shape.feed_forward, shape.hidden)]


def head_products(shape: ModelShape) -> list[Product]:
    """Return the products after the last block.

    Each has one row per token, or one row per sequence if the head is pooled.
    """
    first = [Product(1, shape.hidden, shape.hidden)] if shape.is_pooled or shape.has_transform else []
    return [*first, Product(1, shape.hidden, shape.output_width)] if shape.output_width else first


def attention_flops_per_sequence(shape: ModelShape, sequence_length: float, causal: bool = False) -> float:
    """Return the FLOPs of one block's attention in the forward pass.

    They are the products of queries with keys and of weights with values. With `causal`, only unmasked scores count, as
    in FlashAttention. These are half of all scores, plus half of the diagonal.
    """
    pairs = sequence_length * (sequence_length + 1) / 2 if causal else sequence_length * sequence_length
    return 4 * shape.heads * shape.head_size * pairs


def head_flops_per_sequence(shape: ModelShape, sequence_length: float) -> float:
    """Return the FLOPs of the head in the forward pass.

    The head reads every token. Only BERT's pooler and its classifier of sequences read a single token.
    """
    if shape.counts is not None:
        return from_counts.head_flops(shape.counts, 1, sequence_length)
    elements = sum(product.count * product.inner * product.columns for product in head_products(shape))
    return 2 * elements * (1 if shape.is_pooled else sequence_length)


def blocks_flops_per_sequence(shape: ModelShape, sequence_length: float) -> float:
    """Return the FLOPs of all blocks in the forward pass. Activation checkpointing computes this twice."""
    if shape.counts is not None:
        return from_counts.blocks_flops(shape.counts, 1, sequence_length)
    elements = sum(product.count * product.inner * product.columns for product in block_products(shape))
    return shape.layers * (2 * sequence_length * elements + attention_flops_per_sequence(shape, sequence_length))


def model_flops_per_sequence(shape: ModelShape, sequence_length: float) -> float:
    """Return the FLOPs of all matrix products for one sequence, forward and backward, with two FLOPs per multiply-add.

    Recomputation is not included. The backward pass needs twice as many FLOPs as the forward pass, because every
    product has a gradient for each of its two factors. This is true for the first block too, because embeddings are
    trained. study/training/optimizer_steps.py measures the same number with PyTorch's counter, which ignores rotary
    positions.

    Products with frozen weights have no gradient of the weight, so their backward pass needs as many FLOPs as the
    forward pass. Attention has no weights, and adapters are trained. Experts with an adapter have a gradient of the
    weight too (adapters.adapted_parameters).
    """
    forward = blocks_flops_per_sequence(shape, sequence_length) + head_flops_per_sequence(shape, sequence_length)
    if shape.adapter is None:
        return 3 * forward
    attention = _attention_of_all_blocks(shape, sequence_length)
    of_experts = adapters.expert_gradient_flops(shape, sequence_length)
    return 2 * forward + attention + of_experts + 3 * adapters.adapter_flops(shape, sequence_length)


def _attention_of_all_blocks(shape: ModelShape, sequence_length: float) -> float:
    """Return the FLOPs of attention in the forward pass of all blocks."""
    if shape.counts is not None:
        return from_counts.attention_flops(shape.counts, 1, sequence_length)
    return shape.layers * attention_flops_per_sequence(shape, sequence_length)


def hardware_flops_per_sequence(shape: ModelShape, sequence_length: float, recomputed: float) -> float:
    """Return the FLOPs that a GPU executes: model FLOPs, plus the `recomputed` share of the blocks' forward pass."""
    again = recomputed * blocks_flops_per_sequence(shape, sequence_length)
    return model_flops_per_sequence(shape, sequence_length) + again
