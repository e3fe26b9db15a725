"""Read the settings of a DeepSpeed engine after it was built: the value of each key of a DeepSpeed JSON.

The paths to the values are in the table of keys. The value of the ZeRO optimizer, or of what it offloads with, comes
first. The engine's configuration only says what was requested. It is read if nothing that was built keeps the value.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch

from ..readback.dtypes import TORCH_NAMES
from . import known_keys

Value = bool | int | float | str | None

HPZ = "zero_optimization.zero_hpz_partition_size"  # read from the engine's process groups: no attribute has it


@cache
def readers() -> dict[str, list[str]]:
    """Return, for each key that a strategy may set, the paths to its value from the engine and its optimizer.

    The first path that exists counts. Keys without a path are left out.
    """
    table = known_keys.read()["read"]
    paths_of = {}
    for key in known_keys.accepted_values("json"):
        section, _, name = key.rpartition(".")
        paths_of[key] = table[key] if key in table else [path.format(name=name) for path in table[section]]
    return {key: paths for key, paths in paths_of.items() if paths}


def read(engine: Any, optimizer: Any) -> dict[str, Value]:
    """Read every key from a DeepSpeed engine, including those that no file sets: defaults are settings, too."""
    return {key: value(key, engine, optimizer) for key in readers()}


def value(key: str, engine: Any, optimizer: Any) -> Value:
    """Read one key, as JSON has it. Raises AttributeError and the like if a release keeps it elsewhere."""
    if key == HPZ:
        return _secondary_partition_size(engine)
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
    """Yield the keys of a DeepSpeed JSON with their values, as `read` returns them; "auto" and unreadable keys not."""
    unreadable = {key for key, paths in known_keys.read()["read"].items() if not paths}
    for key, setting in _flat(content):
        if setting != "auto" and key not in unreadable:
            yield key, TORCH_NAMES[setting] if key == "communication_data_type" else setting


def _follow(path: str, engine: Any, optimizer: Any) -> Any:
    """Return the value at the end of a path of attributes, keys and methods; None if a section of it is None."""
    root, *names = path.split(".")
    node = engine if root == "engine" else optimizer
    for name in names:
        if node is None and root == "engine":  # nothing is offloaded there
            return None
        node = node[name] if isinstance(node, dict) else getattr(node, name)
    return node() if callable(node) else node


def _secondary_partition_size(engine: Any) -> int:
    """Return the number of ranks that share a second copy of the parameters at stage 3; 1: there is none."""
    parameter = next(engine.parameters())
    has_second_copy = getattr(parameter, "ds_zero_param_process_group", None) is not None
    return parameter.ds_secondary_tensor_group_size if has_second_copy else 1


def _flat(section: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def _plain(value: Any) -> Value:
    """Return a value as JSON has it: a torch.dtype by its name, a member of an enumeration by its value."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    plain: Value = getattr(value, "value", value)
    return plain
