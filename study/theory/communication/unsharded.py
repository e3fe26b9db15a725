"""What is sent where nothing is sharded: by DistributedDataParallel, and by DeepSpeed's stage 0?"""

from __future__ import annotations

from collections.abc import Iterator

from study.theory.case import Engine
from study.theory.communication.buckets import ENGINE_BUCKET_ELEMENTS, Collective, chunks
from study.theory.communication.model_order import Model, modules_of
from study.theory.shapes import ModelShape
from study.theory.shapes.sizes import FOUR_NORMS

DDP_FIRST_BUCKET_BYTES = 1 << 20  # torch/csrc/distributed/c10d/reducer.hpp, kDefaultFirstBucketBytes
DDP_BUCKET_BYTES = 25 << 20  # bucket_cap_mb, which the study leaves alone


def ddp_step(engine: Engine, shape: ModelShape, model: Model) -> Iterator[Collective]:
    """Follow DistributedDataParallel: buckets in the order of gradients, as rebuilt after the first step."""
    held, limit = 0, DDP_FIRST_BUCKET_BYTES
    for parameter in model.gradient_order():
        held += parameter.numel * engine.parameter_bytes
        if held >= limit:
            yield "all_reduce", held
            held, limit = 0, DDP_BUCKET_BYTES
    if held:
        yield "all_reduce", held
    buffers = buffer_bytes(shape)
    if buffers:  # rank 0's, at the first forward pass after a reduction
        yield "broadcast", buffers


def buffer_bytes(shape: ModelShape) -> int:
    """Bytes of the tensors that a model of `transformers` keeps beside its parameters, and DDP makes equal."""
    if shape.architecture in ("gpt2", "opt"):
        return 0
    if shape.architecture == "bert":  # positions and token types, as int64
        return 2 * 8 * shape.positions
    if shape.architecture == "gpt-neo":  # each block has a causal mask of booleans
        return shape.layers * shape.positions**2
    if shape.architecture == "gpt-j":  # sines and cosines of its 64 rotary dimensions in each block
        return shape.layers * shape.positions * 64 * 4
    if shape.architecture == "gpt-neox":  # rotates a quarter of a head
        return 2 * 4 * (shape.head_size // 8)
    frequencies = 2 * 4 * (shape.head_size // 2)
    if shape.architecture == "gemma3":  # of blocks with a window, and of those without
        frequencies *= 2
    return frequencies + (4 if shape.architecture in FOUR_NORMS else 0)  # the embedding's scale


def stage_0_step(engine: Engine, model: Model) -> Iterator[Collective]:
    """Follow engine.py's allreduce_no_retain; it takes parameters as declared, which is about as visited."""
    order = dict.fromkeys(p for module in modules_of(model.layout) for p in module)
    for elements in chunks((p.numel for p in order), ENGINE_BUCKET_ELEMENTS):
        yield "all_reduce", elements * engine.parameter_bytes
