"""What a run leaves behind: written whole or not at all, and read strictly; and an error names who stands behind it."""

from __future__ import annotations

import errno
import io
import json
import os

import pytest
import synthetic
from pydantic import ValidationError
from refusing import refusal

from study import files, train
from study.config import build_config
from study.errors import Failed, Interrupted, OffloadFailed, OutputFailed, PeerLost, Stalled
from study.records import schema
from study.records.schema import Checksum, Failure, Record
from study.run import Run
from study.strategy.file import read_by_name
from study.training import faults, reports
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


# ---------------------------------------------------------------- the rank, or the folder, behind an error


@pytest.fixture
def run(tmp_path):
    return Run(build_config(collective_timeout=20), read_by_name("ddp"), 2, tmp_path)


# As gloo, torch and safetensors print them.
GIVEN_UP = "[gloo/transport/tcp/unbound_buffer.cc:156] Application timeout caused pair closure"
LATE = "[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 20000ms for recv operation"
CLOSED = "[gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:17321: Connection reset by peer"
FULL = "Error while serializing: I/O error: No space left on device (os error 28)"
ARCHIVE = "[enforce fail at inline_container.cc:668] . PytorchStreamWriter failed writing file: file write failed"


@pytest.mark.parametrize(
    ("error", "kind"),
    [(RuntimeError(LATE), Stalled), (RuntimeError(GIVEN_UP), Stalled), (RuntimeError(CLOSED), PeerLost),
     (KeyError("labels"), KeyError)],
)  # fmt: skip
def test_what_stands_behind_an_error_of_a_collective(run, error, kind):
    assert type(faults.named(error, run, is_removed=False)) is kind


def test_a_full_disk_is_named_by_its_folder(run, monkeypatch):
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert faults.named(error, run, is_removed=False) is error  # one that is full elsewhere
    monkeypatch.setattr(files, "refuses_more", lambda *_: "No space left on device")
    found = faults.named(RuntimeError(FULL), run, is_removed=False)
    assert (type(found), str(found)) == (OutputFailed, f"{run.folder}: {FULL}")
    with pytest.raises(OutputFailed, match=r"No space left on device.*file write failed"), faults.writing(run.folder):
        raise RuntimeError(ARCHIVE)


def test_a_removed_folder_is_what_stands_behind_whatever_followed(run):
    found = faults.named(FileNotFoundError("steps.jsonl"), run, is_removed=True)
    assert str(found) == f"{run.folder} was removed while the run wrote there"
    failed = Failed("step 2: the loss is nan")
    assert faults.named(failed, run, is_removed=True) is failed
    descriptor = os.open(run.folder, os.O_RDONLY)  # by what was open in it a removed one is known
    assert not files.is_removed(descriptor)
    run.folder.rmdir()
    run.folder.mkdir()  # another, of its name
    assert files.is_removed(descriptor)
    os.close(descriptor)


def test_a_swap_folder_is_named_whether_full_or_removed(run, monkeypatch):
    monkeypatch.setattr(files, "refuses_more", lambda *_: "No space left on device")
    run = Run(run.config, read_by_name("zero3_nvme_offload"), 2, run.folder)
    error = RuntimeError(f"{run.swap_folder}/zero_stage_3: cannot be read")
    assert str(faults.named(error, run, is_removed=False)) == f"{run.swap_folder} was removed while the run wrote there"
    run.swap_folder.mkdir()
    found = faults.named(error, run, is_removed=False)
    assert isinstance(found, OffloadFailed)
    assert str(found).startswith(f"{run.swap_folder}: No space left on device (RuntimeError: ")


def test_the_rank_that_waited_names_rank_0(run, monkeypatch):
    monkeypatch.setattr(reports, "WAIT_SECONDS", 0.0)
    monkeypatch.setattr(journals.signal, "signal", lambda *_: None)
    monkeypatch.setenv("RANK", "1")
    own = journals.Journal(run)
    own.observer = object()  # it has begun
    own.has_folder = True
    assert isinstance(own.fail(RuntimeError(LATE)), Stalled)
    report = json.loads((run.folder / "failure-rank1.json").read_text())
    assert report["status"] == "stalled"
    assert report["error"].startswith("Stalled: rank 0 did not come to a collective within 20 s")


def test_steps_are_whole_lines_where_the_disk_is_full(run):
    class Nearly(io.BytesIO):
        """A file that takes four bytes more, as a disk that is nearly full."""

        def write(self, data: bytes) -> int:
            if self.tell() >= 10:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(data[:4])

    own = journals.Journal(run)
    own._file = Nearly(b"whole\n")
    own._file.seek(0, os.SEEK_END)
    with pytest.raises(OutputFailed, match="No space left on device"):
        own._append([{"step": 1, "loss": 0.5}])
    assert own._file.getvalue() == b"whole\n"
