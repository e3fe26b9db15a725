"""Is a record refused, in one line and with nothing written, where no run leaves it?"""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path

import pytest
import synthetic

from study import cli
from study.compare import answer, losses, table
from study.errors import Refusal
from study.records import collect, pack, schema


@pytest.fixture
def run_dir(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return synthetic.write_run(Path("runs"), study="s").parent


def change(path: Path, **facts) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **facts}))


def refused_everywhere(match: str, views: tuple[str, ...] = tuple(cli.VIEWS)) -> None:
    """By collect, pack and every view of compare, before the first write."""
    before = sorted(Path().rglob("*"))
    asked = [["collect", "runs", "out"], ["pack", "runs", "box.zip"]]
    for words in [*asked, *(["compare", "runs", "--view", view] for view in views)]:
        with pytest.raises(Refusal, match=match) as caught:
            cli.run(words)
        assert "\n" not in str(caught.value)
    assert sorted(Path().rglob("*")) == before


@pytest.mark.parametrize("name", ["steps.jsonl", "config.json"])
def test_ok_without_its_files_is_no_record(run_dir, name):
    (run_dir / name).unlink()
    refused_everywhere(rf"{name}: not there, though .*/record\.json says ok")


def test_what_is_collected_has_its_steps_beside_it(run_dir):
    collect.collect(Path("runs"), Path("collected"))
    assert table.read([Path("collected")])["status"].tolist() == ["ok"]
    Path("collected", "steps.jsonl").unlink()
    with pytest.raises(Refusal, match=r"collected/steps\.jsonl, gpt-.*: not there, though"):
        table.read([Path("collected")])


def test_what_failed_before_its_first_step_has_none(run_dir):
    shutil.rmtree(run_dir)
    path = synthetic.write_run(Path("runs"), study="s", status="failed")
    change(path, steps_sha256=None, steps_done=0, final_loss=None)
    for name in ("steps.jsonl", "config.json"):
        (path.parent / name).unlink()
    assert table.read([Path("runs")])["status"].tolist() == ["failed"]
    assert collect.collect(Path("runs"), Path("out")) == 1


def test_a_checkpoints_manifest_is_no_record(run_dir):
    folder = run_dir / "checkpoints" / "step-00000003"
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "tokenizer_config.json").write_text(f'{{"run_id": 1, "model_max_length": {10**30}}}')
    (folder / "manifest.json").write_text(json.dumps({"run_id": run_dir.name, "files": {}}))
    assert len(table.read([Path("runs")])) == collect.collect(Path("runs"), Path("out")) == 1


@pytest.mark.parametrize("run_id", ["../../x", "/tmp/x", "bert-lr:a", "..", "a b", "record", "x" * 200])
@pytest.mark.parametrize("where", ["record.json", "outcome.json"])
def test_a_name_that_is_no_files_is_refused(run_dir, where, run_id):
    change(run_dir / "record.json", run_id=run_id) if where == "record.json" else None
    change(run_dir / "outcome.json", run_id=run_id)
    # The other tables are made of records alone.
    refused_everywhere(
        "the name ", tuple(cli.VIEWS) if where == "record.json" else ("differences", "scaling", "answer")
    )


@pytest.mark.parametrize(
    ("facts", "match"),
    [
        ({"strategy": "lr:a"}, "the name 'lr:a'"),
        ({"steps_done": 10**17}, "steps_done=1e.17 is more than any run has"),
        ({"steps_done": 10**19}, "has more than 19 digits"),
        ({"num_params": -5}, "num_params=-5 is negative"),
        ({"wall_seconds": 1e308}, "wall_seconds=1e.308 is more than any run has"),
        ({"steps_done": True}, "steps_done=True: input should be a valid integer"),
        ({"seed": "0"}, "seed='0': input should be a valid integer"),
        ({"world_size": 2.0}, "world_size=2.0: input should be a valid integer"),
        ({"world_size": 3}, "model_state_bytes is of 2 ranks, world_size is 3"),
        ({"model_state_bytes": []}, "model_state_bytes is of 0 ranks"),
        ({"seed": 7}, "seed=7, its config has 0"),
        ({"proof": None}, "status ok, but proof is missing"),
        ({"steps_sha256": None}, "status ok, but steps_sha256 is missing"),
        ({"evaluation": [{"accuracy": 1.0}]}, "without step and loss"),
        ({"status": "failed"}, "status failed, but failure is missing"),
        ({"machine": {"gpus": "many"}}, r"machine\.gpus='many'"),
        ({"machine": {"libraries": []}}, r"machine\.libraries=\[\]"),
        ({"other_machines": [{"gpus": [{}]}]}, r"other_machines.*gpus.*name"),
        ({"config": {}}, r"config\.workload is missing"),
        ({"final_loss": 0.125}, r"40 steps, the last of loss .*; .* has 40 and 0\.125"),
    ],
)
def test_what_no_run_leaves_is_refused(run_dir, facts, match):
    change(run_dir / "record.json", **facts)
    with pytest.raises(Refusal, match=match) as caught:
        table.read([Path("runs")])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["[" * 100_000, '{"schema_version": 1, "steps_done": ' + "1" * 5000 + "}"])
def test_nesting_and_digits_without_end_are_one_line(run_dir, content):
    (run_dir / "record.json").write_text(content)
    refused_everywhere(r"record\.json: cannot be read as a record")


def test_a_key_twice_is_refused(run_dir):
    path = run_dir / "record.json"
    path.write_text(path.read_text().replace('"status": "ok"', '"status": "failed", "status": "ok"', 1))
    refused_everywhere("'status' is there twice")


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (lambda lines: lines[:-1], "39 steps, the last of loss"),
        (lambda lines: [*lines[:3], lines[3].replace('"loss"', '"loos"'), *lines[4:]], "line 4 is not step 4, with"),
        (lambda lines: [*lines[:3], lines[4], lines[3], *lines[5:]], "line 4 is not step 4"),
        (lambda lines: [lines[0].replace("1", '"1"', 1), *lines[1:]], "line 1 is not step 1"),
        (lambda lines: [lines[0].replace('"loss": ', '"loss": "0", "x": '), *lines[1:]], "a value that is no number"),
        (lambda lines: ["[" * 1000, *lines[1:]], "cannot be read as steps"),
        (lambda lines: [*lines[:2], lines[2] + "," + lines[3], *lines[4:]], "39 lines hold 40 steps"),
    ],
)
def test_steps_are_those_of_the_record_whatever_its_digest_says(run_dir, spoil, match):
    steps = run_dir / "steps.jsonl"
    steps.write_text("\n".join(spoil(steps.read_text().splitlines())) + "\n")
    change(run_dir / "record.json", steps_sha256=schema.sha256(steps))
    for make in (table.read, losses.table):
        with pytest.raises(Refusal, match=match):
            make([Path("runs")])


def test_an_answer_of_failures_only_says_so(tmp_path):
    synthetic.write_run(tmp_path, status="failed")
    synthetic.write_outcome(tmp_path, "killed", seed=1)
    with pytest.raises(Refusal, match=r"none of 2 runs ended well on 2 processes, so no answer yet$"):
        answer.table([tmp_path])


# ---------------------------------------------------------------- packs


def test_a_pack_is_merged_before_it_is_done(run_dir, monkeypatch):
    """A result whose name no merge would take; the file is not written."""
    result = run_dir.parent / "lr:a.json"
    result.write_text('{"benchmark": "throughput"}')
    with pytest.raises(Refusal, match=r"^these records would not merge elsewhere: .*'lr:a\.json'.* cannot be a file's"):
        pack.pack([Path("runs")], Path("box.zip"))
    assert not Path("box.zip").exists()
    result.unlink()
    monkeypatch.setattr(collect, "put", lambda runs, folder, replace: folder.mkdir() or [])
    with pytest.raises(Refusal, match="is not the same after a merge"):
        pack.pack([Path("runs")], Path("box.zip"))
    assert not Path("box.zip").exists()


@pytest.mark.parametrize(
    ("limit", "match"),
    [
        ("MOST_MEMBERS", r"4 members; a pack has at most 2"),
        ("MOST_BYTES", r"its members are [\d,]+ bytes; .* at most 2"),
    ],
)
def test_a_pack_is_weighed_before_it_is_read(run_dir, monkeypatch, limit, match):
    pack.pack([Path("runs")], Path("box.zip"))
    monkeypatch.setattr(pack, limit, 2)
    monkeypatch.setattr("zipfile.ZipFile.read", None)  # nothing is
    with pytest.raises(Refusal, match=match):
        pack.merge(Path("box.zip"), Path("out"))
    assert not Path("out").exists()


def test_a_member_that_would_fill_the_memory_is_not_read(tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.json", b"0" * (4 << 20))
    assert (tmp_path / "bomb.zip").stat().st_size < 10_000
    monkeypatch.setattr(pack.files, "LARGEST_FILE", 1 << 20)
    monkeypatch.setattr("zipfile.ZipFile.read", None)
    with pytest.raises(Refusal, match=r"bomb\.zip: 'a\.json' is 4,194,304 bytes; at most 1,048,576 are read"):
        pack.merge(tmp_path / "bomb.zip", tmp_path / "out")


def test_a_manifest_counts_its_runs(run_dir):
    pack.pack([Path("runs")], Path("box.zip"))
    with zipfile.ZipFile("box.zip") as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    members[pack.MANIFEST] = members[pack.MANIFEST].replace(b'"num_runs": 1', b'"num_runs": 2')
    with zipfile.ZipFile("box.zip", "w") as archive:
        for name, member in members.items():
            archive.writestr(name, member)
    with pytest.raises(Refusal, match="holds 1 runs, its manifest says 2"):
        pack.merge(Path("box.zip"), Path("out"))
