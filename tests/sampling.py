"""Choose which cases of a large set of cases are tested for each change; the others are tested in the slow set."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable
from typing import Any

import pytest


def each_once(cases: Iterable[Any], features: Callable[[Any], Iterable[Hashable]]) -> list[Any]:
    """Return cases as parameters of a test. Those that are not marked slow have every feature at least once."""
    listed = list(cases)
    chosen = _covering(range(len(listed)), lambda index: features(listed[index]))
    return [pytest.param(case, marks=() if index in chosen else pytest.mark.slow) for index, case in enumerate(listed)]


def _covering(cases: Collection[Any], features: Callable[[Any], Iterable[Hashable]]) -> set[Any]:
    """Return a few cases that have all features.

    Each is the one that adds most features. Of several, it is the one whose features the others have least.
    """
    left = {case: set(features(case)) for case in cases}
    missing: set[Any] = set().union(*left.values())
    chosen, used = set(), Counter[Any]()
    while missing:
        best = max(left, key=lambda case: (len(left[case] & missing), -sum(used[feature] for feature in left[case])))
        chosen.add(best)
        missing -= left[best]
        used.update(left[best])
    return chosen
