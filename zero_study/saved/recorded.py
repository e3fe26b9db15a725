"""Compare a saved model with the weights that a recording of `zero-study diff` has after one of its steps.

A recording has a sketch of each weight (see `diff/sketch.py`). If 16-bit weights are compared with recorded fp32
weights, the sketches differ by the rounding. Its size follows from the saved values: an error is as likely to be
anywhere within half a unit of the last digit, so its mean square is a twelfth of the unit's square. That does not hold
if the weights were 16-bit numbers before the first step and the updates are smaller than a unit. The square can then be
anything up to three twelfths.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from ..diff.recorded import FILE, SIZE, Recording
from ..diff.sketch import PART, sketch
from ..engines.readback.parameters import name_among
from . import consistency, folders
from .against import WIDEST_FIRST, Comparison, compare, ignore_base_weights, named_alike, report
from .content import Finding, Saved, Tensor

_SKETCH_TOLERANCE = 1e-12  # relative; the sums of a sketch are in fp64
_DIGITS = {"bfloat16": 8, "float16": 11}  # binary digits of a type
_SMALLEST_UNIT = {"bfloat16": 2.0**-133, "float16": 2.0**-24}
_MOST_PER_TENSOR = 8.0  # times the mean square of the rounding, for one tensor: three, and the spread of a sketch
_SPREAD = math.sqrt(2 / SIZE)  # of the square of a sketch's norm, relative
_DEVIATIONS = 6.0  # standard deviations that count as certain
_MANY, _MANY_VALUES = 256, 64  # elements that contribute equally, and different values; with fewer, errors are alike
_LOOKED_AT = 100_000  # elements whose values are counted
_CHANGED_PER_DISTANCE = 100  # share of the elements that an update changes in a 16-bit type, per relative change
_CERTAIN = 10  # elements that should have changed
_BUFFERS = (
    "running_mean", "running_var", "num_batches_tracked", "inv_freq", "position_ids", "masked_bias", "attn.bias",
)  # fmt: skip

Recorded = dict[str, tuple[np.ndarray, int]]  # the name of a weight -> its sketch and its number of elements


class _Own(NamedTuple):
    """The sketch of a saved tensor, and its expected rounding."""

    tensor: Tensor
    sums: np.ndarray
    rounding: float  # the mean square of the norm of the rounding errors; 0 in fp32
    is_many: bool  # whether many elements contribute to it, with many values


class _Fit(NamedTuple):
    """The result of comparing the saved weights with the recorded ones of one step."""

    step: int
    weights: Recorded
    result: Comparison
    ratios: list[float]  # squares of the differences of 16-bit tensors, relative to their rounding

    @property
    def is_too_far(self) -> bool:
        """Whether the 16-bit tensors together differ by more than rounding usually explains."""
        return bool(self.ratios) and float(np.mean(self.ratios)) > 1 + self._margin

    @property
    def is_rounded(self) -> bool:
        """Whether the 16-bit tensors together differ by as much as rounding explains."""
        return bool(self.ratios) and abs(float(np.mean(self.ratios)) - 1) <= self._margin

    @property
    def _margin(self) -> float:
        return _DEVIATIONS * _SPREAD / math.sqrt(len(self.ratios))

    @property
    def num_different(self) -> int:
        return len(self.result.different)


def compare_with_recording(saved: Saved, folder: Path) -> Comparison:
    """Compare the tensors of a saved model with the weights in a recording of `zero-study diff`.

    They are compared with the step that the checkpoint names, or with the last step of the recording. If another step
    fits better, that is a finding: the saved weights are stale. Raises Refusal if the recording cannot be read.
    """
    recording = Recording.read(folder)
    by_step = _weights_by_step(recording)
    unread = Comparison(str(folder), has_sketches=True)
    own = _own_sketches(saved, by_step, unread)
    completed = int(recording.facts["completed"])
    fits = {step: _best_fit(f"{folder}, step {step}", step, own, kinds, unread) for step, kinds in by_step.items()}
    if not fits:
        unread.unchecked.append("the values, because the recording has no weights")
        return unread
    checkpoint_step = _step_of(saved)
    last = max((step for step in fits if step <= completed), default=max(fits))
    step = last if checkpoint_step is None else checkpoint_step
    if step not in fits or step > completed:
        return _later(saved, max(fits.values(), key=_quality), step, completed)
    chosen = fits[step]
    ignore_base_weights(chosen.result, saved)
    if chosen.result.num_compared:
        _look_for_better(chosen, [fit for fit in fits.values() if fit.step != step], own, checkpoint_step is not None)
    report(chosen.result)
    if any(finding.kind == "stale" for finding in chosen.result.findings):
        chosen.result.findings = [finding for finding in chosen.result.findings if finding.kind != "different"]
    return chosen.result


def _step_of(saved: Saved) -> int | None:
    """Return the step that a checkpoint says, or that the name of its folder says."""
    return saved.step if saved.step is not None else consistency.named_step(saved.folder)


def compare_all(saved: list[Saved], folder: Path, trust: bool) -> list[Comparison]:
    """Compare the saved models of a folder with those of another folder, or with a recording of `zero-study diff`.

    Models that share names of tensors are compared. Raises Refusal if the other folder has neither.
    """
    if is_recording(folder):
        return [compare_with_recording(saved_part, folder) for saved_part in saved if saved_part.tensors]
    references = [reference for reference in folders.read(folder, trust) if reference.tensors]
    results = []
    for saved_part in saved:
        for reference in references if saved_part.tensors else []:
            results.append(
                compare(saved_part, reference, str(folder if reference.folder == folder else reference.folder))
            )
    comparisons = [result for result in results if result.num_compared]
    return (
        comparisons
        or results[:1]
        or [Comparison(str(folder), unchecked=[f"the values, because {folder} has no readable tensors"])]
    )


def is_recording(folder: Path) -> bool:
    """Return whether a folder is a recording of `zero-study diff`."""
    return folder.is_dir() and any(FILE.fullmatch(path.name) for path in folder.iterdir())


def _weights_by_step(recording: Recording) -> dict[int, list[Recorded]]:
    """Return the recorded weights of each step: the master weights, and those that the model computes with."""
    weights: dict[int, dict[str, Recorded]] = {}
    for entry in recording.ranks[0]:
        if entry.kind in ("weights", "held") and not entry.call:
            of_kind = weights.setdefault(entry.step, {}).setdefault(entry.kind, {})
            of_kind |= named_alike({entry.name: (np.array(entry.sketch), entry.rows)})
    return {step: list(kinds.values()) for step, kinds in sorted(weights.items())}


def _own_sketches(saved: Saved, by_step: Mapping[int, list[Recorded]], unread: Comparison) -> dict[str, _Own]:
    recorded_names = {name for kinds in by_step.values() for weights in kinds for name in weights}
    own: dict[str, _Own] = {}
    for plain, tensor in named_alike(saved.whole()).items():
        name = name_among(plain, recorded_names)
        if tensor.dtype not in WIDEST_FIRST:
            if not name.endswith(_BUFFERS):
                unread.unchecked.append(f"the values of {name}, because its type is {tensor.dtype}")
            continue
        try:
            values = tensor.read()
            own[name] = _Own(tensor, np.array(sketch(values)), *_rounding(values, tensor.dtype))
        except Exception as error:  # a damaged file may raise anything
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            unread.unchecked.append(f"the values of {name}, because {reason}")
    return own


def _rounding(values: torch.Tensor, dtype: str) -> tuple[float, bool]:
    """Return the expected square of the norm of the rounding errors in 16-bit values, and whether many have some."""
    if dtype not in _DIGITS or not values.numel():
        return 0.0, False
    flat, squares, fourth_powers = values.detach().reshape(-1), 0.0, 0.0
    for begin in range(0, flat.numel(), PART):
        part = flat[begin : begin + PART]
        _, exponents = torch.frexp(part.float())
        units = torch.exp2((exponents - _DIGITS[dtype]).double()).clamp_min(_SMALLEST_UNIT[dtype])
        units[part == 0] = _SMALLEST_UNIT[dtype]
        squares += float((units**2).sum())
        fourth_powers += float((units**4).sum())
    num_values = len(set(flat[:_LOOKED_AT].tolist()))
    return squares / 12, squares**2 >= _MANY * fourth_powers and num_values >= _MANY_VALUES


def _best_fit(title: str, step: int, own: Mapping[str, _Own], kinds: list[Recorded], unread: Comparison) -> _Fit:
    """Compare the saved weights with the master weights of one step, or with those that the model computes with."""
    return max((_fit(title, step, own, weights, unread) for weights in kinds), key=_quality)


def _fit(title: str, step: int, own: Mapping[str, _Own], recorded: Recorded, unread: Comparison) -> _Fit:
    """Compare the saved weights with those of one step."""
    result = Comparison(title, has_sketches=True, unchecked=[*unread.unchecked])
    ratios = []
    for name in sorted(own.keys() & recorded.keys()):
        (tensor, ours, rounding, is_many), (theirs, size) = own[name], recorded[name]
        scale = max(float(np.linalg.norm(theirs)), float(np.linalg.norm(ours)), 1e-300)
        distance = float(np.linalg.norm(ours - theirs))
        if tensor.size == size and distance <= _SKETCH_TOLERANCE * scale:
            result.equal.append(name)
        elif tensor.size == size and distance**2 <= _MOST_PER_TENSOR * rounding:
            result.close.append(name)
            if is_many:
                ratios.append(distance**2 / rounding)
        else:
            result.different[name] = distance
    result.missing = [name for name in recorded if name not in own]
    shared = {id(entry.tensor) for name, entry in own.items() if name in recorded}
    result.extra = [
        name
        for name, entry in own.items()
        if name not in recorded and id(entry.tensor) not in shared and not name.endswith(_BUFFERS)
    ]
    return _Fit(step, recorded, result, ratios)


def _quality(fit: _Fit) -> tuple[int, int, int, int]:
    return -fit.num_different, len(fit.result.equal), len(fit.result.close), fit.step


def _later(saved: Saved, best: _Fit, step: int, completed: int) -> Comparison:
    """Return the comparison of a checkpoint whose step was not recorded, with the step that fits best."""
    result = best.result
    ignore_base_weights(result, saved)
    reason = f"the checkpoint is of step {step}, and the recording ends after step {completed}"
    reason += f" (record the training with --steps {step})"
    if result.num_compared and not result.different:
        reason += f". The weights are those of recorded step {best.step}"
    result.different = {}
    report(result)
    result.unchecked.append(f"the values, because {reason}")
    return result


def _look_for_better(chosen: _Fit, alternatives: list[_Fit], own: Mapping[str, _Own], is_from_checkpoint: bool) -> None:
    """Report another step whose weights fit better, or cannot be told apart from those of the chosen step."""
    result = chosen.result
    better = max(
        (alternative for alternative in alternatives if _is_better(chosen, alternative, own)),
        key=_quality,
        default=None,
    )
    if better is not None:
        label = (
            f"the step {chosen.step} that the checkpoint names"
            if is_from_checkpoint
            else f"step {chosen.step}, the last one"
        )
        before = "" if better.step else ", before the first update"
        is_exact = not better.num_different and (better.is_rounded or not better.ratios)
        fit = "are those of" if is_exact else "fit better with"
        result.findings.append(
            Finding(
                "stale",
                f"The weights {fit} step {better.step}{before}. They are not those of {label}, so the "
                "checkpoint is stale, or belongs to another training.",
                sorted({*result.different} or {*result.close}),
            )
        )
        return
    if result.different:
        return
    if chosen.is_too_far:
        result.unchecked.append(
            f"the values of {len(result.close)} tensors, because they differ from those of step {chosen.step} by more "
            "than rounding usually explains"
        )
    undecided = [str(alternative.step) for alternative in alternatives if _is_undecided(chosen, alternative, own)]
    if undecided:
        result.unchecked.append(
            f"whether the weights are those of step {chosen.step} or of step {', '.join(undecided)}, because their "
            "16-bit type is too coarse to tell these steps apart"
        )


def _is_better(chosen: _Fit, alternative: _Fit, own: Mapping[str, _Own]) -> bool:
    """Return whether the saved weights are certainly those of another step than the chosen one."""
    if alternative.num_different < chosen.num_different / 2:
        return True
    if alternative.num_different > chosen.num_different:
        return False
    if _is_identical(chosen, alternative, own):
        return True
    excess, resolution = _preference(chosen, alternative, own)
    return alternative.is_rounded and resolution >= _DEVIATIONS and excess > resolution / 2


def _is_identical(chosen: _Fit, alternative: _Fit, own: Mapping[str, _Own]) -> bool:
    """Return whether the 16-bit weights are exactly those of another step, which cannot be an effect of rounding.

    If the weights were 16-bit numbers before the first step, small updates are rounded away. But the smallest elements
    have small units, so that some of them would have changed.
    """
    many = [name for name in own if own[name].is_many and name in chosen.weights]
    if {*chosen.result.equal} - {*alternative.result.equal} or not {*many} <= {*alternative.result.equal}:
        return False
    changes = (_distance(chosen, alternative, name) * own[name].tensor.size for name in many)
    return _CHANGED_PER_DISTANCE * sum(changes) > _CERTAIN


def _is_undecided(chosen: _Fit, alternative: _Fit, own: Mapping[str, _Own]) -> bool:
    return not alternative.num_different and 0 < _preference(chosen, alternative, own)[1] < _DEVIATIONS


def _distance(first: _Fit, second: _Fit, name: str) -> float:
    """Return the relative distance between the values of a weight at two recorded steps."""
    (a, _), (b, _) = first.weights[name], second.weights.get(name, first.weights[name])
    return float(np.linalg.norm(a - b)) / max(float(np.linalg.norm(a)), 1e-300)


def _preference(chosen: _Fit, alternative: _Fit, own: Mapping[str, _Own]) -> tuple[float, float]:
    """Return how far the saved weights lie from one step towards another one, and how far these steps are apart.

    Both are in standard deviations of the rounding. A distance of 0 means that nothing can be told from these tensors,
    because they are the same in both steps, or that an exact tensor has decided already.
    """
    moved, separation = 0.0, 0.0
    for name in chosen.result.close:
        if name not in alternative.weights or not own[name].is_many:
            continue
        variance = own[name].rounding / SIZE
        towards = alternative.weights[name][0] - chosen.weights[name][0]
        moved += float((own[name].sums - chosen.weights[name][0]) @ towards) / variance
        separation += float(towards @ towards) / variance
    exact = [
        name for name in chosen.result.equal if name in alternative.weights and name not in alternative.result.equal
    ]
    if exact or not separation:
        return 0.0, 0.0
    return moved / math.sqrt(separation), math.sqrt(separation)
