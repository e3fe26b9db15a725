"""Run an engine's own code on tensors without memory, so that a model of any size fits on a laptop.

The supported engines are DeepSpeed 0.19.8, and FSDP2 and DDP of torch 2.13, through accelerate 1.15.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Reducer
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_init
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import masking_utils

from zero_study.engines.hooks import wrap_function

# The number that reading a floating-point tensor returns. A norm is then finite and not zero. Integers are read as 0,
# so that no overflow was counted.
ANSWER = 1.0


@contextmanager
def without_memory() -> Iterator[None]:
    """Create new tensors without memory inside the `with` block.

    Code that reads a floating-point number from such a tensor gets `ANSWER`.
    """
    answers = _Answers()  # type: ignore[no-untyped-call]
    with (
        wrap_function(torch.nn.Module, "_apply", _apply),
        wrap_function(torch.Tensor, "data_ptr", _address),
        wrap_function(DeviceMesh, "__init__", with_memory),
        wrap_function(_fsdp_init, "init_device_mesh", with_memory),
        wrap_function(dist.device_mesh, "init_device_mesh", with_memory),
        wrap_function(DistributedDataParallel, "__init__", _without_comparing_ranks),
        wrap_function(Reducer, "_rebuild_buckets", answers.rebuild_buckets),
        # Transformers reads positions to find out whether several documents share a sequence, which is never so here.
        # If it cannot read them, it makes a mask, and attention uses another kernel than in a run.
        wrap_function(masking_utils, "find_packed_sequence_indices", lambda call, position_ids: None),
        wrap_function(torch.distributions.Distribution, "__init__", _without_validation),
        FakeTensorMode(allow_non_fake_inputs=True),
        answers,
    ):
        yield


class _Answers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that answers `.item()` for tensors without memory, and treats the CPU as a single device.

    Engines read a number, for example, to check whether a norm is finite, and then continue. They get `ANSWER` from
    floating-point tensors, 0 from integers, and False from booleans.

    A real tensor that is created on "cpu:0" is on the device "cpu". A tensor without memory would be on "cpu:0", which
    is another device, so the index is removed.
    """

    _is_rebuilding = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and not _are_real_integers(args, kwargs):
            kind = args[0].dtype
            return ANSWER if kind.is_floating_point else False if kind is torch.bool else 0
        kwargs = kwargs or {}
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype is torch.float32:
            # The product of a mixture of experts. PyTorch's fake operator finds the right shape, but only in 16 bits.
            first, second, *others = args
            return func(first.bfloat16(), second.bfloat16(), *others, **{**kwargs, "out_dtype": None}).float()
        if (self._is_rebuilding and _are_indices(args, kwargs)) or _are_real_integers(args, kwargs):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if (device := kwargs.get("device")) is not None and device.type == "cpu":
            kwargs = {**kwargs, "device": torch.device("cpu")}
        return func(*args, **kwargs)

    def rebuild_buckets(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Let DDP rebuild its buckets, with real memory for the integers that it exchanges.

        The integers are the order of the gradients, and C++ code reads them.
        """
        self._is_rebuilding = True
        try:
            return call(*arguments)
        finally:
            self._is_rebuilding = False


def _are_indices(args: Any, options: Any) -> bool:
    """Return whether an operator uses or makes only int32 tensors that have memory."""
    tensors = [leaf for leaf in tree_leaves((args, options)) if isinstance(leaf, torch.Tensor)]
    dtype = tensors[0].dtype if tensors else options.get("dtype")
    return dtype is torch.int32 and not any(isinstance(tensor, FakeTensor) for tensor in tensors)


def _are_real_integers(args: Any, options: Any) -> bool:
    """Return whether an operator uses only integer tensors that have memory, such as the sizes of images."""
    tensors = [leaf for leaf in tree_leaves((args, options)) if isinstance(leaf, torch.Tensor)]
    return bool(tensors) and not any(
        isinstance(tensor, FakeTensor) or tensor.is_floating_point() or tensor.device.type != "cpu"
        for tensor in tensors
    )


def _without_validation(call: Callable[..., None], *arguments: Any, **options: Any) -> None:
    """Make a random distribution without reading the values of its parameters."""
    call(*arguments, **{**options, "validate_args": False})


def _address(call: Callable[..., int], tensor: torch.Tensor) -> int:
    """Return a different address for each tensor without memory.

    Accelerate uses addresses to find the optimizer's parameters again.
    """
    return tensor.untyped_storage()._cdata if isinstance(tensor, FakeTensor) else call(tensor)


def with_memory(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call a function with real memory for new tensors, because its code reads numbers from them.

    An example is a function that makes a mesh of ranks.
    """
    with unset_fake_temporarily():
        return call(*arguments, **options)


def _without_comparing_ranks(call: Callable[..., None], *arguments: Any, **options: Any) -> None:
    """Construct DDP without comparing the parameters of the ranks, which would read their values."""
    call(*arguments, **{**options, "init_sync": False})


def _apply(call: Callable[..., Any], module: torch.nn.Module, change: Callable[..., Any], recurse: bool = True) -> Any:
    """Change a module's parameters in place.

    PyTorch would swap the parameters instead, which is not possible for tensors without memory.
    """
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
