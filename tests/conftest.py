"""What every test shares: a CPU, one folder for a session, and a rule for tests that start another Python.

Such a test is marked `launches`: `make test-fast` leaves it out, and `make test` starts it before all others.
The mark is held to what happens: without it, nothing is started; with it, something must be.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before any test imports torch

import launching
import pytest

# Fixtures made by `launching.once`: the tests that use one launch by that, and wait for it together, on one worker.
MADE_ONCE = {"site", "run_small", "one_process_instead_of_two"}


def pytest_configure(config: pytest.Config) -> None:
    """Name the session's folder: the workers of one session share it, and the process that made it deletes it."""
    folder = getattr(config, "workerinput", {}).get("folder")
    if folder is None:
        temporary = tempfile.TemporaryDirectory(prefix="zero-study-tests-")
        config.add_cleanup(temporary.cleanup)
        folder = temporary.name
    launching.session_folder = Path(folder)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["folder"] = str(launching.session_folder)


@pytest.hookimpl(tryfirst=True)  # pytest-xdist then reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put what launches first, one by one, so that the workers end together; the rest of a file stays together."""
    for item in items:
        if shared := MADE_ONCE & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.launches)
            item.add_marker(pytest.mark.xdist_group(min(shared)))
        elif not _launches(item):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
    items.sort(key=lambda item: not _launches(item))


@pytest.hookimpl(tryfirst=True)  # before fixtures are made
def pytest_runtest_setup(item: pytest.Item) -> None:
    launching.begin(_launches(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Any:
    result = yield
    launching.end()
    return result


@pytest.fixture
def site() -> Path:
    """The folder of the project's own pages."""
    import reported  # and all that makes pages

    return reported.site()


def _launches(item: pytest.Item) -> bool:
    return item.get_closest_marker("launches") is not None


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "subprocess.Popen" and sys.executable in map(str, arguments[1]):
        launching.use()


sys.addaudithook(_watch)
