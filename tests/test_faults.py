"""Is the rank, or the folder, named that stands behind an error which does not name it?"""

from __future__ import annotations

import errno
import io
import json
import os

import pytest

from study import files
from study.config import build_config
from study.errors import Failed, OffloadFailed, OutputFailed, PeerLost, Stalled
from study.run import Run
from study.strategy.file import read_by_name
from study.training import faults, journal, reports


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
    monkeypatch.setattr(journal.signal, "signal", lambda *_: None)
    monkeypatch.setenv("RANK", "1")
    own = journal.Journal(run)
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

    own = journal.Journal(run)
    own._file = Nearly(b"whole\n")
    own._file.seek(0, os.SEEK_END)
    with pytest.raises(OutputFailed, match="No space left on device"):
        own._append([{"step": 1, "loss": 0.5}])
    assert own._file.getvalue() == b"whole\n"
