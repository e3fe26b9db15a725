"""Read and compare the values of saved tensors."""

from __future__ import annotations

import torch

from . import pickles
from .content import Tensor


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors have the same type, shape and bits."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def values_of(tensor: Tensor) -> torch.Tensor | None:
    """Return the values of a tensor. None if they cannot be read, which `check_values` reports."""
    try:
        return tensor.read()
    except (pickles.Unreadable, OSError, RuntimeError, ValueError):
        return None


def numbers(values: torch.Tensor) -> torch.Tensor | None:
    """Flatten values to one row of real numbers in a type in which torch computes. None for integers."""
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    if not values.is_floating_point():
        return None
    wide = values if values.dtype in (torch.float64, torch.float32) else values.float()
    return wide.detach().reshape(-1)
