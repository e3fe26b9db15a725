"""Read folders with files of weights, as written by transformers, PEFT, and accelerate's `save_state`."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ..errors import Refusal
from . import consistency, foreign, invariants, pickles
from .content import Saved, Tensor, add_numbered_states, in_memory, names_text
from .values import same, values_of

CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"
_ADAPTER_FILES = ("adapter_model.safetensors", "adapter_model.bin")  # in the order in which PEFT looks for them
_MODEL_FILES = (  # in the order in which transformers looks for them
    "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json",
)  # fmt: skip
_VARIANT = re.compile(
    r"(?:model|pytorch_model)\.(?:(?!safetensors\.|bin\.)([\w-]+)\.(?:safetensors|bin)|"
    r"(?:safetensors|bin)\.index\.([\w-]+)\.json)"
)
_SHARD = re.compile(r"(?:model|pytorch_model|adapter_model)(?:\.[\w-]+)?-(\d+)-of-(\d+)\.(?:safetensors|bin)")
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
    """Return whether a folder has files of weights, or the configuration of a model or an adapter."""
    names = [path.name for path in folder.iterdir() if path.is_file()]
    file_names, patterns = (*_MODEL_FILES, *_ADAPTER_FILES, ADAPTER_CONFIG), (_SHARD, _INDEX, _VARIANT)
    if any(name in file_names or any(pattern.fullmatch(name) for pattern in patterns) for name in names):
        return True
    return CONFIG in names and _is_of_model(folder / CONFIG)


def _is_of_model(path: Path) -> bool:
    """Return whether a config.json describes a model. Other programs also call their settings so."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return True  # damaged, which is reported
    return isinstance(content, dict) and bool({"model_type", "architectures", "auto_map"} & content.keys())


def read(folder: Path, trust: bool) -> Saved:
    """Read the weights in a folder. If it holds an adapter, the weights of the base model are not read."""
    saved = Saved(folder, "Hugging Face")
    files = {path.name: path for path in sorted(folder.iterdir()) if path.is_file()}
    saved.is_adapter = ADAPTER_CONFIG in files or any(name.startswith("adapter_model") for name in files)
    saved.format = "PEFT adapter" if saved.is_adapter else saved.format
    saved.config = _read_config(saved, files.get(ADAPTER_CONFIG if saved.is_adapter else CONFIG))
    _read_tensors(saved, files, trust)
    if saved.is_adapter and CONFIG in files and (whole := [name for name in _MODEL_FILES if name in files]):
        base = str((saved.config or {}).get("base_model_name_or_path"))
        if folder.resolve() not in (Path(base).resolve(), (folder / base).resolve()):
            saved.wrong(
                "different", f"There is a whole model next to the adapter. from_pretrained ignores {whole[0]} and "
                "loads the adapter with its base model. Move one of them to another folder.", whole,
            )  # fmt: skip
    if further := [name for name in files if _FURTHER.fullmatch(name)]:
        saved.unchecked.append(f"the further models of accelerate's save_state ({names_text(further)})")
    saved.step = _step(files.get("trainer_state.json"))
    saved.format += "" if saved.step is None else f", step {saved.step}"
    for name in _OPTIMIZERS:
        if name in files:
            _read_optimizer(saved, files[name], trust)
    return saved


def _read_tensors(saved: Saved, files: dict[str, Path], trust: bool) -> None:
    """Read the weights that the loader reads, and compare them with others in the folder."""
    # Of several sets of weights in a folder, the loader reads the first. transformers and PEFT prefer safetensors, and
    # one whole file to shards. They read a variant only if it is named.
    order = _ADAPTER_FILES if saved.is_adapter else _MODEL_FILES
    configured = None if saved.is_adapter else (saved.config or {}).get("transformers_weights")
    names = [configured, *(name for name in order if name != configured)]
    set_names = [name for name in names if isinstance(name, str) and name in files]
    sets = set_names or ([] if saved.is_adapter else _variants(saved, files))
    if sets:
        _read_set(saved, files, sets[0], trust)
        _compare_sets(saved, files, sets, trust)
    elif shards := [name for name in files if _SHARD.fullmatch(name)]:
        saved.wrong("shards", "There are shards, but no index file, so from_pretrained cannot load them.", shards)
        _read_shards(saved, files, {}, shards, trust)
    else:
        saved.wrong("missing", "The folder has a configuration, but no file of weights.", ["model.safetensors"])


def _variants(saved: Saved, files: dict[str, Path]) -> list[str]:
    """Return the variants of a folder that has no other weights, and say how the first one is loaded."""
    variants = [name for name in files if _VARIANT.fullmatch(name) and not _SHARD.fullmatch(name)]
    variants.sort(key=lambda name: (".bin" in name, "index" in name, name))
    if variants:
        variant = next(part for part in _VARIANT.fullmatch(variants[0]).groups() if part)  # type: ignore[union-attr]
        saved.note("shards", f'from_pretrained only loads {variants[0]} with variant="{variant}".', variants[:1])
    return variants


def _read_set(saved: Saved, files: dict[str, Path], name: str, trust: bool) -> None:
    """Read a file of weights, or an index and its shards."""
    if not name.endswith(".json"):
        _add(saved, _headers(saved, files[name], trust))
        return
    stem, _, extension = name.partition(".")  # a variant's index is model.safetensors.index.fp16.json
    variant = extension.partition(".index")[2].removesuffix("json").rstrip(".")
    shards = [shard for shard in files if _SHARD.fullmatch(shard) and shard.startswith(f"{stem}{variant}-")]
    path = files[name]
    index = _read_config(saved, path)
    weight_map = {} if index is None else dict(index.get("weight_map") or {})
    if index is not None and not weight_map:
        saved.wrong("unreadable", f"{path.name} has no weight_map.", [path.name])
    _read_shards(saved, files, weight_map, shards, trust)


def _compare_sets(saved: Saved, files: dict[str, Path], sets: list[str], trust: bool) -> None:
    """Report other weights in the folder, which the loader ignores. It is a fault if their values differ."""
    loader = "PEFT" if saved.is_adapter else "transformers"
    for name in sets[1:]:
        ignored = Saved(saved.folder, saved.format)
        with contextlib.suppress(Refusal):  # a file that is not loaded need not be trusted
            _read_set(ignored, files, name, trust)
        if {tensor.file for tensor in ignored.tensors.values()} == {sets[0]}:
            continue  # an index of one whole file
        different = [key for key in saved.tensors.keys() & ignored.tensors.keys() if _is_other(saved, ignored, key)]
        if different:
            saved.wrong(
                "different",
                f"There are two models in the folder: {loader} loads {sets[0]} and ignores {name}, which "
                "has different values. Remove the model that is out of date.",
                different,
            )
        else:
            saved.note("shards", f"{loader} loads {sets[0]} and ignores {name}.", [name])


def _is_other(saved: Saved, ignored: Saved, name: str) -> bool:
    """Return whether two tensors of the same name differ by more than the rounding of the narrower type."""
    ours, theirs = values_of(saved.tensors[name]), values_of(ignored.tensors[name])
    if ours is None or theirs is None:
        return False
    if ours.shape != theirs.shape:
        return True
    if ours.dtype == theirs.dtype:
        return not same(ours, theirs)
    if not (ours.is_floating_point() and theirs.is_floating_point()):
        return False
    narrow = min(ours.dtype, theirs.dtype, key=lambda dtype: (torch.finfo(dtype).bits, -torch.finfo(dtype).eps))
    return not torch.allclose(ours.to(narrow).float(), theirs.to(narrow).float(), rtol=0.02, equal_nan=True)


def _read_config(saved: Saved, path: Path | None) -> dict[str, Any] | None:
    if path is None:
        return None
    try:
        return foreign.read_object(path)
    except foreign.Unusual as reason:
        saved.wrong("unreadable", f"{path.name} {reason}.", [path.name])
        return None


def _step(path: Path | None) -> int | None:
    try:
        return int(foreign.read_object(path)["global_step"]) if path else None
    except foreign.Unusual:
        return None  # consistency.py reports it


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


def _read_shards(
    saved: Saved, own: dict[str, Path], weight_map: dict[str, str], shards: list[str], trust: bool
) -> None:
    """Read shards. The `weight_map` of their index is empty if the folder has no index."""
    listed = set(weight_map.values())
    headers = {name: _headers(saved, own[name], trust) for name in shards}
    headers |= {name: _headers(saved, own[name], trust) for name in listed & own.keys() - {*shards}}
    if missing := listed - own.keys():
        lost = [name for name, file in weight_map.items() if file in missing]
        saved.wrong("shards", "The index lists files that are not in the folder.", missing)
        saved.wrong("missing", "These tensors are in missing files.", lost)
    if weight_map and (extra := headers.keys() - listed):
        saved.wrong("shards", "These files are not in the index, so another save left them.", extra)
    _check_counts(saved, shards)
    _check_places(saved, weight_map, headers)
    for file, tensors in headers.items():
        if weight_map and file not in listed:
            continue
        if weight_map and (unlisted := tensors.keys() - weight_map.keys()):
            saved.wrong("unexpected", f"These tensors are in {file}, but not in the index.", unlisted)
        _add(saved, tensors)


def _check_places(saved: Saved, weight_map: dict[str, str], headers: dict[str, dict[str, Tensor]]) -> None:
    """Check that each tensor is in the file that the index says, if this file can be read."""
    broken = {name for finding in saved.findings if finding.kind == "unreadable" for name in finding.names}
    wrong_place: dict[str, list[str]] = defaultdict(list)
    for name, file in weight_map.items():
        if file in headers and file not in broken and name not in headers[file]:
            wrong_place[file].append(name)
    for file, names in wrong_place.items():
        saved.wrong("missing", f"The index says that these tensors are in {file}, but they are not.", names)


def _check_counts(saved: Saved, shards: list[str]) -> None:
    """Check that the numbers in the names of the shards belong together: 00001-of-00003."""
    numbers = [tuple(map(int, match.groups())) for name in shards if (match := _SHARD.fullmatch(name))]
    totals = sorted({total for _, total in numbers})
    if len(totals) > 1:
        saved.wrong(
            "shards", f"The files belong to several saves, which have {names_text(map(str, totals))} shards.", shards
        )


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
    saved.optimizer = consistency.facts_of(path.name, content)
    invariants.check_numbers(saved, path.name, (state for state in states.values() if isinstance(state, dict)))
    invariants.check_ids(saved, path.name, saved.optimizer.groups, states)
    add_numbered_states(saved, states, path.name)
    numbers = [number for group in content["param_groups"] for number in group.get("params", [])]
    _check_kinds(saved, path.name, states, numbers)
    if not any("rank" in group for group in content["param_groups"]):  # GaLore's moments are smaller
        _check_shapes(saved, path.name)


def _check_kinds(saved: Saved, file: str, states: dict[Any, Any], numbers: list[Any]) -> None:
    """Note the weights that lack states which others have."""
    kinds = {
        number: frozenset(kind for kind, value in state.items() if isinstance(value, torch.Tensor) and value.ndim)
        for number, state in states.items()
        if isinstance(state, dict)
    }
    most = frozenset().union(*kinds.values()) if kinds else frozenset()
    lacking = [number for number in numbers if kinds.get(number, frozenset()) != most]
    is_factored = any(kind.endswith(("_row", "_col")) for kind in most)  # Adafactor's states depend on the shape
    if most and lacking and not is_factored:
        saved.note(
            "optimizer",
            f"{len(lacking)} of the {len(numbers)} weights in {file} do not have the states "
            f"{', '.join(sorted(most))}. Adam has no states for a weight that never had a gradient.",
            [f"weight {number}" for number in lacking],
        )


def _check_shapes(saved: Saved, file: str) -> None:
    """Check that there is a weight of the shape of each moment."""
    shapes = {tuple(tensor.shape) for tensor in saved.tensors.values()}
    moments = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    own = {tuple(state.shape) for name, state in saved.states.items() if name.rpartition("/")[2] in moments}
    # transformers saves the matrices of experts one by one, although the model has one tensor of them.
    single = {math.prod(shape) for shape in shapes if len(shape) > 1}
    unlike = {shape for shape in own - shapes if len(shape) < 3 or not any(_is_stack(shape, size) for size in single)}
    if shapes and unlike:
        listed = names_text(str(list(shape)) for shape in unlike)
        saved.wrong("optimizer", f"{file} has states of shapes that no weight has ({listed}).", [file])


def _is_stack(shape: tuple[int, ...], size: int) -> bool:
    """Return whether a tensor has the size of several stacked matrices."""
    return size > 0 and math.prod(shape) > size and math.prod(shape) % size == 0
