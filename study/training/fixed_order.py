"""Fix the order of additions and the kernels, so that strategies with the same arithmetic train bit-identical weights.

The result of a floating-point sum depends on the order of its terms. Engines add in different orders, and some of them
compute a few elements with another kernel. Each pin removes one such difference. `--fixed-order all` sets every pin,
and `--fixed-order optimizer,norm` sets two of them. No pin replaces an engine's treatment of gradients: the pin
"collectives" changes torch.distributed below the engine. The engine still decides what is sent, divided, sliced and
kept.

optimizer    AdamW updates tensor by tensor, with torch's basic operations. torch's fused AdamW rounds the last
             elements of a tensor, which do not fill a vector register, in another way. A flat partition of ZeRO ends
             at other elements than a parameter does. With optimizer offload to the host, this AdamW also replaces
             DeepSpeed's CPU Adam.
linear       Stage 3 uses torch's linear layer instead of DeepSpeed's, which adds the bias in a separate operation.
grouping     The tensors of every module pass through an autograd node that does nothing. Stage 3 inserts such nodes
             for its hooks. If a tensor is used several times, autograd then groups the terms of its gradient in the
             same way under every strategy.
norm         The squares of the engine's gradients are summed in fp64, and the global norm is rounded to fp32 once. The
             engine still computes its own norm, which may differ from this one only by rounding.
collectives  Sums over ranks are added in the order of the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from study.config import PINS, RunConfig
from zero_study.errors import Failed

# The largest allowed relative difference of an engine's own norm from the exact one. Engines sum millions of squares in
# fp32.
NORM_TOLERANCE = 2e-3


def pins(config: RunConfig) -> frozenset[str]:
    """Return the names of the `--fixed-order` settings (pins) that a run uses."""
    if config.fixed_order is None:
        return frozenset()
    return frozenset(PINS if config.fixed_order == "all" else config.fixed_order.split(","))


# ---------------------------------------------------------------- sums over ranks, in the order of the ranks


class _Done:
    """The handle of a collective operation that has already ended."""

    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def sum_in_rank_order(pieces: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the sum of the ranks' tensors, added one after another from the first rank on."""
    first, *parts = pieces
    total = first.clone()
    for piece in parts:
        total += piece
    return total


def fix_collectives() -> None:
    """Make every floating-point sum over ranks in torch.distributed add in rank order.

    Call this before building an engine.

    DDP sums in C++, which this does not change. `fix_ddp` does the same for DDP.
    """
    originals = {name: getattr(dist, name) for name in ("all_reduce", "reduce", "reduce_scatter_single")}

    def gathered(tensor: torch.Tensor, group: Any) -> list[torch.Tensor]:
        pieces = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
        dist.all_gather(pieces, tensor.contiguous(), group=group)
        return pieces

    def is_sum(tensor: torch.Tensor, op: Any) -> bool:
        return tensor.is_floating_point() and op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG)

    def total(tensor: torch.Tensor, op: Any, group: Any) -> torch.Tensor:
        added = sum_in_rank_order(gathered(tensor, group))
        return added / dist.get_world_size(group) if op == dist.ReduceOp.AVG else added

    def all_reduce(tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        if not is_sum(tensor, op):
            return originals["all_reduce"](tensor, op=op, group=group, async_op=async_op)
        tensor.copy_(total(tensor, op, group))
        return _Done() if async_op else None

    def reduce(tensor: Any, dst: int, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        if not is_sum(tensor, op):
            return originals["reduce"](tensor, dst, op=op, group=group, async_op=async_op)
        added = total(tensor, op, group)
        if dist.get_rank() == dst:
            tensor.copy_(added)
        return _Done() if async_op else None

    def reduce_scatter_single(
        output: Any, input: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        if not is_sum(input, op):
            return originals["reduce_scatter_single"](output, input, op=op, group=group, async_op=async_op)
        own = total(input, op, group).flatten().chunk(dist.get_world_size(group))[dist.get_rank(group)]
        output.copy_(own.view_as(output))
        return _Done() if async_op else None

    fixed = {"all_reduce": all_reduce, "reduce": reduce, "reduce_scatter_single": reduce_scatter_single}
    fixed |= dict.fromkeys(("reduce_scatter_tensor", "_reduce_scatter_base"), reduce_scatter_single)
    for module in (dist, dist.distributed_c10d):
        for name, function in fixed.items():
            if hasattr(module, name):
                setattr(module, name, function)


def fix_ddp(model: torch.nn.parallel.DistributedDataParallel) -> None:
    """Make DDP sum its buckets in rank order.

    As in DDP itself, gradients are divided by the number of ranks before the sum.
    """

    def hook(state: None, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        del state
        tensor = bucket.buffer()
        tensor.mul_(1.0 / dist.get_world_size())
        dist.all_reduce(tensor)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(tensor)
        return future

    hook.__annotations__ = {}  # DDP checks annotations, and here they are strings
    model.register_comm_hook(None, hook)


# ---------------------------------------------------------------- the grouping of autograd's additions


class _Nothing(torch.autograd.Function):
    """An autograd node that returns its input unchanged, in the forward and in the backward pass."""

    @staticmethod
    def forward(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        del ctx, inputs, output

    @staticmethod
    def backward(_ctx: Any, *gradients: Any) -> Any:
        return gradients if len(gradients) > 1 else gradients[0]


def _through_nothing(value: Any) -> Any:
    """Pass the floating-point tensors in a value through `_Nothing`.

    Tuples, lists and dicts are searched, as DeepSpeed searches the inputs and outputs of modules.
    """
    if isinstance(value, torch.Tensor):
        return _Nothing.apply(value) if value.is_floating_point() else value  # type: ignore[no-untyped-call]
    if isinstance(value, tuple | list):
        passed = [_through_nothing(item) for item in value]
        return type(value)(*passed) if hasattr(value, "_fields") else type(value)(passed)
    if isinstance(value, dict):
        for key in value:
            value[key] = _through_nothing(value[key])
    return value


def fix_grouping(model: torch.nn.Module) -> None:
    """Make autograd group the terms of gradients as under stage 3, with identity nodes around every module.

    Do not use it for stage 3, which has such nodes itself.
    """
    for module in model.modules():
        module.register_forward_pre_hook(lambda _module, given: _through_nothing(given))
        module.register_forward_hook(lambda _module, _given, returned: _through_nothing(returned))


# ---------------------------------------------------------------- the gradient norm


def exact_norm(pieces: Iterable[torch.Tensor], group: Any = None, is_sharded: bool = True) -> torch.Tensor:
    """Return the 2-norm of all tensors of all ranks together.

    The squares are summed in fp64, and the norm is rounded to fp32.

    If the tensors are fp64, the norm stays fp64. If they are sharded, the call is collective: every rank must make it.
    """
    pieces = list(pieces)
    square = torch.zeros((), dtype=torch.float64, device=pieces[0].device)
    for piece in pieces:
        square += piece.detach().double().square().sum()
    if is_sharded:
        dist.all_reduce(square, group=group)
    return square.sqrt() if pieces[0].dtype == torch.float64 else square.sqrt().float()


def fix_norm_of_zero(optimizer: Any, stage: int) -> None:
    """Make ZeRO stages 1 to 3 clip by the exact norm of their gradients, and report that norm.

    The optimizer's step raises Failed if the engine's own norm differs from it by more than NORM_TOLERANCE.
    """
    name = "_get_norm_groups" if stage == 3 else "scaled_global_norm"
    compute, clip = getattr(optimizer, name), optimizer.unscale_and_clip_grads
    latest: list[torch.Tensor] = []

    def compute_both() -> Any:
        own = compute()  # under stage 3, a list with one norm per parameter group
        norms = own if stage == 3 else [own]
        exact = exact_norm(_gradients_held(optimizer, stage))
        of_engine, of_gradients = math.hypot(*map(float, norms)), float(exact)
        if abs(of_engine - of_gradients) > NORM_TOLERANCE * of_gradients:
            raise Failed(
                f"the engine reports the gradient norm {of_engine}, but the norm of its gradients is {of_gradients}"
            )
        latest[:] = [exact]
        return [exact] if stage == 3 else exact

    def clip_by_exact(gradients: Any, total_norm: Any) -> Any:
        del total_norm
        return clip(gradients, latest[0])

    setattr(optimizer, name, compute_both)
    optimizer.unscale_and_clip_grads = clip_by_exact


def _gradients_held(optimizer: Any, stage: int) -> list[torch.Tensor]:
    """Return the gradients in this rank's partition at the start of an optimizer step. Padding elements are zero."""
    if getattr(optimizer, "offload_optimizer" if stage == 3 else "cpu_offload"):
        masters = optimizer.fp32_partitioned_groups_flat if stage == 3 else optimizer.single_partition_of_fp32_groups
        return [master.grad for master in masters]
    return [piece for group in optimizer.averaged_gradients.values() for piece in group if piece is not None]


# ---------------------------------------------------------------- one run


def before_engine(config: RunConfig) -> None:
    """Apply those pins of --fixed-order that must be set before an engine is built."""
    if "collectives" in pins(config):
        fix_collectives()


def before_prepare(model: torch.nn.Module, config: RunConfig, stage: int | None) -> None:
    """Apply those pins of --fixed-order that change a model before an engine wraps it."""
    if "grouping" in pins(config) and stage != 3:
        fix_grouping(model)


def after_prepare(model: Any, optimizer: Any, config: RunConfig, stage: int | None) -> None:
    """Fix the order of additions in the model and the optimizer that accelerate's `prepare` has returned.

    `optimizer` is the engine's own optimizer.
    """
    if "collectives" in pins(config) and isinstance(model, torch.nn.parallel.DistributedDataParallel):
        fix_ddp(model)
    if "norm" in pins(config) and stage:
        fix_norm_of_zero(optimizer, stage)
