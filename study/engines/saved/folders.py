"""Find the saved models in a folder of any kind, and read and check each of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...errors import Refusal
from . import checks, dcp, deepspeed_zero, expected, hugging_face, universal
from .content import Saved

_DEEPEST = 3  # levels of folders below the one that is named
_LATEST = ("latest", "latest_universal")
_NUMBERED = re.compile(r"(?:pytorch_model_fsdp|optimizer)_(\d+)")
_PART = re.compile(r"global_step\d+.*|pytorch_model.*|optimizer_\d+")  # of a checkpoint that has a model's files, too
_STEP = re.compile(r"(?:global_step|checkpoint-|step-)(\d+)(?:_universal)?")


def read(folder: Path, trust: bool = False, model: Path | None = None) -> list[Saved]:
    """Read and check everything that was saved in a folder.

    `trust` also loads pickle files that run code. `model` is a folder with the config.json of the model, or of an
    adapter's base model. Raises Refusal if the folder has nothing that is known, or if a pickle would run code.
    """
    if not folder.exists():
        raise Refusal(f"{folder}: there is no such folder. Name the folder of a checkpoint or of a saved model.")
    if not folder.is_dir():
        raise Refusal(f"{folder}: this is a file. Name the folder that it is in.")
    config = None if model is None else expected.find_config(str(model), model)
    if model is not None and config is None:
        raise Refusal(f"--model {model}: this folder has no config.json. Name the folder that has the model's.")
    saved = _find(folder, trust, _DEEPEST)
    if not saved:
        raise Refusal(
            f"{folder}: there is no checkpoint here that is known. Known are DeepSpeed's checkpoints (ZeRO-0 to 3 and "
            "universal), DCP, and folders of transformers, PEFT and accelerate."
        )
    saved, beside = _without_descriptions(saved)
    for each in saved:
        checks.check_values(each)
        if each.is_adapter:
            checks.check_adapter(each, config)
        elif each.tensors:
            checks.check_model(each, each.config or config or beside or _config_above(each.folder))
    _check_separate_states(saved)
    return saved


def _without_descriptions(saved: list[Saved]) -> tuple[list[Saved], dict[str, Any] | None]:
    """Return the saved models, and the configuration that describes an engine's checkpoint.

    A configuration without weights is not an incomplete model if it belongs to weights that have none of their own.
    """
    models = [each for each in saved if each.config is not None and not each.is_adapter]
    beside = models[0].config if models else None
    weights = [each for each in saved if each.tensors]
    lacks_weights = len(models) == 1 and {finding.kind for finding in models[0].findings} == {"missing"}
    if lacks_weights and weights and all(each.config is None for each in weights):
        saved = [each for each in saved if each is not models[0]]
    return saved, beside


def _check_separate_states(saved: list[Saved]) -> None:
    """Check accelerate's optimizer_0 against pytorch_model_fsdp_0, which has the weights."""
    weights = {match[1]: each for each in saved if (match := _NUMBERED.fullmatch(each.folder.name)) and each.tensors}
    for each in saved:
        match = _NUMBERED.fullmatch(each.folder.name)
        if match and each.states and not each.tensors and match[1] in weights:
            dcp.check_states(each, weights[match[1]].tensors)


def _config_above(folder: Path) -> dict[str, Any] | None:
    """Return the config.json beside a checkpoint's folder."""
    path = folder.parent / hugging_face.CONFIG
    try:
        content = json.loads(path.read_bytes()) if path.is_file() else None
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


_READERS: list[tuple[Callable[[Path], bool], Callable[[Path, bool], Saved]]] = [
    (universal.is_one, universal.read),
    (deepspeed_zero.is_one, deepspeed_zero.read),
    (dcp.is_one, dcp.read),
]


def _find(folder: Path, trust: bool, depth: int) -> list[Saved]:
    """Read a folder and the folders in it. Of several steps, only the newest is read."""
    for is_one, read_one in _READERS:
        if is_one(folder):
            return [read_one(folder, trust)]
    if any(path.suffix == ".distcp" for path in folder.iterdir()):
        unfinished = Saved(folder, "DCP")
        unfinished.wrong("shards", "There are .distcp files, but no .metadata, so saving did not end.", [dcp.METADATA])
        return [unfinished]
    model = hugging_face.read(folder, trust) if hugging_face.is_one(folder) else None
    lost, chosen = _chosen(folder, model is not None)
    inner = [each for path in chosen if depth for each in _find(path, trust, depth - 1)]
    return [*([model] if model else []), *lost, *inner]


def _chosen(folder: Path, has_model: bool) -> tuple[list[Saved], list[Path]]:
    """Return what `latest` names without its being there, and the folders in a folder that are read.

    These are the folders of one step, and those that are of no step. If the folder has a model's files itself, only the
    folders of an engine's checkpoint are read.
    """
    folders = [path for path in sorted(folder.iterdir()) if path.is_dir() and not path.name.startswith(".")]
    if has_model:
        folders = [path for path in folders if _PART.fullmatch(path.name)]
    steps = {path: int(match[1]) for path in folders if (match := _STEP.fullmatch(path.name))}
    chosen = [path for path in folders if path not in steps]
    lost: list[Saved] = []
    for name in _LATEST:
        if not (folder / name).is_file():
            continue
        named = folder / (folder / name).read_text(errors="replace").strip()
        if named.is_dir():
            return lost, [*(path for path in chosen if path != named), named]
        lost.append(Saved(folder, f"the file {name}"))
        lost[-1].wrong(
            "missing", f"{name} names {named.name}, but there is no such folder, so resuming fails.", [named.name]
        )
    return lost, [*chosen, *sorted(steps, key=lambda path: steps[path])[-1:]]
