"""Does a record say from where a run imported, and is a run refused whose modules would be others'?"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import launching
import pytest

from study.errors import Refusal
from study.records import imports, machine, schema

PROGRAM = launching.ROOT / "study" / "train.py"


@pytest.fixture
def path(tmp_path, monkeypatch) -> Path:
    """A folder on PYTHONPATH that is not the current one."""
    folder = tmp_path / "path"
    folder.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return folder


@pytest.mark.parametrize("name", ["html.py", "sitecustomize.py", "json/__init__.py", "random.cpython-311-x86_64.so"])
def test_what_stands_before_pythons_own_is_refused(path, name):
    imports.check(PROGRAM)
    (path / name).parent.mkdir(exist_ok=True)
    (path / name).touch()
    with pytest.raises(Refusal, match=rf"PYTHONPATH: {path / Path(name).parts[0]} is imported in place of Python's"):
        imports.check(PROGRAM)


def test_what_was_imported_from_the_current_folder_is_refused(path, monkeypatch):
    """A .pth file that imports does so before the program takes that folder away."""
    monkeypatch.chdir(path)
    (path / "html.py").touch()
    imports.check(PROGRAM)
    monkeypatch.setitem(sys.modules, "html", SimpleNamespace(__file__=str(path / "html.py")))
    with pytest.raises(Refusal, match=rf"PYTHONPATH: {path}/html.py is imported in place of Python's"):
        imports.check(PROGRAM)


@pytest.mark.parametrize("library", ["accelerate", "numpy"])
def test_a_library_from_elsewhere_is_refused(path, monkeypatch, library):
    (path / library).mkdir()
    (path / library / "__init__.py").touch()
    monkeypatch.syspath_prepend(path)
    for name in [name for name in sys.modules if name.partition(".")[0] == library]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(Refusal, match=rf"{library}: would be imported from {path}"):
        imports.check(PROGRAM)


def test_another_copy_of_the_study_is_refused(tmp_path):
    (tmp_path / "train.py").touch()
    with pytest.raises(Refusal, match=rf"{tmp_path / 'train.py'} was started, and imports the study from"):
        imports.check(tmp_path / "train.py")


def test_a_changed_file_of_a_library_changes_its_digest_and_is_named(tmp_path, monkeypatch):
    import accelerate.optimizer

    told = imports.describe()["libraries"]["accelerate"]
    assert told["changed"] == []
    installed = Path(accelerate.optimizer.__file__)
    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read(path) + b"# mine\n" * (path == installed))
    changed = imports.describe()["libraries"]["accelerate"]
    assert changed["changed"] == ["accelerate/optimizer.py"]
    assert changed["sha256"] != told["sha256"]
    arithmetic = [machine.arithmetic({"imports": {"libraries": {"accelerate": each}}}) for each in (told, changed)]
    assert arithmetic == [{}, {"changed accelerate": changed["sha256"][:12]}]  # so that such runs are not compared


@pytest.mark.slow
@pytest.mark.launches
def test_a_file_of_the_current_folder_is_no_module_of_a_run(tmp_path):
    """accelerate's launcher of DeepSpeed puts that folder before Python's own modules; a `sitecustomize` is refused."""
    for name in ("html.py", "dataclasses.py"):
        (tmp_path / name).write_text("raise RuntimeError('of the current folder')")
    strategy = launching.ROOT / "accelerate_configs" / "zero2.yaml"
    launch = ["accelerate", "launch", "--config_file", strategy, "--main_process_port", "0", PROGRAM]
    launch += ["--max-steps", "2", "--no-measure", "--num-train-examples", "16", "--num-eval-examples", "8"]
    as_installed = {"PYTHONSAFEPATH": "1"}  # as the command `accelerate` starts
    done = launching.attempt([*launch, "--output-dir", "run"], cwd=tmp_path, env=as_installed)
    assert done.returncode == 0, done.stderr
    told = schema.read(tmp_path / "run").machine["imports"]
    assert not [name for name, each in told["libraries"].items() if each["changed"]]
    assert {"torch", "accelerate", "deepspeed", "transformers", "numpy"} <= told["libraries"].keys()
    (tmp_path / "sitecustomize.py").write_text("")
    done = launching.attempt([*launch, "--output-dir", "again"], cwd=tmp_path, env=as_installed)
    assert "sitecustomize.py is imported in place of Python's own" in done.stderr
    assert not (tmp_path / "again").exists()
