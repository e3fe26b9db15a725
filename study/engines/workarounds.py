"""Work around faults and gaps of accelerate and DeepSpeed in this process. Imports neither before it is called."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def shard_on_cpu(accelerator: Any, plugin: Any, mesh: Any) -> None:
    """Make an Accelerator that runs on a CPU use FSDP2, which accelerate 1.15 drops there as it initializes.

    `mesh`: accelerate's ParallelismConfig of replicas and shards; None: all ranks are one group of shards.
    """
    from accelerate import DistributedType, PartialState

    # Each new AcceleratorState, as every prepared optimizer makes one, takes over what PartialState says.
    PartialState().distributed_type = accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    if mesh is not None:
        accelerator.state.parallelism_config = mesh
        accelerator.state.device_mesh = mesh.get_device_mesh("cpu")


def align_swapped_gradients() -> None:
    """Have DeepSpeed cut the gradients that it swaps to a disk where a disk can read them, for this process.

    DeepSpeed 0.19.4 and newer read each gradient into its slice of one locked buffer. A disk that requires aligned
    memory refuses an unaligned slice, DeepSpeed ignores the error, and the optimizer uses what lay in the buffer.
    The elements before and after the aligned part are fewer than DeepSpeed swaps, and stay in memory.
    Source: docs/upstream/nvme_slices.py.
    """
    from deepspeed.runtime.swap_tensor.optimizer_utils import OptimizerSwapper

    OptimizerSwapper._adjust_for_misaligned_lengths = _cut_at_alignment


def _cut_at_alignment(
    swapper: Any, tensors: list[torch.Tensor], offsets: list[int]
) -> tuple[list[torch.Tensor], list[int]]:
    """Cut gradients into pieces that begin and end where a disk can read, and return the pieces with their offsets.

    `offsets`: where each gradient begins in the buffer, in elements.
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
