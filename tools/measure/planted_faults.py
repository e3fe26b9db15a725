"""Plant known faults into copies of the program, one at a time, and report which tests notice them.

    python tools/measure/planted_faults.py --output faults.jsonl
    python tools/measure/planted_faults.py --output faults.jsonl --tests "pages or slow or nightly"

planted_faults.yaml has the faults. A fault is planted into a copy of the tracked files, never into the checkout itself.
First, the tests run that are likely to notice it: those whose names or imports are about the changed module. The faults
that these tests miss are then planted together, and all tests run once. Each test that fails runs again with each of
these faults alone, so that the right fault counts as caught. A test that also fails without any fault does not count.

Every result is appended to the file of --output. A later call with this file skips the faults that are caught already,
or that were examined with the same tests. Without IDS, all faults are examined. The exit status is 1 if the text of a
fault is not in the program exactly once. Such a fault has to be planted again where its sentence says.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

FAULTS = Path(__file__).with_suffix(".yaml")
FAST = "not slow and not pages and not nightly"
KINDS = (".py", ".yaml", ".csv", ".json")  # of the files that may have a fault
LINKED = (".venv", ".torch_extensions", ".releases", ".deepspeed_env")  # ignored folders that tests use
MOST_LIKELY = 8  # test files that run first
GENERIC = {"study", "test", "file", "files", "of", "text", "the"}  # words that say nothing about a test
REPORT, ORDER = "PLANTED_FAULTS_REPORT", "PLANTED_FAULTS_ORDER"  # variables for the plugin below


# ---------------------------------------------------------------- the plugin that pytest loads in the copy


@pytest.hookimpl(trylast=True)  # after conftest.py has sorted by time
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the likely test files first. Of each kind, tests that start another Python come last."""
    if names := os.environ.get(ORDER, "").split():
        places = {name: place for place, name in enumerate(names)}
        items.sort(key=lambda item: ("launches" in item.keywords, places.get(item.path.name, len(places))))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _note(report.nodeid, report.failed)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    _note(report.nodeid, report.failed)


def _note(name: str, is_failed: bool) -> None:
    if is_failed and REPORT in os.environ:
        with open(os.environ[REPORT], "a", encoding="utf-8") as file:
            file.write(name + "\n")


# ---------------------------------------------------------------- faults, and a copy to plant them into


@dataclass(frozen=True)
class Fault:
    """A fault: the text that it replaces, and what the program then does wrong."""

    id: str
    room: str
    what: str
    find: str
    replace: str


def read_faults(path: Path) -> list[Fault]:
    return [Fault(**entry) for entry in yaml.safe_load(path.read_text(encoding="utf-8"))]


class Copy:
    """A copy of a checkout's tracked files, with a repository of its own."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.folder = folder / "copy"
        self._python = root / ".venv" / "bin" / "python"
        self._plugin = folder / "plugin"
        self._plugin.mkdir()
        shutil.copy(__file__, self._plugin)
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True)
        for name in filter(None, listed.stdout.split("\0")):
            if (root / name).is_file():
                (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, self.folder / name)
        for name in LINKED:
            if (root / name).exists():
                (self.folder / name).symlink_to((root / name).resolve())
        identity = ["-c", "user.name=planted faults", "-c", "user.email=nobody@example.org"]
        for words in (["init", "-q"], ["add", "-A"], [*identity, "commit", "-q", "-m", "Copy the checkout"]):
            subprocess.run(["git", *words], cwd=self.folder, check=True)

    def sources(self) -> dict[Path, str]:
        files = sorted(path for path in (self.folder / "study").rglob("*") if path.suffix in KINDS)
        return {path: path.read_text(encoding="utf-8") for path in files}

    def places(self, fault: Fault) -> list[Path]:
        """Return the files that have the text of a fault, once for each time that they have it."""
        return [path for path, text in self.sources().items() for _ in range(text.count(fault.find))]

    @contextmanager
    def planted(self, faults: Iterable[Fault]) -> Iterator[None]:
        """Plant faults, each of which has one place, and take them out again."""
        texts: dict[Path, str] = {}
        try:
            for fault in faults:
                (path,) = self.places(fault)
                texts.setdefault(path, path.read_text(encoding="utf-8"))
                _write(path, path.read_text(encoding="utf-8").replace(fault.find, fault.replace))
            yield
        finally:
            for path, text in texts.items():
                _write(path, text)

    def failing(
        self, expression: str, tests: Sequence[str] = (), first: Sequence[str] = (), stops: bool = True,
        workers: int = 0, seconds: float | None = None,
    ) -> tuple[list[str], bool]:  # fmt: skip
        """Return the tests that fail, and whether pytest ended within the time.

        `tests` are files or tests, by default all. `first` are names of test files that run before others. With
        `stops`, pytest ends at the first failure.
        """
        report = self.folder.parent / "failed.txt"
        report.write_text("")
        python = self._python if self._python.exists() else Path(sys.executable)
        words = [str(python), "-m", "pytest", "-q", "-p", "planted_faults", "-p", "no:cacheprovider", "-m", expression]
        words += ["-x"] if stops else []
        words += ["-n", str(workers), "--dist", "loadfile"] if workers else []
        paths = os.pathsep.join(map(str, (self.folder, self._plugin)))
        own = {"PYTHONPATH": paths, REPORT: str(report), ORDER: " ".join(first)}
        with open(self.folder.parent / "pytest.log", "w") as log:
            process = subprocess.Popen(
                [*words, *tests], cwd=self.folder, env={**os.environ, **own}, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
            try:
                process.wait(seconds)
                is_done = True
            except subprocess.TimeoutExpired:
                is_done = False
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        return list(dict.fromkeys(filter(None, report.read_text(encoding="utf-8").split("\n")))), is_done


def _write(path: Path, text: str) -> None:
    """Write a file. Its compiled form is deleted, because a change within a second may have the same size and time."""
    path.write_text(text, encoding="utf-8")
    for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
        compiled.unlink()


# ---------------------------------------------------------------- likely tests


def likely_tests(copy: Copy, path: Path, room: str) -> list[str]:
    """Return the names of the test files that are likely to notice a change of a file, the most likely one first."""
    module = path.relative_to(copy.folder).with_suffix("")
    package, words = ".".join(module.parts[:-1]), _words(" ".join([*module.parts, room]))
    importers = [file for file, text in copy.sources().items() if file.suffix == ".py" and _imports(text, module)]
    of_importers = [file.relative_to(copy.folder).with_suffix("") for file in importers]
    scores = {}
    for file in sorted((copy.folder / "tests").glob("test_*.py")):
        text = file.read_text(encoding="utf-8")
        score = 4.0 * _imports(text, module) + 3.0 * (path.name in text) + 1.0 * (package in text and "." in package)
        score += 3.0 * len(words & _words(file.stem)) + 1.0 * any(_imports(text, each) for each in of_importers)
        scores[file.name] = score
    found = sorted((name for name in scores if scores[name]), key=lambda name: -scores[name])
    return found[:MOST_LIKELY]


def _words(text: str) -> set[str]:
    return {word for word in re.findall("[a-z]+", text.lower()) if len(word) > 1} - GENERIC


def _imports(text: str, module: Path) -> bool:
    """Return whether the text of a module imports another one."""
    *above, name = module.parts
    if ".".join(module.parts) in text:
        return True
    return re.search(rf"from {re.escape('.'.join(above))} import [^\n]*\b{re.escape(name)}\b", text) is not None


# ---------------------------------------------------------------- examining


@dataclass
class Results:
    """The results of this call and of earlier ones, in a file with one JSON object per line."""

    path: Path | None
    lines: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.path is not None and self.path.exists():
            self.lines = [json.loads(line) for line in self.path.read_text(encoding="utf-8").splitlines()]

    def add(self, **line: Any) -> None:
        self.lines.append(line)
        if self.path is not None:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    def of(self, fault: Fault, tests: str, stage: str | None = None) -> dict[str, Any] | None:
        """Return the result that settles a fault, if there is one: it was caught, or these tests missed it."""
        for line in self.lines:
            if line.get("fault") == fault.id and (
                line["result"] == "caught" or (line["tests"] == tests and line["stage"] in ("all", stage))
            ):
                return line
        return None

    def fails_anyway(self, test: str) -> bool | None:
        known = [line["fails"] for line in self.lines if line.get("test") == test]
        return known[-1] if known else None


class Examination:
    """Examine faults with the tests that an expression of marks selects."""

    def __init__(self, copy: Copy, results: Results, tests: str, seconds: float, workers: int) -> None:
        self._copy, self._results, self._tests = copy, results, tests
        self._seconds, self._workers = seconds, workers

    def try_likely(self, fault: Fault) -> None:
        """Run the likely tests with one fault planted, and note the result."""
        (path,) = self._copy.places(fault)
        names = likely_tests(self._copy, path, fault.room)
        began = time.monotonic()
        by, is_done = self._caught_by(fault, [f"tests/{name}" for name in names], names)
        stage = "likely" if is_done or by else "likely, unfinished"
        self._note(fault, stage, by, began, names)

    def try_all(self, faults: Sequence[Fault]) -> None:
        """Run all tests once with faults planted together, and those that fail again with each of the faults alone."""
        began = time.monotonic()
        with self._copy.planted(faults):
            failed, _ = self._copy.failing(self._tests, stops=False, workers=self._workers)
        click.echo(f"{len(failed)} tests fail with {len(faults)} faults together.")
        failed = self._innocent(failed)
        for fault in faults:
            by = self._caught_by(fault, failed, [])[0] if failed else None
            self._note(fault, "all", by, began, ["all"])
            began = time.monotonic()

    def _caught_by(self, fault: Fault, tests: Sequence[str], first: Sequence[str]) -> tuple[str | None, bool]:
        """Return the first test that fails only with a fault, and whether pytest ended within the time."""
        left_out: list[str] = []
        while True:
            with self._copy.planted([fault]):
                words = [*tests, *(f"--deselect={test}" for test in left_out)]
                failed, is_done = self._copy.failing(self._tests, words, first, seconds=self._seconds)
            guilty = self._innocent(failed)
            if guilty or not failed:
                return next(iter(guilty), None), is_done
            left_out += failed

    def _innocent(self, failed: Sequence[str]) -> list[str]:
        """Return those of these tests that pass without any fault."""
        unknown = [test for test in failed if self._results.fails_anyway(test) is None]
        if unknown:
            fail_anyway, _ = self._copy.failing(self._tests, unknown, stops=False, workers=0)
            for test in unknown:
                self._results.add(test=test, fails=test in fail_anyway)
        return [test for test in failed if not self._results.fails_anyway(test)]

    def _note(self, fault: Fault, stage: str, by: str | None, began: float, ran: list[str]) -> None:
        result, seconds = ("caught" if by else "not caught"), round(time.monotonic() - began)
        self._results.add(
            fault=fault.id, tests=self._tests, stage=stage, result=result, by=by, seconds=seconds, ran=ran
        )
        click.echo(f"{fault.id}: {f'caught by {by}' if by else f'not caught ({stage})'}, {seconds} s")


def groups(copy: Copy, faults: Sequence[Fault]) -> list[list[Fault]]:
    """Divide faults into groups that can be planted together: each file has at most one of them."""
    divided: list[dict[Path, Fault]] = []
    for fault in faults:
        (path,) = copy.places(fault)
        group = next((group for group in divided if path not in group), None)
        if group is None:
            group = {}
            divided.append(group)
        group[path] = fault
    return [list(group.values()) for group in divided]


@click.command(help=__doc__, context_settings={"max_content_width": 120})
@click.option("--tests", default=FAST, help=f"Expression of marks that selects tests. [default: {FAST}]")
@click.option(
    "--root", type=click.Path(path_type=Path, file_okay=False), default=Path(__file__).resolve().parents[2],
    help="Checkout to test. [default: the one that this program is in]",
)  # fmt: skip
@click.option("--output", type=click.Path(path_type=Path), help="File of results, one JSON object per line.")
@click.option("--seconds", type=float, default=600.0, help="Time limit of the likely tests of a fault. [default: 600]")
@click.option("--workers", type=int, default=0, help="Processes of pytest-xdist that run all tests. [default: none]")
@click.option("--likely-only", is_flag=True, help="Run only the likely tests.")
@click.argument("ids", nargs=-1)
def main(
    tests: str, root: Path, output: Path | None, seconds: float, workers: int, likely_only: bool, ids: tuple[str, ...]
) -> None:
    """Examine the faults, and print which tests catch them."""
    faults = read_faults(FAULTS)
    if unknown := {*ids} - {fault.id for fault in faults}:
        raise click.UsageError(f"{', '.join(sorted(unknown))}: there is no such fault in {FAULTS.name}.")
    faults = [fault for fault in faults if not ids or fault.id in ids]
    results = Results(output)
    with tempfile.TemporaryDirectory(prefix="planted-faults-") as folder:
        copy = Copy(root.resolve(), Path(folder))
        lost = [fault for fault in faults if len(copy.places(fault)) != 1]
        faults = [fault for fault in faults if fault not in lost]
        examination = Examination(copy, results, tests, seconds, workers)
        for fault in faults:
            if results.of(fault, tests, "likely") is None:
                examination.try_likely(fault)
        left = [fault for fault in faults if results.of(fault, tests) is None]
        for group in [] if likely_only else groups(copy, left):
            examination.try_all(group)
    caught = [fault for fault in faults if (line := results.of(fault, tests)) and line["result"] == "caught"]
    click.echo(f"{len(caught)} of {len(faults)} faults are caught.")
    for fault in faults:
        if fault not in caught:
            click.echo(f"Not caught: {fault.id}: {fault.what}")
    for fault in lost:
        click.echo(f"Not planted: {fault.id}: its text is not in study/ exactly once. {fault.what}")
    sys.exit(int(bool(lost)))


if __name__ == "__main__":
    main()
