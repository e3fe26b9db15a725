"""Work around faults of torch, accelerate and DeepSpeed in this process. Each is imported only if needed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def shard_on_cpu(accelerator: Any, plugin: Any, mesh: Any) -> None:
    """Make an Accelerator that runs on a CPU use FSDP2, which accelerate 1.15 drops there as it initializes.

    `mesh` is accelerate's ParallelismConfig of replicas, shards and ranks that share a sequence; None if all ranks form
    one group of shards.
    """
    from accelerate import DistributedType, PartialState

    # Every prepared optimizer makes a new AcceleratorState, which copies the type from PartialState.
    PartialState().distributed_type = accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    if mesh is not None:
        accelerator.state.parallelism_config = mesh
        accelerator.state.device_mesh = mesh.get_device_mesh("cpu")


def ring_attention_on_cpu() -> None:
    """Make torch's context parallelism work on a CPU in this process, by giving it the attention kernel of the CPU.

    Torch 2.13 has its ring for the kernels of GPUs only. On a CPU it raises "Operator
    aten._scaled_dot_product_flash_attention_for_cpu.default does not have a sharding strategy registered." The ring and
    its messages are torch's own here, and only the kernel in it is another.
    """
    import torch
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.experimental._context_parallel import _attention

    ring: Any = _attention

    def local(value: Any) -> Any:
        return value.to_local() if isinstance(value, DTensor) else value

    def sharded(results: Any, mesh: Any) -> tuple[Any, ...]:
        return tuple(DTensor.from_local(each, mesh, [Shard(2)], run_check=False) for each in results)

    def forward(kernel: Any, arguments: Any, options: Any) -> tuple[Any, ...]:
        mesh = arguments[0].device_mesh
        query, key, value, *settings = map(local, arguments)
        named = dict(zip(("dropout_p", "is_causal"), settings, strict=False)) | options
        results = ring._templated_ring_attention(mesh.get_group(), 2, kernel, query, key, value, **named)
        return sharded(results[:2], mesh)  # the output, and the logarithms of its sums

    def backward(kernel: Any, arguments: Any, options: Any) -> tuple[Any, ...]:
        mesh = arguments[0].device_mesh
        gradient, query, key, value, output, sums, dropout, is_causal = map(local, arguments)

        def call(*, grad_out: Any, query: Any, key: Any, value: Any, out: Any, logsumexp: Any, is_causal: bool) -> Any:
            return kernel(grad_out, query, key, value, out, logsumexp, dropout, is_causal, **options)

        results = ring._templated_ring_attention_backward(
            mesh.get_group(), 2, call, gradient, "grad_out", query, key, value, output, sums, is_causal
        )
        return sharded(results[:3], mesh)  # of query, key and value

    operators = torch.ops.aten
    ring.custom_ops[operators._scaled_dot_product_flash_attention_for_cpu.default] = forward
    ring.custom_ops[operators._scaled_dot_product_flash_attention_for_cpu_backward.default] = backward


def align_swapped_gradients() -> None:
    """Make DeepSpeed in this process swap gradients to a disk at aligned positions.

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
