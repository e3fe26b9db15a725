"""Test that one launch at a time writes into a run's folder, and that a record names what its own run wrote."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from launching import ROOT, attempt, command_line, environment
from test_launch import start, wait_until  # noqa: F401 - a fixture

from study.records import schema
from study.running import lock
from study.training import journal
from zero_study import files, terminal
from zero_study.errors import Failed, Refusal

HOLD = (
    "import sys, time; from pathlib import Path; from study.running import lock\n"
    "with lock.locked_run(Path(sys.argv[1])): print('held', flush=True); time.sleep(600)"
)


@contextmanager
def holding(folder: Path) -> Iterator[int]:
    """Another process that writes into a folder; at the end it is killed, and so clears nothing up."""
    words = [sys.executable, "-c", HOLD, str(folder)]
    with subprocess.Popen(words, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "held\n"
            yield process.pid
        finally:
            process.kill()


# ---------------------------------------------------------------- the lock


def test_a_lock_leaves_nothing(tmp_path):
    with lock.locked_run(tmp_path / "a" / "b"):
        assert (tmp_path / "a" / "b" / lock.LOCK).exists()
    assert not list(tmp_path.iterdir())
    with lock.locked_run(tmp_path / "a"):
        (tmp_path / "a" / "kept").touch()
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["kept"]


@pytest.mark.parametrize("name", [lock.LOCK, lock.HOLDER])
def test_what_a_link_in_the_locks_place_points_to_stays(tmp_path, name):
    (tmp_path / "precious").write_text("a thesis")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(tmp_path / "precious")
    with suppress(Refusal), lock.locked_run(tmp_path / "run"):
        pass
    assert (tmp_path / "precious").read_text() == "a thesis"


@pytest.mark.launches
def test_another_process_is_kept_out_until_it_has_ended_however(tmp_path, monkeypatch):
    with holding(tmp_path) as other:
        with pytest.raises(Refusal, match=rf"process {other} on .* is writing a run in this folder.* or pass another"):
            lock.locked_run(tmp_path).__enter__()
        monkeypatch.setenv(lock.TOKEN, (tmp_path / lock.HOLDER).read_text().split()[0])
        with lock.locked_run(tmp_path):  # as what the holder has started
            pass
        assert (tmp_path / lock.LOCK).exists()
    monkeypatch.delenv(lock.TOKEN)
    with lock.locked_run(tmp_path):
        assert f"process {os.getpid()} on " in (tmp_path / lock.HOLDER).read_text()
    assert not list(tmp_path.iterdir())


@pytest.mark.launches
@pytest.mark.skipif(
    os.geteuid() != 0 and not os.environ.get("CI"), reason="namespaces of processes take root; run the tests as root"
)
def test_containers_that_share_a_disk_keep_each_other_out(tmp_path):
    """Each has a process 1, so a holder's number is among everybody's ancestors."""
    container = ["unshare", "--pid", "--fork", "--mount-proc"]
    hold = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen([*container, *hold], env=environment(), stdout=subprocess.PIPE, text=True) as first:
        try:
            assert first.stdout.readline() == "held\n"
            words = [*container, "sh", "-c", f"{shlex.join(hold)}; exit $?"]  # the shell is process 1
            second = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=60)
        finally:
            for process in psutil.Process(first.pid).children(recursive=True):
                process.kill()
    assert second.returncode == 1
    assert "process 1 on " in second.stderr


# ---------------------------------------------------------------- two launches


@pytest.mark.launches
def test_a_second_launch_does_not_touch_the_firsts_logs(start, tmp_path):  # noqa: F811
    folder = tmp_path / "below" / "run"
    with holding(folder) as other:
        kept = [folder / name for name in ("stdout.log", "stderr.log", "steps.jsonl")]
        for path in kept:
            path.write_text("the first's")
        with pytest.raises(Refusal, match=rf"process {other} on .* is writing a run in this folder"):
            start("ok")
        assert {path.read_text() for path in kept} == {"the first's"}
    assert start("ok").status == "ok"
    assert not (folder / lock.LOCK).exists()


@pytest.mark.slow
@pytest.mark.launches
def test_two_real_launches_into_one_folder(tmp_path):
    """Of `train`, a bare launch and `train` the first alone writes; where nothing locks, no record is of two runs."""
    folder = tmp_path / "run"
    flags = ["--num-train-examples", "64", "--num-eval-examples", "16", "--no-measure", "--output-dir", str(folder)]
    first = subprocess.Popen(
        [sys.executable, "-m", "zero_study", "train", *flags, "--max-steps", "100000", "--strategy", "single"],
        cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        wait_until(lambda: (folder / lock.LOCK).exists() or first.poll() is not None)
        second = command_line(["train", *flags, "--max-steps", "2", "--seed", "1"])
        assert (second.returncode, second.stdout) == (2, "")
        assert f"process {first.pid} on " in terminal.last_error(second.stderr)
        launcher = ["accelerate", "launch", "--config_file", "accelerate_configs/ddp.yaml", "--main_process_port", "0"]
        bare = attempt([*launcher, "study/train.py", *flags, "--max-steps", "2", "--seed", "2"])
        assert bare.returncode == 1
        assert f"zero-study: {folder}: process {first.pid} on " in bare.stderr
        wait_until(lambda: (folder / "config.json").exists() or first.poll() is not None)
        steps = (folder / "steps.jsonl").read_text().splitlines()[:-1]  # of which the last may be half written
        assert [json.loads(line)["step"] for line in steps] == list(range(1, len(steps) + 1))
        assert json.loads((folder / "config.json").read_text())["config"]["seed"] == 0
        for name in (lock.LOCK, lock.HOLDER):  # as on a file system that locks nothing
            (folder / name).unlink()
        third = attempt(["zero-study", "train", *flags, "--max-steps", "3", "--seed", "3"])
        assert third.returncode == 0, third.stderr
        assert first.wait(timeout=60) == 1  # it has seen its files gone, and leaves the other's record alone
        record = schema.read(folder)
        assert (record.status, record.seed, record.steps_done) == ("ok", 3, 3)
    finally:
        first.kill()
        first.wait()


# ---------------------------------------------------------------- what a record names

LINES = [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.25}]
CONFIGURATION = {"config": {"seed": 0}}


def written(folder: Path, lines: list[dict] = LINES, configuration: dict = CONFIGURATION) -> Path:
    (folder / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    files.write_json(folder / "config.json", configuration)
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: written(folder, LINES[:1]), r"steps\.jsonl: another program has changed this file"),
        (
            lambda folder: (folder / "steps.jsonl").write_text('{"step": 1, "lo'),
            r"steps\.jsonl: another program has changed this file",
        ),
        (
            lambda folder: (folder / "steps.jsonl").unlink(),
            r"steps\.jsonl: another program has removed this file",
        ),
        (
            lambda folder: written(folder, LINES, {"config": {"seed": 1}}),
            r"config\.json: another program has changed this file",
        ),
        (
            lambda folder: (folder / "config.json").unlink(),
            r"config\.json: another program has removed this file",
        ),
    ],
)
def test_a_result_whose_files_are_anothers_is_none(tmp_path, change, message):
    change(written(tmp_path))
    with pytest.raises(Failed, match=message):
        journal.digests_of_files(tmp_path, LINES, CONFIGURATION, is_result=True)
    journal.digests_of_files(
        tmp_path, LINES, CONFIGURATION, is_result=False
    )  # a failure is recorded whatever lies there


def test_steps_that_do_not_follow_one_another_are_no_result(tmp_path):
    lines = [LINES[0], LINES[0]]
    with pytest.raises(Failed, match="its steps are not numbered from 1 to 2"):
        journal.digests_of_files(written(tmp_path, lines), lines, CONFIGURATION, is_result=True)
