"""Stand-ins that let a CPU build of torch behave as one that finds the GPUs of the table.

Device objects say "cuda", tensors are on the CPU, and `simulated_memory` knows which of them count as the GPU's.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any

import simulated_memory
import torch
from simulated_gpus import visible
from simulated_memory import Placement, allocator, gpu_of, place
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

_placement = Placement()
_current = 0  # the current device
_pinned: dict[int, StorageWeakRef] = {}  # storages in pinned memory, by their addresses
_real_compile = torch.compile


def index_of(device: Any) -> int | None:
    """Return the number of a simulated GPU that an argument names. None if the argument names no GPU."""
    if isinstance(device, int) and not isinstance(device, bool):
        return device
    if isinstance(device, str) and device.partition(":")[0] in ("cuda", "cpu", "meta"):
        device = torch.device(device)
    if not isinstance(device, torch.device) or device.type != "cuda":
        return None
    return _current if device.index is None else device.index


def _device(argument: Any = None) -> int:
    """Return the number of the device that a function of torch.cuda is asked about. Raises if there is none."""
    index = _current if argument is None else index_of(argument)
    if index is None or not 0 <= index < len(visible()):
        raise RuntimeError(f"CUDA error: invalid device ordinal ({argument})")
    return index


# ---------------------------------------------------------------- tensors


class DeviceArguments(TorchFunctionMode):
    """Replace the device "cuda" by the CPU in calls of torch, and place the results on the GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if func in _METHODS:
            return _METHODS[func](*args, **options)
        is_pinned = bool(options.pop("pin_memory", False))
        asked = options.get("device")
        gpu = index_of(asked) if asked is not None else None
        if gpu is None:
            result = func(*args, **options)
            if is_pinned and isinstance(result, torch.Tensor):
                _set_pinned(result)
            return result
        options["device"] = "cpu"
        _device(gpu)
        source = args[0] if args and isinstance(args[0], torch.Tensor) else None
        with _creating_on(gpu):
            result = func(*args, **options)
        if result is source and gpu_of(result) != gpu:
            return _copy(result, gpu)
        _place_all(result, gpu)
        return result


_real_run_backward = torch.autograd.graph._engine_run_backward


def _run_backward(*args: Any, **options: Any) -> Any:
    """Run a backward pass with the mode for device arguments, which torch suspends while a method of a tensor runs."""
    with DeviceArguments():
        return _real_run_backward(*args, **options)


def _place_all(result: Any, gpu: int) -> None:
    for tensor in result if isinstance(result, (tuple, list)) else [result]:
        if isinstance(tensor, torch.Tensor):
            place(getattr(tensor, "_local_tensor", tensor), gpu)


@contextmanager
def within_kernel() -> Any:
    """Simulate GPUs in a `with` block in a kernel of an operator, during which torch suspends its modes."""
    with DeviceArguments(), _placement:
        yield


@contextmanager
def on_the_host() -> Any:
    """Count no tensor that a `with` block creates as a GPU's."""
    with _creating_on(None):
        yield


@contextmanager
def _creating_on(gpu: int | None) -> Any:
    before, _placement.creates_on = _placement.creates_on, gpu
    try:
        yield
    finally:
        _placement.creates_on = before


def _copy(tensor: torch.Tensor, gpu: int | None, **options: Any) -> torch.Tensor:
    """Return a copy of a tensor on a GPU, or on the CPU for None."""
    before = _placement.copies_to_host
    _placement.copies_to_host = gpu is None
    try:
        with _creating_on(gpu):
            copied = tensor.clone() if not options else tensor.to(**options, copy=True)
    finally:
        _placement.copies_to_host = before
    if gpu is not None:
        _place_all(copied, gpu)
    return copied


def _to(tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
    """Stand for Tensor.to: copy if the tensor is on another simulated device."""
    places = [value for value in (*args, options.get("device")) if isinstance(value, (str, torch.device, int))]
    target = [value for value in args if isinstance(value, torch.Tensor)]
    if target:
        places = [target[0].device]
        options.setdefault("dtype", target[0].dtype)
    names_device = bool(places) and not isinstance(places[0], bool)
    rest = [
        value for value in args if value is not None and not isinstance(value, (str, torch.device, int, torch.Tensor))
    ]
    if rest and isinstance(rest[0], torch.dtype):
        options["dtype"] = rest[0]
    options.pop("device", None)
    options.pop("non_blocking", None)
    options = {name: value for name, value in options.items() if value is not None}
    if not names_device or getattr(places[0], "type", places[0]) == "meta":
        return (
            tensor.to(**options, **({"device": "meta"} if names_device else {})) if options or names_device else tensor
        )
    gpu = index_of(places[0])
    wants_copy = options.pop("copy", False)
    if gpu is not None:
        _device(gpu)
    if tensor.is_meta or isinstance(tensor, torch._subclasses.FakeTensor):
        with _creating_on(gpu):
            return tensor.to(device="cpu", **options)
    if gpu_of(tensor) == gpu and not wants_copy and options.get("dtype", tensor.dtype) == tensor.dtype:
        return tensor
    return _copy(tensor, gpu, **options)


def _cuda(tensor: torch.Tensor, device: Any = None, non_blocking: bool = False, **options: Any) -> torch.Tensor:
    """Stand for Tensor.cuda."""
    return _to(tensor, torch.device("cuda", _device(device)))


def _cpu(tensor: torch.Tensor, *_: Any, **options: Any) -> torch.Tensor:
    """Stand for Tensor.cpu."""
    return _to(tensor, "cpu")


def _type(tensor: torch.Tensor, dtype: Any = None, **options: Any) -> Any:
    """Stand for Tensor.type, whose text names the device."""
    if dtype is None:
        with torch._C.DisableTorchFunction():
            name = torch._C.TensorBase.type(tensor)
        return name.replace("torch.", "torch.cuda.") if gpu_of(tensor) is not None else name
    if isinstance(dtype, str) and dtype.startswith("torch.cuda."):
        return _cuda(tensor.type(dtype.replace("torch.cuda.", "torch.")))
    return tensor.type(dtype)


def _pin(tensor: torch.Tensor, *_: Any, **options: Any) -> torch.Tensor:
    """Stand for Tensor.pin_memory: a copy on the CPU that says it is pinned."""
    if gpu_of(tensor) is not None:
        raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")
    copied = tensor.clone()
    _set_pinned(copied)
    return copied


def _set_pinned(tensor: torch.Tensor) -> None:
    """Let a tensor's storage say that it is pinned, until it is freed."""
    for key in [key for key, storage in _pinned.items() if storage.expired()]:
        del _pinned[key]
    _pinned[simulated_memory._key(tensor)] = StorageWeakRef(tensor.untyped_storage())


def _is_pinned(tensor: torch.Tensor, *_: Any, **options: Any) -> bool:
    """Stand for Tensor.is_pinned."""
    return simulated_memory._key(tensor) in _pinned


def _attention(query: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
    """Stand for fused attention, whose C++ code creates its mask on the device of the query."""
    with _creating_on(gpu_of(query)):
        return torch.nn.functional.scaled_dot_product_attention(query, *args, **options)


def _named_device(*args: Any, **options: Any) -> torch.device:
    """Stand for torch.device, which a number alone names a GPU."""
    if len(args) == 1 and isinstance(args[0], int) and not options:
        return torch.device("cuda", args[0])
    return torch.device(*args, **options)


_METHODS: dict[Any, Callable[..., Any]] = {
    torch.nn.functional.scaled_dot_product_attention: _attention,
    torch.device: _named_device,
    torch.Tensor.to: _to,
    torch.Tensor.cuda: _cuda,
    torch.Tensor.cpu: _cpu,
    torch.Tensor.type: _type,
    torch.Tensor.pin_memory: _pin,
    torch.Tensor.is_pinned: _is_pinned,
}


def _tensor_device(tensor: torch.Tensor) -> torch.device:
    """Stand for Tensor.device. While TorchDynamo captures a graph, it needs the real one."""
    gpu = None if torch._guards.TracingContext.try_get() else gpu_of(tensor)
    return simulated_memory.real_device(tensor) if gpu is None else torch.device("cuda", gpu)


# ---------------------------------------------------------------- torch.cuda


class Stream:
    """A stream on which all work is done at once."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device, self.device_index, self.stream_id, self.cuda_stream = (
            torch.device("cuda", _device(device)),
            0,
            0,
            0,
        )

    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def synchronize(self) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: Any) -> None: ...


class Event:
    """A moment on a stream, which the host's clock has passed when it is recorded."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self._enable_timing, self._at = enable_timing, 0.0

    def record(self, stream: Any = None) -> None:
        self._at = time.perf_counter()

    def wait(self, stream: Any = None) -> None: ...
    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        if not self._enable_timing:
            raise RuntimeError("Both events must be created with argument 'enable_timing=True'.")
        return 1000 * (end._at - self._at)


class ChosenDevice:
    """Stand for `with torch.cuda.device(index)`."""

    def __init__(self, device: Any) -> None:
        self._index = index_of(device)

    def __enter__(self) -> None:
        self._before = _current
        if self._index is not None and self._index >= 0:
            _set_device(self._index)

    def __exit__(self, *_: Any) -> None:
        _set_device(self._before)


class ChosenStream:
    """Stand for `with torch.cuda.stream(stream)`."""

    def __init__(self, stream: Any) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *_: Any) -> None: ...


def _set_device(device: Any) -> None:
    global _current
    _current = _device(device)


def _properties(device: Any = None) -> Any:
    gpu = visible()[_device(device)]
    major, minor = gpu.capability
    return SimpleNamespace(
        name=gpu.name, total_memory=gpu.total_memory, uuid=gpu.uuid, major=major, minor=minor,
        multi_processor_count=132, warp_size=32, regs_per_multiprocessor=65536, is_integrated=0,
    )  # fmt: skip


def _memory_stats(device: Any = None) -> dict[str, int]:
    memory = allocator(_device(device))
    return {
        "requested_bytes.all.current": memory.requested,
        "allocated_bytes.all.current": memory.allocated,
        "allocated_bytes.all.peak": memory.peak,
        "reserved_bytes.all.current": memory.reserved,
        "reserved_bytes.all.peak": memory.reserved_peak,
        "num_alloc_retries": 0,
        "num_ooms": 0,
    }


def _mem_get_info(device: Any = None) -> tuple[int, int]:
    index = _device(device)
    total = visible()[index].total_memory
    return total - simulated_memory.used_bytes(index), total


def _set_fraction(fraction: float, device: Any = None) -> None:
    if not 0 <= fraction <= 1:
        raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
    allocator(_device(device)).fraction = fraction


_generators: list[torch.Generator] = []  # of the GPUs; dropout of the simulation draws from the CPU's


def _generator(device: Any = "cuda") -> torch.Generator:
    while len(_generators) < len(visible()):  # a fork may have more GPUs than the process that it was forked from
        _generators.append(torch.Generator())
    return _generators[_device(device)]


def _seed_all(seed: int) -> None:
    for generator in _generators:
        generator.manual_seed(int(seed))


def _set_rng_state(state: torch.Tensor, device: Any = "cuda") -> None:
    _generator(device).set_state(state)


def _nothing(*_: Any, **__: Any) -> None:
    """Stand for what has no effect without a GPU, such as waiting for it."""


# What modules of torch offer for GPUs, and what stands for it.
_OF_CUDA: dict[str, Any] = {
    "is_available": lambda: bool(visible()),
    "is_initialized": lambda: True,
    "device_count": lambda: len(visible()),
    "init": _nothing,
    "_lazy_init": _nothing,
    "_lazy_call": lambda function, **_: function(),
    "current_device": lambda: _current,
    "set_device": _set_device,
    "device": ChosenDevice,
    "get_device_properties": _properties,
    "get_device_name": lambda device=None: _properties(device).name,
    "get_device_capability": lambda device=None: visible()[_device(device)].capability,
    "get_arch_list": lambda: ["sm_80", "sm_90"],
    "is_bf16_supported": lambda including_emulation=True: visible()[_current].capability >= (8, 0),
    "is_tf32_supported": lambda: visible()[_current].capability >= (8, 0),
    "is_current_stream_capturing": lambda: False,
    "can_device_access_peer": lambda *_: True,
    "Stream": Stream,
    "Event": Event,
    "stream": ChosenStream,
    "StreamContext": type("StreamContext", (ChosenStream,), {}),
    "current_stream": lambda device=None: Stream(device),
    "default_stream": lambda device=None: Stream(device),
    "set_stream": _nothing,
    "synchronize": lambda device=None: _nothing(_device(device)),
    "empty_cache": lambda: allocator(_current).release_cache(),
    "ipc_collect": _nothing,
    "memory_stats": _memory_stats,
    "mem_get_info": _mem_get_info,
    "memory_allocated": lambda device=None: allocator(_device(device)).allocated,
    "max_memory_allocated": lambda device=None: allocator(_device(device)).peak,
    "memory_reserved": lambda device=None: allocator(_device(device)).reserved,
    "max_memory_reserved": lambda device=None: allocator(_device(device)).reserved_peak,
    "memory_cached": lambda device=None: allocator(_device(device)).reserved,
    "max_memory_cached": lambda device=None: allocator(_device(device)).reserved_peak,
    "reset_peak_memory_stats": lambda device=None: allocator(_device(device)).reset_peaks(),
    "reset_max_memory_allocated": lambda device=None: allocator(_device(device)).reset_peaks(),
    "reset_max_memory_cached": lambda device=None: allocator(_device(device)).reset_peaks(),
    "set_per_process_memory_fraction": _set_fraction,
    "get_per_process_memory_fraction": lambda device=None: allocator(_device(device)).fraction,
    "get_rng_state": lambda device="cuda": _generator(device).get_state(),
    "get_rng_state_all": lambda: [_generator(index).get_state() for index in range(len(visible()))],
    "set_rng_state": _set_rng_state,
    "set_rng_state_all": lambda states: [_set_rng_state(state, index) for index, state in enumerate(states)],
    "manual_seed": lambda seed: _generator().manual_seed(int(seed)),
    "manual_seed_all": _seed_all,
    "initial_seed": lambda: _generator().initial_seed(),
    "seed_all": lambda: _seed_all(torch.seed()),
}
_OF_ACCELERATOR: dict[str, Any] = {
    "is_available": lambda: bool(visible()),
    "device_count": lambda: len(visible()),
    "current_accelerator": lambda check_available=False: torch.device("cuda"),
    "current_device_index": lambda: _current,
    "current_device_idx": lambda: _current,
    "set_device_index": _set_device,
    "set_device_idx": _set_device,
    "synchronize": _nothing,
    "current_stream": lambda device=None: Stream(device),
    "set_stream": _nothing,
    "empty_cache": lambda: allocator(_current).release_cache(),
    "memory_stats": _memory_stats,
}


# ---------------------------------------------------------------- autocast, compiling


class Autocast(torch.amp.autocast_mode.autocast):
    """Stand for autocast on a GPU: the CPU's, with the GPU's default type."""

    def __init__(self, device_type: str, dtype: Any = None, **options: Any) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", dtype or torch.float16
        super().__init__(device_type, dtype, **options)


_real_is_autocast_enabled, _real_autocast_dtype = torch.is_autocast_enabled, torch.get_autocast_dtype


def _is_autocast_enabled(device_type: str = "cuda") -> bool:
    """Stand for the question whether autocast is on for a GPU: it is if the CPU's is."""
    return _real_is_autocast_enabled("cpu" if device_type == "cuda" else device_type)


def _autocast_dtype(device_type: str) -> torch.dtype:
    return _real_autocast_dtype("cpu" if device_type == "cuda" else device_type)


def _compile(model: Any = None, *args: Any, **options: Any) -> Any:
    """Stand for torch.compile: inductor generates C++ for the CPU, because no Triton kernel for a GPU could run here.

    TorchDynamo, AOTAutograd, the passes of inductor that are the same for every device, its caches and the compiled
    graphs are real. Not executed is what inductor has for GPUs only: the generation, the choice of settings and the
    start of Triton kernels, the processes that compile them, passes that depend on a GPU (such as padding of matrices),
    random numbers of compiled dropout on the GPU, and CUDA graphs.
    """
    if model is None:
        return lambda given: _compile(given, *args, **options)
    compiled = _real_compile(model, *args, **options)
    if not isinstance(compiled, torch.nn.Module):
        return _without_modes(compiled)
    compiled.forward = _without_modes(compiled.forward)
    return compiled


def _without_modes(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Suspend the mode for device arguments during a compiled function. Otherwise TorchDynamo would capture it."""

    def run(*args: Any, **options: Any) -> Any:
        _install_inductor()
        with torch._C.DisableTorchFunction(), _creating_on(_current):
            return compiled(*args, **options)

    return run


@cache
def _install_inductor() -> None:
    """Place what graphs compiled by inductor create and return on the GPU of their inputs."""
    from torch._inductor.output_code import CompiledFxGraph

    for module in (__name__, simulated_memory.__name__):
        torch._dynamo.trace_rules.add(module)  # TorchDynamo captures no stand-in, as it captures nothing of torch.cuda
    guards: Any = torch._C._dynamo.guards  # type: ignore[attr-defined]
    run_graph, create = CompiledFxGraph.__call__, guards._empty_strided_cpu

    def run_on_gpu(graph: Any, inputs: Any) -> Any:
        places = [gpu_of(value) for value in inputs if isinstance(value, torch.Tensor)]
        gpu = max((place for place in places if place is not None), default=None) if places else _current
        with _creating_on(gpu):
            results = run_graph(graph, inputs)
        if gpu is not None:
            _place_all(results, gpu)
        return results

    def create_on_gpu(*args: Any) -> torch.Tensor:
        created: torch.Tensor = create(*args)
        if _placement.creates_on is not None:
            place(created, _placement.creates_on)
        return created

    CompiledFxGraph.__call__ = run_on_gpu  # type: ignore[method-assign]
    guards._empty_strided_cpu = create_on_gpu


# ---------------------------------------------------------------- process groups

_asked_backends: dict[Any, str] = {}  # group -> what was asked of torch instead of gloo


class ProcessGroupNCCL:
    """Stand for the type of NCCL's groups: no group has it."""

    Options = SimpleNamespace


class NcclBackend:
    """Stand for a group's part that carries tensors of GPUs: gloo's, with another name."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def name(self) -> str:
        return "nccl"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


_real_get_backend = torch.distributed.ProcessGroup._get_backend


def _get_backend(group: Any, device: torch.device) -> Any:
    backend = _real_get_backend(group, device)
    return NcclBackend(backend) if device.type == "cuda" and group in _asked_backends else backend


def _creating(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call a function of DDP's reducer, whose C++ code creates its buckets on the device of the parameters."""
    with _creating_on(_current):
        return call(*args, **options)


def _over_gloo(call: Callable[..., Any], is_first: bool) -> Callable[..., Any]:
    """Stand for NCCL in a function that makes a group: gloo, which says that it is NCCL."""
    from torch import distributed

    def make(*args: Any, **options: Any) -> Any:
        names_backend = is_first and args and isinstance(args[0], str)
        backend = args[0] if names_backend else options.pop("backend", None)
        if is_first and backend is None:
            backend = "cpu:gloo,cuda:nccl"
        asked = None if backend is None or "nccl" not in str(backend) else str(backend)
        if is_first and asked and (device := options.get("device_id")) is not None:
            _device(device)
        options.pop("device_id", None)
        if options.get("pg_options") is not None:
            options.pop("pg_options")
        used = "gloo" if asked else backend
        group = call(
            *((used, *args[1:]) if names_backend else args),
            **options,
            **({} if names_backend or used is None else {"backend": used}),
        )
        made = distributed.group.WORLD if is_first else group
        parent = _asked_backends.get(distributed.group.WORLD)
        if isinstance(made, distributed.ProcessGroup):
            asked = asked or (parent if backend is None else None)
            if asked:
                _asked_backends[made] = asked
        return group

    return make


def _asked_backend(call: Callable[..., str]) -> Callable[..., str]:
    from torch import distributed

    def get(group: Any = None) -> str:
        asked = _asked_backends.get(group or distributed.group.WORLD)
        return "nccl" if asked else call(group)

    return get


def _flat(call: Callable[..., Any]) -> Callable[..., Any]:
    """Stand for NCCL in a collective of one tensor: only the number of elements has to fit, gloo compares shapes."""

    signature = inspect.signature(call)

    def run(*args: Any, **options: Any) -> Any:
        bound = signature.bind(*args, **options)
        flat = {name: v.view(-1) for name, v in bound.arguments.items() if isinstance(v, torch.Tensor)}
        return call(**(bound.arguments | flat))

    return run


def _install_groups() -> None:
    from torch import distributed
    from torch.distributed import distributed_c10d as c10d

    for name in ("init_process_group", "new_group"):
        replaced = _over_gloo(getattr(c10d, name), is_first=name == "init_process_group")
        setattr(c10d, name, replaced)
        setattr(distributed, name, replaced)
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "_all_gather_base", "_reduce_scatter_base"):
        flat = _flat(getattr(c10d, name))
        setattr(c10d, name, flat)
        if hasattr(distributed, name):
            setattr(distributed, name, flat)
    replaced_get = _asked_backend(c10d.get_backend)
    c10d.get_backend = distributed.get_backend = replaced_get  # type: ignore[assignment]
    make_buckets, rebuild_buckets = distributed.Reducer, distributed.Reducer._rebuild_buckets
    distributed.Reducer._rebuild_buckets = lambda reducer: _creating(rebuild_buckets, reducer)  # type: ignore[method-assign, assignment]
    distributed.Reducer = lambda *args, **options: _creating(make_buckets, *args, **options)  # type: ignore[misc, assignment]
    distributed.ProcessGroup._get_backend = _get_backend  # type: ignore[method-assign]
    c10d.ProcessGroupNCCL = ProcessGroupNCCL  # type: ignore[misc, assignment]
    c10d.is_nccl_available = distributed.is_nccl_available = lambda: True


# ---------------------------------------------------------------- all of it


def install(_: Any) -> None:
    """Replace what torch does for GPUs in this process."""
    torch.cuda._is_compiled = lambda: True
    torch._C._cuda_getCurrentRawStream = lambda device: 0  # type: ignore[attr-defined]  # TorchDynamo imports it
    for name, stand_in in _OF_CUDA.items():
        setattr(torch.cuda, name, stand_in)
        if hasattr(torch.cuda.memory, name):
            setattr(torch.cuda.memory, name, stand_in)
        if hasattr(torch.cuda.random, name):
            setattr(torch.cuda.random, name, stand_in)
    for name, stand_in in _OF_ACCELERATOR.items():
        setattr(torch.accelerator, name, stand_in)
    torch.backends.cuda.is_built = lambda: True
    torch.version.cuda = "13.0"  # type: ignore[assignment]
    torch.cuda.nccl.version = lambda: (2, 28, 3)  # type: ignore[assignment]
    torch._C._get_accelerator = lambda *_: torch.device("cuda")  # type: ignore[assignment]  # FSDP2 asks for it
    for name in ("range_push", "range_pop", "mark"):
        setattr(torch.cuda.nvtx, name, _nothing)
    torch.is_autocast_enabled = _is_autocast_enabled  # type: ignore[assignment]
    torch.get_autocast_dtype = _autocast_dtype  # type: ignore[assignment]
    torch.autocast = torch.amp.autocast = torch.amp.autocast_mode.autocast = Autocast  # type: ignore[misc, assignment]
    torch.compile = _compile  # type: ignore[assignment]
    torch.UntypedStorage.resize_ = simulated_memory.resize  # type: ignore[assignment, method-assign]
    torch.Tensor.record_stream = _nothing  # type: ignore[assignment, method-assign]
    torch.autograd._engine_run_backward = torch.autograd.graph._engine_run_backward = _run_backward
    torch.Tensor.device = property(_tensor_device)  # type: ignore[assignment, misc]
    torch.Tensor.is_cuda = property(lambda tensor: gpu_of(tensor) is not None)  # type: ignore[assignment, misc]
    torch.Tensor.is_cpu = property(lambda tensor: _tensor_device(tensor).type == "cpu")  # type: ignore[assignment, misc]
    if torch.distributed.is_available():
        _install_groups()
    torch.cuda.default_generators = _generators  # type: ignore[assignment]
    _placement.__enter__()
    DeviceArguments().__enter__()
