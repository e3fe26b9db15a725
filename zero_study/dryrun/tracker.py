"""Record every tensor and every collective of a process."""

from __future__ import annotations

import json
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Reducer
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zero_study.dryrun.allocator import Allocator
from zero_study.dryrun.traced import PARTS, Part
from zero_study.engines.collective_probe import collective_of, group_of, is_script_object, wait
from zero_study.engines.hooks import wrap_function

PLAIN = (torch.Tensor, torch.nn.Parameter, FakeTensor)
POINT_TO_POINT = ("send", "recv", "recv_any_source")
DONE = "done"  # a line of a journal: the call before it has finished
LIBRARIES = (
    "site-packages", "dist-packages", "zero_study/dryrun", "zero_study/engines", "lib/python", "<frozen", "<string>",
)  # fmt: skip


@dataclass(frozen=True)
class Call:
    """A collective or message that a rank issued."""

    kind: str
    ranks: tuple[int, ...]  # the ranks of its group; empty if the group has all ranks
    dtype: str
    num_bytes: int  # of the whole tensor: the input of all-reduce and reduce-scatter, the output of all-gather
    module: str  # the module whose forward pass issued it; empty if none did
    line: str  # the line of the script, not of a library; empty if there is none
    peer: int | None = None  # the rank that sends or receives: a source, a destination; None if the call has none
    operation: str = ""  # of a reduction, such as SUM

    @classmethod
    def read(cls, content: dict[str, Any]) -> Call:
        """Return a call from the dict that represents it in a rank's result."""
        return cls(**{**content, "ranks": tuple(content["ranks"])})


class _Storage:
    """A storage with its number of bytes, and the part of memory to which it belongs."""

    __slots__ = ("num_bytes", "part", "reference")

    def __init__(self, reference: Any, part: Part) -> None:
        self.reference = reference
        self.num_bytes = 0
        self.part = part


class TensorTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A tracker that records when each storage is allocated and freed, and each collective, in a `with` block.

    Memory is counted in storages, each counted once. Memory that an operator allocates internally is not seen. Memory
    that C++ code allocates by itself is seen if it is the result of an operator, as DDP's buckets are.
    """

    def __init__(self, journal: IO[str] | None = None) -> None:
        """Create a tracker that has recorded nothing.

        `journal` is a file to which each call is written before the rank waits for it, and `DONE` after it.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
        self._journal = journal
        self.bucket_bytes: int | None = None  # of DDP
        self.held = 0  # bytes
        self.peak = 0  # the highest number of bytes since `start_peak`
        self.new_part: Part | None = None  # the part of new storages; None: it depends on whether a backward pass runs
        self.allocators: dict[str, Allocator] = {}  # CUDA's, since `replay`
        self._storages: dict[int, _Storage] = {}  # by address
        self._held_at_start: dict[_Storage, int] = {}  # bytes, at `start_peak`
        self._changes: list[tuple[_Storage, int]] | None = None  # in bytes, since `start_peak`
        self._num_changes_at_peak = 0
        # Gloo's threads keep the tensors that they send.
        self._waits = dist.is_initialized() and dist.get_backend() == "gloo"
        self._modules: list[torch.nn.Module] = []  # the modules whose forward passes are running, the innermost last
        self._names = weakref.WeakKeyDictionary[torch.nn.Module, str]()
        self._groups: dict[Any, tuple[int, ...]] = {}
        self._imagines = False
        self._stack = ExitStack()

    def __enter__(self) -> TensorTracker:
        enter = self._stack.enter_context
        enter(wrap_function(torch.UntypedStorage, "resize_", self._resize))
        enter(wrap_function(dist, "Reducer", self._count_buckets))
        enter(wrap_function(Reducer, "_rebuild_buckets", self._make_buckets))
        enter(wrap_function(ShardingPropagator, "_propagate_tensor_meta_non_cached", self._imagine))
        for hook in (
            register_module_forward_pre_hook(self._begin_forward),
            register_module_forward_hook(self._end_forward, always_call=True),
        ):
            self._stack.callback(hook.remove)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._stack.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind not in PLAIN for kind in types):
            return NotImplemented  # a tensor subclass, whose inner tensors come here again one by one
        options = kwargs or {}
        if self._imagines:
            return func(*args, **options)
        result = self._run(func, args, options)
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._note(leaf)
        if func.namespace == "fsdp":
            # FSDP2 copies gathered data into parameters, and gradients into the buffers of its reduction.
            if func is torch.ops.fsdp.split_with_sizes_copy.default:
                self.assign("parameters", options["out"])
            elif func is torch.ops.fsdp.chunk_cat.default:
                self.assign("gradients", args[0])
                self.assign("communication_buffers", [options["out"]])
        return result

    def _run(self, func: Any, args: Any, options: Any) -> Any:
        """Run an operator, and record it if it is a collective."""
        if self._waits and func.namespace == "c10d":
            return self._call_and_wait(func, args, options)
        result = func(*args, **options)
        if (collective := collective_of(func, args, result)) is not None:
            self._note_call(*collective, func, args)
        elif self._waits and func.namespace == "_c10d_functional" and "wait_tensor" in func._schema.name:
            self._write(DONE)
        return result

    def _call_and_wait(self, func: Any, args: Any, options: Any) -> Any:
        """Record a collective, then issue it and wait for it.

        It is recorded first, because gloo's thread may end the process at once if the ranks issue different calls. A
        message is not waited for, because a rank may send one before it posts the receive that its partner waits for.
        """
        collective = collective_of(func, args, None)
        is_message = collective is not None and collective[0] in POINT_TO_POINT
        if collective is not None:
            self._note_call(*collective, func, args)
        try:
            result = func(*args, **options)
            if not is_message:
                wait(result)
            return result
        finally:  # a script may go on after a call that fails
            if collective is not None and not is_message:
                self._write(DONE)

    # ------------------------------------------------------------ memory

    def start_peak(self) -> None:
        """Start to look for the peak of memory, and record the bytes that all storages have now."""
        self.peak = self.held
        self._held_at_start = {storage: storage.num_bytes for storage in self._storages.values()}
        self._changes, self._num_changes_at_peak = [], 0

    def parts_at_peak(self) -> dict[Part, int]:
        """Return the bytes of all storages at the peak, by category, such as gradients.

        A storage counts for the part to which it was assigned last, even if that was after the peak.
        """
        bytes_by_storage = Counter(self._held_at_start)
        for storage, change in (self._changes or [])[: self._num_changes_at_peak]:
            bytes_by_storage[storage] += change
        parts: dict[Part, int] = dict.fromkeys(PARTS, 0)
        for storage, num_bytes in bytes_by_storage.items():
            parts[storage.part] += num_bytes
        return parts

    def assign(self, part: Part, tensors: Iterable[torch.Tensor]) -> None:
        """Assign tensors to a category of memory, such as gradients. The last assignment of a tensor counts."""
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if local.device.type != "meta" and (storage := self._storages.get(local.untyped_storage()._cdata)):
                storage.part = part

    def replay(self) -> None:
        """Allocate the existing tensors in simulated CUDA allocators, and repeat all further allocations there.

        Earlier allocations are left out, because a model is built and cast in the host's memory.
        """
        self.allocators = {"default": Allocator(False), "expandable_segments": Allocator(True)}
        for allocator, (key, storage) in product(self.allocators.values(), self._storages.items()):
            allocator.allocate(key, storage.num_bytes)

    def reserved(self) -> dict[str, int]:
        """Return the bytes of GPU memory that each simulated allocator has reserved so far, by its name."""
        return {name: allocator.reserved for name, allocator in self.allocators.items()}

    def _note(self, tensor: torch.Tensor) -> None:
        if tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._storages:
            return
        self._storages[key] = _Storage(weakref.ref(storage, partial(self._forget, key)), self._part_of_new())
        self._change(key, storage.nbytes())

    def _part_of_new(self) -> Part:
        """Return the part to which a new storage belongs, until it is assigned to another one.

        It is a temporary buffer if a backward pass allocates it. It is an activation if a forward pass allocates it,
        even if that forward pass is repeated within a backward pass.
        """
        if self.new_part is not None:
            return self.new_part
        is_in_backward = torch._C._current_graph_task_id() != -1
        return "temporary_buffers" if is_in_backward and not self._modules else "activations"

    def _forget(self, key: int, _: Any) -> None:
        self._change(key, 0)
        del self._storages[key]

    def _change(self, key: int, num_bytes: int) -> None:
        storage = self._storages[key]
        change, storage.num_bytes = num_bytes - storage.num_bytes, num_bytes
        self.held += change
        if self._changes is not None:
            self._changes.append((storage, change))
        if self.held > self.peak:
            self.peak = self.held
            self._num_changes_at_peak = len(self._changes or ())
        for allocator in self.allocators.values():
            allocator.allocate(key, num_bytes)

    def _resize(self, call: Callable[..., Any], storage: Any, size: int) -> Any:
        result = call(storage, size)
        if storage._cdata in self._storages:
            self._change(storage._cdata, size)
        return result

    def _count_buckets(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        before = self.held
        reducer = self._make_buckets(call, *arguments, **options)
        self.bucket_bytes = self.held - before
        return reducer

    def _make_buckets(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        self.new_part = "communication_buffers"
        try:
            return call(*arguments, **options)
        finally:
            self.new_part = None

    # ------------------------------------------------------------ collectives

    def _imagine(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Ignore the operators that DTensor runs on tensors without memory to find an output's shape."""
        self._imagines = True
        try:
            return call(*arguments, **options)
        finally:
            self._imagines = False

    def _note_call(self, kind: str, tensors: Sequence[torch.Tensor], func: Any, args: Any) -> None:
        dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        if kind == "all_gather":
            self.assign("parameters", tensors)
        ranks, (peer, operation) = self._ranks(args), _peer_and_operation(func, args)
        peer = ranks[peer] if ranks and peer is not None and peer < len(ranks) else peer
        self.calls.append(Call(kind, ranks, dtype, num_bytes, self._module(), _line(), peer, operation))
        self._write(json.dumps(asdict(self.calls[-1])))

    def _write(self, line: str) -> None:
        if self._journal is not None:
            self._journal.write(line + "\n")
            self._journal.flush()

    def _ranks(self, args: Any) -> tuple[int, ...]:
        """Return the ranks of a call's group. Empty if the group contains all ranks."""
        group = group_of(args)
        if group is None:
            return ()
        name = group.group_name
        if name not in self._groups:
            ranks = tuple(dist.get_process_group_ranks(group))
            self._groups[name] = () if len(ranks) == dist.get_world_size() else ranks
        return self._groups[name]

    def _begin_forward(self, module: torch.nn.Module, _: Any) -> None:
        if not self._modules and module not in self._names:
            self._names.update({part: name or type(module).__name__ for name, part in module.named_modules()})
        self._modules.append(module)

    def _end_forward(self, module: torch.nn.Module, *_: Any) -> None:
        if module in self._modules:
            del self._modules[self._modules.index(module) :]

    def _module(self) -> str:
        return self._names.get(self._modules[-1], type(self._modules[-1]).__name__) if self._modules else ""


def _peer_and_operation(func: Any, args: Sequence[Any]) -> tuple[int | None, str]:
    """Return the rank in the group with which a call exchanges a message, and the operation of a reduction."""
    values = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
    peer = next((values[name] for name in ("root_rank", "dst", "src") if type(values.get(name)) is int), None)
    operation = values.get("reduce_op", "")
    if is_script_object(operation, "ReduceOp"):
        operation = str(operation.op()).rpartition(".")[2]
    return peer, str(operation).upper()


def _line() -> str:
    """Return the innermost line of Python code that is not in a library, as file:line. Empty if there is none."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if not any(part in name for part in LIBRARIES):
            return f"{Path(name).name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""
