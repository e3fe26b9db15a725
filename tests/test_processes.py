"""What comes of processes that are started: answers, refusals, errors, and an end with whoever started them."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil
import pytest

from study import processes
from study.errors import Refusal, RunFailed

TELL = "import os, sys; from study import processes; "
ROOT = Path(processes.__file__).parents[1]


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("WORLD_SIZE", raising=False)


@pytest.mark.launches
def test_ranks_know_one_another_and_answer():
    code = TELL + "processes.answer([os.environ[n] for n in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'MASTER_PORT')])"
    first, second = processes.ask(["-c", code], "two ranks", num_ranks=2, timeout_seconds=60)
    assert (first[:3], second[:3]) == (["0", "0", "2"], ["1", "1", "2"])
    assert first[3] == second[3]


@pytest.mark.launches
def test_one_process_is_alone_unless_it_is_asked_to_be_a_world(tmp_path):
    code = TELL + "processes.answer([os.environ.get('WORLD_SIZE'), os.environ.get('RANK'), os.getcwd()])"
    assert processes.ask(["-c", code], "one", timeout_seconds=60, folder=tmp_path) == [[None, None, str(tmp_path)]]
    world = {**os.environ, "WORLD_SIZE": "1"}
    assert processes.ask(["-c", code], "one", timeout_seconds=60, environment=world)[0][:2] == ["1", "0"]


@pytest.mark.launches
@pytest.mark.parametrize(
    ("code", "error", "message"),
    [
        (
            "from study.errors import Refusal; raise Refusal('no text; pass --data-dir')",
            Refusal,
            "no text; pass --data-",
        ),
        ("raise KeyError('labels')", RunFailed, "it: KeyError: 'labels'"),
        ("sys.exit(3)", RunFailed, "it: ended with status 3"),
        ("os.kill(os.getpid(), 9)", RunFailed, "it: ended with status -9"),
        ("pass", RunFailed, "it: ended with status 0"),  # and nothing was said
    ],
)
def test_without_an_answer_there_is_one_line_why(code, error, message):
    with pytest.raises(error) as why:
        processes.ask(["-c", TELL + code], "it", timeout_seconds=60)
    assert str(why.value).startswith(message)
    assert "\n" not in str(why.value)


@pytest.mark.launches
def test_after_its_time_all_that_was_started_is_killed(tmp_path):
    child = (
        f"import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)', '{tmp_path}'])"
    )
    with pytest.raises(RunFailed, match=r"^it: not done after 2 s$"):
        processes.ask(["-c", child], "it", timeout_seconds=2)
    deadline = time.monotonic() + 10
    while any(
        str(tmp_path) in word for process in psutil.process_iter(["cmdline"]) for word in process.info["cmdline"] or ()
    ):
        assert time.monotonic() < deadline
        time.sleep(0.1)
