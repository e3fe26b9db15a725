"""Judge whether an engine trained a configuration (cell) as the reference did, within what rounding explains."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from . import reference
from .cells import ADAMW, IN_8_BITS, NUM_STEPS, SMALLEST_IN_8_BITS, Cell
from .probe import sampled
from .reference import Expected

Shares = dict[str, list[float]]  # by quantity: after each step, the deviation divided by its bound


def judge(cell: Cell, expected: Expected, ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Compare the training of one configuration with the reference, and return the verdict.

    `ranks` has the trace of each rank (see `probe.train`). In the verdict, `share_of_bound` is the largest deviation of
    any quantity, divided by its bound. The training is wrong if this is above 1, if the weights of two ranks differ in
    any bit, or if optimizer states have a wrong type. `unseen` lists the quantities that were not compared because the
    engine does not show them.
    """
    shares = _worst_shares(cell, expected, ranks)
    share, quantity = max((max(by_step), quantity) for quantity, by_step in shares.items())
    difference = _difference_of_ranks(ranks)
    states = _wrong_states(cell, ranks)
    is_wrong = share > 1 or difference is not None or bool(states)
    verdict = {
        "verdict": "wrong" if is_wrong else "same",
        "share_of_bound": _four_digits(share),
        "of": quantity,
        "seconds": round(max(trace["seconds"] for trace in ranks), 3),
    }
    if unseen := _unseen(cell, expected, ranks):
        verdict["unseen"] = unseen
    if states:
        verdict["wrong_states"] = states
    if not is_wrong:
        return verdict
    deviations = [by_step for trace in ranks for by_step in _deviations(cell, expected, trace)[quantity][0]]
    deviation = math.inf if any(map(math.isnan, deviations)) else max(deviations)
    return verdict | _how_wrong(expected, ranks, shares, difference) | {"deviation": _four_digits(deviation)}


def _worst_shares(cell: Cell, expected: Expected, ranks: Sequence[dict[str, Any]]) -> Shares:
    """Return, for each quantity and step, the largest deviation of any rank divided by its bound."""
    worst: Shares = {}
    for trace in ranks:
        for quantity, (deviations, bounds) in _deviations(cell, expected, trace).items():
            shares = [_ratio(deviation, bound) for deviation, bound in zip(deviations, bounds, strict=True)]
            worst[quantity] = [max(pair) for pair in zip(shares, worst.get(quantity, shares), strict=True)]
    return worst


def _how_wrong(
    expected: Expected, ranks: Sequence[dict[str, Any]], shares: Shares, difference: dict[str, Any] | None
) -> dict[str, Any]:
    """Return the fields that only the verdict "wrong" has.

    `difference` is the result of `_difference_of_ranks`.
    """
    trace = ranks[0]
    steps = [step for by_step in shares.values() for step, share in enumerate(by_step, 1) if share > 1]
    norms = zip(trace["norms"], expected.norms, strict=True)
    return {
        "first_step": min([*steps, difference["step"]] if difference else steps, default=None),
        "beyond": sorted(quantity for quantity, by_step in shares.items() if max(by_step) > 1),
        "norm_scale": [None if norm is None else _four_digits(norm / float(right)) for norm, right in norms],
        "update_scale": update_scale(expected, trace),
        "ranks_apart": difference or False,
        "not_finite": _not_finite(ranks),
    }


def _not_finite(ranks: Sequence[dict[str, Any]]) -> list[str]:
    """Return the quantities that are NaN or infinite on a rank after any step: loss, norm, masters or weights."""
    quantities = set()
    for trace in ranks:
        for quantity, key in (("loss", "losses"), ("norm", "norms")):
            if not all(number is None or math.isfinite(number) for number in trace[key]):
                quantities.add(quantity)
        for key in ("masters", "weights"):
            if not all(values.isfinite().all() for step in trace[key] for values in step.values()):
                quantities.add(key)
    return sorted(quantities)


def _deviations(cell: Cell, expected: Expected, trace: dict[str, Any]) -> dict[str, tuple[list[float], list[float]]]:
    """Return the deviations of one rank's quantities from the reference, and their bounds, after each step.

    Both are measured as `Expected` describes. If the engine shows master weights, its weights must equal the rounded
    masters in every bit.
    """
    deviations = {"loss": _relative(trace["losses"], expected.losses)}
    if any(norm is not None for norm in trace["norms"]):
        deviations["norm"] = _relative(trace["norms"], expected.norms)
    bounds = {quantity: bound.tolist() for quantity, bound in expected.bounds.items()}
    for name in trace["masters"][0]:
        right = [sampled(values).double() for values in expected.masters[name]]
        deviations[f"masters/{name}"] = _distances(expected, trace["masters"], name, right)
    for name in trace["weights"][0]:
        right = [sampled(values).double() for values in expected.weights[name]]
        for step, masters in enumerate(trace["masters"]):
            if name in masters:
                right[step] = reference.computed_with(cell, masters[name]).double()
                bounds[f"weights/{name}"] = [0.0] * NUM_STEPS
        deviations[f"weights/{name}"] = _distances(expected, trace["weights"], name, right)
    return {quantity: (by_step, bounds[quantity]) for quantity, by_step in deviations.items()}


def _relative(numbers: Sequence[float | None], right: torch.Tensor) -> list[float]:
    """Return the relative deviation of each step's number. It is 0 for a number that the engine does not show."""
    pairs = zip(numbers, right, strict=True)
    return [0.0 if number is None else abs(number / float(right_number) - 1) for number, right_number in pairs]


def _distances(
    expected: Expected, values: Sequence[dict[str, torch.Tensor]], name: str, right: Sequence[torch.Tensor]
) -> list[float]:
    """Return the relative distance of a parameter from its reference values, after each step.

    The distance is divided by how far the reference's masters have moved since the start. It is absolute for a
    parameter that does not move.
    """
    start = sampled(expected.start[name]).double()
    distances = []
    for step in range(NUM_STEPS):
        way = sampled(expected.masters[name][step]).double() - start
        distance = (values[step][name].double() - right[step]).norm()
        distances.append(float(distance / way.norm()) if way.any() else float(distance))
    return distances


def _ratio(deviation: float, bound: float) -> float:
    """Return a deviation divided by its bound.

    The bound is 0 for a quantity that must not change. In that case any deviation gives infinity. A deviation that is
    NaN also gives infinity.
    """
    if math.isnan(deviation):
        return math.inf
    return deviation / bound if bound else (math.inf if deviation else 0.0)


def update_scale(expected: Expected, trace: dict[str, Any]) -> list[float | None]:
    """Return, after each step, how far the weights moved in the reference's direction, relative to the reference.

    1 means that they moved as far as the reference.
    """
    scales = []
    for step in range(NUM_STEPS):
        along = squared_length = 0.0
        for name, weights in (trace["weights"][step] | trace["masters"][step]).items():
            start = sampled(expected.start[name]).double()
            way = sampled(expected.masters[name][step]).double() - start
            along += float((weights.double() - start) @ way)
            squared_length += float(way @ way)
        scales.append(_four_digits(along / squared_length))
    return scales


def _unseen(cell: Cell, expected: Expected, ranks: Sequence[dict[str, Any]]) -> list[str]:
    """Return the quantities that a rank does not show: `norm`, or `masters` of trained parameters in 16 bits.

    Masters are not required in fp32 and under autocast: the optimizer may update the weights themselves, which are
    compared with the reference.
    """
    trained = {name for name, values in expected.masters.items() if not torch.equal(values[-1], expected.start[name])}
    lacks_masters = any(trained - set(masters) for trace in ranks for masters in trace["masters"])
    unseen = {
        "norm": any(None in trace["norms"] for trace in ranks),
        "masters": lacks_masters and cell.reference_key.precision in reference.IN_16_BITS,
    }
    return [quantity for quantity, is_unseen in unseen.items() if is_unseen]


def _difference_of_ranks(ranks: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the first step after which the ranks' weights differ, with the parameters. None if they never differ.

    The trace of every rank has full weights: its own replica under DDP and ZeRO 0 to 2, otherwise gathered weights.
    """
    for step in range(NUM_STEPS):
        first, *following = (trace["weights"][step] for trace in ranks)
        names = [name for name in first if not all(_same_bits(first[name], weights[name]) for weights in following)]
        if names:
            return {"step": step + 1, "of": names}
    return None


def _wrong_states(cell: Cell, ranks: Sequence[dict[str, Any]]) -> list[str]:
    """Return the types of optimizer states that differ from those of the same optimizer without an engine.

    In fp32, states are in fp32. An optimizer in 8 bits has such states for every parameter of at least
    SMALLEST_IN_8_BITS elements. Under ZeRO 1 to 3, the partition of a rank counts as one parameter.
    """
    if cell.optimizer == ADAMW:
        return []
    wrong = set()
    for num_elements, kind in (state for trace in ranks for state in trace["states"]):
        is_exact = kind == "float32"
        should_be_exact = cell.optimizer not in IN_8_BITS or num_elements < SMALLEST_IN_8_BITS
        if is_exact != should_be_exact and (cell.precision == "fp32" or not should_be_exact):
            wrong.add(f"{kind} for {num_elements} elements")
    return sorted(wrong)


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.view(torch.int32), right.view(torch.int32))  # a NaN is not equal to itself


def _four_digits(number: float) -> float | None:
    """Round a number to four digits, which are enough to compare. None if it is not finite."""
    return float(f"{number:.4g}") if math.isfinite(number) else None


class References:
    """A cache of reference trainings. Configurations with the same `reference_key` share one."""

    def __init__(self) -> None:
        self._by_key: dict[Cell, Expected] = {}

    def of(self, cell: Cell) -> Expected:
        key = cell.reference_key
        if key not in self._by_key:
            self._by_key[key] = reference.expect(key)
        return self._by_key[key]
