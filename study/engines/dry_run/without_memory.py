"""Tensors without memory: a model of any size through ZeRO's own code, on a laptop (torch 2.13, DeepSpeed 0.19.8)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from ..hooks import listening

ANSWER = 1.0  # to what asks for a number: a norm is finite and not zero; and of whole numbers, no overflow was counted


@contextmanager
def without_memory() -> Iterator[None]:
    """Make no tensor of memory within a `with` block; what asks one for its number is told one."""
    with (
        listening(torch.nn.Module, "_apply", _apply),
        FakeTensorMode(allow_non_fake_inputs=True),
        _Numbers(),  # type: ignore[no-untyped-call]
    ):
        yield


class _Numbers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers `.item()`: an engine asks whether a norm is finite, and goes on. And a CPU is one device.

    Asked for one on "cpu:0", a tensor of memory is on "cpu", and one without would be on another device.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            kind = args[0].dtype
            return ANSWER if kind.is_floating_point else False if kind is torch.bool else 0
        kwargs = kwargs or {}
        if (device := kwargs.get("device")) is not None and device.type == "cpu":
            kwargs = {**kwargs, "device": torch.device("cpu")}
        return func(*args, **kwargs)


def _apply(call: Callable[..., Any], module: torch.nn.Module, change: Callable[..., Any], recurse: bool = True) -> Any:
    """Change parameters in their place: torch would swap them, which no tensor without memory allows."""
    if recurse:
        for child in module.children():
            child._apply(change)  # type: ignore[no-untyped-call]
    for parameter in module._parameters.values():
        if parameter is not None:
            with torch.no_grad():
                parameter.data = change(parameter.data)
                if parameter.grad is not None:
                    parameter.grad.data = change(parameter.grad.data)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = change(buffer)
    return module
