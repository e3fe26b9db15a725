"""Compute checksums of this rank's weights, gradients and batches, on whichever device they are."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ..engines.readback.parameters import local_shard

Checksum = tuple[float, float]  # the sum of a tensor's elements and the sum of their absolute values, in fp64
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by their size in bytes
UNKNOWN: Checksum = (math.nan, 0.0)
TOLERANCE = 1e-10  # relative; the order of additions causes smaller differences, and drifting weights cause larger ones


def checksums(tensors: Iterable[torch.Tensor]) -> list[Checksum]:
    """Return the checksum of each tensor. For a sharded tensor, only this rank's shard counts."""
    with torch.no_grad():
        return [_sums(tensor) for tensor in tensors]


def of_batch(*batch: Any) -> list[Checksum]:
    """Return the checksums of all tensors in a model's inputs."""
    return checksums(leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor))


def of_weights(model: Any) -> dict[str, Checksum]:
    """Return the checksum of each parameter, by its name."""
    return {name: checksums([parameter])[0] for name, parameter in model.named_parameters()}


def bits(tensor: Any) -> torch.Tensor | None:
    """Return the sum of a tensor's bits, read as integers of 64 bits, in a tensor of int64 that is not read yet.

    It is 0 if all elements are zero, and does not depend on the order of additions. For a sharded tensor, only this
    rank's shard counts. None if the tensor cannot be read.
    """
    part = local_shard(tensor).detach()
    if part.layout is not torch.strided or not part.untyped_storage().nbytes() or part.is_meta or part.is_quantized:
        return None
    part = torch.view_as_real(part) if part.is_complex() else part
    if part.is_contiguous():
        part = part.view(-1)
    else:  # a copy would need memory
        is_dense = torch.ops.aten.is_non_overlapping_and_dense(part)
        part = part.as_strided((part.numel(),), (1,)) if is_dense else part.reshape(-1)
    size = part.element_size()
    whole = part.numel() // (8 // size) * (8 // size)
    if part.storage_offset() * size % 8:  # it cannot be read as wider integers
        return part.view(INTEGERS[size]).sum(dtype=torch.int64)
    if whole == part.numel():
        return part.view(torch.int64).sum()
    return part[:whole].view(torch.int64).sum() + part[whole:].view(INTEGERS[size]).sum(dtype=torch.int64)


def total(pairs: dict[str, Checksum]) -> Checksum:
    """Return the checksum of several tensors together."""
    return sum(pair[0] for pair in pairs.values()), sum(pair[1] for pair in pairs.values())


def first_difference(pairs: dict[str, Checksum], partners: dict[str, Checksum]) -> str | None:
    """Say how many tensors have different checksums, and name the first. None if there is no difference.

    NaN in both tensors counts as equal.
    """
    partners = dict.fromkeys(pairs, (0.0, 0.0)) | partners  # names that the partner lacks count as zero
    names = [name for name, pair in pairs.items() if _differ(pair, partners[name])]
    if not names:
        return None
    first = names[0]
    sums = f"sums {pairs[first][0]:.9g} and {partners[first][0]:.9g}"
    return f"{len(names)} of {len(pairs)} tensors, the first is {first}: {sums}"


def _differ(first: Checksum, second: Checksum) -> bool:
    is_near = all(abs(a - b) <= TOLERANCE * max(first[1], second[1]) for a, b in zip(first, second, strict=True))
    return not is_near and not (math.isnan(first[0]) and math.isnan(second[0]))


def _sums(tensor: torch.Tensor) -> Checksum:
    """Return the checksum of one tensor.

    UNKNOWN if the tensor cannot be read, because such an error must not end the training.
    """
    tensor = local_shard(tensor)
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():  # reading a tensor would break the capture
        return UNKNOWN
    wide = torch.float32 if tensor.device.type == "mps" else torch.float64  # mps has no fp64
    try:
        tensor = tensor._values() if tensor.is_sparse else tensor
        tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        if not tensor.is_floating_point():
            total = float(tensor.sum(dtype=torch.int64))
            return total, abs(total)
        tensor = tensor.float() if tensor.element_size() == 1 else tensor  # torch sums no 8-bit floats
        return float(tensor.sum(dtype=wide)), float(torch.linalg.vector_norm(tensor, 1, dtype=wide))
    except RuntimeError:  # the tensor is on the meta device, or quantized
        return UNKNOWN
