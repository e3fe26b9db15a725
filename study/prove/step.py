"""What does one optimizer step do? Seen from the update before it to its own, and nothing of it is kept on after."""

from __future__ import annotations

import math
from contextlib import ExitStack
from typing import Any

import torch

from study.training.measure.communication import CollectiveProbe, Issued


class Step:
    """Watches a model until `close`: collectives, forward passes, autocast, calls of torch's clipping."""

    def __init__(self, model: torch.nn.Module, device: str) -> None:
        self.forward_passes = 0
        self.clipped_at: float | None = None  # None: torch's clipping was not called
        self.autocast_dtype: torch.dtype | None = None
        self.is_disturbed = False  # the model was evaluated in between, whose collectives are no step's
        self._device = device
        self._probe = CollectiveProbe(waits=False)
        self._stack = ExitStack()
        first = next(m for m in model.modules() if next(m.parameters(recurse=False), None) is not None)
        # What is registered last sees the model last: within autocast, which wraps the root's forward.
        self._stack.callback(model.register_forward_pre_hook(self._on_forward).remove)
        self._stack.callback(first.register_forward_pre_hook(self._look_at_autocast).remove)
        self._stack.callback(setattr, torch.nn.utils, "clip_grad_norm_", torch.nn.utils.clip_grad_norm_)
        self._clip = torch.nn.utils.clip_grad_norm_
        torch.nn.utils.clip_grad_norm_ = self._clip_grad_norm  # type: ignore[assignment]
        self._stack.enter_context(self._probe)

    def close(self) -> None:
        """Take everything back. Again: nothing."""
        self._stack.close()

    def collectives(self) -> list[Issued]:
        return self._probe.issued()

    def _on_forward(self, model: torch.nn.Module, _: Any) -> None:
        if model.training:
            self.forward_passes += 1
        else:
            self.is_disturbed = True
            self.close()

    def _look_at_autocast(self, *_: Any) -> None:
        if torch.is_autocast_enabled(self._device):
            self.autocast_dtype = torch.get_autocast_dtype(self._device)

    def _clip_grad_norm(self, parameters: Any, max_norm: float, *arguments: Any, **options: Any) -> torch.Tensor:
        if math.isfinite(max_norm):  # infinity only measures
            self.clipped_at = float(max_norm)
        return self._clip(parameters, max_norm, *arguments, **options)
