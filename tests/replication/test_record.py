"""What a run leaves: written whole or not at all, read strictly, errors named; what no run leaves is refused."""

from __future__ import annotations

import errno
import gzip
import io
import json
import os
import re
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import synthetic
from pydantic import ValidationError
from refusing import refusal

from study import train
from study.cli import compare as compare_command
from study.compare import parity, table
from study.config import build_config
from study.records import find as records
from study.records import pack, schema, steps
from study.records.schema import Checksum, Failure, Proof, Record
from study.records.steps import read_steps
from study.run import Run
from study.running import launch
from study.running.outcome import Exit
from study.training import journal as journals
from study.training import rank_failures
from zero_study import cli, files
from zero_study.errors import Failed, Interrupted, OffloadFailed, OutputFailed, PeerLost, Refusal, Stalled
from zero_study.strategy.file import read_by_name

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
    each = dict.fromkeys(steps.STEP_KEYS, 1.0)
    lines = [{**each, "step": 1, "loss": 0.5}, {**each, "step": 2, "loss": None}]
    (tmp_path / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_steps(tmp_path) == lines


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
    result = schema.read(journal.run.folder)
    assert (result.status, result.failure.step) == ("out_of_memory", None)
    assert result.command[-3:] == ["study/train.py", "--output-dir", "run"]
    assert not any(str(folder) in word for word in result.command for folder in (tmp_path, files.ROOT))


def test_no_number_that_json_has_not(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        files.write_json(tmp_path / "a.json", {"loss": float("nan")})
    assert not (tmp_path / "a.json").exists()
    with pytest.raises(ValidationError):
        Record(**LEAST, final_loss=float("nan"))


def test_what_is_no_record_of_this_version_is_not_read(tmp_path):
    path = schema.write(tmp_path, Record(**LEAST))
    for version in (0, schema.SCHEMA_VERSION + 1, None, "1", "a\u2028b", True):
        synthetic.change(path, schema_version=version)
        output = f"{path}: the record has schema_version {version!r}, but"
        assert refusal(schema.read, path).startswith(output)
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
    assert type(rank_failures.cause_of(error, run, is_removed=False)) is kind


def test_a_full_disk_is_named_by_its_folder(run, monkeypatch):
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert rank_failures.cause_of(error, run, is_removed=False) is error  # one that is full elsewhere
    monkeypatch.setattr(files, "why_not_writable", lambda *_: "No space left on device")
    result = rank_failures.cause_of(RuntimeError(FULL), run, is_removed=False)
    assert (type(result), str(result)) == (OutputFailed, f"{run.folder}: {FULL}")
    with (
        pytest.raises(OutputFailed, match=r"No space left on device.*file write failed"),
        rank_failures.explain_write_errors(run.folder),
    ):
        raise RuntimeError(ARCHIVE)


def test_a_removed_folder_is_what_stands_behind_whatever_followed(run):
    result = rank_failures.cause_of(FileNotFoundError("steps.jsonl"), run, is_removed=True)
    assert str(result) == f"{run.folder} was removed while the run wrote there"
    failed = Failed("step 2: the loss is nan")
    assert rank_failures.cause_of(failed, run, is_removed=True) is failed
    descriptor = os.open(run.folder, os.O_RDONLY)  # by what was open in it a removed one is known
    assert not files.is_removed(descriptor)
    run.folder.rmdir()
    run.folder.mkdir()  # another, of its name
    assert files.is_removed(descriptor)
    os.close(descriptor)


def test_a_swap_folder_is_named_whether_full_or_removed(run, monkeypatch):
    monkeypatch.setattr(files, "why_not_writable", lambda *_: "No space left on device")
    run = Run(run.config, read_by_name("zero3_nvme_offload"), 2, run.folder)
    error = RuntimeError(f"{run.swap_folder}/zero_stage_3: cannot be read")
    assert (
        str(rank_failures.cause_of(error, run, is_removed=False))
        == f"{run.swap_folder} was removed while the run wrote there"
    )
    run.swap_folder.mkdir()
    result = rank_failures.cause_of(error, run, is_removed=False)
    assert isinstance(result, OffloadFailed)
    assert str(result).startswith(f"{run.swap_folder}: No space left on device (RuntimeError: ")


def test_the_rank_that_waited_names_rank_0(run, monkeypatch):
    monkeypatch.setattr(rank_failures, "WAIT_SECONDS", 0.0)
    monkeypatch.setattr(journals.signal, "signal", lambda *_: None)
    monkeypatch.setenv("RANK", "1")
    own = journals.Journal(run)
    own.observer = object()  # it has begun
    own.has_folder = True
    assert isinstance(own.fail(RuntimeError(LATE)), Stalled)
    report = json.loads((run.folder / "failure-rank1.json").read_text())
    assert report["status"] == "stalled"
    assert report["error"].startswith("Stalled: rank 0 did not call a collective within 20 s")


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


# ---------------------------------------------------------------- what no run leaves, in one line and before a write


@pytest.fixture
def run_dir(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return synthetic.write_run(Path("runs"), study="s").parent


def edited(content: dict, at: tuple, value: object) -> str:
    """A document with another value in one place."""
    copy = holder = json.loads(json.dumps(content))
    for key in at[:-1]:
        holder = holder[key]
    holder[at[-1]] = value
    return json.dumps(copy) + "\n"


def refused_everywhere(match: str, views: tuple[str, ...] = tuple(compare_command.VIEWS)) -> None:
    """By collect, pack and every view of compare, before the first write."""
    before = sorted(Path().rglob("*"))
    requested = [["pack", "runs", "out"], ["pack", "runs", "box.zip"]]
    for words in [*requested, *(["compare", "runs", "--view", view] for view in views)]:
        assert re.search(match, refusal(cli.run, words))
    assert sorted(Path().rglob("*")) == before


@pytest.mark.parametrize("name", ["steps.jsonl", "config.json"])
def test_ok_without_its_files_is_no_record(run_dir, name):
    (run_dir / name).unlink()
    refused_everywhere(rf"{name}: the file is missing, although .*/record\.json says that the run is ok")
    failure = {"step": 1, "error": "ended"}  # before its first step
    facts = {"status": "failed", "failure": failure, "steps_sha256": None, "steps_done": 0, "final_loss": None}
    synthetic.change(run_dir / "record.json", **facts)
    (run_dir / "steps.jsonl").unlink(missing_ok=True)
    assert table.read([Path("runs")])["status"].tolist() == ["failed"]
    assert pack.collect([Path("runs")], Path("out")).checked[0].number == 1


def test_a_checkpoints_manifest_is_no_record(run_dir):
    folder = run_dir / "checkpoints" / "step-00000003"
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "tokenizer_config.json").write_text(f'{{"run_id": 1, "model_max_length": {10**30}}}')
    (folder / "manifest.json").write_text(json.dumps({"run_id": run_dir.name, "files": {}}))
    assert len(table.read([Path("runs")])) == pack.collect([Path("runs")], Path("out")).checked[0].number == 1


@pytest.mark.parametrize("run_id", ["../../x", "bert-lr:a", "record"])
@pytest.mark.parametrize("where", ["record.json", "outcome.json"])
def test_a_name_that_is_no_files_is_refused(run_dir, where, run_id):
    synthetic.change(run_dir / "record.json", run_id=run_id) if where == "record.json" else None
    synthetic.change(run_dir / "outcome.json", run_id=run_id)
    # The other tables are made of records alone.
    refused_everywhere("the name ", tuple(compare_command.VIEWS) if where == "record.json" else ("differences",))


@pytest.mark.parametrize(
    ("facts", "match"),
    [
        ({"loss": 1.0}, "unknown key 'loss'"),
        ({"failure": {"step": 1}}, "failure.error is missing"),
        ({"status": "fine"}, "status='fine': input should be 'ok', 'out_of_memory', 'failed', 'interrupted', "),
        ({"strategy": "lr:a"}, "the name 'lr:a'"),
        ({"steps_done": 10**19}, "has more than 19 digits"),
        ({"num_params": -5}, "num_params=-5: input should be greater than or equal to 0"),
        ({"steps_done": True}, "steps_done=True: input should be a valid integer"),
        ({"world_size": 3}, "model_state_bytes has values of 2 ranks, but world_size is 3"),
        ({"seed": 7}, "seed is 7, but the config has 0"),
        ({"proof": None}, "proof is missing, although every run with status ok"),
        ({"evaluation": [{"accuracy": 1.0}]}, "an entry has no step or no loss"),
        ({"status": "failed"}, "the status is failed, but failure is missing"),
        ({"machine": {"gpus": "many"}}, "machine: gpus='many'"),
        *(({"machine": {"cpu": cpu}}, "machine: .*: string should match") for cpu in ("<b>", "a\nb")),
        ({"machine": {"gpus": [{"name": "a|b", "memory_bytes": 1}]}}, "machine: .*: string should match"),
        ({"other_machines": [{"gpus": [{}]}]}, r"other_machines.*gpus.*name"),
        ({"final_loss": 0.125}, r"40 steps and the last loss .*, but .* has 40 steps and the last loss 0\.125"),
    ],
)
def test_what_no_run_leaves_is_refused(run_dir, facts, match):
    synthetic.change(run_dir / "record.json", **facts)
    assert re.search(match, refusal(table.read, [Path("runs")]))


@pytest.mark.parametrize(
    ("at", "value"),
    [
        (("started_at",), "2026-01-01T00:00:00"),
        (("config",), {}),
        (("config", "dropout"), None),
        (("config", "no_such_setting"), 1),
        (("config", "max_steps"), "many"),
        (("config", "global_batch_size"), 7),
        (("proof", "precision"), "<b>"),
        (("data", "num_train_examples"), "x"),
        (("timing", "tokens_per_second"), None),
        (("machine", "imports"), {"libraries": {"torch": {"sha256": "0"}}}),
    ],
)
def test_what_any_table_needs_is_asked_of_every_record(run_dir, at, value):
    """No table has to, and what is collected can be compared."""
    path = run_dir / "record.json"
    path.write_text(edited(json.loads(path.read_text()), at, value))
    refused_everywhere(at[-1])


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (lambda lines: lines[:-1], "39 steps and the last loss"),
        (lambda lines: [*lines[:3], lines[3].replace('"loss"', '"loos"'), *lines[4:]], "line 4 is not step 4, with"),
        (lambda lines: [*lines[:3], lines[4], lines[3], *lines[5:]], "line 4 is not step 4"),
        (lambda lines: [lines[0].replace("1", '"1"', 1), *lines[1:]], "line 1 is not step 1"),
        (
            lambda lines: [lines[0].replace('"loss": ', '"loss": "0", "x": '), *lines[1:]],
            "a value that is not a number",
        ),
        (lambda lines: ["[" * 1000, *lines[1:]], "cannot be read as steps"),
        (lambda lines: [*lines[:2], lines[2] + "," + lines[3], *lines[4:]], "39 lines contain 40 steps"),
    ],
)
def test_steps_are_those_of_the_record_whatever_its_digest_says(run_dir, spoil, match):
    steps = run_dir / "steps.jsonl"
    steps.write_text("\n".join(spoil(steps.read_text().splitlines())) + "\n")
    synthetic.change(run_dir / "record.json", steps_sha256=files.sha256(steps))
    for make in (table.read, parity.PARITY.page):
        with pytest.raises(Refusal, match=match):
            make([Path("runs")])


def test_a_result_whose_name_no_merge_would_take_is_not_packed(run_dir):
    (run_dir.parent / "lr:a.json").write_text('{"benchmark": "throughput"}')
    with pytest.raises(Refusal, match=r"'lr:a' cannot be a file name"):
        pack.pack([Path("runs")], Path("box.zip"))
    assert not Path("box.zip").exists()


@pytest.mark.parametrize(
    ("claimed", "match"),
    [(160 << 20, "has 503,316,480 bytes, but that of a pack has at most 268,435,456"), (3, "cannot be read as a pack")],
)
def test_a_pack_is_weighed_before_it_is_read_and_gives_no_more_than_it_says(run_dir, claimed, match):
    with zipfile.ZipFile("box.zip", "w") as archive:
        for name in ("a.json", "b.json", "c.json"):
            archive.writestr(name, b"0" * 12345)
    size = struct.pack("<L", 12345)
    Path("box.zip").write_bytes(Path("box.zip").read_bytes().replace(2 * size, size + struct.pack("<L", claimed)))
    with pytest.raises(Refusal, match=match):
        pack.merge(Path("box.zip"), Path("out"))
    assert not Path("out").exists()


def test_nobody_waits_for_a_named_pipe(run_dir):
    os.mkfifo("runs/throughput.json")
    for name in ("record.json", "outcome.json", "steps.jsonl", "config.json"):
        (run_dir / name).rename("aside")
        os.mkfifo(run_dir / name)
        refused_everywhere(rf"{name}: cannot be read as .*no regular file", ("parity", "differences"))
        Path("aside").rename(run_dir / name)
    os.mkfifo("box.zip")
    with pytest.raises(Refusal, match=r"box\.zip: cannot be read as a pack \(it is no regular file"):
        pack.merge(Path("box.zip"), Path("out"))


def leaves(content: object, at: tuple = ()) -> Iterator[tuple[tuple, object]]:
    """Every value of a document that has none in it, with the keys that lead there."""
    inside = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in inside:
        yield from leaves(value, (*at, key)) if value and isinstance(value, (dict, list)) else [((*at, key), value)]


def other(value: object) -> object:
    """What could have stood there as well."""
    if isinstance(value, bool):
        return not value
    return 1 if not value else value + "0" if isinstance(value, str) else value + 1


@pytest.mark.parametrize("is_collected", [False, True])
def test_no_edit_of_what_a_run_wrote_passes(run_dir, is_collected):
    path = schema.write(run_dir, schema.read(run_dir).model_copy(
        update={"config_sha256": files.sha256(run_dir / "config.json")}
    ))  # fmt: skip
    if is_collected:
        pack.collect([Path("runs")], Path("out"))
        path = Path("out/records.jsonl")  # as it was before it was compressed
        path.write_bytes(gzip.decompress((packed := Path("out/records.jsonl.gz")).read_bytes()))
        packed.unlink()
    whole = json.loads(path.read_text())
    assert next(records.find_runs([path.parent])).record.record == schema.read(run_dir)
    places = [(at, value) for at, value in leaves(whole) if not is_collected or at != ("run_id",)]
    assert len(places) > 250
    for at, value in places:
        path.write_text(edited(whole, at, other(value)))
        with pytest.raises(Refusal):
            pytest.fail(f"{at}: {list(records.find_runs([path.parent]))}")


def test_a_record_that_the_program_writes_again_has_its_own_digest(run_dir):
    """As where the launcher knows better how a run ended (`launch._let_agree`)."""
    path = schema.write(run_dir, schema.read(run_dir))
    launch._let_agree(path, Exit("ok", ""))
    failure = schema.Failure(step=3, error="it ended")
    schema.write(run_dir, schema.read(path).model_copy(update={"status": "interrupted", "failure": failure}))
    launch._let_agree(path, Exit("killed", "rank 1 was ended by SIGKILL"))
    assert schema.read(path).status == "killed"


@pytest.mark.parametrize("view", sorted(compare_command.VIEWS))
def test_what_a_record_says_is_text_on_every_page(run_dir, capsys, view):
    """No script, no second row or cell, nothing that turns what follows."""
    hostile = "<script>alert(1)</script>|a\n| b \\| c | \u202egnp\x1b[31m"
    machine = {**schema.read(run_dir).machine, "environment": {"MKL_ENABLE_INSTRUCTIONS": hostile}}
    kinds = [{"kind": hostile, "count": 1, "bytes": 8}]
    synthetic.change(run_dir / "record.json", collectives_per_step=kinds, machine=machine)
    synthetic.write_run(Path("runs"), strategy="ddp", study="s")
    synthetic.write_run(Path("runs"), strategy="single", world_size=1)
    failed = synthetic.write_run(Path("runs"), strategy="zero1", study="s", status="failed")
    synthetic.change(failed, failure={"step": 1, "error": hostile})
    synthetic.change(failed.with_name("outcome.json"), message=hostile)
    cli.run(["compare", "runs", "--view", view])
    text = capsys.readouterr().out
    assert not {*"\u202e\x1b"} & {*text}
    if view == compare_command.SHORT:
        return
    cli.run(["compare", "runs", "--view", view, "--markdown"])
    page = capsys.readouterr().out
    assert "<script" not in page
    assert not {*"\u202e\x1b"} & {*page}
    for table_lines in page.split("\n\n"):
        assert len({re.sub(r"\\.", "", line).count("|") for line in table_lines.splitlines() if line[:1] == "|"}) <= 1
    if view in ("communication", "differences", "acceptance"):
        assert "&lt;script>" in page


def test_a_control_that_did_not_run_is_refused(run_dir):
    for view in compare_command.WITH_CONTROL:
        output = refusal(cli.run, ["compare", "runs", "--view", view, "--control", "zero22"])
        assert output.endswith(
            "--control zero22: there is no run of this strategy in these folders. The strategies are: zero2"
        )
    output = refusal(cli.run, ["compare", "runs", "--view", "parity", "--control", "zero2"])
    assert output.startswith("--control zero2: --view parity ")


def a_finished_run(
    tokens: int = 8, weights: str = "after", precision: str = "fp32", offloads: bool = False, lora_rank=None
):
    """A run that has trained, of which `train.finish` reads no more than this."""
    config = SimpleNamespace(num_steps=2, precision=precision, lora_rank=lora_rank)
    built = SimpleNamespace(
        run=SimpleNamespace(config=config, strategy=SimpleNamespace(offloads_to_nvme=offloads)),
        initial_parameters=SimpleNamespace(sha256="before"),
        planned_tokens=8,
    )
    return built, SimpleNamespace(total=lambda name: tokens), SimpleNamespace(sha256=weights)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"weights": "before"}, "no parameter changed in 2 steps"),
        ({"tokens": 7}, "trained on 7 tokens, but 8 were planned"),
    ],
)
def test_a_run_that_did_not_train_has_failed(facts, message):
    train.check_trained(*a_finished_run())
    with pytest.raises(Failed, match=message):
        train.check_trained(*a_finished_run(**facts))


def test_the_proof_of_a_finished_run():
    """It has the bytes that were swapped, and other moments than the study's optimizer keeps are refused."""
    proof = Proof(
        world_size=1, distributed_type="NO", device="cpu", engine_class="Model", optimizer_class="AdamW",
        gradient_clipping=0.0, gradient_accumulation_steps=1, micro_batch_size=1, precision="fp32",
        parameter_dtypes=["float32"], moment_dtypes=["float32"],
    )  # fmt: skip
    ranks = [SimpleNamespace(swap_bytes_read=3, swap_bytes_written=journals.SMALLEST_SWAP_BYTES)]
    built, *_ = a_finished_run()
    assert train.complete_proof(built, proof, ranks) is proof
    in_fp64, *_ = a_finished_run(precision="fp64")
    with pytest.raises(Failed, match=r"moment_dtypes: .*float64.*the engine has \['float32'\]"):
        train.complete_proof(in_fp64, proof, ranks)
    offloaded, *_ = a_finished_run(offloads=True)
    completed = train.complete_proof(offloaded, proof, ranks)
    assert (completed.swap_bytes_read, completed.swap_bytes_written) == ([3], [journals.SMALLEST_SWAP_BYTES])
    ranks[0].swap_bytes_written -= 1
    with pytest.raises(Failed, match="nothing was swapped"):
        train.complete_proof(offloaded, proof, ranks)
    with_adapter, *_ = a_finished_run(offloads=True, lora_rank=4)
    with pytest.raises(Failed, match="lora-rank"):
        train.complete_proof(with_adapter, proof, ranks)
