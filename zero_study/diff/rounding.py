"""Run a training in Monte Carlo arithmetic (Parker, 1997): every result is rounded up or down at random.

Arithmetic in an engine's own kernels, collectives and weight updates is not rounded at random.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# These operators copy or set numbers, and compute none.
_MOVES = {"copy_", "clone", "detach", "_to_copy", "lift_fresh", "fill_", "zero_", "empty_like", "zeros_like"}


class Rounding(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode in which every floating-point result is moved by one unit in the last place, or left unchanged.

    The choice (up, down or unchanged) is random for each element. Zeros, infinities, views and copies stay unchanged.
    `seed` starts a separate generator, so the script's random numbers do not change.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._coins = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a DTensor: its local tensors are dispatched separately
        result = func(*args, **(kwargs or {}))
        if func.namespace == "aten" and not _moves_only(func) and _has_floats(args):
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.element_size() > 1:
                    self._move(leaf)
        return result

    def _move(self, values: torch.Tensor) -> None:
        coins = torch.randint(-1, 2, values.shape, generator=self._coins, dtype=torch.int8).to(values.device)
        towards = torch.where(coins > 0, torch.inf, -torch.inf).to(values.dtype)
        moves = (coins != 0) & (values != 0) & values.isfinite()
        values.copy_(torch.where(moves, torch.nextafter(values, towards), values))


def _moves_only(func: Any) -> bool:
    """Return whether an operator makes a view, or copies or sets numbers without computing any."""
    aliases = [result.alias_info for result in func._schema.returns]
    is_view = any(alias is not None and not alias.is_write for alias in aliases)
    return is_view or func._schema.name.rpartition("::")[2] in _MOVES


def _has_floats(args: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) and leaf.is_floating_point() for leaf in tree_leaves(args))
