"""Read DeepSpeed's universal checkpoint, which has a folder of files for each parameter."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..engines.readback.dtypes import dtype_name
from . import consistency, pickles
from .content import Kind, OptimizerFacts, Saved, Tensor

WEIGHTS = "fp32"


def is_one(folder: Path) -> bool:
    """Return whether a folder such as global_step40_universal is a universal checkpoint."""
    return (folder / "zero").is_dir() and any(folder.glob("*mp_rank_*_model_states.pt"))


def read(folder: Path, trust: bool) -> Saved:
    """Read the universal checkpoint in a folder, and check it."""
    saved = Saved(folder, "DeepSpeed universal")
    shapes = _read_model_files(saved, trust)
    saved.format += "" if saved.step is None else f", step {saved.step}"
    folders = {path.parent.relative_to(folder / "zero").as_posix() for path in (folder / "zero").rglob("*.pt")} - {"."}
    if missing := shapes.keys() - folders:
        saved.wrong("missing", "There is no folder of these weights.", missing)
    if unknown := folders - shapes.keys() - saved.ties.keys():
        saved.wrong("unexpected", "There are folders of weights that the model does not have.", unknown)
    steps: dict[str, Any] = {}
    for name in sorted(folders & shapes.keys()):
        _read_parameter(saved, folder / "zero" / name, name, shapes[name], trust, steps)
    _check_steps(saved, steps, len(shapes))
    # All weights must have the same kinds of states.
    kinds = {kind for key in saved.states if (kind := key.rpartition("/")[2])}
    for kind in sorted(kinds):
        lacking = [name for name in saved.tensors if f"{name}/{kind}" not in saved.states]
        if lacking:
            saved.wrong(
                "optimizer", f"There is no {kind}.pt of these weights, although other weights have this file.", lacking
            )
    return saved


def _read_model_files(saved: Saved, trust: bool) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parameters, and check that all model files are of one model and step."""
    shapes: dict[str, tuple[int, ...]] = {}
    model_files = sorted(saved.folder.glob("*mp_rank_*_model_states.pt"))
    for path in model_files:
        try:
            content = pickles.load(path, trust)
        except pickles.Unreadable as reason:
            saved.wrong("unreadable", f"{path.name} cannot be read: {reason}.", [path.name])
            continue
        own = {name: tuple(shape) for group in content.get("param_shapes") or [] for name, shape in group.items()}
        step = content.get("global_steps")
        if shapes and own != shapes:
            saved.wrong("shards", f"{path.name} is of another model than {model_files[0].name}.", [path.name])
        if saved.step is not None and step != saved.step:
            saved.wrong(
                "shards", f"{path.name} is of step {step}, {model_files[0].name} of step {saved.step}.", [path.name]
            )
        shapes, saved.step = shapes or own, step if saved.step is None else saved.step
        saved.ties |= content.get("shared_params") or {}
    return shapes


def _check_steps(saved: Saved, steps: dict[str, Any], num_weights: int) -> None:
    """Compare the optimizer's counters with the step of the checkpoint."""
    counters = {name: step for name, value in steps.items() if (step := consistency.number_of(value)) is not None}
    saved.optimizer = OptimizerFacts("step.pt", counters, num_weights, [], needs_states=True)
    updates = consistency.updates_of(saved)
    if updates is not None and saved.step is not None and updates > saved.step + 1:
        saved.wrong(
            "optimizer", f"The optimizer was updated {updates} times, but the checkpoint is of step {saved.step}.",
            ["step.pt"],
        )  # fmt: skip


def _read_parameter(
    saved: Saved, folder: Path, name: str, shape: tuple[int, ...], trust: bool, steps: dict[str, Any]
) -> None:
    """Read the files of one parameter. The optimizer's counter is entered into `steps`."""
    paths = {path.stem: path for path in sorted(folder.glob("*.pt"))}
    if WEIGHTS not in paths:
        saved.wrong("missing", f"{name} has no {WEIGHTS}.pt.", [name])
    for kind, path in paths.items():
        try:
            content: Any = pickles.load(path, trust)
        except pickles.Unreadable as reason:
            saved.wrong("unreadable", f"{name}/{path.name} cannot be read: {reason}.", [name])
            continue
        values = content.get("param") if isinstance(content, dict) else content
        if kind == "step":
            steps[name] = values
        if not isinstance(values, torch.Tensor) or kind == "step":
            continue
        if values.numel() != math.prod(shape):
            kind_of_finding: Kind = "optimizer" if kind != WEIGHTS else "partial" if values.numel() else "empty"
            saved.wrong(
                kind_of_finding,
                f"{kind}.pt of {name} has {values.numel()} elements, but the parameter has {math.prod(shape)}.",
                [name],
            )
            continue
        key = name if kind == WEIGHTS else f"{name}/{kind}"
        file = f"{name}/{path.name}"
        tensor = Tensor(key, shape, dtype_name(values.dtype), file, partial(values.reshape, shape))
        (saved.tensors if kind == WEIGHTS else saved.states)[key] = tensor
