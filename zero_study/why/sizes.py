"""Find how the two sizes in a message about shapes are related, which often shows why they differ."""

from __future__ import annotations

import math
import re

MOST_PARTS = 64  # times that one size is another one
FEWEST_TOKENS = 4096  # of a vocabulary, or of the share of it that one rank has
NEAR = 0.1  # relative difference of two vocabularies of one model
_LIST = r"\[([\d, ]{1,60})\]"
_MATRICES = re.compile(r"(\d{1,12})x(\d{1,12}) and (\d{1,12})x(\d{1,12})")
_SIZES = re.compile(
    r"size of tensor a \((\d+)\) must match the size of tensor b \((\d+)\)(?: at non-singleton dimension (\d))?"
)
_TORCH_SIZE = rf"torch\.Size\({_LIST}\)"
_LISTS = (
    re.compile(rf"value tensor of shape {_LIST} cannot be broadcast to indexing result of shape {_LIST}"),
    re.compile(rf"with shape {_TORCH_SIZE} from checkpoint, the shape in current model is {_TORCH_SIZE}"),
    re.compile(rf"output with shape {_LIST} doesn.t match the broadcast shape {_LIST}"),
    re.compile(rf"[Ss]ize mismatch between saved {_TORCH_SIZE} and current: {_TORCH_SIZE}"),
    re.compile(rf"shape of the mask {_LIST} at index \d+ does not match the shape of the indexed tensor {_LIST}"),
)  # fmt: skip


def relation(text: str) -> str:
    """Return a space and a sentence on how the two sizes in a message are related, or an empty text."""
    if match := _MATRICES.search(text):
        rows, inner, expected, columns = map(int, match.groups())
        return _of_matrices(rows, inner, expected, columns)
    if match := _SIZES.search(text):
        return _of_sizes(int(match[1]), int(match[2]), match[3] or "")
    for pattern in _LISTS:
        if match := pattern.search(text):
            return _of_shapes(_numbers(match[1]), _numbers(match[2]))
    return ""


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number.strip()]


def _of_matrices(rows: int, inner: int, expected: int, columns: int) -> str:
    """Return a sentence on the length of an input and the length that the weight expects."""
    if expected == 1 and inner > 1 and (2 * columns) % inner == 0:
        outputs = 2 * columns // inner
        return (
            f" A weight of 1x{columns:,} is {inner:,}x{outputs:,} packed in 4 bits: call its layer, "
            "and do not use the weight directly."
        )
    if 0 in (rows, inner, expected, columns):
        return " Under ZeRO-3, a parameter that is not gathered has a size of 0."
    return _times(inner, expected)


def _of_sizes(first: int, second: int, dimension: str) -> str:
    small, large = sorted((first, second))
    if small == 0:
        return " Under ZeRO-3, a parameter that is not gathered has a size of 0. An empty batch also has a size of 0."
    if large - small == 1:
        return " They differ by 1: one of the two was shifted by a token, or has one more token at its end."
    if dimension == "0" and small >= FEWEST_TOKENS and large <= (1 + NEAR) * small:
        return (
            f" They differ by {large - small:,}, like the vocabulary (or the shard of it on one rank) before and "
            "after tokens were added."
        )
    return _times(first, second)


def _of_shapes(first: list[int], second: list[int]) -> str:
    """Return a sentence on two shapes: a flattened shard, an empty tensor, or the first size that differs."""
    for one, other in ((first, second), (second, first)):
        if len(one) == 1 and len(other) > 1:
            return _flat(one[0], other)
    if len(first) == len(second):
        differing = [(a, b) for a, b in zip(first, second, strict=True) if a != b]
        if len(differing) == 1:
            return _of_sizes(*differing[0], "")
    return ""


def _flat(length: int, shape: list[int]) -> str:
    total = math.prod(shape)
    if length == 0:
        return " Under ZeRO-3, a parameter that is not gathered has a length of 0."
    if length == 1:
        return ""
    share = f"a ratio of about 1/{round(total / length):,}" if length < total else "the same number"
    return (
        f" One shape is flat with {length:,} numbers, and the other has {total:,} numbers ({share}): FSDP keeps "
        "parameters in such flat shards, one per rank."
    )


def _times(first: int, second: int) -> str:
    small, large = sorted((first, second))
    if small > 1 and large % small == 0 and 2 <= large // small <= MOST_PARTS:
        return f" {large:,} is {large // small} times {small:,}."
    return ""
