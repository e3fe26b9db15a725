"""Test that a pack of records arrives on another machine unchanged, or is refused as a whole."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import synthetic
from launching import ROOT
from refusing import refusal

from study.records import pack, schema
from study.records.simulation import SIMULATED_GPUS
from zero_study.errors import Refusal
from zero_study.verdict import Verdict


def num_runs(verdict: Verdict) -> int:
    """The number of runs that a command packed, collected or merged."""
    return next(each.number for each in verdict.checked if each.noun == "run")


@pytest.fixture
def runs(tmp_path) -> Path:
    """Run directories: two with records, one that was killed."""
    synthetic.write_run(tmp_path / "runs", study="s")
    synthetic.write_run(tmp_path / "runs", seed=1, study="s", status="out_of_memory")
    return synthetic.write_outcome(tmp_path / "runs", "killed", seed=2).parents[1]


@pytest.fixture
def packed(runs, tmp_path) -> Path:
    pack.pack([runs], tmp_path / "box.zip")
    return tmp_path / "box.zip"


def contents(folder: Path) -> dict[str, bytes]:
    """The files of a folder; of one that is not there, none."""
    return {path.name: path.read_bytes() for path in folder.glob("*")}


def members(file: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(file) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def rewrite(file: Path, members: dict[str, bytes], fits: bool = False, **manifest) -> None:
    """Write a pack with these members, and change facts of its manifest; where it `fits`, it has their digests."""
    content = {**json.loads(members[pack.MANIFEST]), **manifest} | ({"sha256": digests(members)} if fits else {})
    with zipfile.ZipFile(file, "w") as archive:
        for name, member in {**members, pack.MANIFEST: json.dumps(content).encode()}.items():
            archive.writestr(name, member)


def digests(members: dict[str, bytes]) -> dict[str, str]:
    return {name: hashlib.sha256(m).hexdigest() for name, m in members.items() if name != pack.MANIFEST}


def refused(file: Path, folder: Path, match: str) -> None:
    """Merging is refused in one line, and nothing changes."""
    before = contents(folder)
    assert re.search(match, refusal(pack.merge, file, folder))
    assert contents(folder) == before


def test_a_round_trip(runs, packed, tmp_path, capsys):
    target = tmp_path / "elsewhere" / "records"
    for message in ("copied", "kept"):
        capsys.readouterr()
        assert num_runs(pack.merge(packed, target)) == 3
        assert capsys.readouterr().out.count(message) == 3
    pack.collect([runs], tmp_path / "collected")
    assert contents(target) == contents(tmp_path / "collected")
    for number, source in enumerate(([target], [runs, runs])):  # collected files, and run directories: the same bytes
        pack.pack(source, tmp_path / "new" / f"again{number}.zip")
        assert (tmp_path / "new" / f"again{number}.zip").read_bytes() == packed.read_bytes()
    with zipfile.ZipFile(packed) as archive:
        assert {entry.date_time for entry in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}


def test_results_of_benchmarks_go_with_the_runs(runs, tmp_path):
    target, result = tmp_path / "records", runs / "throughput" / "throughput-small.json"
    result.parent.mkdir()
    for text in ('{"benchmark": "throughput"}', '{"benchmark": "throughput", "strategies": {"ddp": 1}}'):
        result.write_text(text)
        pack.pack([runs], tmp_path / "box.zip", replace=True)
        assert num_runs(pack.merge(tmp_path / "box.zip", target)) == 3
        assert contents(target)[result.name] == result.read_bytes()  # the later one
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / result.name).write_text('{"benchmark": "checkpoints"}')
    with pytest.raises(
        Refusal, match=r"throughput-small\.json and .* are different results with the same name. Pack them separately."
    ):
        pack.pack([runs, tmp_path / "other"], tmp_path / "two.zip")


def test_the_manifest_says_where_the_records_come_from(runs, tmp_path):
    changed = {"git_commit": "1" * 40, "git_dirty": True, "libraries": {"torch": "2.14.0", "deepspeed": None}}
    synthetic.write_run(runs, seed=3, machine=changed)
    synthetic.write_run(runs, seed=4, machine={"git_commit": None, "git_dirty": None})
    assert num_runs(pack.pack([runs], tmp_path / "box.zip")) == 5
    found = members(tmp_path / "box.zip")
    manifest = json.loads(found[pack.MANIFEST])
    libraries = manifest.pop("libraries")
    assert (libraries["torch"], libraries["deepspeed"]) == (["2.13.0", "2.14.0"], ["0.19.8"])
    assert manifest == {
        "format_version": pack.FORMAT_VERSION, "schema_version": schema.SCHEMA_VERSION, "num_runs": 5,
        "box": "Synthetic CPU, 8 cores", "git_commits": ["0" * 40, "1" * 40 + "-dirty"], "sha256": digests(found),
    }  # fmt: skip


def test_a_pack_is_of_one_box(runs, tmp_path):
    synthetic.write_run(tmp_path / "gpu", box="gpu")
    with pytest.raises(Refusal, match=r"records of 2 machines \(\d x NVIDIA H200; Synthetic CPU, 8 cores\)"):
        pack.pack([runs, tmp_path / "gpu"], tmp_path / "box.zip")
    synthetic.write_outcome(tmp_path / "none", "skipped")
    with pytest.raises(Refusal, match="there is no record, so the machine is unknown"):
        pack.pack([tmp_path / "none"], tmp_path / "box.zip")
    assert not (tmp_path / "box.zip").exists()


def test_a_pack_holds_one_run_of_a_name(runs, tmp_path):
    synthetic.write_run(tmp_path / "other", seconds=2.0, study="s")
    output = refusal(pack.pack, [runs, tmp_path / "other"], tmp_path / "x.zip")
    assert re.search(r"runs/.* and .*other/.* differ", output)
    assert not (tmp_path / "x.zip").exists()


def test_a_pack_overwrites_nothing(runs, packed):
    before = packed.read_bytes()
    with pytest.raises(Refusal, match=r"box\.zip: the file already exists"):
        pack.pack([runs], packed)
    assert packed.read_bytes() == before


def test_what_is_no_pack_is_refused(tmp_path):
    file, target = tmp_path / "box.zip", tmp_path / "records"
    refused(file, target, r"box\.zip: this file does not exist")
    for content in (b"", b"no zip"):
        file.write_bytes(content)
        refused(file, target, r"box\.zip: cannot be read as a pack")
    for manifest in (None, b"{", b"[1]", b'{"sha256": {}}', b"\xff"):
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("a.json", "{}")
            if manifest is not None:
                archive.writestr(pack.MANIFEST, manifest)
        refused(file, target, r"box\.zip: this file is not a pack, because its manifest\.json has no format_version")


@pytest.mark.parametrize(
    ("facts", "match"),
    [
        ({"format_version": 1}, r"format_version is 1, but this version of zero-study reads 2"),
        ({"schema_version": 0}, r"schema_version is 0, but this version of zero-study reads 1"),
        ({"box": None}, r"manifest\.json: box=None"),
        ({"boxes": []}, r"manifest\.json: unknown key 'boxes'"),
        ({"box": "8 x NVIDIA H100"}, r"manifest says box 8 x NVIDIA H100, but its records say Synthetic CPU"),
        ({"git_commits": ["1" * 40]}, r"manifest says git_commits \['1+'\], but its records say \['0+'\]"),
        ({"libraries": {"torch": ["9.0"]}}, r"manifest says libraries \{'torch': \['9\.0'\]\}, but its records"),
        ({"num_runs": 9}, r"manifest says num_runs 9, but its records say \d"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(packed, tmp_path, facts, match):
    rewrite(packed, members(packed), **facts)
    refused(packed, tmp_path / "records", rf"box\.zip: .*{match}")


@pytest.mark.filterwarnings("ignore:Duplicate name:UserWarning")  # zipfile's, as the test writes it
def test_members_that_are_not_the_manifests_are_refused(packed, tmp_path):
    found, target = members(packed), tmp_path / "records"
    rewrite(packed, found | {"steps.jsonl": found["steps.jsonl"] + b" "})
    refused(packed, target, r"box\.zip: steps\.jsonl was changed")
    rewrite(packed, {name: member for name, member in found.items() if name != "outcomes.jsonl"})
    refused(packed, target, r"box\.zip: outcomes\.jsonl is missing")
    rewrite(packed, {**found, "more.json": b"{}"})
    refused(packed, target, r"box\.zip: more\.json is not in its manifest")
    with zipfile.ZipFile(packed, "a") as archive:
        archive.writestr("more.json", b"{}")
    refused(packed, target, r"box\.zip: two members have the same name")


@pytest.mark.parametrize("name", ["../out.json", "/out.json", "C:out.json"])
def test_a_member_with_a_path_in_its_name_is_refused(packed, tmp_path, name):
    rewrite(packed, {**members(packed), name: b"{}"}, fits=True)
    refused(packed, tmp_path / "records", r"box\.zip: member .*: the name .* cannot be a file name on every system")
    assert not list(tmp_path.parent.rglob("out.json"))


def edit(found: dict[str, bytes], name: str, old: str, new: str) -> None:
    changed = found[name].replace(old.encode(), new.encode(), 1)
    assert changed != found[name]
    found[name] = changed


def drop(found: dict[str, bytes], name: str, run_id: str) -> None:
    """Take a run's line out of a file."""
    found[name] = b"".join(line for line in found[name].splitlines(keepends=True) if run_id.encode() not in line)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda found, run_id: edit(found, "steps.jsonl", '"step": 1,', '"step": 1 ,'),
         r"/steps\.jsonl, RUN: the file was changed: .* steps_sha256 in .*box\.zip/records\.jsonl, RUN"),
        (lambda found, run_id: drop(found, "steps.jsonl", run_id), r"/steps\.jsonl, RUN: the file is missing"),
        (lambda found, run_id: edit(found, "records.jsonl", '"schema_version": 1', '"schema_version": 2'),
         r"/records\.jsonl, RUN: the record has schema_version 2"),
        (lambda found, run_id: edit(found, "records.jsonl", '"world_size": 2', '"world_size": "two"'),
         r"/records\.jsonl, RUN: world_size='two'"),
        (lambda found, run_id: drop(found, "records.jsonl", run_id), r"/outcomes\.jsonl, RUN: the outcome is ok, but"),
        (lambda found, run_id: edit(found, "steps.jsonl", "{", '{"run_id": "more", "steps": []}\n{'),
         r": steps\.jsonl is not a file of finished runs"),
        (lambda found, run_id: edit(found, "records.jsonl", "\n", "\r\n"),
         r": records\.jsonl is not a file of finished runs"),
        (lambda found, run_id: found.update({"notes.txt": b"private"}),
         r": notes\.txt is not a file of finished runs"),
        (lambda found, run_id: edit(found, "outcomes.jsonl", '"status": "ok"', '"status": ["ok"]'),
         r"/outcomes\.jsonl, RUN: status=\['ok'\]"),
        (lambda found, run_id: found.update({name: m.replace(run_id.encode(), b"../out") for name, m in found.items()}),
         r"/records\.jsonl, \.\./out: .*the name '\.\./out' cannot"),
    ],
)  # fmt: skip
def test_records_that_are_not_whole_are_refused_whatever_the_manifest_says(packed, tmp_path, change: Callable, match):
    found = members(packed)
    run_id = json.loads(found["records.jsonl"].splitlines()[0])["run_id"]
    change(found, run_id)
    rewrite(packed, found, fits=True)
    refused(packed, tmp_path / "records", r"box\.zip" + match.replace("RUN", run_id))
    assert not list(tmp_path.parent.rglob("out.*"))


def test_a_run_that_is_there_and_differs_is_refused(packed, tmp_path):
    target = tmp_path / "records"
    target.write_text("")
    with pytest.raises(Refusal, match="records: this is not a folder"):
        pack.merge(packed, target)
    target.unlink()
    synthetic.write_run(tmp_path / "other", seed=1, seconds=2.0, status="out_of_memory")
    pack.collect([tmp_path / "other"], target)
    refused(packed, target, r"records/records\.jsonl, .*seed1.* and .*box\.zip/records\.jsonl, .*seed1.* differ")


def test_records_of_simulated_gpus_are_packed_as_such_and_never_merged(tmp_path):
    simulated = {"environment": {SIMULATED_GPUS: "{}"}, "gpus": [{"name": "NVIDIA H100", "memory_bytes": 85 * 10**9}]}
    run = synthetic.write_run(tmp_path / "runs", study="s").parent
    record = schema.read(run)
    machine = {**record.machine, **simulated}
    proof = record.proof.model_copy(update={"device": "cuda"})
    schema.write(run, record.model_copy(update={"machine": machine, "proof": proof}))
    pack.pack([run.parent], tmp_path / "box.zip")
    assert json.loads(members(tmp_path / "box.zip")[pack.MANIFEST])["box"] == "1 x simulated NVIDIA H100"
    refused(tmp_path / "box.zip", tmp_path / "records", "GPUs of this run were simulated")
    assert "simulated" in refusal(pack.collect, [run.parent], tmp_path / "records")
    assert not (tmp_path / "records").exists()


@pytest.mark.parametrize("has_record", [False, True])
def test_outcomes_of_simulated_gpus_without_a_result_are_never_kept(has_record, tmp_path):
    runs = tmp_path / "runs"
    if has_record:  # of an interrupted run, which is left out
        run = synthetic.write_run(runs, status="interrupted", study="s").parent
    else:
        run = synthetic.write_outcome(runs, "crashed").parent
    pack.collect([runs], tmp_path / "of-real-gpus")
    synthetic.change(run / "outcome.json", simulated_gpus=True)
    assert "simulated" in refusal(pack.collect, [runs], tmp_path / "records")
    assert not (tmp_path / "records").exists()


def test_results_of_benchmarks_on_simulated_gpus_are_never_merged(runs, tmp_path):
    result = runs / "throughput.json"
    result.write_text(json.dumps({"benchmark": "b", "machine": {"environment": {SIMULATED_GPUS: "{}"}}}))
    pack.pack([runs], tmp_path / "box.zip")
    refused(tmp_path / "box.zip", tmp_path / "records", "throughput.json: the GPUs of this run were simulated")


def test_no_committed_record_is_of_a_simulated_gpu():
    for path in (ROOT / "reports").rglob("records/**/*.jsonl.gz"):
        text = gzip.decompress(path.read_bytes())
        assert SIMULATED_GPUS.encode() not in text, path
        assert b'"simulated_gpus":true' not in text.replace(b" ", b""), path
