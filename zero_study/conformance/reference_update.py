"""Compute one optimizer step for a parameter of the reference, for several repetitions (draws) at once.

Every tensor has one row per draw.
"""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from ..engines import optimizer_formulas
from ..engines.optimizer_formulas import Formula, Rounded, UpdateInputs
from . import toy
from .cells import BLOCK, IN_8_BITS, OF_ADAMW, SMALLEST_IN_8_BITS, Cell

State = dict[Any, Any]  # of one parameter: tensors with one row per draw, by name
EPS_FP32 = torch.finfo(torch.float32).eps


class Step(NamedTuple):
    """The properties of an optimizer step that a formula needs, such as its number."""

    number: int  # from 1, without skipped steps
    rate: float  # the learning rate of the parameter
    decay: float  # its weight decay


def updated(
    cell: Cell, name: str, master: torch.Tensor, gradient: torch.Tensor, state: State, step: Step, rounded: Rounded
) -> torch.Tensor:
    """Return a parameter after one optimizer step, and change `state` to the state after the step.

    `rounded` gives the result of a bf16 operation its rounding error.
    """
    if cell.optimizer in IN_8_BITS:
        return _in_8_bits(cell, master, gradient, state, step)
    return _by_formula(_formula(cell, name, master.ndim - 1, rounded), cell, master, gradient, state, step)


def is_orthogonalized(cell: Cell, name: str, num_dimensions: int) -> bool:
    """Return whether Muon trains a parameter, and thus orthogonalizes its updates."""
    return cell.optimizer == "torch_muon" or (cell.optimizer == "muon" and toy.uses_muon(name, num_dimensions))


def _formula(cell: Cell, name: str, num_dimensions: int, rounded: Rounded) -> Formula:
    if is_orthogonalized(cell, name, num_dimensions):
        return partial(optimizer_formulas.muon, rounded=rounded)
    if cell.optimizer in (*OF_ADAMW, "muon"):
        return optimizer_formulas.adamw
    formulas = {
        "sgd": optimizer_formulas.sgd,
        "lion": optimizer_formulas.lion,
        "adafactor": optimizer_formulas.adafactor,
    }
    return formulas[cell.optimizer]


def _by_formula(
    formula: Formula, cell: Cell, master: torch.Tensor, gradient: torch.Tensor, state: State, step: Step
) -> torch.Tensor:
    settings = toy.settings(cell) | {"lr": step.rate, "weight_decay": step.decay}
    change = formula(UpdateInputs(master, gradient, state, settings, step.number, EPS_FP32, has_draws=True))
    state |= change.states
    return change.applied_to(master)


def _in_8_bits(cell: Cell, master: torch.Tensor, gradient: torch.Tensor, state: State, step: Step) -> torch.Tensor:
    """Return a parameter after a step of AdamW with states in 8 bits.

    The first row is AdamW with exact states. In each further row, the library's own optimizer trains the parameter
    without an engine. The bound is therefore a multiple of what the library's quantization does in plain PyTorch. For
    an engine with flat partitions, every parameter is quantized, because it is part of a large tensor there. It starts
    at another place of a quantized block in each row.
    """
    rows = [_by_formula(optimizer_formulas.adamw, cell, master[:1], gradient[:1], state, step)[0]]
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
    """Return the class of an optimizer in IN_8_BITS, and import its library."""
    library = {"bitsandbytes_adamw8bit": "bitsandbytes.optim", "torchao_adamw8bit": "torchao.optim"}[optimizer]
    return importlib.import_module(library).AdamW8bit
