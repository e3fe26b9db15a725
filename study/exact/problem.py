"""Define the training problem of exact arithmetic in integers: sizes, initial weights, batches and units.

This module needs nothing but Python, because both the reference and the model of the engines import it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

NUM_STEPS = 6
BATCH_SIZE = 96  # sequences of a step, 3 * 2^5: divides over 1, 2, 3, 4 and 8 ranks with 1 and 4 micro batches each
VOCABULARY, WIDTH, HIDDEN, NUM_BLOCKS = 11, 7, 13, 5  # odd, so that shards need padding
LENGTH = 3  # tokens of a sequence

# Activations are multiples of 2^-3 between -1 and 1. The gradient of one sequence, before the division by the batch
# size, is a multiple of 3 * 2^-3. So the division by 96, or by its factors in any order, is exact.
ACTIVATION_BITS = 3
LARGEST_ACTIVATION = 1 << ACTIVATION_BITS  # in units of 2^-3
LARGEST_GRADIENT = 8  # in units of 3 * 2^-3

# Weights begin as multiples of 2^-6. A step adds multiples of 2^-15 to them: the smallest gradient, 2^-11, times the
# larger learning rate, or 2^-8 times the smaller one.
INITIAL_BITS, WEIGHT_BITS = 6, 15
GRADIENT_BITS = 11  # gradients of the mean over the batch are multiples of 2^-11
MATRIX_RATE_BITS, VECTOR_RATE_BITS = 4, 5  # learning rates 2^-4 and 2^-5, one parameter group each
MOMENTUM = 1.0  # the sum of all gradients: any other factor would need more bits in each step


@dataclass(frozen=True)
class Sequence:
    tokens: tuple[int, ...]
    targets: tuple[int, ...]  # one for each word of the vocabulary, in units of 2^-3


def shapes() -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter by its name, in the order of the model.

    The matrix of the head is tied to the embedding and is not listed separately.
    """
    shape_of: dict[str, tuple[int, ...]] = {"embedding.weight": (VOCABULARY, WIDTH)}
    for block in range(NUM_BLOCKS):
        shape_of |= {f"blocks.{block}.up.weight": (HIDDEN, WIDTH), f"blocks.{block}.up.bias": (HIDDEN,)}
        shape_of |= {f"blocks.{block}.down.weight": (WIDTH, HIDDEN), f"blocks.{block}.down.bias": (WIDTH,)}
    return shape_of | {"head.bias": (VOCABULARY,)}


NUM_COMPARED = (2 * NUM_STEPS + 1) * len(shapes())  # each gradient and weight after each step, momentum after the last


@cache
def initial_weights() -> dict[str, list[int]]:
    """Return the initial values of every parameter, row by row, in units of 2^-6."""
    weights = {}
    for number, (name, shape) in enumerate(shapes().items()):
        largest = {"embedding.weight": 40}.get(name, 24 if len(shape) == 2 else 8)
        draws = _draws(number)
        size = shape[0] * (shape[1] if len(shape) == 2 else 1)
        weights[name] = [next(draws) % (2 * largest + 1) - largest for _ in range(size)]
    return weights


@cache
def batch(step: int) -> list[Sequence]:
    """Return the sequences of tokens that a step trains. Their targets follow from the tokens by a learnable rule."""
    draws = _draws(1000 + step)
    rows = []
    for _ in range(BATCH_SIZE):
        tokens = tuple(next(draws) % VOCABULARY for _ in range(LENGTH))
        answer = sum(tokens) % 3
        rows.append(Sequence(tokens, tuple(8 if word % 3 == answer else -4 for word in range(VOCABULARY))))
    return rows


def _draws(seed: int) -> Iterator[int]:
    """Yield random 32-bit integers from the generator splitmix64.

    The generator is implemented here, because a library may change its own.
    """
    state = (seed + 1) * 0x632BE59BD9B4E019
    while True:
        state = (state + 0x9E3779B97F4A7C15) % (1 << 64)
        mixed = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % (1 << 64)
        mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % (1 << 64)
        yield (mixed ^ (mixed >> 31)) >> 32
