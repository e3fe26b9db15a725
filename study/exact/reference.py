"""Compute the exact training in integers, as the reference for all engines.

This also proves that fp32 represents every sum of the training exactly.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from study.exact import problem
from study.exact.problem import ACTIVATION_BITS, GRADIENT_BITS, NUM_BLOCKS, WEIGHT_BITS

SIGNIFICANT_BITS = 24  # of fp32: it holds every integer up to 2^24, and every such integer times a power of two
Matrix = list[list[int]]  # a vector is a matrix of one row
Values = dict[str, bytes]  # of each parameter: its values in fp32, row after row


@dataclass
class Expected:
    """The gradients, weights and momenta that every engine must have, bit for bit."""

    gradients: list[Values] = field(default_factory=list)  # of each step: the mean over the batch
    weights: list[Values] = field(default_factory=list)  # after each step
    momenta: list[Values] = field(default_factory=list)  # after each step
    losses: list[float] = field(default_factory=list)  # of each step
    # Kind of sum -> bits that the largest sum needs, in any order of additions.
    bits: dict[str, int] = field(default_factory=dict)


@cache
def expect() -> Expected:
    """Run the training in integers, and return the values that every engine must have.

    Raises ArithmeticError if fp32 might round one of the sums.
    """
    expected, sums = Expected(), _Sums()
    weights = {name: _initial(name, shape) for name, shape in problem.shapes().items()}
    momenta = {name: [[0] * len(row) for row in matrix] for name, matrix in weights.items()}
    for step in range(problem.NUM_STEPS):
        gradients, squared_error = _gradients(step, weights, sums)
        _update(weights, momenta, gradients, sums)
        expected.gradients.append(_in_fp32(gradients, GRADIENT_BITS))
        expected.momenta.append(_in_fp32(momenta, GRADIENT_BITS))
        expected.weights.append(_in_fp32(weights, WEIGHT_BITS))
        expected.losses.append(1.5 * squared_error / 4**ACTIVATION_BITS / problem.BATCH_SIZE)
    expected.bits = {kind: largest.bit_length() for kind, largest in sums.largest.items()}
    if max(expected.bits.values()) > SIGNIFICANT_BITS:
        raise ArithmeticError(
            f"a sum may take more than the {SIGNIFICANT_BITS} significant bits of fp32: {expected.bits}"
        )
    return expected


def _gradients(step: int, weights: Mapping[str, Matrix], sums: _Sums) -> tuple[dict[str, Matrix], int]:
    """Return the gradients of a step in units of 2^-11, and the sum of the squared errors of its sequences."""
    terms: dict[str, list[list[list[int]]]] = {
        name: [[[] for _ in row] for row in matrix] for name, matrix in weights.items()
    }
    errors = [_add_terms(sequence, weights, terms, sums) for sequence in problem.batch(step)]
    # With three ranks, each rank's sum is three times its share until the mean over the ranks is taken.
    gradients = {
        name: [[sums.add("weight's gradient", terms_of_value, 3) for terms_of_value in row] for row in matrix]
        for name, matrix in terms.items()
    }
    return gradients, sum(errors)


def _update(
    weights: Mapping[str, Matrix], momenta: Mapping[str, Matrix], gradients: Mapping[str, Matrix], sums: _Sums
) -> None:
    """Add the gradients to the momenta, and subtract the learning rate times the momenta from the weights."""
    for name, matrix in gradients.items():
        rate_bits = problem.VECTOR_RATE_BITS if name.endswith("bias") else problem.MATRIX_RATE_BITS
        for momentum_row, weight_row, gradient_row in zip(momenta[name], weights[name], matrix, strict=True):
            for i, gradient in enumerate(gradient_row):
                momentum_row[i] = sums.add("momentum", (momentum_row[i], gradient))
                update = _exactly_shifted(momentum_row[i], GRADIENT_BITS + rate_bits - WEIGHT_BITS)
                weight_row[i] = sums.add("weight", (weight_row[i], -update))


def _add_terms(
    sequence: problem.Sequence, weights: Mapping[str, Matrix], terms: Mapping[str, list[list[list[int]]]], sums: _Sums
) -> int:
    """Append the contributions of one sequence to the terms of each gradient, and return its squared error.

    Activations are in units of 2^-3, and sums of their products with weights in units of 2^-18. Gradients are those
    before the division by the batch size, in units of 3 * 2^-3. Sums of their products with weights are in units of 3 *
    2^-18.
    """
    table, bias = weights["embedding.weight"], weights["head.bias"][0]
    words = [table[token] for token in sequence.tokens]
    hidden = [
        _activation(sums.add("activation", column), WEIGHT_BITS - ACTIVATION_BITS)
        for column in zip(*words, strict=True)
    ]
    inputs, inner = [], []
    for block in range(NUM_BLOCKS):
        inputs.append(hidden)
        up, up_bias, down, down_bias = (weights[f"blocks.{block}.{name}"] for name in _OF_BLOCK)
        inner.append(_linear(up, up_bias[0], hidden, [0] * len(up), sums))
        hidden = _linear(down, down_bias[0], inner[-1], hidden, sums)
    outputs = _linear(table, bias, hidden, [0] * len(table), sums)

    gradient = [output - target for output, target in zip(outputs, sequence.targets, strict=True)]
    errors = sum(error**2 for error in gradient)
    _add_outer(terms, "embedding.weight", "head.bias", gradient, hidden)
    gradient = _input_gradient(table, gradient, [0] * len(hidden), sums)
    for block in reversed(range(NUM_BLOCKS)):
        up, _, down, _ = (weights[f"blocks.{block}.{name}"] for name in _OF_BLOCK)
        _add_outer(terms, f"blocks.{block}.down.weight", f"blocks.{block}.down.bias", gradient, inner[block])
        of_inner = _input_gradient(down, gradient, [0] * len(up), sums)
        _add_outer(terms, f"blocks.{block}.up.weight", f"blocks.{block}.up.bias", of_inner, inputs[block])
        gradient = _input_gradient(up, of_inner, gradient, sums)
    for token in sequence.tokens:
        for terms_of_weight, value in zip(terms["embedding.weight"][token], gradient, strict=True):
            terms_of_weight.append(value << ACTIVATION_BITS)
    return errors


_OF_BLOCK = ("up.weight", "up.bias", "down.weight", "down.bias")


def _linear(matrix: Matrix, bias: list[int], inputs: list[int], residual: list[int], sums: _Sums) -> list[int]:
    """Return the quantized activations residual + matrix * inputs + bias."""
    outputs = []
    for row, offset, skipped in zip(matrix, bias, residual, strict=True):
        products = [weight * value for weight, value in zip(row, inputs, strict=True)]
        total = sums.add("activation", (*products, offset << ACTIVATION_BITS, skipped << WEIGHT_BITS))
        outputs.append(_activation(total, WEIGHT_BITS))
    return outputs


def _input_gradient(matrix: Matrix, gradient: list[int], residual: list[int], sums: _Sums) -> list[int]:
    """Return the quantized gradient residual + gradient * matrix."""
    input_gradient = []
    for column, skipped in zip(zip(*matrix, strict=True), residual, strict=True):
        products = [weight * value for weight, value in zip(column, gradient, strict=True)]
        total = sums.add("activation's gradient", (*products, skipped << WEIGHT_BITS), 3)
        input_gradient.append(_clamped(_rounded(total, WEIGHT_BITS), problem.LARGEST_GRADIENT))
    return input_gradient


def _add_outer(terms: Mapping[str, Any], weight: str, bias: str, gradient: list[int], inputs: list[int]) -> None:
    """Append the terms of the gradients of a linear layer's weight and bias.

    The terms are in units of 2^-11 after the division by the batch size.
    """
    for row, offset, value in zip(terms[weight], terms[bias][0], gradient, strict=True):
        for terms_of_weight, input_value in zip(row, inputs, strict=True):
            terms_of_weight.append(value * input_value)
        offset.append(value << ACTIVATION_BITS)


class _Sums:
    """A function that adds integers, and records the largest sum of absolute values of each kind.

    No intermediate sum can be larger than that, in any order of additions.
    """

    def __init__(self) -> None:
        self.largest: dict[str, int] = {}

    def add(self, kind: str, terms: Iterable[int], factor: int = 1) -> int:
        terms = tuple(terms)
        self.largest[kind] = max(self.largest.get(kind, 0), factor * sum(map(abs, terms)))
        return sum(terms)


def _rounded(value: int, bits: int) -> int:
    """Return the value divided by 2^bits, rounded to the nearest integer. Halves are rounded to even."""
    quotient, remainder = divmod(value, 1 << bits)
    half = 1 << bits - 1
    return quotient + (remainder > half or (remainder == half and quotient % 2 == 1))


def _clamped(value: int, largest: int) -> int:
    return max(-largest, min(largest, value))


def _activation(value: int, bits: int) -> int:
    return _clamped(_rounded(value, bits), problem.LARGEST_ACTIVATION)


def _exactly_shifted(value: int, bits: int) -> int:
    if value % (1 << bits):
        raise ArithmeticError(f"{value} is not a multiple of the smallest step of the weights")
    return value >> bits


def _initial(name: str, shape: tuple[int, ...]) -> Matrix:
    values = [value << WEIGHT_BITS - problem.INITIAL_BITS for value in problem.initial_weights()[name]]
    return [values[start : start + shape[-1]] for start in range(0, len(values), shape[-1])]


def _in_fp32(matrices: Mapping[str, Matrix], bits: int) -> Values:
    """Return integers in units of 2^-bits as the bytes of fp32 numbers, which represent them exactly."""
    values = {}
    for name, matrix in matrices.items():
        flat = [value for row in matrix for value in row]
        values[name] = struct.pack(f"<{len(flat)}f", *(value / (1 << bits) for value in flat))
    return values


def sha256(values: Values) -> str:
    """Return the SHA-256 digest of all parameters and their names, sorted by name."""
    digest = hashlib.sha256()
    for name, content in sorted(values.items()):
        digest.update(name.encode())
        digest.update(content)
    return digest.hexdigest()
