"""A run that was cut off goes on as if it had not been; a checkpoint that is not whole, or not its own, is named."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import killing
import launching
import psutil
import pytest
import synthetic
from accelerate import Accelerator

from study.config import build_config
from study.records import machine, schema
from study.records.steps import read_steps
from study.run import Run, make_run
from study.running import checks
from study.training import manifest, optimizer_steps
from study.training.checkpoints import Checkpoints
from study.training.manifest import MANIFEST, Manifest
from zero_study import files
from zero_study.errors import OutputFailed, Refusal
from zero_study.strategy.file import find_strategy, read_by_name

# Beyond step 9, where DeepSpeed's Adam on the CPU has other powers of beta if it does not count its steps again.
FLAGS = {**killing.SHORT, "max_steps": 14, "eval_every": 7, "micro_batch_size": 2}
KILLED_AFTER = 11


# ---------------------------------------------------------------- which checkpoint is taken


def a_run(folder: Path, strategy: str = "single", **flags) -> Run:
    return make_run(build_config(**{**FLAGS, **flags}, output_dir=folder), read_by_name(strategy), 1)


def a_checkpoint(run: Run, step: int, content: bytes = b"weights") -> Path:
    """A checkpoint as far as choosing one looks at it."""
    folder = run.checkpoints_folder / f"step-{step:08d}"
    (folder / "engine").mkdir(parents=True)
    (folder / "engine/model").write_bytes(content)
    written = Manifest(
        run_id=run.run_id, step=step, engine="plain", identity=manifest.identity_of(run),
        code_sha256=machine.code_sha256(), files={MODEL: (len(content), files.sha256(folder / MODEL))},
    )  # fmt: skip
    files.write_json(folder / MANIFEST, written.model_dump(mode="json"))
    return folder


def chosen(run: Run) -> str | None:
    checkpoint = manifest.choose(run, Accelerator(cpu=True))
    return checkpoint and checkpoint.folder.name


def link_to_itself(path: Path) -> None:
    """As a disk that fails: it is there and cannot be read."""
    path.unlink()
    path.symlink_to(path.name)


def name_a_file_outside(folder: Path) -> None:
    (folder.parent / "outside").touch()
    synthetic.change(folder / MANIFEST, files={"../outside": [0, hashlib.sha256().hexdigest()]})


MODEL = "engine/model"
# What was done to a checkpoint's folder, and what is said of it; an engine would load a pickle beside the others.
HARMS: list[tuple[Callable[[Path], object], str]] = [
    (
        lambda folder: (folder / MODEL).write_bytes(b"Weights"),
        "is damaged: engine/model was changed",
    ),
    (lambda folder: (folder / MODEL).unlink(), "is damaged: engine/model"),
    (lambda folder: (folder / MANIFEST).unlink(), "has no manifest.json"),
    (lambda folder: os.truncate(folder / MANIFEST, 40), "cannot be read as a checkpoint's manifest"),
    (lambda folder: synthetic.change(folder / MANIFEST, format_version=2), "another version"),
    (lambda folder: (folder / "engine/x.pkl").touch(), "is damaged: engine/x.pkl does not belong to it"),
    (
        lambda folder: (folder / "engine/more").symlink_to(folder.parent),
        "is damaged: engine/more does not belong to it",
    ),
    (lambda folder: link_to_itself(folder / MODEL), "engine/model: cannot be read as what was written"),
    (name_a_file_outside, "is damaged: ../outside was changed"),
    (lambda folder: synthetic.change(folder / MANIFEST, step=3), "its manifest.json belongs to step 3"),
    (lambda folder: synthetic.change(folder / MANIFEST, run_id="one"), "it was written by one"),
]


@pytest.mark.parametrize(("harm", "named"), HARMS, ids=[named for _, named in HARMS])
def test_a_damaged_one_is_named_and_the_one_before_it_taken(harm, named, tmp_path, capsys):
    run = a_run(tmp_path / "run")
    for step in (5, 10):
        a_checkpoint(run, step)
    harm(run.checkpoints_folder / "step-00000010")
    assert chosen(run) == "step-00000005"
    assert f"not used. {run.checkpoints_folder}/step-00000010" in (output := capsys.readouterr().out)
    assert named in output


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"learning_rate": 2e-3}, "its learning_rate is 0.001, but that of this run is 0.002"),
        ({"max_steps": 15}, "its max_steps is 14, but that of this run is 15"),
        ({"strategy": "ddp"}, "its strategy is single, but that of this run is ddp"),
    ],
)
def test_a_foreign_one_is_named_and_not_taken(change, named, tmp_path, capsys):
    a_checkpoint(a_run(tmp_path / "run"), 5)
    assert chosen(a_run(tmp_path / "run", **change)) is None
    assert f"this checkpoint belongs to another run: {named}" in capsys.readouterr().out


def test_one_of_another_content_of_the_file_or_of_other_ranks_is_not_taken(tmp_path, capsys):
    run = a_run(tmp_path / "run")
    a_checkpoint(run, 5)
    changed = replace(run.strategy, content={**run.strategy.content, "same_network": False})
    for key, facts in {"strategy_sha256": {"strategy": changed}, "world_size": {"world_size": 2}}.items():
        assert chosen(replace(run, **facts)) is None
        assert f"this checkpoint belongs to another run: its {key} is " in capsys.readouterr().out


def test_one_of_another_device_is_not_taken_but_may_be_named(tmp_path, monkeypatch, capsys):
    run = a_run(tmp_path / "run")
    here = a_checkpoint(run, 5)
    assert manifest.choose(run, Accelerator(cpu=True)).is_exact
    monkeypatch.setattr(manifest.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(manifest.torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    assert chosen(run) is None
    assert "its device is cpu, but that of this run is NVIDIA H200" in capsys.readouterr().out
    assert not manifest.choose(a_run(tmp_path / "run", resume=str(here)), Accelerator(cpu=True)).is_exact


def test_other_threads_or_another_processor_are_said(tmp_path, monkeypatch, capsys):
    run = a_run(tmp_path / "run")
    here = a_checkpoint(run, 5)
    output = []
    for threads, processor in (
        (machine.running_code().num_threads, machine.cpu_model()),
        (7, machine.cpu_model()),
        (7, "Z80"),
    ):
        written = files.load(here / MANIFEST, "a manifest") | {"num_threads": threads, "processor": processor}
        files.write_json(here / MANIFEST, written)
        assert chosen(run) == here.name
        lines = capsys.readouterr().out.splitlines()
        output.append([what for what in ("processor was Z80", "a process was 7 and is") if what in "".join(lines)])
    assert output == [[], ["a process was 7 and is"], ["processor was Z80", "a process was 7 and is"]]


def test_the_newest_is_taken_and_an_unfinished_one_removed(tmp_path):
    run = a_run(tmp_path / "run")
    assert chosen(run) is None
    for step in (5, 10):
        a_checkpoint(run, step)
    (run.checkpoints_folder / "step-00000015.part").mkdir()
    assert chosen(run) == "step-00000010"
    assert sorted(path.name for path in run.checkpoints_folder.iterdir()) == ["step-00000005", "step-00000010"]


def test_what_was_not_taken_is_set_aside(tmp_path):
    run = a_run(tmp_path / "run")
    for step in (5, 10, 14):
        a_checkpoint(run, step)
    manifest.quarantine(run.checkpoints_folder, resumed_step=5)
    left = sorted(path.name for path in run.checkpoints_folder.iterdir())
    assert left == ["not-taken-step-00000010", "not-taken-step-00000014", "step-00000005"]


def test_a_path_of_the_last_step_is_refused(tmp_path):
    last = a_checkpoint(a_run(tmp_path / "other"), 14)
    with pytest.raises(Refusal, match=r"it is of step 14, but this run ends"):
        chosen(a_run(tmp_path / "run", resume=str(last)))


@pytest.mark.parametrize("linked", [None, "checkpoints", "checkpoints/step-00000005"])
def test_never_begins_anew_and_takes_the_old_ones_away(tmp_path, linked):
    run = a_run(tmp_path / "run", resume="never")
    a_checkpoint(run, 5)
    if linked:  # to another disk
        (run.folder / linked).rename(tmp_path / "elsewhere")
        (run.folder / linked).symlink_to(tmp_path / "elsewhere")
    for name in ("step-00000007", "step-00000010.part"):  # files in their place
        (run.checkpoints_folder / name).touch()
    checks.check_folder(run)
    assert chosen(run) is None
    assert not list(run.checkpoints_folder.iterdir())


def test_a_file_in_the_place_of_checkpoints_is_refused(tmp_path):
    run = a_run(tmp_path / "run", resume="never")
    run.folder.mkdir()
    for put in (Path.touch, lambda path: path.symlink_to(tmp_path / "disk that is not there")):
        put(run.checkpoints_folder)
        with pytest.raises(Refusal, match=rf"{run.checkpoints_folder} is not a folder"):
            checks.check_folder(run)
        run.checkpoints_folder.unlink()


def test_a_path_of_another_engine_is_refused(tmp_path):
    other = a_checkpoint(a_run(tmp_path / "other"), 5)
    with pytest.raises(Refusal, match="the layout plain, but this run needs the layout zero1-2"):
        chosen(a_run(tmp_path / "run", strategy="zero2", resume=str(other)))


def test_one_that_other_code_wrote_is_refused_unless_asked_for(tmp_path, monkeypatch):
    """Neither begun anew nor gone on with in silence; a named one likewise."""
    here = a_checkpoint(a_run(tmp_path / "run"), 5)
    monkeypatch.setattr(machine, "code_sha256", lambda: "other")
    for flags in ({}, {"resume": str(here)}):
        with pytest.raises(Refusal, match=r"another version .* --resume-with-other-code"):
            chosen(a_run(tmp_path / "run", **flags))
        assert chosen(a_run(tmp_path / "run", **flags, resume_with_other_code=True)) == here.name


def test_one_of_other_arithmetic_is_not_gone_on_from(tmp_path, monkeypatch, capsys):
    """The record keeps the variables of the last process alone."""
    monkeypatch.setenv("MKL_ENABLE_INSTRUCTIONS", "SSE4_2")
    a_checkpoint(a_run(tmp_path / "run"), 5)
    assert chosen(a_run(tmp_path / "run")) == "step-00000005"
    monkeypatch.delenv("MKL_ENABLE_INSTRUCTIONS")
    assert chosen(a_run(tmp_path / "run")) is None
    assert "its MKL_ENABLE_INSTRUCTIONS is SSE4_2, but that of this run is None" in capsys.readouterr().out


@pytest.mark.parametrize("status", sorted(schema.CUT_OFF))
@pytest.mark.parametrize("resume", ["auto", "never"])
def test_a_run_that_was_cut_off_is_done_again_and_no_other(status, resume, tmp_path):
    run = a_run(tmp_path / "run", resume=resume)
    run.folder.mkdir()
    for output, is_refused in ((status, False), ("ok", True), ("failed", True), ("out_of_memory", True)):
        (run.folder / "record.json").write_text(json.dumps({"status": output}))
        with pytest.raises(Refusal, match="already contains a ") if is_refused else nullcontext():
            checks.check_folder(run)


def test_a_model_that_is_there_is_refused_before_the_first_step(tmp_path):
    run = a_run(tmp_path / "run", save_model=True)
    checks.check_folder(run)
    run.model_folder.mkdir(parents=True)
    with pytest.raises(Refusal, match=rf"{run.model_folder} already exists. Use another --output-dir"):
        checks.check_folder(run)
    checks.check_folder(a_run(tmp_path / "run"))


def test_a_disk_that_is_full_as_one_is_written_is_named(tmp_path, monkeypatch):
    run = a_run(tmp_path / "run")
    memory = SimpleNamespace(current="steady_steps", begin=lambda phase: None)
    writer = Checkpoints(SimpleNamespace(run=run, memory=memory, checkpoint=None), None)

    def full(self, step):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Checkpoints, "_write", full)
    run.folder.mkdir()
    with pytest.raises(OutputFailed, match=rf"^{re.escape(str(run.folder))}: .*No space left on device"):
        writer.write_where_due(5)


def test_the_warm_up_of_every_process_is_in_no_time():
    """Steps 1, 2, 6 and 7 are a process's first two, and 4 was probed."""
    slow = {1, 2, 4, 6, 7}
    others = {"data_wait_seconds": 0.0, "samples": 8, "tokens": 64}
    steps = [{"step": n, "seconds": 9.0 if n in slow else 2.0, **others} for n in range(1, 11)]
    summary = optimizer_steps.summarize(steps, 2, probed_steps=[4], resumed_at=[5])
    assert (summary.num_steps, summary.upper_quartile_seconds, summary.tokens_per_second) == (5, 2.0, 32.0)


# ---------------------------------------------------------------- real runs, killed


def command(strategy: str, folder: Path, **flags) -> list[str]:
    words = launching.words({**FLAGS, **flags, "output_dir": folder})
    return [sys.executable, "-m", "zero_study", "train", "--strategy", strategy, "--num-processes", "2", *words]


def wait_for(step: int, folder: Path, is_running: Callable[[], bool]) -> None:
    """Wait until this step is in a run's steps."""
    killing.wait(lambda: killing.steps(folder) >= step or not is_running(), launching.TIMEOUT_SECONDS, 0.005)
    assert killing.steps(folder) >= step, f"it ended before step {step}, or was too slow"


def kill_after(step: int, strategy: str, folder: Path, **flags) -> None:
    """Start a run; kill it with everything it started as soon as this step is in its steps."""
    silent = dict.fromkeys(("stdout", "stderr"), subprocess.DEVNULL)
    words = command(strategy, folder, **flags)
    process = subprocess.Popen(words, cwd=launching.ROOT, env=launching.environment(), **silent)
    wait_for(step, folder, lambda: process.poll() is None)
    killing.kill_family(process.pid)
    process.wait()


def fork_and_kill_after(step: int, strategy: str, folder: Path) -> None:
    def kill(launcher: int) -> None:
        wait_for(step, folder, lambda: psutil.pid_exists(launcher))
        killing.kill_family(launcher)

    launching.fork(find_strategy(strategy), 2, FLAGS, folder, meanwhile=kill)


def finish(strategy: str, folder: Path, **flags) -> schema.Record:
    completed = launching.attempt(["zero-study", *command(strategy, folder, **flags)[3:]])
    assert completed.returncode == 0, completed.stderr
    return schema.read(folder)


@pytest.mark.launches
@pytest.mark.parametrize(
    "strategy",
    [
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("ddp", "zero2_cpu_offload", "zero3_nvme_offload")),
        "fsdp2",
    ],
)
def test_a_killed_run_goes_on_bit_by_bit(strategy, tmp_path):
    """DDP's by `zero-study train`, the others' by launchers that are forked."""
    undisturbed = launching.run(strategy, **FLAGS)
    folder = tmp_path / "killed"
    (kill_after if strategy == "ddp" else fork_and_kill_after)(KILLED_AFTER, strategy, folder)
    assert not (folder / "record.json").exists()
    if strategy == "ddp":
        resumed = finish(strategy, folder)
    else:
        launching.fork(find_strategy(strategy), 2, FLAGS, folder)
        resumed = launching.read(folder, 2).record
    assert resumed.resumed_at == [10]
    curves = [[(s["loss"], s["grad_norm"]) for s in steps] for steps in (undisturbed.steps, read_steps(folder))]
    assert curves[0] == curves[1]
    assert resumed.final_parameters == undisturbed.record.final_parameters
    assert resumed.evaluation == undisturbed.record.evaluation
    assert resumed.collectives_per_step == undisturbed.record.collectives_per_step
    assert resumed.model_state_bytes == undisturbed.record.model_state_bytes
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-00000010", "step-00000014"]
    if strategy == "ddp":
        export_and_load(folder, resumed)


@pytest.mark.slow
@pytest.mark.launches
def test_a_model_that_cannot_be_written_loses_no_record(tmp_path):
    """It is in the way since the run began; what is recorded stays, and the model can still be had."""
    folder = tmp_path / "run"
    words = command("single", folder, save_model=True, checkpoint_every=None, max_steps=60)
    words[words.index("--num-processes") + 1] = "1"
    process = subprocess.Popen(
        words, cwd=launching.ROOT, env=launching.environment(), stdout=subprocess.PIPE, text=True
    )
    while not (folder / "steps.jsonl").exists():
        assert process.poll() is None
        time.sleep(0.01)
    (folder / "model").mkdir()
    output = process.communicate(timeout=launching.TIMEOUT_SECONDS)[0]
    assert process.returncode == 1
    assert ", after its record was written" in output
    record = schema.read(folder)
    assert (record.status, record.steps_done) == ("ok", 60)
    assert [code.sha256 for code in record.code] == [machine.code_sha256()]
    completed = launching.attempt(["zero-study", "export", folder, folder / "mine"])
    assert completed.returncode == 0, completed.stderr


def export_and_load(folder: Path, record: schema.Record) -> None:
    """The exported model is the run's: its loss on the held-out examples comes again, and from_pretrained loads it."""
    import transformers

    completed = launching.attempt(["zero-study", "export", folder])
    assert completed.returncode == 0, completed.stderr
    loss = float(completed.stdout.split("held-out examples is ")[1].split(",")[0])
    assert loss == pytest.approx(record.evaluation[-1]["loss"], abs=2e-6)
    model = transformers.BertForSequenceClassification.from_pretrained(folder / "model")
    assert model.num_parameters() == record.num_params
    transformers.AutoTokenizer.from_pretrained(folder / "model")
    shutil.rmtree(folder / "model")


def test_steps_are_in_order_whatever_their_digits(tmp_path):
    for name in ("step-100000000", "step-99999999"):
        (tmp_path / name).mkdir()
    assert [path.name for path in manifest.in_order(tmp_path)] == ["step-99999999", "step-100000000"]


@pytest.mark.launches
def test_checkpoints_of_another_run_neither_push_its_own_out_nor_become_its_model(tmp_path):
    folder = tmp_path / "run"
    for step in (10, 20):
        a_checkpoint(a_run(folder, seed=1), step)
    launching.fork(find_strategy("ddp"), 2, FLAGS | {"max_steps": 4, "checkpoint_every": 2, "save_model": True}, folder)
    record = launching.read(folder, 2).record
    left = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert left == ["not-taken-step-00000010", "not-taken-step-00000020", "step-00000002", "step-00000004"]
    assert (folder / "model/model.safetensors").stat().st_size > 4 * record.num_params
    assert all("checkpoint" in phases for phases in record.peak_memory)
