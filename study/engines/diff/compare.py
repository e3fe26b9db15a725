"""Compare two recordings, and find the first difference that rounding does not explain."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...errors import Refusal
from .bounds import KINDS, Bounds, factor, norm
from .causes import explain
from .inputs import different_batches, different_weights, outputs_without_rows, some_names
from .recorded import Difference, Key, Recording, Seen

EXACT = 1e-12  # relative; threads that add up a sketch in another order make a smaller difference
NAMES = {
    "forward": "output",
    "clipped": "clipped gradient",
    "whole": "length of the update",
    "weights": "weight",
    "held": "weight",
}
_REPLICATED = ("gradient", "clipped", "weights", "held")


@dataclass
class Result:
    """The result of comparing two recordings."""

    a: Recording
    b: Recording
    is_marked: bool  # bounds are estimated from type and depth, because there are no runs with noise
    notes: list[str]
    replicas: list[str]  # ranks of one training that should be equal but differ, as texts
    differences: list[Difference]  # in the order of execution
    num_alike: int  # the equal tensors before the first difference; all tensors if there is no difference
    worst_noise_ratio: float  # the largest distance of these tensors, divided by its bound
    causes: list[str]
    unfinished: list[str]  # trainings that ended early: equal recordings do not prove that they are the same

    @property
    def is_same(self) -> bool:
        return not (self.differences or self.replicas or self.unfinished)


@np.errstate(invalid="ignore")  # subtracting infinities
def compare(a: Recording, b: Recording) -> Result:
    """Compare two recordings, and return their differences with the likely causes of the first one.

    Raises Refusal if nothing differs and neither recording has a weight update.
    """
    steps = min(a.facts["steps"], b.facts["steps"])
    by_call = a.cut == b.cut
    left_out = {} if by_call else outputs_without_rows(a, b, steps)
    ours, theirs = (
        {key: seen for key, seen in recording.values(by_call).items() if key.step <= steps} for recording in (a, b)
    )
    bounds = Bounds(a, b, ours, by_call)
    judge = _Judge(bounds, ours, theirs)
    for pair in _pairs(ours, theirs, bounds, left_out):
        judge.judge(pair)
    start = [*different_batches(a, b, steps), *different_weights(ours, theirs)]
    differences = _merged(sorted([*start, *judge.differences], key=lambda difference: difference.step))
    if not (differences or any(key.kind == "whole" for key in ours)):
        raise Refusal(
            f"{a.folder} and {b.folder}: neither recording has an update of weights. Record a training in which an "
            "optimizer of torch.optim steps."
        )
    return Result(
        a=a,
        b=b,
        is_marked=bounds.is_marked,
        notes=[*_notes_of_cut(by_call, left_out), *judge.notes()],
        replicas=[*_unlike_ranks("A", a), *_unlike_ranks("B", b)],
        differences=differences,
        num_alike=judge.num_alike,
        worst_noise_ratio=judge.worst_noise_ratio,
        causes=explain(differences, a, b, judge.sizes_over_bounds),
        unfinished=_unfinished(a, b),
    )


def _notes_of_cut(by_call: bool, left_out: Iterable[tuple[int, str]]) -> Iterator[str]:
    if not by_call:
        yield "the batch is split differently, so means over all rows are compared"
    if names := list(dict.fromkeys(name for _, name in left_out)):
        yield f"outputs without a row for each row of the batch are not compared: {some_names(names)}"


# ---------------------------------------------------------------- pairs of tensors


class _Pair(NamedTuple):
    """A tensor of both recordings; None for a recording that does not have it."""

    key: Key
    ours: Seen | None
    theirs: Seen | None


def _pairs(
    ours: dict[Key, Seen], theirs: dict[Key, Seen], bounds: Bounds, left_out: dict[tuple[int, str], None]
) -> Iterator[_Pair]:
    """Yield the pairs of tensors that are compared, in the order of execution."""
    for key in sorted(ours | theirs, key=bounds.place):
        is_left_out = key.kind == "forward" and (key.step, key.name) in left_out
        if key.kind in KINDS and not is_left_out:
            yield _Pair(key, ours.get(key), theirs.get(key))


class _Judge:
    """A judge of pairs of tensors, called in the order of execution, that collects the results."""

    def __init__(self, bounds: Bounds, ours: dict[Key, Seen], theirs: dict[Key, Seen]) -> None:
        self.differences: list[Difference] = []
        self.num_alike = 0  # pairs before the first difference
        self.worst_noise_ratio = 0.0  # the largest distance of these pairs, divided by its bound
        # By step and kind: the maximum of norm / bound over the equal tensors.
        self.sizes_over_bounds: dict[tuple[int, str], float] = {}
        self._bounds = bounds
        self._has = {"A": {key[:2] for key in ours}, "B": {key[:2] for key in theirs}}  # steps and kinds
        # Missing tensors that do not count as differences: (kind, the only recording that has them) -> names.
        self._only_in_one: dict[tuple[str, str], dict[str, None]] = {}

    def judge(self, pair: _Pair) -> None:
        key, ours, theirs = pair
        if ours is None or theirs is None:
            self._judge_missing(pair)
        elif ours.sketch.shape != theirs.sketch.shape:
            pass  # tensors of different shapes cannot be compared
        elif infinite := [which for which, seen in (("A", ours), ("B", theirs)) if not _is_finite(seen)]:
            self._judge_infinite(key, infinite)
        else:
            self._judge_distance(key, ours, theirs)

    def notes(self) -> list[str]:
        return [
            f"only {side} has {len(names)} more tensors of kind {NAMES.get(kind, kind)}, for instance of "
            f"{next(iter(names)) or 'the model'}"
            for (kind, side), names in self._only_in_one.items()
        ]

    def _judge_missing(self, pair: _Pair) -> None:
        key = pair.key
        missing_side, present_side, present = ("A", "B", pair.theirs) if pair.ours is None else ("B", "A", pair.ours)
        assert present is not None
        # Some engines show no tensors of a kind, or zeros for parameters that get no gradient.
        shows_kind = key.kind in ("gradient", "clipped") and key[:2] in self._has[missing_side]
        if key.kind == "whole" or (shows_kind and np.any(present.sketch)):
            self.differences.append(Difference(*key[:3], key.ranks, math.inf, 0.0, None, missing_side))
        elif key.kind not in ("norm", "update"):  # norms are optional; `different_weights` has missing weights
            self._only_in_one.setdefault((key.kind, present_side), {})[key.name] = None

    def _judge_infinite(self, key: Key, infinite: list[str]) -> None:
        # Not finite in both: the script may have masked an output, or fp16 may skip the step.
        if len(infinite) == 2 and key.kind in ("forward", "gradient", "norm", "clipped"):
            return
        broken = " and ".join(infinite)
        self.differences.append(Difference(*key[:3], key.ranks, math.inf, 0.0, None, None, broken))

    def _judge_distance(self, key: Key, ours: Seen, theirs: Seen) -> None:
        distance, bound = self._bounds.distance_and_bound(key, ours, theirs)
        size = norm(ours.sketch)
        if distance > bound:
            multiple, zero_side = factor(ours.sketch, theirs.sketch, bound), None if size else "A"
            size = size or math.inf
            relative = (distance / size, bound / size)
            self.differences.append(Difference(*key[:3], key.ranks, *relative, multiple, zero_side))
            return
        if not self.differences:
            self.num_alike += 1
            self.worst_noise_ratio = max(self.worst_noise_ratio, _ratio(distance, bound))
        self.sizes_over_bounds[key[:2]] = max(self.sizes_over_bounds.get(key[:2], 0.0), _ratio(size, bound))


def _is_finite(value: Seen) -> bool:
    return bool(np.isfinite(value.sketch).all())


def _ratio(value: float, bound: float) -> float:
    return value / bound if bound else 0.0


def _merged(differences: Iterable[Difference]) -> list[Difference]:
    """Return one difference per step, kind and name, with all ranks on which the tensor differs."""
    merged: dict[tuple[int, str, str], Difference] = {}
    for difference in differences:
        first = merged.setdefault(difference[:3], difference)
        if first is not difference:
            merged[difference[:3]] = first._replace(ranks=sorted({*first.ranks, *difference.ranks}))
    return list(merged.values())


# ---------------------------------------------------------------- each training by itself


def _unfinished(a: Recording, b: Recording) -> list[str]:
    """Return a line for each recording whose training failed, or ended before the other one."""
    lines = []
    for side, recording, counterpart in (("A", a, b), ("B", b, a)):
        is_shorter = recording.facts["completed"] < min(recording.facts["asked"], counterpart.facts["completed"])
        if recording.ended_early and (recording.facts["raised"] or is_shorter):
            lines.append(f"{side}: {recording.ended_early}")
    return lines


def _unlike_ranks(side: str, recording: Recording) -> list[str]:
    """Describe the first step and kind of tensor in which ranks of one training differ but should be equal.

    Return a list with one line; empty if no ranks differ.
    """
    for step in range(recording.facts["steps"] + 1):
        for kind in _REPLICATED:
            if ranks_by_name := _unlike_ranks_by_name(recording, step, kind):
                name, ranks = next(iter(ranks_by_name.items()))
                tensors = "weights" if kind == "held" else kind
                return [f"in {side}, ranks 0 and {ranks[0]} have different {tensors} after step {step}, in "
                        f"{len(ranks_by_name)} parameters, the first is {name}"]  # fmt: skip
    return []


def _unlike_ranks_by_name(recording: Recording, step: int, kind: str) -> dict[str, list[int]]:
    """Return the ranks on which a parameter's tensor differs from that of rank 0, by the parameter's name."""
    first, *later_ranks = [
        {entry[:4]: entry for entry in entries if (entry.step, entry.kind) == (step, kind)}
        for entries in recording.ranks
    ]
    ranks: dict[str, list[int]] = {}
    for rank, entries_of_rank in enumerate(later_ranks, 1):
        for key, entry in first.items():
            if key in entries_of_rank and not _is_alike(entry.sketch, entries_of_rank[key].sketch):
                ranks.setdefault(entry.name, []).append(rank)
    return ranks


def _is_alike(ours: Sequence[float], theirs: Sequence[float]) -> bool:
    first, second = np.array(ours), np.array(theirs)
    if first.shape != second.shape or np.array_equal(first, second, equal_nan=True):
        return True
    return norm(second - first) <= EXACT * max(norm(first), norm(second))  # False if there is a NaN
