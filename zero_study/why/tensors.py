"""Identify the tensor of an allocation by its size: logits, a weight, a layer, a bucket, or all parameters.

PyTorch's allocator rounds sizes up before it prints them: to 2 MiB, to 20 MiB between 1 and 10 MiB, and to multiples of
2 MiB above (c10/cuda/CUDACachingAllocator.cpp, get_allocation_size). Messages print two decimals.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Literal, NamedTuple

from zero_study.theory import shapes
from zero_study.theory.shapes import ModelShape
from zero_study.why.phases import Phase
from zero_study.why.setting import Setting

MIB, GIB = 1 << 20, 1 << 30
BUCKET_ELEMENTS = 500_000_000  # reduce_bucket_size and allgather_bucket_size of DeepSpeed by default
TYPES = {2: "16 bits", 4: "fp32"}
Kind = Literal["logits", "weight", "layer", "bucket", "all parameters"]
# Where each kind of tensor may be allocated. Other phases are not asked about it, because sizes agree by chance.
_PHASES: dict[Kind, tuple[Phase | None, ...]] = {
    "logits": ("loss", "forward", "backward", "recomputation", "evaluation", None),
    "weight": ("building", "wrapping", "gathering", "optimizer step", "saving", "backward"),
    "layer": ("gathering", "wrapping", "saving"),
    "bucket": ("backward", "wrapping", "optimizer step", "gathering"),
    "all parameters": ("wrapping", "optimizer step", "saving", "building"),
}


class Tensor(NamedTuple):
    """A tensor that an allocation may be."""

    kind: Kind
    name: str


def rounded(num_bytes: float) -> int:
    """Return the bytes that PyTorch's allocator requests for a tensor of this size."""
    if num_bytes <= MIB:
        return 2 * MIB
    if num_bytes < 10 * MIB:
        return 20 * MIB
    return -(-int(num_bytes) // (2 * MIB)) * 2 * MIB


def identify(num_bytes: int, phase: Phase | None, setting: Setting) -> Tensor | None:
    """Return the tensor that has the size of an allocation. None if no kind of tensor, or more than one, has it."""
    tolerance = 0.006 * (GIB if num_bytes >= GIB else MIB)
    candidates = {
        tensor.kind: tensor
        for size, tensor in _candidates(setting)
        if phase in _PHASES[tensor.kind] and abs(rounded(size) - num_bytes) <= tolerance
    }
    return next(iter(candidates.values())) if len(candidates) == 1 else None


def _candidates(setting: Setting) -> Iterator[tuple[float, Tensor]]:
    yield 2 * BUCKET_ELEMENTS, Tensor("bucket", "a bucket of DeepSpeed (reduce_bucket_size 5e8 in 16 bits)")
    yield 4 * BUCKET_ELEMENTS, Tensor("bucket", "a bucket of DeepSpeed (reduce_bucket_size 5e8 in fp32)")
    shape, vocabulary = shape_of(setting.model), vocabulary_of(setting)
    if vocabulary is None:
        return
    for size, type_name in TYPES.items():
        if setting.micro_batch_size and setting.sequence_length:
            for cut in (0, 1):
                tokens = setting.micro_batch_size * (setting.sequence_length - cut)
                name = f"the logits of {tokens:,} tokens in {type_name} ({tokens:,} x {vocabulary:,})"
                yield size * tokens * vocabulary, Tensor("logits", name)
        if shape is None:
            continue
        yield size * vocabulary * shape.hidden, Tensor("weight", f"the embedding or the output layer in {type_name}")
        block = shape.block_params
        yield size * block, Tensor("layer", f"all parameters of one layer in {type_name}")
        for ranks in {1, setting.num_gpus or 1}:
            share = f", sharded over {ranks} ranks" if ranks > 1 else ""
            yield size * shape.num_params / ranks, Tensor("all parameters", f"all parameters in {type_name}{share}")


@cache
def shape_of(model: str | None) -> ModelShape | None:
    """Return the shape of a model if it is known without a download, or None.

    A log often names a folder, such as /data/Qwen2.5-7B-Instruct, instead of an id of the hub.
    """
    if model is None:
        return None
    name = model.rstrip("/").rpartition("/")[2]
    names = (model, name, _TUNED.sub("", name))
    return next((shape for each in names if (shape := shapes.find_known(each)) is not None), None)


_TUNED = re.compile(r"(?i)(?:-(?:instruct|chat|base|hf|it|pt|bnb-4bit|unsloth|v\d[\d.]*))+$")
_EMPTY = re.compile(
    r"empty_strided\w*\(\(\s*\w+, (?:\w+, )?(\d{5,6})\)|\b[sS]hape\D{0,12}\[?\(?(?:\d+, ?){1,2}(\d{5,6})[\])]"
)


def vocabulary_of(setting: Setting, code: Sequence[str] = ()) -> int | None:
    """Return the number of logits per token, from the model, the log, or the line of code that allocated them."""
    for line in code:
        if match := _EMPTY.search(line):
            return int(match[1] or match[2])
    shape = shape_of(setting.model)
    return shape.vocabulary if shape is not None and shape.vocabulary else setting.vocabulary
