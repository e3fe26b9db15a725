"""Sketch tensors: reduce each to a few sums, from which the distance of two tensors can be estimated.

This is a count sketch (Charikar, Chen and Farach-Colton, 2002). Each element is added to, or subtracted from, one of
SIZE sums; a hash of its position decides. The 2-norm of a sketch estimates that of the tensor, with a mean relative
error below sqrt(2 / SIZE). A sketch is linear in the tensor, so this also holds for the difference of two. The hash
uses integer arithmetic, which is the same on every device and in every release of torch.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from .recorded import SIZE as SIZE

PART = 2**22  # elements that are processed at once
FEW = 2**14  # elements of a tensor for which the hash is kept, because most tensors are small and come again
_MIX = (-7046029254386353131, -4658895280553007687, -7723592293110705685)  # splitmix64's constants


def sketch(tensor: torch.Tensor) -> list[float]:
    """Return the sketch of a tensor of any shape: SIZE sums in fp64."""
    whole = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
    flat = (torch.view_as_real(whole.resolve_conj()) if whole.is_complex() else whole).reshape(-1)
    sums = torch.zeros(SIZE, dtype=_wide(flat), device=flat.device)
    for begin in range(0, flat.numel(), PART):
        part = flat[begin : begin + PART]
        # A fake tensor would be kept for the real ones that follow.
        is_kept = part.numel() <= FEW and type(part) is torch.Tensor
        numbers_and_signs = _kept_numbers_and_signs if is_kept else _numbers_and_signs
        numbers, signs = numbers_and_signs(begin, part.numel(), flat.device)
        sums.index_add_(0, numbers, part.to(sums.dtype) * signs)
    values: list[float] = sums.tolist()
    return values


def of_rows(tensor: torch.Tensor) -> tuple[int, list[float]]:
    """Return the number of rows of a tensor, a sketch of their mean, and a sketch of the mean of their magnitudes.

    Means do not depend on how a batch is split. Magnitudes are included because the mean of BatchNorm's output is the
    same for all inputs.
    """
    rows = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
    rows = (rows if rows.ndim else rows.reshape(1)).to(_wide(rows))
    return len(rows), sketch(torch.stack([rows.mean(0), rows.abs().mean(0)])) if len(rows) else [0.0] * SIZE


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.float32 if tensor.device.type == "mps" else torch.float64  # MPS has no fp64


def _numbers_and_signs(begin: int, size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return, for each element, the number of the sum to which it belongs, and the sign with which it is added."""
    bits = (torch.arange(begin, begin + size, device=device) + 1) * _MIX[0]
    for shift, factor in zip((30, 27), _MIX[1:], strict=True):
        bits = (bits ^ ((bits >> shift) & ((1 << (64 - shift)) - 1))) * factor
    bits = bits ^ ((bits >> 31) & ((1 << 33) - 1))
    return bits & (SIZE - 1), 1 - 2 * ((bits >> 20) & 1)


_kept_numbers_and_signs = lru_cache(maxsize=64)(_numbers_and_signs)
