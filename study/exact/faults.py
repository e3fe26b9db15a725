"""Inject faults (errors of an engine or a script) into a training, which the exact comparison must detect.

Each fault begins in step FAULTY_STEP. The comparison must find it in that step: in the gradient, or in the weights if
only the update is wrong.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from study.exact import problem
from zero_study.engines.readback.parameters import local

Training = Any  # training.Training, which imports this module

FAULTY_STEP = 3  # counted from 1; earlier steps must agree with the reference
BLOCK = 2  # the block of the model that has the fault, if it is in one block
FAULTY_RANK = 1  # the rank that has the fault, if it is on one rank
# Functions of torch.distributed that reduce.
REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter_single", "reduce_scatter_tensor", "reduce_scatter")


@dataclass(frozen=True)
class Fault:
    plant: Callable[[Training], None]
    shows_in: Literal["gradient", "weights"] = "gradient"
    # Whether to plant it before the engine is built, because engines then look up the collectives.
    before_engine: bool = False
    accumulation: int = 1  # the number of micro batches that the fault needs


def _acts(training: Training) -> bool:
    return bool(training.step + 1 >= FAULTY_STEP)


# ---------------------------------------------------------------- the batch and the loss


def _drop_micro_batch(training: Training) -> None:
    """Multiply the loss of one rank's second micro batch by zero."""
    loss: Callable[..., Tensor] = training.loss

    def dropped(outputs: Tensor, targets: Tensor, number: int) -> Tensor:
        drops = _acts(training) and training.rank == FAULTY_RANK and number == 1
        return loss(outputs, targets, number) * (0 if drops else 1)

    training.loss = dropped


def _sum_micro_batches(training: Training) -> None:
    """Sum the gradients of the micro batches without dividing by their number."""
    loss: Callable[..., Tensor] = training.loss

    def summed(outputs: Tensor, targets: Tensor, number: int) -> Tensor:
        return loss(outputs, targets, number) * (training.cell.accumulation if _acts(training) else 1)

    training.loss = summed


def _scale_loss(training: Training) -> None:
    """Multiply the loss by 1 + 2^-12.

    That is so little that rounding between the layers hides the fault everywhere except in the head.
    """
    loss: Callable[..., Tensor] = training.loss

    def scaled(outputs: Tensor, targets: Tensor, number: int) -> Tensor:
        return loss(outputs, targets, number) * (1 + 2.0**-12 if _acts(training) else 1)

    training.loss = scaled


def _repeat_micro_batch(training: Training) -> None:
    """Give one rank its first micro batch again, instead of its second micro batch."""
    sequences: Callable[[int], list[problem.Sequence]] = training.sequences

    def repeated(number: int) -> list[problem.Sequence]:
        return sequences(0 if _acts(training) and training.rank == FAULTY_RANK and number == 1 else number)

    training.sequences = repeated


def _read_other_rank(training: Training) -> None:
    """Give every rank the batch of rank 0."""
    sequences: Callable[[int], list[problem.Sequence]] = training.sequences

    def of_other(number: int) -> list[problem.Sequence]:
        rank = training.rank
        training.rank = 0 if _acts(training) else rank
        try:
            return sequences(number)
        finally:
            training.rank = rank

    training.sequences = of_other


# ---------------------------------------------------------------- parameters as layers use them


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, values: Tensor, factor: Callable[[], float]) -> Tensor:
        context.factor = factor
        return values.view_as(values)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient * context.factor(), None


def _scale(training: Training, layer: Any, factor: float, of: tuple[str, ...] = ("weight", "bias")) -> None:
    """Scale the gradients of a linear layer's weight, bias or both, as listed in `of`."""

    def used(name: str) -> Tensor:
        values: Tensor = getattr(layer, name)
        if name not in of:
            return values
        return _ScaleGradient.apply(values, lambda: factor if _acts(training) else 1.0)  # type: ignore[no-any-return,no-untyped-call]

    layer.forward = lambda inputs: functional.linear(inputs, used("weight"), used("bias"))


def _block(training: Training) -> Any:
    return training.module.get_submodule(f"blocks.{BLOCK}")


def _scale_block(training: Training) -> None:
    for layer in (_block(training).up, _block(training).down):
        _scale(training, layer, 1 + 2.0**-10)


def _sum_ranks(training: Training) -> None:
    """Sum the gradients of linear layers over the ranks, without dividing by the number of ranks."""
    for layer in training.module.modules():
        if isinstance(layer, torch.nn.Linear):
            _scale(training, layer, training.cell.num_ranks)


def _lose_bias(training: Training) -> None:
    _scale(training, _block(training).down, 0.0, of=("bias",))


def _keep_stale(training: Training) -> None:
    """Make one layer of one rank compute with the weights that it had before the last update."""
    layer, weights = _block(training).up, dict[int, Tensor]()  # by step

    def forward(inputs: Tensor) -> Tensor:
        weight: Tensor = layer.weight
        weights.setdefault(training.step, weight.detach().clone())
        is_stale = training.step + 1 == FAULTY_STEP and training.rank == FAULTY_RANK
        used = weight + (weights[training.step - 1] - weight).detach() if is_stale else weight
        return functional.linear(inputs, used, layer.bias)

    layer.forward = forward


# ---------------------------------------------------------------- the optimizer


def _local(parameter: Any) -> Tensor:
    """Return the part of a parameter that this rank updates."""
    return local(parameter.detach())


def _around_step(training: Training, step: Callable[[Callable[..., Any]], Any]) -> None:
    """Replace the step of the optimizer that does the arithmetic, from the faulty step on.

    `step` is called with the original step. ZeRO calls it once per parameter group.
    """
    original_step = training.base.step

    @functools.wraps(original_step)
    def changed(*arguments: Any, **options: Any) -> Any:
        call = functools.partial(original_step, *arguments, **options)
        return step(call) if _acts(training) else call()

    training.base.step = changed


def _skip_step(training: Training) -> None:
    if training.rank == FAULTY_RANK:
        _around_step(training, lambda call: None)


def _skip_last_element(training: Training) -> None:
    """Leave out the last element of rank 0's first shard in the update.

    Rank 0 is chosen because its first shard has no padding at its end.
    """

    def step(call: Callable[..., Any]) -> None:
        parameter = next(p for group in training.base.param_groups for p in group["params"] if _local(p).numel())
        before = _local(parameter).flatten()[-1].clone()
        call()
        _local(parameter).view(-1)[-1] = before

    if training.rank == 0:
        _around_step(training, step)


def _lose_momentum(training: Training) -> None:
    """Set the momentum of one rank's shard to zero before the update."""

    def lose() -> None:
        if training.step + 1 == FAULTY_STEP and training.rank == FAULTY_RANK:
            for state in training.base.state.values():
                _local(state["momentum_buffer"]).zero_()

    training.before_update.append(lose)


def _change_rate(training: Training) -> None:
    """Multiply the learning rate of the biases by 1 + 2^-12."""

    def change() -> None:
        if training.step + 1 == FAULTY_STEP:
            training.base.param_groups[1]["lr"] *= 1 + 2.0**-12

    training.before_update.append(change)


# ---------------------------------------------------------------- collectives


def _around_reduction(
    training: Training, change: Callable[[Tensor], object], point: Literal["before", "after"]
) -> None:
    """Change the input or the result of the first reduction of gradients in the faulty step.

    All functions of torch.distributed that reduce are replaced, so it does not matter which one the engine calls.
    """
    changed: list[int] = []

    def is_first(tensor: Tensor) -> bool:
        if training.step + 1 != FAULTY_STEP or changed or not tensor.is_floating_point() or tensor.numel() < 2:
            return False
        changed.append(training.step)
        return True

    for name in REDUCTIONS:
        if (call := getattr(dist, name, None)) is None:  # not in this release of torch
            continue

        def reduce(*arguments: Any, call: Any = call, name: str = name, **options: Any) -> Any:
            bound = list(inspect.signature(call).bind(*arguments, **options).arguments.values())
            output, inputs = bound[0], bound[1 if name.startswith("reduce_scatter") else 0]
            if not isinstance(inputs, Tensor) or not is_first(inputs):
                return call(*arguments, **options)
            if point == "before":
                change(inputs)
                return call(*arguments, **options)
            work = call(*arguments, **options)
            if work is not None:
                work.wait()
            change(output)
            return work

        setattr(dist, name, functools.wraps(call)(reduce))


def reduce_by_python(model: Any) -> None:
    """Make DDP reduce its buckets in Python through torch.distributed, so that a fault can change their content.

    Other engines are not changed.
    """
    if not isinstance(model, torch.nn.parallel.DistributedDataParallel):
        return

    def reduce(_: Any, bucket: Any) -> Any:
        work: Any = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    # DDP rejects a hook whose annotations are strings, as those of `reduce` are.
    model.register_comm_hook(None, lambda state, bucket: reduce(state, bucket))


def _reduce_twice(training: Training) -> None:
    _around_reduction(training, lambda reduced: reduced.mul_(2), "after")


def _lose_contribution(training: Training) -> None:
    def zero(inputs: Tensor) -> None:
        if training.rank == FAULTY_RANK:
            inputs.zero_()

    _around_reduction(training, zero, "before")


FAULTS = {
    "a block's gradient is scaled by 1 + 2^-10": Fault(_scale_block),
    "a micro batch is dropped": Fault(_drop_micro_batch, accumulation=4),
    "a micro batch is used twice": Fault(_repeat_micro_batch, accumulation=4),
    "micro batches are summed": Fault(_sum_micro_batches, accumulation=4),
    "the loss is scaled by 1 + 2^-12": Fault(_scale_loss),
    "a rank reads the batch of another": Fault(_read_other_rank),
    "ranks are summed": Fault(_sum_ranks),
    "a bias's gradient is lost": Fault(_lose_bias),
    "a layer computes with stale weights": Fault(_keep_stale),
    "a bucket is reduced twice": Fault(_reduce_twice, before_engine=True),
    "a rank's bucket is lost": Fault(_lose_contribution, before_engine=True),
    "a rank skips an update": Fault(_skip_step, "weights"),
    "the last element of a shard is not updated": Fault(_skip_last_element, "weights"),
    "a shard's momentum is lost": Fault(_lose_momentum, "weights"),
    "a group's learning rate is off by 2^-12": Fault(_change_rate, "weights"),
}
