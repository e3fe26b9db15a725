"""Suggest likely causes of the first difference between two trainings. None of them is certain."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from .bounds import ROUNDOFF
from .recorded import Difference, Recording

NEAR = 5e-3  # relative tolerance for comparing a factor with another number
NOTHING = 1e-6  # a factor below this counts as zero
ADAPTER = ".lora_"  # in the names of the parameters that PEFT adds
REFERENCE = "`prove --reference` finds which training normalizes its loss wrongly."
LOSS_SCALES_FROM = 128  # a power of two from here on may be a loss scale


class _Pattern(NamedTuple):
    """The facts about the first difference from which causes are concluded."""

    first: Difference
    factor: float | None  # common to all differences of its kind and step; None if they have no common one
    is_only_one: bool  # whether it is the only difference of its kind and step
    is_in_adapters: bool  # whether all differences of its kind and step are in adapters
    size_over_bound: float  # the maximum of norm / bound over the equal tensors of its kind and step
    a: Recording
    b: Recording


def explain(
    differences: Sequence[Difference],
    a: Recording,
    b: Recording,
    sizes_over_bounds: Mapping[tuple[int, str], float],
) -> list[str]:
    """Return the likely causes of the first difference, the most likely first. Empty if no known pattern fits.

    `sizes_over_bounds` has, by step and kind, the maximum of norm divided by bound over the tensors that are equal.
    """
    if not differences:
        return []
    first = differences[0]
    alike = [difference for difference in differences if difference[:2] == first[:2]]
    size_over_bound = sizes_over_bounds.get(first[:2], 0.0)
    is_in_adapters = all(ADAPTER in difference.name for difference in alike)
    pattern = _Pattern(first, uniform_factor(alike), len(alike) == 1, is_in_adapters, size_over_bound, a, b)
    return list(_causes(pattern))


def uniform_factor(differences: Sequence[Difference]) -> float | None:
    """Return the factor by which B's tensors are a multiple of A's. None if no one factor fits all differences."""
    factors = [difference.factor for difference in differences if difference.factor is not None]
    if len(factors) < len(differences):
        return None
    middle = sorted(factors)[len(factors) // 2]
    return middle if all(abs(factor - middle) <= NEAR * abs(middle) for factor in factors) else None


def _causes(pattern: _Pattern) -> Iterator[str]:
    first = pattern.first
    if first.broken:
        yield "an overflow or a division by zero. Nothing after this tensor can be compared."
    elif first.missing:
        yield _of_missing(first, first.missing, pattern.a if first.missing == "A" else pattern.b)
    else:
        if 0 < len(first.ranks) < pattern.a.world_size and first.kind != "batch":
            yield f"only rank {first.ranks[0]} differs. Its shard, its weights or its code may be different."
        if first.kind in _BY_KIND:
            yield from _BY_KIND[first.kind](pattern)


def _of_missing(first: Difference, side: str, recording: Recording) -> str:
    """Return why a side has no tensor of the first difference."""
    if first.kind == "weights":
        return "the models have different parameters, or different names for them."
    if first.kind in ("update", "whole") and _is_rate_zero(recording, first.step):
        return f"the learning rate of {side} is 0 in step {first.step}."
    if first.kind == "whole":
        why = "it ended before the first one, or its optimizer is not from torch.optim"
        return f"no update of {side} was recorded: {why}."
    return f"{first.name} is not trained in {side}, because it is frozen, or because no backward pass reaches it."


def _is_rate_zero(recording: Recording, step: int) -> bool:
    rates = [rate for rates in recording.facts["rates"][step - 1 : step] for rate in rates]
    return bool(rates) and not any(rates)


def _of_batch(pattern: _Pattern) -> Iterator[str]:
    first = pattern.first
    a, b = pattern.a, pattern.b
    in_a, in_b = (sum(map(len, recording.rows(first.step))) for recording in (a, b))
    # One pass on each of several ranks is no more than one pass on a single rank.
    if in_a != in_b and in_a * b.world_size != in_b * a.world_size:
        yield (
            f"A has {in_a} forward passes, and B has {in_b}. The trainings differ in accumulation, evaluation mode "
            "or updates."
        )
    yield (
        "the order of the data differs, because of seeds, samplers, shuffling or workers."
        if "order" in first.name
        else "the data differ."
    )


def _of_weights(_: _Pattern) -> Iterator[str]:
    yield "the seeds or checkpoints differ, or the wrapper changed the weights."


def _of_output(pattern: _Pattern) -> Iterator[str]:
    if _random_state(pattern.a) != _random_state(pattern.b):
        yield "the random state before the forward pass differs, so the dropout masks differ, too."
    yield "this module computes something different, because its settings, kernel, weights or training mode differ."


def _of_gradients(pattern: _Pattern) -> Iterator[str]:
    first, factor = pattern.first, pattern.factor
    # Whether all gradients may have the factor: the equal ones must be so small that their bound could hide it.
    is_of_all = factor is not None and (abs(factor) < NOTHING or abs(factor - 1) * pattern.size_over_bound <= 1)
    if factor is not None and is_of_all:
        yield from _of_factor(factor, pattern)
    elif factor is not None and pattern.is_only_one:
        yield (
            f"only this gradient is {factor:.4g} times as large, because of a hook, a tied weight, or "
            "a sum that leaves it out."
        )
    elif first.factor is not None:
        yield f"the gradient that flows back through this module is {first.factor:.4g} times as large."
    elif first.kind == "gradient":
        yield "a micro batch or the batch of a rank is missing, counted twice or exchanged with another one."
        yield (
            "sums or master weights are rounded to 16 bits."
            if first.distance < 0.05
            else f"the trainings compute different losses, or divide them by other numbers of targets. {REFERENCE}"
        )
    else:
        yield "clipping uses a different norm, or the norm of only a part of the gradients."


def _of_update(pattern: _Pattern) -> Iterator[str]:
    factor = pattern.factor
    if factor is not None:
        is_none = abs(factor) < NOTHING
        if is_none and any(entry.kind == "weights" and entry.dtype in ROUNDOFF for entry in pattern.b.ranks[0]):
            yield "the weights have 16 bits in B, without fp32 master weights, so that small updates round to nothing."
        step = pattern.first.step
        yield (
            f"the learning rate is {factor:.4g} times as large in B."
            if not is_none
            else f"the learning rate of B is 0 in step {step}."
            if _is_rate_zero(pattern.b, step)
            else "B's optimizer does not have this parameter, or has not stepped."
        )
    yield "the optimizer's settings or states differ: learning rate, weight decay, groups, betas, epsilon or moments."
    if factor is None and 0.5 < pattern.first.distance < 2:
        yield "master weights are kept in 16 bits, or a shard is not gathered."


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
        yield "the gradient is zero in B, because it is lost or detached."
        return
    if pattern.first.kind in ("clipped", "norm"):
        yield (
            f"the clipped gradients in B are {factor:.4g} times as large, because of a different limit, or because the "
            "norm includes different gradients."
        )
    yield from _of_count(factor, "ranks", (a.world_size, b.world_size))
    yield from _of_count(factor, "forward passes per step", (_passes(a), _passes(b)))
    product = a.world_size * _passes(a)
    if product not in (a.world_size, _passes(a)) and (_is_near(factor, product) or _is_near(factor, 1 / product)):
        yield (
            f"the factor {factor:.4g} is the product of ranks and forward passes ({product}), or one "
            "divided by this product."
        )
    scale = max(abs(factor), 1 / abs(factor))
    if scale >= LOSS_SCALES_FROM and _is_near(scale, 2 ** round(math.log2(scale))):
        yield f"the factor {factor:.4g} is a loss scale that one of the trainings does not remove."
    in_a, in_b = _loss(a), _loss(b)
    if in_a and in_b and _is_near(in_b / in_a, factor):
        yield "the losses, on which backward is called, differ by the same factor."
    elif pattern.is_in_adapters:
        yield f"the scale of the adapters, lora_alpha over the rank, is {factor:.4g} times as large in B."
    elif pattern.first.kind == "gradient":
        yield f"a scale of the loss differs, such as a division by ranks, micro batches or tokens. {REFERENCE}"


def _of_count(factor: float, noun: str, counts: tuple[int, int]) -> Iterator[str]:
    """Yield a cause if a factor is one of these counts (of ranks or forward passes), or 1 divided by one of them."""
    for count in dict.fromkeys(counts):
        if count > 1 and _is_near(factor, count):
            yield (
                f"the factor is {count}, the number of {noun}: one training sums gradients that the "
                "other training averages."
            )
        if count > 1 and _is_near(factor, 1 / count):
            yield (
                f"the factor is 1/{count}, and {count} is the number of {noun}. The gradients are divided twice, or "
                f"{count - 1} of {count} are lost."
            )


def _is_near(factor: float, number: float) -> bool:
    return math.isclose(factor, number, rel_tol=NEAR)


def _passes(recording: Recording) -> int:
    return len(recording.cut[0])


def _loss(recording: Recording) -> float:
    return next((e.sketch[0] for e in recording.ranks[0] if e.kind == "loss" and e.step == 1 and e.sketch), 0.0)


def _random_state(recording: Recording) -> list[list[float]]:
    """Return the random state before each rank's first pass. Later states depend on how the batch is split."""
    return [next((e.sketch for e in entries if e.kind == "random"), []) for entries in recording.ranks]
