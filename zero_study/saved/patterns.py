"""Find patterns in the values of all saved weights: parts that are zero, repeated, rounded or not trained."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from .content import Saved
from .values import same, values_of

_WORLDS = (*range(2, 65), 72, 80, 96, 112, 128, 144, 160, 192, 224, 256, 320, 384, 512, 768, 1024)  # numbers of ranks
_FEW_RANKS = 8  # up to which the parts may be of any size, and may be columns
_FEWEST = 16  # elements of a matrix whose parts are looked at
_SAMPLED = 64  # elements that identify a matrix
_LORA = re.compile(r"\.lora_(?:embedding_)?([AB])\b")
_unique: Any = torch.unique  # which has no types
_LAYER = re.compile(r"(.*?\.)(\d+)\.(.+)")
_LAYERS_MAY_BE_ALIKE = re.compile(r"expert|moe|mask|cos|sin|position|index", re.IGNORECASE)
_LARGE = 50.0  # the median size of the elements of a weight, which no initialization or training reaches


class Part(NamedTuple):
    """A rank's part of a matrix that was cut into equal parts."""

    rank: int
    world: int  # number of parts
    kind: str  # what was divided: elements, rows or columns
    source: int = -1  # the rank whose part has the same values; -1 if all values are zero


def _is_grid(row: torch.Tensor) -> bool:
    """Return whether all values are integers, and not only zeros and ones."""
    sample = row[:_SAMPLED]
    return bool((sample == sample.round()).all() and (row == row.round()).all()) and float(row.abs().max()) > 1


def _is_of_8_bits(row: torch.Tensor) -> bool:
    """Return whether values of more bits than that are exact in an 8-bit type."""
    sample = row[: 16 * _SAMPLED]
    return len(set(sample.tolist())) >= _FEWEST and torch.equal(sample.to(torch.float8_e4m3fn).float(), sample.float())


def _is_large(row: torch.Tensor) -> bool:
    return float(row[: 1 << 16].abs().median()) > _LARGE


# What more than half of the matrices of a model have in common -> the finding.
_SHARED: dict[str, tuple[Callable[[torch.Tensor], bool], str, bool]] = {
    "grid": (
        _is_grid,
        "All values of these matrices are integers, as those of quantized weights are before they are multiplied by "
        "their scales. The scales are lost.",
        True,
    ),
    "8 bits": (
        _is_of_8_bits,
        "The values of these matrices are those of an 8-bit type, although their type has more bits, so they were "
        "probably rounded.",
        False,
    ),
    "large": (
        _is_large,
        f"Half of the values of these matrices are above {_LARGE:g}, which is unusual for weights. They may have been "
        "multiplied by a loss scale.",
        False,
    ),
}


class Patterns:
    """Facts about the weights of one saved model, which are collected one weight at a time."""

    def __init__(self, saved: Saved) -> None:
        self._saved = saved
        self._parts: dict[str, set[Part]] = {}
        self._shared: dict[str, list[str]] = defaultdict(list)
        self._alike: dict[tuple[object, ...], list[str]] = defaultdict(list)
        self._vectors: dict[str, tuple[float, float]] = {}  # of each vector: the smallest and the largest value

    def add(self, name: str, row: torch.Tensor, shape: torch.Size) -> None:
        """Look at the values of a weight, flattened to one row."""
        if len(shape) == 1 and row.numel() > 1:
            self._vectors[name] = (float(row.min()), float(row.max()))
        if len(shape) < 2 or row.numel() < _FEWEST or not bool(row.any()):
            return
        self._parts[name] = _zero_parts(row, shape) | _copied_parts(row, shape)
        if bool((row == row[0]).all()):
            return
        for kind, (is_one, _, _) in _SHARED.items():
            if is_one(row):
                self._shared[kind].append(name)
        sample = row[:: max(1, row.numel() // _SAMPLED)][:_SAMPLED]
        role = match[1] if (match := _LORA.search(name)) else (match[3] if (match := _LAYER.fullmatch(name)) else name)
        self._alike[role, tuple(shape), sample.numpy().tobytes()].append(name)

    def report(self) -> None:
        roles: dict[str, list[str]] = defaultdict(list)
        for name in self._parts:
            roles[match[1] if (match := _LORA.search(name)) else ""].append(name)
        for names in roles.values():
            self._report_parts({name: self._parts[name] for name in names})
        for kind, names in self._shared.items():
            _, text, is_wrong = _SHARED[kind]
            if _is_most(len(names), len(self._parts)):
                (self._saved.wrong if is_wrong else self._saved.note)("dtype", text, names)
        self._report_alike()
        self._report_vectors()

    def _report_parts(self, parts: dict[str, set[Part]]) -> None:
        """Report that the same part of most matrices was not saved, or was saved twice."""
        counts = Counter(part for own in parts.values() for part in own)
        for is_zero in (True, False):
            of_kind = {part: count for part, count in counts.items() if (part.source < 0) == is_zero}
            if not of_kind:
                continue
            part, count = max(of_kind.items(), key=lambda item: (item[1], -item[0].world))
            names = [name for name, own in parts.items() if part in own]
            if _is_most(count, len(parts)):
                what = "is zero" if is_zero else f"is a copy of shard {part.source + 1}"
                self._saved.wrong(
                    "zero" if is_zero else "shards",
                    f"Shard {part.rank + 1} of {part.world} of these matrices {what}, as if one of {part.world} "
                    "ranks had not saved its shard.",
                    names,
                )
            elif is_zero and part.world <= _FEW_RANKS and part.kind != "columns" and _LAYER.match(names[0]):
                self._saved.note("zero", f"Shard {part.rank + 1} of {part.world} of this matrix is zero.", names)

    def _report_alike(self) -> None:
        """Report layers whose matrices are bitwise those of another layer."""
        pairs: dict[tuple[str, ...], list[str]] = defaultdict(list)
        for (role, *_), names in self._alike.items():
            first, *others = names
            for name in others:
                if not _LAYERS_MAY_BE_ALIKE.search(name) and self._is_same(first, name):
                    pairs[(str(role),) if _LORA.search(name) else _layers(first, name)].append(name)
        for key, names in pairs.items():
            if len(key) == 1 and len(names) > 1:
                self._saved.note("shards", f"lora_{key[0]} has the same values in these modules.", names)
            elif len(key) == 2 and 2 * len(names) > (num := self._num_matrices(key[1])) and num > 1:
                self._saved.wrong(
                    "shards",
                    f"{key[1]} has the same values as {key[0]}. A training never leaves two equal layers, so one was "
                    "saved twice, unless the model repeats its layers and did not train them.",
                    names,
                )

    def _num_matrices(self, layer: str) -> int:
        return sum(name.startswith(f"{layer}.") for name in self._parts)

    def _is_same(self, first: str, second: str) -> bool:
        a, b = (self._saved.tensors[name] for name in (first, second))
        if a is b or self._saved.ties.get(second) == first or self._saved.ties.get(first) == second:
            return False
        ours, theirs = values_of(a), values_of(b)
        if ours is None or theirs is None or ours.data_ptr() == theirs.data_ptr():
            return False  # one tensor with two names
        return same(ours, theirs)

    def _report_vectors(self) -> None:
        """Note layers whose norms were not trained, and norms whose weight and bias seem to be exchanged."""
        by_role: dict[str, list[str]] = defaultdict(list)
        for name in self._vectors:
            if name.endswith(".weight") and (match := _LAYER.fullmatch(name)):
                by_role[match[1] + match[3]].append(name)
        initial = {
            name
            for names in by_role.values()
            if 2 * len(own := [name for name in names if self._vectors[name] == (1.0, 1.0)]) < len(names)
            for name in own
        }
        if initial:
            text = "These weights are all 1, as before the training, although those of other layers are not."
            self._saved.note("untrained", text, initial)
        exchanged = [
            name
            for name, (low, high) in self._vectors.items()
            if name.endswith(".bias") and 0.5 < low <= high < 1.5
            if (weight := f"{name.removesuffix('bias')}weight") in self._vectors
            if -0.5 < self._vectors[weight][0] <= self._vectors[weight][1] < 0.5
        ]
        if exchanged:
            self._saved.note("different", "These biases are near 1, and the weights of their norms near 0.", exchanged)


def _is_most(count: int, total: int) -> bool:
    return count > 2 and 2 * count > total


def _layers(first: str, second: str) -> tuple[str, ...]:
    """Return the names of the layers of two tensors. Empty if they are not in layers of one list."""
    a, b = _LAYER.fullmatch(first), _LAYER.fullmatch(second)
    return (a[1] + a[2], b[1] + b[2]) if a and b and a[1] == b[1] else ()


def _shares(size: int, kind: str) -> Iterable[tuple[int, int]]:
    """Yield numbers of ranks with the size of a rank's part. Parts of many ranks are large enough to be no accident."""
    for world in _WORLDS:
        share = -(-size // world)
        if world <= min(size, _FEW_RANKS) or (kind == "elements" and share >= _FEWEST):
            yield world, share


def _zero_parts(row: torch.Tensor, shape: torch.Size) -> set[Part]:
    """Return the parts of a matrix in which all values are zero.

    Engines cut a matrix into equal parts of its elements, of its rows or of its columns, one for each rank.
    """
    if int(torch.count_nonzero(row)) > row.numel() * (1 - 1 / (2 * _WORLDS[-1])):
        return set()
    is_used = row != 0
    matrix = is_used.reshape(shape[0], -1)
    zero_parts = set()
    for kind, line in {"elements": is_used, "rows": matrix.any(1), "columns": matrix.any(0)}.items():
        num_used = torch.cat([torch.zeros(1, dtype=torch.int64), line.cumsum(0)])
        for world, share in _shares(line.numel(), kind):
            bounds = torch.arange(0, line.numel() + share, share).clamp(max=line.numel())
            is_zero = (num_used[bounds[1:]] == num_used[bounds[:-1]]) & (bounds[1:] > bounds[:-1])
            zero_parts |= {Part(rank, world, kind) for rank in is_zero.nonzero().flatten().tolist()}
    return zero_parts


def _copied_parts(row: torch.Tensor, shape: torch.Size) -> set[Part]:
    """Return the parts of a matrix that have the same values as an earlier part. Each has at least two elements."""
    start = row.reshape(shape[0], -1)[:, :4]
    if _unique(start, dim=0).shape[0] == shape[0]:  # no two rows are equal
        return set()
    copied_parts = set()
    for world, share in _shares(row.numel(), "elements"):
        parts = row[: row.numel() // share * share].view(-1, share)
        _, group = _unique(parts[:, :4], dim=0, return_inverse=True)
        first: dict[int, int] = {}
        for rank, number in enumerate(group.tolist()):
            source = first.setdefault(number, rank)
            is_varied = source != rank and not bool((parts[rank] == parts[rank][0]).all())
            if is_varied and torch.equal(parts[rank], parts[source]):
                copied_parts.add(Part(rank, world, "elements", source))
    return copied_parts
