"""The listener to an optimizer step: functions that are listened to as they are called, and collectives, counted.

Of a function, what is replaced is a module's or a class's, never anything of an instance, of which a script may make
copies; the last listener that goes puts the original back.
"""

from __future__ import annotations

import functools
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Listener = Callable[..., Any]  # is given the call to make, and its arguments; returns what the call returns


class _Place(NamedTuple):
    """What stands in the place of a function."""

    by: Callable[..., Any]
    listeners: list[Listener]
    put_back: Callable[[], None]


_places: dict[tuple[Any, str], _Place] = {}


@contextmanager
def listening(owner: Any, name: str, listener: Listener) -> Iterator[None]:
    """Have `listener` called in the place of `owner.name`, around the listeners before it."""
    key = (owner, name)
    place = _places.get(key)
    if place is None or vars(owner)[name] is not place.by:  # somebody else has put theirs around it
        place = _places[key] = _replace(owner, name)
    place.listeners.append(listener)
    try:
        yield
    finally:
        place.listeners.remove(listener)
        if not place.listeners:
            place.put_back()
            if _places.get(key) is place:
                del _places[key]


def before_updates(look: Callable[[torch.optim.Optimizer], None]) -> Any:
    """Call `look` before every update: after the closure that a step may be given, which has passes in it."""

    def on_step(optimizer: torch.optim.Optimizer, arguments: Any, options: Any) -> Any:
        by_name = "closure" in options
        closure = options["closure"] if by_name else next(iter(arguments[1:]), None)
        if not callable(closure):
            return look(optimizer)

        def passes(*given: Any, **named: Any) -> Any:
            result = closure(*given, **named)
            look(optimizer)
            return result

        return (arguments, options | {"closure": passes}) if by_name else ((optimizer, passes, *arguments[2:]), options)

    return register_optimizer_step_pre_hook(on_step)


def _replace(owner: Any, name: str) -> _Place:
    call = getattr(owner, name)
    inherited = object()
    before = vars(owner).get(name, inherited)
    listeners: list[Listener] = []

    @functools.wraps(call)
    def by(*arguments: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling():  # a graph of the script's outlives the listeners
            return call(*arguments, **options)
        chain = call
        for listener in listeners:
            chain = functools.partial(listener, chain)
        return chain(*arguments, **options)

    def put_back() -> None:
        if vars(owner).get(name) is not by:
            return  # what somebody else has put around it calls it still, and it calls the original
        if before is inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, before)

    setattr(owner, name, by)
    return _Place(by, listeners, put_back)


def without_graphs() -> AbstractContextManager[Any]:
    """Run what torch.compile made without its graphs; under a probe it would give them up for good."""
    # Whoever has compiled something has imported this, which takes seconds.
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


@dataclass(frozen=True)
class Issued:
    """The collectives of one kind that a rank issued."""

    kind: str  # subgroup_ before it: among some of the ranks only
    count: int
    bytes: int  # of the whole tensor: the input of all-reduce and reduce-scatter, the output of all-gather


_REDUCING = ("all_reduce", "reduce_scatter", "reduce", "all_to_all")
# Kind of collective -> where its whole tensor is among an operator's arguments; None: it carries none. Others move
# nothing: wait_tensor, wrap_tensor_autograd.
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
LETTING_GO_SECONDS = 0.005  # a thread that has finished a collective needs microseconds to let go of its tensors
_SUFFIXES = ("_", "_base", "_coalesced", "_tensor", "_into", "_single", "_out")


def _kind(operator: str) -> str:
    """all_gather for _allgather_base_, allgather_into_tensor_coalesced_, all_gather_into_tensor and the like."""
    name = operator.lstrip("_")
    while (shorter := next((name.removesuffix(s) for s in _SUFFIXES if name.endswith(s)), name)) != name:
        name = shorter
    return {"allreduce": "all_reduce", "allgather": "all_gather", "alltoall": "all_to_all"}.get(name, name)


def carried(func: Any, args: Sequence[Any], result: Any) -> tuple[str, list[torch.Tensor]] | None:
    """The kind of a collective that an operator is, and the whole tensors that it carries; None: it is none."""
    functional = func.namespace == "_c10d_functional"  # its tensors come back as results, its input is first
    if not functional and func.namespace != "c10d":
        return None
    kind = _kind(func._schema.name.split("::")[1])
    if kind not in _WHOLE:
        return None
    if (where := _WHOLE[kind]) is None:
        return kind, []
    whole = result if functional and kind == "all_gather" else args[0 if functional else where]
    return kind, [leaf for leaf in tree_leaves(whole) if isinstance(leaf, torch.Tensor)]


def _is_of_some_ranks(args: Sequence[Any]) -> bool:
    """Whether an operator's process group, where it is given one as an object, is smaller than the world."""
    groups = (dist.ProcessGroup.unbox(value) for value in args if is_script_object(value, "ProcessGroup"))
    return any(group.size() < dist.get_world_size() for group in groups)


def is_script_object(value: Any, name: str) -> bool:
    return isinstance(value, torch.ScriptObject) and str(value._type()).rpartition(".")[2] == name


def wait(result: Any) -> None:
    """Wait until a collective is done and only its caller holds what it worked on."""
    for leaf in tree_leaves(result):
        if is_script_object(leaf, "Work"):
            dist.Work.unbox(leaf).wait()
            time.sleep(LETTING_GO_SECONDS)


class CollectiveProbe(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count the collectives that this rank issues inside a `with` block, whichever library issues them.

    DDP's reducer, DeepSpeed and FSDP all go through the `c10d::` operators of PyTorch's dispatcher. It slows every
    operator down, so it runs on a designated step that timing leaves out.

    `waits`: for each collective, and until its thread has let go of its tensors. gloo's threads run outside the
    profiler, which never hears of what such a thread is the last to hold (memory.py, CpuPeak).
    """

    def __init__(self, waits: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._waits = waits
        self._count: dict[str, int] = defaultdict(int)
        self._bytes: dict[str, int] = defaultdict(int)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if (found := carried(func, args, result)) is not None:
            kind, tensors = found
            name = f"subgroup_{kind}" if _is_of_some_ranks(args) else kind
            self._count[name] += 1
            self._bytes[name] += sum(t.numel() * t.element_size() for t in tensors)
        if self._waits and func.namespace == "c10d":
            wait(result)
        return result

    def reduced_bytes(self) -> int:
        """Bytes of what was reduced, as gradients are."""
        return sum(value for kind, value in self._bytes.items() if kind.removeprefix("subgroup_") in _REDUCING)

    def issued(self) -> list[Issued]:
        return [Issued(kind, self._count[kind], self._bytes[kind]) for kind in sorted(self._count)]
