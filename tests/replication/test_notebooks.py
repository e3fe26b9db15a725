"""What is committed as a notebook: thin, parameterised, without outputs; and its set-up cells go through in Colab.

As far as a machine without network and GPU can go through it.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import address
import nbformat
import pytest
import yaml

from study import config
from study.report import build as report
from study.report import colab
from zero_study import cli
from zero_study.command_line import given
from zero_study.errors import Refusal
from zero_study.strategy import file

pytestmark = pytest.mark.pages

NOTEBOOKS = sorted(report.NOTEBOOKS.glob("*.ipynb"))
each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def tagged(path: Path, tag: str) -> list[nbformat.NotebookNode]:
    return [cell for cell in nbformat.read(path, as_version=4).cells if tag in cell.metadata.get("tags", [])]


def parameters(path: Path) -> dict[str, Any]:
    """What a notebook's parameters cell says; raises ValueError where that is no literal."""
    (cell,) = tagged(path, "parameters")
    assigned = ast.parse(cell.source).body
    return {statement.targets[0].id: ast.literal_eval(statement.value) for statement in assigned}


def test_those_of_runs_are_among_them():
    assert {*report.OF_RUNS, report.OF_AN_ARTICLE} <= {path.stem for path in NOTEBOOKS}


@each
def test_is_valid_and_has_no_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) == (4, 5)
    assert notebook.metadata.kernelspec.name == "python3"
    for cell in notebook.cells:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
        assert len(cell.source.splitlines()) <= 20
    assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)


@each
def test_parameters_are_literals(path):
    result = parameters(path)
    if path.stem in report.OF_RUNS:
        assert result["control"] == "ddp"
        for name in ("records", "by_size", "fixed"):
            folders = result.get(name, [])
            for folder in [folders] if isinstance(folders, str) else folders:
                assert (report.ROOT / folder).is_dir()


def test_every_file_has_the_address_of_the_project():
    """To mend it: python tools/derive/address.py."""
    differing = [path.name for path, text in address.written().items() if path.read_text(encoding="utf-8") != text]
    assert not differing


ADDRESS = "https://github.com/someone/zero-study"


def test_an_address_gets_into_every_file(monkeypatch):
    for module in (address, colab):
        monkeypatch.setattr(module, "REPOSITORY", ADDRESS)
    texts = {path.name: text for path, text in address.written().items()}
    urls = tomllib.loads(texts["pyproject.toml"])["project"]["urls"]
    assert urls["Repository"] == ADDRESS
    assert all(url.startswith(ADDRESS) for url in urls.values())
    assert yaml.safe_load(texts["CITATION.cff"])["repository-code"] == ADDRESS
    notebook = nbformat.reads(texts["planner.ipynb"], as_version=4)
    nbformat.validate(notebook)
    badge, get = [cell.source for cell in notebook.cells if "colab" in cell.metadata.get("tags", [])]
    shown = "https://colab.research.google.com/github/someone/zero-study/blob/main/notebooks/planner.ipynb"
    assert badge.endswith(f"]({shown})")
    assert f'repository, folder = "{ADDRESS}", ' in get
    assert f"git clone {ADDRESS} " in address.clone_line()
    assert shown in address.colab_sentence()
    (hooks,) = yaml.safe_load(address.pre_commit_block().strip("`yaml\n"))["repos"]
    assert hooks["repo"] == ADDRESS


@each
def test_set_up_comes_after_the_parameters_and_trains_where_runs_are_read(path):
    cells = [cell.source for cell in nbformat.read(path, as_version=4).cells]
    set_up_cell = tagged(path, "colab")[-1].source
    assert cells.index(tagged(path, "parameters")[0].source) < cells.index(set_up_cell)
    assert ("install_and_train(records)" in set_up_cell) == (path.stem in report.OF_RUNS)


# ---------------------------------------------------------------- the set-up cell in Colab


def set_up(notebook: str, repository: str) -> str:
    """The set-up cell of a notebook, as it is with this address."""
    source: str = tagged(report.NOTEBOOKS / f"{notebook}.ipynb", "colab")[-1].source
    return re.sub('repository, folder = ".*?"', f'repository, folder = "{repository}"', source, count=1)


SET_UP = set_up("time", ADDRESS)

# Each stands in for a program, and says how it was called.
GIT = """
import json, shutil, sys
open({log!r}, "a").write(json.dumps(["git", *sys.argv[1:]]) + "\\n")
shutil.copytree({source!r}, sys.argv[-1])
"""
PIP = """
import json, sys
open({log!r}, "a").write(json.dumps(["pip", *sys.argv[1:]]) + "\\n")
"""
COMMAND = """
import json, os, pathlib, sys
open({log!r}, "a").write(json.dumps(["zero-study", *sys.argv[1:]]) + "\\n")
run = pathlib.Path(sys.argv[sys.argv.index("--output-dir") + 1])
if "zero3" in sys.argv:
    print("zero-study: out of memory")
    sys.exit(1)
run.mkdir(parents=True)
(run / "record.json").write_text("{{}}")
print("ok: final loss 0.1")
"""
NVIDIA_SMI = """
import sys
assert sys.argv[1:] == ["--query-gpu=name,compute_cap", "--format=csv,noheader"]
said = {said!r}
print(said)
sys.exit(0 if said else 9)
"""
NOTEBOOK = """
import sys, types
if {in_colab}:
    sys.modules["google"] = types.ModuleType("google")
    module = sys.modules["google.colab"] = types.ModuleType("google.colab")
    # Like Colab's, it stores the chosen files in the current folder, and returns their contents by name.
    module.files = types.SimpleNamespace(upload=lambda: {{name: b"" for name in {chosen!r}}})
records = "reports/cpu/records/cpu"
exec({cell!r})
print("RECORDS", records)
"""


class Colab:
    """A machine that looks like Colab's: a home, a clone to come, and programs that only say how they were called."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "log"
        self.clone = folder / "home" / "zero-study"
        (folder / "home").mkdir()
        source = folder / "source"
        (folder / "source").mkdir()
        (source / "pyproject.toml").touch()
        for package in ("study", "zero_study"):
            shutil.copytree(report.ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
        (source / "zero_study" / "__main__.py").write_text(COMMAND.format(log=str(self.log)))
        self.program("bin/git", GIT.format(log=str(self.log), source=str(source)))
        (folder / "modules" / "pip").mkdir(parents=True)
        (folder / "modules" / "pip" / "__init__.py").touch()
        (folder / "modules" / "pip" / "__main__.py").write_text(PIP.format(log=str(self.log)))

    def program(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!{sys.executable}\n{text}")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def run(self, gpu: str, cell: str = SET_UP, in_colab: bool = True, chosen: Sequence[Path] = ()) -> list[str]:
        """Execute the set-up cells on this GPU, choose these files for an upload, and return what was printed."""
        completed = self.attempt(gpu, cell, in_colab, chosen)
        assert completed.returncode == 0, completed.stderr
        return completed.stdout.splitlines()

    def attempt(
        self, gpu: str, cell: str, in_colab: bool = True, chosen: Sequence[Path] = ()
    ) -> subprocess.CompletedProcess[str]:
        content = self.folder / "content"
        content.mkdir(exist_ok=True)
        for path in chosen:
            shutil.copy(path, content)
        self.program("bin/nvidia-smi", NVIDIA_SMI.format(said=gpu))
        environment = os.environ | {
            "HOME": str(self.folder / "home"),
            "PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(self.folder / "modules"),
        }
        program = NOTEBOOK.format(in_colab=in_colab, cell=cell, chosen=[path.name for path in chosen])
        return subprocess.run(
            [sys.executable, "-c", program],
            cwd=content, env=environment, capture_output=True, text=True, timeout=120,
        )  # fmt: skip

    def calls(self) -> list[list[str]]:
        """How the programs were called since the last time this was asked."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return [json.loads(line) for line in lines]


@pytest.fixture
def machine(tmp_path) -> Colab:
    return Colab(tmp_path)


TRAINED = [  # in fp32: a T4 has no bf16
    ["zero-study", "train", "--strategy", name, "--preset", "paper", "--num-processes", "1",
     "--precision", "fp32", "--output-dir", f"runs/colab/paper-{name}-fp32"]
    for name in ("single", "zero2", "zero3")
]  # fmt: skip


@pytest.mark.launches
def test_clones_installs_and_trains_on_a_t4_and_keeps_finished_runs(machine):
    said = machine.run("Tesla T4, 7.5")
    clone = str(machine.clone)
    assert machine.calls() == [
        ["git", "clone", "--depth", "1", ADDRESS, clone],
        ["pip", "install", "-q", "-e", f"{clone}[train,report]"],
        *TRAINED,
    ]
    assert said[0] == "Tesla T4: the paper preset in fp32. 3 runs follow, which take some minutes each"
    assert "ok: final loss 0.1" in said
    assert "zero-study: out of memory" in said  # a run that fails is passed over
    assert said[-1] == f"RECORDS ['{clone}/runs/colab']"
    said = machine.run("Tesla T4, 7.5")
    # The clone is there, and only the run that left no record is tried again.
    assert machine.calls() == [["pip", "install", "-q", "-e", f"{clone}[train,report]"], TRAINED[2]]
    assert said[1:3] == ["paper-single-fp32: kept", "paper-zero2-fp32: kept"]


@pytest.mark.launches
def test_without_a_gpu_two_strategies_train_on_the_cores(machine):
    said = machine.run("")
    calls = machine.calls()
    assert [call[0] for call in calls] == ["git", "pip", "zero-study", "zero-study"]
    assert [call[2:4] for call in calls[2:]] == [["--strategy", "ddp"], ["--strategy", "zero3"]]
    assert "on two cores" in said[0]
    assert said[-1] == f"RECORDS ['{machine.clone}/runs/colab']"


def packed(machine: Colab) -> Path:
    """The zip file of a repository, as GitHub makes it: everything is in one folder."""
    root = machine.folder / "packed" / "zero-study-main"
    shutil.copytree(machine.folder / "source", root)
    return Path(shutil.make_archive(str(machine.folder / "zero-study-main"), "zip", root.parent))


@pytest.mark.launches
def test_without_an_address_the_zip_file_of_the_repository_is_enough(machine):
    cell = set_up("time", "")
    said = machine.run("", cell, chosen=[packed(machine)])
    calls = machine.calls()
    unpacked = machine.clone / "zero-study-main"
    assert calls[0] == ["pip", "install", "-q", "-e", f"{unpacked}[train,report]"]
    assert [call[0] for call in calls[1:]] == ["zero-study", "zero-study"]
    assert said[-1] == f"RECORDS ['{unpacked}/runs/colab']"
    machine.run("", cell)  # the clone is there, so no file has to be chosen


@pytest.mark.launches
def test_without_an_address_the_wheel_is_enough(machine):
    wheel = machine.folder / "zero_study-1.0-py3-none-any.whl"
    packages = machine.folder / "packages"
    for package in ("study", "zero_study"):
        shutil.copytree(machine.folder / "source" / package, packages / package)
    shutil.move(shutil.make_archive(str(machine.folder / "made"), "zip", packages), wheel)
    cell = set_up("planner", "")
    machine.run("", cell, chosen=[wheel])
    installed = ["pip", "install", "-q", f"{machine.folder / 'content' / wheel.name}[report]"]
    assert machine.calls() == [installed]
    machine.run("", cell)
    assert machine.calls() == [installed]


@pytest.mark.launches
def test_without_a_file_the_set_up_says_what_to_do(machine):
    completed = machine.attempt("", set_up("planner", ""))
    assert completed.returncode == 1
    assert "No file was chosen" in completed.stderr.splitlines()[-1]
    assert not machine.clone.exists()
    text = machine.folder / "notes.txt"
    text.touch()
    assert "notes.txt" in machine.attempt("", set_up("planner", ""), chosen=[text]).stderr
    assert not machine.clone.exists()


def test_a_wheel_has_no_stored_results(monkeypatch, tmp_path):
    monkeypatch.setattr(colab, "find_gpu", lambda: None)
    monkeypatch.setattr(colab, "_run", lambda *_: None)  # no run leaves a record
    with pytest.raises(Refusal, match="upload the zip file"):
        colab.train("reports/cpu/records/cpu", tmp_path)
    assert colab.train("reports/cpu/records/cpu", report.ROOT) == [str(report.ROOT / "reports/cpu/records/cpu")]


@pytest.mark.parametrize(
    ("name", "capability", "precision"), [("Tesla T4", 7.5, "fp32"), ("NVIDIA A100-SXM4-40GB", 8.0, "bf16-autocast")]
)
def test_commands_are_accepted(name, capability, precision, monkeypatch):
    """By the flags of `zero-study train` and by what a strategy can do."""
    monkeypatch.chdir(report.ROOT)
    for command in colab.commands(colab.ColabGpu(name, capability)).values():
        assert command[:2] == ["zero-study", "train"]
        flags = given(cli.parse(command[1:]).params)
        chosen = file.read_strategy(file.find_strategy(flags.pop("strategy")))
        assert flags.pop("num_processes") == 1
        assert (flags.pop("machine_rank"), flags.pop("main_process_port")) == (0, 29500)  # of one machine, not used
        created = config.build_config(**flags)
        assert (created.size, created.data, created.precision) == ("large", "hub", precision)
        assert chosen.needed_extensions == set()
