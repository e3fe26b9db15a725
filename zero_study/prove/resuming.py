"""Check that an optimizer starts with the states and counters that were loaded into it."""

from __future__ import annotations

import weakref
from contextlib import ExitStack
from typing import Any

import torch

from .. import terminal
from ..engines.hooks import wrap_function
from ..engines.readback.parameters import local

TENSORS, ELEMENTS = 8, 2**10  # that are compared
_Sample = list[dict[str, torch.Tensor]]  # of each tensor of the optimizer: key of a state -> its first elements


class Resumed:
    """The states that were loaded into optimizers, until their next update."""

    def __init__(self) -> None:
        self._loaded: weakref.WeakKeyDictionary[Any, _Sample | None] = weakref.WeakKeyDictionary()
        self._findings: weakref.WeakKeyDictionary[Any, list[str]] = weakref.WeakKeyDictionary()
        self._stack = ExitStack()
        self._stack.enter_context(wrap_function(torch.optim.Optimizer, "load_state_dict", self._on_load))

    def close(self) -> None:
        self._stack.close()

    def take(self, optimizer: Any) -> list[str] | None:
        """Return findings on the first update of an optimizer after it was loaded. None if it was not loaded."""
        return self._findings.pop(optimizer, None)

    def compare(self, optimizer: Any) -> None:
        """Compare the states of an optimizer with those that were loaded, at the beginning of its next update."""
        if optimizer not in self._loaded:
            return
        loaded = self._loaded.pop(optimizer)
        number = terminal.count(len(_tensors(optimizer)), "parameter")
        if loaded is None:
            self._findings[optimizer] = [
                f"optimizer states are lost on loading: load_state_dict got the settings of {number}, but no states. "
                "Look for a checkpoint that was read into the state of a new optimizer, which is empty."
            ]
            return
        changed = [
            f"{key} of tensor {position}"
            for position, (before, now) in enumerate(zip(loaded, _sample(optimizer), strict=False))
            for key, values in before.items()
            if key not in now or not torch.equal(values.nan_to_num(), now[key].nan_to_num())
        ]
        self._findings[optimizer] = []
        if changed:
            self._findings[optimizer] = [
                "optimizer states are not those that were loaded: the first update begins with another "
                f"{terminal.names(changed)}. Look for code that resets or replaces states after load_state_dict."
            ]

    def _on_load(self, call: Any, optimizer: Any, *arguments: Any, **options: Any) -> Any:
        before = _settings(optimizer)
        result = call(optimizer, *arguments, **options)
        if optimizer.state:
            self._loaded[optimizer] = _sample(optimizer)
        elif _settings(optimizer) != before:  # accelerate loads the state of a new optimizer into itself
            self._loaded[optimizer] = None
        return result


def _tensors(optimizer: Any) -> list[Any]:
    return [tensor for group in optimizer.param_groups for tensor in group["params"]]


def _settings(optimizer: Any) -> list[str]:
    return [str({key: value for key, value in group.items() if key != "params"}) for group in optimizer.param_groups]


def _sample(optimizer: Any) -> _Sample:
    with torch.no_grad():
        return [
            {
                key: local(value).detach().reshape(-1)[:ELEMENTS].clone()
                for key, value in optimizer.state.get(tensor, {}).items()
                if isinstance(value, torch.Tensor)
            }
            for tensor in _tensors(optimizer)[:TENSORS]
        ]
