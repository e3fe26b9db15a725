"""Fix the order of additions and the kernels, so that strategies with the same arithmetic train the same bits.

A sum of floating-point numbers depends on the order of its terms. Engines add in different orders, and some of them
compute a few elements by another kernel. Each pin takes one such difference away. `--fixed-order all` sets every pin,
`--fixed-order optimizer,norm` sets two. No pin replaces what an engine does with gradients: the order of a sum over
ranks is fixed beneath the engine, in torch.distributed, and the engine still decides what is sent, and what is
divided, sliced and kept.

optimizer    AdamW tensor by tensor, with torch's basic operations. torch's fused AdamW rounds the last elements of a
             tensor, which fill no vector register, in another way, and a flat partition of ZeRO's ends elsewhere than
             a parameter does. Under offload to the host it stands in for DeepSpeed's own CPU Adam.
linear       torch's linear layer under stage 3, in place of DeepSpeed's, which adds the bias in its own operation.
grouping     Every module's tensors pass through a node that does nothing, as stage 3 puts it around modules for its
             hooks. Where a tensor is used several times, autograd then groups the terms of its gradient in one way.
norm         The global gradient norm is summed in fp64 and rounded to fp32 once, over the gradients as the engine
             holds them. The engine still computes its own, which may differ from this one by rounding alone.
collectives  Sums over ranks are added in the order of the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from study.config import PINS, RunConfig
from study.errors import Failed

# By how much an engine's own norm may differ from the exact one, relatively: fp32 sums of millions of squares.
NORM_TOLERANCE = 2e-3


def pins(config: RunConfig) -> frozenset[str]:
    """Return the names of the pins that a run sets."""
    if config.fixed_order is None:
        return frozenset()
    return frozenset(PINS if config.fixed_order == "all" else config.fixed_order.split(","))


# ---------------------------------------------------------------- sums over ranks, in the order of the ranks


class _Done:
    """The handle of a collective that has ended."""

    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def sum_in_rank_order(pieces: Iterable[torch.Tensor]) -> torch.Tensor:
    """Add tensors one after another, the first rank's first."""
    first, *parts = pieces
    total = first.clone()
    for piece in parts:
        total += piece
    return total


def fix_collectives() -> None:
    """Let every sum of torch.distributed over ranks be added in rank order. To be called before an engine is built.

    What DDP sums inside C++ does not pass here; `fix_ddp` does the same for it.
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
    """Let DDP's buckets be summed in rank order. DDP multiplies by 1 / ranks before it sums, and so does this."""

    def hook(state: None, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        del state
        tensor = bucket.buffer()
        tensor.mul_(1.0 / dist.get_world_size())
        dist.all_reduce(tensor)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(tensor)
        return future

    hook.__annotations__ = {}  # of which DDP reads those that are no strings
    model.register_comm_hook(None, hook)


# ---------------------------------------------------------------- the grouping of autograd's additions


class _Nothing(torch.autograd.Function):
    """A node of autograd's graph that returns what it is given, in both directions."""

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
    """Pass the tensors in a value through such a node: as DeepSpeed goes through inputs and outputs of modules."""
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
    """Put such nodes around every module of a model that is not stage 3's, which has them."""
    for module in model.modules():
        module.register_forward_pre_hook(lambda _module, given: _through_nothing(given))
        module.register_forward_hook(lambda _module, _given, returned: _through_nothing(returned))


# ---------------------------------------------------------------- the gradient norm


def exact_norm(pieces: Iterable[torch.Tensor], group: Any = None, is_sharded: bool = True) -> torch.Tensor:
    """Return the 2-norm of all ranks' pieces together: squares are summed in fp64, and rounded once, to fp32.

    Where the pieces are fp64, nothing is rounded. Collective, if they are sharded.
    """
    pieces = list(pieces)
    square = torch.zeros((), dtype=torch.float64, device=pieces[0].device)
    for piece in pieces:
        square += piece.detach().double().square().sum()
    if is_sharded:
        dist.all_reduce(square, group=group)
    return square.sqrt() if pieces[0].dtype == torch.float64 else square.sqrt().float()


def fix_norm_of_zero(optimizer: Any, stage: int) -> None:
    """Let stages 1 to 3 clip by the exact norm of the gradients that they hold, and report that one.

    Raises Failed, as it steps, if the engine's own norm is not near it.
    """
    name = "_get_norm_groups" if stage == 3 else "scaled_global_norm"
    compute, clip = getattr(optimizer, name), optimizer.unscale_and_clip_grads
    latest: list[torch.Tensor] = []

    def compute_both() -> Any:
        own = compute()  # of stage 3 the norms of its groups of parameters
        norms = own if stage == 3 else [own]
        exact = exact_norm(_gradients_held(optimizer, stage))
        _check_norm(math.hypot(*map(float, norms)), float(exact))
        latest[:] = [exact]
        return [exact] if stage == 3 else exact

    def clip_by_exact(gradients: Any, total_norm: Any) -> Any:
        del total_norm
        return clip(gradients, latest[0])

    setattr(optimizer, name, compute_both)
    optimizer.unscale_and_clip_grads = clip_by_exact


def _gradients_held(optimizer: Any, stage: int) -> list[torch.Tensor]:
    """List the gradients that this rank's partition has as a step begins; padding is zeros."""
    if getattr(optimizer, "offload_optimizer" if stage == 3 else "cpu_offload"):
        masters = optimizer.fp32_partitioned_groups_flat if stage == 3 else optimizer.single_partition_of_fp32_groups
        return [master.grad for master in masters]
    return [piece for group in optimizer.averaged_gradients.values() for piece in group if piece is not None]


def _check_norm(own: float, exact: float) -> None:
    if abs(own - exact) > NORM_TOLERANCE * exact:
        raise Failed(f"the engine's gradient norm is {own}, that of the gradients it holds is {exact}")


# ---------------------------------------------------------------- one run


def before_engine(config: RunConfig) -> None:
    """Set the pins that have to be there before an engine is built."""
    if "collectives" in pins(config):
        fix_collectives()


def before_prepare(model: torch.nn.Module, config: RunConfig, stage: int | None) -> None:
    """Set the pins of a model that no engine has wrapped yet."""
    if "grouping" in pins(config) and stage != 3:
        fix_grouping(model)


def after_prepare(model: Any, optimizer: Any, config: RunConfig, stage: int | None) -> None:
    """Set the pins of what `prepare` has built: `optimizer` is the engine's."""
    if "collectives" in pins(config) and isinstance(model, torch.nn.parallel.DistributedDataParallel):
        fix_ddp(model)
    if "norm" in pins(config) and stage:
        fix_norm_of_zero(optimizer, stage)
