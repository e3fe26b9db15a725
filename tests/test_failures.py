"""A run of two processes that fails leaves a record that says how, whichever rank failed."""

from __future__ import annotations

import json

import launching
import pytest

from study.config import build_config
from study.records import schema
from study.run import make_run
from study.running import launch
from study.strategy.file import read_by_name

pytestmark = pytest.mark.launches

SMALL = {"num_train_examples": 64, "num_eval_examples": 16, "max_steps": 4}


@pytest.mark.parametrize("name", ["ddp", pytest.param("zero2", marks=pytest.mark.slow)])
def test_a_loss_that_is_no_number_stops_the_run(name, tmp_path):
    flags = launching.words({**SMALL, "learning_rate": 1e30, "gradient_clipping": 0, "output_dir": tmp_path / "run"})
    done = launching.attempt(["zero-study", "train", "--strategy", name, *flags])
    assert done.returncode == 1
    assert "Traceback" not in done.stdout + done.stderr
    assert "failed: step 2: the loss is nan" in done.stdout
    found = schema.read(tmp_path / "run")
    assert (found.status, found.failure.step, found.steps_done) == ("failed", 2, 2)
    assert found.failure.error == "Failed: step 2: the loss is nan"
    assert found.final_loss is found.final_parameters is None
    assert json.loads((tmp_path / "run" / "steps.jsonl").read_text().splitlines()[1])["loss"] is None


def test_one_rank_out_of_memory_is_the_result_of_the_run(tmp_path):
    flags = launching.words({**SMALL, "learning_rate": 1e-3, "output_dir": tmp_path / "run"})
    config = launching.ROOT / "accelerate_configs" / "ddp.yaml"
    program = launching.ROOT / "tests" / "failing_rank.py"
    launch = ["accelerate", "launch", "--config_file", config, "--main_process_port", "0", program]
    done = launching.attempt([*launch, *flags])
    assert done.returncode == 1
    found = schema.read(tmp_path / "run")
    assert (found.status, found.failure.step) == ("out_of_memory", 2)
    assert "can't allocate memory" in found.failure.error
    assert not list((tmp_path / "run").glob("failure-rank*.json"))
    report = done.stderr.rpartition("Root Cause (first observed failure):")[2]  # the launcher's own last lines
    assert "traceback : zero-study failed: " in report
    assert "can't allocate memory" in report


@pytest.mark.parametrize(
    ("fault", "status", "message"),
    [
        ("SIGKILL", "killed", "rank 1 was ended by SIGKILL"),
        # torchrun waits half a minute for a rank that is stopped
        pytest.param("SIGSTOP", "stalled", "rank 1 did not come to a collective within 20 s", marks=pytest.mark.slow),
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
    found = schema.read(tmp_path / "run")
    assert (found.status, found.failure.error.removeprefix("Stalled: ")) == (status, ended.message)
    assert not (tmp_path / "run" / launch.TORCHRUN).exists()
    assert not list((tmp_path / "temporary").glob("torchelastic_*"))  # which torchrun leaves of every launch
    assert 'study/train.py", line' not in (tmp_path / "run" / "stderr.log").read_text()  # no traceback of ours
    assert not list((tmp_path / "run").glob("failure-rank*.json"))
