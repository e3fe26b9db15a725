"""Which collectives does an optimizer step run, and how many bytes do they carry?"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from study.record import Collective

# c10d operator -> (kind, which argument holds the whole tensor). Input for reductions, output for gathers.
_OPERATORS = {
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "broadcast_": ("broadcast", 0),
    "reduce_": ("reduce", 0),
    "allgather_": ("all_gather", 0),
    "_allgather_base_": ("all_gather", 0),
    "allgather_coalesced_": ("all_gather", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "reduce_scatter_": ("reduce_scatter", 1),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "alltoall_": ("all_to_all", 1),
    "alltoall_base_": ("all_to_all", 1),
    "gather_": ("gather", 0),
    "scatter_": ("scatter", 1),
    "barrier": ("barrier", None),
}


class CollectiveProbe(TorchDispatchMode):
    """Count the collectives that this rank issues inside a `with` block, whichever library issues them.

    DDP's reducer, DeepSpeed and FSDP all go through the `c10d::` operators of PyTorch's dispatcher. It slows every
    operator down, so it runs on a designated step that timing leaves out.
    """

    def __init__(self) -> None:
        super().__init__()
        self._count: dict[str, int] = defaultdict(int)
        self._bytes: dict[str, int] = defaultdict(int)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" or func.namespace == "_c10d_functional":
            name = func._schema.name.split("::")[1]
            kind, argument = _OPERATORS.get(name, (name, 0))
            if not name.startswith(("wait_tensor", "monitored_barrier")):
                self._count[kind] += 1
                if argument is not None:
                    tensors = [leaf for leaf in tree_leaves(args[argument]) if isinstance(leaf, torch.Tensor)]
                    self._bytes[kind] += sum(t.numel() * t.element_size() for t in tensors)
        return func(*args, **(kwargs or {}))

    def collectives(self) -> list[Collective]:
        return [Collective(kind=k, count=self._count[k], bytes=self._bytes[k]) for k in sorted(self._count)]
