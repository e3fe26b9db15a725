"""The frame that the pages of `zero-study compare` share."""

from __future__ import annotations

import importlib
import operator
from pathlib import Path

import pytest
import synthetic

from study.cli import compare
from study.compare.view import View, page, tables
from study.errors import Refusal

SHORT = View("short", "Title", "Explanation.", lambda files: [f"{len(files)} runs"])


def test_tables_has_one_for_each_title():
    def parity(number: int) -> str:
        return "## odd" if number % 2 else "## even"

    lines = tables([3, 1, 2], int, parity, ["n"], lambda numbers: [[number] for number in numbers])
    titles = [line for line in lines if line.startswith("##")]
    assert titles == ["## odd", "## even", "## odd"]  # in the order of the items, of which equal neighbours are grouped
    assert lines[:4] == ["## odd", "", "| n |", "| --- |"]


def test_page_names_its_folders_and_its_command():
    assert page("Title", "Explanation.", ["line"], "--view short", [Path("a")]).splitlines() == [
        "# Title (a)", "", "Explanation.", "", "line", "Made by `zero-study compare --view short a`.",
    ]  # fmt: skip


def test_page_lists_the_runs_without_a_result(tmp_path):
    synthetic.write_run(tmp_path, strategy="zero2")
    ended = synthetic.write_run(tmp_path, strategy="zero3", status="out_of_memory").parent.name
    made = SHORT.page([tmp_path])
    assert "\n2 runs\n" in made
    assert f"- {ended}: out_of_memory" in made
    assert "zero2" not in made
    quiet = View("short", "Title", "Explanation.", lambda files: [], lists_unfinished=False)
    assert ended not in quiet.page([tmp_path])


def test_page_of_no_record(tmp_path):
    with pytest.raises(Refusal):
        SHORT.page([tmp_path])


@pytest.mark.parametrize(("name", "target"), compare.VIEWS.items())
def test_every_view_of_the_command_has_its_page(name, target):
    module, _, attributes = target.partition(".")
    made_by = operator.attrgetter(attributes)(importlib.import_module(f"study.compare.{module}"))
    assert callable(made_by)
    view = getattr(made_by, "__self__", None)
    assert view is None or view.name == name
