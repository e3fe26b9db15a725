"""A part of a model that is frozen and runs in the forward pass only, such as the tower that encodes images.

Its parameters have no gradients and no optimizer states, and its forward pass saves nothing.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from study.theory.model_states import master_bytes

if TYPE_CHECKING:
    from study.theory.engine import Engine
    from study.theory.shapes import ModelShape


def part_of(shape: ModelShape) -> ModelShape | None:
    """Return the frozen part as a shape of its own. None if all parameters are trained."""
    counts = shape.counts.frozen
    return None if counts is None else dataclasses.replace(shape, counts=counts, layers=len(counts.executed))


def num_params(shape: ModelShape) -> int:
    """Return the number of parameters of the frozen part."""
    return 0 if shape.counts.frozen is None else shape.counts.frozen.num_params


def bytes_of_rank(shape: ModelShape, engine: Engine) -> float:
    """Return the bytes of a rank's parameters of the frozen part: whole at stages 0 to 2, and a shard at stage 3.

    DeepSpeed casts the whole model to its type. FSDP2 keeps the type in which the weights were loaded, which is fp32 if
    the others have masters.
    """
    size = master_bytes(engine) if engine.kind == "fsdp" else engine.parameter_bytes
    return size * num_params(shape) / (engine.num_shards if engine.zero_stage == 3 else 1)
