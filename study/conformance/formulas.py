"""One step of each optimizer as a formula, for several draws of the reference at once (see `reference`).

Every tensor has one row per draw. States are updated in place. The formulas are written down here instead of taken from
a library, so that a mistake in a library's optimizer is seen, too.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from . import toy
from .cells import BLOCK, IN_8_BITS, OF_ADAMW, SMALLEST_IN_8_BITS, Cell

State = dict[Any, Any]  # of one parameter: tensors with one row per draw, by name
Rounded = Callable[[torch.Tensor], torch.Tensor]  # gives the result of a bf16 operation its rounding error
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5
# PyTorch's defaults of Adafactor.
ADAFACTOR_DECAY, ADAFACTOR_EPSILON, ADAFACTOR_CLIPPING = -0.8, (2.0**-23, 1e-3), 1.0


class Step(NamedTuple):
    """What a formula needs to know of a step."""

    number: int  # from 1, without skipped steps
    rate: float  # the learning rate of the parameter
    decay: float  # its weight decay


def updated(
    cell: Cell, name: str, master: torch.Tensor, gradient: torch.Tensor, state: State, step: Step, rounded: Rounded
) -> torch.Tensor:
    """Return a parameter after one step of the cell's optimizer."""
    optimizer, num_dimensions = cell.optimizer, master.ndim - 1
    if optimizer in IN_8_BITS:
        return _in_8_bits(cell, master, gradient, state, step)
    if optimizer == "sgd":
        return _sgd(master, gradient, state, step)
    if optimizer == "lion":
        return _lion(master, gradient, state, step)
    if optimizer == "adafactor":
        return _adafactor(master, gradient, state, step)
    if is_orthogonalized(cell, name, num_dimensions):
        return _muon(master, gradient, state, step, rounded)
    assert optimizer in OF_ADAMW or optimizer == "muon", optimizer
    return adamw(master, gradient, state, step)


def is_orthogonalized(cell: Cell, name: str, num_dimensions: int) -> bool:
    """Return whether Muon trains a parameter."""
    return cell.optimizer == "torch_muon" or (cell.optimizer == "muon" and toy.uses_muon(name, num_dimensions))


def _buffer(state: State, key: str, like: torch.Tensor) -> torch.Tensor:
    buffer: torch.Tensor = state.setdefault(key, torch.zeros_like(like))
    return buffer


def adamw(master: torch.Tensor, gradient: torch.Tensor, state: State, step: Step) -> torch.Tensor:
    beta1, beta2 = toy.BETAS
    first, second = _buffer(state, "first", master), _buffer(state, "second", master)
    first.mul_(beta1).add_(gradient, alpha=1 - beta1)
    second.mul_(beta2).add_(gradient.square(), alpha=1 - beta2)
    divisor = (second / (1 - beta2**step.number)).sqrt() + toy.EPSILON
    return master * (1 - step.rate * step.decay) - step.rate * (first / (1 - beta1**step.number)) / divisor


def _sgd(master: torch.Tensor, gradient: torch.Tensor, state: State, step: Step) -> torch.Tensor:
    momentum = _buffer(state, "momentum", master)  # torch starts it with the first gradient, which is the same
    momentum.mul_(toy.MOMENTUM).add_(gradient + step.decay * master)
    return master - step.rate * momentum


def _lion(master: torch.Tensor, gradient: torch.Tensor, state: State, step: Step) -> torch.Tensor:
    beta1, beta2 = toy.LION_BETAS
    momentum = _buffer(state, "momentum", master)
    direction = (beta1 * momentum + (1 - beta1) * gradient).sign()
    momentum.mul_(beta2).add_(gradient, alpha=1 - beta2)
    return master * (1 - step.rate * step.decay) - step.rate * direction


def _adafactor(master: torch.Tensor, gradient: torch.Tensor, state: State, step: Step) -> torch.Tensor:
    """Return the parameter after a step of Adafactor, as the documentation of torch.optim.Adafactor defines it.

    The second moment of a matrix is kept as one number per row and one per column. The learning rate is relative to the
    root mean square of the parameter.
    """
    smallest, smallest_scale = ADAFACTOR_EPSILON
    weight = step.number**ADAFACTOR_DECAY
    scale = _root_mean_square(master).clamp(min=smallest_scale) * min(step.rate, step.number**-0.5)
    master = master * (1 - step.rate * step.decay)
    if master.ndim == 2:  # draws x elements: a vector
        variance = _buffer(state, "variance", master)
        variance.lerp_(gradient.square(), weight)
    else:
        row = _buffer(state, "row", master[..., :1])
        column = _buffer(state, "column", master[:, :1])
        row.lerp_(gradient.square().mean(-1, keepdim=True), weight)
        column.lerp_(gradient.square().mean(-2, keepdim=True), weight)
        variance = row @ column / row.mean(-2, keepdim=True).clamp(min=smallest)
    update = gradient * variance.clamp(min=smallest**2).rsqrt()
    too_long = (_root_mean_square(update) / ADAFACTOR_CLIPPING).clamp(min=1)
    result: torch.Tensor = master - scale / too_long * update
    return result


def _root_mean_square(values: torch.Tensor) -> torch.Tensor:
    """Return the root mean square of each draw, in a shape that broadcasts over `values`."""
    return values.flatten(1).square().mean(1).sqrt().reshape(-1, *[1] * (values.ndim - 1))


def _muon(master: torch.Tensor, gradient: torch.Tensor, state: State, step: Step, rounded: Rounded) -> torch.Tensor:
    """Return a matrix after a step of Muon: Nesterov momentum, orthogonalized by a Newton-Schulz iteration in bf16."""
    momentum = _buffer(state, "momentum", master)
    momentum.lerp_(gradient, 1 - toy.MOMENTUM)
    update = orthogonalized(gradient.lerp(momentum, toy.MOMENTUM), rounded)
    rows, columns = master.shape[-2:]
    return master * (1 - step.rate * step.decay) - step.rate * math.sqrt(max(1, rows / columns)) * update


def orthogonalized(matrix: torch.Tensor, rounded: Rounded) -> torch.Tensor:
    a, b, c = NEWTON_SCHULZ
    is_tall = matrix.shape[-2] > matrix.shape[-1]
    wide = matrix.mT if is_tall else matrix
    wide = rounded(wide / wide.norm(dim=(-2, -1), keepdim=True))
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = rounded(wide @ wide.mT)
        polynomial = rounded(b * gram + c * rounded(gram @ gram))
        wide = rounded(a * wide + rounded(polynomial @ wide))
    return wide.mT if is_tall else wide


def _in_8_bits(cell: Cell, master: torch.Tensor, gradient: torch.Tensor, state: State, step: Step) -> torch.Tensor:
    """Return a parameter after a step of AdamW with states in 8 bits.

    The first row is AdamW with exact states. In each further row, the library's own optimizer trains the parameter
    without an engine. The bound is therefore a multiple of what the library's quantization does in plain PyTorch. For
    an engine with flat partitions, every parameter is quantized, because it is part of a large tensor there. It starts
    at another place of a quantized block in each row.
    """
    rows = [adamw(master[:1], gradient[:1], state, step)[0]]
    make = optimizer_in_8_bits(cell.optimizer)
    size = master[0].numel()
    for draw in range(1, len(master)):
        before = draw * BLOCK // len(master) if cell.has_flat_partitions else 0
        behind = max(SMALLEST_IN_8_BITS, -(-size // BLOCK) * BLOCK + BLOCK) - before - size if before else 0
        padded, its_gradient = (
            functional.pad(values[draw].float().flatten(), (before, behind)) for values in (master, gradient)
        )
        if draw not in state:
            parameter = torch.nn.Parameter(padded)
            state[draw] = make([parameter], lr=step.rate, weight_decay=step.decay, betas=toy.BETAS, eps=toy.EPSILON)
        own = state[draw]
        (parameter,) = own.param_groups[0]["params"]
        parameter.data.copy_(padded)
        parameter.grad = its_gradient
        with torch.compiler.set_stance("force_eager"):  # torchao compiles its step for half a minute otherwise
            own.step()
        rows.append(parameter.detach().double()[before : before + size].reshape(master.shape[1:]))
    return torch.stack(rows)


def optimizer_in_8_bits(optimizer: str) -> Any:
    """Return the class of an optimizer in IN_8_BITS. Its library is imported here."""
    library = {"bitsandbytes_adamw8bit": "bitsandbytes.optim", "torchao_adamw8bit": "torchao.optim"}[optimizer]
    return importlib.import_module(library).AdamW8bit
