"""Sketch tensors: a few numbers, linear in the tensor, from which the distance of two tensors follows.

A count sketch (Charikar, Chen and Farach-Colton, 2002): each element is added, or taken away, in one of SIZE sums, by a
hash of its place. The 2-norm of a sketch is the tensor's, to sqrt(2 / SIZE) in the mean, and so is that of the
difference of two. The hash is arithmetic of whole numbers: the same on every device and in every release of torch.
"""

from __future__ import annotations

import torch

from .recorded import SIZE as SIZE

PART = 2**22  # elements that are taken at once
_MIX = (-7046029254386353131, -4658895280553007687, -7723592293110705685)  # splitmix64's constants


def sketch(tensor: torch.Tensor) -> list[float]:
    """Return the sketch of a tensor of any shape: SIZE sums in fp64."""
    whole = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
    flat = (torch.view_as_real(whole.resolve_conj()) if whole.is_complex() else whole).reshape(-1)
    sums = torch.zeros(SIZE, dtype=_wide(flat), device=flat.device)
    for begin in range(0, flat.numel(), PART):
        part = flat[begin : begin + PART]
        bits = _hash(torch.arange(begin, begin + part.numel(), device=flat.device))
        sums.index_add_(0, bits & (SIZE - 1), part.to(sums.dtype) * (1 - 2 * ((bits >> 20) & 1)))
    numbers: list[float] = sums.tolist()
    return numbers


def of_rows(tensor: torch.Tensor) -> tuple[int, list[float]]:
    """Return the number of rows of a tensor, and the sketch of their mean, which is the same however a batch is split.

    Behind it the mean of their magnitudes, as what BatchNorm returns has the same mean whatever it is.
    """
    rows = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
    rows = (rows if rows.ndim else rows.reshape(1)).to(_wide(rows))
    return len(rows), sketch(torch.stack([rows.mean(0), rows.abs().mean(0)])) if len(rows) else [0.0] * SIZE


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.float32 if tensor.device.type == "mps" else torch.float64  # which has no fp64


def _hash(places: torch.Tensor) -> torch.Tensor:
    bits = (places + 1) * _MIX[0]
    for shift, factor in zip((30, 27), _MIX[1:], strict=True):
        bits = (bits ^ ((bits >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return bits ^ ((bits >> 31) & ((1 << 33) - 1))
