"""Gradients on a disk, cut so that DeepSpeed reads back all of them.

DeepSpeed 0.19.4 and newer read each into its slice of one locked buffer. A disk that asks for aligned memory refuses a
slice that is not, nobody looks at what it says, and the optimizer steps by what lay there.
Source: docs/upstream/nvme_slices.py.
"""

from __future__ import annotations

from typing import Any

import torch


def cut_where_a_disk_reads() -> None:
    """From here on, in this process, let what DeepSpeed swaps of a gradient begin, as it ends, where a disk can read.

    What is before and after that is smaller than DeepSpeed swaps, and stays in memory.
    """
    from deepspeed.runtime.swap_tensor.optimizer_utils import OptimizerSwapper

    OptimizerSwapper._adjust_for_misaligned_lengths = _cut


def _cut(self: Any, tensors: list[torch.Tensor], offsets: list[int]) -> tuple[list[torch.Tensor], list[int]]:
    """Cut gradients, of which `offsets` say where they begin in the buffer; the pieces and theirs."""
    pieces, places = [], []
    for tensor, offset in zip(tensors, offsets, strict=True):
        lengths = [tensor.numel()]
        if self.is_swappable_tensor(tensor=tensor):
            before = -offset % self.numel_alignment
            after = (tensor.numel() - before) % self.numel_alignment
            lengths = [before, tensor.numel() - before - after, after]
        for piece in torch.split(tensor, lengths):
            if piece.numel():
                pieces.append(piece)
                places.append(offset)
            offset += piece.numel()
    return pieces, places
