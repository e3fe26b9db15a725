"""Work around faults and gaps of accelerate and DeepSpeed in this process. Imports neither before it is called."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def shard_on_cpu(accelerator: Any, plugin: Any, mesh: Any) -> None:
    """Make an Accelerator that runs on a CPU use FSDP2, which accelerate 1.15 drops there as it initializes.

    `mesh` is accelerate's ParallelismConfig of replicas and shards; None if all ranks form one group of shards.
    """
    from accelerate import DistributedType, PartialState

    # Every prepared optimizer makes a new AcceleratorState, which copies the type from PartialState.
    PartialState().distributed_type = accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    if mesh is not None:
        accelerator.state.parallelism_config = mesh
        accelerator.state.device_mesh = mesh.get_device_mesh("cpu")


def align_swapped_gradients() -> None:
    """Make DeepSpeed split the gradients that it swaps to a disk at aligned positions, for this process.

    DeepSpeed 0.19.4 and newer read each gradient into its slice of one locked buffer. A disk that requires aligned
    memory refuses an unaligned slice, DeepSpeed ignores the error, and the optimizer uses whatever the buffer contained
    before. The pieces before and after the aligned part are smaller than what DeepSpeed swaps, so they stay in memory.
    Source: docs/upstream/nvme_slices.py.
    """
    from deepspeed.runtime.swap_tensor.optimizer_utils import OptimizerSwapper

    OptimizerSwapper._adjust_for_misaligned_lengths = _cut_at_alignment


def _cut_at_alignment(
    swapper: Any, tensors: list[torch.Tensor], offsets: list[int]
) -> tuple[list[torch.Tensor], list[int]]:
    """Split gradients into pieces at aligned positions, and return the pieces with their offsets.

    `offsets` are the positions at which the gradients begin in the buffer, in elements.
    """
    pieces, piece_offsets = [], []
    for tensor, offset in zip(tensors, offsets, strict=True):
        lengths = [tensor.numel()]
        if swapper.is_swappable_tensor(tensor=tensor):
            before = -offset % swapper.numel_alignment
            after = (tensor.numel() - before) % swapper.numel_alignment
            lengths = [before, tensor.numel() - before - after, after]
        for piece in tensor.split(lengths):  # type: ignore[no-untyped-call]
            if piece.numel():
                pieces.append(piece)
                piece_offsets.append(offset)
            offset += piece.numel()
    return pieces, piece_offsets
