"""What a run leaves behind: written whole or not at all, and read strictly."""

from __future__ import annotations

import json
import os

import pytest
import synthetic
from pydantic import ValidationError
from refusing import refusal

from study import files, train
from study.config import build_config
from study.errors import Interrupted
from study.records import schema
from study.records.schema import Checksum, Failure, Record
from study.run import Run
from study.strategy.file import read_by_name
from study.training import journal as journals

LEAST = {
    "run_id": "a", "status": "failed", "started_at": "2026-11-20T00:00:00+00:00", "wall_seconds": 1.5,
    "command": ["accelerate", "launch"], "workload": "bert-imdb", "size": "tiny", "strategy": "zero2", "world_size": 2,
    "seed": 0, "init": "scratch", "machine": {},
    "config": {"workload": "bert-imdb", "size": "tiny", "seed": 0, "global_batch_size": 8, "sequence_length": 64},
}  # fmt: skip


def test_what_is_written_is_read(tmp_path):
    written = Record(
        **LEAST,
        failure=Failure(step=3, error="Failed: step 3: the loss is nan"),
        initial_parameters=Checksum(absolute_sum=0.1 + 0.2, square_sum=1e300, sha256="0" * 64),
    )
    path = schema.write(tmp_path, written)
    assert schema.read(path) == schema.read(tmp_path) == written
    assert [path.name for path in tmp_path.iterdir()] == ["record.json"]
    assert json.loads(path.read_text())["final_loss"] is None  # unknown is null
    each = dict.fromkeys(schema.STEP_KEYS, 1.0)
    lines = [{**each, "step": 1, "loss": 0.5}, {**each, "step": 2, "loss": None}]
    (tmp_path / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert schema.read_steps(tmp_path) == lines


def test_a_write_that_is_cut_off_leaves_what_was_there(tmp_path, monkeypatch):
    path = schema.write(tmp_path, Record(**LEAST))
    before = path.read_text()

    def cut_off(number: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", cut_off)
    with pytest.raises(OSError, match="No space left"):
        schema.write(tmp_path, Record(**{**LEAST, "status": "ok"}))
    assert path.read_text() == before
    assert [path.name for path in tmp_path.iterdir()] == ["record.json"]


@pytest.fixture
def journal(tmp_path, monkeypatch):
    """That of a run in here/run, whose signals stay the tests'."""
    monkeypatch.setattr(train.signal, "signal", lambda *_: None)
    (tmp_path / "here" / "run").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    return journals.Journal(Run(build_config(), read_by_name("single"), 1, tmp_path / "here" / "run"))


def test_a_record_that_is_cut_off_is_written_once_more_and_then_stays(journal, monkeypatch):
    def cut_off() -> None:
        raise Interrupted("interrupted by SIGTERM")

    journal._file = open(journal.run.folder / "steps.jsonl", "w")  # noqa: SIM115 - as `open` does
    with monkeypatch.context() as patched:
        patched.setattr("study.records.machine.describe", cut_off)
        with pytest.raises(Interrupted):
            journal.write("ok")
    journal.fail(Interrupted("interrupted by SIGTERM"))
    assert schema.read(journal.run.folder).status == "interrupted"
    path = schema.write(journal.run.folder, Record(**{**LEAST, "status": "ok"}))
    before = path.read_bytes()
    journal.fail(Interrupted("interrupted by SIGTERM"))
    assert path.read_bytes() == before


def test_a_failure_is_recorded_with_a_command_that_shows_no_folder(journal, tmp_path, monkeypatch):
    journal.fail(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    found = schema.read(journal.run.folder)
    assert (found.status, found.failure.step) == ("out_of_memory", None)
    assert found.command[-3:] == ["study/train.py", "--output-dir", "run"]
    assert not any(str(folder) in word for word in found.command for folder in (tmp_path, files.ROOT))


def test_no_number_that_json_has_not(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        files.write_json(tmp_path / "a.json", {"loss": float("nan")})
    assert not (tmp_path / "a.json").exists()
    with pytest.raises(ValidationError):
        Record(**LEAST, final_loss=float("nan"))


def test_what_is_no_record_of_this_version_is_not_read(tmp_path):
    path = schema.write(tmp_path, Record(**LEAST))
    for version in (0, schema.SCHEMA_VERSION + 1, None, "1"):
        synthetic.change(path, schema_version=version)
        said = f"{path}: schema_version {version}, this version reads {schema.SCHEMA_VERSION}"
        assert refusal(schema.read, path).startswith(said)
    for content in (b"", b"{", b"[]", b"\xff", b"null"):
        path.write_bytes(content)
        assert refusal(schema.read, path).startswith(f"{path}: ")
    path.unlink()
    assert "cannot be read as a record" in refusal(schema.read, path)


@pytest.mark.parametrize(("then", "now"), schema.RENAMED.items())
def test_an_end_with_an_older_word_is_read(then, now, tmp_path):
    path = synthetic.write_outcome(tmp_path, "crashed")
    synthetic.change(path, status=then)
    assert schema.read_outcome(path).status == now
    if then == "output_failed":  # the only one of them that records had
        facts = {"schema_version": 1, "status": then, "failure": {"step": 1, "error": "OutputFailed: a full disk"}}
        assert schema.parse("a record", LEAST | facts, Record).status == now
