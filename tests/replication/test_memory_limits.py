"""Test memory limits of processes, the search for the largest run that fits, and the memory that a process may use."""

from __future__ import annotations

import math
import os
from pathlib import Path

import launching
import psutil
import pytest

from study import run as run_module
from study.compare import frontier
from study.config import build_config
from study.records.schema import Outcome
from study.running import launch, memory_limits, plan, studies
from zero_study.engines import this_machine
from zero_study.strategy.file import read_by_name

LADDER = ("11m", "19m", "36m", "62m", "110m", "162m", "204m", "304m")
STUDY = f"""
question: What fits?
parts:
  - flags: {{workload: gpt-wikitext, memory_cap: 1.5}}
    strategies: [ddp, zero3]
    sizes: [{", ".join(LADDER)}]
    largest: sizes
"""
# Asks for 400 MiB under a cap of 300; what came of it, or nothing where the kernel ended it.
OVER = """
import sys
from pathlib import Path
from zero_study.engines import this_machine
from study.running import memory_limits
if sys.argv[2] == "no groups":
    this_machine.control_groups = lambda controller: iter(())
memory_limits.cap(300 << 20, Path(sys.argv[1]), 0)
print(memory_limits.described["memory_cap"], flush=True)
try:
    held = bytearray(400 << 20)
    for place in range(0, len(held), 4096):
        held[place] = 1
    print("held")
except MemoryError:
    print("refused")
"""


@pytest.fixture
def ladder(tmp_path):
    (tmp_path / "mine.yaml").write_text(STUDY)
    study = studies.find(str(tmp_path / "mine.yaml"))
    return studies.runs(study, None, tmp_path / "runs")


@pytest.mark.parametrize("largest", range(-1, len(LADDER)))
def test_the_largest_that_fits_is_found_by_bisection(ladder, largest):
    """Each strategy by itself; whatever is the largest, as few runs as halving takes decide all of the ladder."""
    ended, started = [], 0
    for run in ladder:
        place = LADDER.index(run.config.size)
        displayed = plan.implied_outcome(run, ended)
        fits = place <= (largest if run.strategy.name == "zero3" else 2)
        if displayed:
            assert ("ran out of memory" in displayed) != fits
            continue
        started += run.strategy.name == "zero3"
        ended.append((run, "ok" if fits else "out_of_memory"))
    zero3 = [(LADDER.index(run.config.size), status) for run, status in ended if run.strategy.name == "zero3"]
    assert max((place for place, status in zero3 if status == "ok"), default=-1) == largest
    assert started <= math.ceil(math.log2(len(LADDER) + 1))


def test_a_run_decides_nothing_of_another_ladder(ladder):
    first = ladder[0]
    for other in ladder:
        if other.strategy.name != first.strategy.name:
            assert plan.implied_by_ladder(other, [(first, "ok"), (first, "out_of_memory")]) is None
    assert plan.implied_by_ladder(first, [(run, "failed") for run in ladder]) is None


@pytest.mark.launches
@pytest.mark.parametrize("groups", ["groups", "no groups"])
def test_a_process_over_its_cap_is_ended_or_refused_memory(groups, tmp_path):
    completed = launching.attempt(["python", "-c", OVER, tmp_path, groups])
    if "control group" in completed.stdout:  # which a container need not allow
        assert (completed.returncode, completed.stdout.splitlines()[1:]) == (-9, [])
        assert memory_limits.kills(tmp_path) == 1
    else:
        assert completed.stdout.split() == ["RLIMIT_DATA", "refused"]
    assert memory_limits.kills(tmp_path) == 0  # its groups are gone


@pytest.mark.slow
@pytest.mark.launches
def test_a_run_over_its_cap_is_out_of_memory_of_its_cap(tmp_path):
    flags = {"workload": "gpt-wikitext", "max_steps": 2, "memory_cap": 0.2, "num_train_examples": 16}
    config = build_config(**flags, num_eval_examples=8, output_dir=tmp_path / "run")
    ended = launch.launch(run_module.make_run(config, read_by_name("single"), 1), 120)
    assert (ended.status, ended.memory) == ("out_of_memory", "cap")


def test_thresholds_are_fixed_where_memory_is_measured(monkeypatch, tmp_path):
    fixed: list[bool] = []
    monkeypatch.setattr(memory_limits, "fix_malloc_thresholds", lambda: fixed.append(True))
    for measure in (True, False):
        run = run_module.make_run(build_config(measure=measure, output_dir=tmp_path), read_by_name("single"), 1)
        memory_limits.apply(run, 0)
    assert fixed == [True]


def test_a_variable_of_the_users_wins(monkeypatch):
    monkeypatch.setattr(memory_limits, "described", {})
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    memory_limits.fix_malloc_thresholds()
    assert memory_limits.described == {}
    assert os.environ["MALLOC_ARENA_MAX"] == "2"
    assert not list(memory_limits._groups(Path("nowhere")))


def tried(at: int, strategy: str, batch: int, seconds: float | None, status: str = "ok") -> frontier.CappedRun:
    config = build_config(workload="gpt-wikitext", size="110m", global_batch_size=batch, memory_cap=3)
    outcome = Outcome.model_construct(
        run_id=f"{at}", strategy=strategy, status=status, world_size=2, started_at=f"2026-11-24T00:00:{at:02}+00:00"
    )
    return frontier.CappedRun(outcome, config, 3.0, seconds)


def test_speed_at_equal_memory_is_held_against_the_controls_around_it():
    runs = [tried(0, "ddp", 2, 1.0), tried(1, "fsdp2", 2, 2.0), tried(2, "fsdp2", 8, 4.0), tried(3, "fsdp2", 8, 2.0)]
    runs += [tried(4, "fsdp2", 2, 1.0), tried(5, "ddp", 2, 0.5), tried(6, "fsdp2", 8, 1.0), tried(7, "zero1", 2, None)]
    rows = {each.strategy: each.cells()[1:] for each in frontier._speeds(runs[::-1], "ddp")}
    # Around them DDP trains 2 and 4 sequences a second: 3 in the mean. The last run has no control after it.
    assert rows["fsdp2"] == ["1.50", "2.25 (1.50 to 3.00)", "8", "4.00", "1.00 (0.67 to 1.33)"]
    assert rows["zero1"] == ["not timed", "", "", "", ""]
    assert frontier._speeds(runs[1:5] + runs[:1], "ddp") == []  # a ladder's runs: the control has one of each batch


# ---------------------------------------------------------------- processors and memory: by affinity and control groups

OF_ONE_PROCESSOR = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from pathlib import Path
from study.config import build_config
from study.records import machine
from study.run import Run
from study.running import launch
from zero_study.strategy.file import read_by_name
from study.training import counters
launched = launch._environment(Run(build_config(), read_by_name("single"), 1, Path("run")))["OMP_NUM_THREADS"]
facts = machine.describe()
measured = counters.load_between(counters.read_processors(), counters.read_processors(), 0.0).num_processors
print(launched, facts["usable_cores"], len(facts["allowed_processors"]), measured)
"""


@pytest.mark.launches
@pytest.mark.skipif(psutil.cpu_count(logical=False) < 2, reason="needs 2 cores, found 1")
def test_threads_and_records_follow_the_affinity():
    """As under `taskset -c 0`: two threads shared one core, and the record said two cores."""
    words = ["python", "-c", OF_ONE_PROCESSOR]
    completed = launching.attempt(words, env={"OMP_NUM_THREADS": None})
    assert (completed.returncode, completed.stdout.split()) == (0, ["1"] * 4), completed.stderr


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
