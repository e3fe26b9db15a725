"""Find parameters that were tied until a call replaced the model's tensors."""

from __future__ import annotations

import weakref
from contextlib import ExitStack
from typing import Any

import torch

from ..engines.hooks import wrap_function

_REPLACING = ("to_empty", "load_state_dict")  # methods of modules that may give each name a tensor of its own


class Ties:
    """The shared parameters of all modules, before and after calls that may separate them."""

    def __init__(self) -> None:
        self._lost: list[tuple[Any, list[str], str]] = []  # a module, the names of one parameter, and the method
        self._stack = ExitStack()

    def listen(self) -> None:
        """Observe the calls from now on, until `close`."""
        for name in _REPLACING:
            self._stack.enter_context(wrap_function(torch.nn.Module, name, self._listener(name)))

    def close(self) -> None:
        self._stack.close()

    def findings(self) -> list[str]:
        """Return a finding for each group of names that shared one trainable parameter and no longer do."""
        findings = []
        for reference, names, method in self._lost:
            module = reference()
            parameters = [] if module is None else [_parameter(module, name) for name in names]
            if len({id(p) for p in parameters}) > 1 and all(p is not None and p.requires_grad for p in parameters):
                findings.append(
                    f"{' and '.join(names)} are no longer tied: they were one parameter, and {method} made them "
                    f"{len(names)} parameters, which are updated separately. Tie them again after {method}."
                )
        return list(dict.fromkeys(findings))

    def _listener(self, method: str) -> Any:
        def listen(call: Any, module: torch.nn.Module, *arguments: Any, **options: Any) -> Any:
            names_by_id: dict[int, list[str]] = {}
            for name, parameter in module.named_parameters(remove_duplicate=False):
                names_by_id.setdefault(id(parameter), []).append(name)
            shared = [names for names in names_by_id.values() if len(names) > 1]
            result = call(module, *arguments, **options)
            self._lost += [(weakref.ref(module), names, method) for names in shared if not _are_one(module, names)]
            return result

        return listen


def _are_one(module: torch.nn.Module, names: list[str]) -> bool:
    return len({id(_parameter(module, name)) for name in names}) == 1


def _parameter(module: torch.nn.Module, name: str) -> Any:
    owner, _, own = name.rpartition(".")
    try:
        return module.get_submodule(owner)._parameters.get(own)
    except AttributeError:  # the part has been replaced
        return None
