"""Format the result of `zero-study diff` as text, and as the JSON of its `--output`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from .. import terminal
from .bounds import KINDS
from .causes import uniform_factor
from .compare import NAMES, Result, steps_in_words
from .recorded import Damaged, Difference, Recording


def text(result: Result) -> str:
    """Return the result for a terminal: the answer first, then likely causes, and what was compared."""
    lines = _answer(result)
    if result.causes:
        lines += ["Likely causes, the most likely first:", *(f"- {cause}" for cause in result.causes)]
    if result.differences and (rest := _rest(result)):
        lines.append(f"All differences: {rest}.")
    nearest = (
        f", with differences of at most {result.worst_noise_ratio:.2g} times the bound" if result.num_alike else ""
    )
    before = " before the first difference" if result.differences else ""
    lines.append(f"Equal{before}: {result.num_alike} tensors{nearest}.")
    compared = ", ".join(map(str, result.verdict.checked)) or "nothing"
    lines.append(f"Compared in {steps_in_words(range(1, result.num_steps + 1))}: {compared}.")
    lines += [f"Not compared: {check}." for check in result.not_checked if not check.is_requested]
    lines += [f"Note: {note}." for note in result.notes]
    if result.is_marked:
        lines.append("Bound: estimated from the type and depth of each tensor, because no run with noise was recorded.")
    else:
        draws = len(result.a.noise) + len(result.b.noise)
        lines.append(f"Bound: measured by {draws} {'run' if draws == 1 else 'runs'} with noise.")
    lines += [f"{side}: {_summary(recording)}" for side, recording in (("A", result.a), ("B", result.b))]
    lines += [f"Largest element: {line}." for line in _elements(result.a.folder, result.b.folder)]
    lines = [terminal.printable(line) for line in lines]
    return "\n".join(
        terminal.wrap(line, "  " if line.startswith("- ") else "", "    " if line[0] == "-" else "  ") for line in lines
    )


def _answer(result: Result) -> list[str]:
    """Return lines that say whether the trainings are the same, and what the first difference is."""
    steps = steps_in_words(range(1, result.num_steps + 1))
    if result.is_same:
        is_complete = result.a.facts["steps"] == result.b.facts["steps"]
        only = "" if is_complete else f", the only {'one' if result.num_steps == 1 else 'ones'} in both recordings"
        return [f"No difference: rounding explains all deviations of the compared tensors in {steps}{only}."]
    lines = [f"Ranks differ within one training: {line}." for line in result.replicas]
    if result.differences:
        first = result.differences[0]
        alike = [difference for difference in result.differences if difference[:2] == first[:2]]
        lines.append(f"First difference: {describe(first, alike)}.")
    lines += [f"Incomplete recording: {line}." for line in result.unfinished]
    if result.differences or result.replicas:
        return lines
    if result.unfinished:
        lines.append(
            "The result is not known: the recorded steps are the same, but a recording is incomplete. "
            "Record the whole training again."
        )
    else:
        reasons = "; ".join(str(check) for check in result.not_checked if check.is_requested) or "nothing was compared"
        lines.append(
            f"The result is not known: {reasons}. Record a training in which an optimizer of torch.optim steps."
        )
    return lines


def describe(first: Difference, alike: list[Difference]) -> str:
    """Return a text that describes one difference between two trainings.

    `alike` has all differences of its kind and step.
    """
    step, kind, name, ranks, distance, bound, factor, missing, broken = first
    if kind == "batch":
        return f"the batch of step {step}: {name}"
    moment = "before step 1" if not step else f"step {step}"
    times = uniform_factor(alike)
    if kind != "forward" and len(alike) > 2 and times is not None and not missing:
        return f"{moment}, all {len(alike)} {NAMES.get(kind, kind)}s that differ are {times:.4g} times as large in B"
    on = f" on rank {', '.join(map(str, ranks))}" if ranks else ""
    noun = f"{moment}, {NAMES.get(kind, kind)} of {name or 'the model'}{on}"
    if missing:
        return f"{noun} is missing in {missing}"
    if broken:
        return f"{noun} is NaN or infinite in {broken}"
    if factor is not None:
        return f"{noun} is {factor:.4g} times as large in B (rounding explains {bound:.1e})"
    return f"{noun} differs by {_number(distance)} of its norm (rounding explains {bound:.1e})"


def content(result: Result) -> dict[str, Any]:
    """Return the result as the JSON that `diff --output` writes."""
    return {
        "same": result.is_same,
        **result.verdict.content(),
        "steps_compared": result.num_steps,
        "unfinished": result.unfinished,
        "bound": "by type and depth" if result.is_marked else "by runs rounded otherwise",
        "a": {"folder": str(result.a.folder), **result.a.facts},
        "b": {"folder": str(result.b.folder), **result.b.facts},
        "notes": result.notes,
        "replicas": result.replicas,
        "alike": result.num_alike,
        "furthest_of_bound": result.worst_noise_ratio,
        "causes": result.causes,
        "differences": [
            {key: None if isinstance(value, float) and not math.isfinite(value) else value
             for key, value in difference._asdict().items()} for difference in result.differences
        ],
    }  # fmt: skip


def _summary(recording: Recording) -> str:
    facts = recording.facts
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    passes = len(recording.cut[0])
    return (
        f"{recording.folder}: {facts['engine'] or 'no engine'}, {terminal.count(recording.world_size, 'rank')}, "
        f"{terminal.count(passes, 'forward pass', 'forward passes')} per step, {terminal.count(facts['steps'], 'step')}"
        + (f" ({versions})" if versions else "")
    )


def _rest(result: Result) -> str:
    """Return a text with the numbers of further differences: by kind in the same step, and in later steps."""
    step = result.differences[0].step
    counts = Counter(difference.kind for difference in result.differences if difference.step == step)
    now = ", ".join(terminal.count(counts[kind], NAMES.get(kind, kind)) for kind in KINDS if counts[kind])
    later = sum(difference.step > step for difference in result.differences)
    of_later = f", {terminal.count(later, 'tensor')} of later steps" if later else ""
    return f"{now} of step {step}{of_later}" if now else ""


def _elements(a: Path, b: Path) -> Iterator[str]:
    """Yield a line for each tensor that both recordings saved completely (--whole): the element that differs most."""
    for path in sorted(a.glob("rank-*.pt")):
        if not (path.is_file() and (b / path.name).is_file()):
            continue
        import torch

        try:
            ours, theirs = (torch.load(folder / path.name, weights_only=True) for folder in (a, b))
            for key in ours.keys() & theirs.keys():
                step, kind, name, call = key
                in_a, in_b = ours[key].double(), theirs[key].double()
                if in_a.shape == in_b.shape and in_a.numel():
                    place = np.unravel_index(int((in_a - in_b).abs().argmax()), in_a.shape)
                    yield (
                        f"step {step}, {NAMES.get(str(kind), kind)} of {name}, call {call}, {path.stem}: the largest "
                        f"difference is at {[int(at) for at in place]}, with {in_a[place]:.6g} in A and "
                        f"{in_b[place]:.6g} in B"
                    )
        except Exception as error:  # a foreign file may contain anything
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise Damaged(
                f"{path.name} of {a} or {b}: this file is damaged ({reason}). Record this training again."
            ) from None


def _number(value: float) -> str:
    return f"{value:.2g}" if math.isfinite(value) else "all"
