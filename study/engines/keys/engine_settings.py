"""What became of each key of a DeepSpeed JSON, read from the engine as it was built, by the paths of the table.

Where the ZeRO optimizer, or what it offloads with, has a value of its own, that counts: the engine's configuration is
what was asked, and is read only where nothing built keeps the value.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch

from . import known_keys

Value = bool | int | float | str | None

# As DeepSpeed's JSON names them, and as torch does.
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
HPZ = "zero_optimization.zero_hpz_partition_size"  # which the engine's groups decide, and no attribute says


@cache
def readers() -> dict[str, list[str]]:
    """Where each key is found that a strategy may set: paths from the engine and its optimizer, the first that is."""
    paths = known_keys.read()["read"]
    found = {}
    for key in known_keys.taken("json"):
        section, _, name = key.rpartition(".")
        found[key] = paths[key] if key in paths else [path.format(name=name) for path in paths[section]]
    return {key: where for key, where in found.items() if where}


def read(engine: Any, optimizer: Any) -> dict[str, Value]:
    """Read every key from a DeepSpeed engine, whether or not a file sets it: a default, too, is a setting."""
    return {key: value(key, engine, optimizer) for key in readers()}


def value(key: str, engine: Any, optimizer: Any) -> Value:
    """Read one key, as JSON has it. Raises AttributeError and the like where a release keeps it elsewhere."""
    if key == HPZ:
        return _secondary_partition_size(engine)
    *before, last = readers()[key]
    found: Any = None
    for path in before:
        try:
            found = _follow(path, engine, optimizer)
            break
        except AttributeError:
            continue
    else:
        found = _follow(last, engine, optimizer)
    return "none" if found is None and key.endswith(".device") else _plain(found)


def asked(content: dict[str, Any]) -> Iterator[tuple[str, Value]]:
    """The keys that a DeepSpeed JSON sets to a value, as `read` writes them; "auto" is for others to fill in."""
    unread = {key for key, paths in known_keys.read()["read"].items() if not paths}
    for key, wanted in _flat(content):
        if wanted != "auto" and key not in unread:
            yield key, DTYPES[wanted] if key == "communication_data_type" else wanted


def _follow(path: str, engine: Any, optimizer: Any) -> Any:
    """The value at the end of a path: of attributes, of keys, of a method's answer; None where a section is none."""
    first, *names = path.split(".")
    found = engine if first == "engine" else optimizer
    for name in names:
        if found is None and first == "engine":  # nothing is offloaded there
            return None
        found = found[name] if isinstance(found, dict) else getattr(found, name)
    return found() if callable(found) else found


def _secondary_partition_size(engine: Any) -> int:
    """Ranks that share a second copy of the parameters at stage 3; 1: there is none."""
    parameter = next(engine.parameters())
    has_one = getattr(parameter, "ds_zero_param_process_group", None) is not None
    return parameter.ds_secondary_tensor_group_size if has_one else 1


def _flat(section: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def _plain(value: Any) -> Value:
    """A value as JSON has it: types by their names, an enumeration by its value."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    plain: Value = getattr(value, "value", value)
    return plain
