"""Provide the assertions as pytest fixtures, and the option for engines that are not installed.

It imports nothing but pytest and this package's list of functions, so that it does not slow down the start of pytest.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from . import assert_does_what_it_says as _does_what_it_says
from . import assert_never_hangs as _never_hangs
from . import assert_same_training as _same_training
from . import assert_saved_is_complete as _saved_is_complete

OPTION = "zero_study_missing"
_VARIABLE = "ZERO_STUDY_MISSING_ENGINE"  # as outcomes.py reads it


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("zero-study")
    text = "what an assertion of zero-study does if an engine is not installed (default: skip)"
    group.addoption("--zero-study-missing", dest=OPTION, choices=("skip", "fail"), help=text)


def pytest_configure(config: pytest.Config) -> None:
    chosen = config.getoption(OPTION, default=None)
    if chosen is not None:
        before = os.environ.get(_VARIABLE)
        os.environ[_VARIABLE] = chosen
        config.add_cleanup(lambda: _restore(before))


def _restore(before: str | None) -> None:
    if before is None:
        os.environ.pop(_VARIABLE, None)
    else:
        os.environ[_VARIABLE] = before


@pytest.fixture(scope="session")
def assert_same_training() -> Callable[..., int]:
    """Provide `zero_study.testing.assert_same_training`: training on several ranks equals that on one process."""
    return _same_training


@pytest.fixture(scope="session")
def assert_never_hangs() -> Callable[..., None]:
    """Provide `zero_study.testing.assert_never_hangs`: no ranks of a training wait for each other forever."""
    return _never_hangs


@pytest.fixture(scope="session")
def assert_saved_is_complete() -> Callable[..., None]:
    """Provide `zero_study.testing.assert_saved_is_complete`: a saved folder holds what was trained."""
    return _saved_is_complete


@pytest.fixture(scope="session")
def assert_does_what_it_says() -> Callable[..., None]:
    """Provide `zero_study.testing.assert_does_what_it_says`: each key of a file works as written."""
    return _does_what_it_says
