"""What `zero-study diff` prints, and what it writes."""

from __future__ import annotations

import math
import pickle
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from .bounds import KINDS
from .causes import uniform_factor
from .compare import NAMES, Result
from .recorded import Damaged, Difference, Recording


def text(result: Result) -> str:
    """The first difference, what was alike before it, what follows from it, and what it may come from."""
    lines = [f"{side}  {_summary(recording)}" for side, recording in (("A", result.a), ("B", result.b))]
    if result.is_marked:
        lines.append("bound  by type and depth, a rule of thumb: no run was rounded otherwise (noise-1)")
    else:
        draws = len(result.a.noise) + len(result.b.noise)
        lines.append(f"bound  by {draws} run(s) that were rounded otherwise")
    lines += [f"note   {note}" for note in result.notes]
    lines += [f"RANKS  {line}" for line in result.replicas]
    nearest = f", at most {result.worst_noise_ratio:.2g} of the bound" if result.num_alike else ""
    lines.append(f"alike  {result.num_alike} tensors{nearest}")
    if result.differences:
        first = result.differences[0]
        alike = [difference for difference in result.differences if difference[:2] == first[:2]]
        lines += [f"FIRST  {describe(first, alike)}", f"then   {_rest(result)}"]
        lines += [f"likely {cause}" for cause in result.causes]
    lines += [f"whole  {line}" for line in _elements(result.a.folder, result.b.folder)]
    lines += [f"ENDED  {line}" for line in result.unfinished]
    if result.is_same:
        lines.append("no difference that rounding does not explain")
    elif not (result.differences or result.replicas):
        lines.append("what both recorded is the same, and that is not all of the training: record it again")
    return "\n".join(printable(line) for line in lines if not line.endswith("then   "))


def printable(line: str) -> str:
    """Return a line in which nothing steers a terminal: names in a recording may be anybody's."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in line)


def describe(first: Difference, alike: list[Difference]) -> str:
    """One difference in words. `alike`: all of its kind and step."""
    step, kind, name, ranks, distance, bound, factor, missing, broken = first
    if kind == "batch":
        return f"step {step}: {name}"
    moment = "before step 1" if not step else f"step {step}"
    times = uniform_factor(alike)
    if kind != "forward" and len(alike) > 2 and times is not None and not missing:
        return f"{moment}, all {len(alike)} {NAMES.get(kind, kind)}s that differ: x {times:.4g} in B"
    on = f" on rank {', '.join(map(str, ranks))}" if ranks else ""
    noun = f"{moment}, {NAMES.get(kind, kind)} of {name or 'the model'}{on}"
    if missing:
        return f"{noun}: none in {missing}"
    if broken:
        return f"{noun}: NaN or infinite in {broken}"
    if factor is not None:
        return f"{noun}: x {factor:.4g} in B (bound {bound:.1e})"
    return f"{noun}: {_number(distance)} of its norm away (bound {bound:.1e})"


def content(result: Result) -> dict[str, Any]:
    """For `--output`."""
    return {
        "same": result.is_same,
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
        f"{recording.folder}: {facts['engine']}, {recording.world_size} rank(s), {passes} forward pass(es) a step, "
        f"{facts['steps']} step(s); {versions}"
    )


def _rest(result: Result) -> str:
    """How much of each kind differs in the step of the first difference, and how much later."""
    step = result.differences[0].step
    counts = Counter(difference.kind for difference in result.differences if difference.step == step)
    now = ", ".join(f"{counts[kind]} {NAMES.get(kind, kind)}(s)" for kind in KINDS if counts[kind])
    later = sum(difference.step > step for difference in result.differences)
    return f"{now} of step {step}" + (f", {later} tensors of later steps" if later else "") if now else ""


def _elements(a: Path, b: Path) -> Iterator[str]:
    """Of what both kept whole, and is of one shape: where they are furthest from each other."""
    for path in sorted(a.glob("rank-*.pt")):
        if not (b / path.name).exists():
            continue
        import torch

        try:
            ours, theirs = (torch.load(folder / path.name, weights_only=True) for folder in (a, b))
            keys = ours.keys() & theirs.keys()
        except (OSError, ValueError, RuntimeError, EOFError, AttributeError, pickle.UnpicklingError) as error:
            raise Damaged(f"{path.name} of {a} or {b}: is damaged ({error}); record this training again") from None
        for key in keys:
            in_a, in_b = ours[key].double(), theirs[key].double()
            if in_a.shape == in_b.shape and in_a.numel():
                place = np.unravel_index(int((in_a - in_b).abs().argmax()), in_a.shape)
                step, kind, name, call = key
                yield (
                    f"step {step}, {NAMES.get(kind, kind)} of {name}, call {call}, {path.stem}: furthest at "
                    f"{[int(at) for at in place]}, {in_a[place]:.6g} in A and {in_b[place]:.6g} in B"
                )


def _number(value: float) -> str:
    return f"{value:.2g}" if math.isfinite(value) else "all"
