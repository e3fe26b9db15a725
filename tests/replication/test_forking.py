"""Test runs that are forked from a process that has imported everything: as started ones, and as robust."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import launching
import psutil
import pytest

from study.config import build_config
from study.records import schema
from study.records.machine import FORKED
from study.run import Run, make_run
from study.running import forking, launch, runner
from study.running.forking import ForkServer, ServerLost
from zero_study.strategy.file import find_strategy, read_strategy

ROOT = launching.ROOT
SMALL = {"max_steps": 4, "num_train_examples": 32, "num_eval_examples": 8, "learning_rate": 1e-3, "digest_every": 1}
ENDLESS = SMALL | {"max_steps": 100_000, "measure": False, "digest_every": None}


@pytest.fixture(scope="module")
def server():
    """The server of two runs of two processes. It may not outlive the tests of this file."""
    before = dict(os.environ)
    os.environ.update(launching.environment())
    with launch.fork_server([planned("ddp", Path("runs")), planned("zero2", Path("runs"))]) as created:
        yield created
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    for name, value in launching.environment().items():
        monkeypatch.setenv(name, value)


def planned(strategy: str, folder: Path, num_processes: int = 2, **flags) -> Run:
    config = build_config(**{**SMALL, **flags}, output_dir=folder / f"{strategy}-{num_processes}x")
    return make_run(config, read_strategy(find_strategy(strategy), ROOT), num_processes)


def fork(server: ForkServer, run: Run, limit: float = 600, progress=lambda line: None) -> launch.LaunchResult:
    """Launch a run that has to be forked. pytest changes a variable of its own for each phase of a test."""
    launching.use()
    server.environment = launch._of_every_run(launch._environment(run))
    assert launch.can_be_forked(run, server)
    ended = launch.launch(run, limit, progress, server)
    assert server.lost is None
    return ended


def launcher_and_ranks(server: ForkServer) -> tuple[psutil.Process, list[psutil.Process]] | None:
    """The processes of the run that is forked from the first server. None if there is none."""
    for child in psutil.Process(server.pid).children():
        with suppress(psutil.NoSuchProcess):  # a rank that is between its start and its end
            if ranks := child.children():
                return child, ranks
    return None


# What differs between two runs of the same training.
OF_A_MOMENT = {
    "run_id", "command", "launcher", "started_at", "wall_seconds", "timing", "load", "peak_memory", "steps_sha256",
    "config", "config_sha256", "machine", "code", "evaluation",
}  # fmt: skip


@pytest.mark.launches
def test_a_forked_run_records_what_a_started_one_does(server, tmp_path):
    both = (
        fork(server, planned("zero2", tmp_path / "forked")),
        launch.launch(planned("zero2", tmp_path / "started"), 600),
    )
    assert [ended.status for ended in both] == ["ok", "ok"], both
    forked, started = (schema.read(ended.record_path).model_dump(mode="json") for ended in both)
    assert {name for name in forked if forked[name] != started[name]} <= OF_A_MOMENT
    assert len(forked["digests"]) == SMALL["max_steps"]
    assert forked["config"] | {"output_dir": ""} == started["config"] | {"output_dir": ""}
    assert forked["machine"]["environment"].pop(FORKED) == "1"
    assert FORKED not in started["machine"]["environment"]
    assert forked["machine"] == started["machine"]
    assert [words[:5] for words in (forked["launcher"], forked["command"])] == [
        words[:5] for words in (started["launcher"], started["command"])
    ]
    logs = tmp_path / "forked" / "zero2-2x"
    assert (logs / "stderr.log").read_text().startswith("Loading PyTorch and the engine")
    assert (logs / "stdout.log").read_text().startswith("bert-imdb tiny under zero2: 2 process")


@pytest.mark.slow
@pytest.mark.launches
def test_runs_that_end_badly_leave_the_server_as_it_was(server, tmp_path, monkeypatch):
    late = fork(server, planned("zero2", tmp_path / "late", **ENDLESS), 8)
    assert (late.status, late.message) == ("timed_out", "ended at its time limit of 8 s")
    monkeypatch.setattr(launch, "HEARTBEAT_SECONDS", 0.1)

    def kill_rank(line: str) -> None:
        if "step" in line and (result := launcher_and_ranks(server)) and len(result[1]) == 2:
            result[1][1].kill()

    killed = fork(server, planned("ddp", tmp_path / "killed", **ENDLESS), 600, kill_rank)
    assert killed.status == "killed"
    assert killed.message.startswith("rank 1 was ended by SIGKILL")

    def interrupt(line: str) -> None:
        if "step" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fork(server, planned("ddp", tmp_path / "interrupted", **ENDLESS), 600, interrupt)
    record = schema.read(tmp_path / "interrupted" / "ddp-2x")
    assert record.status == "interrupted"

    def kill_launcher(line: str) -> None:
        if "step" in line and (result := launcher_and_ranks(server)):
            result[0].kill()

    lost = fork(server, planned("ddp", tmp_path / "lost", **ENDLESS), 600, kill_launcher)
    assert (lost.status, lost.returncode) == ("killed", -signal.SIGKILL)
    assert launcher_and_ranks(server) is None
    assert fork(server, planned("ddp", tmp_path / "after")).status == "ok"


@pytest.mark.slow
@pytest.mark.launches
def test_without_a_server_a_run_is_started_and_a_line_says_why(server, tmp_path):
    lines: list[str] = []
    with launch.fork_server([planned("ddp", tmp_path)]) as other:
        os.kill(other.pid, signal.SIGKILL)
        ended = launch.launch(planned("ddp", tmp_path), 600, lines.append, other)
        assert ended.status == "ok"
        assert FORKED not in schema.read(ended.record_path).machine["environment"]
        assert lines[0] == "starts in a new process: the process to fork from has ended: status -9"
        with pytest.raises(ServerLost):
            other.wait_until_ready()


def test_a_run_with_another_environment_is_not_forked(tmp_path, monkeypatch):
    class Server:
        environment = launch._of_every_run(launch._environment(planned("ddp", tmp_path)))

    assert launch.can_be_forked(planned("ddp", tmp_path), Server)
    assert not launch.can_be_forked(planned("ddp", tmp_path, memory_cap=2.0), Server)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert not launch.can_be_forked(planned("ddp", tmp_path), Server)


def test_a_machine_with_a_gpu_forks_no_run(monkeypatch):
    assert runner.why_not_forked() is None
    monkeypatch.setenv("ZERO_STUDY_SIMULATED_GPUS", "{}")
    assert runner.why_not_forked() == "this machine has a GPU, and CUDA does not work in forks"


SERVER = """
import sys
from study.running import fork_server
sys.exit("no server") if "{0}" == "ends" else fork_server.serve("study.records.imports {0}", {{}}, {{}})
"""


@pytest.mark.launches
@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ("ends", "the process to fork from has ended: status 1"),
        ("nowhere", "the process to fork from has ended: ModuleNotFoundError: No module named 'nowhere'"),
        ("begins_a_thread", "an imported library has started a thread"),
    ],
)
def test_a_server_that_cannot_fork_says_why(modules, message, tmp_path):
    (tmp_path / "server.py").write_text(SERVER.format(modules))
    (tmp_path / "begins_a_thread.py").write_text(
        "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
    )
    with ForkServer(launching.environment(), tmp_path / "server.py") as server, pytest.raises(ServerLost) as lost:
        server.wait_until_ready()
    assert str(lost.value) == server.lost == message


@pytest.mark.launches
def test_a_server_ends_with_whoever_started_it(tmp_path):
    code = "import os, sys, time; from study.running.forking import ForkServer; "
    code += "print(ForkServer(os.environ).pid, flush=True); time.sleep(60)"
    words = [sys.executable, "-c", code]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=launching.environment()) as starter:
        server = psutil.Process(int(starter.stdout.readline()))
        time.sleep(0.5)
        starter.kill()
    assert psutil.wait_procs([server], timeout=10)[1] == []
    assert forking.PROGRAM.exists()
