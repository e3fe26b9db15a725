"""What a process may use of a machine's processors and memory: by its affinity, for real, and by control groups."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil
import pytest
from launching import ROOT

from study.engines import this_machine

OF_ONE_PROCESSOR = """
import os, sys
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import pairs
from study.config import build_config
from study.records import machine
from study.run import Run
from study.running import launch
from study.strategy.file import read_by_name
from study.training import counters
launched = launch._environment(Run(build_config(), read_by_name("single"), 1, Path("run")))["OMP_NUM_THREADS"]
pairs.share_cores(1)
facts = machine.describe()
measured = counters.between(counters.moment(), counters.moment(), 0.0).num_processors
print(launched, os.environ["OMP_NUM_THREADS"], facts["usable_cores"], len(facts["allowed_processors"]), measured)
"""


@pytest.mark.launches
@pytest.mark.skipif(psutil.cpu_count(logical=False) < 2, reason="needs 2 cores, found 1")
def test_threads_and_records_follow_the_affinity():
    """As under `taskset -c 0`: two threads shared one core, and the record said two cores."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-c", OF_ONE_PROCESSOR, ROOT / "tools"], env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout.split()) == (0, ["1"] * 5), done.stderr


MACHINE = {"v1": "5:cpu,cpuacct:{0}\n4:memory:{0}\n1:name=systemd:/\n0::/\n", "v2": "0::{0}\n"}


@pytest.mark.parametrize(
    ("version", "group", "files", "quota", "memory"),
    [
        ("v2", "/", {}, None, None),
        ("v2", "/job/task", {"job/task/cpu.max": "max 100000", "job/task/memory.max": "max"}, None, None),
        ("v2", "/job/task", {"job/task/cpu.max": "400000 100000", "job/cpu.max": "150000 100000"}, 1.5, None),
        ("v2", "/job/task", {"job/cpu.max": "50000 100000", "job/memory.max": "4096"}, 0.5, 4096),
        ("v2", "/docker/unseen", {"cpu.max": "200000 100000"}, 2.0, None),  # a container sees its own as the root
        ("v1", "/job", {"cpu/job/cpu.cfs_quota_us": "-1", "cpu/job/cpu.cfs_period_us": "100000"}, None, None),
        ("v1", "/job", {"cpu/job/cpu.cfs_quota_us": "300000", "cpu/job/cpu.cfs_period_us": "100000"}, 3.0, None),
        ("v1", "/job", {"memory/job/memory.limit_in_bytes": "4096", "cpu.max": "100000 100000"}, 1.0, 4096),
    ],
)
def test_what_control_groups_leave(tmp_path, monkeypatch, version, group, files, quota, memory):
    for name, text in files.items():
        (tmp_path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / name).write_text(f"{text}\n")
    (tmp_path / "own").write_text(MACHINE[version].format(group))
    monkeypatch.setattr(this_machine, "GROUPS", tmp_path / "groups")
    monkeypatch.setattr(this_machine, "OWN_GROUPS", tmp_path / "own")
    assert this_machine.quota() == quota
    assert this_machine.find().host_memory_bytes == (memory or psutil.virtual_memory().total)
    cores = psutil.cpu_count(logical=False)
    monkeypatch.setattr(this_machine, "allowed_processors", lambda: list(range(os.cpu_count())))
    assert this_machine.usable_cores() == min(cores, quota or cores)


def test_two_processors_of_one_core_are_one(tmp_path, monkeypatch):
    for number, core in enumerate(("0,2", "1,3", "0,2", "1,3")):
        (tmp_path / str(number)).write_text(core)
    monkeypatch.setattr(this_machine, "_CORE_OF", f"{tmp_path}/{{}}")
    monkeypatch.setattr(this_machine, "quota", lambda: None)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 2)
    for allowed, cores in (([0, 1, 2, 3], 2), ([0, 2], 1), ([0, 1, 2], 2), ([8, 9], 2)):
        monkeypatch.setattr(this_machine, "allowed_processors", lambda allowed=allowed: allowed)
        assert this_machine.usable_cores() == cores
        assert this_machine.threads_of_each(2) == max(1, cores // 2)
