"""Gradients that DeepSpeed has swapped to a disk, read so that none is missed.

DeepSpeed 0.19.4 and newer read each into its slice of one locked buffer. A disk that asks for aligned memory refuses a
slice that is not, nobody looks at what it says, and the optimizer steps by what lay there.
Source: docs/upstream/nvme_slices.py.
"""

from __future__ import annotations

from typing import Any

import torch


def read_every_gradient() -> None:
    """From here on, in this process, let DeepSpeed read swapped gradients into memory of their own, and copy them."""
    from deepspeed.runtime.swap_tensor.partitioned_optimizer_swapper import PartitionedOptimizerSwapper

    PartitionedOptimizerSwapper._swap_in_pinned_gradients = _read


def _read(self: Any, aio_handle: Any, parameter: Any, gradient: torch.Tensor) -> None:
    swapped = list(self.swap_params_info[parameter.ds_id].swapped_gradients.values())
    # What is not locked goes through a buffer that the handle aligns.
    found = [torch.empty(each.length, dtype=gradient.dtype) for each in swapped]
    for into, each in zip(found, swapped, strict=True):
        aio_handle.async_pread(into, each.path, 0)
    if aio_handle.wait() != len(swapped):
        raise OSError(f"{len(swapped)} swapped gradients were asked for, fewer were read")
    for read, each in zip(found, swapped, strict=True):
        gradient.narrow(0, each.offset, each.length).copy_(read)
