"""Test that every launch ends, and that no process outlives the launch. Uses fake runs.

And with a few that are real: a run of two processes that fails leaves a record that says how, whichever rank failed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import fake_train
import killing
import launching
import psutil
import pytest

from study.config import build_config
from study.records import schema
from study.run import Run, make_run
from study.running import launch
from zero_study import processes
from zero_study.errors import Refusal, RunFailed
from zero_study.strategy.file import read_by_name

pytestmark = pytest.mark.launches


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Launch a fake run that ends as it is told."""

    def prepare_and_launch(ending: str, strategy: str = "single", **options) -> launch.LaunchResult:
        run = Run(build_config(), read_by_name(strategy), 1, tmp_path / "below" / "run")
        fake_train.prepare(tmp_path / "runs.json", [run], {"run": ending})
        monkeypatch.setattr(launch, "command", fake_train.command(tmp_path / "runs.json"))
        return launch.launch(run, **options)

    monkeypatch.chdir(tmp_path)
    return prepare_and_launch


def test_a_refused_run_leaves_nothing(start, tmp_path):
    ended = start("refused")
    assert (ended.status, ended.message, ended.record_path) == ("misconfigured", "./data cannot be read; mend it", None)
    assert not (tmp_path / "below").exists()


def test_a_record_says_what_its_ranks_could_not_know(start, tmp_path):
    ended = start("killed_while_recording", strategy="zero3_nvme_offload")
    record = schema.read(ended.record_path)
    assert (ended.status, record.status) == ("killed", "killed")
    assert record.failure == schema.Failure(step=2, error=ended.message)
    assert not (tmp_path / "below" / "run" / "swap").exists()


def test_a_time_limit_ends_the_run(start, tmp_path):
    ended = start("hanging", timeout_seconds=0.6)
    assert (ended.status, ended.message) == ("timed_out", "ended at its time limit of 0.6 s")
    assert ended.wall_seconds >= 0.6
    assert ended.returncode == -signal.SIGTERM
    assert running(tmp_path) == []


def test_progress_shows_the_last_step_and_ctrl_c_ends_the_run(start, tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "HEARTBEAT_SECONDS", 0.1)

    def interrupt(line: str) -> None:
        if line.endswith(" s, step 8, loss 0.6200"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start("hanging", timeout_seconds=60, progress=interrupt)
    assert running(tmp_path) == []


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux, whose kernel ends children with their parent")
def test_a_run_dies_with_whoever_started_it(tmp_path):
    """Killed by SIGKILL, which nobody can handle: the program and the child of its that asks for it, too."""
    child = (
        "import sys, time; sys.path.insert(0, sys.argv[1])\n"
        "from zero_study import processes; processes.die_with_parent()\n"
        "open(sys.argv[3] + '/asked', 'w'); time.sleep(600)"
    )
    program = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[2], *sys.argv[1:]])"
    starter = (
        "import subprocess, sys; sys.path.insert(0, sys.argv[3]); from zero_study import processes; "
        "subprocess.run(processes.with_parent_death_signal([sys.executable, *sys.argv[1:]]), start_new_session=True)"
    )
    root = str(Path(processes.__file__).parents[1])
    words = [sys.executable, "-c", starter, "-c", program, root, child, str(tmp_path)]
    with subprocess.Popen(words) as process:
        wait_until((tmp_path / "asked").exists)
        assert len(running(tmp_path)) == 3  # itself, the program, its child
        process.kill()
    wait_until(lambda: running(tmp_path) == [])


def test_a_program_is_not_begun_where_its_parent_has_ended(tmp_path):
    marker = tmp_path / "begun"
    not_its_parent = os.getppid()
    words = processes.with_parent_death_signal([sys.executable, "-c", f"open({str(marker)!r}, 'w')"])
    words[words.index(str(os.getpid()))] = str(not_its_parent)
    subprocess.run(words, check=False)
    assert not marker.exists()


def test_what_an_earlier_call_left_running_is_ended(tmp_path):
    folder, other = tmp_path / "study", tmp_path / "other"
    words = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]

    def start(run_folder: Path) -> subprocess.Popen:
        return subprocess.Popen(words, env=os.environ | {launch.RUN_FOLDER: str(run_folder)})

    left, bystander = [start(folder / "a"), start(folder / "b")], start(other / "a")
    try:
        launch.end_left_over(folder)
        assert [process.wait(timeout=10) for process in left] == [-signal.SIGKILL] * 2
        assert bystander.poll() is None
    finally:
        for process in [*left, bystander]:
            process.kill()
            process.wait()


def running(folder: Path) -> list[int]:
    """Processes whose command line names a folder."""
    there = ((process.pid, process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"]))
    return [number for number, words in there if any(str(folder) in word for word in words)]


def wait_until(condition) -> None:
    killing.wait(condition, 120, 0.02)
    assert condition()


# ---------------------------------------------------------------- what processes that are started answer

TELL = "import os, sys; from zero_study import processes; "


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(processes.__file__).parents[1]))
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def test_ranks_know_one_another_and_answer():
    code = TELL + "processes.send_result([os.environ[n] for n in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'MASTER_PORT')])"
    first, second = processes.run_ranks(["-c", code], "two ranks", num_ranks=2, timeout_seconds=60)
    assert (first[:3], second[:3]) == (["0", "0", "2"], ["1", "1", "2"])
    assert first[3] == second[3]


def test_one_process_is_alone_unless_it_is_asked_to_be_a_world(tmp_path):
    code = TELL + "processes.send_result([os.environ.get('WORLD_SIZE'), os.environ.get('RANK'), os.getcwd()])"
    assert processes.run_ranks(["-c", code], "one", timeout_seconds=60, folder=tmp_path) == [
        [None, None, str(tmp_path)]
    ]
    world = {**os.environ, "WORLD_SIZE": "1"}
    assert processes.run_ranks(["-c", code], "one", timeout_seconds=60, environment=world)[0][:2] == ["1", "0"]


@pytest.mark.parametrize(
    ("code", "error", "message"),
    [
        ("from zero_study.errors import Refusal; raise Refusal('no text; mend it')", Refusal, "no text; mend it"),
        ("raise KeyError('labels')", RunFailed, "it: KeyError: 'labels'"),
        ("os.kill(os.getpid(), 9)", RunFailed, "it: ended with status -9"),
        ("pass", RunFailed, "it: ended with status 0"),  # and nothing was said
    ],
)
def test_without_an_answer_there_is_one_line_why(code, error, message):
    with pytest.raises(error) as why:
        processes.run_ranks(["-c", TELL + code], "it", timeout_seconds=60)
    assert str(why.value).startswith(message)
    assert "\n" not in str(why.value)


def test_after_its_time_all_that_was_started_is_killed(tmp_path):
    child = (
        f"import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)', '{tmp_path}'])"
    )
    with pytest.raises(RunFailed, match=r"^it: not done after 2 s$"):
        processes.run_ranks(["-c", child], "it", timeout_seconds=2)
    wait_until(lambda: running(tmp_path) == [])


# ---------------------------------------------------------------- real runs that fail

SMALL = {"num_train_examples": 64, "num_eval_examples": 16, "max_steps": 4}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "zero2"])
def test_a_loss_that_is_no_number_stops_the_run(name, tmp_path):
    flags = launching.words({**SMALL, "learning_rate": 1e30, "gradient_clipping": 0, "output_dir": tmp_path / "run"})
    completed = launching.attempt(["zero-study", "train", "--strategy", name, *flags])
    assert completed.returncode == 1
    assert "Traceback" not in completed.stdout + completed.stderr
    assert "failed: step 2: the loss is nan" in completed.stdout
    result = schema.read(tmp_path / "run")
    assert (result.status, result.failure.step, result.steps_done) == ("failed", 2, 2)
    assert result.failure.error == "Failed: step 2: the loss is nan"
    assert result.final_loss is result.final_parameters is None
    assert json.loads((tmp_path / "run" / "steps.jsonl").read_text().splitlines()[1])["loss"] is None


def test_one_rank_out_of_memory_is_the_result_of_the_run(tmp_path):
    flags = launching.words({**SMALL, "learning_rate": 1e-3, "output_dir": tmp_path / "run"})
    words = ["accelerate", "launch", "--config_file", "accelerate_configs/ddp.yaml", "--num_processes", "2"]
    completed = launching.command_line([*words, "--main_process_port", "0", "tests/failing_rank.py", *flags])
    assert completed.returncode == 1
    result = schema.read(tmp_path / "run")
    assert (result.status, result.failure.step) == ("out_of_memory", 2)
    assert "can't allocate memory" in result.failure.error
    assert not list((tmp_path / "run").glob("failure-rank*.json"))
    report = completed.stderr.rpartition("Root Cause (first observed failure):")[2]  # the launcher's own last lines
    assert "traceback : zero-study failed: " in report
    assert "can't allocate memory" in report


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "status", "message"),
    [
        ("SIGKILL", "killed", "rank 1 was ended by SIGKILL"),
        # torchrun waits half a minute for a rank that is stopped
        ("SIGSTOP", "stalled", "rank 1 did not call a collective within 20 s"),
    ],
)
def test_a_rank_that_is_killed_or_stopped_is_named(fault, status, message, tmp_path, monkeypatch):
    """The outcome and the record say the same, and no other rank's loss of its peer."""
    for name, value in launching.environment({"ZS_TEST_FAULT": fault}).items():
        monkeypatch.setenv(name, value)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr(launch, "TRAIN", launching.ROOT / "tests" / "failing_rank.py")
    config = build_config(**SMALL, collective_timeout=20, output_dir=tmp_path / "run")
    ended = launch.launch(make_run(config, read_by_name("ddp"), 2))
    assert (ended.status, ended.message[: len(message)]) == (status, message)
    result = schema.read(tmp_path / "run")
    assert (result.status, result.failure.error.removeprefix("Stalled: ")) == (status, ended.message)
    assert not (tmp_path / "run" / launch.TORCHRUN).exists()
    assert not list((tmp_path / "temporary").glob("torchelastic_*"))  # which torchrun leaves of every launch
    assert 'study/train.py", line' not in (tmp_path / "run" / "stderr.log").read_text()  # no traceback of ours
    assert not list((tmp_path / "run").glob("failure-rank*.json"))
