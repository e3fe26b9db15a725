"""Decide the outcome of an assertion that could not be checked."""

from __future__ import annotations

import os
import unittest

from ..errors import Refusal

MISSING = "ZERO_STUDY_MISSING_ENGINE"  # environment variable: skip (default) or fail
CHOICES = ("skip", "fail")


class CouldNotBeChecked(AssertionError):
    """The error for an assertion that could not be checked, so that it is neither true nor false."""


def skip_or_fail(reason: str, missing: str | None) -> None:
    """Skip a test because a package is missing, or fail it. `missing` is skip, fail, or None: the user's setting."""
    __tracebackhide__ = True
    chosen = missing or os.environ.get(MISSING, CHOICES[0])
    if chosen not in CHOICES:
        raise Refusal(f"{chosen!r} is not a valid choice for a missing engine. Choose skip or fail.")
    if chosen == "fail":
        raise CouldNotBeChecked(reason)
    raise unittest.SkipTest(reason)
