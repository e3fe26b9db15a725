"""Which tensor an allocation of a size may be: logits, a weight, a layer, a bucket, or a buffer of all parameters.

PyTorch's allocator rounds sizes up before it names them: to 2 MiB, to 20 MiB between 1 and 10 MiB, and to multiples of
2 MiB above (c10/cuda/CUDACachingAllocator.cpp, get_allocation_size). Messages print two decimals.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Literal, NamedTuple

from study.errors import Refusal
from study.theory import shapes
from study.theory.shapes import ModelShape
from study.why.phases import Phase
from study.why.setting import Setting

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
    """Return the bytes that PyTorch's allocator asks for, for a tensor of this size."""
    if num_bytes <= MIB:
        return 2 * MIB
    if num_bytes < 10 * MIB:
        return 20 * MIB
    return -(-int(num_bytes) // (2 * MIB)) * 2 * MIB


def identify(num_bytes: int, phase: Phase | None, setting: Setting) -> Tensor | None:
    """Return the tensor that an allocation is by its size. None if no tensor, or several kinds, have it."""
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
    shape = _shape(setting.model)
    if shape is None:
        return
    vocabulary, hidden = shape.vocabulary, shape.hidden
    for size, type_name in TYPES.items():
        if setting.micro_batch_size and setting.sequence_length:
            for cut in (0, 1):
                tokens = setting.micro_batch_size * (setting.sequence_length - cut)
                name = f"the logits of {tokens:,} tokens in {type_name} ({tokens:,} x {vocabulary:,})"
                yield size * tokens * vocabulary, Tensor("logits", name)
        yield size * vocabulary * hidden, Tensor("weight", f"the embedding or the output layer in {type_name}")
        block = shape.block_params
        yield size * block, Tensor("layer", f"all parameters of one layer in {type_name}")
        for ranks in {1, setting.num_gpus or 1}:
            share = f" divided by {ranks} ranks" if ranks > 1 else ""
            yield size * shape.num_params / ranks, Tensor("all parameters", f"all parameters in {type_name}{share}")


@cache
def _shape(model: str | None) -> ModelShape | None:
    """Return the shape of a model that the project knows without a network. None for others."""
    if model is None:
        return None
    try:
        return shapes.find_known(model)
    except Refusal:
        return None
