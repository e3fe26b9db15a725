"""Test `zero-study check`: what it finds in a project, what the project accepts, and its SARIF and Markdown."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import launching
import pytest
import yaml
from refusing import refusal

from zero_study import check, cli
from zero_study.answers.envelope import Finding
from zero_study.check import settings
from zero_study.check.examine import NOTHING
from zero_study.check.project import is_lock, names_settings

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "docs" / "examples"
PINNED = 'name = "deepspeed"'  # the line of the lock file in the examples


def git(*words: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", *identity, *words], check=True, capture_output=True)


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Return the folder of a project with a faulty configuration file, and a lock file that changed since HEAD."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    Path("configs").mkdir()
    shutil.copy(EXAMPLES / "my_zero3.json", "configs/ds.json")
    shutil.copy(EXAMPLES / "old.lock", "requirements.txt")
    Path("package.json").write_text('{"name": "other", "scripts": {"build": "true"}}')
    Path("other.yaml").write_text("services: [a, b]\n")
    Path(".gitignore").write_text("ignored\n")
    git("init", "-q")
    git("add", "-A")
    git("commit", "-qm", "first")
    shutil.copy(EXAMPLES / "new.lock", "requirements.txt")
    return tmp_path


def ids(report: check.Report, path: str) -> set[str]:
    return {finding.id for finding in report.findings if report.path_of(finding) == path}


def test_a_project_is_checked_at_once(project):
    report = check.examine([])
    assert report.configs == ["configs/ds.json"]
    assert report.locks == ["requirements.txt"]
    assert {"doctor/ignored-key", "doctor/fails-at-start-up"} <= ids(report, "configs/ds.json")
    misspelt = next(finding for finding in report.findings if finding.key == "gradient_cliping")
    assert "gradient_cliping" in Path("configs/ds.json").read_text().splitlines()[misspelt.line - 1]
    assert report.verdict.status == 1
    assert report.deepspeed_release == "deepspeed==0.17.6"


def stage_2() -> None:
    """Write a configuration file of ZeRO-2 in bf16, which several faults of the releases concern."""
    precision = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}, "gradient_clipping": 1.0}
    content = {"train_batch_size": 8, "zero_optimization": {"stage": 2}, "monitor_config": {}, **precision}
    Path("configs/ds.json").write_text(json.dumps(content))


def test_changes_of_releases_are_those_that_a_file_uses(project):
    report = check.examine([])
    assert not {"upgrade/fault-begins", "upgrade/fault-ends"} & ids(report, "requirements.txt")
    assert report.unused_changes > 10
    stage_2()
    report = check.examine([])
    assert {"upgrade/fault-begins", "upgrade/fault-ends"} <= ids(report, "requirements.txt")
    assert ids(check.examine([Path("requirements.txt")]), "requirements.txt") == ids(report, "requirements.txt")
    begins = [finding for finding in report.findings if finding.id == "upgrade/fault-begins"]
    assert all(finding.remedy and finding.name.startswith("deepspeed/") for finding in begins)
    assert {Path("requirements.txt").read_text().splitlines()[finding.line - 1] for finding in begins} == {PINNED}


def test_without_a_file_of_a_training_all_changes_of_releases_count(project):
    Path("configs/ds.json").unlink()
    everything = check.examine([])
    assert {"upgrade/fault-begins", "upgrade/fault-ends"} <= ids(everything, "requirements.txt")
    assert everything.unused_changes == 0
    Path("train.py").write_text("import torch\n")  # and no DeepSpeed
    assert not {"upgrade/fault-begins", "upgrade/fault-ends"} & ids(check.examine([]), "requirements.txt")
    Path("old.py").write_text("import deepspeed\nprint 1\n")  # which is not Python 3
    assert "upgrade/fault-begins" in ids(check.examine([]), "requirements.txt")


FSDP = "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\n"
SFT = "model_name_or_path: m\ndataset_name: d\npacking: true\ngradient_checkpointing: true\n"
DPO = "model_name_or_path: m\ndataset_name: d\nbeta: 0.1\n"
ARGUMENTS = "from transformers import TrainingArguments\nTrainingArguments("
USED = {  # files of a project, the old and the new pin, and the change that concerns it
    "two files": ({"fsdp.yaml": FSDP, "sft.yaml": SFT}, "accelerate 1.14.0 1.15.0", "accelerate/fsdp2-used-twice"),
    "a dict": (
        {"train.py": f"{ARGUMENTS}deepspeed={{'zero_optimization': {{'stage': 2}}}})"},
        "deepspeed 0.17.5 0.18.4", "deepspeed/zero2-bf16-used-twice",
    ),
    "a dict beside a file": (
        {
            "train.py": "import deepspeed\nconfig = {'zero_optimization': {'stage': 2}}",
            "ds.json": '{"zero_optimization": {"stage": 1}}',
        },
        "deepspeed 0.17.5 0.18.4", "deepspeed/zero2-bf16-used-twice",
    ),
    "lightning": (
        {"train.py": "import lightning as L\nL.Trainer(strategy='deepspeed_stage_2')"},
        "deepspeed 0.17.5 0.18.4", "deepspeed/zero2-bf16-used-twice",
    ),
    "a shell script": (
        {"train.py": "import transformers", "run.sh": "python train.py --load_in_4bit"},
        "bitsandbytes 0.46.1 0.47.0", "bitsandbytes/4bit-odd-size",
    ),
    "a notebook": (
        {"a.ipynb": json.dumps({"cells": [{"cell_type": "code", "source": ["from trl import GRPOTrainer\n"]}]})},
        "trl 0.15.2 0.16.0", "trl/grpo-reference",
    ),
    "axolotl": ({"a.yaml": "base_model: m\ndatasets: []\nrl: dpo\n"}, "trl 0.28.0 0.29.0", "trl/dpo-truncate-late"),
    "an optimizer": (
        {"train.py": f"{ARGUMENTS}optim='lion_32bit')"}, "bitsandbytes 0.47.0 0.48.1", "bitsandbytes/lion-decay",
    ),
    "a removed argument": (
        {"train.py": "from trl import SFTConfig\nSFTConfig(max_seq_length=8)"}, "trl 0.15.2 0.24.0",
        "trl/GKDConfig-max_seq_length",
    ),
    "a call": (
        {"train.py": "import os, torch\nmodel = torch.compile(model)"}, "torch 2.9.1 2.10.0",
        "torch/mix-order-reduction",
    ),
}  # fmt: skip
UNUSED = {
    "another compile": (
        {"train.py": "import re, torch\nre.compile('a')"}, "torch 2.9.1 2.10.0", "torch/mix-order-reduction",
    ),
    "a tokenizer": (
        {"train.py": "from transformers import AutoTokenizer\nAutoTokenizer.from_pretrained('m')"},
        "transformers 4.57.6 5.0.0", "transformers/dtype-auto",
    ),
    "a name": (
        {"train.py": "import torch\ndef save_checkpoint(): ...", "fsdp.yaml": FSDP},
        "accelerate 1.14.0 1.15.0", "accelerate/fsdp2-used-twice",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", [*USED, *UNUSED])
def test_what_files_use(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files, pins, fault = {**USED, **UNUSED}[name]
    package, old, new = pins.split()
    for file, text in files.items():
        Path(file).write_text(text)
    Path("requirements.txt").write_text(f"{package}=={old}\n")
    git("init", "-q")
    git("add", "-A")
    git("commit", "-qm", "first")
    Path("requirements.txt").write_text(f"{package}=={new}\n")
    found = {finding.name for finding in check.examine([]).findings if finding.severity in ("error", "warning")}
    assert (fault in found) == (name in USED)


def test_the_line_of_a_finding_is_the_one_that_pins_the_package(project):
    Path("train.py").write_text("import torch\ntorch.compile(model)\n")
    Path("requirements.txt").write_text("torch==2.9.1\n")
    git("commit", "-qam", "second")
    Path("requirements.txt").write_text("accelerate==1.15.0\n    # via\n    #   torch\ntorch==2.10.0\n")
    lines = {finding.line for finding in check.examine([]).findings if finding.name == "torch/mix-order-reduction"}
    assert lines == {4}


def test_lock_files_are_compared_with_the_commit_that_is_named(project):
    stage_2()
    git("commit", "-qam", "second")
    assert not ids(check.examine([]), "requirements.txt")
    assert "upgrade/fault-begins" in ids(check.examine([], since="HEAD~1"), "requirements.txt")
    for unknown in ("no-such-branch", "--output=x"):
        for paths in ([], [Path("configs")]):
            assert f"--since {unknown}" in refusal(check.examine, paths, since=unknown)
    Path("pyproject.toml").write_text('[tool.zero-study]\nsince = "gone"\n')
    assert "gone" in refusal(check.examine, [])
    assert check.examine([Path("configs")]).configs  # no lock file has to be compared


def test_known_faults_of_the_pinned_release_are_looked_up(project):
    Path("configs/ds.json").write_text(json.dumps({"train_batch_size": 8, "zero_optimization": {"stage": 2}}))
    assert "doctor/release-fault" in ids(check.examine([]), "configs/ds.json")
    Path("other.lock").write_text("deepspeed==0.19.8\n")
    report = check.examine([])
    assert report.deepspeed_release is None
    assert {"deepspeed==0.17.6", "deepspeed==0.19.8"} <= {*report.releases}
    assert (len({*report.releases}), report.configs) == (len(report.releases), ["configs/ds.json"])
    assert "doctor/release-fault" in ids(report, "configs/ds.json")
    Path("configs/other.lock").write_text("deepspeed==0.19.8\n")  # the nearest lock file is that of the file
    assert check.examine([]).releases == ["deepspeed==0.19.8"]


def test_a_file_that_another_file_names_is_reported_once(project):
    Path("configs/ds.json").write_text('{"train_batch_size": 8, "comms_config": {"verbose": false}}')
    Path("configs/sft.yaml").write_text(
        "stage: sft\nfinetuning_type: lora\ndataset: d\ntemplate: q\ndeepspeed: configs/ds.json\n"
    )
    keys = [finding.key for finding in check.examine([Path("configs")]).findings if finding.severity != "note"]
    assert keys.count("comms_config") == 1


def test_git_decides_which_files_are_of_the_project(project):
    Path("ignored").mkdir()
    shutil.copy("configs/ds.json", "ignored/ds.json")
    shutil.copy("configs/ds.json", "configs/new.json")
    assert check.examine([]).configs == ["configs/ds.json", "configs/new.json"]
    assert check.examine([Path("ignored/ds.json")]).configs == ["ignored/ds.json"]  # it is named


def test_without_git_installed_packages_are_left_out(project):
    shutil.rmtree(".git")
    for folder in ("node_modules", ".hidden", "environment"):
        Path(folder).mkdir()
        shutil.copy("configs/ds.json", f"{folder}/ds.json")
    Path("environment/pyvenv.cfg").touch()
    report = check.examine([])
    assert report.configs == ["configs/ds.json"]
    assert any("no commit" in each.why for each in report.not_checked)


def test_a_project_without_anything_to_check_is_not_called_sound(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("package.json").write_text("{}")
    assert check.examine([]).verdict.status == 3
    assert check.text(check.examine([])).startswith("Nothing was checked")
    # A file that is named has to be checked.
    report = check.examine([Path("package.json")])
    assert report.verdict.status == 3
    assert "package.json" in check.text(report)
    assert "does not exist" in refusal(check.examine, [Path("missing")])


def test_a_sound_project(project):
    git("commit", "-qam", "second")
    shutil.copy(ROOT / "accelerate_configs" / "zero2.yaml", "configs/zero2.yaml")
    Path("configs/ds.json").unlink()
    Path("requirements.txt").write_text("torch==2.13.0\n")
    git("commit", "-qam", "third")
    assert check.examine([]).verdict.status == 0


def test_a_misspelt_key_alone_makes_the_check_fail(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text('{"train_batch_size": 8, "gradient_cliping": 1.0, "zero_optimization": {"stage": 2}}')
    Path("notes.md").write_text('{"zero_optimization": {"stage": 7},}')  # no configuration file
    report = check.examine([])
    assert {finding.severity for finding in report.findings} - {"note"} == {"warning"}
    assert report.verdict.not_checked == ()
    assert cli.run(["check"]) == 1


BROKEN = {
    "comma.json": b'{"zero_optimization": {"stage": 7},}',
    "comment.json": b'{"zero_optimization": {"stage": 3, // all weights\n}}',
    "utf16.json": '{"train_batch_size": 8}'.encode("utf-16"),
    "tab.yaml": b"compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\n\tfsdp_config:\n",
    "axolotl.yaml": b"base_model: m\nmicro_batch_size: 2\n\tnum_epochs: 1\n",
    "llamafactory.yml": b"stage: sft\nfinetuning_type: lora\ntemplate: [qwen\n",
    "titan.toml": b"[training]\nlocal_batch_size = 8\n[parallelism\n",
    "hydra.yaml": b"defaults: [a]\nlearning_rate: 1e-3\nmax_steps: 10\nseed: 1\n  warmup_steps: 5\n",
    "comment.jsonc": b'{"train_batch_size": 8, // in all\n "fp16": {"enabled": true}}',
    "brace.yaml": b"distributed_type: FSDP\nfsdp_config: {fsdp_version: 3",
    # accelerate's file can be read, and the DeepSpeed file that it names cannot.
    "names.yaml": b"compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\n"
    b"deepspeed_config:\n  deepspeed_config_file: broken.json\n",
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_configuration_file_that_cannot_be_parsed_is_not_passed_over(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "accelerate_configs" / "zero2.yaml", "sound.yaml")
    Path("broken.json").write_text("{")  # of some other program
    assert check.examine([]).verdict.status == 0
    Path(name).write_bytes(BROKEN[name])
    report = check.examine([])
    assert report.verdict.status == 3
    assert name in check.text(report)
    assert report.configs == ["sound.yaml"]
    Path("sound.yaml").unlink()
    assert check.text(check.examine([])).startswith("Nothing was checked.")


@pytest.mark.parametrize("text", ['[\n {"zero_optimization": {}}]', "# notes\n- fsdp_version: 2\n"])
def test_a_list_is_no_configuration_file(text, tmp_path):
    (tmp_path / "list.yaml").write_text(text)
    assert not names_settings(tmp_path / "list.yaml")


def test_links_that_lead_nowhere_and_pipes_hide_no_finding(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copy(EXAMPLES / "my_zero3.json", "ds.json")
    Path("dangling.json").symlink_to("nowhere")
    os.mkfifo("pipe.json")
    assert check.examine([]).verdict.status == 1
    assert "neither a file nor a folder" in refusal(check.examine, [Path("pipe.json")])
    assert not names_settings(Path("dangling.json"))  # nor does a file that nobody may read


@pytest.mark.parametrize("has_git", [True, False])
def test_a_named_lock_file_with_nothing_to_compare_is_not_passed_over(has_git, project):
    Path("requirements-new.txt").write_text("deepspeed==0.19.8\n")
    if not has_git:
        shutil.rmtree(".git")
    for path in (Path("requirements-new.txt"), Path("requirements-new.txt").absolute()):
        report = check.examine([path])
        assert report.verdict.status == 3
        assert not report.locks
        assert any(each.what == str(path) and each.is_requested for each in report.verdict.not_checked)
    assert check.examine([Path(), path]).verdict.status == 1  # the folder has findings


def test_a_lock_file_is_the_same_file_however_it_is_named(project, monkeypatch):
    expected = ids(check.examine([Path("requirements.txt")]), "requirements.txt")
    monkeypatch.chdir("configs")
    Path("link").symlink_to("..")
    for name in ("../requirements.txt", str(project / "requirements.txt"), "link/requirements.txt"):
        report = check.examine([Path(name)])
        assert {finding.id for finding in report.findings} == expected
    monkeypatch.chdir(project)
    twice = check.examine([Path(), Path("requirements.txt").absolute(), Path("requirements.txt")])
    assert ids(twice, "requirements.txt") == expected
    assert twice.locks == ["requirements.txt"]
    monkeypatch.chdir("configs")
    report = check.examine([Path("..")])
    assert (report.locks, ".." in {each.what for each in report.verdict.not_checked}) == (["requirements.txt"], False)


def test_a_named_lock_file_that_cannot_be_read_is_not_passed_over(project):
    git("commit", "-qam", "second")
    Path("configs/ds.json").unlink()
    sound = Path("configs/zero2.yaml")
    shutil.copy(ROOT / "accelerate_configs" / "zero2.yaml", sound)
    Path("requirements.txt").write_text("flask==3.0.0\n")
    assert check.examine([sound]).verdict.status == 0
    report = check.examine([])
    assert (report.locks, report.verdict.status) == ([], 3)  # the commit pins a known package in it
    Path("requirements-dev.txt").write_text("flask==3.0.0\n")
    assert check.examine([Path("requirements-dev.txt")]).verdict.status == 3  # which nobody named counts for nothing
    report = check.examine([sound, Path("requirements.txt")])
    assert report.verdict.status == 3
    assert "requirements.txt" in check.text(report)
    git("checkout", "-q", "requirements.txt")
    sound.unlink()
    assert check.examine([Path("requirements.txt")]).verdict.status == check.examine([]).verdict.status == 0
    conflict("uv.lock")  # which no commit has
    assert check.examine([]).verdict.status == 3
    git("add", "uv.lock")
    git("commit", "-qm", "damaged")
    Path("uv.lock").write_text('version = 1\n[[package]]\nname = "torch"\nversion = "2.8.0"\n')
    assert check.examine([]).verdict.status == 3


def accept(**entries: str) -> None:
    """Write reasons into the settings, by the id of a finding with what it is about."""
    lines = [f"{json.dumps(name)} = {reason}" for name, reason in entries.items()]
    Path("pyproject.toml").write_text("\n".join(["[tool.zero-study.accept]", *lines]) + "\n")


MONITOR = {"doctor/ignored-key: monitor_config": '"Read by our own monitor."'}


def test_a_project_can_accept_findings_with_a_reason(project):
    accept(**MONITOR, **{"doctor/ignored-key: no_such_key": '"Old."'})
    report = check.examine([])
    assert [finding.key for finding, _ in report.accepted] == ["monitor_config"]
    assert "monitor_config" not in {finding.key for finding in report.findings}
    assert [entry.target for entry in report.unused] == ["no_such_key"]
    assert "no_such_key" in check.text(report)


@pytest.mark.parametrize(
    ("name", "is_accepted"),
    [
        ("upgrade/fault-begins", False), ("upgrade/fault-begins: deepspeed", False),
        ("upgrade/fault-begins: deepspeed/*", False), ("upgrade/fault-begins: deepspeed/zero2-accumulation", True),
    ],
)  # fmt: skip
def test_an_error_is_accepted_only_by_its_own_name(project, name, is_accepted):
    stage_2()
    accept(**{name: '"We know."'})
    assert [finding.severity for finding, _ in check.examine([]).accepted] == ["error"] * is_accepted


def test_warnings_of_one_kind_need_one_entry(project):
    stage_2()
    accept(**{"doctor/ignored-key": '"Ours."', "upgrade/fault-ends": '"We compared the losses."'})
    assert {finding.id for finding, _ in check.examine([]).accepted} == {"doctor/ignored-key", "upgrade/fault-ends"}


def test_an_entry_for_one_package_does_not_accept_a_finding_about_two():
    about_two = Finding("upgrade/fault-ends", "warning", "2 faults end", name="transformers, trl")
    entries = settings.Settings(accept={"upgrade/fault-ends: trl": "a", "upgrade/fault-ends: tr*": "b"}).accepted
    assert [entry.covers(about_two, "uv.lock") for entry in entries] == [False, True]
    about_a_key = Finding("doctor/fails-at-start-up", "error", "It fails.", key="a.b")
    (entry,) = settings.Settings(accept={"doctor/fails-at-start-up: one.json a.b": "c"}).accepted
    assert [entry.covers(about_a_key, path) for path in ("one.json", "two.json")] == [True, False]


@pytest.mark.parametrize(("day", "is_accepted"), [("2000-01-01", False), ("2999-12-31", True)])
def test_a_finding_can_be_accepted_until_a_day(project, day, is_accepted):
    accept(**{"doctor/ignored-key: monitor_config": f'{{reason = "Ours.", until = {day}}}'})
    report = check.examine([])
    assert bool(report.accepted) == is_accepted
    assert bool(report.unused) != is_accepted


@pytest.mark.parametrize("reason", ["", " ", f"{settings.PLACEHOLDER}: say why"])
def test_an_accepted_finding_needs_a_reason(project, reason):
    accept(**{"doctor/ignored-key": json.dumps(reason)})
    assert "has no reason" in refusal(check.examine, [])


def test_the_old_form_is_refused_with_the_lines_of_the_new_one(project):
    Path("pyproject.toml").write_text(
        '[[tool.zero-study.accepted]]\nid = "doctor/ignored-key"\npath = "configs/*"\nkey = "monitor_config"\n'
        'reason = "Read by our own monitor."\n'
    )
    message = refusal(check.examine, [])
    Path("pyproject.toml").write_text(f"[tool.zero-study]\n{message.partition('this line: ')[2]}")
    assert [finding.key for finding, _ in check.examine([]).accepted] == ["monitor_config"]


@pytest.mark.parametrize(
    ("line", "message"), [("exclud = []", "unknown key 'exclud'"), ("since = 1", "since=1"), ("since =", "not TOML")]
)
def test_wrong_settings_are_refused(project, line, message):
    Path("pyproject.toml").write_text(f"[tool.zero-study]\n{line}\n")
    assert message in refusal(check.examine, [])


def test_the_printed_baseline_accepts_everything_once_reasons_are_given(project):
    printed = check.baseline(check.examine([]))
    assert "doctor/works-with-a-note" not in printed
    Path("pyproject.toml").write_text(printed)
    assert "has no reason" in refusal(check.examine, [])
    Path("pyproject.toml").write_text(printed.replace(settings.PLACEHOLDER, "Known"))
    report = check.examine([])
    assert report.verdict.status == 0
    assert report.accepted
    assert not report.unused


def test_excluded_files_are_not_checked(project):
    Path("pyproject.toml").write_text('[tool.zero-study]\nexclude = ["configs", "*.txt"]\n')
    report = check.examine([], "HEAD")
    assert not report.configs + report.locks
    assert check.examine([Path("configs/ds.json")]).configs  # it is named
    assert check.examine([Path("configs/ds.json"), Path("requirements.txt")]).locks == ["requirements.txt"]


def test_checkpoints_are_checked_if_they_are_named(project):
    Path("out").mkdir()
    Path("out/optimizer.pt").touch()
    shutil.copy("configs/ds.json", "out")
    Path("out/config.json").write_text('{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}')
    assert not check.examine([]).checkpoints
    report = check.examine([Path("out")])
    assert (report.checkpoints, report.configs) == (["out"], [])  # a file in a checkpoint is none of the project
    assert report.verdict.status == 1
    assert check.examine([Path("out"), Path("out/ds.json")]).checkpoints == ["out"]
    Path("pyproject.toml").write_text('[tool.zero-study]\ncheckpoints = ["out"]\n')
    assert check.examine([]).checkpoints == check.examine([Path("configs"), Path()]).checkpoints == ["out"]
    assert not check.examine([Path("configs")]).checkpoints


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("requirements.txt", True), ("requirements-dev.txt", True), ("constraints.txt", True), ("uv.lock", True),
        ("pylock.toml", True), ("environment.yml", True), ("notes.txt", False), ("config.yaml", False),
    ],
)  # fmt: skip
def test_names_of_lock_files(name, expected):
    assert is_lock(Path(name)) == expected


# ---------------------------------------------------------------- inputs that cannot be checked


def lost(path: str) -> None:
    Path(path).unlink()


def moved(path: str) -> None:
    Path("elsewhere").mkdir()
    Path(path).rename(f"elsewhere/{Path(path).name}")


def conflict(path: str) -> None:
    Path(path).write_text('<<<<<<< HEAD\nversion = 1\n[[package]]\nname = "torch"\nversion = "2.3.0"\n')


@pytest.mark.parametrize("since", [None, "HEAD"])
@pytest.mark.parametrize("damage", [lost, moved, conflict])
def test_a_lock_file_of_the_commit_is_not_passed_over(damage, since, project):
    Path("configs/ds.json").unlink()
    shutil.copy(ROOT / "accelerate_configs" / "ddp.yaml", "configs")
    Path("uv.lock").write_text('version = 1\n[[package]]\nname = "torch"\nversion = "2.8.0"\n')
    git("add", "-A")
    git("commit", "-qm", "second")
    assert check.examine([], since).verdict.status == 0
    damage("uv.lock")
    report = check.examine([], since)
    assert report.verdict.status == 3
    (entry,) = [each for each in report.verdict.not_checked if each.what == "uv.lock"]
    assert (entry.is_requested, "cannot be read" in entry.why) == (True, damage is conflict)
    Path("requirements.txt").unlink()
    assert since is None or check.examine([], since).verdict.status == 3  # even if no lock file is left


@pytest.mark.parametrize(("is_orphan", "since", "status"), [(True, None, 0), (True, "base", 3), (False, "base", 0)])
def test_a_lock_file_without_a_counterpart_counts_if_a_comparison_was_requested(is_orphan, since, status, project):
    Path("configs/ds.json").unlink()
    shutil.copy(ROOT / "accelerate_configs" / "ddp.yaml", "configs")
    git("commit", "-qam", "second")
    git("branch", "base")
    if is_orphan:
        git("checkout", "-q", "--orphan", "new")  # it has no commit yet
    Path("uv.lock").write_text('version = 1\n[[package]]\nname = "torch"\nversion = "2.8.0"\n')
    assert check.examine([], since).verdict.status == status


def accelerate_checkpoint(folder: Path) -> None:
    (folder / "pytorch_model_fsdp_0").mkdir(parents=True)
    (folder / "pytorch_model_fsdp_0" / "__0_0.distcp").write_text("x")
    (folder / "notes").touch()


def random_states(folder: Path) -> None:
    folder.mkdir()
    (folder / "random_states_0.pkl").touch()


def excluded(folder: Path) -> None:
    folder.mkdir()
    shutil.copy(ROOT / "accelerate_configs" / "zero2.yaml", folder / "zero2.yaml")
    Path("pyproject.toml").write_text(f'[tool.zero-study]\nexclude = ["{folder}"]\n')


@pytest.mark.parametrize(
    ("make", "why"),
    [(accelerate_checkpoint, "weights"), (random_states, "kind"), (excluded, settings.FILE), (Path.mkdir, NOTHING)],
)
def test_a_named_folder_is_not_passed_over(make, why, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "accelerate_configs" / "zero2.yaml", "sound.yaml")
    make(Path("named"))
    report = check.examine([Path("sound.yaml"), Path("named")])
    assert report.verdict.status in (1, 3)
    assert "named" in check.text(report)
    assert any(why in str(each) for each in report.verdict.not_checked)


@pytest.mark.parametrize("paths", [[], [Path()], [Path("out")]])
@pytest.mark.parametrize("missing", ["", "torch", "out/final"])
def test_a_listed_checkpoint_is_not_passed_over(paths, missing, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("out/final").mkdir(parents=True)
    Path("out/final/model.safetensors").touch()
    shutil.copy(ROOT / "accelerate_configs" / "zero2.yaml", "out/sound.yaml")
    Path("pyproject.toml").write_text('[tool.zero-study]\ncheckpoints = ["out/final"]\n')
    if missing == "torch":
        monkeypatch.setitem(sys.modules, "zero_study.saved", None)
    elif missing:
        shutil.rmtree(missing)
    report = check.examine(paths)
    assert report.verdict.status == (3 if missing else 1)
    assert "final" in check.text(report)


def test_ranges_of_releases_are_reported_once_and_can_be_accepted(project):
    shutil.rmtree("configs")
    Path("requirements.txt").write_text("torch>=2.4\naccelerate\n")
    git("add", "-A")
    git("commit", "-qm", "second")
    for torch, not_checked in (("torch>=2.5", ["torch", "requirements.txt"]), ("torch>=2.4", ["requirements.txt"])):
        Path("requirements.txt").write_text(f"{torch}\naccelerate\n")
        report = check.examine([])
        assert report.verdict.status == 3
        assert [each.what for each in report.verdict.not_checked] == not_checked
        assert {finding.id for finding in report.findings} == {"check/no-exact-release"}
    accept(**{"check/no-exact-release": '"Users choose their releases."'})
    verdict = check.examine([]).verdict
    assert (verdict.status, len(verdict.checked) > 1) == (0, True)
    Path("requirements.txt").write_text("torch>=2.5\naccelerate\n")
    assert check.examine([]).verdict.status == 3  # a range that changed


INCLUDING = {
    "requirements.txt": "-r {}\n",
    "requirements-dev.txt": "pytest\n--constraint={}  # the same releases\n",
    "environment.yml": "dependencies:\n- python\n- pip:\n  - -r {}\n",
}


@pytest.mark.parametrize("name", INCLUDING)
def test_included_files_of_any_name_are_read_from_the_commit(name, project):
    shutil.rmtree("configs")
    Path("requirements.txt").unlink()
    Path("pinned").mkdir()
    Path(name).write_text(INCLUDING[name].format("pinned/base.txt"))
    Path("pinned/base.txt").write_text("-r ../more.in\n-r base.txt\ntorch==2.13.0\n")
    Path("more.in").write_text("deepspeed==0.19.8\n")
    git("add", "-A")
    git("commit", "-qm", "second")
    assert (check.examine([]).locks, check.examine([]).verdict.status) == ([name], 0)
    Path("more.in").write_text("deepspeed==0.18.0\n")
    assert "upgrade/fault-begins" in ids(check.examine([]), name)


# ---------------------------------------------------------------- outputs


def test_sarif_names_places_and_accepted_findings(project):
    accept(**MONITOR)
    log = check.sarif(check.examine([]))
    (run,) = log["runs"]
    rules = {rule["id"] for rule in run["tool"]["driver"]["rules"]}
    assert {result["ruleId"] for result in run["results"]} == rules
    misspelt = next(result for result in run["results"] if "Write gradient_clipping" in result["message"]["text"])
    place = misspelt["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == "configs/ds.json"
    assert place["region"]["startLine"] == 4
    assert misspelt["level"] == "warning"
    suppressed = [result for result in run["results"] if "suppressions" in result]
    assert [each["suppressions"][0]["justification"] for each in suppressed] == ["Read by our own monitor."]
    prints = [result["partialFingerprints"]["zeroStudy/v1"] for result in run["results"]]
    assert len(set(prints)) == len(prints)


def test_the_command_writes_and_prints_what_it_found(project, capsys):
    words = ["check", "--json", "--sarif", "found.sarif", "--markdown", "found.md"]
    assert cli.run(words) == 1
    answer = json.loads(capsys.readouterr().out)
    assert (answer["schema"], answer["verdict"]) == ("zero-study/check", "found")
    assert answer["lock_files_compared_with"] == "HEAD"
    assert json.loads(Path("found.sarif").read_text())["version"] == "2.1.0"
    assert "| configs/ds.json:4 gradient\\_cliping" in Path("found.md").read_text().replace(
        "gradient_c", "gradient\\_c"
    )
    assert "does not exist" in refusal(cli.run, ["check", "--sarif", "no/folder.sarif"])
    assert "--accept" in refusal(cli.run, ["check", "--accept", "--json"])


def test_a_comment_begins_with_what_a_change_causes_and_has_ten_rows(project):
    stage_2()
    ignored = {f"unknown_{number}": {"a": 1} for number in range(12)}
    Path("configs/old.json").write_text(
        json.dumps({"train_batch_size": 8, "zero_optimization": {"stage": 1}} | ignored)
    )
    shutil.copy(EXAMPLES / "old.lock", "requirements.txt")
    git("add", "-A")
    git("commit", "-qm", "second")
    content = json.loads(Path("configs/ds.json").read_text()) | {"gradient_cliping": 1.0}
    lines = Path("configs/ds.json").read_text().splitlines()
    Path("configs/ds.json").write_text("\n".join([*lines[:-1], json.dumps(content)]))
    shutil.copy(EXAMPLES / "new.lock", "requirements.txt")
    report = check.examine([])
    rows = [line for line in check.markdown(report).splitlines() if line.startswith("| ")][2:]
    assert len(rows) == 10
    places = [row.split()[1].partition(":")[0].replace("\\", "") for row in rows]
    causes = {"requirements.txt", "configs/ds.json"}
    assert {*places[: places.index("configs/old.json")]} == causes
    assert not causes & {*places[places.index("configs/old.json") :]}
    results = check.sarif(report)["runs"][0]["results"]
    assert {result["level"] for result in results} == {"error", "warning"}


# ---------------------------------------------------------------- the action


def steps() -> dict[str, dict[str, str]]:
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    return {step["name"]: step for step in action["runs"]["steps"]}


def run_step(name: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a step of the action in bash as GitHub does, with a stand-in for the installed program."""
    for file in ("output", "summary"):
        (folder / file).touch()
    fixed = {"RUNNER_TEMP": str(folder), "GITHUB_OUTPUT": str(folder / "output")}
    fixed |= {"GITHUB_STEP_SUMMARY": str(folder / "summary")}
    environment = {**os.environ, **fixed, **variables}
    words = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", steps()[name]["run"]]
    return subprocess.run(words, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.launches
def test_the_action_checks_a_project_and_decides(project, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runner")
    program = folder / "zero-study" / "bin" / "zero-study"
    program.parent.mkdir(parents=True)
    launching.use()
    program.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m zero_study "$@"\n')
    program.chmod(0o755)
    shutil.copy(ROOT / "accelerate_configs" / "zero2.yaml", "sound.yaml")
    done = run_step("Check the project", folder, PATHS="sound.yaml\n.\n", SINCE="0" * 40)
    assert done.returncode == 0, done.stderr
    assert (folder / "output").read_text() == "status=1\n"
    assert "gradient_cliping" in (folder / "summary").read_text()
    comments = folder / "gh"
    comments.write_text(f'#!/bin/sh\necho "$@" > {folder}/comment\n')
    comments.chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"
    assert run_step("Comment if a lock file changes what is trained", folder, REQUEST="7", PATH=path).returncode == 0
    assert (folder / "comment").read_text().startswith("pr comment 7 --body-file")


@pytest.mark.parametrize(
    ("fail_on", "failing"), [("found", {"1"}), ("unknown", {"1", "3"}), ("never", set())]
)  # fmt: skip
def test_what_makes_the_action_fail(fail_on, failing, tmp_path):
    statuses = {status: run_step("Decide", tmp_path, STATUS=status, FAIL_ON=fail_on).returncode for status in "013"}
    assert {status for status, code in statuses.items() if code} == failing
    assert all(code in (0, int(status)) for status, code in statuses.items())
