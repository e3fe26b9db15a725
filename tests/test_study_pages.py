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
from study.report import markup
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


# ---------------------------------------------------------------- runs


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


# ---------------------------------------------------------------- each page's own


# ---------------------------------------------------------------- what the answer rests on


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
