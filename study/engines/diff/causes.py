"""What most likely makes a first difference, by its pattern. Said as that, and never as what is known."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from .recorded import Difference, Recording

NEAR = 5e-3  # relative; of a factor and a whole number
NOTHING = 1e-6  # a factor that is none


def likely(
    differences: Sequence[Difference], a: Recording, b: Recording, clear: Mapping[tuple[int, str], float]
) -> list[str]:
    """The likeliest causes of the first of these, the likeliest first; none where no pattern fits.

    `clear`: by step and kind, how large the largest tensor that is alike is over its bound.
    """
    if not differences:
        return []
    first = differences[0]
    of_kind = [one for one in differences if one[:2] == first[:2]]
    return list(_causes(first, of_kind, a, b, clear.get(first[:2], 0.0)))


def uniform(differences: Sequence[Difference]) -> float | None:
    """The factor that all of these have; None: they have not one."""
    factors = [one.factor for one in differences]
    if any(factor is None for factor in factors):
        return None
    known = [factor for factor in factors if factor is not None]
    middle = sorted(known)[len(known) // 2]
    return middle if all(abs(factor - middle) <= NEAR * abs(middle) for factor in known) else None


def _causes(first: Difference, alike: Sequence[Difference], a: Recording, b: Recording, clear: float) -> Iterator[str]:
    if first.broken:
        yield "an overflow, or a division by zero: nothing after it can be compared"
        return
    if first.missing:
        yield {
            "weights": "the models have other parameters, or other names for them",
            "whole": f"{first.missing} makes no update: it ended before, or its optimizer is not one of torch.optim",
        }.get(first.kind, f"{first.name} takes no part in {first.missing}: frozen, or reached by no backward pass")
        return
    if 0 < len(first.ranks) < a.world_size and first.kind != "batch":
        yield f"rank {first.ranks[0]} alone: its shard, its weights or its code are others"
    if first.kind == "batch":
        passes = [sum(map(len, one.rows(first.step))) for one in (a, b)]
        if passes[0] != passes[1]:
            yield f"{passes[0]} forward passes in A and {passes[1]} in B: accumulation, evaluation mode, or updates"
        yield "the order of the data: seeds, samplers, shuffling, workers" if "order" in first.name else "the data"
    elif first.kind == "weights":
        yield "another seed, another checkpoint, or weights that the wrapper changed"
    elif first.kind == "forward":
        if _random(a) != _random(b):
            yield "the random state before the pass is another: masks of dropout"
        yield "this module computes otherwise: its settings, a kernel, weights that it alone has, training mode"
    elif first.kind in ("gradient", "clipped", "norm"):
        times = uniform(alike)
        if times is not None and (abs(times) < NOTHING or abs(times - 1) * clear <= 1):  # none lacks it for certain
            yield from _of_factor(times, first, a, b)
        elif times is not None and len(alike) == 1:
            yield f"this one alone is x {times:.4g}: a hook, a tied weight, or sums over ranks or passes without it"
        elif first.factor is not None:
            yield f"what flows back through this module is {first.factor:.4g} times as much"
        elif first.kind == "gradient":
            yield "a part of the batch is missing or counted twice (a micro batch, a rank), or parts are mixed up"
            yield "sums or masters are rounded to 16 bits" if first.distance < 0.05 else "another loss"
        else:
            yield "clipping: another norm, or of a part of the gradients"
    elif first.kind in ("whole", "update"):
        times = uniform(alike)
        if times is not None and abs(times) < NOTHING:
            yield "B's optimizer does not have it, or has not stepped"
        elif times is not None:
            yield f"the learning rate: x {times:.4g}"
        yield "the optimizer's settings, or its states: rate, decay, groups, betas, epsilon, moments"
        if first.distance > 0.5 and first.distance < 2 and times is None:
            yield "masters that are kept in 16 bits, or a shard that is not gathered"


def _of_factor(times: float, first: Difference, a: Recording, b: Recording) -> Iterator[str]:
    if abs(times) < NOTHING:
        yield "it is zero in B: lost, or detached"
        return
    if first.kind in ("clipped", "norm"):
        yield f"clipping: what the optimizer gets is x {times:.4g}; another limit, or a norm of other gradients"
    names = {"ranks": (a.world_size, b.world_size), "forward passes of a step": (_passes(a), _passes(b))}
    for what, counts in names.items():
        for count in dict.fromkeys(counts):
            if count > 1 and math.isclose(times, count, rel_tol=NEAR):
                yield f"x {count}, the number of {what}: summed where the other takes the mean"
            if count > 1 and math.isclose(times, 1 / count, rel_tol=NEAR):
                yield f"x 1/{count}, one over the number of {what}: divided twice, or {count - 1} of {count} lost"
    both = a.world_size * _passes(a)
    if both not in (a.world_size, _passes(a)) and any(math.isclose(times, f, rel_tol=NEAR) for f in (both, 1 / both)):
        yield f"x {times:.4g}: by ranks and forward passes, {both}"
    scale = max(abs(times), 1 / abs(times))
    if scale >= 128 and math.isclose(scale, 2 ** round(math.log2(scale)), rel_tol=NEAR):
        yield f"x {times:.4g}: a loss scale that one of them does not take out"
    losses = [_loss(recording) for recording in (a, b)]
    if all(losses) and math.isclose(losses[1] / losses[0], times, rel_tol=NEAR):
        yield "what backward is called on has the same factor: it is the loss"


def _passes(recording: Recording) -> int:
    return len(recording.cut[0])


def _loss(recording: Recording) -> float:
    return next((e.sketch[0] for e in recording.ranks[0] if e.kind == "loss" and e.step == 1 and e.sketch), 0.0)


def _random(recording: Recording) -> list[list[float]]:
    """Before each rank's first pass: later ones depend on how the batch is cut."""
    return [next((e.sketch for e in entries if e.kind == "random"), []) for entries in recording.ranks]
