"""The frame that the pages of `zero-study compare` share."""

from __future__ import annotations

import importlib
import operator
import re
import time
from pathlib import Path

import pytest
import synthetic

from study.cli import compare
from study.compare import plain_text
from study.compare.view import View, page, tables
from zero_study import cli, progress, terminal
from zero_study.errors import Refusal

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
        "# Title (a)", "", "Explanation.", "", "line", "Made by `zero-study compare --view short --markdown a`.",
    ]  # fmt: skip


def test_page_lists_the_runs_without_a_result(tmp_path):
    synthetic.write_run(tmp_path, strategy="zero2")
    ended = synthetic.write_run(tmp_path, strategy="zero3", status="out_of_memory").parent.name
    created = SHORT.page([tmp_path])
    assert "\n2 runs\n" in created
    assert f"- {ended}: out_of_memory" in created
    assert "zero2" not in created
    quiet = View("short", "Title", "Explanation.", lambda files: [], lists_unfinished=False)
    assert ended not in quiet.page([tmp_path])


PAGE = """\
# A title (a)

A paragraph with **bold**, `code`, *emphasis*, 1 &lt; 2, a \\| and a [link](docs/a.md). It is longer than one line of
the terminal.

- An item that is so long that it takes more than one line of a terminal of this width, which begin below its text.

| strategy | n | explanation |
| --- | ---: | ---: |
| `zero2` | 12.5 | a \\| b, and so many words that the cell is wrapped within its column of the table |
| zero3 | 1 | **no** |

Made by `zero-study compare --view short --markdown a`.
"""


@pytest.mark.parametrize("width", [50, 80, 200])
def test_plain_text_has_no_marks_and_fits_the_width(width):
    text = plain_text.of_markdown(PAGE, width)
    assert max(map(len, text.splitlines())) <= width
    assert not [mark for mark in ("**", "`", "&lt;", "| --", "\\|", "# ", "](", "*e", "Made by") if mark in text]
    words = " ".join(text.split())
    assert "bold, code, emphasis, 1 < 2, a | and a link (docs/a.md)" in words
    assert "a | b, and" in words
    zero2, zero3 = (next(line for line in text.splitlines() if line.startswith(name)) for name in ("zero2", "zero3"))
    assert zero2.index("12.5") + len("12.5") == zero3.index("1") + 1  # numbers are aligned to the right


def test_a_table_that_is_too_wide_is_divided_between_its_columns():
    head = ["strategy", *(f"a_long_name_{number}" for number in range(9))]
    lines = terminal.table(head, [["zero2", *range(100, 109)]], 60)
    assert max(map(len, lines)) <= 60
    tables = "\n".join(lines).split("\n\n")
    assert len(tables) > 1
    assert [table.split()[0] for table in tables] == ["strategy"] * len(tables)
    assert sorted(word for line in lines for word in line.split() if word.isdigit()) == [
        str(n) for n in range(100, 109)
    ]


def test_pages_are_plain_text_unless_markdown_is_asked_for(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for strategy in ("ddp", "zero2"):
        synthetic.write_run(tmp_path, strategy=strategy)
    for view in compare.VIEWS:
        cli.run(["compare", str(tmp_path), "--view", view])
        text = capsys.readouterr().out
        assert not [mark for mark in ("**", "| --", "&lt;", "`", "\n#") if mark in text], view
        assert max(map(len, text.splitlines())) <= 80, view
        if view != "short":
            cli.run(["compare", str(tmp_path), "--view", view, "--markdown"])
            page = capsys.readouterr().out
            assert page.startswith("# ")
            assert f"compare --view {view} --markdown " in page.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "module", "name"),
    [
        (["compare", "runs"], "study.compare.summary", "table"),
        (["plan", "smoke"], "study.running.plan", "make_plan"),
    ],
)
def test_what_takes_seconds_says_what_it_is_doing(words, module, name, monkeypatch, capsys):
    """Two seconds pass at once here: the line is printed while the work goes on, and not if it is over before."""

    def work(*_: object) -> None:
        time.sleep(0.3)
        raise Refusal("enough")

    monkeypatch.setattr(importlib.import_module(module), name, work)
    for seconds, expected in ((0.0, True), (60.0, False)):
        monkeypatch.setattr(progress, "SECONDS", seconds)
        with pytest.raises(Refusal, match="enough"):
            cli.run(words)
        assert bool(re.search(r"^Reading .* \.\.\.$", capsys.readouterr().err, re.MULTILINE)) == expected


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
