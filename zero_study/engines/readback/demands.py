"""Compare requested settings with the facts that were read from a built engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from ..keys import known_keys


class Demand(NamedTuple):
    """A setting that was requested: its value, and the file or command line that requested it."""

    name: str  # a fact that is read back, or a dotted key of a DeepSpeed JSON
    value: Any
    source: str  # who requested it: a file, the launcher, a command line
    remedy: str = ""  # what to change if the engine was built with another value; empty if not known


Outcome = Literal["agreed", "contradicted", "overridden", "unread"]


class Judged(NamedTuple):
    """A requested setting, with the result of comparing it with the built engine."""

    demand: Demand
    outcome: Outcome
    actual: Any  # the built value; None if it is unknown or nothing was built
    decisive: Demand  # the last demand for the same fact, which comes from the strongest source


def _equals(demand: Demand, actual: Any) -> bool:
    return bool(demand.value == actual)


def compare(
    demands: Sequence[Demand], facts: Mapping[str, Any], is_equal: Callable[[Demand, Any], bool] = _equals
) -> list[Judged]:
    """Compare each requested setting with what was built, and return the results.

    The demands are ordered from the weakest source to the strongest. A demand that the facts contradict is `overridden`
    if a stronger source requested the same fact, and `contradicted` if it is the strongest one. It is `unread` if no
    fact shows what was built. `is_equal` decides whether a demand and a built value agree. By default, they must be
    equal.
    """
    strongest = by_fact(demands)
    judged = []
    for demand in demands:
        decisive = strongest[fact_name(demand)]
        is_readable, actual = built_value(fact_name(demand), facts)
        outcome: Outcome = "contradicted" if demand is decisive else "overridden"
        if not is_readable:
            outcome = "unread"
        elif is_equal(demand, actual):
            outcome = "agreed"
        judged.append(Judged(demand, outcome, actual, decisive))
    return judged


def by_fact(demands: Sequence[Demand]) -> dict[str, Demand]:
    """Return the request that counts for each fact about an engine: the last one, if there are several."""
    return {fact_name(demand): demand for demand in demands}


def fact_name(demand: Demand) -> str:
    """Return the name of the fact about an engine that shows whether a request was fulfilled.

    Some keys of a DeepSpeed JSON have a fact with another name.
    """
    name: str = known_keys.read()["facts"]["json"].get(demand.name, demand.name)
    return name


def built_value(name: str, facts: Mapping[str, Any]) -> tuple[bool, Any]:
    """Return whether a fact about an engine is known, and its value."""
    settings = facts.get("settings") or {}
    for known in (facts, settings):
        if known.get(name) is not None:
            return True, known[name]
    return name in settings, None
