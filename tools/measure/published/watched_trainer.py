"""Record what Hugging Face's Trainer does in each step: its losses, and when its steps begin and end."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import Trainer, TrainerCallback


class Watched(Trainer):
    """The unchanged Trainer, except that it keeps the loss of every micro batch in `seen_losses`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen_losses: list[torch.Tensor] = []

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        self.seen_losses.append(loss.detach())
        return loss


class StepEdges(TrainerCallback):
    """Record when each step begins and ends, by a clock and by the processor time of this process."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._edges: list[tuple[float, float]] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._edges.append((self._now(), time.process_time()))

    on_step_end = on_step_begin

    def seconds(self) -> tuple[list[float], list[float]]:
        """Return the seconds of each step by the clock, and the seconds of processor time."""
        steps = list(zip(self._edges[::2], self._edges[1::2], strict=True))
        wall, processor = ([end[which] - begin[which] for begin, end in steps] for which in (0, 1))
        return wall, processor
