"""Bad input: one error that says what, where and what to do; exit status 2; nothing started and nothing left behind."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import killing
import psutil
import pytest
import torch
from launching import ROOT, attempt, command_line, environment, words

from study.config import build_config
from study.records import schema
from study.records.steps import read_steps
from study.run import make_run
from study.running import studies
from study.running.checks import check
from zero_study import __main__, cli, files, terminal
from zero_study.errors import Refusal
from zero_study.strategy.file import CONFIGS, read_by_name

SMALL = {"num_train_examples": 64, "num_eval_examples": 16}


@pytest.fixture
def folder(tmp_path):
    """The current directory of an attempt: it holds the accelerate files, and nothing else may appear in it."""
    shutil.copytree(CONFIGS, tmp_path / "cwd" / CONFIGS.name)
    return tmp_path / "cwd"


def contents(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


def refusal(folder: Path, *arguments: str | Path, env: dict[str, str] | None = None) -> str:
    """Return the error with which `zero-study train` refuses these arguments."""
    before = contents(folder)
    completed = command_line(["train", *arguments], cwd=folder, env=env)
    assert completed.returncode == 2, completed.stderr
    assert all(line.startswith("  ") for line in completed.stdout.splitlines())  # the progress of a launch
    assert contents(folder) == before
    return only_error(completed.stderr)


def only_error(stderr: str) -> str:
    """Return the one error that a command has printed, which is wrapped to the width of the terminal."""
    first, *others = stderr.splitlines()
    assert first.startswith("zero-study: "), stderr
    assert all(line.startswith("  ") for line in others), stderr
    return terminal.last_error(stderr).removeprefix("zero-study: ")


# ---------------------------------------------------------------- flags


@pytest.mark.launches
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--strategy zero9", "strategy 'zero9' is unknown. Did you mean zero"),
        ("--strategy nowhere.yaml", "strategy 'nowhere.yaml' is unknown. Name a file or one of single, ddp, ddp_tuned"),
        ("--learning-rat 1", "no such option '--learning-rat'. Did you mean --learning-rate? `zero-study train"),
        ("--stage 3", "no such option '--stage'. Did you mean --strategy or "),
        ("--max-steps many", "max_steps='many': input should be a valid integer"),
        ("--strategy single --num-processes 2", "distributed_type NO runs one process, but 2 are requested. Use"),
        ("--num-train-examples 1601", "num_train_examples 1601 is more than the 1600 reviews"),
    ],
)
def test_flags(folder, arguments, expected):
    assert expected in refusal(folder, *arguments.split())


@pytest.mark.launches
def test_subcommands(folder):
    for arguments, expected in (
        ("trian", "no such command 'trian'. Did you mean train"),
        ("run", "STUDY is missing. `zero-study run --help` lists"),
        ("run smok", "study 'smok' is unknown. Did you mean smoke?"),
        ("run smoke --timeout", "option '--timeout' requires an argument. `zero-study run --help` lists"),
        ("run smoke twice", "got unexpected extra argument (twice). `zero-study run --help` lists"),
        ("compare runs --view losse", "--view: 'losse' is not one of 'short', 'differences', "),
        ("run smoke --timeout 1.5", "--timeout 1.5: must be a whole number of at least 1"),
    ):
        completed = command_line(arguments.split(), cwd=folder)
        assert (completed.returncode, completed.stdout) == (2, "")
        assert only_error(completed.stderr).startswith(expected)
        assert not (folder / "runs").exists()


@pytest.mark.parametrize("command", ["predict", "report"])
def test_everything_of_the_project_is_made_only_in_its_clone(command, monkeypatch, tmp_path):
    """`predict` wrote thirty files, and `report` executed nineteen notebooks."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Refusal, match="smoke"):  # a study that can be named
        cli.run([command])
    assert not contents(tmp_path)
    monkeypatch.chdir(ROOT)
    studies.require_name(None)


# ---------------------------------------------------------------- the machine


def test_more_processes_than_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(
        Refusal, match=r"2 processes, but only 1 GPU is found\. Use --num_processes 1, or --share-device\.$"
    ):
        check(make_run(build_config(), read_by_name("zero2"), 2))
    check(make_run(build_config(share_device=True), read_by_name("zero2"), 2))


# ---------------------------------------------------------------- started by hand


@pytest.mark.launches
def test_without_a_launcher(folder):
    completed = attempt(["python", ROOT / "study" / "train.py"], cwd=folder)
    assert completed.returncode == 2
    (line,) = completed.stderr.splitlines()
    assert line.startswith(
        "zero-study: the launch command names no accelerate file. Start the training as `accelerate launch "
    )
    assert not (folder / "runs").exists()


@pytest.mark.launches
@pytest.mark.parametrize(
    ("flag", "variables", "arguments", "expected"),
    [
        ("", {}, "--global-batch-size 7", "global_batch_size=7 cannot be divided equally among 2 processes. Change"),
        ("", {}, "--learning-rat 1", "no such option '--learning-rat'. Did you mean --learning-rate? `study/train.py"),
        ("--zero_stage 2", {}, "", "accelerate launch --zero_stage is not accepted: only the strategy's file"),
        ("", {"ACCELERATE_USE_CPU": "true"}, "", "ACCELERATE_USE_CPU is set in the environment: accelerate"),
    ],
)
def test_under_accelerate_launch(folder, flag, variables, arguments, expected):
    """Accelerate turns its children's status 2 into a traceback of its own and status 1; our line is among it, once."""
    before = contents(folder)
    launcher = ["accelerate", "launch", *flag.split(), "--config_file", "accelerate_configs/zero2.yaml"]
    launcher += ["--num_processes", "2", "--main_process_port", "0"]
    words = [*launcher, ROOT / "study" / "train.py", *arguments.split()]
    completed = command_line(words, cwd=folder, env=variables)
    assert completed.returncode == 1
    ours = [line for line in completed.stderr.splitlines() if line.startswith("zero-study: ")]
    assert len(ours) == 1, completed.stderr
    assert expected in ours[0]
    # The launcher's report names the cause, after its own traceback.
    report = completed.stderr.rpartition("Root Cause (first observed failure):")[2]
    assert expected in report.partition("traceback : ")[2]
    assert contents(folder) == before


# ---------------------------------------------------------------- runs that do not end well


@pytest.mark.slow
@pytest.mark.launches
def test_interrupt(folder):
    """SIGTERM to the front door ends every process of the run, which says in its record that it was interrupted."""
    run_dir = folder / "run"
    flags = words({**SMALL, "max_steps": 100_000, "measure": False, "output_dir": run_dir})
    command = [sys.executable, "-m", "zero_study", "train", "--strategy", "ddp", *flags]
    with subprocess.Popen(
        command, cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as front_door:
        try:
            killing.wait(lambda: killing.steps(run_dir) >= 2 or front_door.poll() is not None, 120, 0.2)
            assert (front_door.poll(), killing.steps(run_dir) >= 2) == (None, True)
            processes = [front_door, *psutil.Process(front_door.pid).children(recursive=True)]
            assert len(processes) >= 4  # this one, the launcher and two ranks
            front_door.send_signal(signal.SIGTERM)
            _, stderr = front_door.communicate(timeout=60)
        finally:
            front_door.kill()
    assert front_door.returncode == 130
    assert stderr.splitlines() == ["zero-study: interrupted; finished runs are kept"]
    _, alive = psutil.wait_procs(processes[1:], timeout=10)
    assert alive == []
    assert not list(run_dir.glob("*.part"))
    found = schema.read(run_dir)
    assert found.status == "interrupted"
    assert found.failure.error.startswith("Interrupted: interrupted by SIGTERM")
    assert found.steps_done == len(read_steps(run_dir)) >= 2
    assert found.steps_sha256 == files.sha256(run_dir / "steps.jsonl")


@pytest.mark.parametrize(
    ("command", "said"), [("run", "interrupted; finished runs are kept"), ("advise", "interrupted")]
)
def test_what_an_interrupt_keeps(command, said, monkeypatch, capsys):
    def interrupted(_words: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "run", interrupted)
    monkeypatch.setattr(sys, "argv", ["zero-study", command])
    with pytest.raises(SystemExit, match="130"):
        __main__.main()
    assert capsys.readouterr().err == f"zero-study: {said}\n"


# ---------------------------------------------------------------- a reader that stops early


def output_without_reader(arguments: list[str], folder: Path, unbuffered: str = "") -> tuple[int, bytes]:
    """Return the exit status and the errors of a command whose standard output nobody reads."""
    with subprocess.Popen(
        [sys.executable, "-m", "zero_study", *arguments],
        cwd=folder,
        env=environment({"PYTHONUNBUFFERED": unbuffered}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        process.stdout.close()
        errors = process.stderr.read()
    return process.returncode, errors


@pytest.mark.launches
@pytest.mark.parametrize("unbuffered", ["1", ""])
def test_a_reader_that_stops_early_gets_no_traceback(tmp_path, unbuffered):
    """`zero-study upgrade OLD NEW | head -0`: the first write fails; of a short text in a buffer, the last flush."""
    for name, version in (("old.txt", "1.15.0"), ("new.txt", "1.16.0")):
        (tmp_path / name).write_text(f"trl=={version}\n")
    status = output_without_reader(["upgrade", "old.txt", "new.txt"], tmp_path, unbuffered)
    assert status == (141, b"")  # not that of a finding


@pytest.mark.launches
@pytest.mark.parametrize("question", ["--gpu l4 --gpus 2", "--gpu l4", ""], ids=["machine", "number", "machines"])
def test_a_file_is_written_although_the_reader_stops_early(tmp_path, question):
    asked = ["advise", "--model", "gpt2", *question.split(), "--write"]
    assert cli.run([*asked, str(tmp_path / "read.yaml")]) == 0
    status, errors = output_without_reader([*asked, "unread.yaml"], tmp_path, "1")
    assert (status, b"Traceback" in errors) == (141, False)
    assert files.read_yaml(tmp_path / "unread.yaml", CONFIGS) == files.read_yaml(tmp_path / "read.yaml", CONFIGS)
