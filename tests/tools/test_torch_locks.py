"""Locks of killed builds are removed, and no lock that may be held."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from zero_study.doctor import checkup
from zero_study.engines import torch_locks

OLD = 600.0


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(torch_locks, "LOCAL_FILE_SYSTEMS", {torch_locks._file_system(tmp_path)})
    return tmp_path


def lock(folder: Path, name: str, age: float = OLD) -> Path:
    path = folder / name / "lock"
    path.parent.mkdir(exist_ok=True)
    path.touch()
    os.utime(path, (time.time() - age,) * 2)
    return path


def test_the_lock_of_a_killed_build_is_removed(folder):
    killed, fresh = lock(folder, "cpu_adam"), lock(folder, "utils", age=1)
    (removed,) = torch_locks.remove_stale()
    assert removed.lock == killed
    assert "10 min" in str(removed)
    assert (killed.exists(), fresh.exists()) == (False, True)
    assert list(killed.parent.iterdir()) == []
    assert torch_locks.unclear() == []


def test_a_lock_that_is_open_is_not_removed(folder):
    """Also if /proc does not show the process, as in another container."""
    held = lock(folder, "cpu_adam")
    with open(held):
        assert torch_locks.stale() == torch_locks.unclear() == []
        torch_locks.PROC, proc = Path("/nowhere"), torch_locks.PROC
        try:
            assert torch_locks.stale() == torch_locks.unclear() == []
        finally:
            torch_locks.PROC = proc
    assert torch_locks.stale() == [held]


@pytest.mark.launches
def test_a_folder_in_which_a_compiler_works_keeps_its_lock(folder):
    held = lock(folder, "cpu_adam")
    with subprocess.Popen([sys.executable, "-c", "input()"], cwd=held.parent, stdin=subprocess.PIPE) as compiler:
        assert torch_locks.stale() == torch_locks.unclear() == []
        compiler.kill()
    assert torch_locks.stale() == [held]


@pytest.mark.parametrize("reason", ["another disk", "no leases"])
def test_a_lock_that_another_machine_may_hold_has_to_be_much_older(folder, monkeypatch, reason):
    if reason == "another disk":
        monkeypatch.setattr(torch_locks, "LOCAL_FILE_SYSTEMS", set())
    else:
        monkeypatch.setattr(torch_locks, "_is_closed", lambda path: None)
    shared = lock(folder, "cpu_adam")
    assert torch_locks.remove_stale() == []
    assert torch_locks.unclear() == [shared]
    assert str(shared) in torch_locks.description(shared)
    lock(folder, "cpu_adam", age=2 * torch_locks.STALE_SECONDS_IF_SHARED)
    assert torch_locks.stale() == [shared]
    (folder / "cpu_adam" / "kernel.o").touch()  # a compiler has just written
    assert torch_locks.stale() == []


def test_the_lock_of_another_user_is_named_and_not_removed(folder, monkeypatch):
    other = lock(folder, "cpu_adam")
    monkeypatch.setattr(torch_locks.os, "getuid", lambda: other.stat().st_uid + 1)
    assert torch_locks.remove_stale() == []
    assert torch_locks.unclear() == [other]


def test_a_new_lock_of_another_build_is_put_back(folder):
    """The lock was removed, and another process began a build, after this process had looked."""
    path = lock(folder, "cpu_adam")
    status = path.stat()
    kept = path.rename(folder / "kept")  # so that its inode is not used again
    lock(folder, "cpu_adam", age=0)
    assert not torch_locks._remove(path, status)
    assert path.exists()
    assert kept.exists()


def test_doctor_removes_locks_and_says_so(folder):
    lock(folder, "cpu_adam")
    (check,) = [check for check in checkup._extensions() if check.name == "torch's extensions"]
    assert check.verdict == "note"
    assert check.message.startswith("Removed ")
    assert not (folder / "cpu_adam" / "lock").exists()
