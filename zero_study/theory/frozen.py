"""Describe the frozen part of a model that runs in the forward pass only, such as the tower that encodes images.

Its parameters have no gradients and no optimizer states, and its forward pass saves nothing.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zero_study.theory.shapes import ModelShape


def part_of(shape: ModelShape) -> ModelShape | None:
    """Return the frozen part of a model as a shape of its own. None if all parameters are trained."""
    counts = shape.counts.frozen
    return None if counts is None else dataclasses.replace(shape, counts=counts, layers=len(counts.executed))


def num_params(shape: ModelShape) -> int:
    """Return the number of parameters of the frozen part."""
    return 0 if shape.counts.frozen is None else shape.counts.frozen.num_params
