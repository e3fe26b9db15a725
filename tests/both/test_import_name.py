"""Test `prove` and `diff` as `zero_study` in a folder that contains a package `study` of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import launching
import psutil
import pytest
from test_layout import ROOMS
from test_plain_install import built_wheel
from test_strategy import Ancestor

from study.config import build_config
from study.training.request import requested_run
from zero_study import version
from zero_study.doctor import checkup
from zero_study.engines.keys import allowed

TRAIN = """
import sys
import accelerate, torch
from study import ROWS  # the package in this folder
accelerator = accelerate.Accelerator(cpu=True)
torch.manual_seed(0)
net = torch.nn.Linear(8, 1)
model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.01))
if "imports" in sys.argv:
    from zero_study import diff, prove
    diff.record(model, "recorded")
    prove.watch(model, optimizer, strict=True)
batches = torch.Generator().manual_seed(accelerator.process_index)
for _ in range(5):
    accelerator.backward(model(torch.randn(ROWS, 8, generator=batches)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
imported = [module.__file__ for name, module in sys.modules.items() if name.partition(".")[0] == "study"]
with open(f"imported-{accelerator.process_index}.txt", "w") as file:
    print(*imported, file=file)
"""
LAUNCH = [
    "accelerate", "launch", "--config_file", launching.ROOT / "accelerate_configs" / "ddp.yaml", "--num_processes", "2",
    "--main_process_port", "0",
]  # fmt: skip
PROVE, DIFF = ["prove", "--strict", "train.py"], ["diff", "--output", "recorded", "train.py"]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "study").mkdir(parents=True)
    (folder / "study" / "__init__.py").write_text("ROWS = 4\n")
    for room in ROOMS["study"]:  # an editable installation would find ours if they were not there
        (folder / "study" / f"{room}.py").write_text("raise RuntimeError('imported the package in this folder')\n")
    (folder / "train.py").write_text(TRAIN)
    return folder


def check(project: Path, words: Sequence[str | Path], num_ranks: int, place: Path = launching.ROOT) -> None:
    """Run the script; it imports its own `study`, and is proved or recorded by what lies in `place`."""
    before = sorted(path.name for path in (project / "study").iterdir())
    for left in (*project.glob("imported-*.txt"), *project.glob("proof.json")):
        left.unlink()
    env = {"PYTHONPATH": str(place), "PYTHONDONTWRITEBYTECODE": "1"}
    completed = launching.attempt(words, cwd=project, env=env)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    imported = [path.read_text().strip() for path in project.glob("imported-*.txt")]
    assert imported == [f"{project}/study/__init__.py"] * num_ranks
    assert sorted(path.name for path in (project / "study").iterdir()) == before
    if "diff" not in str(words):
        proof = json.loads((project / "proof.json").read_text())
        assert proof["step"] is not None
        assert proof["made_by"].startswith(f"zero-study {version.__version__},")
        assert "not averaged" not in completed.stdout
    if "prove" not in str(words):
        recorded = sorted(path.name for path in (project / "recorded").iterdir())
        assert recorded == [f"rank-{rank}.json.gz" for rank in range(num_ranks)]


@pytest.mark.slow
@pytest.mark.launches
def test_prove_and_diff_by_import(project):
    check(project, ["python", "train.py", "imports"], 1)


@pytest.mark.slow
@pytest.mark.launches
@pytest.mark.parametrize("words", [PROVE, DIFF], ids=["prove", "diff"])
def test_a_script_by_its_short_name(words, project):
    check(project, ["python", "-m", f"zero_study.{words[0]}", *words[1:]], 1)


@pytest.mark.slow
@pytest.mark.launches
@pytest.mark.parametrize("words", [PROVE, DIFF], ids=["prove", "diff"])
def test_other_names_and_launches(words, project):
    check(project, [*LAUNCH, "-m", f"zero_study.{words[0]}", *words[1:]], 2)
    check(project, [*LAUNCH, "train.py", "imports"], 2)


@pytest.mark.slow
@pytest.mark.launches
def test_a_wheel(project, tmp_path):
    (tmp_path / "source").mkdir()
    wheel, place = built_wheel(tmp_path / "source"), tmp_path / "installed"
    install = ["-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", place, wheel]
    subprocess.run([sys.executable, *install], check=True)
    check(project, ["python", "train.py", "imports"], 1, place)
    for words in (PROVE, DIFF):
        check(project, ["python", "-m", f"zero_study.{words[0]}", *words[1:]], 1, place)
        check(project, [*LAUNCH, "-m", f"zero_study.{words[0]}", *words[1:]], 2, place)


@pytest.mark.parametrize("module", ["prove", "diff"])
def test_the_trainer_runs_within_either(module, monkeypatch):
    command = f"accelerate-launch --config_file accelerate_configs/ddp.yaml -m zero_study.{module} study/train.py"
    monkeypatch.chdir(launching.ROOT)
    monkeypatch.setattr(psutil.Process, "parents", lambda self: [Ancestor(command, launching.ROOT)])
    monkeypatch.setattr(allowed, "check_rank", lambda *_: None)
    assert requested_run(build_config()).strategy.name == "ddp"


@pytest.mark.slow
@pytest.mark.launches
def test_the_check_of_this_machine(project, monkeypatch):
    """Its two ranks start in the current folder."""
    launching.use()
    monkeypatch.chdir(project)
    assert checkup._why_no_sum("gloo") is None


@pytest.mark.launches
def test_commands_of_the_study_say_that_it_is_hidden_and_the_others_work(project):
    env = {"PYTHONPATH": f"{project}:{launching.ROOT}"}
    code = ["python", "-c", "from zero_study import api; print(api.advise('gpt2', gpu='l4', gpus=2).verdict)"]
    assert launching.attempt(code, cwd=project, env=env).stdout == "sound\n"
    completed = launching.attempt(["python", "-m", "zero_study", "train"], cwd=project, env=env)
    assert completed.returncode == 2
    assert str(project / "study" / "__init__.py") in completed.stderr.replace("\n  ", "")
    doctor = ["python", "-m", "zero_study", "doctor", launching.ROOT / "accelerate_configs" / "ddp.yaml"]
    assert launching.attempt(doctor, cwd=project, env=env).returncode == 0
