"""Fixtures for all tests: a CPU only, one temporary folder per session, and a rule for tests that start another Python.

Such a test is marked `launches`, and the mark is checked. `make test` omits tests that are marked `slow`.
"""

from __future__ import annotations

import gc
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before any test imports torch
os.environ.setdefault("OMP_NUM_THREADS", "1")  # a worker has a core, and threads beyond it only wait for one another
# With it, `print` writes each argument by itself, and the lines of two ranks mix in one pipe.
os.environ.pop("PYTHONUNBUFFERED", None)

import launching
import pytest
from hypothesis import HealthCheck, settings

# Of the fuzz: its cases are the same each time, and take as long as commands do.
ALL = {"derandomize": True, "deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
settings.register_profile("short", max_examples=30, **ALL)
settings.register_profile("long", max_examples=5000, **ALL)
settings.load_profile("short")

# Fixtures made by `launching.once`: the tests that use one launch by that.
MADE_ONCE = {"run_small", "plain_install", "saved_folders"}

# Seconds of each test file, by the expression of marks that selects a set of tests: those of tests that start another
# Python, and those of the others. `make durations` records them.
DURATIONS_FILE = Path(__file__).with_name("durations.json")
DURATIONS: dict[str, dict[str, list[float]]] = json.loads(DURATIONS_FILE.read_text(encoding="utf-8"))
COMPUTES_SECONDS = 5.0  # of the tests of a file that start no other Python

_measured: dict[str, list[float]] = {}  # file -> seconds of this session, in the process that collects all reports


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-durations", action="store_true", help="write the seconds of each file to durations.json")


def pytest_configure(config: pytest.Config) -> None:
    """Name the session's folder: the workers of one session share it, and the process that made it deletes it."""
    folder = getattr(config, "workerinput", {}).get("folder")
    if folder is None:
        temporary = tempfile.TemporaryDirectory(prefix="zero-study-tests-")
        config.add_cleanup(temporary.cleanup)
        folder = temporary.name
    launching.begin_session(Path(folder))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["folder"] = str(launching.session_folder)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out a file that has no test of the chosen set, because its imports take seconds in each worker.

    A file whose tests all have one mark says so by `pytestmark`; one without the mark `pages` has no test of pages.
    """
    chosen = config.option.markexpr
    if collection_path.suffix != ".py" or not chosen or " or " in chosen:
        return None
    text = collection_path.read_text(encoding="utf-8")
    left_out = [mark for mark in ("pages", "nightly", "measurements") if f"not {mark}" in chosen]
    is_left_out = any(f"\npytestmark = pytest.mark.{mark}\n" in text for mark in left_out)
    if "pages" in chosen and "pages" not in left_out:
        is_left_out |= "pytest.mark.pages" not in text
    return is_left_out or None  # None: pytest decides


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add the marks that follow from a fixture or from recorded seconds. Put the files that take longest first.

    Workers take whole files. If the longest come first, all workers end at about the same time.
    """
    for item in items:
        fixtures = set(getattr(item, "fixturenames", ()))
        if _seconds(item.path.stem)[1] >= COMPUTES_SECONDS:
            item.add_marker(pytest.mark.computes)
        if MADE_ONCE & fixtures:
            item.add_marker(pytest.mark.launches)
    selected = config.option.markexpr
    items.sort(key=lambda item: -sum(_seconds(item.path.stem, selected)))


def pytest_collection_finish() -> None:
    """Take everything that was imported out of the garbage collector's lists.

    `prove` and the measurement of memory look through all objects of these lists several times in a training.
    """
    gc.collect()
    gc.freeze()


def _seconds(stem: str, selected: str | None = None) -> list[float]:
    """Return the recorded seconds of a file: of its tests that start another Python, and of the others.

    `selected` is the expression of marks of one set of tests. By default, the longest recorded times are returned.
    """
    sets = [DURATIONS[selected]] if selected in DURATIONS else list(DURATIONS.values())
    return [max((each[stem][place] for each in sets if stem in each), default=0.0) for place in (0, 1)]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    stem = Path(report.nodeid.partition("::")[0]).stem
    _measured.setdefault(stem, [0.0, 0.0])["launches" not in report.keywords] += report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the measured seconds, if that was asked for, in the process that has the reports of all workers."""
    if session.config.option.record_durations and not hasattr(session.config, "workerinput"):
        DURATIONS[session.config.option.markexpr] = {
            stem: [round(value, 1) for value in seconds]
            for stem, seconds in sorted(_measured.items())
            if sum(seconds) >= 1
        }
        text = json.dumps(DURATIONS, indent=1, sort_keys=True)
        DURATIONS_FILE.write_text(re.sub(r"\[\s+([\d.]+),\s+([\d.]+)\s+\]", r"[\1, \2]", text) + "\n", encoding="utf-8")


@pytest.hookimpl(tryfirst=True)  # before fixtures are made
def pytest_runtest_setup(item: pytest.Item) -> None:
    may_build = any(item.get_closest_marker(mark) for mark in ("slow", "nightly", "measurements"))
    launching.begin(_launches(item), may_build)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Any:
    folders = list(sys.path)
    try:
        result = yield
    finally:
        sys.path[:] = folders  # commands that run a script put its folder in place of the tests' folder
    launching.end()
    return result


def pytest_unconfigure() -> None:
    launching.end_server()


@pytest.fixture(autouse=True)
def _same_environment() -> Iterator[None]:
    """Take back what a library has set in the environment: the next test's launches would inherit it."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="module")
def few_objects() -> None:
    """Take what earlier tests left out of the garbage collector's lists, so that `prove` looks through few objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of one rank."""
    from torch import distributed

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.fixture(scope="session")
def shared_data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for `--data files`, laid out as the real one, with the synthetic sample: no test may change it.

    It has imdb/ (sorted by label), wikitext-2/ (400 and 90 blocks of 64 tokens) and both tokenizers.
    """
    import pyarrow
    import pyarrow.parquet

    from study.workloads import sources, synthetic

    path = tmp_path_factory.mktemp("shared")
    for folder in ("imdb", "wikitext-2"):
        (path / folder).mkdir()
    texts, labels = synthetic.reviews()
    table = {"text": texts[:100] + texts[-100:], "label": pyarrow.array(labels[:100] + labels[-100:], pyarrow.int64())}
    pyarrow.parquet.write_table(pyarrow.table(table), path / "imdb" / "train.parquet")
    for split, num_lines in {"train": 600, "validation": 120}.items():
        # Every other line is blank, the rest have 100 words.
        lines = synthetic.articles()[split][:num_lines]
        (path / "wikitext-2" / f"{split}.txt").write_text("".join(line or " \n" for line in lines), encoding="utf-8")
    for workload, folder in sources.FILES_TOKENIZER.items():
        synthetic.tokenizer(workload).save_pretrained(path / folder)
    return path


def _launches(item: pytest.Item) -> bool:
    return item.get_closest_marker("launches") is not None


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "subprocess.Popen" and sys.executable in map(str, arguments[1]):
        launching.use()


sys.addaudithook(_watch)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium, which is missing on some machines, but not on those of CI."""
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        if os.environ.get("CI"):
            pytest.fail("no Chromium found, and CI must look at the pages; install Debian's chromium")
        pytest.skip("needs Chromium, found none on PATH")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()
