"""Identify the tensor of an allocation by its size: the logits, or the largest weight.

PyTorch's allocator rounds sizes up before it prints them: to 2 MiB, to 20 MiB between 1 and 10 MiB, and to multiples of
2 MiB above (c10/cuda/CUDACachingAllocator.cpp, get_allocation_size). Messages print two decimals.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache

from zero_study.logs.printed_settings import Setting
from zero_study.theory import shapes
from zero_study.theory.shapes import ModelShape
from zero_study.why.tracebacks import Phase

MIB, GIB = 1 << 20, 1 << 30
TYPES = {2: "16 bits", 4: "fp32"}
# Phases in which each kind of tensor is allocated. In other phases, sizes would agree by chance.
_PHASES: dict[str, tuple[Phase | None, ...]] = {
    "the logits": ("loss", "forward", "backward", "recomputation", "evaluation", None),
    "the embedding or the output layer": ("optimizer step", "gathering", "wrapping", "building", "saving"),
}


def rounded(num_bytes: float) -> int:
    """Return the bytes that PyTorch's allocator requests for a tensor of this size."""
    if num_bytes <= MIB:
        return 2 * MIB
    if num_bytes < 10 * MIB:
        return 20 * MIB
    return -(-int(num_bytes) // (2 * MIB)) * 2 * MIB


def identify(num_bytes: int, phase: Phase | None, setting: Setting) -> str | None:
    """Return the name of the tensor that has the size of an allocation. None if none, or more than one, has it."""
    tolerance = 0.006 * (GIB if num_bytes >= GIB else MIB)
    names = {
        kind: name for kind, size, name in _candidates(setting)
        if phase in _PHASES[kind] and abs(rounded(size) - num_bytes) <= tolerance
    }  # fmt: skip
    return next(iter(names.values())) if len(names) == 1 else None


def _candidates(setting: Setting) -> Iterator[tuple[str, float, str]]:
    """Yield the kind, the bytes and the name of the tensors that are known from the setting."""
    shape, vocabulary = shape_of(setting.model), vocabulary_of(setting)
    for size, type_name in TYPES.items():
        if vocabulary is not None and setting.micro_batch_size and setting.sequence_length:
            tokens = setting.micro_batch_size * setting.sequence_length
            kind = "the logits"
            yield kind, size * tokens * vocabulary, f"{kind} of {tokens:,} tokens in {type_name}"
        if shape is not None and vocabulary is not None:
            kind = "the embedding or the output layer"
            yield kind, size * vocabulary * shape.hidden, f"{kind} in {type_name}, or a temporary of its optimizer step"


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
