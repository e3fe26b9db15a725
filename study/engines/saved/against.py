"""Compare what was saved with another saved model, with tensors in memory, or with a recording of `zero-study diff`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from ..diff.recorded import FILE, Recording
from ..diff.recording import canonical
from ..diff.sketch import sketch
from ..readback.dtypes import dtype_name
from . import folders, pickles
from .checks import plain_name
from .content import Finding, Saved, Tensor
from .values import same

_WIDEST_FIRST = ("float64", "float32", "float16", "bfloat16")
_ADAPTER_NAME = re.compile(r"(?<=lora_A)\.default(?=\.)|(?<=lora_B)\.default(?=\.)|\.modules_to_save\.default(?=\.)")
_SAME_SKETCH = 1e-12  # relative; the sums of a sketch are in fp64
_HALF_UNIT = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}  # largest relative error of rounding

Value = TypeVar("Value")


@dataclass
class Comparison:
    """How the tensors of a saved model compare with others of the same names."""

    other: str  # what they were compared with
    equal: list[str] = field(default_factory=list)
    rounded: list[str] = field(default_factory=list)  # equal if the wider type is rounded to the narrower one
    close: list[str] = field(default_factory=list)  # only known to agree within the rounding of their type
    different: dict[str, float] = field(default_factory=dict)  # name -> largest difference of an element, or NaN
    reshaped: dict[str, str] = field(default_factory=dict)  # name -> both shapes, if they differ
    missing: list[str] = field(default_factory=list)  # in what was saved, but the other side has them
    extra: list[str] = field(default_factory=list)  # in what was saved only
    findings: list[Finding] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    has_sketches: bool = False  # a recording has sketches of the tensors, and not their elements

    @property
    def num_compared(self) -> int:
        return sum(map(len, (self.equal, self.rounded, self.close, self.different, self.reshaped)))


def is_recording(folder: Path) -> bool:
    """Return whether a folder is a recording of `zero-study diff`."""
    return folder.is_dir() and any(FILE.fullmatch(path.name) for path in folder.iterdir())


def compare(saved: Saved, other: Saved | Mapping[str, torch.Tensor], title: str = "the other tensors") -> Comparison:
    """Compare the tensors of a saved model with those of another one, or with tensors in memory, bit by bit.

    Two types that differ are compared after rounding the wider one to the narrower one.
    """
    ours = named_alike(saved.whole())
    theirs: dict[str, Callable[[], torch.Tensor]]
    if isinstance(other, Saved):
        theirs = {name: tensor.read for name, tensor in named_alike(other.whole()).items()}
    else:
        theirs = {name: tensor.detach for name, tensor in named_alike(other).items()}
    result = Comparison(title)
    for name in sorted(ours.keys() & theirs.keys()):
        try:
            a, b = ours[name].read().detach(), theirs[name]().detach().cpu()
        except (pickles.Unreadable, OSError, RuntimeError, ValueError) as error:
            result.unchecked.append(f"{name}: {str(error).splitlines()[0]}")
            continue
        _judge(result, name, a, b)
    own_groups = {id(tensor): name for name, tensor in ours.items() if name in theirs}
    result.extra = [name for name, tensor in ours.items() if name not in theirs and id(tensor) not in own_groups]
    result.missing = [name for name in theirs if name not in ours]
    if not isinstance(other, Saved) or saved.is_adapter != other.is_adapter:
        _forgive(result, saved)
    _report(result)
    return result


def named_alike(tensors: Mapping[str, Value]) -> dict[str, Value]:
    """Return tensors under plain names: without wrappers, and as an adapter's file names those of an adapter."""
    plain = {plain_name(name): value for name, value in tensors.items() if ".original_module." not in name}
    return {_ADAPTER_NAME.sub("", name): value for name, value in plain.items()}


def _judge(result: Comparison, name: str, a: torch.Tensor, b: torch.Tensor) -> None:
    """Compare one tensor, and enter it into the result."""
    if a.shape != b.shape:
        result.reshaped[name] = f"{list(a.shape)} instead of {list(b.shape)}"
    elif same(a, b):
        result.equal.append(name)
    elif a.dtype != b.dtype and same(*_narrowed(a, b)):
        result.rounded.append(name)
    else:
        a, b = _narrowed(a, b)
        difference = (a.double() - b.double()).abs()
        result.different[name] = float(difference.max()) if difference.numel() else float("nan")


def _narrowed(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two tensors in the narrower of their types."""
    if a.dtype == b.dtype:
        return a, b
    if not all(dtype_name(tensor.dtype) in _WIDEST_FIRST for tensor in (a, b)):
        return a, b.to(a.dtype)
    narrow = max((a, b), key=lambda tensor: _WIDEST_FIRST.index(dtype_name(tensor.dtype))).dtype
    return a.to(narrow), b.to(narrow)


def _forgive(result: Comparison, saved: Saved) -> None:
    """Leave out the tensors of the base model if an adapter is compared with a whole training."""
    if saved.is_adapter:
        result.missing = [name for name in result.missing if ".lora_" in name]
    elif any(".lora_" in name for name in (*result.equal, *result.rounded, *result.different, *result.reshaped)):
        result.extra = [name for name in result.extra if ".lora_" in name]


def _report(result: Comparison) -> None:
    if not result.num_compared:
        result.unchecked.append(f"the values: no tensor has a name that {result.other} also has")
        return
    if result.different:
        largest = max(result.different.values(), key=lambda value: -1.0 if value != value else value)
        result.findings.append(
            Finding(
                "different",
                f"{len(result.different)} of {result.num_compared} tensors have other values than in {result.other}. "
                f"The largest difference of an element is {largest:.3g}.",
                sorted(result.different),
            )
        )
    if result.reshaped:
        shapes = ", ".join(sorted(set(result.reshaped.values()))[:3])
        result.findings.append(
            Finding(
                "partial",
                f"These tensors have other shapes than in {result.other} ({shapes}).",
                sorted(result.reshaped),
            )
        )
    if result.missing:
        result.findings.append(
            Finding("missing", f"{result.other} has these tensors, but they were not saved.", sorted(result.missing))
        )
    if result.extra:
        result.findings.append(
            Finding(
                "unexpected", f"These tensors were saved, but {result.other} does not have them.", sorted(result.extra)
            )
        )


# ---------------------------------------------------------------- a recording


def compare_with_recording(saved: Saved, folder: Path) -> Comparison:
    """Compare the tensors of a saved model with the weights that a recording of `zero-study diff` has.

    A recording has sketches of the weights before the first step and after each of its first steps. The step that fits
    best is used. Raises Refusal if the recording cannot be read.
    """
    recording = Recording.read(folder)
    by_step: dict[str, dict[int, dict[str, tuple[np.ndarray, int]]]] = {"weights": {}, "held": {}}
    for entry in recording.ranks[0]:
        if entry.kind in by_step and not entry.call:
            sketches = by_step[entry.kind].setdefault(entry.step, {})
            sketches |= named_alike({entry.name: (np.array(entry.sketch), entry.rows)})
    ours = {canonical(name): tensor for name, tensor in named_alike(saved.whole()).items()}
    own: dict[str, tuple[np.ndarray, Tensor]] = {}
    result = Comparison(str(folder))
    for name, tensor in ours.items():
        if tensor.dtype not in _WIDEST_FIRST:
            continue
        try:
            own[name] = (np.array(sketch(tensor.read())), tensor)
        except (pickles.Unreadable, OSError, RuntimeError, ValueError) as error:
            result.unchecked.append(f"{name}: {str(error).splitlines()[0]}")
    tried = []
    for kind, steps in by_step.items():
        for step, sketches in steps.items():
            each = Comparison(f"{folder}, step {step}", has_sketches=True, unchecked=[*result.unchecked])
            _judge_sketches(each, own, sketches)
            tried.append((len(each.equal), len(each.close), kind == "weights", step, each))
    if not tried:
        result.unchecked.append("the values: the recording has no weights")
        return result
    *_, best = max(tried, key=lambda entry: entry[:4])
    _report(best)
    if saved.step is not None and saved.step > recording.facts["completed"] and best.different:
        best.findings = [finding for finding in best.findings if finding.kind != "different"]
        best.unchecked.append(
            f"the values: the checkpoint is of step {saved.step}, and the recording ends after step "
            f"{recording.facts['completed']} (record it with --steps {saved.step})"
        )
    return best


def _judge_sketches(
    result: Comparison, own: dict[str, tuple[np.ndarray, Tensor]], recorded: dict[str, tuple[np.ndarray, int]]
) -> None:
    for name in sorted(own.keys() & recorded.keys()):
        (ours, tensor), (theirs, size) = own[name], recorded[name]
        scale = max(float(np.linalg.norm(theirs)), float(np.linalg.norm(ours)), 1e-300)
        distance = float(np.linalg.norm(ours - theirs)) / scale
        if tensor.size == size and distance <= _SAME_SKETCH:
            result.equal.append(name)
        elif tensor.size == size and distance <= 2 * _HALF_UNIT.get(tensor.dtype, 0.0) and tensor.dtype != "float32":
            result.close.append(name)
        else:
            result.different[name] = distance * scale
    result.missing = [name for name in recorded if name not in own]
    shared = {id(tensor) for name, (_, tensor) in own.items() if name in recorded}
    result.extra = [name for name, (_, tensor) in own.items() if name not in recorded and id(tensor) not in shared]


def cross_check(saved: list[Saved]) -> list[Comparison]:
    """Compare the parts of one folder with one another, for instance model.safetensors with an engine's checkpoint."""
    compared = []
    for outer in saved:
        for inner in saved:
            if inner.folder.parent != outer.folder or not (outer.tensors and inner.tensors):
                continue
            result = compare(outer, inner, f"{inner.folder.name} ({inner.format})")
            result.findings = [finding for finding in result.findings if finding.kind in ("different", "partial")]
            result.unchecked = []
            if result.num_compared:
                compared.append(result)
    return compared


def compare_all(saved: list[Saved], folder: Path, trust: bool) -> list[Comparison]:
    """Compare the saved models of a folder with those of another one, or with a recording.

    Models that share names are compared. Raises Refusal if the other folder has neither.
    """
    if is_recording(folder):
        return [compare_with_recording(each, folder) for each in saved if each.tensors]
    others = [each for each in folders.read(folder, trust) if each.tensors]
    results = []
    for each in saved:
        for other in others if each.tensors else []:
            results.append(compare(each, other, str(folder if other.folder == folder else other.folder)))
    made = [result for result in results if result.num_compared]
    return made or results[:1] or [Comparison(str(folder), unchecked=[f"the values: {folder} has no readable tensors"])]


def difference_text(result: Comparison) -> str:
    """Return how many tensors are equal, equal after rounding, or different."""
    kinds = (
        (result.equal, "have identical sketches" if result.has_sketches else "are bitwise identical"),
        (result.rounded, "are identical after rounding to the narrower type"),
        (result.close, "are the same within the rounding of their type"),
        (list(result.different), "are different"),
        (list(result.reshaped), "have another shape"),
    )
    first, *others = [(len(names), what) for names, what in kinds if names]
    texts = [f"{first[0]} of {result.num_compared} tensors {first[1]}", *(f"{count} {what}" for count, what in others)]
    return ", ".join(texts)
