"""The pages of a study: every number is a run's, what is unknown says so, and boxes stay apart."""

from __future__ import annotations

import re
from pathlib import Path

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


# ---------------------------------------------------------------- the answer


def test_answer(study):
    shown = pages.answer(study, differences.compare(study, "ddp", METRICS), "ddp")
    assert row_of(shown, "ddp").count("the control") == 2
    assert re.search(r"0\.7\d\d \| slower \+\d\d.*\| no difference ", row_of(shown, "zero2"))
    mine = study[study["strategy"] == "zero2"]
    assert f"{(mine['model_state_bytes'] / mine['num_params']).max():.2f} (" in row_of(shown, "zero2")


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


# ---------------------------------------------------------------- each page's own


def test_crowded_times_are_not_shown(tmp_path):
    for processes in (2, 4):
        write_run(tmp_path, strategy="ddp", world_size=processes, machine={"num_cores": 2})
    write_run(tmp_path, strategy="single", world_size=1, machine={"num_cores": 2})
    runs = with_theory(table.read([tmp_path]))
    shown = pages.scaling(runs)
    assert "4 processes on too few cores" in shown
    rate = runs.loc[runs["world_size"] == 4, "tokens_per_second_per_gpu"].item()
    assert markup.number(rate) not in shown


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


# ---------------------------------------------------------------- cells and markup


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
