"""Count the collective operations that a rank issues, in PyTorch's dispatcher."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Issued:
    """The number and the bytes of a rank's collectives of one kind."""

    kind: str  # with the prefix subgroup_ if only some of the ranks take part
    count: int
    bytes: int  # of the whole tensor: the input of all-reduce and reduce-scatter, the output of all-gather


_REDUCING = ("all_reduce", "reduce_scatter", "reduce", "all_to_all")
# Kind of collective -> position of its full tensor among an operator's arguments; None if it carries no tensor.
# Operators that are not listed, such as wait_tensor and wrap_tensor_autograd, move no data.
_WHOLE = {
    "all_reduce": 0,
    "broadcast": 0,
    "reduce": 0,
    "gather": 0,
    "scatter": 1,
    "all_gather": 0,  # the output, first in c10d
    "reduce_scatter": 1,  # the input
    "all_to_all": 1,
    "send": 0,
    "recv": 0,
    "recv_any_source": 0,
    "barrier": None,
    "monitored_barrier": None,
}
LETTING_GO_SECONDS = 0.005  # a thread that has finished a collective needs microseconds to release its tensors
MOST_WAITS = 20  # for threads that the machine has interrupted
_SUFFIXES = ("_", "_base", "_coalesced", "_tensor", "_into", "_single", "_out")


def _kind(operator: str) -> str:
    """Return the kind of a collective operator, such as all_gather for _allgather_base_ and all_gather_into_tensor."""
    name = operator.lstrip("_")
    while (shorter := next((name.removesuffix(s) for s in _SUFFIXES if name.endswith(s)), name)) != name:
        name = shorter
    return {"allreduce": "all_reduce", "allgather": "all_gather", "alltoall": "all_to_all"}.get(name, name)


def collective_of(func: Any, args: Sequence[Any], result: Any) -> tuple[str, list[torch.Tensor]] | None:
    """Return the kind of collective that a PyTorch operator performs, and the full tensors that it transfers.

    None if the operator is not a collective.
    """
    if func.namespace == "deepspeed" and "all_to_all" in func._schema.name:
        return "all_to_all", [args[0]]  # Ulysses' exchange is an operator of its own (sequence/layer.py)
    functional = func.namespace == "_c10d_functional"  # its input is the first argument, and its output the result
    if not functional and func.namespace != "c10d":
        return None
    kind = _kind(func._schema.name.split("::")[1])
    if kind not in _WHOLE:
        return None
    if (where := _WHOLE[kind]) is None:
        return kind, []
    whole = result if functional and kind == "all_gather" else args[0 if functional else where]
    return kind, [leaf for leaf in tree_leaves(whole) if isinstance(leaf, torch.Tensor)]


def group_of(args: Sequence[Any]) -> dist.ProcessGroup | None:
    """Return the process group that an operator's arguments contain or name. None if there is none."""
    for value in args:
        if is_script_object(value, "ProcessGroup"):
            return dist.ProcessGroup.unbox(value)
        if isinstance(value, str) and value in c10d._world.pg_names.values():
            group: dist.ProcessGroup = vars(c10d)["_resolve_process_group"](value)
            return group
    return None


def is_script_object(value: Any, name: str) -> bool:
    return isinstance(value, torch.ScriptObject) and str(value._type()).rpartition(".")[2] == name


def wait(result: Any) -> None:
    """Wait until a collective is done and the thread that carried it out has released the tensors."""
    for leaf in tree_leaves(result):
        if is_script_object(leaf, "Work"):
            dist.Work.unbox(leaf).wait()
            let_other_threads_finish()


def let_other_threads_finish() -> None:
    """Wait until the other threads of this process sleep, so that they have released what they had finished with.

    A thread on a busy machine can be interrupted before it releases a tensor, but it is then still ready to run
    (state R in proc(5)).
    """
    for _ in range(MOST_WAITS):
        time.sleep(LETTING_GO_SECONDS)
        stats = Path("/proc/self/task").glob("*/stat")
        others = (stat for stat in stats if stat.parent.name != str(threading.get_native_id()))
        with suppress(OSError):  # a thread has ended meanwhile
            if not any(") R " in stat.read_text() for stat in others):
                return


class CollectiveProbe(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A counter of the collectives that this rank issues inside a `with` block, from any library.

    DDP's reducer, DeepSpeed and FSDP all go through the `c10d::` operators of PyTorch's dispatcher. The probe slows
    every operator down, so it runs in a separate step that is not timed.

    If `waits` is true, the probe waits after each collective until its thread has released the tensors. gloo's threads
    run outside the profiler, so the profiler does not see memory that such a thread releases last (memory.py, CpuPeak).
    """

    def __init__(self, waits: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._waits = waits
        self._count: dict[str, int] = defaultdict(int)
        self._bytes: dict[str, int] = defaultdict(int)
        self._reduced = 0  # bytes
        self._of_groups: dict[tuple[int, ...], int] = defaultdict(int)  # ranks of a group -> bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if (collective := collective_of(func, args, result)) is not None:
            kind, tensors = collective
            group = group_of(args)
            is_of_some_ranks = group is not None and group.size() < dist.get_world_size()
            name = f"subgroup_{kind}" if is_of_some_ranks else kind
            num_bytes = sum(t.numel() * t.element_size() for t in tensors)
            ranks = range(dist.get_world_size()) if group is None else dist.get_process_group_ranks(group)
            self._of_groups[tuple(ranks)] += num_bytes
            self._count[name] += 1
            self._bytes[name] += num_bytes
            if kind in _REDUCING and func.namespace != "deepspeed":  # Ulysses' exchange adds nothing up
                self._reduced += num_bytes
        if self._waits and func.namespace == "c10d":
            wait(result)
        return result

    def reduced_bytes(self) -> int:
        """Return the total bytes of all reductions, such as those of gradients."""
        return self._reduced

    def bytes_beyond(self, ranks: Sequence[int]) -> int:
        """Return the total bytes of the collectives with ranks that are not among the given ones."""
        return sum(size for group, size in self._of_groups.items() if not set(group) <= set(ranks))

    def issued(self) -> list[Issued]:
        return [Issued(kind, self._count[kind], self._bytes[kind]) for kind in sorted(self._count)]
