"""Test that the files in docs/clouds/ request resources that exist, and keep the results of an interrupted machine.

The shell itself goes through a slot, with a `zero-study` that only notes what it is asked.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import first_hour
import one_gpu
import pytest
import test_docs
import yaml
from launching import ROOT

CLOUDS = ROOT / "docs" / "clouds"


class Box(NamedTuple):
    """What a file rents, by SkyPilot's names."""

    num_gpus: int  # of a node
    nodes: int
    accelerators: str


BOXES = {
    "a100": Box(1, 1, "A100-80GB"),
    "8xa100": Box(8, 1, "A100-80GB"),
    "8xh100": Box(8, 1, "H100"),
    "2x8xh100": Box(8, 2, "H100"),
}
ONE_BOX = [name for name in BOXES if BOXES[name].nodes == 1]


def read(name: str) -> dict[str, Any]:
    return yaml.safe_load((CLOUDS / f"{name}.yaml").read_text())


def test_every_file_is_tested():
    assert {path.stem for path in CLOUDS.glob("*.yaml")} == set(BOXES)


@pytest.mark.parametrize("name", BOXES)
def test_a_file_rents_its_box_and_gives_it_back(name):
    written, box = read(name), BOXES[name]
    assert written["resources"]["accelerators"] == f"{box.accelerators}:{box.num_gpus}"
    assert written.get("num_nodes", 1) == box.nodes
    assert written["resources"]["autostop"] == {"idle_minutes": 10, "down": True}
    assert written["file_mounts"] == {"~/bucket": {"name": "${BUCKET}", "mode": "MOUNT"}}
    assert written["envs"]["BUCKET"] is None  # SkyPilot refuses a launch that names none
    assert written["setup"] == "bash docs/clouds/setup.sh"


@pytest.mark.parametrize(("fails", "status"), [("none", 0), ("python -c", 1), ("make setup", 1)])
def test_the_set_up_fails_where_torch_has_no_gpu(fails, status, tmp_path):
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    for program in ("uv", "make", "python"):
        stub = tmp_path / ".venv" / "bin" / program
        stub.write_text(f'#!/bin/bash\necho {program} "${{@@Q}}" >> asked\n[ "{program} $1" != "{fails}" ]\n')
        stub.chmod(0o755)
    path = f"{tmp_path / '.venv' / 'bin'}:{os.environ['PATH']}"
    completed = subprocess.run(["bash", CLOUDS / "setup.sh"], cwd=tmp_path, env={"PATH": path})
    asked = [shlex.split(line) for line in (tmp_path / "asked").read_text().splitlines()]
    assert completed.returncode == status
    assert asked[2][:2] == ["make", "setup"]


def test_the_set_up_goes_on_without_uv(tmp_path):
    """Then the environment is made with the machine's own Python, if that is new enough."""
    (tmp_path / "bin").mkdir()
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    for program in (tmp_path / "bin" / "make", tmp_path / ".venv" / "bin" / "python"):
        program.write_text('#!/bin/bash\necho "${0##*/}" "$@" >> asked\n')
        program.chmod(0o755)
    inputs = {"PATH": str(tmp_path / "bin"), "HOME": str(tmp_path)}
    completed = subprocess.run(["/bin/bash", CLOUDS / "setup.sh"], cwd=tmp_path, env=inputs)
    asked = (tmp_path / "asked").read_text().splitlines()
    assert completed.returncode == 0
    assert asked[0] == "make setup"
    assert asked[1].startswith("python -c import torch")


@pytest.mark.parametrize(("driver", "chooses"), [(None, True), ("570.86.10", True), ("580.95.05", False)])
def test_the_build_of_torch_follows_the_driver(driver, chooses, tmp_path):
    """PyPI's build needs a driver for CUDA 13. For an older driver, and for CPUs, uv chooses another build."""
    programs = {"uv": 'echo "$@" >> asked'}
    if driver:
        programs["nvidia-smi"] = f"echo {driver}"
    (tmp_path / "bin").mkdir()
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").symlink_to(sys.executable)
    for name, line in programs.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{line}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).symlink_to(ROOT / name)
    inputs = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "HOME": str(tmp_path), "CXX": "true"}
    command = ["make", "setup", f"PYTHON={sys.executable}"]
    subprocess.run(command, cwd=tmp_path, env=inputs, check=True, timeout=60)
    (asked,) = (tmp_path / "asked").read_text().splitlines()
    assert asked.startswith("pip install")
    assert ("--torch-backend auto" in asked) == chooses


# Notes what it is asked; a run, and a pack, which is to be a new file, leave one.
ZERO_STUDY = """#!/bin/bash
echo "${@@Q}" >> ~/asked
case $1 in
  run) mkdir -p runs/$2; touch runs/$2/done ;;
  pack) mkdir -p runs; [ ! -e ${@: -1} ] || exit 2; touch ${@: -1} ;;
esac
"""
PYTHON = """#!/bin/bash
echo "${@@Q}" >> ~/asked
mkdir -p runs; touch runs/acceptance.md runs/one-gpu.zip
"""


def new_box(folder: Path, bucket: Path) -> Path:
    """A home with the bucket, and the project's folder in it as SkyPilot has synchronized it and as it was set up."""
    work = folder / "sky_workdir"
    (work / ".venv" / "bin").mkdir(parents=True)
    (work / ".venv" / "bin" / "activate").write_text('PATH="$PWD/.venv/bin:$PATH"\n')
    for name, text in (("zero-study", ZERO_STUDY), ("python", PYTHON)):
        (work / ".venv" / "bin" / name).write_text(text)
        (work / ".venv" / "bin" / name).chmod(0o755)
    (work / "docs").symlink_to(ROOT / "docs")
    (folder / "bucket").symlink_to(bucket)
    return folder


@pytest.fixture
def bucket(tmp_path):
    (tmp_path / "bucket").mkdir()
    return tmp_path / "bucket"


def slot(name: str, home: Path, **envs: str) -> list[list[str]]:
    """What a slot asks the programs, which goes well."""
    written = read(name)
    inputs = {key: str(value) for key, value in {**written["envs"], "BUCKET": "mine", **envs}.items()}
    inputs |= {
        "HOME": str(home), "PATH": os.environ["PATH"], "SKYPILOT_TASK_ID": "sky-2026-11-22-06-00-00-000000_box_1",
        "SKYPILOT_NODE_RANK": "0", "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5",
        "SKYPILOT_NUM_NODES": str(BOXES[name].nodes), "SKYPILOT_NUM_GPUS_PER_NODE": str(BOXES[name].num_gpus),
    }  # fmt: skip
    command = ["bash", "-c", written["run"]]
    completed = subprocess.run(
        command, cwd=home / "sky_workdir", env=inputs, capture_output=True, text=True, timeout=60
    )
    assert (completed.returncode, completed.stderr) == (0, "")
    return [shlex.split(line) for line in (home / "asked").read_text().splitlines()]


@pytest.mark.parametrize("name", ONE_BOX)
def test_the_program_knows_the_commands(name, bucket, tmp_path):
    asked = slot(name, new_box(tmp_path / "box", bucket))
    if name == "a100":
        ((program, *words),) = asked
        assert program == "tools/measure/one_gpu.py"
        one_gpu.main.make_context("", words)
    else:
        (machine,) = [each for each in first_hour.PLANNED if each.file == f"{name}.yaml"]
        assert [shlex.join(["zero-study", *words]) for words in asked[:-1]] == [
            command.text for command in first_hour.commands(machine)
        ]
        for words in asked:
            test_docs.check_study(words)
    packs = [path.name for path in bucket.glob("*.zip")]
    assert packs == ["one-gpu.zip" if name == "a100" else "first-hour.zip"]


def test_another_study_runs_in_slots(bucket, tmp_path):
    asked = slot("8xh100", new_box(tmp_path / "box", bucket), STUDY="offload")
    assert [words[:2] for words in asked] == [["run", "offload"], ["pack", "runs/offload"]]


@pytest.mark.parametrize(("minutes", "num_runs"), [("35", 18), ("0", 0)])
def test_no_run_on_two_boxes_begins_after_the_limit(minutes, num_runs, bucket, tmp_path):
    home = new_box(tmp_path / "box", bucket)
    (home / "asked").touch()
    asked = slot("2x8xh100", home, MINUTES=minutes)
    assert [words[0] for words in asked].count("train") == num_runs
