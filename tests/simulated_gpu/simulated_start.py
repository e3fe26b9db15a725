"""Simulate GPUs in every Python process that has this folder on its search path and the variable of `simulated_gpus`.

Python imports this module when it starts. torch is patched as soon as a program has imported it, and not earlier,
because many programs import no torch.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from types import ModuleType
from typing import Any

import executed_lines
import simulated_gpus


class AfterImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Patch torch when it has been imported."""

    def __init__(self) -> None:
        self._loader: Any = None

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None:
            self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        import simulated_torch

        simulated_torch.install()


if os.environ.get(simulated_gpus.VARIABLE):
    sys.meta_path.insert(0, AfterImport())
if os.environ.get(executed_lines.VARIABLE):
    executed_lines.install()
