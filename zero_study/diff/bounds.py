"""Estimate how far rounding alone can move each tensor of a training, and order tensors by execution.

A distance is the 2-norm of the difference of two tensors, estimated from their sketches. The bound of a tensor is
MARGIN times its largest distance in the runs with noise. It is at least some units of fp32, relative to the group of
tensors that this one belongs to. Without runs with noise, the bound is estimated from type and depth, which is a rule
of thumb.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from .recorded import Key, Recording, Seen

MARGIN = 8
ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11}  # unit roundoff; other types have that of fp32
FP32 = 2.0**-24
FLOOR = 16 * FP32
FACTOR = 1e-3  # relative; a tensor this close to a multiple of another one counts as a multiple
FEW = 8  # a sketch can separate fewer elements than this, whose sign rounding may change, from all others
# In the order of execution. `update` is the change of a parameter in a step. `whole` is the change of all parameters
# together, of which only the length is compared.
KINDS = ("forward", "gradient", "norm", "clipped", "update", "whole")


def norm(values: np.ndarray) -> float:
    """Return the 2-norm of a tensor, estimated from its sketch (a few sums that stand for the tensor)."""
    return float(np.linalg.norm(values))


def distance(kind: str, ours: Seen, theirs: Seen) -> float:
    """Return how far a tensor of training B is from the same tensor of training A.

    For the update of all parameters (`whole`), it is the difference between the length of A's update and the length of
    B's update in A's direction. Single elements hardly change that length.
    """
    if kind == "whole":
        length = norm(ours.sketch)
        return abs(float(ours.sketch @ theirs.sketch) / length - length) if length else norm(theirs.sketch)
    return norm(theirs.sketch - ours.sketch)


def roundoff(*tensors: Seen) -> float:
    """Return the unit roundoff of the least precise data type of these tensors."""
    return max(ROUNDOFF.get(tensor.dtype, FP32) for tensor in tensors)


def unit_of(a: Recording, b: Recording) -> float:
    """Return the unit roundoff of the least precise data type in two recordings."""
    return max((ROUNDOFF.get(entry.dtype, FP32) for recording in (a, b) for entry in recording.ranks[0]), default=FP32)


def factor(ours: np.ndarray, theirs: np.ndarray, bound: float) -> float | None:
    """Return the factor by which B's tensor is a multiple of A's. None if it is not a multiple."""
    length = float(ours @ ours)
    if not length:
        return None
    multiple = float(ours @ theirs) / length
    remainder = norm(theirs - multiple * ours)
    return multiple if remainder <= max(2 * bound, FACTOR * norm(theirs)) else None


class Bounds:
    """The largest difference that rounding explains, for each tensor, and the order in which tensors are computed."""

    def __init__(self, a: Recording, b: Recording, ours: dict[Key, Seen], by_call: bool) -> None:
        """Compute the bounds from two recordings. `ours` has A's tensors.

        If `by_call`, outputs are compared by rank and call, otherwise only their means over all rows.
        """
        self._noise: dict[Key, float] = {}
        for key, noise_distance in _distances_of_noise(a, b, by_call):
            self._noise[key] = max(self._noise.get(key, 0.0), noise_distance)
        self.is_marked = not self._noise
        self._unit = unit_of(a, b)
        outputs = [entry.name.partition(":")[0] for entry in a.ranks[0] if entry.kind == "forward"]
        self._order = {name: place for place, name in enumerate(dict.fromkeys(outputs))}  # of the first forward pass
        # Some engines do not show in which order the backward pass reaches the parameters.
        backward: list[str] = next((each.facts["backward"] for each in (a, b) if each.facts["backward"]), [])
        self._backward = {name: place for place, name in enumerate(backward)}
        self._ours = ours
        self._names = dict.fromkeys((key.step, key.name) for key in ours if key.kind == "update")
        self._elements = Counter[int]()  # of the weights, by step
        self._totals: dict[tuple[int, str, Any], float] = {}
        for key, seen in ours.items():
            at = _total_of(key)
            self._totals[at] = math.hypot(self._totals.get(at, 0.0), norm(seen.sketch[np.isfinite(seen.sketch)]))
            self._elements[key.step] += seen.size if key.kind == "weights" else 0

    def place(self, key: Key) -> tuple[Any, ...]:
        """Return a key that sorts tensors in the order in which they are computed."""
        calls = key.place[1] if isinstance(key.place, tuple) else key.place or 0
        rank = key.rank or 0
        module = key.name if key.kind == "forward" else key.name.rpartition(".")[0]
        at = self._order.get(module, len(self._order))
        kinds = KINDS.index(key.kind) if key.kind in KINDS else -1
        if key.kind == "forward":
            return (key.step, kinds, calls, at, rank, key.name)
        return (key.step, kinds, 0, self._backward.get(key.name, len(self._backward)), -at, rank, key.name)

    def distance_and_bound(self, key: Key, ours: Seen, theirs: Seen) -> tuple[float, float]:
        """Return the distance of B's tensor from A's, and the largest distance that rounding explains."""
        separation, bound = distance(key.kind, ours, theirs), self._bound(key, ours, theirs)
        if key.kind == "update" and separation <= bound < math.inf:
            return self._without_turned(key, ours, theirs) or (separation, bound)
        return separation, bound

    def _without_turned(self, key: Key, ours: Seen, theirs: Seen) -> tuple[float, float] | None:
        """Return distance and bound of an update, without the few elements whose sign rounding may change.

        Each of these elements changes only one sum of a sketch, so the other sums should be equal. A wrong setting of
        this tensor, such as its learning rate, changes all sums. None if there are too many such elements to separate
        them, or if the other sums are equal.
        """
        expected, most = self._turned(key, ours, [key.name])
        if most >= FEW:
            return None
        moved = norm(np.sort(np.abs(theirs.sketch - ours.sketch))[: -math.ceil(most)])
        explained = max(self._floor(key), 2 * math.sqrt(expected / max(1, ours.size)) * norm(ours.sketch))
        return (moved, explained) if moved > explained else None

    def _floor(self, key: Key) -> float:
        """Return the bound on an update in which no sign changes, from its own noise and the rounding of weights."""
        weights = self._ours[key._replace(kind="weights")]
        return max(MARGIN * self._noise.get(key, 0.0), 4 * FP32 * norm(weights.sketch))

    def _turned(self, key: Key, ours: Seen, names: Sequence[str]) -> tuple[float, float]:
        """Return for how many elements of an update rounding may change the sign: the expected number, and the maximum.

        Adam makes steps of full length even if a gradient is small. If the gradient of an element is smaller than its
        noise, the step may therefore have the opposite sign.
        """
        keys = [key._replace(kind="clipped", name=name) for name in names]
        clipped = [each for each in keys if each in self._ours]
        gradient = math.hypot(*(norm(self._ours[each].sketch) for each in clipped))
        total_noise = math.hypot(*(self._noise_of_gradient(each, gradient) for each in clipped))
        share = min(1.0, (total_noise + FP32 * gradient) / gradient) if gradient else 1.0
        expected = ours.size * share
        return expected, min(ours.size, expected + 3 * math.sqrt(expected) + 1)

    def _noise_of_gradient(self, key: Key, gradient: float) -> float:
        return self._noise.get(key, 0.0) if self._noise else self._by_depth(key) * gradient / MARGIN

    def _bound(self, key: Key, ours: Seen, theirs: Seen) -> float:
        """Return the largest distance that rounding explains."""
        size = norm(ours.sketch)
        noise = MARGIN * self._noise.get(key, math.inf) if self._noise else self._by_depth(key) * size
        if key.kind == "forward":
            # For instance, if an autocast output is compared with that of a model in 16 bits.
            of_types = 2 * roundoff(ours, theirs) * size if ours.dtype != theirs.dtype else 0.0
            return max(noise, of_types, FLOOR * size)
        if key.kind == "update":
            if self.is_marked and self._unit > FP32:
                return math.inf  # the rule of thumb cannot judge single updates in 16 bits
            _, turned = self._turned(key, ours, [key.name])
            return max(self._floor(key), 2 * math.sqrt(turned / max(1, ours.size)) * size)
        if key.kind == "whole":
            names = [name for step, name in self._names if step == key.step]
            _, turned = self._turned(key, ours, names)
            return max(noise if self._noise else 0.0, 2 * turned / max(1, ours.size) * size)
        total = self._totals[_total_of(key)]
        if key.kind in ("norm", "clipped"):  # each engine adds these up in its own order and parts
            noise = max(noise, FP32 * math.sqrt(self._elements[key.step]) * size)
        return max(noise, FLOOR * total, self._by_depth(key) * total / 8 if self.is_marked else 0.0)

    def _by_depth(self, key: Key) -> float:
        """Return the relative bound of a tensor, estimated from its data type and its depth in the model.

        It is MARGIN times the roundoff of the coarsest type, times the square root of modules times steps, because
        rounding errors are assumed to grow like a random walk.
        """
        modules = len(self._order)
        depth = 2 * modules
        if key.kind == "forward":
            depth = self._order.get(key.name.partition(":")[0], modules) + 1
        return MARGIN * self._unit * math.sqrt(depth * key.step)


def _distances_of_noise(a: Recording, b: Recording, by_call: bool) -> Iterator[tuple[Key, float]]:
    """Yield how far random rounding moved each tensor: its distance from the same tensor without random rounding."""
    for recording in (a, b):
        exact = recording.values(by_call) if recording.noise else {}
        for draw in recording.noise:
            for key, tensor in draw.values(by_call).items():
                if key in exact and tensor.sketch.shape == exact[key].sketch.shape:
                    yield key, distance(key.kind, exact[key], tensor)


def _total_of(key: Key) -> tuple[int, str, Any]:
    """Return the group of a tensor: for an output, its forward pass; otherwise all tensors of its kind and rank."""
    return key.step, key.kind, key.place if key.kind == "forward" else key.rank
