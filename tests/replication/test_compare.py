"""Test that the tables of `compare` show what the records contain. Uses a few real records and no torch."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import statistics
from pathlib import Path

import launching
import pytest
import synthetic
from refusing import refusal
from test_parity import CLIPPED
from test_table import LOAD

from study.compare import acceptance, differences, memory_views, parity, summary, view
from study.records import find as records
from study.records import pack, schema
from study.records.steps import read_steps, steps_of
from zero_study import files
from zero_study.errors import Refusal
from zero_study.verdict import Verdict

FIXTURES = Path(__file__).parents[1] / "fixtures" / "records"


def num_runs(verdict: Verdict) -> int:
    """The number of runs that a command packed, collected or merged."""
    return next(each.number for each in verdict.checked if each.noun == "run")


@pytest.fixture
def folder(tmp_path) -> Path:
    """A copy of the run directories, to be changed."""
    return Path(shutil.copytree(FIXTURES, tmp_path / "records"))


def rows(page: str, name: str) -> list[list[str]]:
    """The cells of a page's rows that begin with a name."""
    table = [line.strip("|").split("|") for line in page.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in cells] for cells in table if cells[0].strip() == name]


def test_model_states_by_hand():
    """1,527,938 parameters on two ranks; the numbers are the records' bytes divided by that."""
    page = memory_views.MODEL_STATES.page([FIXTURES])
    stepping, resting = rows(page, "ddp")
    assert stepping[1:7] == ["16.000", "16.000", "1.000", "4.000", "4.000", "8.000"]
    assert resting[1:7] == ["12.000", "12.000", "1.000", "4.000", "0.000", "8.000"]
    assert stepping[7].startswith("4.000 (0.000) [")
    assert stepping[8] == "1.250"  # 20 / 16
    stepping = next(row for row in rows(page, "zero2") if row[4] == "4.000")
    assert stepping[5] == "2.000"
    assert stepping[6].startswith("6.000 (4.000) [")  # 12 / 2 beside 8 / 2
    assert stepping[1:4] == ["12.000", "10.000", "1.200"]
    assert stepping[7].startswith("0.750 to 3.990 (0.000) [")  # 1,146,104 and 6,097,160 bytes
    assert stepping[8] == "1.599"  # (6,111,760 + 3,055,880 + 9,167,648 + 6,097,160) / (10 x 1,527,938)
    body, _, reasons = page.partition("## Reasons")  # each number has its own
    listed = [set(re.findall(form, reasons, re.M)) for form in (r"^- (r\d+): ", r"^\[(r\d+)\]: #reasons$")]
    assert listed == [set(re.findall(r"\[(r\d+)\]", body))] * 2
    assert "*unexplained*" not in body[body.index("## ") :]


def test_buckets_that_were_computed_are_named(folder):
    """In records from before the proof told DDP's buckets, which those of the fixtures are."""
    for table in (memory_views.MODEL_STATES, memory_views.PEAKS):
        assert "buckets were not measured" in table.page([folder])
    for path in folder.glob("*/record.json"):
        synthetic.change(path, proof={"gradient_as_bucket_view": False})
    for table in (memory_views.MODEL_STATES, memory_views.PEAKS):
        assert "computed" not in table.page([folder])


def test_model_states_flags_what_it_cannot_explain(folder):
    path = folder / "auto-ddp" / "record.json"
    states = json.loads(path.read_text())["model_state_bytes"]
    states[1]["gradients"] += 100_000
    synthetic.change(path, model_state_bytes=states)
    stepping, _ = rows(memory_views.MODEL_STATES.page([folder]), "ddp")
    assert stepping[5] == "4.000 to 4.065 (4.000) *unexplained*"
    assert stepping[7].startswith("4.000 (0.000) [")
    synthetic.change(path, num_params=1_527_939)  # an unknown model
    stepping, _ = rows(memory_views.MODEL_STATES.page([folder]), "ddp")
    assert stepping[7] == "4.000 (0.000) *unexplained*"


def test_model_states_of_one_strategy_that_differ_have_a_row_each(folder):
    other = shutil.copytree(folder / "auto-ddp", folder / "other") / "record.json"
    synthetic.change(other, run_id="other")
    assert len(rows(memory_views.MODEL_STATES.page([folder]), "ddp")) == 2  # equal bytes: one row, at two moments
    states = json.loads(other.read_text())["model_state_bytes"]
    states[0]["parameters"] += 1
    synthetic.change(other, model_state_bytes=states)
    page = memory_views.MODEL_STATES.page([folder])
    assert [len(rows(page, name)) for name in ("ddp", "auto-ddp", "other")] == [0, 2, 2]


def test_runs_without_a_result_are_named(folder):
    failed = {"status": "out_of_memory", "failure": {"step": 1, "error": "out of memory"}}
    synthetic.change(folder / "auto-ddp" / "record.json", **failed, model_state_bytes=None)
    synthetic.change(folder / "auto-zero0" / "record.json", model_state_bytes=None)
    page = memory_views.MODEL_STATES.page([folder])
    assert "- auto-ddp: out_of_memory" in page
    assert "Not measured (`--no-measure`): auto-zero0." in page
    assert "- auto-ddp: out_of_memory" in parity.PARITY.page([folder])


def test_pages_name_the_command_without_this_machines_folders(monkeypatch, tmp_path):
    monkeypatch.chdir(FIXTURES.parent.parent)
    assert str(FIXTURES.parent.parent) not in memory_views.MODEL_STATES.page([FIXTURES]) + parity.PARITY.page(
        [FIXTURES]
    )
    monkeypatch.chdir(tmp_path)
    assert view.command("parity", [Path("/somewhere/else/records")]) == "zero-study parity records"


def test_losses_by_hand(folder):
    path = folder / "auto-ddp" / "record.json"
    synthetic.change(path, evaluation=[{"step": 8.0, "loss": 0.5, "accuracy": 0.75}])
    for number, value in enumerate((1.0, 3.0, 9.0, 9.0, 9.0, 9.0, 4.0, 6.0), 1):  # a third of eight steps is two
        synthetic.change_step(path, number, loss=value)
    page = parity.PARITY.page([folder])
    ddp = next(row for row in rows(page, "ddp") if row[1:3] + row[6:7] == ["2", "0", "8"])
    assert ddp[3:6] == ["accuracy 0.750", "2.000", "5.000"]


def test_parity_by_hand(folder):
    """A loss 1 % off in one step of eight, a sum 0.5 % off at the end, everything else equal."""
    reference, path = folder / "auto-ddp" / "record.json", folder / "auto-zero0" / "record.json"
    shutil.copy(reference.with_name("steps.jsonl"), path.with_name("steps.jsonl"))
    loss = read_steps(reference)[2]["loss"]
    synthetic.change_step(path, 3, loss=loss * 1.01)
    final = json.loads(reference.read_text())["final_parameters"]
    synthetic.change(path, final_parameters=final | {"square_sum": final["square_sum"] * 0.995, "sha256": "f" * 64})
    page = parity.PARITY.page([folder])
    assert rows(page, "auto-ddp")[0][1] == "(the reference)"
    assert rows(page, "auto-zero0")[0][1:] == [
        "**no**", "1.0e-02", "0.0e+00", "5.0e-03", "identical, differ", "2 x 4", "auto-ddp"
    ]  # fmt: skip


def test_a_run_that_different_code_trained_is_marked_and_is_no_reference(folder):
    """As after --resume-with-other-code: the sound run is not called different for it."""
    reference, path = folder / "auto-ddp" / "record.json", folder / "auto-zero0" / "record.json"
    parts = [{"commit": each * 40, "is_dirty": each == "b", "sha256": each * 64} for each in "ab"]
    synthetic.change(reference, code=parts)
    page = parity.PARITY.page([folder])
    assert rows(page, "auto-zero0")[0][1] == "(the reference)"
    assert rows(page, "auto-ddp (mixed code)")[0][-1] == "auto-zero0"
    for created in (page, summary.table([folder]), memory_views.MODEL_STATES.page([folder])):
        assert "parts of it were trained by different code (aaaaaaa, then bbbbbbb-dirty)" in created
    assert re.search(r"^ddp \(mixed code\) ", summary.table([folder]), re.MULTILINE)
    assert f"{'b' * 40}-dirty" in schema.read(reference.parent).commits
    synthetic.change(path, code=parts[:1])
    assert "auto-zero0 (mixed code)" not in parity.PARITY.page([folder])


def test_a_norm_that_only_one_run_has_is_unknown(folder):
    synthetic.change_step(folder / "auto-zero0" / "record.json", 2, grad_norm=None)
    row = rows(parity.PARITY.page([folder]), "auto-zero0")[0]
    assert (row[3], row[1]) == ("unknown", "**no**")
    synthetic.change_step(folder / "auto-ddp" / "record.json", 2, grad_norm=None)  # now both skipped that step
    assert rows(parity.PARITY.page([folder]), "auto-zero0")[0][1] == "yes"


def test_with_dropout_another_micro_batch_is_not_comparable(folder):
    page = parity.PARITY.page([folder])
    assert rows(page, "bf16-zero1-acc")[0][6] == "2 x 2"
    assert rows(page, "bf16-zero1-acc")[0][7].startswith("dropout is on, and runs with micro batches of 2 and 4")
    assert rows(page, "bf16-zero2")[0][1] == "(the reference)"
    assert rows(page, "bf16-zero3")[0][-1] == "bf16-zero2"
    for path in folder.glob("bf16-*/record.json"):  # without dropout every cut of the batch is comparable
        synthetic.change(path, config={"dropout": 0.0})
    page = parity.PARITY.page([folder])
    assert rows(page, "bf16-zero1-acc")[0][1] == "(the reference)"
    assert {rows(page, f"bf16-zero{stage}")[0][-1] for stage in (2, 3)} == {"bf16-zero1-acc"}


@pytest.mark.parametrize(
    "other",
    [{"seed": 1, "config": {"seed": 1}}, {"config": {"learning_rate": 1e-4}}, {"data": {"digest": "another"}},
     {"machine": {"cpu": "another"}}],
)  # fmt: skip
def test_what_trains_something_else_is_not_compared(folder, other):
    for run in ("auto-zero0", "auto-ddp"):  # where a run reads and writes, or that its start is named, does not matter
        synthetic.change(folder / run / "record.json", config={"data": "files", "data_dir": "here"})
    path = folder / "auto-zero0" / "record.json"
    for name in ("output_dir", "data_dir", "swap_dir"):
        synthetic.change(path, config={name: "elsewhere", "init": "scratch"})
        assert rows(parity.PARITY.page([folder]), "auto-zero0")[0][-1] == "auto-ddp"
    synthetic.change(path, **other)
    (alone,) = re.findall("no run to compare with: (.*)", parity.PARITY.page([folder]))
    assert "auto-zero0" in alone


@pytest.mark.parametrize(
    "name",
    ["tf32", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_CBWR",
     "NVIDIA_TF32_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "NCCL_ALGO"],
)  # fmt: skip
def test_what_was_computed_with_another_arithmetic_is_not_compared(folder, name):
    """The reason names it, in every view that says why."""
    before = parity.PARITY.page([folder])
    path = folder / "auto-zero0" / "record.json"
    synthetic.change(path, machine={"environment": {"MALLOC_ARENA_MAX": "2"}})
    assert parity.PARITY.page([folder]) == before
    synthetic.change(path, machine={"tf32": True} if name == "tf32" else {"environment": {name: "True"}})
    assert f"no run to compare with: auto-zero0 with {name}=True." in parity.PARITY.page([folder])
    assert f"{name} True against None" in differences.page([folder], "ddp")


def test_runs_of_another_length_are_refused(folder):
    path = folder / "auto-zero0" / "record.json"
    steps = path.with_name("steps.jsonl")
    steps.write_text("".join(steps.read_text().splitlines(keepends=True)[:-1]))
    last = read_steps(path)[-1]["loss"]
    synthetic.change(path, steps_sha256=files.sha256(steps), steps_done=7, final_loss=last)
    with pytest.raises(Refusal, match=r"auto-zero0/record\.json has 7 steps, .*auto-ddp/record\.json has 8"):
        parity.PARITY.page([folder])


def test_steps_of_another_run_are_refused_although_no_digest_names_them(folder):
    file = records.find([folder])[0]
    assert steps_of(file)
    for change in ({"final_loss": 9.0}, {"steps_done": 7}):
        changed = file._replace(record=file.record.model_copy(update=change))
        with pytest.raises(Refusal, match="Restore the files, or repeat the run"):
            steps_of(changed)


def held(folder: Path, name: str) -> dict[str, dict]:
    """What the lines of a file say, by run id."""
    return {run_id: json.loads(line) for run_id, line in records.read_lines(folder / name).items()}


def test_a_run_that_is_made_again_replaces_its_lines_alone(tmp_path, capsys):
    runs, target = tmp_path / "runs", tmp_path / "records"
    for seed in range(3):
        path = synthetic.write_run(runs, seed=seed, study="s")
    pack.collect([runs], target)
    before = {path.stem: list(records.read_lines(target / path.stem).values()) for path in target.iterdir()}
    shutil.rmtree(runs)
    synthetic.write_run(runs, seed=2, study="s", seconds=2.0)
    capsys.readouterr()
    assert num_runs(pack.collect([runs], target)) == 1
    assert capsys.readouterr().out == f"replaced {path.parent.name}\n"
    for name, lines in before.items():
        after = list(records.read_lines(target / name).values())
        assert (after[:2], after[2] != lines[2], len(after)) == (lines[:2], True, 3)
    shutil.rmtree(runs)
    failed = synthetic.write_run(runs, seed=2, status="failed")  # before its first step, and nobody saw it
    synthetic.change(failed, steps_sha256=None, steps_done=0, final_loss=None)
    pack.collect([runs], target)
    assert [len(held(target, name)) for name in ("records.jsonl", "steps.jsonl", "outcomes.jsonl")] == [3, 2, 2]


def test_steps_that_a_line_would_not_give_back_are_refused(folder, tmp_path):
    """Their digest is of bytes that no run writes."""
    steps = folder / "auto-ddp" / "steps.jsonl"
    steps.write_text(steps.read_text().replace("\n", "\n ", 1).removesuffix("\n"))
    synthetic.change(folder / "auto-ddp" / "record.json", steps_sha256=files.sha256(steps))
    assert "auto-ddp: its steps.jsonl does not have one step per line" in refusal(
        pack.collect, [folder], tmp_path / "out"
    )


@pytest.mark.parametrize("name", ["records.jsonl", "steps.jsonl"])
@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (lambda text: text.replace('{"run_id": ', '{"run": ', 1), "line 1 does not begin with a run_id"),
        (lambda text: text + text.splitlines()[0] + "\n", r"line \d is a duplicate"),
        (lambda text: text.replace("\n", "\n\n", 1), "line 2 does not begin with a run_id"),
    ],
)
def test_a_file_that_is_not_a_line_a_run_is_refused(folder, tmp_path, name, spoil, match):
    target = tmp_path / "collected"
    pack.collect([folder], target)
    packed = target / f"{name}.gz"
    packed.write_bytes(gzip.compress(spoil(gzip.decompress(packed.read_bytes()).decode()).encode()))
    for said in (refusal(parity.PARITY.page, [target]), refusal(pack.collect, [folder], target)):
        assert re.search(rf"collected/{name}: {match}", said)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda content: content[:-9], "truncated"),
        (lambda content: content + b"more", "more data after its end"),
        (lambda content: b"{}", "no gzip file"),
    ],
)
def test_a_compressed_file_that_is_not_whole_is_refused(folder, tmp_path, spoil, said):
    pack.collect([folder], tmp_path / "collected")
    packed = tmp_path / "collected" / "steps.jsonl.gz"
    packed.write_bytes(spoil(packed.read_bytes()))
    with pytest.raises(Refusal, match=rf"steps\.jsonl\.gz: cannot be read as lines of runs \(.*{said}"):
        parity.PARITY.page([tmp_path / "collected"])


def test_files_from_before_they_were_compressed_are_read_and_replaced(folder, tmp_path):
    target = tmp_path / "collected"
    pack.collect([folder], target)
    whole = parity.PARITY.page([target])
    for packed in list(target.iterdir()):
        packed.with_suffix("").write_bytes(gzip.decompress(packed.read_bytes()))
        with pytest.raises(Refusal, match=r"\.jsonl\.gz is in the same folder and contains the same runs"):
            parity.PARITY.page([target])
        packed.unlink()
    assert parity.PARITY.page([target]) == whole
    for run in folder.glob("*/record.json"):
        synthetic.change(run, wall_seconds=1.0)
    pack.collect([folder], target)
    assert not (target / "records.jsonl").exists()


def test_collect_keeps_outcomes_also_of_runs_without_a_record(tmp_path, capsys):
    runs, target = tmp_path / "runs", tmp_path / "records"
    completed = synthetic.write_run(runs, seed=1, study="s")
    skipped = synthetic.write_outcome(runs, "skipped")
    assert num_runs(pack.collect([runs], target)) == 2
    expected = {
        path.parent.name: json.loads(path.with_name("outcome.json").read_text()) for path in (completed, skipped)
    }
    assert held(target, "outcomes.jsonl") == expected
    assert held(target, "records.jsonl").keys() == held(target, "steps.jsonl").keys() == {completed.parent.name}
    run_id = skipped.parent.name
    synthetic.write_outcome(runs, "killed")  # tried, and still no record
    pack.collect([runs], target)
    assert held(target, "outcomes.jsonl")[run_id]["status"] == "killed"
    synthetic.write_run(runs, study="s")
    pack.collect([runs], target)
    assert held(target, "outcomes.jsonl")[run_id]["status"] == "ok"
    out = capsys.readouterr().out
    assert (out.count("copied"), out.count(f"replaced {run_id}")) == (2, 2)


def test_collect_never_gives_up_a_record_for_an_outcome(tmp_path):
    target = tmp_path / "records"
    synthetic.write_run(tmp_path / "here")
    synthetic.write_outcome(tmp_path / "there", "skipped")
    pack.collect([tmp_path / "here"], target)
    before = {path: path.read_bytes() for path in target.iterdir()}
    for folders, into, first in (
        (tmp_path / "there", target, r"records/records\.jsonl, gpt-.*"),
        (tmp_path, tmp_path / "other", r"here/.*record\.json"),
    ):
        with pytest.raises(Refusal, match=rf"{first} and .*there/.*outcome\.json are different records of one run"):
            pack.collect([folders], into)
    assert {path: path.read_bytes() for path in target.iterdir()} == before


def test_collect_leaves_interrupted_runs_out_and_says_so(tmp_path, capsys):
    runs, target = tmp_path / "runs", tmp_path / "records"
    path = synthetic.write_run(runs, status="interrupted")
    with pytest.raises(Refusal, match="there is no finished run in this folder"):
        pack.collect([runs], target)
    assert f"{path} was left out" in capsys.readouterr().out
    synthetic.write_outcome(runs, "timed_out")  # what the runner saw of it is a fact
    assert num_runs(pack.collect([runs], target)) == 1
    assert [path.name for path in target.iterdir()] == ["outcomes.jsonl.gz"]


def test_collect_checks_that_record_and_outcome_belong_together(tmp_path):
    path = synthetic.write_run(tmp_path, study="s").with_name("outcome.json")
    synthetic.change(path, run_id="another")
    requested = [tmp_path], tmp_path / "records"
    assert "outcome of 'another', but the record in the same folder is 'gpt-" in refusal(pack.collect, *requested)
    assert not (tmp_path / "records").exists()


@pytest.mark.parametrize("num_written", [0, 1, 2])
def test_collect_that_is_cut_off_is_completed_by_the_next(tmp_path, monkeypatch, num_written):
    """Also where it replaces runs: until then what does not belong together is refused."""
    runs, target = tmp_path / "runs", tmp_path / "records"
    synthetic.write_run(runs, study="s")
    pack.collect([runs], target)
    shutil.rmtree(runs)
    synthetic.write_run(runs, study="s", seconds=2.0)
    replace, left = os.replace, [None] * num_written

    def fail_after_some(source: Path, to: Path) -> None:
        if not left:
            raise OSError(28, "No space left on device")
        left.pop()
        replace(source, to)

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", fail_after_some)
        with pytest.raises(OSError, match="No space left"):
            pack.collect([runs], target)
    if num_written:
        with pytest.raises(
            Refusal, match=r"steps\.jsonl, .*: the file was changed: its digest differs from steps_sha256"
        ):  # the record is written last
            steps_of(records.find([target])[0])
    whole = []
    for folder in (target, tmp_path / "whole"):
        pack.collect([runs], folder)
        whole.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert whole[0] == whole[1]


# ---------------------------------------------------------------- pages and what is read at the end of a run


def test_the_page_of_differences(tmp_path):
    for seed in (0, 1, 2):
        synthetic.write_run(tmp_path, strategy="ddp", seed=seed)
        synthetic.write_run(tmp_path, strategy="zero2", seed=seed, loss_shift=0.5)
    synthetic.write_outcome(tmp_path, "killed", strategy="zero3")
    page = differences.page([tmp_path], "ddp")
    losses = rows(page.split("### mean_final_loss")[1].split("###")[0], "zero2")
    assert [(row[2], row[7]) for row in losses] == [("3", "higher")]
    assert losses[0][5].startswith("+")
    assert "zero3: killed (synthetic: killed)" in page.split("## Not compared")[1]
    assert "nan" not in page


def test_runs_without_a_time_are_counted_with_the_reason(tmp_path):
    for strategy in ("ddp", "zero2", "zero3"):
        path = synthetic.write_run(tmp_path, strategy=strategy)
        if strategy != "ddp":
            synthetic.change(path, load=LOAD | {"other_seconds": 9.0})
    (line,) = re.findall("Times are not compared for 2 of 3 runs .*", differences.page([tmp_path], "ddp"))
    assert "5 % of the processors" in line
    lines = summary.table([tmp_path]).splitlines()
    (ddp,), (zero2,) = ([line for line in lines if line.startswith(f"{name}  ")] for name in ("ddp", "zero2"))
    assert ("same" in zero2, "(" in ddp, "(" in zero2) == (True, False, True)  # the time is there, and greyed
    assert "times of 2 runs do not count, because other programs took more than 5 % of the processors" in " ".join(
        lines
    )
    assert max(map(len, lines)) <= 80
    path = synthetic.write_run(tmp_path / "quiet", strategy="ddp")
    assert "Times are not compared" not in differences.page([path.parent], "ddp")


@pytest.mark.parametrize("strategy", ["zero3_nvme_offload", "zero3_" + "x" * 60, "zero3_" + "_".join(["word"] * 15)])
def test_the_short_view_fits_into_80_columns(strategy, tmp_path):
    for name in ("ddp", strategy):
        synthetic.write_run(tmp_path, strategy=name, dropout=0.1, world_size=1 if name == "ddp" else 2)
        synthetic.write_run(tmp_path / "control", strategy=name)
    lines = summary.table([tmp_path]).splitlines()
    assert strategy in "".join(line.split()[0] for line in lines if line)
    assert max(map(len, lines)) <= 80


def _short_rows(text: str) -> dict[str, list[str]]:
    """The rows of the short table by strategy, in words."""
    return {line.split()[0]: line.split() for line in text.splitlines() if re.match(r"(ddp|zero|fsdp)\S*  ", line)}


def test_repeats_share_a_row_with_median_range_and_count(tmp_path):
    """Ratios are those of the medians, and a disturbed time does not count."""
    times = {"ddp": (1.0, 1.2, 9.0), "zero2": (2.4, 2.0, 2.2)}
    written: dict[str, list[float]] = {"ddp": [], "zero2": []}
    for strategy, seconds in times.items():
        for repeat, value in enumerate(seconds):
            seed = repeat % 2
            path = synthetic.write_run(tmp_path, strategy=strategy, seed=seed, repeat=repeat, seconds=value)
            written[strategy].append(schema.read(path.parent).timing.median_seconds)
            if value == 9.0:
                synthetic.change(path, load=LOAD | {"other_seconds": 9.0})
    text = summary.table([tmp_path])
    assert "seeds 0, 1," in text.splitlines()[0]
    table = _short_rows(text)
    assert list(table) == ["ddp", "zero2"]
    assert table["ddp"][1:3] == table["zero2"][1:3] == ["2", "3"]  # ranks, runs
    medians = {"ddp": statistics.mean(written["ddp"][:2]), "zero2": statistics.median(written["zero2"])}
    assert table["ddp"][-1] == f"{medians['ddp']:.3g}"
    assert table["zero2"][-2:] == [f"{medians['zero2']:.3g}", f"{medians['zero2'] / medians['ddp']:.2f}x"]
    assert "same" in table["zero2"]
    for values in (written["ddp"][:2], written["zero2"]):
        assert f" {min(values):.3g}-{max(values):.3g}\n" in text
    assert max(map(len, text.splitlines())) <= 80
    each = summary.table([tmp_path], each=True)
    assert len(re.findall("^(ddp|zero2) ", each, re.MULTILINE)) == 6
    assert "runs" not in each.splitlines()[2]


def test_runs_with_another_batch_have_a_row_of_their_own(tmp_path):
    for micro_batch_size in (2, 4):
        synthetic.write_run(tmp_path, strategy="ddp", micro_batch_size=micro_batch_size)
    rows = summary.table([tmp_path]).partition("\nstrategy ")[2]
    assert re.findall(r"^ddp \(.*?\)", rows, re.MULTILINE) == ["ddp (micro batch 2)", "ddp (micro batch 4)"]


def test_the_losses_of_other_seeds_are_not_compared(tmp_path):
    synthetic.write_run(tmp_path, strategy="ddp", seed=0)
    synthetic.write_run(tmp_path, strategy="zero2", seed=1)
    assert "seeds" in _short_rows(summary.table([tmp_path]))["zero2"]


@pytest.mark.parametrize("control", ["ddp", "zero1"])
def test_the_control_is_named_if_it_is_not_ddp(control, tmp_path):
    for strategy in (control, "zero3"):
        synthetic.write_run(tmp_path, strategy=strategy)
    text = summary.table([tmp_path])
    assert f"vs {control}" in text
    assert ("no DDP run" in text, "compared with zero1 instead" in " ".join(text.split())) == (control != "ddp",) * 2


def test_the_answer_comes_before_the_table(tmp_path):
    for strategy, seconds in (("ddp", 1.0), ("fsdp2", 2.0)):
        synthetic.write_run(tmp_path, strategy=strategy, seconds=seconds)
    answer = " ".join(summary.table([tmp_path]).partition("strategy ")[0].split())
    assert "fsdp2 has the lowest peak: 0." in answer
    assert "ddp has the shortest step." in answer
    assert "All losses are the same as those of ddp." in answer


def test_rows_of_other_numbers_of_ranks_are_not_compared_as_if_they_were_alike(tmp_path):
    ranks = {"single": 1, "fsdp2": 4, "ddp": 2, "zero3": 2, "zero1": 2}
    for strategy, world_size in ranks.items():
        synthetic.write_run(tmp_path, strategy=strategy, world_size=world_size)
    text = summary.table([tmp_path])
    rows = [line.split()[:2] for line in text.splitlines() if re.match(r"(single|ddp|zero|fsdp)\S*  ", line)]
    assert rows == [[name, str(ranks[name])] for name in ("single", "ddp", "zero1", "zero3", "fsdp2")]
    (group,) = summary.content([tmp_path])["groups"]
    content = {row["strategy"]: row for row in group["rows"]}
    ratios = {name: row["peak_ratio_to_control"] for name, row in content.items()}
    assert ratios["fsdp2"] is None
    assert content["fsdp2"]["seconds_ratio_to_control"] is None
    assert None not in (ratios["zero1"], ratios["zero3"], ratios["single"])
    # fsdp2 has the lowest peak, but on more ranks.
    peaks = {name: row["peak_bytes"]["median"] for name, row in content.items()}
    assert min(peaks, key=lambda name: peaks[name]) == "fsdp2"
    least = min((name for name in ranks if ranks[name] == 2), key=lambda name: peaks[name])
    assert f"{least} has the lowest peak with 2 ranks" in " ".join(text.split())
    synthetic.write_run(tmp_path, strategy="ddp", world_size=4)  # nor is a strategy compared with itself
    (group,) = summary.content([tmp_path])["groups"]
    (on_four,) = (row for row in group["rows"] if (row["strategy"], row["num_ranks"]) == ("ddp", 4))
    assert on_four["peak_ratio_to_control"] is on_four["seconds_ratio_to_control"] is None


def test_a_run_that_went_on_with_other_threads_is_listed(tmp_path):
    """It trained other bits, and only a look into its record could have told."""
    path = synthetic.write_run(tmp_path, strategy="zero3")
    synthetic.write_run(tmp_path, strategy="zero2")
    parts = [{"commit": None, "is_dirty": None, "sha256": "a", "processor": "Z80", "num_threads": n} for n in (1, 2)]
    synthetic.change(path, code=parts)
    for page in (summary.table([tmp_path]), parity.PARITY.page([tmp_path])):
        assert "1 threads on Z80, then 2 threads on Z80" in page.split("with other threads or another processor")[1]


@pytest.mark.launches
def test_output_without_a_reader_is_no_error():
    code = """
import os, sys
from zero_study.__main__ import main
reader, writer = os.pipe()
os.dup2(writer, 1)
os.close(reader)
sys.argv = ["zero-study", "compare", "--view", "parity", "reports/cpu/records/smoke"]
main()
"""
    completed = launching.attempt(["python", "-c", code])
    assert (completed.returncode, completed.stderr) == (141, "")


@pytest.mark.launches
@pytest.mark.parametrize(
    ("strategy", "offloads"),
    [
        ("zero3", ""),
        pytest.param(
            "zero3_nvme_offload", "optimizer on nvme, parameters on nvme, ", marks=pytest.mark.slow
        ),  # DeepSpeed's extensions take minutes to build
    ],
)
def test_five_lines_of_a_real_run(strategy, offloads):
    run = launching.run(strategy, **CLIPPED)
    text = summary.of_run(run.run_dir, [["zero-study", "train", "--size", "tiny"], ["zero-study", "compare", "runs"]])
    assert max(len(line) for line in text.splitlines() if "/" not in line) <= 80
    text = re.sub(r"\n {10}", " ", text)
    lines = dict(line.split(maxsplit=1) for line in text.splitlines())
    assert list(lines) == ["verified", "loss", "memory", "sent", "time", "record", "next"]
    assert lines["verified"] == f"{strategy}: DeepSpeed's ZeRO stage 3, {offloads}2 processes on cpu, fp32"
    first, last = run.steps[0]["loss"], run.record.final_loss
    assert lines["loss"].startswith(
        f"{first:.4f} at first, {last:.4f} after 8 steps of synthetic text; on held-out examples: loss "
    )
    fullest = max(rank.model_states for rank in run.record.model_state_bytes) / run.record.num_params
    assert lines["memory"].startswith(f"{fullest:.2f} bytes of model states per parameter")
    assert "(ZeRO paper: 8.00)" in lines["memory"]  # fp32 Adam over two ranks
    assert "(ZeRO paper: 3.00)" in lines["sent"]
    assert lines["time"].endswith(")")
    assert lines["record"] == str(run.run_dir / "record.json")
    assert lines["next"].endswith(": zero-study train --size tiny zero-study compare runs")


@pytest.mark.launches
def test_what_was_not_measured_is_said():
    text = summary.of_run(launching.run("ddp", **CLIPPED, measure=False).run_dir)
    assert text.count("not measured (--no-measure)") == 2


def test_a_run_without_distribution_sends_nothing(tmp_path):
    text = " ".join(summary.of_run(synthetic.write_run(tmp_path, strategy="single", world_size=1).parent).split())
    assert "single: no distribution, 1 process on cpu, fp32" in text
    assert "sent 0.00 times the size of the parameters per step and rank (ZeRO paper: 0.00)" in text


# ---------------------------------------------------------------- what was accepted: passed, failed, not run, and why

GPU = {"workload": "bert-imdb", "world_size": 1, "box": "gpu", "study": "s", "num_steps": 10, "dropout": 0}
GPU |= {"precision": "bf16-autocast"}


def accepted(page: str) -> dict[str, dict[str, str]]:
    """The first table of a page: strategy -> check -> cell."""
    lines = [line for line in page.split("\n## ")[0].splitlines() if line.startswith("|")]
    head, _, *body = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {cells[0].strip("`"): dict(zip(head[1:], cells[1:], strict=True)) for cells in body}


@pytest.fixture
def page(tmp_path) -> str:
    synthetic.write_run(tmp_path, strategy="single", **GPU)
    synthetic.write_run(tmp_path, strategy="ddp", **GPU)
    synthetic.write_run(tmp_path, strategy="zero1", **GPU, loss_shift=0.1)
    synthetic.write_run(tmp_path, strategy="zero2", **GPU | {"precision": "bf16"})
    synthetic.change(synthetic.write_run(tmp_path, strategy="zero3", **GPU, seconds=0.001), energy_joules=None)
    synthetic.write_run(tmp_path, strategy="zero3", **GPU | {"world_size": 2}, share_device=True)
    synthetic.write_run(tmp_path, strategy="zero2_tuned", **GPU, compile=True)
    synthetic.write_run(tmp_path, strategy="zero0", **GPU, status="out_of_memory")
    synthetic.write_run(tmp_path, strategy="zero1_cpu_offload", **GPU | {"seed": 7})
    skipped = {"strategy": "fsdp2", "world_size": 1, "message": "fsdp2 is not for this box"}
    synthetic.write_outcome(tmp_path, "skipped", **skipped)
    return acceptance.page([tmp_path])


def test_what_works_is_ok(page):
    result = accepted(page)
    strategies = "single ddp fsdp2 zero0 zero1 zero1_cpu_offload zero2 zero2_tuned zero3"
    assert list(result) == strategies.split()
    nothing = dict.fromkeys(("fp32", "fp16", "compiled", "shared GPU"), "")
    observed = dict.fromkeys(("NCCL", "energy", "NVML", "batches"), "ok")
    assert result["ddp"] == nothing | {"bf16": "ok", "as single": "ok"} | observed
    assert result["single"] == result["ddp"] | {"as single": "", "NCCL": ""}  # others are held against it
    assert result["zero2"] == result["ddp"]  # 16-bit parameters, against autocast
    assert result["zero2_tuned"] == result["ddp"] | {"compiled": "ok", "bf16": ""}
    assert "\n8 x NVIDIA H200: " in page
    cells = [cell for row in result.values() for cell in row.values()]
    counts = [f"{cells.count(displayed)} {name}" for displayed, name in (("ok", "ok"), ("**failed**", "failed"))]
    assert f"{', '.join(counts)}, {cells.count('not run')} not run." in page
    assert (
        page.partition("## Differences from the loss of `single`")[2].count("\n| bert-imdb-tiny-") == 6
    )  # one of them on two ranks


def test_what_failed_or_was_not_run_says_why(page):
    result = accepted(page)
    assert (result["zero0"]["bf16"], result["zero0"]["as single"]) == ("**failed**", "")
    assert re.search("- failed: bf16 of `zero0`: bert-imdb-tiny-zero0-.*: out_of_memory: synthetic: out_of_", page)
    assert (result["zero1"]["bf16"], result["zero1"]["as single"]) == ("ok", "**failed**")
    assert "but at most 0.01 is allowed" in page
    assert (result["zero3"]["bf16"], result["zero3"]["shared GPU"]) == ("ok", "ok")
    assert (result["zero3"]["energy"], result["zero3"]["batches"]) == ("not run", "**failed**")
    assert result["fsdp2"]["fp32"] == "not run"
    assert "- not run: fp32 of `fsdp2`: fsdp2 is not for this box" in page
    assert result["zero1_cpu_offload"]["as single"] == "not run"  # of another seed
    assert "as single of `zero1_cpu_offload`: there is no finished run of `single` with the same work" in page


def test_what_a_driver_does_not_show_is_no_failure(tmp_path):
    """In most containers, NVML lists no process of the container."""
    path = synthetic.write_run(tmp_path, strategy="single", **GPU)
    ranks = json.loads(path.read_text())["peak_memory"]
    hidden = [{name: {**peak, "process_bytes": None} for name, peak in phases.items()} for phases in ranks]
    synthetic.change(path, peak_memory=hidden, energy_joules=None)
    result = accepted(acceptance.page([tmp_path]))["single"]
    assert (result["bf16"], result["energy"], result["NVML"]) == ("ok", "not run", "not run")


def test_fp32_is_held_to_less_and_another_arithmetic_to_nothing(tmp_path):
    for strategy in ("single", "ddp"):
        synthetic.write_run(tmp_path, strategy=strategy, **GPU | {"precision": "fp32"})  # apart by 2e-4
    synthetic.write_run(tmp_path, strategy="zero1", **GPU | {"precision": "fp32"}, machine={"tf32": True})
    page = acceptance.page([tmp_path])
    assert accepted(page)["ddp"]["as single"] == "**failed**"
    assert "as single of `zero1`: there is no finished run of `single` with the same work with tf32=True" in page


def test_on_a_cpu_nothing_of_a_gpu_is_asked(tmp_path):
    for strategy in ("single", "zero3"):
        synthetic.write_run(tmp_path, strategy=strategy, **GPU | {"precision": "fp32", "box": "cpu"})
    page = acceptance.page([tmp_path])
    result = accepted(page)["zero3"]
    assert (result["fp32"], result["as single"]) == ("ok", "ok")
    assert {result[check] for check in ("NCCL", "energy", "NVML", "batches")} == {"not run"}
    assert "- not run: NCCL, energy, NVML, batches of `single`, `zero3`: on a CPU" in page
