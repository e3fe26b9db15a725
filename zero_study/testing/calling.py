"""Load and call the function of a test in another process. Uses nothing but the standard library.

The script that `programs.py` writes executes this file by its path, so it must not import any other module of this
package.
"""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import IO, Any

_MAIN = "__main__"


class _Unpickler(pickle.Unpickler):
    """An unpickler that finds the module of the function even if it cannot be imported by its name."""

    def __init__(self, file: IO[bytes], name: str, path: str) -> None:
        super().__init__(file)
        self._name, self._path = name, path

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if module_name != self._name:
            return super().find_class(module_name, global_name)
        part_of_module: Any = module(self._name, self._path)
        for part in global_name.split("."):
            part_of_module = getattr(part_of_module, part)
        return part_of_module


def module(name: str, path: str) -> ModuleType:
    """Import a module by its name, or execute its file under this name if the import finds another file or none."""
    alias = "zero_study_test" if name == _MAIN else name
    loaded = sys.modules.get(alias)
    if loaded is None and name != _MAIN:
        try:
            loaded = importlib.import_module(name)
        except ImportError:  # if the module itself raised it, executing the file raises it again
            loaded = None
    if loaded is not None and loaded.__file__ and Path(loaded.__file__).resolve() == Path(path).resolve():
        return loaded
    spec = importlib.util.spec_from_file_location(alias, path)
    assert spec is not None
    assert spec.loader is not None
    loaded = sys.modules[alias] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def load(pickled: str, name: str, path: str) -> Callable[..., Any]:
    """Return the function in a pickle file. Its module has this name and path."""
    with open(pickled, "rb") as file:
        function: Callable[..., Any] = _Unpickler(file, name, path).load()
    return function


def run(run_name: str, pickled: str, name: str, path: str, words: Sequence[str]) -> None:
    """Load the function, and call it if this runs as a script. The first word, if any, is the strategy."""
    function = load(pickled, name, path)
    if run_name == _MAIN:
        function(**({"strategy": words[0]} if words else {}))
