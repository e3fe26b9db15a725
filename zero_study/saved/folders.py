"""Find all saved models and checkpoints in a folder, and read and check each of them."""

from __future__ import annotations

import math
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from .. import terminal
from ..errors import Refusal
from . import checks, consistency, dcp, deepspeed_zero, expected, foreign, hugging_face, universal
from .content import Saved

_DEEPEST = 4  # levels of folders below the one that is named
_LONGEST_NAME = 255
_LATEST = ("latest", "latest_universal")
_NUMBERED = re.compile(r"(?:pytorch_model_fsdp|optimizer)_(\d+)")
_PART = re.compile(r"global_step\d+.*|pytorch_model.*|optimizer_\d+")  # of a checkpoint that has a model's files, too
_STEP = re.compile(r"(?:global_step|checkpoint-|step-)(\d+)(?:_universal)?")


def read(folder: Path, trust: bool = False, model: Path | None = None) -> list[Saved]:
    """Read and check every saved model and checkpoint in a folder.

    `trust` also loads pickle files that run code. `model` is a folder with the config.json of the model, or of an
    adapter's base model. Raises Refusal if the folder has no known format, or if a pickle would run code.
    """
    if not folder.exists():
        raise Refusal(f"{folder}: this folder does not exist. Name the folder of a checkpoint or of a saved model.")
    if not folder.is_dir():
        raise Refusal(f"{folder}: this is a file. Name the folder that contains this file.")
    config = None if model is None else _config_of(model)
    saved = _find(folder, trust, _DEEPEST)
    if not saved:
        raise Refusal(
            f"{folder}: this folder has no checkpoint of a known kind. Name a checkpoint of DeepSpeed "
            "(ZeRO-0 to 3 or universal) or of DCP, or a folder of transformers, PEFT or accelerate."
        )
    saved, shared_config = _without_descriptions(saved)
    for saved_part in saved:
        with foreign.guarded(saved_part, "The values of the tensors"):
            checks.check_values(saved_part)
        with foreign.guarded(saved_part, "The names and shapes of the tensors"):
            if saved_part.is_adapter:
                checks.check_adapter(saved_part, config)
            elif saved_part.tensors:
                checks.check_model(
                    saved_part, saved_part.config or config or shared_config or _config_above(saved_part.folder)
                )
    _check_separate_states(saved)
    consistency.check(saved, folder, trust)
    return saved


def is_checkpoint(folder: Path) -> bool:
    """Return whether a folder itself is a checkpoint or a saved model."""
    is_of_engine = any(recognizes(folder) for recognizes, _ in _READERS)
    return is_of_engine or hugging_face.is_one(folder) or any((folder / name).is_file() for name in _LATEST)


def _config_of(model: Path) -> dict[str, Any]:
    """Return the config.json of --model. Raises Refusal."""
    try:
        config = expected.find_config(str(model), model)
        if config is None:
            raise Refusal(
                f"--model {model}: this folder has no config.json. Name the folder with the model's config.json."
            )
        foreign.validate(hugging_face.CONFIG, config)
    except Refusal:
        raise
    except (OSError, ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0] if isinstance(error, foreign.Unusual) else "is not valid JSON"
        raise Refusal(f"--model {model}: its config.json {reason}. Name another folder.") from None
    return config


def _without_descriptions(saved: list[Saved]) -> tuple[list[Saved], dict[str, Any] | None]:
    """Return the saved models, and the configuration that they share with an engine's checkpoint.

    If a configuration without weights belongs to weights that have none of their own, it is not an incomplete model and
    is left out.
    """
    models = [saved_part for saved_part in saved if saved_part.config is not None and not saved_part.is_adapter]
    shared_config = models[0].config if models else None
    weights = [saved_part for saved_part in saved if saved_part.tensors]
    lacks_weights = len(models) == 1 and {finding.kind for finding in models[0].findings} == {"missing"}
    if lacks_weights and weights and all(saved_part.config is None for saved_part in weights):
        saved = [saved_part for saved_part in saved if saved_part is not models[0]]
    return saved, shared_config


def _check_separate_states(saved: list[Saved]) -> None:
    """Check accelerate's optimizer_0 against pytorch_model_fsdp_0, which has the weights."""
    weights = {
        match[1]: saved_part
        for saved_part in saved
        if (match := _NUMBERED.fullmatch(saved_part.folder.name)) and saved_part.tensors
    }
    for saved_part in saved:
        match = _NUMBERED.fullmatch(saved_part.folder.name)
        if match and saved_part.states and not saved_part.tensors and match[1] in weights:
            dcp.check_states(saved_part, weights[match[1]].tensors)


def _config_above(folder: Path) -> dict[str, Any] | None:
    """Return the config.json beside a checkpoint's folder."""
    path = folder.parent / hugging_face.CONFIG
    try:
        return foreign.read_object(path) if path.is_file() else None
    except foreign.Unusual:
        return None


def _is_inside(folder: Path, path: Path) -> bool:
    """Return whether a path is a folder in another folder."""
    try:
        return path.is_dir() and folder.resolve() in path.resolve().parents
    except (OSError, ValueError):  # no path can have this name
        return False


_READERS: list[tuple[Callable[[Path], bool], Callable[[Path, bool], Saved]]] = [
    (universal.is_one, universal.read),
    (deepspeed_zero.is_one, deepspeed_zero.read),
    (dcp.is_one, dcp.read),
]


def _find(folder: Path, trust: bool, depth: int) -> list[Saved]:
    """Read a folder and the folders in it. If it has checkpoints of several steps, only the newest is read."""
    for recognizes, reader in _READERS:
        if recognizes(folder):
            return [_read(reader, folder, trust)]
    if any(path.suffix == ".distcp" for path in folder.iterdir()):
        unfinished = Saved(folder, "DCP")
        unfinished.wrong("shards", "There are .distcp files, but no .metadata, so saving did not end.", [dcp.METADATA])
        return [unfinished]
    model = _read(hugging_face.read, folder, trust) if hugging_face.is_one(folder) else None
    lost, chosen, unread = _chosen(folder, model is not None)
    inner = [saved_part for path in chosen if depth for saved_part in _find(path, trust, depth - 1)]
    if unread and inner:
        named = terminal.names([path.name for path in unread], 3)
        inner[-1].unchecked.append(f"the values of {named}, because only one step is read")
        if damaged := [file for path in unread for file in sorted(path.rglob("*")) if _is_damaged(file)]:
            text = "These files of a step that was not read are truncated or empty, so it cannot be resumed."
            inner[-1].wrong("unreadable", text, [file.relative_to(folder).as_posix() for file in damaged])
    if not (model or lost or inner) and (file := next(filter(_is_optimizer, sorted(folder.iterdir())), None)):
        model = Saved(folder, "a checkpoint without its model")
        model.wrong("missing", f"There is {file.name}, but no file with the weights of the model.", [file.name])
    return [*([model] if model else []), *lost, *inner]


def _is_damaged(path: Path) -> bool:
    """Return whether a file with tensors is empty or truncated, without reading its values."""
    if path.suffix not in (".safetensors", ".pt", ".pth", ".bin", ".distcp"):
        return False
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, "pt"):
                return False
        with open(path, "rb") as file:
            start = file.read(4)
    except (OSError, SafetensorError):
        return True
    return not start or (start == b"PK\x03\x04" and not zipfile.is_zipfile(path))


def _is_optimizer(path: Path) -> bool:
    return path.name in ("optimizer.pt", "optimizer.bin")


def _read(reader: Callable[[Path, bool], Saved], folder: Path, trust: bool) -> Saved:
    """Read one checkpoint. Contents that its reader does not expect become a finding."""
    results: list[Saved] = []
    unread = Saved(folder, "unknown format")
    with foreign.guarded(unread, "The files"):
        results.append(reader(folder, trust))
    return results[0] if results else unread


def _folders_in(folder: Path, has_model: bool) -> list[Path]:
    folders = [path for path in sorted(folder.iterdir()) if path.is_dir() and not path.name.startswith(".")]
    return [path for path in folders if _PART.fullmatch(path.name)] if has_model else folders


def _chosen(folder: Path, has_model: bool) -> tuple[list[Saved], list[Path], list[Path]]:
    """Return what is wrong with the file `latest`, the folders in a folder to read, and those of other steps.

    The folders to read are those of one step, and those that are of no step. If the folder has a model's files itself,
    only the folders of an engine's checkpoint are read.
    """
    folders = _folders_in(folder, has_model)
    steps = {path: int(match[1]) for path in folders if (match := _STEP.fullmatch(path.name))}
    chosen = [path for path in folders if path not in steps]
    lost: list[Saved] = []
    for name in _LATEST:
        if not (folder / name).is_file():
            continue
        tag = (folder / name).read_text(errors="replace")[:_LONGEST_NAME].strip()
        target = folder / tag
        if _is_inside(folder, target):
            others = [path for path in steps if path != target]
            later = [path for path in others if steps[path] > steps.get(target, math.inf)]
            if whole := [path.name for path in later if _contents(path) >= _contents(target)]:
                lost.append(Saved(folder, f"the file {name}"))
                text = f"{name} names {tag}, but {whole[-1]} is a whole checkpoint too, so resuming loses its steps."
                lost[-1].wrong("missing", text, whole)
            return lost, [*(path for path in chosen if path != target), target], others
        lost.append(Saved(folder, f"the file {name}"))
        lost[-1].wrong("missing", f"{name} names the folder {tag}, which does not exist, so resuming fails.", [tag])
    in_order = sorted(steps, key=lambda path: steps[path])
    return lost, [*chosen, *in_order[-1:]], in_order[:-1]


def _contents(folder: Path) -> set[Path]:
    return {path.relative_to(folder) for path in folder.rglob("*")}
