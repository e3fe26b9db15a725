"""Change a training on purpose: add a fault that a comparison of trainings must detect, or rounding noise.

`--perturb` names the change. Only DDP can be changed; see running/checks.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from study.config import RunConfig
from study.run import Run

SCALE = 0.98  # factor for the gradients of the first block


def perturb(model: torch.nn.Module, optimizer: torch.optim.Optimizer, run: Run) -> None:
    """Set up the change of the training that the run's `perturb` option requests.

    Call this before the engine wraps model and optimizer.

    * rounding: after every step, each weight moves by one unit in its last place. A random generator that is the same
      on every rank decides the direction.
    * scaled-gradient: the gradients of the first block are multiplied by 0.98.
    * lost-moment: after half of the steps, the second moments of the first block are set to zero.
    * dropped-micro-batch: after a quarter of the steps, the gradients of one step's last micro batch are set to zero.
    """
    config, kind = run.config, run.config.perturb
    if kind == "rounding":
        coin = torch.Generator().manual_seed(config.seed)
        optimizer.register_step_post_hook(lambda *_: move_by_one_unit(model, coin))
    elif kind == "scaled-gradient":
        for parameter in _first_block(model):
            parameter.register_hook(lambda gradient: SCALE * gradient)  # type: ignore[no-untyped-call]
    elif kind == "lost-moment":
        _lose_moment(model, optimizer, config)
    elif kind == "dropped-micro-batch":
        dropped = config.num_steps // 4 * run.gradient_accumulation_steps + run.gradient_accumulation_steps - 1
        for parameter in model.parameters():
            parameter.register_hook(_DroppedOnce(dropped))  # type: ignore[no-untyped-call]


def move_by_one_unit(model: torch.nn.Module, coin: torch.Generator) -> None:
    """Move every nonzero weight by one unit in its last place. A random generator decides the direction."""
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            heads = torch.rand(parameter.shape, generator=coin) < 0.5
            moved = torch.nextafter(parameter, torch.where(heads, torch.inf, -torch.inf))
            parameter.copy_(torch.where(parameter == 0, parameter, moved))


class _DroppedOnce:
    """A gradient hook that sets a parameter's gradient to zero in one backward pass."""

    def __init__(self, dropped: int) -> None:
        self._left = dropped  # backward passes before the dropped one

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        self._left -= 1
        return torch.zeros_like(gradient) if self._left == -1 else gradient


def _lose_moment(model: torch.nn.Module, optimizer: torch.optim.Optimizer, config: RunConfig) -> None:
    block, steps_left = list(_first_block(model)), [config.num_steps // 2]

    def lose(optimizer: Any, *_: Any) -> None:
        steps_left[0] -= 1
        if steps_left[0] == 0:
            for parameter in block:
                optimizer.state[parameter]["exp_avg_sq"].zero_()

    optimizer.register_step_post_hook(lose)


def _first_block(model: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    blocks = next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
    return blocks[0].parameters()
