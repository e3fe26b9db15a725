"""Read a checkpoint of torch.distributed.checkpoint (DCP), which FSDP2 writes, and check that it is complete."""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from itertools import combinations, starmap
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..engines.readback.dtypes import dtype_name
from . import consistency, pickles
from .content import Kind, OptimizerFacts, Saved, Tensor, names_text

METADATA = ".metadata"
_OPTIMIZER = {"optimizer", "optim", "optimizers", "optimizer_state", "optim_state"}
_MODEL = {"model", "models", "module", "state_dict", "model_state_dict", "app"}
_GROUPS = "param_groups"
_MOST_PAIRS = 2000  # of parts of one tensor that are compared with one another


def is_one(folder: Path) -> bool:
    return (folder / METADATA).is_file()


class _Storage(NamedTuple):
    """Where the entries of a checkpoint are."""

    folder: Path
    trust: bool
    places: dict[str, list[tuple[Any, Any]]]  # an entry -> index and place of each of its parts
    is_whole: dict[str, bool]  # a file -> whether it has all that the metadata says
    groups: dict[str, dict[str, Any]]  # of the optimizer: a group or a weight -> its settings


def read(folder: Path, trust: bool) -> Saved:
    """Read the checkpoint in a folder that has a file `.metadata`, and check it."""
    saved = Saved(folder, "DCP")
    try:
        metadata = pickles.load_metadata(folder / METADATA, trust)
        entries, stored = metadata.state_dict_metadata, metadata.storage_data or {}
    except (pickles.Unreadable, AttributeError) as reason:
        saved.wrong("unreadable", f"{METADATA} cannot be read: {reason}.", [METADATA])
        return saved
    storage = _Storage(folder, trust, defaultdict(list), _check_files(saved, stored), defaultdict(dict))
    for index, info in stored.items():
        storage.places[index.fqn].append((index, info))
    paths = getattr(metadata, "planner_data", None) or {}
    lost = []
    for name, entry in entries.items():
        path = _path(paths.get(name, name) if isinstance(paths, dict) else name)
        add = _add_tensor if hasattr(entry, "chunks") else _check_value
        if add(saved, storage, name, path, entry):
            lost.append(name)
    if lost:
        saved.wrong("partial", "Parts of these tensors are in files that are missing or damaged.", lost)
    check_states(saved, saved.tensors)
    _read_steps(saved, [*storage.groups.values()])
    return saved


def _check_files(saved: Saved, stored: dict[Any, Any]) -> dict[str, bool]:
    """Return for each file that the metadata lists whether it is whole, and report those that are not."""
    needs: dict[str, int] = defaultdict(int)  # a file -> the number of bytes that it has at least
    for info in stored.values():
        needs[info.relative_path] = max(needs[info.relative_path], info.offset + info.length)
    saved.format = f"DCP, {len(needs)} file{'s' * (len(needs) != 1)}"
    is_whole = {name: _check_file(saved, saved.folder, name, need) for name, need in sorted(needs.items())}
    extra = {path.relative_to(saved.folder).as_posix() for path in saved.folder.rglob("*.distcp")} - needs.keys()
    if extra:
        saved.wrong("shards", f"{METADATA} does not list these files, so another training wrote them.", extra)
    return is_whole


def _check_value(saved: Saved, storage: _Storage, name: str, path: list[str], entry: Any) -> bool:
    """Check an entry that is not a tensor. Return whether the file that has it is missing or damaged."""
    del entry  # which says nothing of such a value
    place = next((info for _, info in storage.places[name]), None)
    if place is None:
        return False
    is_lost = storage.is_whole.get(place.relative_path) is False
    if not is_lost:
        try:
            pickles.check_bytes(_bytes_of(storage.folder, place))
        except pickles.Unreadable as reason:
            saved.wrong("unreadable", f"{name} in {place.relative_path} cannot be read: {reason}.", [name])
    _, short = _role(path)
    if short in ("step", "global_step", "epoch_step") and len(path) == 1:
        saved.step = _number(storage.folder, place, storage.trust)
    if short.startswith(_GROUPS) and not is_lost:
        with contextlib.suppress(pickles.Unreadable):
            group, _, key = short.rpartition(".")
            storage.groups[group][key] = _load_part(storage.folder, place, storage.trust)
    return is_lost


def _add_tensor(saved: Saved, storage: _Storage, name: str, path: list[str], entry: Any) -> bool:
    """Add a tensor, or report why it cannot be read. Return whether a file that has a part is missing or damaged."""
    chunks = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
    shape = tuple(entry.size)
    if problem := _coverage(shape, chunks):
        saved.wrong(_kind_of_problem(shape, chunks), f"{name}: {problem}.", [name])
        return False
    infos = {tuple(index.offset or ()): info for index, info in storage.places[name]}
    if any(offsets not in infos for offsets, _ in chunks if shape):
        saved.wrong("partial", f"{METADATA} does not name the file that contains a part of {name}.", [name])
        return False
    if any(not storage.is_whole[info.relative_path] for info in infos.values()):
        return True
    if any(getattr(info, "transform_descriptors", None) for info in infos.values()):
        saved.unchecked.append(f"the values of {name}, which were compressed")
        return False
    is_state, short = _role(path)
    (saved.states if is_state else saved.tensors)[short] = _tensor(
        storage.folder, short, shape, entry.properties.dtype, chunks, infos, storage.trust
    )
    return False


def _kind_of_problem(shape: tuple[int, ...], chunks: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> Kind:
    if not math.prod(shape):
        return "shards"
    return "partial" if any(math.prod(sizes) for _, sizes in chunks) else "empty"


def _read_steps(saved: Saved, groups: list[dict[str, Any]]) -> None:
    """Read the optimizer's counters, and compare them with the step that the checkpoint says."""
    has_groups = bool(groups) or any(name.startswith(_GROUPS) for name in saved.states)
    steps: dict[str, float] = {}
    for name, state in saved.states.items():
        weight, _, kind = name.rpartition("/")
        if kind == "step" and weight and state.size == 1:
            with contextlib.suppress(pickles.Unreadable, OSError, RuntimeError, ValueError):  # check_values reports it
                if (step := consistency.number_of(state.read())) is not None:
                    steps[weight] = step
    if not any(name.endswith(("/exp_avg", "/exp_avg_sq", "/momentum_buffer")) for name in saved.states):
        return
    file = "The optimizer's part"
    saved.optimizer = OptimizerFacts(file, steps, len(steps), [], needs_states=True, groups=groups)
    if not has_groups:
        saved.wrong("optimizer", f"{file} has no groups, so its learning rate is lost and resuming fails.", [_GROUPS])
    updates = consistency.updates_of(saved)
    # A script may count from 0, or count batches.
    if saved.step and updates is not None and updates > saved.step + 1:
        saved.wrong(
            "optimizer", f"The optimizer was updated {updates} times, but the checkpoint is of step {saved.step}.",
            ["step"],
        )  # fmt: skip


def _path(name: Any) -> list[str]:
    return [str(part) for part in name] if isinstance(name, tuple | list) else [str(name)]


def _role(path: list[str]) -> tuple[bool, str]:
    """Return whether an entry is a state of the optimizer, and its name without the names of its sections."""
    if len(path) == 1:  # a flat dictionary: only the name can tell
        first, _, remainder = path[0].partition(".")
        path = [first, *remainder.split(".")] if remainder and first in _OPTIMIZER else path
    inner = path
    while len(inner) > 1 and inner[0] in _MODEL:
        inner = inner[1:]
    if len(inner) > 1 and inner[0] in _OPTIMIZER:
        inner = inner[1:] if len(inner) > 2 else inner[1].split(".")  # torch can join the names of states by dots
        if len(inner) > 2 and inner[0] == "state":
            return True, f"{'.'.join(inner[1:-1])}/{inner[-1]}"
        return True, ".".join(inner)
    return False, ".".join(inner)


def _check_file(saved: Saved, folder: Path, name: str, need: int) -> bool:
    """Return whether a file is there and as long as the metadata says, and report it if it is not."""
    path = folder / name
    if Path(name).is_absolute() or ".." in Path(name).parts:
        saved.wrong("shards", f"{METADATA} names a file outside the checkpoint's folder, which is not read.", [name])
        return False
    if not path.is_file():
        saved.wrong("shards", f"{name} is missing, although {METADATA} lists it.", [name])
        return False
    if path.stat().st_size < need:
        saved.wrong(
            "unreadable",
            f"{name} has {path.stat().st_size} bytes, but {METADATA} lists contents up to byte {need}. It was cut off.",
            [name],
        )
        return False
    return True


def _coverage(shape: tuple[int, ...], chunks: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> str | None:
    """Return what is wrong with the parts of a tensor: gaps, overlaps or parts outside it. None if nothing is."""
    if not chunks:
        return None if not math.prod(shape) else "no part of it was saved"
    for offsets, sizes in chunks:
        if len(offsets) != len(shape) or any(o + s > whole for o, s, whole in zip(offsets, sizes, shape, strict=True)):
            return f"a part at {list(offsets)} of size {list(sizes)} is outside the tensor of size {list(shape)}"
    volume = sum(math.prod(sizes) for _, sizes in chunks)
    if volume < math.prod(shape):
        return f"its parts have {volume} of {math.prod(shape)} elements"
    pairs = combinations(chunks, 2) if len(chunks) <= _MOST_PAIRS else ()
    overlaps = volume > math.prod(shape) or any(starmap(_overlap, pairs))
    return "its parts overlap, so other parts are missing, or parts of two trainings are mixed" if overlaps else None


def _overlap(a: Any, b: Any) -> bool:
    return bool(a[0]) and all(
        max(x, y) < min(x + x_width, y + y_width) for x, x_width, y, y_width in zip(*a, *b, strict=True)
    )


def _tensor(
    folder: Path, name: str, shape: tuple[int, ...], dtype: torch.dtype, chunks: Any, infos: Any, trust: bool
) -> Tensor:
    def whole() -> torch.Tensor:
        values = torch.empty(shape, dtype=dtype)
        for offsets, sizes in chunks:
            info = infos[offsets] if offsets in infos else next(iter(infos.values()))
            part = _load_part(folder, info, trust)
            if not isinstance(part, torch.Tensor):
                raise pickles.Unreadable(f"{info.relative_path} has no tensor where {METADATA} says that {name} is")
            if tuple(part.shape) != sizes or part.dtype != dtype:
                raise pickles.Unreadable(
                    f"{info.relative_path} has a part of {name} of shape {list(part.shape)} and type "
                    f"{dtype_name(part.dtype)}, but {METADATA} says {list(sizes)} and {dtype_name(dtype)}"
                )
            values[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))] = part
        return values

    files = names_text({info.relative_path for info in infos.values()})
    return Tensor(name, shape, dtype_name(dtype), files, whole)


def _load_part(folder: Path, info: Any, trust: bool) -> Any:
    return pickles.load_bytes(_bytes_of(folder, info), info.relative_path, trust)


def _bytes_of(folder: Path, info: Any) -> bytes:
    try:
        with open(folder / info.relative_path, "rb") as file:
            file.seek(info.offset)
            return file.read(info.length)
    except (OSError, ValueError) as error:
        raise pickles.Unreadable(getattr(error, "strerror", None) or str(error)) from None


def _number(folder: Path, info: Any, trust: bool) -> int | None:
    try:
        value = _load_part(folder, info, trust)
    except pickles.Unreadable:
        return None
    return int(value) if isinstance(value, int | float) else None


def check_states(saved: Saved, weights: dict[str, Tensor]) -> None:
    """Report optimizer states that do not fit each other or the weights."""
    kinds: dict[str, set[str]] = defaultdict(set)
    for name, state in saved.states.items():
        weight, _, kind = name.rpartition("/")
        if not weight:
            continue
        kinds[weight].add(kind)
        own = weights.get(weight)
        if own is not None and len(state.shape) == len(own.shape) and state.shape != own.shape:
            saved.wrong(
                "optimizer",
                f"{kind} of {weight} has the shape {list(state.shape)}, but the weight has {list(own.shape)}.",
                [weight],
            )
    # An optimizer's own state_dict numbers the weights.
    if weights and (unknown := [weight for weight in kinds if weight not in weights and not weight.isdecimal()]):
        saved.wrong("optimizer", "The optimizer has states of weights that were not saved.", unknown)
    most = set().union(*kinds.values()) if kinds else set()
    lacking = [weight for weight, own in kinds.items() if own != most]
    if lacking:
        saved.wrong("optimizer", f"These weights do not have all of the states {', '.join(sorted(most))}.", lacking)
