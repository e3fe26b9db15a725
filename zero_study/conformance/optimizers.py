"""Build the optimizer of a tested configuration, in the script or through DeepSpeed's file.

The module needs only torch and the engines, and runs under any release of them. Libraries of one optimizer are imported
when a cell uses it.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

from ..engines.readback.full_tensors import kind_of_state
from ..engines.readback.parameters import whole_shape
from . import toy
from .cells import ADAMW, IN_8_BITS, Cell
from .reference_update import optimizer_in_8_bits

# How DeepSpeed's file names the optimizers that it can build.
NAMES_IN_FILE = {"deepspeed_adamw": "AdamW", "sgd": "SGD", "adafactor": "Adafactor", "lion": "Lion", "muon": "Muon"}


class NotOffered(Exception):
    """The error for a configuration that the installed release does not support."""


def do_not_compile(cell: Cell) -> None:
    """Turn off torch.compile in optimizers that compile their step, because that takes up to half a minute."""
    if cell.optimizer != ADAMW and hasattr(torch.compiler, "set_stance"):  # since PyTorch 2.6
        torch.compiler.set_stance("force_eager")


def in_file(cell: Cell) -> dict[str, Any] | None:
    """Return the section `optimizer` of a DeepSpeed file. None if the script builds the optimizer."""
    name = NAMES_IN_FILE.get(cell.optimizer)
    # Without offload, DeepSpeed's Lion only runs on a GPU.
    if not cell.is_deepspeed or name is None or (cell.optimizer == "lion" and "offload" not in cell.engine):
        return None
    return {"type": name, "params": toy.settings(cell)}


def build(cell: Cell, model: Any) -> torch.optim.Optimizer:
    """Return the optimizer that the script builds for a configuration.

    Raises NotOffered if it does not exist in this installation.
    """
    parameters, settings = groups(cell, model), toy.settings(cell)
    if cell.optimizer in IN_8_BITS:
        return optimizer_in_8_bits(cell.optimizer)(parameters, **settings)  # type: ignore[no-any-return]
    if cell.optimizer == "lion":
        return importlib.import_module("bitsandbytes.optim").Lion(parameters, **settings)  # type: ignore[no-any-return]
    if cell.optimizer == ADAMW and "offload" in cell.engine and not cell.through_accelerate:  # which replaces AdamW
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(parameters, adamw_mode=True, **settings)  # type: ignore[no-any-return]
    name = {"sgd": "SGD", "adafactor": "Adafactor", "torch_muon": "Muon"}.get(cell.optimizer, "AdamW")
    if not hasattr(torch.optim, name):
        raise NotOffered(f"this release of PyTorch has no {name}")
    if cell.optimizer == "adamw_fused":
        settings["fused"] = True
    made: torch.optim.Optimizer = getattr(torch.optim, name)(parameters, **settings)
    return made


def trained(model: Any) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def groups(cell: Cell, model: Any) -> list[Any]:
    """Return the parameters for an optimizer. If the configuration has groups, matrices and vectors are separated."""
    parameters = trained(model)
    if not cell.does("groups"):
        return parameters
    by_dimensions = [(num, [p for p in parameters if len(whole_shape(p)) == num]) for num in (2, 1)]
    return [{"params": members, **toy.options(cell, num)} for num, members in by_dimensions if members]


def kinds_of_states(optimizer: Any) -> list[tuple[int, str]]:
    """Return the size and the type of each optimizer state that has as many elements as its parameter."""
    while hasattr(optimizer, "optimizer"):  # an engine's or accelerate's optimizer around the one that has the states
        optimizer = optimizer.optimizer
    kinds = []
    for parameter, state in optimizer.state.items():
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.numel() == parameter.numel():
                kinds.append((parameter.numel(), kind_of_state(value)))
    return sorted(kinds)
