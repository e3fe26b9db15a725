"""What most likely makes a first difference, by its pattern. Said as that, and never as what is known."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from .recorded import Difference, Recording

NEAR = 5e-3  # relative; of a factor and a whole number
NOTHING = 1e-6  # a factor that is none
LOSS_SCALES_FROM = 128  # a power of two from here on may be a loss scale


class _Pattern(NamedTuple):
    """What is known of a first difference."""

    first: Difference
    factor: float | None  # that all differences of its kind and step have; None: they have not one
    is_only_one: bool  # of its kind and step
    size_over_bound: float  # of what is alike of that kind: how large the largest tensor is over its bound
    a: Recording
    b: Recording


def explain(
    differences: Sequence[Difference],
    a: Recording,
    b: Recording,
    sizes_over_bounds: Mapping[tuple[int, str], float],
) -> list[str]:
    """The likeliest causes of the first of these, the likeliest first; none where no pattern fits.

    `sizes_over_bounds`: by step and kind, how large the largest tensor that is alike is over its bound.
    """
    if not differences:
        return []
    first = differences[0]
    alike = [difference for difference in differences if difference[:2] == first[:2]]
    size_over_bound = sizes_over_bounds.get(first[:2], 0.0)
    return list(_causes(_Pattern(first, uniform_factor(alike), len(alike) == 1, size_over_bound, a, b)))


def uniform_factor(differences: Sequence[Difference]) -> float | None:
    """The factor that all of these have; None: they have not one."""
    factors = [difference.factor for difference in differences if difference.factor is not None]
    if len(factors) < len(differences):
        return None
    middle = sorted(factors)[len(factors) // 2]
    return middle if all(abs(factor - middle) <= NEAR * abs(middle) for factor in factors) else None


def _causes(pattern: _Pattern) -> Iterator[str]:
    first = pattern.first
    if first.broken:
        yield "an overflow, or a division by zero: nothing after it can be compared"
    elif first.missing:
        yield _of_missing(first, first.missing)
    else:
        if 0 < len(first.ranks) < pattern.a.world_size and first.kind != "batch":
            yield f"rank {first.ranks[0]} alone: its shard, its weights or its code are others"
        if first.kind in _BY_KIND:
            yield from _BY_KIND[first.kind](pattern)


def _of_missing(first: Difference, side: str) -> str:
    if first.kind == "weights":
        return "the models have other parameters, or other names for them"
    if first.kind == "whole":
        return f"{side} makes no update: it ended before, or its optimizer is not one of torch.optim"
    return f"{first.name} takes no part in {side}: frozen, or reached by no backward pass"


def _of_batch(pattern: _Pattern) -> Iterator[str]:
    first = pattern.first
    in_a, in_b = (sum(map(len, recording.rows(first.step))) for recording in (pattern.a, pattern.b))
    if in_a != in_b:
        yield f"{in_a} forward passes in A and {in_b} in B: accumulation, evaluation mode, or updates"
    yield "the order of the data: seeds, samplers, shuffling, workers" if "order" in first.name else "the data"


def _of_weights(_: _Pattern) -> Iterator[str]:
    yield "another seed, another checkpoint, or weights that the wrapper changed"


def _of_output(pattern: _Pattern) -> Iterator[str]:
    if _random_state(pattern.a) != _random_state(pattern.b):
        yield "the random state before the pass is another: masks of dropout"
    yield "this module computes otherwise: its settings, a kernel, weights that it alone has, training mode"


def _of_gradients(pattern: _Pattern) -> Iterator[str]:
    first, factor = pattern.first, pattern.factor
    # Whether nothing that is alike lacks the factor: it is so small over its bound that it could have it unseen.
    is_of_all = factor is not None and (abs(factor) < NOTHING or abs(factor - 1) * pattern.size_over_bound <= 1)
    if factor is not None and is_of_all:
        yield from _of_factor(factor, pattern)
    elif factor is not None and pattern.is_only_one:
        yield f"this one alone is x {factor:.4g}: a hook, a tied weight, or sums over ranks or passes without it"
    elif first.factor is not None:
        yield f"what flows back through this module is {first.factor:.4g} times as much"
    elif first.kind == "gradient":
        yield "a part of the batch is missing or counted twice (a micro batch, a rank), or parts are mixed up"
        yield "sums or masters are rounded to 16 bits" if first.distance < 0.05 else "another loss"
    else:
        yield "clipping: another norm, or of a part of the gradients"


def _of_update(pattern: _Pattern) -> Iterator[str]:
    factor = pattern.factor
    if factor is not None:
        is_none = abs(factor) < NOTHING
        yield "B's optimizer does not have it, or has not stepped" if is_none else f"the learning rate: x {factor:.4g}"
    yield "the optimizer's settings, or its states: rate, decay, groups, betas, epsilon, moments"
    if factor is None and 0.5 < pattern.first.distance < 2:
        yield "masters that are kept in 16 bits, or a shard that is not gathered"


_BY_KIND: dict[str, Callable[[_Pattern], Iterator[str]]] = {
    "batch": _of_batch,
    "weights": _of_weights,
    "forward": _of_output,
    "gradient": _of_gradients,
    "clipped": _of_gradients,
    "norm": _of_gradients,
    "whole": _of_update,
    "update": _of_update,
}


# ---------------------------------------------------------------- one factor of all gradients


def _of_factor(factor: float, pattern: _Pattern) -> Iterator[str]:
    a, b = pattern.a, pattern.b
    if abs(factor) < NOTHING:
        yield "it is zero in B: lost, or detached"
        return
    if pattern.first.kind in ("clipped", "norm"):
        yield f"clipping: what the optimizer gets is x {factor:.4g}; another limit, or a norm of other gradients"
    yield from _of_count(factor, "ranks", (a.world_size, b.world_size))
    yield from _of_count(factor, "forward passes of a step", (_passes(a), _passes(b)))
    product = a.world_size * _passes(a)
    if product not in (a.world_size, _passes(a)) and (_is_near(factor, product) or _is_near(factor, 1 / product)):
        yield f"x {factor:.4g}: by ranks and forward passes, {product}"
    if _is_loss_scale(max(abs(factor), 1 / abs(factor))):
        yield f"x {factor:.4g}: a loss scale that one of them does not take out"
    in_a, in_b = _loss(a), _loss(b)
    if in_a and in_b and _is_near(in_b / in_a, factor):
        yield "what backward is called on has the same factor: it is the loss"


def _of_count(factor: float, noun: str, counts: tuple[int, int]) -> Iterator[str]:
    """Whether a factor is a number of ranks or passes, or one over it."""
    for count in dict.fromkeys(counts):
        if count > 1 and _is_near(factor, count):
            yield f"x {count}, the number of {noun}: summed where the other takes the mean"
        if count > 1 and _is_near(factor, 1 / count):
            yield f"x 1/{count}, one over the number of {noun}: divided twice, or {count - 1} of {count} lost"


def _is_near(factor: float, number: float) -> bool:
    return math.isclose(factor, number, rel_tol=NEAR)


def _is_loss_scale(scale: float) -> bool:
    return scale >= LOSS_SCALES_FROM and _is_near(scale, 2 ** round(math.log2(scale)))


def _passes(recording: Recording) -> int:
    return len(recording.cut[0])


def _loss(recording: Recording) -> float:
    return next((e.sketch[0] for e in recording.ranks[0] if e.kind == "loss" and e.step == 1 and e.sketch), 0.0)


def _random_state(recording: Recording) -> list[list[float]]:
    """Before each rank's first pass: later ones depend on how the batch is cut."""
    return [next((e.sketch for e in entries if e.kind == "random"), []) for entries in recording.ranks]
