"""Fixtures for all tests: a CPU only, one temporary folder per session, and a rule for tests that start another Python.

Such a test is marked `launches`, and the mark is checked. `make test` omits tests that are marked `slow`.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before any test imports torch
os.environ.setdefault("OMP_NUM_THREADS", "1")  # a worker has a core, and threads beyond it only wait for one another

import launching
import pytest
from hypothesis import HealthCheck, settings

# Of the fuzz: its cases are the same each time, and take as long as commands do.
ALL = {"derandomize": True, "deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
settings.register_profile("short", max_examples=30, **ALL)
settings.register_profile("long", max_examples=5000, **ALL)
settings.load_profile("short")

# Fixtures made by `launching.once`: the tests that use one launch by that.
MADE_ONCE = {"run_small", "one_process_instead_of_two", "plain_install", "saved_folders"}

# Fixtures that take long: a Slurm cluster, what the published program and its mended ones train.
SLOW = {"cluster", "run_small", "one_process_instead_of_two"}

# The files that take 5 s or more without starting another Python.
COMPUTING = {
    "test_body", "test_claims", "test_differences", "test_docs", "test_fuzz", "test_peaks",
    "test_plan", "test_residual", "test_trace", "test_verdict", "test_workloads",
}  # fmt: skip

# The files that take 20 s or more, of which some are slow, longest first: workers take whole files, and end together.
LONGEST = [
    "test_docs", "test_slurm", "test_dry_run", "test_one_gpu", "test_parity", "test_diff", "test_report",
    "test_benchmarks", "test_machines", "test_conformance", "test_runner", "test_checkpoints", "test_train",
    "test_exact", "test_residual", "test_prove", "test_launch", "test_doctor_file", "test_lock", "test_published",
    "test_body", "test_refusals", "test_snippets", "test_step_time", "test_plain_install", "test_claims",
    "test_import_name", "test_saved", "test_fuzz", "test_traps", "test_workloads",
]  # fmt: skip


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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what uses what is made once, or takes long; put the longest files first."""
    for item in items:
        if item.path.stem in COMPUTING:
            item.add_marker(pytest.mark.computes)
        if MADE_ONCE & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.launches)
        if SLOW & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))


@pytest.hookimpl(tryfirst=True)  # before fixtures are made
def pytest_runtest_setup(item: pytest.Item) -> None:
    launching.begin(_launches(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Any:
    result = yield
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
