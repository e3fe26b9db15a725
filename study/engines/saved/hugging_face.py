"""Read folders with files of weights: of transformers' `save_pretrained`, of PEFT, and of accelerate's `save_state`."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from . import pickles
from .content import Saved, Tensor, in_memory, names_text

CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"
_WHOLE = ("model.safetensors", "pytorch_model.bin", "adapter_model.safetensors", "adapter_model.bin")
_SHARD = re.compile(r"(?:model|pytorch_model|adapter_model)-(\d+)-of-(\d+)\.(?:safetensors|bin)")
_FURTHER = re.compile(r"(?:model|pytorch_model)_\d+\.(?:safetensors|bin)")
_INDEX = re.compile(r"(?:model|pytorch_model|adapter_model)\.(?:safetensors|bin)\.index\.json")
_OPTIMIZERS = ("optimizer.bin", "optimizer.pt")  # of accelerate, of transformers' Trainer

# Names of types in the header of a safetensors file.
_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "U16": "uint16", "U32": "uint32", "U64": "uint64", "C64": "complex64",
}  # fmt: skip


def is_one(folder: Path) -> bool:
    """Return whether a folder has weights, or the configuration of a model or an adapter."""
    names = [path.name for path in folder.iterdir() if path.is_file()]
    return any(
        name in (*_WHOLE, CONFIG, ADAPTER_CONFIG) or _SHARD.fullmatch(name) or _INDEX.fullmatch(name) for name in names
    )


def read(folder: Path, trust: bool) -> Saved:
    """Read the weights in a folder. An adapter's are read, and not those of its base model."""
    saved = Saved(folder, "Hugging Face")
    files = {path.name: path for path in sorted(folder.iterdir()) if path.is_file()}
    saved.is_adapter = ADAPTER_CONFIG in files or any(name.startswith("adapter_model") for name in files)
    saved.format = "PEFT adapter" if saved.is_adapter else saved.format
    saved.config = _read_config(saved, files.get(ADAPTER_CONFIG if saved.is_adapter else CONFIG))
    prefix = "adapter_model" if saved.is_adapter else ("model", "pytorch_model")
    own = {name: path for name, path in files.items() if name.startswith(prefix)}
    indexes = [name for name in own if _INDEX.fullmatch(name)]
    shards = [name for name in own if _SHARD.fullmatch(name)]
    whole = [name for name in _WHOLE if name in own]
    if indexes or shards:
        if whole:
            saved.note("shards", f"There is {whole[0]} beside the shards. The shards were read.", whole)
        if len(indexes) > 1:
            saved.note("shards", f"There are {len(indexes)} index files. {indexes[0]} was read.", indexes)
        _read_shards(saved, own, indexes, shards, trust)
    elif whole:
        _add(saved, _headers(saved, own[whole[0]], trust))
        if len(whole) > 1:
            saved.note("shards", f"There are {' and '.join(whole)}. {whole[0]} was read.", whole[1:])
    else:
        saved.wrong("missing", "The folder has a configuration, but no file of weights.", ["model.safetensors"])
    if further := [name for name in files if _FURTHER.fullmatch(name)]:
        saved.unchecked.append(f"the further models of accelerate's save_state ({names_text(further)})")
    saved.step = _step(files.get("trainer_state.json"))
    saved.format += "" if saved.step is None else f", step {saved.step}"
    for name in _OPTIMIZERS:
        if name in files:
            _read_optimizer(saved, files[name], trust)
    return saved


def _read_config(saved: Saved, path: Path | None) -> dict[str, Any] | None:
    if path is None:
        return None
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        saved.wrong("unreadable", f"{path.name} cannot be read: {str(error).splitlines()[0]}.", [path.name])
        return None
    return content if isinstance(content, dict) else None


def _step(path: Path | None) -> int | None:
    try:
        return int(json.loads(path.read_bytes())["global_step"]) if path else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _add(saved: Saved, tensors: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if name in saved.tensors:
            saved.wrong("shards", f"{name} is in {saved.tensors[name].file} and in {tensor.file}.", [name])
        saved.tensors[name] = tensor


def _headers(saved: Saved, path: Path, trust: bool) -> dict[str, Tensor]:
    """Return the descriptions of the tensors in a file; none if it cannot be read."""
    try:
        if path.suffix != ".safetensors":
            content = pickles.load(path, trust)
            if not isinstance(content, dict):
                raise pickles.Unreadable("it is not a dictionary of tensors")
            return {
                str(name): in_memory(str(name), tensor, path.name)
                for name, tensor in content.items()
                if isinstance(tensor, torch.Tensor)
            }
        with safe_open(path, "pt") as file:
            names = set(file.keys())
            saved.ties |= {a: b for a, b in (file.metadata() or {}).items() if b in names and a not in names}
            parts = {name: file.get_slice(name) for name in sorted(names)}
            return {
                name: Tensor(
                    name,
                    tuple(part.get_shape()),
                    _DTYPES.get(part.get_dtype(), part.get_dtype()),
                    path.name,
                    partial(_value, path, name),
                )
                for name, part in parts.items()
            }
    except (SafetensorError, OSError, pickles.Unreadable) as error:
        saved.wrong("unreadable", f"{path.name} cannot be read: {str(error).splitlines()[0]}.", [path.name])
        return {}


def _value(path: Path, name: str) -> torch.Tensor:
    with safe_open(path, "pt") as file:
        tensor: torch.Tensor = file.get_tensor(name)
    return tensor


def _read_shards(saved: Saved, own: dict[str, Path], indexes: list[str], shards: list[str], trust: bool) -> None:
    weight_map: dict[str, str] = {}
    if indexes:
        index = _read_config(saved, own[indexes[0]])
        weight_map = {} if index is None else dict(index.get("weight_map") or {})
        if index is not None and not weight_map:
            saved.wrong("unreadable", f"{indexes[0]} has no weight_map.", [indexes[0]])
    else:
        saved.wrong("shards", "There are shards, but no index file, so from_pretrained cannot load them.", shards)
    headers = {name: _headers(saved, own[name], trust) for name in shards}
    headers |= {name: _headers(saved, own[name], trust) for name in set(weight_map.values()) & own.keys() - {*shards}}
    broken = {name for finding in saved.findings if finding.kind == "unreadable" for name in finding.names}
    listed = set(weight_map.values())
    if missing := listed - own.keys():
        lost = [name for name, file in weight_map.items() if file in missing]
        saved.wrong("shards", "The index lists files that are not in the folder.", missing)
        saved.wrong("missing", "These tensors are in missing files.", lost)
    if indexes and weight_map and (extra := headers.keys() - listed):
        saved.wrong("shards", "These files are not in the index, so another save left them.", extra)
    _check_counts(saved, shards)
    wrong_place: dict[str, list[str]] = defaultdict(list)
    for name, file in weight_map.items():
        if file in headers and file not in broken and name not in headers[file]:
            wrong_place[file].append(name)
    for file, names in wrong_place.items():
        saved.wrong("missing", f"The index says that these tensors are in {file}, but they are not.", names)
    for file, tensors in headers.items():
        if weight_map and file not in listed:
            continue
        if weight_map and (unlisted := tensors.keys() - weight_map.keys()):
            saved.wrong("unexpected", f"These tensors are in {file}, but not in the index.", unlisted)
        _add(saved, tensors)


def _check_counts(saved: Saved, shards: list[str]) -> None:
    """Check that the numbers in the names of the shards belong together: 00001-of-00003."""
    numbers = [tuple(map(int, match.groups())) for name in shards if (match := _SHARD.fullmatch(name))]
    totals = sorted({total for _, total in numbers})
    if len(totals) > 1:
        saved.wrong("shards", f"There are shards of saves with {names_text(map(str, totals))} shards.", shards)


def _read_optimizer(saved: Saved, path: Path, trust: bool) -> None:
    """Check an optimizer's states, whose file numbers the weights and does not name them."""
    try:
        content = pickles.load(path, trust)
    except pickles.Unreadable as reason:
        saved.wrong("unreadable", f"{path.name} cannot be read: {reason}.", [path.name])
        return
    states = content.get("state") if isinstance(content, dict) else None
    if not isinstance(states, dict) or not isinstance(content.get("param_groups"), list):
        saved.unchecked.append(f"the optimizer states in {path.name}, whose layout is unknown")
        return
    numbers = [number for group in content["param_groups"] for number in group.get("params", [])]
    kinds = {
        number: frozenset(kind for kind, value in state.items() if isinstance(value, torch.Tensor) and value.ndim)
        for number, state in states.items()
        if isinstance(state, dict)
    }
    most = frozenset().union(*kinds.values()) if kinds else frozenset()
    lacking = [number for number in numbers if kinds.get(number, frozenset()) != most]
    if most and lacking:
        saved.note(
            "optimizer",
            f"{len(lacking)} of the {len(numbers)} weights in {path.name} do not have the states "
            f"{', '.join(sorted(most))}. Adam has none for a weight that never had a gradient.",
            [f"weight {number}" for number in lacking],
        )
    shapes = {tuple(tensor.shape) for tensor in saved.tensors.values()}
    for number, state in states.items():
        for kind, value in state.items() if isinstance(state, dict) else ():
            if isinstance(value, torch.Tensor) and value.ndim:
                key = f"weight {number}/{kind}"
                saved.states[key] = in_memory(key, value, path.name)
    own = {tuple(state.shape) for name, state in saved.states.items() if name.rpartition("/")[2].startswith("exp_avg")}
    if shapes and (foreign := own - shapes):
        listed = names_text(str(list(shape)) for shape in foreign)
        saved.wrong("optimizer", f"{path.name} has states of shapes that no weight has ({listed}).", [path.name])
