"""Read the settings of a DeepSpeed engine that was built: the value of each key of a DeepSpeed JSON.

The paths to the values are in the table of keys. Values of the ZeRO optimizer and of its offloading come first, because
they show what was built. The engine's configuration only shows what was requested. It is read if no built object stores
the value.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch

from ..readback.dtypes import TORCH_NAMES
from . import known_keys

Value = bool | int | float | str | None

HPZ = "zero_optimization.zero_hpz_partition_size"  # no attribute has it, so it is read from the process groups


@cache
def readers() -> dict[str, list[str]]:
    """Return where to read the value of each key: attribute paths that start at the engine or its optimizer.

    The first path that exists counts. Keys without a path are left out. The keys are those that a strategy may set.
    """
    table = known_keys.read()["read"]
    paths_of = {}
    for key in known_keys.accepted_values("json"):
        section, _, name = key.rpartition(".")
        paths_of[key] = table[key] if key in table else [path.format(name=name) for path in table[section]]
    return {key: paths for key, paths in paths_of.items() if paths}


def read(engine: Any, optimizer: Any) -> dict[str, Value]:
    """Return the value of every readable key of a DeepSpeed engine, including keys with default values."""
    return {key: value(key, engine, optimizer) for key in readers()}


def value(key: str, engine: Any, optimizer: Any) -> Value:
    """Return the value that a DeepSpeed engine has for one key of its JSON.

    Raises AttributeError, KeyError or TypeError if this release of DeepSpeed stores it elsewhere.
    """
    if key == HPZ:
        # The number of ranks that share a second copy of the parameters at stage 3; 1 if there is none.
        parameter = next(engine.parameters())
        has_second_copy = getattr(parameter, "ds_zero_param_process_group", None) is not None
        return parameter.ds_secondary_tensor_group_size if has_second_copy else 1
    *first_paths, last_path = readers()[key]
    setting: Any = None
    for path in first_paths:
        try:
            setting = _follow(path, engine, optimizer)
            break
        except AttributeError:
            continue
    else:
        setting = _follow(last_path, engine, optimizer)
    return "none" if setting is None and key.endswith(".device") else _plain(setting)


def requested(content: dict[str, Any]) -> Iterator[tuple[str, Value]]:
    """Yield the keys of a DeepSpeed JSON with their requested values, in the form that `read` returns.

    Keys with the value "auto" are left out, and so are keys that cannot be read from an engine.
    """
    unreadable = {key for key, paths in known_keys.read()["read"].items() if not paths}
    for key, setting in _flat(content):
        if setting != "auto" and key not in unreadable:
            yield key, TORCH_NAMES[setting] if key == "communication_data_type" else setting


def _follow(path: str, engine: Any, optimizer: Any) -> Any:
    """Return the value at the end of a path of attributes, keys and methods. None if a section in it is None."""
    root, *names = path.split(".")
    node = engine if root == "engine" else optimizer
    for name in names:
        if node is None and root == "engine":  # nothing is offloaded there
            return None
        node = node[name] if isinstance(node, dict) else getattr(node, name)
    return node() if callable(node) else node


def _flat(section: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def _plain(value: Any) -> Value:
    """Return a value in the form of JSON: a torch.dtype by its name, a member of an enumeration by its value."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    plain: Value = getattr(value, "value", value)
    return plain
