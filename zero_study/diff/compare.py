"""Compare two recordings, and find the first difference that rounding does not explain."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..verdict import Checked, NotChecked, Verdict
from . import noise
from .bounds import FLOOR, KINDS, Bounds, factor, norm
from .causes import explain
from .inputs import (
    continues_after,
    different_batches,
    different_weights,
    outputs_with_padding,
    outputs_without_rows,
    padded_otherwise,
    some_names,
)
from .recorded import Difference, Key, Recording, Seen

EXACT = 1e-12  # relative; threads that add up a sketch in another order make a smaller difference
NAMES = {
    "forward": "output",
    "clipped": "clipped gradient",
    "whole": "length of the update",
    "weights": "weight",
    "held": "weight",
}
# The nouns of what was compared, with their plurals.
COMPARED = {
    "weights": ("weight before step 1", "weights before step 1"),
    "forward": ("output", "outputs"),
    "gradient": ("gradient", "gradients"),
    "norm": ("gradient norm", "gradient norms"),
    "clipped": ("clipped gradient", "clipped gradients"),
    "update": ("update of a weight", "updates of weights"),
    "whole": ("length of an update", "lengths of updates"),
}
MOST_REASONS = 3  # names that a reason lists
_REPLICATED = ("gradient", "clipped", "weights", "held")


@dataclass
class Result:
    """The result of comparing two recorded trainings: the differences, their likely causes, and what was compared."""

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
    num_steps: int  # that were compared
    num_compared: dict[str, int]  # the tensors that were compared, by kind
    not_checked: list[NotChecked]

    @property
    def verdict(self) -> Verdict:
        """The verdict on the differences, on what was compared, and on what could not be compared."""
        checked = [
            Checked(self.num_compared[kind], noun, plural=plural)
            for kind, (noun, plural) in COMPARED.items()
            if self.num_compared.get(kind)
        ]
        return Verdict.of(len(self.differences) + len(self.replicas), checked, self.not_checked)

    @property
    def is_same(self) -> bool:
        return self.verdict.result == "sound"


@np.errstate(invalid="ignore", over="ignore")  # subtracting infinities; numbers near the largest one
def compare(a: Recording, b: Recording) -> Result:
    """Compare two recorded trainings, and return their differences with the likely causes of the first one.

    Raises Refusal if a run with noise is not of the training that it belongs to.
    """
    for recording in (a, b):
        for draw in recording.noise:
            noise.check(recording, draw)
    of_a, of_b = continues_after(a, b), continues_after(b, a)
    a, b = a.after(of_a) if of_a else a, b.after(of_b) if of_b else b
    steps = min(a.facts["steps"], b.facts["steps"])
    by_call = a.cut == b.cut
    padded = padded_otherwise(a, b, steps)
    without_rows = {} if by_call else outputs_without_rows(a, b, steps)
    with_padding = {key: None for key in outputs_with_padding(a, b, padded) if key not in without_rows}
    omitted = without_rows | with_padding
    ours, theirs = (
        {key: tensor for key, tensor in recording.values(by_call).items() if key.step <= steps} for recording in (a, b)
    )
    bounds = Bounds(a, b, ours, by_call)
    judge = _Judge(bounds, ours, theirs)
    for pair in _pairs(ours, theirs, bounds, omitted):
        judge.judge(pair)
    start = [*different_batches(a, b, steps, padded), *different_weights(ours, theirs)]
    is_same = not judge.differences and judge.num_compared["gradient"] and judge.num_compared["whole"]
    parts = [first for first in start if first.kind == "batch" and is_same and not by_call]  # of sequences
    unmoved = [] if judge.differences else list(_unmoved(ours, theirs, steps))
    start = [first for first in start if first not in parts]
    differences = _merged(sorted([*start, *judge.differences, *unmoved], key=lambda difference: difference.step))
    num_weights = sum((key.step, key.kind) == (0, "weights") for key in ours.keys() & theirs.keys())
    return Result(
        a=a,
        b=b,
        is_marked=bounds.is_marked,
        notes=[
            *(
                f"{side} goes on after step {step} of the other training, whose step {step + 1} is compared as step 1"
                for side, step in (("B", of_a), ("A", of_b))
                if step
            ),
            *(
                f"the ranks get other rows or parts of rows in step {part.step}, and all gradients and updates agree"
                for part in parts
            ),
            *_notes_of_cut(by_call, without_rows),
            *_notes_of_padding(padded, with_padding),
            *judge.notes(),
        ],
        replicas=[*_unlike_ranks("A", a), *_unlike_ranks("B", b)],
        differences=differences,
        num_alike=judge.num_alike,
        worst_noise_ratio=judge.worst_noise_ratio,
        causes=explain(differences, a, b, judge.sizes_over_bounds),
        unfinished=_unfinished(a, b),
        num_steps=steps,
        num_compared={"weights": num_weights, **judge.num_compared},
        not_checked=[*_not_checked(a, b, steps, judge.num_compared, bool(omitted or judge.reshaped)), *judge.reshaped],
    )


def _unmoved(ours: dict[Key, Seen], theirs: dict[Key, Seen], steps: int) -> Iterator[Difference]:
    """Yield the weights that move in one training, and in the other keep exactly their first value."""
    for key, first in ours.items():
        if (key.step, key.kind) != (0, "weights") or key not in theirs:
            continue
        last = key._replace(step=steps)
        in_a, in_b = (
            norm(side[last].sketch - side[key].sketch) if last in side else math.nan for side in (ours, theirs)
        )
        if max(in_a, in_b) > FLOOR * norm(first.sketch) and min(in_a, in_b) == 0:
            factor_and_side = (0.0, None) if in_b == 0 else (None, "A")
            yield Difference(
                steps, "update", key.name, key.ranks, in_b / in_a if in_a else math.inf, 0.0, *factor_and_side
            )


def _notes_of_cut(by_call: bool, without_rows: Iterable[tuple[int, str]]) -> Iterator[str]:
    if not by_call:
        yield "the batch is divided differently into forward passes, so means over all rows are compared"
    if names := list(dict.fromkeys(name for _, name in without_rows)):
        yield f"outputs that do not have one row per row of the batch are not compared: {some_names(names)}"


def _notes_of_padding(padded: set[int], with_padding: Iterable[tuple[int, str]]) -> Iterator[str]:
    if padded:
        yield f"the rows are the same, but they are padded differently in {steps_in_words(sorted(padded))}"
    if names := list(dict.fromkeys(name for _, name in with_padding)):
        yield f"outputs with padded positions are not compared: {some_names(names)}"


def steps_in_words(steps: Sequence[int]) -> str:
    """Return a text that names some steps, such as "steps 1 to 3"."""
    if len(steps) < 2:
        return f"step {steps[0]}" if steps else "no step"
    if list(steps) == list(range(steps[0], steps[-1] + 1)):
        return f"steps {steps[0]} {'and' if len(steps) == 2 else 'to'} {steps[-1]}"
    return f"{len(steps)} steps from {steps[0]} to {steps[-1]}"


def _not_checked(
    a: Recording, b: Recording, steps: int, num_compared: Mapping[str, int], leaves_outputs_out: bool
) -> Iterator[NotChecked]:
    """Yield what was not compared.

    Without an update of the weights in both recordings, the result is unknown. `leaves_outputs_out` says that outputs
    of both recordings were left out, which a note explains.
    """
    for line in _unfinished(a, b):
        yield NotChecked("the rest of the training", line, True)
    if not num_compared.get("whole"):
        reason = "no recorded step of an optimizer of torch.optim changes the weights in both recordings"
        yield NotChecked("the updates of the weights", reason, True)
    for kind in ("forward", "gradient"):
        if not num_compared.get(kind):
            is_explained = kind == "forward" and leaves_outputs_out
            reason = "the notes say why none can be compared" if is_explained else "the recordings have none in common"
            yield NotChecked(f"the {COMPARED[kind][1]}", reason)
    most = max(a.facts["steps"], b.facts["steps"])
    if most > steps:
        side = "A" if a.facts["steps"] == most else "B"
        yield NotChecked(steps_in_words(range(steps + 1, most + 1)), f"only {side} has them")
    yield from _not_recorded(a, b)
    for recording in (a, b):
        if missing := next(filter(None, (noise.unknown(recording, draw) for draw in recording.noise)), None):
            subject = f"whether the runs with noise in {recording.folder} repeat the same training"
            yield NotChecked(subject, f"their {missing} were not recorded")


def _not_recorded(a: Recording, b: Recording) -> Iterator[NotChecked]:
    """Yield the buffers of the models as not compared, because no recording contains them."""
    buffers = [recording.facts["buffers"] for recording in (a, b)]
    if None in buffers:
        yield NotChecked("buffers, such as the statistics of BatchNorm", "they are not recorded")
    elif names := list(dict.fromkeys([*buffers[0], *buffers[1]])):
        examples = ", ".join(names[:MOST_REASONS]) + (", ..." if len(names) > MOST_REASONS else "")
        yield NotChecked(f"{len(names)} buffer{'s' * (len(names) > 1)} of the model", f"not recorded: {examples}")


# ---------------------------------------------------------------- pairs of tensors


class _Pair(NamedTuple):
    """The same tensor in both recordings. None for a recording that does not have it."""

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
    """A function object that judges pairs of tensors in the order of execution, and collects the results."""

    def __init__(self, bounds: Bounds, ours: dict[Key, Seen], theirs: dict[Key, Seen]) -> None:
        self.differences: list[Difference] = []
        self.num_alike = 0  # pairs before the first difference
        self.num_compared = Counter[str]()  # pairs, by kind
        self.worst_noise_ratio = 0.0  # the largest distance of these pairs, divided by its bound
        # By step and kind: the maximum of norm / bound over the equal tensors.
        self.sizes_over_bounds: dict[tuple[int, str], float] = {}
        self.reshaped: dict[NotChecked, None] = {}  # outputs with different values and shapes, but as many elements
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
        elif infinite := [which for which, seen in (("A", ours), ("B", theirs)) if not np.isfinite(seen.sketch).all()]:
            self._judge_infinite(key, infinite)
            self.num_compared[key.kind] += len(infinite) == 1
        else:
            self._judge_distance(key, ours, theirs)

    def notes(self) -> list[str]:
        return [
            f"{len(names)} tensors of the kind {NAMES.get(kind, kind)} are only in {side}, for instance that of "
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
        if distance > bound and ours.shape != theirs.shape and math.prod(ours.shape) == math.prod(theirs.shape):
            # The sketch is that of a mean over rows, which another shape cuts differently.
            reason = f"its shape is {list(ours.shape)} in A and {list(theirs.shape)} in B"
            self.reshaped[NotChecked(f"the output of {key.name or 'the model'}", reason)] = None
            return
        self.num_compared[key.kind] += 1
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
    """Describe the first step and kind of tensor in which ranks of one training differ, although they should be equal.

    Return a list with one line; empty if no ranks differ.
    """
    for step in range(recording.facts["steps"] + 1):
        for kind in _REPLICATED:
            if ranks_by_name := _unlike_ranks_by_name(recording, step, kind):
                name, ranks = next(iter(ranks_by_name.items()))
                tensors = "weights" if kind == "held" else kind
                return [f"in {side}, ranks 0 and {ranks[0]} have different {tensors} after step {step}: in "
                        f"{len(ranks_by_name)} parameters, first in {name}"]  # fmt: skip
    return []


def _unlike_ranks_by_name(recording: Recording, step: int, kind: str) -> dict[str, list[int]]:
    """Return, for each parameter, the ranks on which its tensor differs from that of rank 0."""
    first, *later_ranks = [recording.of_kind(rank, step, kind) for rank in range(recording.world_size)]
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
