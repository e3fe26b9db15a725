"""Which tensors are on a simulated GPU, and how many bytes of it they take.

All tensors are on the CPU. A storage counts as the GPU's if it was created there, moved there, or computed from a
tensor there.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from simulated_gpus import CONTEXT_BYTES, visible
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

BLOCK = 512  # bytes: the allocator rounds up to it
SEGMENT = 2 << 20  # bytes: the allocator takes memory of the GPU in multiples of it
_device_of = torch._C.TensorBase.device.__get__  # type: ignore[attr-defined]
real_resize = torch.UntypedStorage.resize_

# Operators that may have tensors of the CPU and of a GPU, as in CUDA builds.
BETWEEN_DEVICES = ("copy", "index", "c10d", "set_", "resize", "foreach", "_local_scalar", "record_stream", "nonzero")


def real_device(tensor: torch.Tensor) -> torch.device:
    """Return the device of a tensor without the simulation."""
    with torch._C.DisableTorchFunction():
        device: torch.device = _device_of(tensor)
    return device


def _is_plain(kind: type) -> bool:
    """Return whether tensors of a class have elements of their own, as those of DTensor and FakeTensor have not."""
    return kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__  # type: ignore[attr-defined]


def _has_memory(tensor: torch.Tensor) -> bool:
    """Return whether the simulation keeps account of a tensor: it has elements of its own, which are on the CPU."""
    return _is_plain(type(tensor)) and real_device(tensor).type == "cpu"


class Allocator:
    """The caching allocator of one simulated GPU in this process."""

    def __init__(self) -> None:
        self.requested = self.allocated = self.peak = self.reserved = self.reserved_peak = 0
        self.fraction = 1.0

    def change(self, old: int, new: int, gpu: int) -> None:
        """Replace a block of `old` bytes by one of `new` bytes. Raises OutOfMemoryError if there is no room."""
        before, after = _rounded(old, BLOCK), _rounded(new, BLOCK)
        total = visible()[gpu].total_memory
        limit = min(total - CONTEXT_BYTES, int(self.fraction * total))
        needed = _rounded(self.allocated - before + after, SEGMENT)
        if after > before and needed > limit:
            raise torch.OutOfMemoryError(self._message(after - before, gpu, total, limit))
        self.requested += new - old
        self.allocated += after - before
        self.peak = max(self.peak, self.allocated)
        self.reserved = max(self.reserved, needed)
        self.reserved_peak = max(self.reserved_peak, self.reserved)

    def _message(self, num_bytes: int, gpu: int, total: int, limit: int) -> str:
        """Return torch's message, from c10/cuda/CUDACachingAllocator.cpp."""
        gib = 1 << 30
        allowed = "" if self.fraction == 1 else f"{limit / gib:.2f} GiB allowed; "
        return (
            f"CUDA out of memory. Tried to allocate {num_bytes / gib:.2f} GiB. GPU {gpu} has a total capacity of "
            f"{total / gib:.2f} GiB of which {(limit - self.allocated) / gib:.2f} GiB is free. {allowed}Of the "
            f"allocated memory {self.allocated / gib:.2f} GiB is allocated by PyTorch, and 0 bytes is reserved by "
            "PyTorch but unallocated."
        )

    def release_cache(self) -> None:
        self.reserved = _rounded(self.allocated, SEGMENT)

    def reset_peaks(self) -> None:
        self.peak, self.reserved_peak = self.allocated, self.reserved


def _rounded(num_bytes: int, unit: int) -> int:
    return -(-num_bytes // unit) * unit


class _Block:
    """The bytes that a storage takes of a GPU.

    No other storage has its address while the block exists, because the block refers to it.
    """

    __slots__ = ("gpu", "num_bytes", "of_python", "storage")

    def __init__(self, storage: torch.UntypedStorage, gpu: int) -> None:
        key = storage._cdata
        self.gpu, self.num_bytes, self.storage = gpu, storage.nbytes(), StorageWeakRef(storage)
        self.of_python = weakref.ref(storage, lambda _: _may_be_freed.add(key))


allocators: dict[int, Allocator] = {}
_blocks: dict[int, _Block] = {}  # by the address of the storage
# Addresses of storages whose Python objects are gone. A thread of gloo may add one at any time, and the storage may
# exist a little longer.
_may_be_freed: set[int] = set()
_releasing = threading.Lock()  # because a thread of the trainer samples the memory


def allocator(gpu: int) -> Allocator:
    _release_freed()
    return allocators.setdefault(gpu, Allocator())


def _release_freed() -> None:
    """Return the memory of storages that no longer exist to their GPUs."""
    with _releasing:
        for key in list(_may_be_freed):
            if _blocks[key].storage.expired():
                _may_be_freed.remove(key)
                block = _blocks.pop(key)
                allocators[block.gpu].change(block.num_bytes, 0, block.gpu)


def used_bytes(gpu: int) -> int:
    """Return the bytes that this process uses of a GPU, as NVML reports them."""
    return allocator(gpu).reserved + CONTEXT_BYTES if gpu in allocators else 0


def gpu_of(tensor: torch.Tensor) -> int | None:
    """Return the number of the GPU that a tensor is on. None if it is on the CPU."""
    tensor = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
    if not _has_memory(tensor):
        return None
    block = _blocks.get(_key(tensor))
    return None if block is None else block.gpu


def _key(tensor: torch.Tensor) -> int:
    with torch._C.DisableTorchFunction():
        return int(tensor.untyped_storage()._cdata)


def place(tensor: torch.Tensor, gpu: int) -> None:
    """Count a tensor's storage as one on a GPU."""
    if not _has_memory(tensor):
        return
    with torch._C.DisableTorchFunction():
        storage = tensor.untyped_storage()
        if storage._cdata not in _blocks:
            allocator(gpu).change(0, storage.nbytes(), gpu)
            _blocks[storage._cdata] = _Block(storage, gpu)


def resize(storage: torch.UntypedStorage, num_bytes: int) -> torch.UntypedStorage:
    """Resize a storage, as FSDP and DeepSpeed do to free and to allocate parameters."""
    result = real_resize(storage, num_bytes)
    if block := _blocks.get(storage._cdata):
        allocator(block.gpu).change(block.num_bytes, num_bytes, block.gpu)
        block.num_bytes = num_bytes
    return result


class Placement(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Place the results of operators on the GPU of their inputs, or on the GPU on which a tensor is created."""

    creates_on: int | None = None  # the GPU of tensors that are created without an input
    copies_to_host = False

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True  # or TorchDynamo would compile nothing

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not all(map(_is_plain, types)):
            if any(issubclass(kind, (FakeTensor, FunctionalTensor)) for kind in types):
                return func(*args, **(kwargs or {}))  # a graph is traced
            return NotImplemented  # a subclass, whose inner tensors come here one by one
        options, creates_on = dict(kwargs or {}), self.creates_on
        device = options.get("device")
        if isinstance(device, torch.device) and device.type == "cuda":  # where DeviceArguments is suspended
            options["device"], creates_on = torch.device("cpu"), device.index or 0
        inputs = {_key(tensor): gpu_of(tensor) for tensor in _tensors((args, options))}
        gpus = {gpu for gpu in inputs.values() if gpu is not None}
        if gpus and None in inputs.values():
            _check_devices(func, args, options)
        result = func(*args, **options)
        gpu = min(gpus) if gpus else creates_on
        if gpu is not None and not self.copies_to_host:
            for tensor in _tensors(result):
                if _key(tensor) not in inputs:
                    place(tensor, gpu)
        return result


def _check_devices(func: Any, args: Any, kwargs: Any) -> None:
    """Raise the error of CUDA builds if an operator has tensors of the CPU, which are not scalars, and of a GPU."""
    name = str(func)
    if any(word in name for word in BETWEEN_DEVICES):
        return
    tensors = [(gpu_of(tensor), tuple(tensor.shape)) for tensor in _tensors((args, kwargs))]
    if any(gpu is None and shape for gpu, shape in tensors):
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! "
            f"({name} of {', '.join(f'{shape} on {gpu}' for gpu, shape in tensors)})"
        )


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for leaf in tree_leaves(values):
        if isinstance(leaf, torch.Tensor) and _has_memory(leaf) and leaf.layout == torch.strided:
            yield leaf
