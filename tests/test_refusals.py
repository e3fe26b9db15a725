"""Bad input: one line that says what, where and what to do; exit status 2; nothing started and nothing left behind."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import psutil
import pytest
import torch
from launching import ROOT, attempt, command_line, environment, words

from study import __main__, cli, files
from study.config import build_config
from study.errors import Refusal
from study.records import schema
from study.run import make_run
from study.running.checks import check
from study.strategy.file import CONFIGS, read_by_name

SMALL = {"num_train_examples": 64, "num_eval_examples": 16}


@pytest.fixture
def folder(tmp_path):
    """The current directory of an attempt: it holds the accelerate files, and nothing else may appear in it."""
    shutil.copytree(CONFIGS, tmp_path / "cwd" / CONFIGS.name)
    return tmp_path / "cwd"


def contents(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


def refusal(folder: Path, *arguments: str | Path, env: dict[str, str] | None = None, is_launched: bool = False) -> str:
    """Return the line with which `zero-study train` refuses these arguments; forked, where it is not to be launched."""
    before = contents(folder)
    done = (
        attempt(["zero-study", "train", *arguments], cwd=folder, env=env)
        if is_launched
        else command_line(["train", *arguments], cwd=folder, env=env)
    )
    assert done.returncode == 2, done.stderr
    assert all(line.startswith("  ") for line in done.stdout.splitlines())  # the progress of a launch
    assert contents(folder) == before
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("zero-study: ")
    return lines[0].removeprefix("zero-study: ")


def edited(folder: Path, name: str, old: str, new: str) -> Path:
    """Change one of the copied files, and return its path as the user would write it."""
    path = folder / CONFIGS.name / name
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))
    return path.relative_to(folder)


# ---------------------------------------------------------------- flags


@pytest.mark.launches
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--strategy zero9", "strategy 'zero9' is unknown; did you mean zero"),
        ("--strategy none", "strategy 'none' is unknown; name a file or one of single, ddp, ddp_tuned, zero0"),
        ("--strategy nowhere.yaml", "strategy 'nowhere.yaml' is unknown"),
        ("--workload bert-squad", "workload='bert-squad': input should be 'bert-imdb' or 'gpt-wikitext'; change"),
        ("--size huge", "size 'huge' is not one of bert-imdb's: tiny, "),
        ("--preset huge", "preset 'huge' is unknown; --preset takes smoke, paper"),
        ("--learning-rat 1", "no such option '--learning-rat'; did you mean --learning-rate? `zero-study train"),
        ("--stage 3", "no such option '--stage'; did you mean --strategy or "),
        ("--max-steps many", "max_steps='many': input should be a valid integer"),
        ("--gradient-clipping nan", "gradient_clipping='nan': input should be a finite number; change"),
        ("--num-processes 0", "--num-processes 0: must be a whole number of at least 1"),
        ("--timeout soon", "--timeout soon: must be a whole number of at least 1"),
        ("--strategy zero2 --global-batch-size 7", "global_batch_size=7 does not divide over 2 processes; change"),
        ("--strategy zero2 --micro-batch-size 3", "global_batch_size=8 is not a multiple of micro_batch_size=3 x"),
        ("--sequence-length 513", "sequence_length 513 is longer than the 512 positions of bert-imdb tiny; lower"),
        ("--strategy single --num-processes 2", "distributed_type NO runs one process, the run asks for 2; take"),
        ("--data files", "--data files and --data-dir FOLDER belong together; give both or neither"),
        ("--num-train-examples 1601", "num_train_examples 1601 is more than the 1600 reviews"),
    ],
)
def test_flags(folder, arguments, expected):
    assert expected in refusal(folder, *arguments.split())


@pytest.mark.launches
def test_subcommands(folder):
    for arguments, expected in (
        ("trian", "no such command 'trian'; did you mean train"),
        ("run", "STUDY is missing; `zero-study run --help` lists"),
        ("run smok", "study 'smok' is unknown; did you mean smoke?"),
        ("run twelve", "study 'twelve' is unknown; name a YAML file or one of "),
        ("run smoke --onl ddp", "no such option '--onl'; did you mean --only? "),
        ("run smoke --timeout", "option '--timeout' requires an argument; `zero-study run --help` lists"),
        ("run smoke twice", "got unexpected extra argument (twice); `zero-study run --help` lists"),
        ("compare runs --view losse", "--view: 'losse' is not one of 'short', 'differences', "),
        ("advise", "--gpu is missing; `zero-study advise --help` lists"),
        ("run smoke --timeout 1.5", "--timeout 1.5: must be a whole number of at least 1"),
    ):
        done = command_line(arguments.split(), cwd=folder)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith(f"zero-study: {expected}")
        assert done.stderr.count("\n") == 1, done.stderr
        assert not (folder / "runs").exists()


# ---------------------------------------------------------------- accelerate files


@pytest.mark.launches
@pytest.mark.parametrize(
    ("name", "old", "new", "expected"),
    [
        ("zero3.yaml", "zero_stage: 3", "zero_stag: 3", "unknown key 'deepspeed_config.zero_stag'"),
        ("zero3.yaml", "num_processes: 2", "num_proceses: 2", "unknown key 'num_proceses'"),
        ("zero3.yaml", "zero_stage: 3", "zero_stage: 4", "deepspeed_config.zero_stage: 4: there are stages 0 to 3"),
        ("zero3.yaml", "zero_stage: 3", "zero_stage: [", "cannot be read as YAML"),
        (
            "zero3_tuned.yaml",
            "zero3_tuned.json",
            "zero4_tuned.json",
            "deepspeed_config_file accelerate_configs/zero4_tuned",
        ),
    ],
)
def test_yaml_files(folder, name, old, new, expected):
    path = edited(folder, name, old, new)
    line = refusal(folder, "--strategy", path)
    assert line.startswith(f"{path}: ")
    assert expected in line


@pytest.mark.launches
@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ('"gradient_clipping"', '"gradient_cliping"', "unknown key 'gradient_cliping'; write gradient_clipping"),
        ('"stage3_max_reuse_distance"', '"stage3_max_reuse"', "unknown key 'zero_optimization.stage3_max_reuse'; "),
        ('"stage": 3', '"stage": "3"', "zero_optimization.stage: 3: DeepSpeed reads the number"),
        ('"stage": 3,', '"stage": 3', "cannot be read as JSON"),
    ],
)
def test_json_files(folder, old, new, expected):
    path = edited(folder, "zero3_tuned.json", old, new)
    line = refusal(folder, "--strategy", path.with_suffix(".yaml"))
    assert line.startswith(f"{path}: ")
    assert expected in line


# ---------------------------------------------------------------- data


@pytest.mark.launches
def test_missing_data_folder(folder):
    line = refusal(folder, "--data", "files", "--data-dir", "nowhere")
    assert line.startswith("data_dir nowhere does not exist; give --data-dir a folder with imdb/train.parquet")


@pytest.mark.slow
@pytest.mark.launches
def test_no_network(folder):
    """The one refusal that needs a launch: the run itself asks the hub. The launch leaves nothing either."""
    env = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(folder / "hub"), "HF_HUB_OFFLINE": None}
    line = refusal(folder, *words({**SMALL, "data": "hub"}), env=env, is_launched=True)
    assert line.startswith("cannot reach the hub for ")
    assert line.endswith("; use --data files --data-dir FOLDER or --data bundled")


# ---------------------------------------------------------------- the machine


def test_more_processes_than_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(
        Refusal, match=r"^the run asks for 2 processes, 1 GPU is found; pass --num_processes 1, or --share-device$"
    ):
        check(make_run(build_config(), read_by_name("zero2"), 2))
    check(make_run(build_config(share_device=True), read_by_name("zero2"), 2))


@pytest.fixture
def bare_machine(tmp_path):
    """An environment without a compiler, where nothing has been compiled; ninja is there, as pip put it."""
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "ninja").symlink_to(Path(sysconfig.get_path("scripts")) / "ninja")
    return {"PATH": str(tools), "CXX": None, "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")}


@pytest.mark.launches
@pytest.mark.parametrize("strategy", ["zero1_cpu_offload", "accelerate_configs/zero3_nvme_offload.yaml"])
def test_no_compiler(folder, strategy, bare_machine):
    line = refusal(folder, "--strategy", strategy, env=bare_machine)
    assert line.startswith("no C++ compiler: c++ is not on PATH, and DeepSpeed's ")
    assert "apt-get install g++" in line


# ---------------------------------------------------------------- the output folder


@pytest.mark.launches
def test_output_folder_of_a_finished_run(folder):
    finished = folder / "runs" / "bert-imdb-tiny-single-1x-seed0"
    finished.mkdir(parents=True)
    (finished / "record.json").write_text("{}")
    expected = (
        "runs/bert-imdb-tiny-single-1x-seed0 already holds a finished run; pass another --output-dir, or delete it"
    )
    assert refusal(folder) == expected


# ---------------------------------------------------------------- started by hand


@pytest.mark.launches
def test_without_a_launcher(folder):
    done = attempt(["python", ROOT / "study" / "train.py"], cwd=folder)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "zero-study: no accelerate file: start it as `accelerate launch --config_file accelerate_configs/zero3.yaml "
        "study/train.py`, or as `zero-study train --strategy zero3`"
    ]
    assert not (folder / "runs").exists()


@pytest.mark.launches
@pytest.mark.parametrize(
    ("edit", "arguments", "expected"),
    [
        (None, "--global-batch-size 7", "global_batch_size=7 does not divide over 2 processes; change"),
        (
            ("zero_stage: 2", "zero_stag: 2"),
            "",
            "accelerate_configs/zero2.yaml: unknown key 'deepspeed_config.zero_stag'",
        ),
        (
            None,
            "--learning-rat 1",
            "no such option '--learning-rat'; did you mean --learning-rate? `study/train.py --help`",
        ),
    ],
    ids=["batch", "typo", "flag"],
)
def test_under_accelerate_launch(folder, edit, arguments, expected):
    """Accelerate turns its children's status 2 into a traceback of its own and status 1; our line is among it, once."""
    if edit:
        edited(folder, "zero2.yaml", *edit)
    before = contents(folder)
    launcher = ["accelerate", "launch", "--config_file", "accelerate_configs/zero2.yaml", "--main_process_port", "0"]
    done = attempt([*launcher, ROOT / "study" / "train.py", *arguments.split()], cwd=folder)
    assert done.returncode == 1
    ours = [line for line in done.stderr.splitlines() if line.startswith("zero-study: ")]
    assert len(ours) == 1, done.stderr
    assert expected in ours[0]
    # The launcher's report names the cause, after its own traceback.
    report = done.stderr.rpartition("Root Cause (first observed failure):")[2]
    assert expected in report.partition("traceback : ")[2]
    assert contents(folder) == before


# ---------------------------------------------------------------- runs that do not end well


@pytest.mark.launches
def test_loss_that_is_no_number(folder):
    """Such a run did start, so it leaves a record: failed, at which step, and why."""
    done = attempt(
        ["zero-study", "train", *words({**SMALL, "max_steps": 8, "learning_rate": 1e30, "gradient_clipping": 0})],
        cwd=folder,
    )
    assert done.returncode == 1
    assert done.stderr == ""
    said = [line for line in done.stdout.splitlines() if not line.startswith("  ")]  # progress is indented
    path = Path("runs/bert-imdb-tiny-single-1x-seed0/record.json")
    assert said == [f"failed: step 2: the loss is nan ({path})"]
    found = schema.read(folder / path)
    assert found.status == "failed"
    assert found.failure.step == 2
    assert found.failure.error == "Failed: step 2: the loss is nan"
    assert found.final_loss is None
    assert found.final_parameters is None
    assert [step["loss"] is None for step in schema.read_steps((folder / path).parent)] == [False, True]


@pytest.mark.launches
def test_interrupt(folder):
    """SIGTERM to the front door ends every process of the run, which says in its record that it was interrupted."""
    run_dir = folder / "run"
    flags = words({**SMALL, "max_steps": 100_000, "measure": False, "output_dir": run_dir})
    command = [sys.executable, "-m", "study", "train", "--strategy", "ddp", *flags]
    with subprocess.Popen(
        command, cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as front_door:
        try:
            deadline = time.monotonic() + 120
            while not _has_lines(run_dir / "steps.jsonl", 2):
                assert front_door.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.2)
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
    assert found.steps_done == len(schema.read_steps(run_dir)) >= 2
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


def _has_lines(path: Path, number: int) -> bool:
    return path.exists() and path.read_text().count("\n") >= number


# ---------------------------------------------------------------- records
