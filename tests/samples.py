"""Samples of a grid of test parameters: the fast tests take a few cases of it, the slow tests the whole grid."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest


def pairwise(**axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return a small part of the grid of these axes, in which every two values of different axes occur together.

    The order of the values decides the part, and nothing else does.
    """
    return _covering(2, list(axes.values()))


def each_once(**axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return a part of the grid as long as its longest axis, in which every value of every axis occurs."""
    length = max(map(len, axes.values()))
    return [tuple(values[number % len(values)] for values in axes.values()) for number in range(length)]


def first_fast(values: Sequence[Any]) -> list[Any]:
    """Return the values as parameters of a test, all of them marked `slow` but the first one."""
    return [values[0], *(pytest.param(value, marks=pytest.mark.slow) for value in values[1:])]


def with_slow_rest(fast: Iterable[tuple[Any, ...]], **axes: Sequence[Any]) -> list[Any]:
    """Return the whole grid as parameters of a test, marked `slow` unless they are among the fast cases."""
    fast = [*fast]
    return [pytest.param(*case, marks=[] if case in fast else pytest.mark.slow) for case in product(*axes.values())]


def pairwise_with_slow_rest(**axes: Sequence[Any]) -> list[Any]:
    """Return the whole grid as parameters of a test, marked `slow` unless they belong to the pairwise sample."""
    return with_slow_rest(pairwise(**axes), **axes)


def each_once_with_slow_rest(**axes: Sequence[Any]) -> list[Any]:
    """Return the whole grid as parameters of a test, marked `slow` unless they belong to the sample of `each_once`."""
    return with_slow_rest(each_once(**axes), **axes)


def _covering(strength: int, axes: list[Sequence[Any]]) -> list[tuple[Any, ...]]:
    """Return cases that hold all combinations of the values of `strength` axes, chosen greedily."""
    grid = [*product(*(range(len(values)) for values in axes))]

    def combined(case: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
        return {*combinations(enumerate(case), strength)}

    missing = set().union(*map(combined, grid))
    chosen = []
    while missing:
        best = max(grid, key=lambda case: len(combined(case) & missing))  # the first of several
        missing -= combined(best)
        chosen.append(best)
    return [tuple(values[place] for values, place in zip(axes, case, strict=True)) for case in chosen]
