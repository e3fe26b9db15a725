"""Do the tables say what the records say? From a few real records, without torch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import synthetic

from study import files
from study.compare import losses, markdown, model_states, parity, peaks
from study.errors import Refusal
from study.records import collect, schema
from study.records import find as records

FIXTURES = Path(__file__).parent / "fixtures" / "records"


@pytest.fixture
def folder(tmp_path) -> Path:
    """A copy of the collected records, to be changed."""
    return Path(shutil.copytree(FIXTURES, tmp_path / "records"))


@pytest.fixture
def runs(tmp_path) -> Path:
    """The same records as run directories."""
    for path in sorted(FIXTURES.glob("*.json")):
        run_dir = tmp_path / "runs" / path.stem
        run_dir.mkdir(parents=True)
        shutil.copy(path, run_dir / "record.json")
        shutil.copy(path.with_name(f"{path.stem}.steps.jsonl"), run_dir / "steps.jsonl")
        (run_dir / "config.json").write_text("{}\n")
    return tmp_path / "runs"


def change(path: Path, **facts) -> None:
    """Change facts of a record; a dict changes what is in it."""
    content = json.loads(path.read_text())
    for name, value in facts.items():
        content[name] = {**content[name], **value} if isinstance(value, dict) else value
    path.write_text(json.dumps(content))


def change_steps(path: Path, number: int, **values) -> None:
    """Change one step of a record, and the digest with it."""
    steps = schema.steps_path(path)
    lines = [json.loads(line) for line in steps.read_text().splitlines()]
    lines[number - 1].update(values)
    steps.write_text("".join(json.dumps(line) + "\n" for line in lines))
    change(path, steps_sha256=files.sha256(steps), final_loss=lines[-1]["loss"])


def rows(page: str, name: str) -> list[list[str]]:
    """The cells of a page's rows that begin with a name."""
    split = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("|")
    ]
    return [cells for cells in split if cells[0] == name]


# --- model states


def test_model_states_by_hand():
    """1,527,938 parameters on two ranks; the numbers are the records' bytes divided by that."""
    page = model_states.table([FIXTURES])
    stepping, resting = rows(page, "ddp")
    assert stepping[1:7] == ["4.000", "4.000", "8.000", "16.000", "16.000", "1.000"]
    assert resting[1:7] == ["4.000", "0.000", "8.000", "12.000", "12.000", "1.000"]
    assert stepping[7].startswith("4.000 (0.000) [")
    assert stepping[8] == "1.250"  # 20 / 16
    stepping = next(row for row in rows(page, "zero2") if row[1] == "4.000")
    assert stepping[2] == "2.000"
    assert stepping[3].startswith("6.000 (4.000) [")  # 12 / 2 beside 8 / 2
    assert stepping[4:7] == ["12.000", "10.000", "1.200"]
    assert stepping[7].startswith("0.750 to 3.990 (0.000) [")  # 1,146,104 and 6,097,160 bytes
    assert stepping[8] == "1.599"  # (6,111,760 + 3,055,880 + 9,167,648 + 6,097,160) / (10 x 1,527,938)


def test_buckets_that_were_computed_are_named(folder):
    """In records from before the proof told DDP's buckets, which those of the fixtures are."""
    said = "DDP's buckets are computed from the parameters, not measured, in these runs, which are older than that "
    for view in (model_states, peaks):
        assert f"{said}measurement: auto-ddp" in view.table([folder])
    for path in folder.glob("*.json"):
        if path.name.count(".") == 1 and (proof := json.loads(path.read_text())["proof"]):
            change(path, proof=proof | {"gradient_as_bucket_view": False})
    for view in (model_states, peaks):
        assert "computed" not in view.table([folder])


def test_model_states_gives_each_number_its_reason():
    page = model_states.table([FIXTURES])
    body, _, reasons = page.partition("## Reasons")
    used = {int(number) for number in body.replace("[", "]").split("]") if number.isdigit()}
    listed = [line.partition(". ")[0] for line in reasons.splitlines() if line[:1].isdigit()]
    assert used == set(map(int, listed)) == set(range(1, len(listed) + 1))
    assert "*unexplained*" not in body[body.index("## ") :]


def test_model_states_flags_what_it_cannot_explain(folder):
    path = folder / "auto-ddp.json"
    states = json.loads(path.read_text())["model_state_bytes"]
    states[1]["gradients"] += 100_000
    change(path, model_state_bytes=states)
    stepping, _ = rows(model_states.table([folder]), "ddp")
    assert stepping[2] == "4.000 to 4.065 (4.000) *unexplained*"
    assert stepping[7].startswith("4.000 (0.000) [")


def test_model_states_of_an_unknown_model_are_not_explained(folder):
    change(folder / "auto-ddp.json", num_params=1_527_939)
    stepping, _ = rows(model_states.table([folder]), "ddp")
    assert stepping[7] == "4.000 (0.000) *unexplained*"


def test_model_states_of_one_strategy_that_differ_have_a_row_each(folder):
    other = folder / "other.json"
    shutil.copy(folder / "auto-ddp.json", other)
    shutil.copy(folder / "auto-ddp.steps.jsonl", folder / "other.steps.jsonl")
    change(other, run_id="other")
    assert len(rows(model_states.table([folder]), "ddp")) == 2  # equal bytes: one row, at two moments
    states = json.loads(other.read_text())["model_state_bytes"]
    states[0]["parameters"] += 1
    change(other, model_state_bytes=states)
    page = model_states.table([folder])
    assert (len(rows(page, "ddp")), len(rows(page, "auto-ddp")), len(rows(page, "other"))) == (0, 2, 2)


def test_runs_without_a_result_are_named(folder):
    content = json.loads((folder / "auto-ddp.json").read_text())
    content |= {"status": "out_of_memory", "failure": {"step": 1, "error": "out of memory"}, "model_state_bytes": None}
    (folder / "auto-ddp.json").write_text(json.dumps(content))
    change(folder / "auto-zero0.json", model_state_bytes=None)
    page = model_states.table([folder])
    assert "- auto-ddp: out_of_memory" in page
    assert "Not measured (`--no-measure`): auto-zero0." in page
    assert "- auto-ddp: out_of_memory" in parity.table([folder])


def test_pages_name_the_command_without_this_machines_folders(monkeypatch, tmp_path):
    monkeypatch.chdir(FIXTURES.parent.parent)
    for absolute in (model_states.table([FIXTURES]), parity.table([FIXTURES])):
        assert absolute.splitlines()[-1].endswith(" fixtures/records`.")
        assert str(FIXTURES.parent.parent) not in absolute
    monkeypatch.chdir(tmp_path)
    assert markdown.command("parity", [Path("/somewhere/else/records")]) == "zero-study parity records"


# --- parity


def test_losses_by_hand(folder):
    path = folder / "auto-ddp.json"
    change(path, evaluation=[{"step": 8.0, "loss": 0.5, "accuracy": 0.75}])
    for number, value in enumerate((1.0, 3.0, 9.0, 9.0, 9.0, 9.0, 4.0, 6.0), 1):  # a third of eight steps is two
        change_steps(path, number, loss=value)
    page = losses.table([folder])
    ddp = next(row for row in rows(page, "ddp") if row[1:4] == ["2", "0", "8"])
    assert ddp[4:7] == ["2.000", "5.000", "accuracy 0.750"]


def test_parity_with_ddp():
    page = parity.table([FIXTURES])
    assert rows(page, "auto-ddp")[0][2] == "(the reference)"
    zero0 = rows(page, "auto-zero0")[0]
    assert zero0[1:4] == ["2 x 4", "auto-ddp", "0.0e+00"]
    assert zero0[7:] == ["identical", "differ", "yes"]
    assert rows(page, "auto-zero2")[0][-1] == "**no**"


def test_parity_by_hand(folder):
    """A loss 1 % off in one step of eight, a sum 0.5 % off at the end, everything else equal."""
    reference, path = folder / "auto-ddp.json", folder / "auto-zero0.json"
    shutil.copy(schema.steps_path(reference), schema.steps_path(path))
    loss = schema.read_steps(reference)[2]["loss"]
    change_steps(path, 3, loss=loss * 1.01)
    final = json.loads(reference.read_text())["final_parameters"]
    change(path, final_parameters=final | {"square_sum": final["square_sum"] * 0.995})
    assert rows(parity.table([folder]), "auto-zero0")[0][2:] == [
        "auto-ddp", "1.0e-02", "0.0e+00", "0.0e+00", "5.0e-03", "identical", "identical", "**no**"
    ]  # fmt: skip


def test_a_norm_that_only_one_run_has_is_unknown(folder):
    change_steps(folder / "auto-zero0.json", 2, grad_norm=None)
    row = rows(parity.table([folder]), "auto-zero0")[0]
    assert (row[4], row[-1]) == ("unknown", "**no**")
    change_steps(folder / "auto-ddp.json", 2, grad_norm=None)  # now both skipped that step
    assert rows(parity.table([folder]), "auto-zero0")[0][-1] == "yes"


def test_with_dropout_another_micro_batch_is_not_comparable():
    page = parity.table([FIXTURES])
    assert rows(page, "bf16-zero1-acc")[0][1:3] == ["2 x 2", "not comparable: dropout is on and micro batch 2, there 4"]
    assert rows(page, "bf16-zero2")[0][2] == "(the reference)"
    assert rows(page, "bf16-zero3")[0][2] == "bf16-zero2"


def test_without_dropout_every_cut_of_the_batch_is_comparable(folder):
    for path in folder.glob("bf16-*.json"):
        change(path, config={"dropout": 0.0})
    page = parity.table([folder])
    assert rows(page, "bf16-zero1-acc")[0][2] == "(the reference)"
    assert {rows(page, f"bf16-zero{stage}")[0][2] for stage in (2, 3)} == {"bf16-zero1-acc"}


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 1, "config": {"seed": 1}},
        {"config": {"learning_rate": 1e-4}},
        {"data": {"digest": "another"}},
        {"machine": {"cpu": "another"}},
    ],
)
def test_what_trains_something_else_is_not_compared(folder, other):
    change(folder / "auto-zero0.json", **other)
    assert "Nothing to compare with: auto-zero0." in parity.table([folder])


@pytest.mark.parametrize("name", ["output_dir", "data_dir", "swap_dir"])
def test_where_a_run_reads_and_writes_does_not_matter(folder, name):
    change(folder / "auto-zero0.json", config={name: "elsewhere"})
    assert rows(parity.table([folder]), "auto-zero0")[0][2] == "auto-ddp"


def test_steps_that_are_not_the_runs_own_are_refused(folder):
    steps = folder / "auto-zero0.steps.jsonl"
    steps.write_text(steps.read_text().replace('"step": 1,', '"step": 1 ,'))
    with pytest.raises(
        Refusal, match=r"auto-zero0\.steps\.jsonl: not the file that steps_sha256 in .*auto-zero0\.json"
    ):
        parity.table([folder])
    steps.unlink()
    with pytest.raises(Refusal, match=r"auto-zero0\.steps\.jsonl: not there"):
        parity.table([folder])


def test_runs_of_another_length_are_refused(folder):
    path = folder / "auto-zero0.json"
    steps = schema.steps_path(path)
    steps.write_text("".join(steps.read_text().splitlines(keepends=True)[:-1]))
    last = schema.read_steps(path)[-1]["loss"]
    change(path, steps_sha256=files.sha256(steps), steps_done=7, final_loss=last)
    with pytest.raises(Refusal, match=r"auto-zero0\.json: 7 steps, .*auto-ddp\.json has 8"):
        parity.table([folder])


# --- where records are


def test_run_directories_and_collected_records_give_the_same_page(runs, folder):
    for make in (model_states.table, parity.table):
        assert make([runs]).splitlines()[:-1] == make([folder]).splitlines()[:-1]
    assert len(records.find([runs, folder])) == len(records.find([folder]))  # each run once


@pytest.mark.parametrize(
    ("facts", "key"), [({"world_size": "two"}, "world_size"), ({"proof": {"zero_stag": 2}}, "zero_stag")]
)
def test_a_malformed_record_is_refused_with_file_and_key(folder, facts, key):
    change(folder / "auto-ddp.json", **facts)
    with pytest.raises(Refusal, match=rf"auto-ddp\.json.*{key}"):
        model_states.table([folder])


def test_a_record_without_its_schema_version_is_refused(folder):
    content = json.loads((folder / "auto-ddp.json").read_text())
    del content["schema_version"]
    (folder / "auto-ddp.json").write_text(json.dumps(content))
    with pytest.raises(Refusal, match=r"auto-ddp\.json: schema_version None"):
        parity.table([folder])


def test_other_json_is_left_alone_and_broken_json_is_not(folder):
    (folder / "summary.json").write_text('{"title": "no record"}')
    model_states.table([folder])
    (folder / "cut.json").write_text('{"schema_version": 1,')
    with pytest.raises(Refusal, match=r"cut\.json: cannot be read as JSON"):
        model_states.table([folder])


def test_nothing_to_read_is_refused(tmp_path):
    with pytest.raises(Refusal, match="no record below"):
        model_states.table([tmp_path])
    with pytest.raises(Refusal, match="missing: no such folder"):
        parity.table([tmp_path / "missing"])


# --- collect


def test_collect_copies_records_and_steps(runs, tmp_path, capsys):
    target = tmp_path / "reports" / "records"
    num_runs = len(list(FIXTURES.glob("*.json")))
    assert collect.collect(runs, target) == num_runs
    assert {p.name: p.read_bytes() for p in target.iterdir()} == {p.name: p.read_bytes() for p in FIXTURES.iterdir()}
    assert f"copied {target / 'auto-ddp.steps.jsonl'}" in capsys.readouterr().out
    assert collect.collect(runs, target) == num_runs
    assert "copied" not in capsys.readouterr().out  # the same bytes: kept


def test_collect_does_not_overwrite_another_record(runs, tmp_path):
    target = tmp_path / "records"
    collect.collect(runs, target)
    change(runs / "auto-zero2" / "record.json", wall_seconds=1.0)
    before = (target / "auto-zero2.json").read_bytes()
    with pytest.raises(Refusal, match=r"auto-zero2\.json and .*record\.json differ"):
        collect.collect(runs, target)
    assert (target / "auto-zero2.json").read_bytes() == before


def test_collect_refuses_two_runs_of_one_name_and_copies_none(runs, tmp_path):
    shutil.copytree(runs / "auto-ddp", runs / "zzz")
    change(runs / "zzz" / "record.json", wall_seconds=1.0)
    with pytest.raises(Refusal, match="differ"):
        collect.collect(runs, tmp_path / "records")
    assert not (tmp_path / "records").exists()


def test_collect_checks_the_steps(runs, tmp_path):
    (runs / "auto-ddp" / "steps.jsonl").write_text("")
    with pytest.raises(Refusal, match="not the file that steps_sha256"):
        collect.collect(runs, tmp_path / "records")


def test_collect_needs_a_finished_run(tmp_path):
    with pytest.raises(Refusal, match="no finished run below"):
        collect.collect(tmp_path, tmp_path / "records")


def test_collect_keeps_outcomes_also_of_runs_without_a_record(tmp_path, capsys):
    runs, target = tmp_path / "runs", tmp_path / "records"
    done = synthetic.write_run(runs, seed=1, study="s", run_dir=True)
    skipped = synthetic.write_outcome(runs, "skipped", seed=2, run_dir=True)
    assert collect.collect(runs, target) == 2
    names = sorted(path.name for path in target.iterdir())
    one, two = done.parent.name, skipped.parent.name
    assert names == sorted([f"{one}.json", f"{one}.steps.jsonl", f"{one}.outcome.json", f"{two}.outcome.json"])
    assert (target / f"{one}.outcome.json").read_bytes() == (done.parent / "outcome.json").read_bytes()
    assert (target / f"{two}.outcome.json").read_bytes() == skipped.read_bytes()
    assert capsys.readouterr().out.count("copied") == 4


def test_collect_replaces_the_outcome_of_a_run_that_has_a_result_now(tmp_path, capsys):
    runs, target = tmp_path / "runs", tmp_path / "records"
    skipped = synthetic.write_outcome(runs, "skipped", run_dir=True)
    collect.collect(runs, target)
    collected = target / f"{skipped.parent.name}.outcome.json"
    synthetic.write_outcome(runs, "killed", run_dir=True)  # tried, and still no record
    collect.collect(runs, target)
    assert json.loads(collected.read_text())["status"] == "killed"
    synthetic.write_run(runs, study="s", run_dir=True)
    collect.collect(runs, target)
    assert json.loads(collected.read_text())["status"] == "ok"
    assert capsys.readouterr().out.count(f"replaced {collected}") == 2
    # From now on there is a record, and nothing of the run is replaced.
    change(skipped, message="another")
    with pytest.raises(Refusal, match=r"outcome\.json and .*outcome\.json differ"):
        collect.collect(runs, target)
    assert json.loads(collected.read_text())["message"] == "ok"


def test_collect_does_not_put_an_outcome_beside_another_runs_record(tmp_path):
    target = tmp_path / "records"
    synthetic.write_run(tmp_path / "here", run_dir=True)
    synthetic.write_outcome(tmp_path / "there", "skipped", run_dir=True)
    collect.collect(tmp_path / "here", target)
    before = sorted(path.name for path in target.iterdir())
    with pytest.raises(Refusal, match=r"records/.*\.json and .*there/.*outcome\.json differ"):
        collect.collect(tmp_path / "there", target)
    with pytest.raises(Refusal, match=r"here/.*record\.json and .*there/.*outcome\.json differ"):
        collect.collect(tmp_path, tmp_path / "other")
    assert sorted(path.name for path in target.iterdir()) == before


def test_collect_leaves_interrupted_runs_out_and_says_so(tmp_path, capsys):
    runs, target = tmp_path / "runs", tmp_path / "records"
    path = synthetic.write_run(runs, status="interrupted", run_dir=True)
    with pytest.raises(Refusal, match="no finished run below"):
        collect.collect(runs, target)
    assert f"left out {path}: interrupted" in capsys.readouterr().out
    synthetic.write_outcome(runs, "timed_out", run_dir=True)  # what the runner saw of it is a fact
    assert collect.collect(runs, target) == 1
    assert [path.name for path in target.iterdir()] == [f"{path.parent.name}.outcome.json"]


def test_collect_checks_that_record_and_outcome_belong_together(tmp_path):
    path = synthetic.write_run(tmp_path, study="s", run_dir=True).with_name("outcome.json")
    change(path, run_id="another")
    with pytest.raises(Refusal, match=r"outcome\.json: run_id another, .*record\.json has gpt-wikitext-tiny-zero2"):
        collect.collect(tmp_path, tmp_path / "records")
    path.with_name("record.json").unlink()
    with pytest.raises(Refusal, match=r"outcome\.json: status ok, but no record is beside it"):
        collect.collect(tmp_path, tmp_path / "records")
    change(path, position="first")
    with pytest.raises(Refusal, match=r"outcome\.json: position='first'"):
        collect.collect(tmp_path, tmp_path / "records")
    change(path, schema_version=0)
    with pytest.raises(Refusal, match=r"outcome\.json: schema_version 0"):
        collect.collect(tmp_path, tmp_path / "records")
    assert not (tmp_path / "records").exists()


def test_collect_that_is_cut_off_is_completed_by_the_next(tmp_path, monkeypatch):
    runs, target = tmp_path / "runs", tmp_path / "records"
    path = synthetic.write_run(runs, study="s", run_dir=True)
    replace, left = os.replace, [2]

    def fail_at_the_third(source: Path, to: Path) -> None:
        if not left[0]:
            raise OSError(28, "No space left on device")
        left[0] -= 1
        replace(source, to)

    monkeypatch.setattr(os, "replace", fail_at_the_third)
    with pytest.raises(OSError, match="No space left"):
        collect.collect(runs, target)
    name = path.parent.name
    assert {path.name for path in target.iterdir()} == {f"{name}.steps.jsonl", f"{name}.outcome.json"}  # record last
    monkeypatch.undo()
    collect.collect(runs, target)
    assert (target / f"{name}.json").read_bytes() == path.read_bytes()


@pytest.mark.launches
def test_nothing_here_imports_torch():
    program = (
        "import sys; from study.compare import model_states, parity; from study.records import collect; "
        "print(sorted({'torch', 'accelerate', 'deepspeed', 'transformers', 'pandas'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("path", sorted(FIXTURES.iterdir()), ids=lambda path: path.name)
def test_fixtures_name_no_folder_of_a_machine(path):
    text = path.read_text()
    assert not [start for start in ('"/', "/home/", "/root/", "/tmp/") if start in text]
