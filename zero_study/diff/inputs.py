"""Compare the inputs of two trainings: the batches, and the weights before the first step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np

from .. import terminal
from .bounds import factor, norm, roundoff
from .recorded import Difference, Key, Recording, Seen

MOST_NAMES = 5  # that a line lists


def padded_otherwise(a: Recording, b: Recording, steps: int) -> set[int]:
    """Return the steps in which both recordings have the same rows, but padded differently."""
    return {
        step
        for step in range(1, steps + 1)
        if not _have_same_rows(a, b, step) and _have_same_rows(a, b, step, without_padding=True)
    }


def _have_same_rows(a: Recording, b: Recording, step: int, part: str = "", without_padding: bool = False) -> bool:
    """Return whether two recordings have the same rows of a batch, in any order."""
    ours, theirs = (sorted(chain(*_rows(recording, step, part, without_padding))) for recording in (a, b))
    return ours == theirs


def different_batches(a: Recording, b: Recording, steps: int, padded: set[int]) -> Iterator[Difference]:
    """Yield the first difference between the batches, if there is one. Nothing after it can be compared.

    A different order of rows counts only if both trainings split the batch in the same way. `padded` has the steps in
    which rows are compared without their padding.
    """
    for step in range(1, steps + 1):
        ours, theirs = (_rows(recording, step, without_padding=step in padded) for recording in (a, b))
        if ours == theirs:
            continue
        is_order = sorted(chain(*ours)) == sorted(chain(*theirs))
        if a.cut == b.cut or not is_order:
            name = "the same rows in another order" if is_order else _different_tensors(a, b, step)
            yield Difference(step, "batch", name, [], math.nan, 0.0, None, None)
            return


def _rows(recording: Recording, step: int, part: str = "", without_padding: bool = False) -> list[list[float]]:
    return [list(chain(*passes)) for passes in recording.rows(step, part, without_padding)]


def _different_tensors(a: Recording, b: Recording, step: int) -> str:
    """Return a text that says which input tensors have different rows, and which have the same."""
    names = dict.fromkeys(e.name for entries in (*a.ranks, *b.ranks) for e in entries if e.kind == "batch" and e.name)
    differ = [
        name
        for name in names
        if not (_have_same_rows(a, b, step, name) or _have_same_rows(a, b, step, name, without_padding=True))
    ]
    equal = [name for name in names if name not in differ]
    if not differ:
        return "each tensor has the same rows, but the rows of different tensors are combined differently"
    return f"different {some_names(differ)}, but the same {some_names(equal)}" if equal else "different rows"


def some_names(names: Sequence[str]) -> str:
    """Return the first MOST_NAMES of these names as text, with the number of the remaining names."""
    return terminal.names([f"the model{name}" if name[:1] in ("", ":") else name for name in names], MOST_NAMES)


def outputs_with_padding(a: Recording, b: Recording, padded: set[int]) -> dict[tuple[int, str], None]:
    """Return the outputs, by step and name, that contain padding, for steps that the two recordings pad differently.

    These are the outputs with a dimension of a padded length, and those whose first dimension does not count the rows,
    such as an output of all tokens.
    """
    outputs: dict[tuple[int, str], None] = {}
    for step in sorted(padded):
        lengths = a.padded_lengths(step) | b.padded_lengths(step)
        shapes = [*a.shapes(step).items(), *b.shapes(step).items()]
        outputs |= {(step, name): None for name, calls in shapes if any(_has_padding(call, lengths) for call in calls)}
    return outputs


def _has_padding(call: tuple[int | None, list[int]], lengths: set[int]) -> bool:
    rows, shape = call
    return bool(shape) and (shape[0] != rows or not lengths.isdisjoint(shape[1:]))


def outputs_without_rows(a: Recording, b: Recording, steps: int) -> dict[tuple[int, str], None]:
    """Return the outputs, by step and name, whose mean depends on how the batch is split.

    Examples are scalars and states of layers. If the forward passes of both trainings have the same rows, in any order
    of passes and ranks, the result has no outputs of that step.
    """
    without_rows: dict[tuple[int, str], None] = {}
    for step in range(1, steps + 1):
        passes = [sorted(map(tuple, chain(*recording.rows(step)))) for recording in (a, b)]
        if passes[0] == passes[1]:
            continue
        ours, theirs = (recording.shapes(step) for recording in (a, b))
        names = [name for name in ours.keys() & theirs.keys() if not _has_rows(ours[name], theirs[name])]
        without_rows |= dict.fromkeys((step, name) for name in names)
    return without_rows


Shapes = Sequence[tuple[int | None, list[int]]]  # of one output, by call: rows in its pass (None: unknown), shape


def _has_rows(ours: Shapes, theirs: Shapes) -> bool:
    """Return whether the first dimension of an output counts rows of the batch, or parts of rows such as tokens.

    Any other dimension has the same length in each pass, so its sum changes if a batch is split into more passes.
    """
    shapes = [*ours, *theirs]
    if not all(shape for _, shape in shapes) or sum(s[0] for _, s in ours) != sum(s[0] for _, s in theirs):
        return False
    if len(ours) != len(theirs) or len({shape[0] for _, shape in shapes}) > 1:
        return True
    counts = {rows for rows, _ in shapes}
    (rows, (length, *dimensions)) = shapes[0]
    return len(counts) == 1 and bool(rows) and length % (rows or 1) == 0 and rows not in dimensions


def continues_after(whole: Recording, resumed: Recording) -> int:
    """Return after which step of a training a resumed one goes on: that with the weights with which it begins.

    0 if it begins with the first weights of the other training, or with other weights than any recorded step has.
    """
    at_start, steps = _weights(resumed).get(0, {}), _weights(whole)
    if not at_start or not different(steps.get(0, {}), at_start):
        return 0
    return next((step for step in sorted(steps) if not different(steps[step], at_start)), 0)


def _weights(recording: Recording) -> dict[int, dict[Key, Seen]]:
    """Return the weights of rank 0 after each step, as if the step were the start of the training."""
    steps: dict[int, dict[Key, Seen]] = {}
    for entry in chain(*recording.ranks[:1]):
        if entry.kind == "weights":
            seen = Seen(np.array(entry.sketch), entry.dtype, entry.rows)
            steps.setdefault(entry.step, {})[Key(0, entry.kind, entry.name, entry.call)] = seen
    return steps


def different(ours: dict[Key, Seen], theirs: dict[Key, Seen]) -> bool:
    """Return whether initial weights differ by more than rounding, or are not all in both trainings."""
    return next(different_weights(ours, theirs), None) is not None


def different_weights(ours: dict[Key, Seen], theirs: dict[Key, Seen]) -> Iterator[Difference]:
    """Yield initial weights that one recording lacks, or that differ by more than rounding in the coarser data type."""
    for key in ours | theirs:
        if (key.step, key.kind) != (0, "weights"):
            continue
        if key not in ours or key not in theirs:
            yield Difference(*key[:3], key.ranks, math.inf, 0.0, None, "B" if key in ours else "A")
            continue
        in_a, in_b = ours[key], theirs[key]
        size, gap, unit = norm(in_a.sketch), norm(in_b.sketch - in_a.sketch), roundoff(in_a, in_b)
        if gap > 2 * unit * size:
            multiple = factor(in_a.sketch, in_b.sketch, 0.0)
            relative = gap / size if size else math.inf
            yield Difference(0, "weights", key.name, key.ranks, relative, 2 * unit, multiple, None)
