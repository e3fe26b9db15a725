"""Comparisons as Markdown, and README's table of them."""

from __future__ import annotations

import re
import shlex

import launching
import pytest
from synthetic import write_outcome, write_run

from study.compare import answer, text

README = launching.ROOT / "README.md"


def rows(page: str, strategy: str) -> list[list[str]]:
    """The cells of a strategy's rows, in all tables of a page."""
    lines = [line for line in page.splitlines() if line.startswith(f"| {strategy} |")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_differences(tmp_path):
    for seed in (0, 1, 2):
        write_run(tmp_path, strategy="ddp", seed=seed)
        write_run(tmp_path, strategy="zero2", seed=seed, loss_shift=0.5)
    write_outcome(tmp_path, "killed", strategy="zero3")
    page = text.differences([tmp_path], "ddp")
    losses = rows(page.split("### final_loss")[1].split("###")[0], "zero2")
    assert [(row[2], row[7]) for row in losses] == [("3", "higher")]
    assert losses[0][5].startswith("+")
    assert "killed" in page.split("## Not compared")[1]
    assert "nan" not in page


def test_largest_batch_and_what_came_of_the_next(tmp_path):
    write_run(tmp_path, strategy="zero2", global_batch_size=8)
    write_run(tmp_path, strategy="zero2", global_batch_size=16)
    write_run(tmp_path, strategy="zero2", global_batch_size=32, status="out_of_memory")
    write_run(tmp_path, strategy="ddp", global_batch_size=8, status="out_of_memory")
    page = text.largest_batch([tmp_path])
    assert rows(page, "zero2")[0][2:5] == ["16", "32", "out_of_memory"]
    assert rows(page, "ddp")[0][2:6] == ["none", "8", "out_of_memory", "unknown"]


def test_scaling_names_its_base(tmp_path):
    write_run(tmp_path, strategy="single", world_size=1, seconds=1.0)
    write_run(tmp_path, strategy="ddp", world_size=2, seconds=0.5)
    page = text.scaling([tmp_path])
    efficiency, base = rows(page, "ddp")[0][3:5]
    assert 97 <= int(efficiency.rstrip("%")) <= 103  # times are noisy by one per cent
    assert base == "single on 1 process"


@pytest.mark.parametrize("view", ["differences", "largest-batch", "scaling", "parity", "model-states", "losses"])
def test_every_view_of_committed_records(view):
    done = launching.attempt(["zero-study", "compare", "--view", view, "reports/cpu/records/cpu"])
    assert done.returncode == 0, done.stderr
    assert "zero3_tuned" in done.stdout


def test_output_without_a_reader_is_no_error():
    code = """
import os, sys
from study.__main__ import main
reader, writer = os.pipe()
os.dup2(writer, 1)
os.close(reader)
sys.argv = ["zero-study", "compare", "--view", "losses", "reports/cpu/records/smoke"]
main()
"""
    done = launching.attempt(["python", "-c", code])
    assert (done.returncode, done.stderr) == (1, "")


def test_readme_has_the_table_of_the_records():
    """To mend it: run the command that stands in the comment, and put what it prints between the two comments."""
    found = re.search(r"<!-- answer: (zero-study .*) -->\n(.*)\n<!-- /answer -->", README.read_text(), re.DOTALL)
    done = launching.attempt(shlex.split(found[1]))
    assert done.returncode == 0, done.stderr
    assert found[2] == done.stdout.strip()


def test_answer_says_unknown_of_what_was_not_measured(tmp_path):
    write_run(tmp_path, strategy="ddp")
    write_run(tmp_path, strategy="zero2")
    row = rows(answer.table([tmp_path]), "`zero2`")[0]
    assert row[1:6] == ["unknown"] * 5
