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

import importlib
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import click
import pytest
import yaml

FAULTS = Path(__file__).with_suffix(".yaml")
FAST = "not slow and not pages and not nightly"
KINDS = (".py", ".yaml", ".csv", ".json")  # of the files that may have a fault
LINKED = (".venv", ".torch_extensions", ".releases", ".deepspeed_env")  # ignored folders that tests use
Stage = Literal["first", "likely", "all"]
MOST_LIKELY = 4  # test files that run first
PACKAGES = ("study", "zero_study")
GENERIC = {"study", "zero", "test", "of", "text", "the"}  # words that say nothing about a test
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


# ---------------------------------------------------------------- a process that has imported what tests need

QUIET = ("-W", "ignore:Module already imported so cannot be rewritten:pytest.PytestAssertRewriteWarning")
IMPORTED = (
    "numpy",
    "pandas",
    "scipy.stats",
    "torch",
    "torch.distributed.tensor",
    "transformers",
    "accelerate",
    "datasets",
)


def serve() -> None:
    """Run pytest in forks of this process, which saves each of them the imports of large libraries.

    A line of the standard input has the words for pytest, its environment and the file of its output. The answers are a
    line with its process, and a line with its exit status.
    """
    for name in IMPORTED:
        importlib.import_module(name)
    for line in sys.stdin:
        asked = json.loads(line)
        if process := os.fork():
            print(process, flush=True)
            print(os.waitpid(process, 0)[1], flush=True)
            continue
        os.setsid()
        with open(asked["log"], "w") as log:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        os.environ |= asked["environment"]
        status = int(pytest.ExitCode.INTERNAL_ERROR)
        try:
            status = int(pytest.main([*QUIET, *asked["words"]], plugins=[sys.modules[__name__]]))
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)


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
        python, plugin = root / ".venv" / "bin" / "python", folder / "plugin"
        self._python = str(python) if python.exists() else sys.executable
        self._log = folder / "pytest.log"
        self._server: subprocess.Popen[bytes] | None = None
        plugin.mkdir()
        shutil.copy(__file__, plugin)
        paths = os.pathsep.join(map(str, (self.folder, plugin)))
        self._environment = {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
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
        files = sorted(path for name in PACKAGES for path in (self.folder / name).rglob("*") if path.suffix in KINDS)
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
        self, expression: str, tests: Sequence[str] = (), left_out: Sequence[str] = (), first: Sequence[str] = (),
        stops: bool = True, workers: int = 0, seconds: float | None = None,
    ) -> tuple[list[str], bool]:  # fmt: skip
        """Return the tests that fail, and whether pytest ended within the time.

        `tests` are files or tests, by default all, without those in `left_out`. `first` are names of test files that
        run before others. With `stops`, pytest ends at the first failure.
        """
        report = self.folder.parent / "failed.txt"
        report.write_text("")
        words = ["-q", "-p", "no:cacheprovider", "-m", expression, *(["-x"] if stops else [])]
        words += [f"--deselect={test}" for test in left_out]
        environment = {REPORT: str(report), ORDER: " ".join(first)}
        if workers:
            words += ["-n", str(workers), "--dist", "loadfile", "--no-loadscope-reorder"]
            is_done = self._start_and_wait([*words, *tests], environment)
        else:
            is_done = self._fork_and_wait([*words, *tests], environment, seconds)
        return list(dict.fromkeys(filter(None, report.read_text(encoding="utf-8").split("\n")))), is_done

    def _start_and_wait(self, words: Sequence[str], environment: dict[str, str]) -> bool:
        with open(self._log, "w") as log:
            command = [self._python, "-m", "pytest", "-p", "planted_faults", *words]
            own = {**os.environ, **self._environment, **environment}
            subprocess.run(command, cwd=self.folder, env=own, stdout=log, stderr=log)
        return True

    def _fork_and_wait(self, words: Sequence[str], environment: dict[str, str], seconds: float | None) -> bool:
        """Run pytest in a fork of the server, and return whether it ended within the time."""
        asked = {"words": list(words), "environment": environment, "log": str(self._log)}
        server = self._running_server()  # its pipes have no buffers, so that select sees what was not read
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps(asked).encode() + b"\n")
        process = int(server.stdout.readline())
        is_done = bool(select.select([server.stdout], [], [], seconds)[0])
        if not is_done:
            with suppress(ProcessLookupError):  # it has just ended
                os.killpg(process, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(int(server.stdout.readline()))
        if status in (pytest.ExitCode.INTERNAL_ERROR, pytest.ExitCode.USAGE_ERROR):
            raise click.ClickException(f"pytest cannot run:\n{self._log.read_text()[-2000:]}")
        return is_done

    def _running_server(self) -> subprocess.Popen[bytes]:
        if self._server is None:
            self._server = subprocess.Popen(
                [self._python, "-c", "import planted_faults; planted_faults.serve()"], cwd=self.folder,
                env={**os.environ, **self._environment}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0,
            )  # fmt: skip
        return self._server

    def close(self) -> None:
        if self._server is not None and self._server.stdin is not None:
            self._server.stdin.close()
            self._server.wait()


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
    for file in sorted((copy.folder / "tests").rglob("test_*.py")):
        text = file.read_text(encoding="utf-8")
        score = 3.0 * _imports(text, module) + 2.0 * (path.name in text) + 1.0 * (package in text and "." in package)
        score += 1.0 * any(_imports(text, each) for each in of_importers)
        of_name = _words(file.stem)
        scores[str(file.relative_to(copy.folder / "tests"))] = score + 6.0 * len(words & of_name) / max(1, len(of_name))
    found = sorted((name for name in scores if scores[name]), key=lambda name: -scores[name])
    return found[:MOST_LIKELY]


def _words(text: str) -> set[str]:
    return {word.removesuffix("s") for word in re.findall("[a-z]+", text.lower()) if len(word) > 1} - GENERIC


def _imports(text: str, module: Path) -> bool:
    """Return whether the text of a module imports another one."""
    package, name = ".".join(module.parts[:-1]), module.name
    return re.search(rf"\b{package}\.{name}\b|from {package} import [^\n]*\b{name}\b", text) is not None


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

    def of(self, fault: Fault, tests: str, stage: Stage) -> dict[str, Any] | None:
        """Return the result that settles a fault in a stage: that it was caught, or that these tests missed it."""
        for line in self.lines:
            if line.get("fault") == fault.id and (
                self.is_caught(line) or (line["tests"] == tests and line["stage"] in ("all", stage) and not line["by"])
            ):
                return line
        return None

    def is_caught(self, line: dict[str, Any]) -> bool:
        return bool(line["by"]) and not self.fails_anyway(line["by"])

    def fails_anyway(self, test: str) -> bool | None:
        """Return whether a test fails without any fault. None if that was not tried."""
        known = [line["fails"] for line in self.lines if line.get("test") == test]
        return known[-1] if known else None

    def failing_anyway(self) -> list[str]:
        return [line["test"] for line in self.lines if line.get("fails")]


class Examination:
    """Examine faults with the tests that an expression of marks selects."""

    def __init__(self, copy: Copy, results: Results, tests: str, seconds: float, workers: int) -> None:
        self._copy, self._results, self._tests = copy, results, tests
        self._seconds, self._workers = seconds, workers

    def try_likely(self, faults: Sequence[Fault]) -> None:
        """Run the likely tests with each fault planted alone.

        Of all faults, the quick tests of the most likely file run first, and then all tests of all likely files.
        """
        parts: dict[Stage, tuple[int, str]] = {"first": (1, "not launches"), "likely": (MOST_LIKELY, "")}
        for stage, (number, marks) in parts.items():
            tried: set[str] = set()
            while left := [fault for fault in self._left(faults, stage) if fault.id not in tried]:
                for fault in left:
                    names = self._likely(fault)[:number]
                    self._try(fault, stage, [f"tests/{name}" for name in names], names, marks)
                self._try_without_faults(line["by"] for line in [*self._results.lines] if line.get("by"))
                # Those that a test has caught that fails anyway are tried again without this test.
                lines = [line for line in self._results.lines if line.get("stage", "").startswith(stage)]
                tried |= {line["fault"] for line in lines if not line["by"]}

    def _left(self, faults: Sequence[Fault], stage: Stage) -> list[Fault]:
        return [fault for fault in faults if self._results.of(fault, self._tests, stage) is None]

    def try_all(self, faults: Sequence[Fault]) -> None:
        """Run all tests once with faults planted together, and those that fail again with each of the faults alone."""
        with self._copy.planted(faults):
            failed, _ = self._copy.failing(
                self._tests, left_out=self._results.failing_anyway(), stops=False, workers=self._workers
            )
        click.echo(f"{len(failed)} tests fail with {len(faults)} faults together.")
        self._try_without_faults(failed)
        failed = [test for test in failed if not self._results.fails_anyway(test)]
        for fault in faults:
            self._try(fault, "all", failed, self._likely(fault))

    def _likely(self, fault: Fault) -> list[str]:
        (path,) = self._copy.places(fault)
        return likely_tests(self._copy, path, fault.room)

    def _try(self, fault: Fault, stage: Stage, tests: Sequence[str], first: Sequence[str], marks: str = "") -> None:
        """Run tests with one fault planted, and note the result. `marks` are further marks that tests must have."""
        selected = " and ".join(f"({each})" for each in (self._tests, marks) if each)
        began = time.monotonic()
        failed, is_done = list[str](), True
        if tests:
            with self._copy.planted([fault]):
                left_out = self._results.failing_anyway()
                failed, is_done = self._copy.failing(selected, tests, left_out, first, seconds=self._seconds)
        by, seconds = next(iter(failed), None), round(time.monotonic() - began)
        how = stage if is_done or by else f"{stage}, unfinished"
        self._results.add(fault=fault.id, tests=self._tests, stage=how, by=by, seconds=seconds, ran=list(first))
        click.echo(f"{fault.id}: {f'caught by {by}' if by else f'not caught ({how})'}, {seconds} s")

    def _try_without_faults(self, tests: Iterable[str]) -> None:
        """Run tests without any fault, if that was not done before, and note which of them fail."""
        unknown = [test for test in dict.fromkeys(tests) if self._results.fails_anyway(test) is None]
        if unknown:
            failed, _ = self._copy.failing("", unknown, stops=False)
            for test in unknown:
                self._results.add(test=test, fails=test in failed)


def groups(copy: Copy, faults: Sequence[Fault]) -> list[list[Fault]]:
    """Divide faults into groups that can be planted together, because none of them changes the text of another one."""
    divided: list[list[Fault]] = []
    for fault in faults:
        for group in divided:
            with copy.planted(group):
                is_there = len(copy.places(fault)) == 1
            if is_there:
                group.append(fault)
                break
        else:
            divided.append([fault])
    return divided


@click.command(help=__doc__, context_settings={"max_content_width": 120})
@click.option("--tests", default=FAST, help=f"Expression of marks that selects tests. [default: {FAST}]")
@click.option(
    "--root", type=click.Path(path_type=Path, file_okay=False), default=Path(__file__).resolve().parents[2],
    help="Checkout to test. [default: the one that this program is in]",
)  # fmt: skip
@click.option("--output", type=click.Path(path_type=Path), help="File of results, one JSON object per line.")
@click.option("--seconds", type=float, default=600.0, help="Time limit of a fault's own tests. [default: 600]")
@click.option("--workers", type=int, default=0, help="Processes of pytest-xdist that run all tests. [default: none]")
@click.option(
    "--stage", type=click.Choice(("likely", "all", "both")), default="both",
    help="Run only the likely tests, or only all tests with the faults that are left. [default: both]",
)  # fmt: skip
@click.argument("ids", nargs=-1)
def main(
    tests: str, root: Path, output: Path | None, seconds: float, workers: int, stage: str, ids: tuple[str, ...]
) -> None:
    """Examine the faults, and print which tests catch them."""
    faults = read_faults(FAULTS)
    if unknown := {*ids} - {fault.id for fault in faults}:
        raise click.UsageError(f"{', '.join(sorted(unknown))}: there is no such fault in {FAULTS.name}.")
    faults = sorted((fault for fault in faults if fault.id in ids), key=lambda fault: ids.index(fault.id)) or faults
    results = Results(output)
    with tempfile.TemporaryDirectory(prefix="planted-faults-") as folder:
        copy = Copy(root.resolve(), Path(folder))
        lost = [fault for fault in faults if len(copy.places(fault)) != 1]
        faults = [fault for fault in faults if fault not in lost]
        examination = Examination(copy, results, tests, seconds, workers)
        if stage != "all":
            examination.try_likely(faults)
        left = [fault for fault in faults if results.of(fault, tests, "all") is None]
        for group in groups(copy, left) if stage != "likely" else []:
            examination.try_all(group)
        copy.close()
    caught = [fault for fault in faults if (line := results.of(fault, tests, "all")) and results.is_caught(line)]
    click.echo(f"{len(caught)} of {len(faults)} faults are caught.")
    for fault in faults:
        if fault not in caught:
            click.echo(f"Not caught: {fault.id}: {fault.what}")
    for fault in lost:
        click.echo(f"Not planted: {fault.id}: its text is not in the packages exactly once. {fault.what}")
    sys.exit(int(bool(lost)))


if __name__ == "__main__":
    main()
