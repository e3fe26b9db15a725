"""Test how tests share started processes, and that only marked tests start another Python."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import launching
import psutil
import pytest

from zero_study.strategy.file import find_strategy

REFUSED = pytest.fail.Exception


@pytest.fixture(autouse=True)
def _session(tmp_path, monkeypatch):
    """Another session, of a test that may launch."""
    monkeypatch.setattr(launching, "session_folder", tmp_path)
    launching.begin(True)


def test_what_two_want_at_once_is_made_once():
    created = []
    begun = threading.Event()

    def make(folder):
        created.append(folder)
        begun.wait(0.2)
        (folder / "content").write_text("whole")

    with ThreadPoolExecutor(2) as pool:
        contents = [path.read_text() for path in pool.map(lambda _: launching.once("it", make) / "content", range(2))]
    launching.begin(False)  # as this test is
    assert (contents, len(created)) == (["whole"] * 2, 1)


def test_a_mark_is_held_to_what_happens():
    with pytest.raises(REFUSED, match="starts no other Python"):
        launching.end()
    launching.begin(False)
    launching.end()
    with pytest.raises(REFUSED, match=r"mark it with @pytest\.mark\.launches"):
        subprocess.Popen([sys.executable, "-c", ""])
    with pytest.raises(REFUSED, match="has tried"):
        launching.end()
    launching.begin(False)  # as this test is


def test_a_fast_test_builds_no_extension():
    with pytest.raises(REFUSED, match="builds async_io, cpu_adam"):
        launching.run("zero3_nvme_offload")
    launching.begin(False)  # as this test is


# ---------------------------------------------------------------- what is forked

SMALL = {"max_steps": 100_000, "num_train_examples": 16, "num_eval_examples": 8, "measure": False}


def fork(folder, meanwhile=None, **flags):
    return launching.fork(find_strategy("ddp"), 2, {**SMALL, **flags}, folder / "run", meanwhile)


def nothing_is_left() -> bool:
    server = psutil.Process(launching._servers[sys.executable].pid)
    psutil.wait_procs(server.children(recursive=True), timeout=10)
    return not server.children(recursive=True)


@pytest.mark.launches
def test_a_forked_launch_that_is_refused_says_so(tmp_path):
    with pytest.raises(AssertionError, match=r"(?s)exit status 1\n.*zero-study: data_dir .*nowhere does not exist"):
        fork(tmp_path, data="files", data_dir=tmp_path / "nowhere")
    assert not (tmp_path / "run").exists()
    assert nothing_is_left()


@pytest.mark.launches
def test_a_forked_launch_that_does_not_end_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(launching, "TIMEOUT_SECONDS", 2)
    with pytest.raises(AssertionError, match="not done in time"):
        fork(tmp_path)
    assert nothing_is_left()


@pytest.mark.launches
@pytest.mark.parametrize("words", ["--help", "compare nowhere --view parity"])
def test_a_forked_command_says_what_the_command_says(words, tmp_path):
    forked, started = (
        run([*program, *words.split()], cwd=tmp_path)
        for run, program in ((launching.command_line, []), (launching.attempt, ["zero-study"]))
    )
    assert [forked.returncode, forked.stdout, forked.stderr] == [started.returncode, started.stdout, started.stderr]
    assert forked.stdout or forked.stderr


# Each line is one write, so that the lines of two ranks do not mix.
ENDS = """
import atexit, os, sys
atexit.register(print, "at the end\\n", end="")
print(f"{__name__} {sys.argv} {sys.path[0]} {os.getcwd()} {os.environ.get('RANK')}\\n", end="")
sys.exit(3)
"""


@pytest.mark.launches
@pytest.mark.parametrize("words", [["folder/ends.py", "more"], ["-m", "folder.ends", "more"]])
def test_a_forked_python_does_what_python_does(words, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "ends.py").write_text(ENDS)
    forked, started = launching.python(words, tmp_path), launching.attempt(["python", *words], tmp_path)
    assert (forked.returncode, forked.stdout, forked.stderr) == (3, started.stdout, started.stderr)
    assert forked.stdout.endswith("at the end\n")


@pytest.mark.launches
def test_forked_ranks_of_torchrun_end_as_ranks_do(tmp_path):
    (tmp_path / "ends.py").write_text(ENDS.replace("sys.exit(3)", ""))
    completed = launching.torchrun(["ends.py"], tmp_path)
    assert completed.returncode == 0, completed.stderr
    lines = completed.stdout.splitlines()
    assert sorted(line.rpartition(" ")[2] for line in lines if line.startswith("__main__")) == ["0", "1"]
    assert lines.count("at the end") == 2
