"""Samples of the cases of a test: the fast tests take a few cases, the slow or the nightly tests the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest


def each_once(rest: pytest.MarkDecorator, **axes: Sequence[Any]) -> list[Any]:
    """Return the whole grid of these axes as parameters of a test, marked by `rest` unless they belong to a sample.

    The sample is as long as the longest axis, and every value of every axis occurs in it.
    """
    length = max(map(len, axes.values()))
    sample = [tuple(values[number % len(values)] for values in axes.values()) for number in range(length)]
    return [pytest.param(*case, marks=[] if case in sample else rest) for case in product(*axes.values())]


def each_once_with_slow_rest(**axes: Sequence[Any]) -> list[Any]:
    """Return the parameters of `each_once`, of which those beyond the sample are marked `slow`."""
    return each_once(pytest.mark.slow, **axes)


def pairwise_with_slow_rest(**axes: Sequence[Any]) -> list[Any]:
    """Return the whole grid of these axes as parameters of a test, marked `slow` unless they belong to a sample.

    Every two values of different axes occur together in the sample.
    """
    grid = [*product(*(range(len(values)) for values in axes.values()))]
    chosen = covering(grid, lambda places: combinations(enumerate(places), 2))
    sample = [tuple(values[place] for values, place in zip(axes.values(), grid[at], strict=True)) for at in chosen]
    return with_slow_rest(sample, **axes)


def first_fast(values: Sequence[Any]) -> list[Any]:
    """Return the values as parameters of a test, all of them marked `slow` but the first one."""
    return [values[0], *(pytest.param(value, marks=pytest.mark.slow) for value in values[1:])]


def with_slow_rest(fast: Sequence[tuple[Any, ...]], **axes: Sequence[Any]) -> list[Any]:
    """Return the whole grid as parameters of a test, marked `slow` unless they are among the fast cases."""
    return [pytest.param(*case, marks=[] if case in fast else pytest.mark.slow) for case in product(*axes.values())]


def with_every_feature(cases: Iterable[Any], features: Callable[[Any], Iterable[Hashable]]) -> list[Any]:
    """Return cases as parameters of a test. Those that are not marked `slow` have every feature at least once."""
    listed = list(cases)
    chosen = covering(listed, features)
    return [pytest.param(case, marks=[] if at in chosen else pytest.mark.slow) for at, case in enumerate(listed)]


def covering(cases: Sequence[Any], features: Callable[[Any], Iterable[Hashable]]) -> set[int]:
    """Return the positions of a few cases that have all features. They are the same each time.

    Each is the one that adds most features. Of several, it is the one whose features the others have least.
    """
    left = {at: set(features(case)) for at, case in enumerate(cases)}
    missing: set[Hashable] = set().union(*left.values())
    chosen, used = set(), Counter[Hashable]()
    while missing:
        best = max(left, key=lambda at: (len(left[at] & missing), -sum(used[feature] for feature in left[at])))
        chosen.add(best)
        missing -= left[best]
        used.update(left[best])
    return chosen
