"""Compare values bit by bit."""

from __future__ import annotations

import torch


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors have the same type, shape and bits."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
