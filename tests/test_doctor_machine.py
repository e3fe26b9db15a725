"""What would bite on this machine is said in one line each, with its remedy."""

from __future__ import annotations

import contextlib
import json
import os

import launching
import pytest

from study.engines import extensions
from study.engines.doctor import checkup
from study.engines.keys import allowed


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in list(os.environ):
        if allowed.says_which_rank(name) or allowed.of_variable(name):
            monkeypatch.delenv(name)


@pytest.mark.parametrize("name", ["RANK", "ACCELERATE_MIXED_PRECISION"])
def test_inherited_variables_that_a_run_would_refuse_bite(name, monkeypatch):
    assert checkup._inherited().verdict == "ok"
    monkeypatch.setenv(name, "1")
    check = checkup._inherited()
    assert (check.verdict, name in check.message, "unset" in check.remedy) == ("bites", True, True)


def test_a_taken_port_is_noted():
    with checkup.socket.socket() as holder:
        with contextlib.suppress(OSError):  # somebody else has it, which is as good
            holder.bind(("127.0.0.1", checkup.PORT))
        holder.listen()
        assert checkup._port().verdict == "note"


def test_a_disk_is_measured_and_a_folder_that_is_none_bites(tmp_path, monkeypatch):
    monkeypatch.setattr(checkup, "DISK_BYTES", 1 << 21)
    (check,) = checkup._disk(tmp_path)
    assert check.verdict == "ok"
    assert "GB/s" in check.message
    assert not list(tmp_path.iterdir())
    (check,) = checkup._disk(tmp_path / "none")
    assert check.verdict == "bites"


def test_extensions_are_judged_as_a_run_finds_them(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    unbuilt = {check.name: check for check in checkup._extensions()}
    assert all(check.verdict == "bites" and "extensions" in check.remedy for check in unbuilt.values())
    lock = tmp_path / "cpu_adam" / "lock"
    lock.parent.mkdir()
    lock.touch()
    stale = {check.name: check for check in checkup._extensions()}["DeepSpeed's cpu_adam"]
    assert (stale.verdict, stale.remedy) == ("bites", f"run: rm {lock}")
    with open(lock):
        held = {check.name: check for check in checkup._extensions()}["DeepSpeed's cpu_adam"]
        assert held.verdict == "note"
        assert extensions.building("cpu_adam")


@pytest.mark.launches
def test_the_command_says_all_of_it(monkeypatch, tmp_path):
    done = launching.attempt(["zero-study", "doctor", "--json"], env={"RANK": "3", "PYTHONPATH": str(launching.ROOT)})
    assert done.returncode == 1, done.stderr
    checks = {check["name"]: check for check in json.loads(done.stdout)}
    assert checks["environment"]["verdict"] == "bites"
    assert checks["two gloo ranks"]["verdict"] == "ok"
    assert checks["packages"]["verdict"] == "ok"
