"""Observe the learning rate of every update, to find schedules that reach zero before the training ends."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

LEAST = 2  # updates at a learning rate of zero; the last update of many schedules has that rate
SHARE = 0.05  # of all updates


class Rates:
    """The number of updates of each optimizer, and its last update with a learning rate above zero."""

    def __init__(self) -> None:
        self._updates: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()
        self._hook = register_optimizer_step_pre_hook(self._on_step)

    def close(self) -> None:
        self._hook.remove()

    def findings(self, optimizer: torch.optim.Optimizer | None) -> list[str]:
        """Return a finding if the learning rate of an optimizer was zero at the end of the training."""
        number, last = self._counts(optimizer)
        zeros = number - last
        if not last or zeros < max(LEAST, SHARE * number):
            return []
        return [
            f"the schedule ends before the training: the learning rate was zero in the last {zeros} of {number} "
            "updates, which changed nothing. Check the number of steps of the schedule, and how often it is stepped "
            "per update."
        ]

    def num_updates(self, optimizer: torch.optim.Optimizer | None) -> int:
        return self._counts(optimizer)[0]

    def _counts(self, optimizer: torch.optim.Optimizer | None) -> list[int]:
        return [0, 0] if optimizer is None else self._updates.get(optimizer, [0, 0])

    def _on_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        rates = [group.get("lr", 1.0) for group in optimizer.param_groups]
        counts = self._updates.setdefault(optimizer, [0, 0])
        counts[0] += 1
        # Reading a number from a GPU would slow down the training.
        if any((isinstance(rate, torch.Tensor) and rate.device.type != "cpu") or rate > 0 for rate in rates):
            counts[1] = counts[0]
