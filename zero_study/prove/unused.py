"""Find parameters that are used in the forward passes of a step, but are detached from the autograd graph.

Results are detached explicitly, or by a collective that a script calls itself: PyTorch's collectives have no backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ..engines.readback.facts import groups_of_module
from ..engines.readback.full_tensors import is_of_zero

_DETACHING = (torch.Tensor.detach, torch.Tensor.data.__get__, torch.detach)  # type: ignore[attr-defined]
_HIDES = "CheckpointFunction"  # the node of a part that runs its forward pass again within backward


class Cuts:
    """The tensors that are detached in forward passes, and the parameters on which the losses depend."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._with_gradients: set[int] = set()  # ids of modules whose results have gradients
        self._without: set[int] = set()  # ids of modules that gave results without gradients
        self._nodes: list[Any] = []  # of tensors that were detached in the current forward pass
        self._detached: set[int] = set()  # ids of parameters on which detached tensors depend
        self._reached: set[int] = set()  # ids of parameters on which the losses depend
        self._is_hidden = False  # a part of the graph cannot be followed

    def observed(self) -> TorchFunctionMode:
        """Return a context for a forward pass in which detached tensors are recorded."""
        return _Detaches(self._nodes)

    def note_module(self, module: Any, result: Any) -> None:
        """Record whether a module's results within a forward pass have gradients. Integer results do not count."""
        leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
        if leaves:
            has_gradient = any(leaf.requires_grad for leaf in leaves)
            (self._with_gradients if has_gradient else self._without).add(id(module))

    def end_forward(self) -> None:
        """Find the parameters on which the detached tensors depend."""
        parameters, _ = _parameters_of(self._nodes)
        self._detached |= self._own(parameters)
        self._nodes.clear()

    def note_sent(self, arguments: Any) -> None:
        """Find the parameters on which the tensors of a collective depend. Its results are cut from the graph."""
        if not torch.is_grad_enabled():  # PyTorch then refuses to say where some tensors come from
            return
        leaves = (leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor))
        with suppress(RuntimeError):  # a view that was made without gradients, and then changed
            nodes = [leaf.grad_fn for leaf in leaves if leaf.grad_fn is not None]
            self._detached |= self._own(_parameters_of(nodes)[0])

    def note_backward(self, tensors: Any) -> None:
        """Find the parameters on which the losses of a backward call depend."""
        losses = [leaf for leaf in tree_leaves(tensors) if isinstance(leaf, torch.Tensor)]
        parameters, is_hidden = _parameters_of([loss.grad_fn for loss in losses])
        self._reached |= self._own(parameters)
        self._is_hidden = self._is_hidden or is_hidden

    def names(self, parameters: Sequence[Any]) -> list[str]:
        """Return the names of the parameters that are used in a forward pass but have no gradient."""
        updated = set(map(id, parameters))
        without_gradient = []
        for prefix, module in self._model.named_modules():
            is_outside = id(module) in self._without and id(module) not in self._with_gradients
            for name, parameter in module._parameters.items():
                is_cut = is_outside or id(parameter) in self._detached
                if is_cut and id(parameter) in updated and self._is_without_gradient(parameter):
                    without_gradient.append(f"{prefix}.{name}".removeprefix("."))
        return without_gradient

    def _is_without_gradient(self, parameter: Any) -> bool:
        if not parameter.requires_grad or parameter.grad is not None:
            return False
        if is_of_zero(parameter):  # which moves the gradient out of the parameter
            return id(parameter) not in self._reached and not self._is_hidden
        return True

    def _own(self, variables: Iterable[Any]) -> set[int]:
        """Return the ids of the model's parameters. FSDP2 computes with other tensors."""
        own: dict[int, int] = {}
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                for group in groups_of_module(module):
                    own |= {id(getattr(p, "_unsharded_param", None)): id(p.sharded_param) for p in group.fsdp_params}
        return {own.get(id(variable), id(variable)) for variable in variables}


class _Detaches(TorchFunctionMode):
    def __init__(self, nodes: list[Any]) -> None:
        super().__init__()
        self._found = nodes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _DETACHING and torch.is_grad_enabled() and args:
            with suppress(RuntimeError):  # a view that was made without gradients, and then changed
                self._found += [] if args[0].grad_fn is None else [args[0].grad_fn]
        return func(*args, **(kwargs or {}))


def _parameters_of(roots: Iterable[Any]) -> tuple[list[Any], bool]:
    """Return the leaves on which some nodes of the graph depend, and whether a part of it cannot be followed."""
    visited: dict[int, Any] = {}
    leaves, is_hidden, waiting = [], False, list(roots)
    while waiting:
        node = waiting.pop()
        if node is None or id(node) in visited:
            continue
        visited[id(node)] = node
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        is_hidden = is_hidden or _HIDES in node.name()
        waiting += [following for following, _ in node.next_functions]
    return leaves, is_hidden
