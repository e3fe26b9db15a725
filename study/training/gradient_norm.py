"""How large is the global gradient norm, and where is it clipped? The same under every engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from study.config import RunConfig

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator


def global_norm(tensors: Iterable[torch.Tensor], is_exact: bool = False) -> torch.Tensor:
    """2-norm of all tensors together, as exact as DeepSpeed's stages 1 to 3 have it, which sum in fp64.

    `is_exact`: all squares are summed in fp64, and the norm is rounded once.

    On a CPU torch adds up the squares of a whole tensor in fp32: its norm of 31 million gradients is 1.7e-3 too small.
    Row by row, and the rows in fp64, it is right to 1e-7 and no slower. GPUs add in a tree, which is exact enough.
    """
    import torch
    from torch.distributed.tensor import DTensor

    from study.training.fixed_order import exact_norm

    tensors = list(tensors)
    sharded = [tensor for tensor in tensors if isinstance(tensor, DTensor)]  # FSDP2's
    if not sharded:
        return exact_norm(tensors, is_sharded=False) if is_exact else _norm(tensors).to(_norm_type(tensors))
    shards = [tensor.to_local() for tensor in sharded]
    mesh = sharded[0].device_mesh
    group = mesh.get_group(mesh.ndim - 1)  # replicas hold the same
    if is_exact:
        return exact_norm(shards, group)
    square = _norm([shard for shard in shards if shard.numel()] or shards).square()
    torch.distributed.all_reduce(square, group=group)
    return square.sqrt().to(_norm_type(tensors))


def _norm_type(tensors: list[torch.Tensor]) -> torch.dtype:
    import torch

    return torch.float64 if tensors[0].dtype == torch.float64 else torch.float32


def _norm(tensors: list[torch.Tensor]) -> torch.Tensor:
    """2-norm of what this rank holds, in double precision."""
    import torch

    if tensors[0].device.type != "cpu":
        return torch.nn.utils.get_total_norm(tensors).double()
    rows = [torch.linalg.vector_norm(tensor, dim=-1).flatten() for tensor in tensors]
    norm: torch.Tensor = torch.linalg.vector_norm(torch.cat(rows), dtype=torch.float64)
    return norm


def gradient_norm_reader(accelerator: Accelerator, model: Any, config: RunConfig) -> Callable[[], Any]:
    """Return a function that clips where the engine has not, and returns the global gradient norm before clipping.

    To be called between backward and the optimizer's step; DeepSpeed clips and steps inside accelerate's backward.
    """
    import torch

    from study.training.fixed_order import pins

    is_exact = "norm" in pins(config)
    if accelerator.distributed_type.value != "DEEPSPEED":
        parameters = [p for p in model.parameters() if p.requires_grad]

        def clip() -> torch.Tensor:
            accelerator.unscale_gradients()  # fp16-autocast's; does nothing otherwise
            norm = global_norm((p.grad for p in parameters), is_exact)
            if config.gradient_clipping:
                torch.nn.utils.clip_grads_with_norm_(parameters, config.gradient_clipping, norm)
            return norm

        return clip
    if model.zero_optimization_stage():
        norm: Callable[[], Any] = model.get_global_grad_norm
        return norm
    # Stage 0 keeps no norm; its gradients are whole and averaged when it steps, so the norm is taken just before it.
    latest: list[torch.Tensor] = []
    take_step = model.step

    def note_norm_and_step(*args: Any, **kwargs: Any) -> Any:
        scaler = model.torch_autocast_z0_gradscaler
        norm = global_norm((p.grad for p in model.module.parameters()), is_exact)
        latest[:] = [norm / scaler.get_scale() if scaler else norm]
        return take_step(*args, **kwargs)

    def clip_by_noted_norm() -> None:
        torch.nn.utils.clip_grads_with_norm_(model.module.parameters(), config.gradient_clipping, latest[0])

    model.step = note_norm_and_step
    model.clip_fp32_gradients = clip_by_noted_norm  # the engine's own clips by torch's inexact norm
    return lambda: latest[0]
