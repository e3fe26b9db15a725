"""Check a configuration file: `assert_does_what_it_says`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..doctor import examine, text
from . import outcomes


def check(file: Path, releases: Sequence[str]) -> None:
    """Raise AssertionError unless each key of a configuration file works as written."""
    __tracebackhide__ = True
    examined = examine.examine(file, *releases)
    verdict = examined.verdict
    if verdict.result == "found":
        raise AssertionError(text.text(examined))
    if verdict.result == "unknown":
        raise outcomes.CouldNotBeChecked(text.text(examined))
