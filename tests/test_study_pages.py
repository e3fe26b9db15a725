"""The pages of a study: every number is a run's, what is unknown says so, and boxes stay apart."""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd
import pytest
from reported import read as text_of
from reported import row_of
from synthetic import write_outcome, write_run

from study.compare import differences, table
from study.compare.expected import with_theory
from study.errors import Refusal
from study.report import figures, markup, run_rows
from study.report import study_pages as pages

METRICS = ["final_loss", "seconds_per_step"]


def write_study(folder: Path, box: str = "cpu", seconds: float = 0.5, **settings) -> Path:
    """Two strategies beside a control with repeats, three seeds."""
    for seed in range(3):
        write_run(folder, strategy="single", world_size=1, seed=seed, box=box, seconds=2 * seconds, **settings)
        for repeat in range(3):
            write_run(folder, strategy="ddp", seed=seed, repeat=repeat, box=box, seconds=seconds, **settings)
        write_run(folder, strategy="zero2", seed=seed, box=box, seconds=1.5 * seconds, **settings)
    return folder


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    return with_theory(table.read([write_study(tmp_path_factory.mktemp("study"), dropout=0.0)]))


@pytest.fixture(scope="module")
def two_boxes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    write_study(folder / "a", "cpu", seconds=0.5, dropout=0.0)
    write_study(folder / "b", "gpu", seconds=0.125, dropout=0.0)
    return with_theory(table.read([folder]))


# ---------------------------------------------------------------- runs


def test_load_filters(tmp_path):
    write_run(tmp_path, workload="bert-imdb", strategy="ddp")
    write_run(tmp_path, workload="gpt-wikitext", strategy="ddp")
    write_run(tmp_path / "gpu", workload="gpt-wikitext", strategy="ddp", box="gpu")
    assert len(run_rows.load([str(tmp_path)])) == 3
    assert set(run_rows.load([str(tmp_path)], workload="bert-imdb")["workload"]) == {"bert-imdb"}
    assert set(run_rows.load([str(tmp_path)], box="8 x NVIDIA H200")["device"]) == {"cuda"}
    with pytest.raises(Refusal, match=r"workload 'gpt' has no run here"):
        run_rows.load([str(tmp_path)], workload="gpt")
    with pytest.raises(Refusal, match=r"box 'A100' has no run here"):
        run_rows.load([str(tmp_path)], box="A100")


def test_load_finds_the_projects_records_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(run_rows.load(["tests/fixtures/records"]))
    (tmp_path / "tests/fixtures/records").mkdir(parents=True)  # now there is one here, and it comes first
    with pytest.raises(Refusal, match="tests/fixtures/records"):
        run_rows.load(["tests/fixtures/records"])


def test_settings_of_the_same_words_are_told_apart(tmp_path):
    for dropout in (0.0, 0.1):
        write_run(tmp_path, strategy="ddp", dropout=dropout)
    words = [block.words for block in run_rows.blocks(table.read([tmp_path]))]
    assert [each.rpartition(", ")[2] for each in words] == ["dropout 0", "dropout 0.1"]


def test_a_run_without_settings_joins_where_it_may_belong(tmp_path):
    write_run(tmp_path, strategy="ddp", workload="bert-imdb")
    write_run(tmp_path, strategy="ddp")
    write_outcome(tmp_path, "skipped", strategy="zero3")
    bert, gpt = run_rows.blocks(table.read([tmp_path]))
    assert list(bert.runs["strategy"]) == ["ddp"]
    assert list(gpt.runs["strategy"]) == ["ddp", "zero3"]


def test_single_stands_beside_every_number_of_processes(study):
    assert [(size, set(runs["strategy"])) for size, runs in run_rows.worlds(study)] == [(2, {"ddp", "single", "zero2"})]
    alone = study[study["strategy"] == "single"]
    assert [(size, len(runs)) for size, runs in run_rows.worlds(alone)] == [(1, 3)]


# ---------------------------------------------------------------- the answer


def test_answer(study):
    shown = pages.answer(study, differences.compare(study, "ddp", METRICS), "ddp")
    assert row_of(shown, "ddp").count("the control") == 2
    assert re.search(r"0\.7\d\d \| slower \+\d\d.*\| no difference ", row_of(shown, "zero2"))
    mine = study[study["strategy"] == "zero2"]
    assert f"{(mine['model_state_bytes'] / mine['num_params']).max():.2f} (" in row_of(shown, "zero2")


def test_what_others_decide_is_told_by_them_alone(study):
    compared = differences.compare(study, "ddp", METRICS)
    assert "held out" not in pages.answer(study, compared, "ddp", with_losses=False)
    assert "seconds per step" not in pages.answer(study, compared, "ddp", with_times=False)


def test_accuracy_has_the_interval_of_its_examples(tmp_path):
    write_study(tmp_path, workload="bert-imdb")
    runs = with_theory(table.read([tmp_path]))
    runs = runs.assign(accuracy=0.77, settings=[{**one, "num_eval_examples": 500} for one in runs["settings"]])
    shown = pages.answer(runs, differences.compare(runs, "ddp", METRICS), "ddp")
    assert "| 0.770 0.731 to 0.805, of 500 |" in row_of(shown, "zero2")  # +-3.7 points


def test_what_failed_is_in_the_table_and_never_a_number(tmp_path):
    write_study(tmp_path)
    for seed in range(2):
        write_run(tmp_path, strategy="zero1", seed=seed, status="out_of_memory", study="synthetic")
    write_outcome(tmp_path, "killed", strategy="zero3", message="killed, host memory is full")
    runs = with_theory(table.read([tmp_path]))
    compared = differences.compare(runs, "ddp", METRICS)
    shown = pages.answer(runs, compared, "ddp")
    assert row_of(shown, "zero1").startswith("2 | 2 2 out of memory | ")
    assert "| unknown | not comparable | unknown | not comparable |" in row_of(shown, "zero1")
    assert "1 1 killed" in row_of(shown, "zero3")
    for piece in (
        shown,
        pages.losses(runs, compared, "ddp"),
        pages.times(runs, compared, "ddp"),
        pages.memory(runs),
    ):
        assert "nan" not in text_of(piece).lower().split()
    listed = text_of(pages.without_result(runs))
    assert "killed killed, host memory is full" in listed
    assert listed.count("out of memory") == 1
    assert listed.count("gpt-wikitext-tiny-zero1-2x-") == 2


def test_boxes_stand_apart(two_boxes):
    shown = pages.answer(two_boxes, differences.compare(two_boxes, "ddp", METRICS), "ddp")
    gpu, cpu = shown.split("<section>")[1:]
    assert "<h3>8 x NVIDIA H200</h3>" in gpu
    assert "<h3>Synthetic CPU, 8 cores</h3>" in cpu
    for half, device in ((gpu, "cuda"), (cpu, "cpu")):
        mine = two_boxes[(two_boxes["device"] == device) & (two_boxes["strategy"] == "zero2")]
        assert markup.number(mine["seconds_per_step"].median()) in row_of(half, "zero2")
    assert pages.drawn(two_boxes, figures.runtime).count("<figure") == 2


def test_figure_of_nothing_says_so(tmp_path):
    write_run(tmp_path, strategy="zero1", status="out_of_memory")
    shown = pages.drawn(table.read([tmp_path]), figures.runtime)
    assert "No figure for Synthetic CPU, 8 cores, 2 processes: " in text_of(shown)


def test_times_that_decide_nothing_are_not_drawn(study):
    compared = differences.compare(study, "ddp", METRICS)
    noisy = compared.assign(relative_margin=compared["relative_margin"].mask(compared["metric"] == METRICS[1], 1.11))
    assert [pages.times_decide(each) for each in (compared, noisy)] == [True, False]
    assert "tokens per second" in pages.worlds_drawn(study, compared)
    assert "tokens per second" not in pages.worlds_drawn(study, noisy)


# ---------------------------------------------------------------- each page's own


def test_what_ended_bit_identical_is_one_row(study):
    compared = differences.compare(study, "ddp", ["final_loss"])
    assert row_of(pages.losses(study, compared, "ddp"), "zero2").startswith("2 | 3 |")
    same = study.copy()
    reference = same[same["strategy"] == "ddp"].drop_duplicates("seed").set_index("seed")["final_sha256"]
    zero2 = same["strategy"] == "zero2"
    same.loc[zero2, "final_sha256"] = same.loc[zero2, "seed"].map(reference)
    together = pages.losses(same, compared, "ddp")
    assert '<th scope="row">ddp, zero2<small>bit-identical</small></th>' in together
    assert together.count("zero2") == 1
    twins = study[study["strategy"] == "zero2"].assign(strategy="zero2_tuned", final_sha256="0" * 64)
    assert run_rows.bit_identical(pd.concat([study, twins]))[-2:] == [["zero2"], ["zero2_tuned"]]


def test_memory_is_of_the_largest_rank(study):
    mine = study[study["strategy"] == "zero2"]
    unit = run_rows.unit_of(study, "model_state_bytes")
    held = markup.number(mine["model_state_bytes"].max() / unit.size)
    assert held in row_of(pages.memory(study), "zero2").split(" | ")


def test_mfu_and_energy_are_shown_where_they_were_measured(two_boxes):
    compared = differences.compare(two_boxes, "ddp", ["seconds_per_step"])
    gpu, cpu = pages.times(two_boxes, compared, "ddp").split("<section>")[1:]
    assert "Not measured here: MFU, joules per token." in text_of(cpu)
    assert "Not measured" not in gpu
    mine = two_boxes[(two_boxes["device"] == "cuda") & (two_boxes["strategy"] == "zero2")]
    assert markup.number(mine["joules_per_token"].median()) in row_of(gpu, "zero2")


def test_crowded_times_are_not_shown(tmp_path):
    for processes in (2, 4):
        write_run(tmp_path, strategy="ddp", world_size=processes, machine={"num_cores": 2})
    write_run(tmp_path, strategy="single", world_size=1, machine={"num_cores": 2})
    runs = with_theory(table.read([tmp_path]))
    shown = pages.scaling(runs)
    assert "4 processes on too few cores" in shown
    rate = runs.loc[runs["world_size"] == 4, "tokens_per_second_per_gpu"].item()
    assert markup.number(rate) not in shown


def test_scaling_efficiency(study):
    shown = row_of(pages.scaling(study), "ddp")
    rate = study.groupby("strategy")["tokens_per_second_per_gpu"].median()
    assert f"| {100 * rate['ddp'] / rate['single']:.0f} % | single on 1 process |" in shown


def test_largest_batch(tmp_path, study):
    for batch in (8, 16):
        write_run(tmp_path, strategy="zero3", global_batch_size=batch, box="gpu")
    write_run(tmp_path, strategy="zero3", global_batch_size=32, box="gpu", status="out_of_memory")
    row = row_of(pages.largest_batch(table.read([tmp_path])), "zero3").split(" | ")
    assert (row[1], row[-2:]) == ("16.0", ["32.0", "out of memory"])
    assert pages.largest_batch(study) == ""  # one batch is no choice


def test_proof(tmp_path):
    for strategy in ("ddp", "zero2", "zero3_cpu_offload"):
        write_run(tmp_path, strategy=strategy)
    write_outcome(tmp_path, "skipped", strategy="zero1")
    shown = pages.proof(table.read([tmp_path]))
    assert row_of(shown, "zero3_cpu_offload on 2").startswith("3 | DeepSpeedEngine | cpu | cpu |")
    assert ">zero1 on 2</th>" not in shown


# ---------------------------------------------------------------- what the answer rests on


def test_what_is_not_comparable(tmp_path, study):
    write_study(tmp_path, dropout=0.1)
    write_run(tmp_path, strategy="zero3", precision="bf16-autocast", dropout=0.1)
    shown = pages.not_comparable(table.read([tmp_path]), "ddp")
    rows = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>(.*?)</tr>", shown)]
    assert ["everything", "precision bf16-autocast against fp32", "zero3", "1"] in rows
    assert ["losses", "dropout is on and processes 1 against 2: other masks", "single", "3"] in rows
    assert not [row for row in rows if row[2:3] == ["ddp"]]  # its repeats are for the margin
    assert text_of(pages.not_comparable(study, "ddp")) == "None."


def test_what_was_fixed_and_what_varied(study):
    shown = pages.held_fixed(study)
    assert row_of(shown, "strategies") == "single, ddp, zero2"
    assert (row_of(shown, "seeds"), row_of(shown, "repeats")) == ("0, 1 and 2", "0, 1 and 2")
    assert row_of(shown, "learning_rate") == "5e-05"
    assert row_of(shown, "activation_checkpointing") == "no"
    assert row_of(shown, "num_steps") == "40"
    assert len(row_of(shown, "data digest")) == 12


def test_reproduce_names_commands_and_no_place_of_the_machine(study, tmp_path):
    shown = pages.reproduce(study, "cpu", ["reports/cpu/records", str(tmp_path)])
    assert str(tmp_path) not in shown
    lines = re.search("<pre.*?><code>(.*?)</code>", shown, re.DOTALL)[1].splitlines()
    assert lines == [
        f"git checkout {'0' * 40}",
        "make setup",
        "zero-study run cpu",
        "zero-study pack runs/cpu reports/cpu/records",
        "zero-study pack runs/cpu FOLDER2",
        "zero-study report cpu --records reports/cpu/records --records FOLDER2",
    ]
    assert shown.count("accelerate launch --config_file accelerate_configs/zero2.yaml") == 1
    assert "3 launches, one of each kind" in shown


def test_boxes_show_every_value_that_changed(tmp_path):
    for seed, commit in enumerate(("a" * 40, "b" * 40)):
        write_run(tmp_path, strategy="ddp", seed=seed, machine={"git_commit": commit, "git_dirty": seed == 1})
    write_run(tmp_path / "gpu", strategy="ddp", box="gpu")
    shown = pages.boxes(table.read([tmp_path]))
    assert row_of(shown, "runs") == "1 | 2"
    assert row_of(shown, "commit") == f"{'0' * 12} | {'a' * 12}; {'b' * 12} with changes"
    assert row_of(shown, "GPUs") == "8 x NVIDIA H200, 140 GiB | none"


# ---------------------------------------------------------------- cells and markup


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.47, "0.470"), (12.0, "12.0"), (123.4, "123"), (4567.8, "4,568"), (0, "0"), (float("nan"), None)],
)
def test_number(value, shown):
    assert markup.number(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.031, "+3.1 %"), (-0.5, "\N{MINUS SIGN}50 %"), (0.0, "0 %"), (2e-6, "+2e-6"), (-4.1e-5, "-4.1e-5")],
)
def test_relative(value, shown):
    assert markup.relative(value) == shown


def test_table_escapes_says_unknown_and_leaves_out_what_nothing_fills():
    shown = markup.table("a < b", ["name", "x", "y"], [("g & h", [["<i>", None, 1], ["k", 2, None]])], note="1 < 2")
    assert "<i>" not in shown
    assert shown.count('<span class="missing">unknown</span>') == 2
    assert '<caption><span>a &lt; b</span><div class="note">1 &lt; 2</div></caption>' in shown
    assert '<th colspan="3" scope="rowgroup"><span>g &amp; h</span></th>' in shown
    empty = markup.table("t", ["name", "x", "y"], [("", [["a", None, 1]])])
    assert ">x</th>" not in empty
    assert "Not measured here: x." in empty


def test_a_piece_of_html_stays_itself_and_text_is_escaped():
    bold = markup.Html("<b>")
    assert bold._repr_html_() == f"{bold}" == "<b>"
    assert markup.lines(bold, "<i>", "") == "<b>\n&lt;i&gt;"
    assert markup.below("<", ">") == "&lt;<small>&gt;</small>"
