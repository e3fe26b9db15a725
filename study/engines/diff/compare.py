"""The comparison of two recordings: the first difference that rounding does not explain.

A distance is the 2-norm of the difference of two tensors, told from their sketches. Rounding explains what is within
MARGIN times the furthest of the runs whose results were rounded otherwise, and within a floor of some units of fp32 of
what the tensor is a part of. Without such runs the bound is by type and depth, which is a rule of thumb.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from ...errors import Refusal
from .causes import likely
from .recorded import Difference, Key, Recording, Seen

MARGIN = 8
ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11}  # of any other type: fp32's
FP32 = 2.0**-24
FLOOR = 16 * FP32
EXACT = 1e-12  # relative; what the order in which threads add a sketch makes is less
FACTOR = 1e-3  # relative; as near to a multiple counts as one
FEW = 8  # elements whose step rounding may turn round, that can be told from all others by a sketch
MOST_NAMES = 5  # that a line lists
# In the order in which a step makes them. `update` is told from the weights before and after; `whole` is that of all
# parameters together, of which the length alone is compared.
KINDS = ("forward", "gradient", "norm", "clipped", "update", "whole")
NAMES = {"forward": "output", "clipped": "clipped gradient", "whole": "length of the update"}
_REPLICATED = ("gradient", "clipped", "weights", "held")


@dataclass
class Result:
    """What two recordings come to."""

    a: Recording
    b: Recording
    is_marked: bool  # the bound is by type and depth: none of them has runs rounded otherwise
    notes: list[str]
    replicas: list[str]  # ranks of one training that should be alike and are not
    differences: list[Difference]  # in the order of execution
    num_alike: int  # tensors that were compared before the first difference, or in all
    furthest: float  # of these: the largest distance over its bound
    causes: list[str]
    unfinished: list[str]  # what keeps equal recordings from being equal trainings: one of them ended early

    @property
    def is_same(self) -> bool:
        return not (self.differences or self.replicas or self.unfinished)


@np.errstate(invalid="ignore")  # of infinities
def compare(a: Recording, b: Recording) -> Result:
    """Find the first difference of two trainings. Raises Refusal where nothing differs, and neither has an update."""
    steps = min(a.facts["steps"], b.facts["steps"])
    is_apart = a.cut == b.cut
    notes = [] if is_apart else ["the batch is cut otherwise: means over all rows are compared"]
    left_out = {} if is_apart else _without_rows(a, b, steps)
    if left_out:
        names = list(dict.fromkeys(name for _, name in left_out))
        notes.append(f"outputs without a row for each row of the batch are not compared: {_some(names)}")
    ours, theirs = (
        {key: seen for key, seen in recording.values(is_apart).items() if key[0] <= steps} for recording in (a, b)
    )
    bounds = _Bounds(a, b, ours, is_apart)
    differences, num_alike, furthest = [], 0, 0.0
    clear: dict[tuple[int, str], float] = {}  # of what is alike: the largest over its bound
    replicas = [*_apart("A", a), *_apart("B", b)]
    early = [*_other_batches(a, b, steps), *_other_start(ours, theirs)]
    have = {which: {key[:2] for key in found} for which, found in (("A", ours), ("B", theirs))}
    alone: dict[tuple[str, str], dict[str, None]] = {}  # what no difference says: kind and where -> names
    for key in sorted(both := ours | theirs, key=bounds.place):
        if key[1] not in KINDS or (key[1] == "forward" and (key[0], key[2]) in left_out):
            continue
        one, other = ours.get(key), theirs.get(key)
        if one is None or other is None:
            gone, there = ("A", "B") if one is None else ("B", "A")
            # Some engines show none of a kind, or zeros of what takes no part.
            lacks = key[1] in ("gradient", "clipped") and key[:2] in have[gone] and np.any(both[key].sketch)
            if key[1] == "whole" or lacks:
                differences.append(Difference(*key[:3], _ranks(key), math.inf, 0.0, None, gone))
            elif key[1] not in ("norm", "update"):  # a norm is not asked for everywhere; weights are said above
                alone.setdefault((key[1], there), {})[key[2]] = None
            continue
        if one.sketch.shape != other.sketch.shape:
            continue
        if broken := [which for which, seen in (("A", one), ("B", other)) if not np.isfinite(seen.sketch).all()]:
            # In both: a mask of the script's own in an output, or a step that fp16 may skip.
            if len(broken) < 2 or key[1] not in ("forward", "gradient", "norm", "clipped"):
                differences.append(Difference(*key[:3], _ranks(key), math.inf, 0.0, None, None, " and ".join(broken)))
            continue
        (distance, bound), size = bounds.away(key, one, other), _norm(one.sketch)
        if distance <= bound:
            num_alike += not differences
            furthest = max(furthest, distance / bound if bound and not differences else 0.0)
            clear[key[:2]] = max(clear.get(key[:2], 0.0), size / bound if bound else 0.0)
        else:
            multiple, empty = factor(one.sketch, other.sketch, bound), None if size else "A"
            size = size or math.inf
            differences.append(Difference(*key[:3], _ranks(key), distance / size, bound / size, multiple, empty))
    found = _merged(sorted([*early, *differences], key=lambda one: one.step))
    if not (found or any(key[1] == "whole" for key in ours)):
        raise Refusal(f"{a.folder} and {b.folder}: have no update; does an optimizer of torch.optim step?")
    notes += [f"{which} alone has {len(names)} {NAMES.get(kind, kind)}(s), one of {next(iter(names)) or 'the model'}"
              for (kind, which), names in alone.items()]  # fmt: skip
    causes = likely(found, a, b, clear)
    return Result(a, b, bounds.is_marked, notes, replicas, found, num_alike, furthest, causes, _unfinished(a, b))


def _unfinished(a: Recording, b: Recording) -> list[str]:
    """Say of each recording whether its training failed, or ended before the other one did."""
    said = []
    for which, one, other in (("A", a, b), ("B", b, a)):
        is_shorter = one.facts["completed"] < min(one.facts["asked"], other.facts["completed"])
        if one.ended_early and (one.facts["raised"] or is_shorter):
            said.append(f"{which}: {one.ended_early}")
    return said


def factor(one: np.ndarray, other: np.ndarray, bound: float) -> float | None:
    """How many times A's tensor B's is; None: it is no multiple of it."""
    length = float(one @ one)
    if not length:
        return None
    times = float(one @ other) / length
    rest = _norm(other - times * one)
    return times if rest <= max(2 * bound, FACTOR * _norm(other)) else None


class _Bounds:
    """How far rounding may carry each tensor, and the order of execution."""

    def __init__(self, a: Recording, b: Recording, ours: dict[Key, Seen], is_apart: bool) -> None:
        self._noise: dict[Key, float] = {}
        for recording in (a, b):
            exact = recording.values(is_apart) if recording.noise else {}
            for draw in recording.noise:
                for key, seen in draw.values(is_apart).items():
                    if key in exact and seen.sketch.shape == exact[key].sketch.shape:
                        away = _distance(key[1], exact[key], seen)
                        self._noise[key] = max(self._noise.get(key, 0.0), away)
        self.is_marked = not self._noise
        self._unit = max(ROUNDOFF.get(e.dtype, FP32) for one in (a, b) for e in one.ranks[0])  # of the coarsest type
        self._order = _order(a)
        # Some engines do not say in which order backward came to the parameters.
        told: list[str] = next((one.facts["backward"] for one in (a, b) if one.facts["backward"]), [])
        self._backward = {name: place for place, name in enumerate(told)}
        self._ours = ours
        self._names = dict.fromkeys((step, name) for step, kind, name, _ in ours if kind == "update")
        self._elements = Counter[int]()  # of the weights, by step
        self._totals: dict[tuple[int, str, Any], float] = {}
        for (step, kind, _, place), seen in ours.items():
            at = step, kind, place if kind == "forward" else _rank_of(place)
            self._totals[at] = math.hypot(self._totals.get(at, 0.0), _norm(seen.sketch[np.isfinite(seen.sketch)]))
            self._elements[step] += seen.size if kind == "weights" else 0

    def place(self, key: Key) -> tuple[Any, ...]:
        """Where a tensor comes in the order of execution."""
        step, kind, name, which = key
        calls = which[1] if isinstance(which, tuple) else which or 0
        rank = _rank_of(which) or 0
        at = self._order.get(name if kind == "forward" else name.rpartition(".")[0], len(self._order))
        kinds = KINDS.index(kind) if kind in KINDS else -1
        if kind == "forward":
            return (step, kinds, calls, at, rank, name)
        return (step, kinds, 0, self._backward.get(name, len(self._backward)), -at, rank, name)

    def away(self, key: Key, one: Seen, other: Seen) -> tuple[float, float]:
        """How far B's tensor is from A's, and the largest distance that rounding explains."""
        distance, bound = _distance(key[1], one, other), self.of(key, one, other)
        if key[1] == "update" and distance <= bound < math.inf:
            expected, most = self._turned(key, one, [key[2]])
            if most < FEW:
                # Of few elements whose steps rounding may turn round, each is in one sum of a sketch: the others are
                # to be alike. A setting of this tensor alone, such as its rate, moves all of them.
                moved = np.sort(np.abs(other.sketch - one.sketch))[: -math.ceil(most)]
                explained = max(self._floor(key), 2 * math.sqrt(expected / max(1, one.size)) * _norm(one.sketch))
                if _norm(moved) > explained:
                    return _norm(moved), explained
        return distance, bound

    def _floor(self, key: Key) -> float:
        """How far rounding moves an update of which no element turns round: by noise, and that of the weights."""
        weights = self._ours[key[0], "weights", key[2], key[3]]
        return max(MARGIN * self._noise.get(key, 0.0), 4 * FP32 * _norm(weights.sketch))

    def _turned(self, key: Key, one: Seen, names: Sequence[str]) -> tuple[float, float]:
        """How many elements of an update rounding turns round: as many as are expected, and at most.

        Adam makes steps of full length of what is small in a gradient, rounding too: of an element whose gradient is
        within its noise the step may have the other sign.
        """
        seen = [at for name in names if (at := (key[0], "clipped", name, key[3])) in self._ours]
        gradient = math.hypot(*(_norm(self._ours[at].sketch) for at in seen))
        away = math.hypot(
            *(self._noise.get(at, 0.0) if self._noise else self._by_depth(at) * gradient / MARGIN for at in seen)
        )
        share = min(1.0, (away + FP32 * gradient) / gradient) if gradient else 1.0
        expected = one.size * share
        return expected, min(one.size, expected + 3 * math.sqrt(expected) + 1)

    def of(self, key: Key, one: Seen, other: Seen) -> float:
        """The largest distance that rounding explains."""
        step, kind, name, which = key
        size, total = _norm(one.sketch), self._totals[step, kind, which if kind == "forward" else _rank_of(which)]
        noise = MARGIN * self._noise.get(key, math.inf) if self._noise else self._by_depth(key) * size
        if kind == "forward":
            rounds = one.dtype != other.dtype  # as an autocast output beside one of a model in 16 bits
            return max(
                noise, 2 * max(ROUNDOFF.get(seen.dtype, FP32) for seen in (one, other)) * size * rounds, FLOOR * size
            )
        if kind in ("norm", "clipped"):  # which engines add up in an order, and in parts, of their own
            noise = max(noise, FP32 * math.sqrt(self._elements[step]) * size)
        if kind not in ("update", "whole"):
            return max(noise, FLOOR * total, self._by_depth(key) * total / 8 if self.is_marked else 0.0)
        if self.is_marked and self._unit > FP32 and kind == "update":
            return math.inf  # by a rule of thumb nothing can be said of single ones in 16 bits
        noise = noise if self._noise else 0.0
        names = [other for at, other in self._names if at == step] if kind == "whole" else [name]
        _, flips = self._turned(key, one, names)
        if kind == "whole":
            return max(noise, 2 * flips / one.size * size)
        return max(self._floor(key), 2 * math.sqrt(flips / one.size) * size)

    def _by_depth(self, key: Key) -> float:
        """Relative: the roundoff of the coarsest type that was seen, growing as a walk at random of so many modules."""
        step, kind, name, _ = key
        modules = len(self._order)
        depth = self._order.get(name.partition(":")[0], modules) + 1 if kind == "forward" else 2 * modules
        return MARGIN * self._unit * math.sqrt(depth * step)


def _order(recording: Recording) -> dict[str, int]:
    """The place of each module in the order in which modules of a first forward pass begin to have outputs."""
    names = [entry.name.partition(":")[0] for entry in recording.ranks[0] if entry.kind == "forward"]
    return {name: place for place, name in enumerate(dict.fromkeys(names))}


def _ranks(key: Key) -> list[int]:
    return [key[3][0]] if isinstance(key[3], tuple) else []


def _rank_of(which: Any) -> Any:
    return which[0] if isinstance(which, tuple) else None


def _distance(kind: str, one: Seen, other: Seen) -> float:
    """Of updates of the whole: how much longer one is along the other, in which single elements hardly count."""
    if kind == "whole":
        length = _norm(one.sketch)
        return abs(float(one.sketch @ other.sketch) / length - length) if length else _norm(other.sketch)
    return _norm(other.sketch - one.sketch)


def _norm(values: np.ndarray) -> float:
    return float(np.linalg.norm(values))


def _merged(differences: Iterable[Difference]) -> list[Difference]:
    """One for each name of a step, with all ranks on which it differs."""
    found: dict[tuple[int, str, str], Difference] = {}
    for one in differences:
        key = one[:3]
        first = found.get(key)
        found[key] = one if first is None else first._replace(ranks=sorted({*first.ranks, *one.ranks}))
    return list(found.values())


# ---------------------------------------------------------------- before anything is computed


def _other_batches(a: Recording, b: Recording, steps: int) -> Iterator[Difference]:
    """Steps whose batches are not the same rows: nothing after that can be compared."""
    for step in range(1, steps + 1):
        ours, theirs = (_rows(recording, step) for recording in (a, b))
        if ours == theirs:
            continue
        is_order = sorted(chain(*ours)) == sorted(chain(*theirs))
        if a.cut == b.cut or not is_order:
            name = "the same rows in another order" if is_order else _what_differs(a, b, step)
            yield Difference(step, "batch", name, [], math.nan, 0.0, None, None)
            return


def _rows(recording: Recording, step: int, part: str = "") -> list[list[float]]:
    return [list(chain(*passes)) for passes in recording.rows(step, part)]


def _what_differs(a: Recording, b: Recording, step: int) -> str:
    """Say which of the tensors that the forward passes were given have other rows, where some have the same."""
    names = dict.fromkeys(e.name for entries in (*a.ranks, *b.ranks) for e in entries if e.kind == "batch" and e.name)
    differ = [
        name for name in names
        if sorted(chain(*_rows(a, step, name))) != sorted(chain(*_rows(b, step, name)))
    ]  # fmt: skip
    same = [name for name in names if name not in differ]
    if not differ:
        return "other rows: each tensor has the same rows, and they are put together otherwise"
    return f"other {_some(differ)}, the same {_some(same)}" if same else "other rows"


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(f"the model{name}" if name[:1] in ("", ":") else name for name in names[:MOST_NAMES])
    return shown + (f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else "")


def _without_rows(a: Recording, b: Recording, steps: int) -> dict[tuple[int, str], None]:
    """The outputs, by step and name, whose mean depends on how the batch is cut: a scalar, a state of a layer.

    Where both have passed the same rows together, in whatever order of passes and ranks, no mean does.
    """
    found: dict[tuple[int, str], None] = {}
    for step in range(1, steps + 1):
        passes = [sorted(map(tuple, chain(*recording.rows(step)))) for recording in (a, b)]
        if passes[0] == passes[1]:
            continue
        ours, theirs = (recording.shapes(step) for recording in (a, b))
        for name in ours.keys() & theirs.keys():
            if not _has_rows(ours[name], theirs[name]):
                found[step, name] = None
    return found


def _has_rows(ours: Sequence[tuple[int | None, list[int]]], theirs: Sequence[tuple[int | None, list[int]]]) -> bool:
    """Whether the first dimension of an output is of the batch's rows, or of parts of them such as tokens.

    Each output has its shape and the rows of its pass. A dimension that is not of rows is the same in each pass, so
    that it has another sum where a batch is cut into more passes.
    """
    both = [*ours, *theirs]
    if not all(shape for _, shape in both) or sum(s[0] for _, s in ours) != sum(s[0] for _, s in theirs):
        return False
    if len(ours) != len(theirs) or len({shape[0] for _, shape in both}) > 1:
        return True
    counts = {rows for rows, _ in both}
    (rows, (length, *others)) = both[0]
    return len(counts) == 1 and bool(rows) and length % (rows or 1) == 0 and rows not in others


def _other_start(ours: dict[Key, Seen], theirs: dict[Key, Seen]) -> Iterator[Difference]:
    """Weights that are others before the first step, by more than a rounding to the coarser type, or are not there."""
    for key in ours | theirs:
        if key[:2] == (0, "weights"):
            if key not in ours or key not in theirs:
                yield Difference(*key[:3], _ranks(key), math.inf, 0.0, None, "B" if key in ours else "A")
                continue
            one, other = ours[key], theirs[key]
            size, distance = _norm(one.sketch), _norm(other.sketch - one.sketch)
            unit = max(ROUNDOFF.get(seen.dtype, FP32) for seen in (one, other))
            if distance > 2 * unit * size:
                multiple = factor(one.sketch, other.sketch, 0.0)
                relative = distance / size if size else math.inf
                yield Difference(0, "weights", key[2], _ranks(key), relative, 2 * unit, multiple, None)


def _apart(which: str, recording: Recording) -> list[str]:
    """Ranks that should be alike and are not, of one training: the first step and kind in which they differ."""
    first, *others = [{entry[:4]: entry for entry in entries} for entries in recording.ranks]
    for step in range(recording.facts["steps"] + 1):
        for kind in _REPLICATED:
            names: dict[str, list[int]] = {}
            for rank, other in enumerate(others, 1):
                for key, entry in first.items():
                    if key[:2] == (step, kind) and key in other and _is_apart(entry.sketch, other[key].sketch):
                        names.setdefault(entry.name, []).append(rank)
            if names:
                name, ranks = next(iter(names.items()))
                said = "weights" if kind == "held" else kind
                return [f"{which}: after step {step} ranks 0 and {ranks[0]} have other {said}, of {len(names)} "
                        f"parameters, first {name}"]  # fmt: skip
    return []


def _is_apart(one: Sequence[float], other: Sequence[float]) -> bool:
    ours, theirs = np.array(one), np.array(other)
    if ours.shape != theirs.shape or np.array_equal(ours, theirs, equal_nan=True):
        return False
    return not _norm(theirs - ours) <= EXACT * max(_norm(ours), _norm(theirs))  # of a NaN neither holds
