"""The verdict on a cell: whether an engine trained the reference, within what rounding explains."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from . import reference
from .cells import NUM_STEPS, Cell
from .probe import sampled
from .reference import Expected


def judge(cell: Cell, expected: Expected, ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The verdict on what the ranks of one cell left (`probe.train`): same or wrong, and how.

    `share_of_bound` is how far the furthest quantity is, as a share of how far rounding may carry it: above 1 is wrong.
    So are ranks whose weights differ in any bit, however near to the reference each is. `unseen`: what no bound could
    be held against, since the engine does not show it.
    """
    shares: dict[str, list[float]] = {}  # of each quantity, by step; the worst rank
    for found in ranks:
        for quantity, (by_step, bounds) in _deviations(cell, expected, found).items():
            ratios = [_ratio(away, bound) for away, bound in zip(by_step, bounds, strict=True)]
            shares[quantity] = [max(pair) for pair in zip(ratios, shares.get(quantity, ratios), strict=True)]
    share, quantity = max((max(ratios), quantity) for quantity, ratios in shares.items())
    apart = _ranks_apart(ranks)
    verdict = {
        "verdict": "wrong" if share > 1 or apart else "same",
        "share_of_bound": _shown(share),
        "of": quantity,
        "seconds": round(max(found["seconds"] for found in ranks), 3),
    }
    if unseen := _unseen(cell, expected, ranks):
        verdict["unseen"] = unseen
    if verdict["verdict"] == "wrong":
        steps = [step for ratios in shares.values() for step, ratio in enumerate(ratios, 1) if ratio > 1]
        verdict["first_step"] = min([*steps, apart["step"]] if apart else steps)
        verdict["beyond"] = sorted(quantity for quantity, ratios in shares.items() if max(ratios) > 1)
        verdict["norm_scale"] = [
            _shown(norm / float(right)) if norm is not None else None
            for norm, right in zip(ranks[0]["norms"], expected.norms, strict=True)
        ]
        verdict["update_scale"] = _update_scale(expected, ranks[0])
        verdict["ranks_apart"] = apart or False
    return verdict


def _deviations(cell: Cell, expected: Expected, found: dict[str, Any]) -> dict[str, tuple[list[float], list[float]]]:
    """How far one rank's quantities are from the reference's, as `Expected` says, and may be: by step.

    Where the engine shows masters, its weights have to be these, rounded: bit by bit.
    """
    bounds = {quantity: bound.tolist() for quantity, bound in expected.bounds.items()}
    in_bf16 = cell.question.precision == "bf16"
    away = {"loss": [abs(a / float(b) - 1) for a, b in zip(found["losses"], expected.losses, strict=True)]}
    if any(norm is not None for norm in found["norms"]):
        norms = zip(found["norms"], expected.norms, strict=True)
        away["norm"] = [abs(a / float(b) - 1) if a is not None else 0.0 for a, b in norms]
    for kind, right in (("masters", expected.masters), ("weights", expected.weights)):
        for name in found[kind][0]:
            start = sampled(expected.start[name]).double()
            distances = []
            for step in range(NUM_STEPS):
                own = found["masters"][step].get(name) if kind == "weights" else None
                there = sampled(right[name][step]).double()
                if own is not None:
                    there = (own.bfloat16() if in_bf16 else own).double()
                    bounds[f"weights/{name}"] = [0.0] * NUM_STEPS
                moved = sampled(expected.masters[name][step]).double() - start
                distance = (found[kind][step][name].double() - there).norm()
                distances.append(float(distance / moved.norm()) if moved.any() else float(distance))
            away[f"{kind}/{name}"] = distances
    return {quantity: (by_step, bounds[quantity]) for quantity, by_step in away.items()}


def _ratio(away: float, bound: float) -> float:
    """A deviation as a share of its bound, which is 0 for what must not move."""
    if math.isnan(away):
        return math.inf
    return away / bound if bound else (math.inf if away else 0.0)


def _update_scale(expected: Expected, found: dict[str, Any]) -> list[float | None]:
    """How much of the reference's way the weights went, after every step: 1 is all of it, 0 is at right angles."""
    scales = []
    for step in range(NUM_STEPS):
        along = whole = 0.0
        for name, weights in (found["weights"][step] | found["masters"][step]).items():
            start = sampled(expected.start[name]).double()
            moved = sampled(expected.masters[name][step]).double() - start
            along += float((weights.double() - start) @ moved)
            whole += float(moved @ moved)
        scales.append(_shown(along / whole))
    return scales


def _unseen(cell: Cell, expected: Expected, ranks: Sequence[dict[str, Any]]) -> list[str]:
    """What a rank was not shown: a step's norm, or a trained parameter's masters where its weights are in bf16.

    In fp32 and under autocast an optimizer may work on the weights themselves, which are held against the reference.
    """
    trained = {name for name, values in expected.masters.items() if not torch.equal(values[-1], expected.start[name])}
    hidden = any(trained - set(masters) for found in ranks for masters in found["masters"])
    unseen = {
        "norm": any(None in found["norms"] for found in ranks),
        "masters": hidden and cell.question.precision == "bf16",
    }
    return [quantity for quantity, is_unseen in unseen.items() if is_unseen]


def _ranks_apart(ranks: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """After which step, and of which parameters, the ranks first hold different weights; None where they never do.

    All ranks hold whole weights: replicas of their own under DDP and ZeRO 0 to 2, else what each of them gathered.
    """
    for step in range(NUM_STEPS):
        first, *others = (found["weights"][step] for found in ranks)
        names = [name for name in first if not all(_same_bits(first[name], other[name]) for other in others)]
        if names:
            return {"step": step + 1, "of": names}
    return None


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32))  # a NaN is not equal to itself


def _shown(number: float) -> float | None:
    """Four digits are enough to read and to compare; None for what is no number."""
    return float(f"{number:.4g}") if math.isfinite(number) else None


class References:
    """The reference of each cell, worked out once for all the engines that are asked the same."""

    def __init__(self) -> None:
        self._known: dict[Cell, Expected] = {}

    def of(self, cell: Cell) -> Expected:
        question = cell.question
        if question not in self._known:
            self._known[question] = reference.expect(question)
        return self._known[question]
