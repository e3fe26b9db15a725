"""Check that a run with random rounding (a noise run) repeats the recorded training.

Its distance from the recording becomes the bound. The run must have the same code, arguments, optimizer, learning
rates, engine and initial weights. Its distance must also be one that rounding explains, because a setting that is not
recorded may differ.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..errors import Refusal
from .bounds import FP32, distance, norm, unit_of
from .inputs import different_weights
from .recorded import Key, Recording, Seen

# The largest relative distance in step 1 that rounding may explain. Noise moved the gradients of small transformers by
# 4e-7 in fp32 and by 1 % in bf16, and deep models amplify it.
MOST_IN_FP32 = 2e-3
MOST_IN_16_BITS = 0.3
MOST_OF_UPDATE = 0.25  # Adam may turn the sign of elements whose gradient is only a rounding error
SHARE_OF_ALL = 0.1  # of a limit, relative to all tensors of a kind: a gradient that should be zero is only rounding
SAME_RATE = 1e-3  # relative; a schedule may depend on a loss


def check(recording: Recording, draw: Recording) -> None:
    """Raise Refusal if a run with random rounding does not repeat the recorded training."""
    reason = next(_reasons(recording, draw), None)
    if reason is not None:
        raise Refusal(
            f"{draw.folder}: this run with noise does not repeat the training in {recording.folder}: "
            f"{reason}. A bound that is measured with this run would hide real differences. Remove this "
            "folder, and record the same training with --noise again."
        )


def unknown(recording: Recording, draw: Recording) -> str | None:
    """Return a text that says what cannot be checked about a run with random rounding. None if all can be checked."""
    names = {"script": "code", "arguments": "arguments", "optimizers": "optimizer settings"}
    missing = [noun for key, noun in names.items() if recording.facts[key] is None or draw.facts[key] is None]
    return " and ".join(missing) or None


def _reasons(recording: Recording, draw: Recording) -> Iterator[str]:
    """Yield the reasons why a run with random rounding does not repeat the recorded training."""
    facts, of_draw = recording.facts, draw.facts
    if recording.world_size != draw.world_size:
        yield f"it ran on {draw.world_size} ranks instead of {recording.world_size}"
    if facts["engine"] != of_draw["engine"]:
        yield f"its engine is {of_draw['engine'] or 'none'} instead of {facts['engine'] or 'none'}"
    if _differ(facts["script"], of_draw["script"]):
        yield "its code is different"
    if _differ(facts["arguments"], of_draw["arguments"]):
        yield f"its script had the arguments {of_draw['arguments']} instead of {facts['arguments']}"
    if _differ(facts["optimizers"], of_draw["optimizers"]):
        yield f"its optimizer has different settings{_first_setting(facts['optimizers'], of_draw['optimizers'])}"
    yield from _of_rates(facts["rates"], of_draw["rates"])
    yield from _of_weights(recording, draw)
    yield from _of_size(recording, draw)


def _differ(ours: Any, theirs: Any) -> bool:
    return ours is not None and theirs is not None and ours != theirs


def _first_setting(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> str:
    for group, counterpart in zip(ours, theirs, strict=False):
        for name in group.keys() | counterpart.keys():
            if group.get(name) != counterpart.get(name):
                return f": {name} is {counterpart.get(name)} instead of {group.get(name)}"
    return f": {len(theirs)} groups of parameters instead of {len(ours)}"


def _of_rates(ours: list[list[float]], theirs: list[list[float]]) -> Iterator[str]:
    for step, (rates, their_rates) in enumerate(zip(ours, theirs, strict=False), 1):
        for rate, their_rate in zip(rates, their_rates, strict=False):
            if not math.isclose(rate, their_rate, rel_tol=SAME_RATE):
                yield f"the learning rate of step {step} is {their_rate} instead of {rate}"


def _of_weights(recording: Recording, draw: Recording) -> Iterator[str]:
    at_start = (
        {key: tensor for key, tensor in run.values(True).items() if (key.step, key.kind) == (0, "weights")}
        for run in (recording, draw)
    )
    if (first := next(different_weights(*at_start), None)) is not None:
        yield f"its initial weights differ, first in {first.name}"


def _of_size(recording: Recording, draw: Recording) -> Iterator[str]:
    """Yield a reason if a distance in step 1 is larger than rounding explains."""
    unit = unit_of(recording, draw)
    most = MOST_IN_FP32 if unit == FP32 else MOST_IN_16_BITS
    exact, perturbed = (run.values(True) for run in (recording, draw))
    for kind in ("forward", "gradient", "norm", "clipped"):
        pairs = dict(_pairs(exact, perturbed, kind))
        gaps = {key: distance(kind, *pair) for key, pair in pairs.items()}
        sizes = {key: norm(pair[0].sketch) for key, pair in pairs.items()}
        gap, size = (math.hypot(*values.values()) for values in (gaps, sizes))
        if gap > most * size:
            yield f"its {kind} tensors of step 1 differ by {gap / (size or 1):.1g} of their norm, which is not rounding"
        for key in gaps if unit == FP32 else ():
            if gaps[key] > most * (sizes[key] + SHARE_OF_ALL * size):
                yield f"the {kind} tensor of {key.name or 'the model'} in step 1 differs by more than rounding"
    for _, (ours, theirs) in _pairs(exact, perturbed, "whole"):
        if distance("whole", ours, theirs) > MOST_OF_UPDATE * norm(ours.sketch):
            yield "its update of the weights in step 1 differs by more than rounding"


def _pairs(exact: dict[Key, Seen], perturbed: dict[Key, Seen], kind: str) -> Iterator[tuple[Key, tuple[Seen, Seen]]]:
    """Yield the tensors of one kind in step 1 that both runs have with finite values."""
    for key, ours in exact.items():
        if (key.step, key.kind) != (1, kind) or (theirs := perturbed.get(key)) is None:
            continue
        if ours.sketch.shape == theirs.sketch.shape and np.isfinite([ours.sketch, theirs.sketch]).all():
            yield key, (ours, theirs)
