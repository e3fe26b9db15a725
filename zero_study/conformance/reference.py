"""Train the reference for all engines: one process, fp64 arithmetic, and optimizers implemented here.

An engine may deviate from the reference by as much as rounding explains in the cell's precision class. Monte Carlo
arithmetic (Parker, 1997) measures this: the training is repeated several times, and every result of an operation gets a
random relative error of at most one unit roundoff. Each repetition is called a draw. The bound is MARGIN times the
largest deviation of any draw, plus FLOOR.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from . import reference_update, toy
from .cells import IN_8_BITS, NUM_STEPS, SKIPPED, Cell

ROUNDOFF_FP32, ROUNDOFF_FP16, ROUNDOFF_BF16 = 2.0**-24, 2.0**-11, 2.0**-8
# Of the classes that do not use bf16.
ROUNDOFF = {"fp32": ROUNDOFF_FP32, "fp16": ROUNDOFF_FP16, "autocast_fp16": ROUNDOFF_FP16}
IN_16_BITS = {"bf16": torch.bfloat16, "fp16": torch.float16}  # the type of the weights, if it is not fp32
COMPUTED_IN = IN_16_BITS | {"autocast_fp16": torch.float16}  # the type of matrix products, if it is not bf16 or fp32
MARGIN = 8
# The Newton-Schulz iteration amplifies rounding in bf16 up to a hundred times. With MARGIN, a matrix could deviate by
# as much as it moves. Correct engines deviate by about as much as the draws.
MARGIN_OF_MUON = 2
NUM_DRAWS, NUM_DRAWS_IN_8_BITS, NUM_DRAWS_LARGE = 16, 8, 4
Values = dict[str, torch.Tensor]  # by parameter
CLIPPING_EPSILON = 1e-6  # torch and DeepSpeed add it to the norm

# The smallest bound, some units of fp32, because all draws may agree with the reference by chance.
FLOOR = 16 * ROUNDOFF_FP32


@dataclass(frozen=True)
class Expected:
    """The expected values after each of the steps 1 to NUM_STEPS, and how far an engine may deviate from them.

    Deviations of losses and norms are relative to the reference's value. The deviation of a parameter is the 2-norm of
    its difference from the reference, divided by the 2-norm of the reference's total change since the start.
    """

    losses: torch.Tensor  # NUM_STEPS
    norms: torch.Tensor
    start: dict[str, torch.Tensor]
    masters: dict[str, torch.Tensor]  # NUM_STEPS x the parameter's shape
    weights: dict[str, torch.Tensor]  # used in computation: the masters, rounded to the precision class
    bounds: dict[str, torch.Tensor]  # loss, norm, masters/NAME, weights/NAME: NUM_STEPS each


class _Rounded(torch.autograd.Function):
    """An operation that adds a random relative error of at most `roundoff` to each value and gradient.

    Draw 0 stays exact.
    """

    @staticmethod
    def forward(context: Any, values: torch.Tensor, roundoff: float, generator: torch.Generator) -> torch.Tensor:
        context.roundoff, context.generator = roundoff, generator
        return _noisy(values, roundoff, generator)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        return _noisy(gradient, context.roundoff, context.generator), None, None


class _As16Bits(torch.autograd.Function):
    """An operation that rounds to bf16 or fp16, with a backward pass that leaves the gradient unchanged."""

    @staticmethod
    def forward(context: Any, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return values.to(dtype).double()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return gradient, None


def _noisy(values: torch.Tensor, roundoff: float, generator: torch.Generator) -> torch.Tensor:
    errors = torch.rand(values.shape, generator=generator).mul_(2).sub_(1).mul_(roundoff)
    errors[0] = 0
    return values * (1 + errors.double())


def expect(cell: Cell) -> Expected:
    """Train the reference exactly and with random rounding errors, and return the expected values and their bounds.

    Settings that `Cell.reference_key` removes have no effect.
    """
    model = toy.Toy(cell)
    # A list, not a set: bounds depend on the order in which errors are drawn, and they must be reproducible.
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    num_draws = 1 + _num_draws(cell)
    start = {name: parameter.detach().double() for name, parameter in model.named_parameters()}
    masters = {name: value.expand(num_draws, *value.shape).clone() for name, value in start.items()}
    states: dict[str, reference_update.State] = {name: {} for name in trained}
    num_updates = 0
    generator = torch.Generator().manual_seed(0)
    losses, norms, history = [], [], []

    def rounded(values: torch.Tensor) -> torch.Tensor:
        return _noisy(values, ROUNDOFF_BF16, generator)

    for step in range(NUM_STEPS):
        loss, gradients = _gradients(cell, trained, masters, step, generator)
        losses.append(loss)
        norm = torch.stack([gradient.flatten(1).square().sum(1) for gradient in gradients.values()]).sum(0).sqrt()
        norms.append(norm)
        scale = (cell.max_norm / (norm + CLIPPING_EPSILON)).clamp(max=1)
        if cell.does("skipped") and step == SKIPPED:
            gradients = {}  # nothing is updated
        else:
            num_updates += 1
        for name, gradient in gradients.items():
            clipped = gradient * scale.reshape(-1, *[1] * (gradient.ndim - 1))
            rate, decay = toy.options(cell, start[name].ndim).values()
            rate *= toy.RATES[num_updates - 1] if cell.does("schedule") else 1  # a skipped step has no rate
            step_of_optimizer = reference_update.Step(num_updates, rate, decay)
            masters[name] = reference_update.updated(
                cell, name, masters[name], clipped, states[name], step_of_optimizer, rounded
            )
            masters[name] = _noisy(masters[name], ROUNDOFF_FP32, generator)
        history.append(dict(masters))
    by_step = {name: torch.stack([values[name] for values in history], 1) for name in start}  # draws x steps x shape
    return _with_bounds(cell, torch.stack(losses, 1), torch.stack(norms, 1), start, by_step)


def _num_draws(cell: Cell) -> int:
    if cell.is_large:
        return NUM_DRAWS_LARGE
    return min(NUM_DRAWS_IN_8_BITS, NUM_DRAWS) if cell.optimizer in IN_8_BITS else NUM_DRAWS


def _gradients(
    cell: Cell, trained: Sequence[str], masters: dict[str, torch.Tensor], step: int, generator: torch.Generator
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss and the gradients of one step, with one row per repetition (draw).

    Gradients are summed over micro batches first, and then over ranks.
    """
    roundoff = ROUNDOFF.get(cell.precision, ROUNDOFF_BF16)
    batch = toy.tokens(cell, step)
    loss = torch.zeros(len(next(iter(masters.values()))), dtype=torch.float64)
    total: dict[str, torch.Tensor] = {}
    for rank in range(cell.num_ranks):
        own: dict[str, torch.Tensor] = {}
        for number, part in enumerate(cell.micro_batches(rank)):
            values = {name: value.detach().requires_grad_(name in trained) for name, value in masters.items()}
            tokens = batch[part.start : part.stop]
            dropout = torch.Generator().manual_seed(toy.seed(step, rank, number))
            shares = _losses(cell, values, tokens, roundoff, generator, dropout)
            share = torch.stack(shares).sum(0)
            torch.autograd.backward(share.sum())
            loss = loss + share.detach()
            for name in trained:
                gradient = values[name].grad
                assert gradient is not None
                noisy = _noisy(gradient, roundoff, generator)
                own[name] = _noisy(own[name] + noisy, roundoff, generator) if name in own else noisy
        for name, gradient in own.items():
            total[name] = _noisy(total[name] + gradient, roundoff, generator) if name in total else gradient
    return loss, total


def _losses(
    cell: Cell, values: Values, tokens: torch.Tensor, roundoff: float, noise: torch.Generator, dropout: torch.Generator
) -> list[torch.Tensor]:
    """Return the terms of the loss of one micro batch, with one row per repetition (draw).

    This is the test model's forward pass, implemented again with random rounding errors.
    """
    dtype = COMPUTED_IN.get(cell.precision, torch.bfloat16)
    is_rounded = cell.precision != "fp32"

    def rounded(tensor: torch.Tensor, unit: float = roundoff) -> torch.Tensor:
        noisy: torch.Tensor = _Rounded.apply(tensor, unit, noise)  # type: ignore[no-untyped-call]
        return noisy

    def as_16_bits(tensor: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _As16Bits.apply(tensor, dtype) if is_rounded else tensor  # type: ignore[no-untyped-call]
        return result

    def linear(inputs: torch.Tensor, name: str) -> torch.Tensor:
        weight = values[f"{name}.weight" if f"{name}.weight" in values else "embedding.weight"]  # tied
        weight = rounded(as_16_bits(weight), ROUNDOFF_FP32)
        outputs = rounded(inputs) @ weight.mT
        if f"{name}.bias" in values:
            outputs = outputs + as_16_bits(values[f"{name}.bias"])[:, None]
        return rounded(outputs)

    def block(inputs: torch.Tensor) -> torch.Tensor:
        outer = linear(inputs, "block.up")
        if cell.does("adapter"):
            adapter = linear(linear(inputs, "block.lora_a"), "block.lora_b")
            outer = rounded(outer + toy.ADAPTER_SCALE * adapter)
        inner = rounded(torch.tanh(outer))
        if cell.does("dropout"):
            inner = inner * toy.dropout_factors(inner.shape[1:], dropout)
        return rounded(inputs + linear(inner, "block.down"))

    table = values["embedding.weight"]
    if cell.precision in IN_16_BITS:  # autocast looks up in fp32
        table = as_16_bits(table)
    hidden = rounded(table[:, tokens[:, :-1].flatten()])  # draws x positions x width
    for _ in range(1 + cell.does("used_twice")):
        hidden = block(hidden)
    logits = linear(hidden, "head")
    num_targets = cell.batch_size * toy.LENGTH
    targets = tokens[:, 1:].flatten()
    chosen = logits.log_softmax(-1)[:, torch.arange(len(targets)), targets]
    shares = [-chosen.sum(1) / num_targets]
    if cell.does("part_outside"):
        hidden = block(toy.outside_inputs(cell, tokens).flatten(0, 1).expand(len(table), -1, -1))
    if cell.does("two_backward") or cell.does("part_outside"):
        shares.append(toy.SECOND_LOSS_SHARE * hidden.square().flatten(1).sum(1) / num_targets)
    return shares


def _with_bounds(
    cell: Cell,
    losses: torch.Tensor,
    norms: torch.Tensor,
    start: dict[str, torch.Tensor],
    masters: dict[str, torch.Tensor],
) -> Expected:
    rounded = {name: computed_with(cell, value).double() for name, value in masters.items()}
    bounds = {"loss": _furthest(losses / losses[:1] - 1), "norm": _furthest(norms / norms[:1] - 1)}
    for kind, values in (("masters", masters), ("weights", rounded)):
        for name, value in values.items():
            way = (masters[name][0] - start[name]).flatten(1).norm(dim=1)
            distance = (value - value[:1]).flatten(2).norm(dim=2)
            # A parameter that is not trained may not move at all.
            margin = MARGIN_OF_MUON if reference_update.is_orthogonalized(cell, name, start[name].ndim) else MARGIN
            bounds[f"{kind}/{name}"] = _furthest(distance / way, margin) if way.all() else torch.zeros(NUM_STEPS)
    return Expected(
        losses=losses[0],
        norms=norms[0],
        start=start,
        masters={name: value[0] for name, value in masters.items()},
        weights={name: value[0] for name, value in rounded.items()},
        bounds=bounds,
    )


def computed_with(cell: Cell, masters: torch.Tensor) -> torch.Tensor:
    """Return the master weights converted to the type in which a configuration computes: bf16, fp16, or unchanged."""
    return masters.to(IN_16_BITS.get(cell.reference_key.precision, masters.dtype))


def _furthest(deviations: torch.Tensor, margin: float = MARGIN) -> torch.Tensor:
    """Return the bound for each step: a margin times the largest deviation of any repetition so far, plus FLOOR."""
    furthest = deviations.abs().max(0).values.cummax(0).values
    return margin * furthest + FLOOR
