"""Simulate GPUs in every Python process that has this folder on its search path and the variable of `simulated_gpus`.

Python imports this module when it starts. torch and bitsandbytes are patched as soon as a program has imported them,
and not earlier, because many programs import neither.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import os
import sys
from types import ModuleType
from typing import Any

import executed_lines
import simulated_gpus


class AfterImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Patch a module when it has been imported, by a function of a module of this folder."""

    def __init__(self, patched: str, patching: str, function: str) -> None:
        self._patched, self._patching, self._function = patched, patching, function
        self._loader: Any = None

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != self._patched:
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
        getattr(importlib.import_module(self._patching), self._function)(module)


PATCHES = [
    ("torch", "simulated_torch", "install"),
    ("bitsandbytes._ops", "simulated_bitsandbytes", "choose_kernels"),
    ("bitsandbytes.cuda_specs", "simulated_bitsandbytes", "load_cpu_library"),
    ("bitsandbytes.cextension", "simulated_bitsandbytes", "add_cuda_library"),
]

if os.environ.get(simulated_gpus.VARIABLE):
    sys.meta_path[:0] = [AfterImport(*names) for names in PATCHES]
if os.environ.get(executed_lines.VARIABLE):
    executed_lines.install()
