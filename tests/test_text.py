"""Comparisons as Markdown."""

from __future__ import annotations

import json
import re

import launching
import pytest
from synthetic import write_outcome, write_run

from study.compare import at_a_glance, differences


def rows(page: str, strategy: str) -> list[list[str]]:
    """The cells of a strategy's rows, in all tables of a page."""
    lines = [line for line in page.splitlines() if line.startswith(f"| {strategy} |")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_differences(tmp_path):
    for seed in (0, 1, 2):
        write_run(tmp_path, strategy="ddp", seed=seed)
        write_run(tmp_path, strategy="zero2", seed=seed, loss_shift=0.5)
    write_outcome(tmp_path, "killed", strategy="zero3")
    page = differences.table([tmp_path], "ddp")
    losses = rows(page.split("### final_loss")[1].split("###")[0], "zero2")
    assert [(row[2], row[7]) for row in losses] == [("3", "higher")]
    assert losses[0][5].startswith("+")
    assert "zero3: killed (synthetic: killed)" in page.split("## Not compared")[1]
    assert "nan" not in page


def test_runs_without_a_time_are_counted_with_the_reason(tmp_path):
    for strategy in ("ddp", "zero2", "zero3"):
        path = write_run(tmp_path, strategy=strategy)
        disturbed = {
            "seconds": 10.0,
            "num_processors": 2,
            "own_seconds": 9.0,
            "other_seconds": 9.0,
            "stolen_seconds": 0,
        }
        if strategy != "ddp":
            path.write_text(json.dumps(json.loads(path.read_text()) | {"load": disturbed}))
    (line,) = re.findall("Without a time: 2 of 3 runs .*", differences.table([tmp_path], "ddp"))
    assert "5 % of the processors" in line
    lines = at_a_glance.table([tmp_path]).splitlines()
    (ddp,), (zero2,) = ([line for line in lines if line.startswith(name)] for name in ("ddp", "zero2"))
    assert ("same" in zero2, "(" in ddp, "(" in zero2) == (True, False, True)  # the time is there, and greyed
    assert [line for line in lines if "5 % of the processors" in line]
    assert max(map(len, lines)) <= 100
    path = write_run(tmp_path / "quiet", strategy="ddp")
    assert "Without a time" not in differences.table([path.parent], "ddp")


@pytest.mark.launches
@pytest.mark.parametrize("view", ["short", "differences", "parity", "model-states"])
def test_every_view_of_committed_records(view):
    done = launching.command_line(["compare", "--view", view, "reports/cpu/records/cpu"])
    assert done.returncode == 0, done.stderr
    assert "zero3_tuned" in done.stdout


@pytest.mark.launches
def test_output_without_a_reader_is_no_error():
    code = """
import os, sys
from study.__main__ import main
reader, writer = os.pipe()
os.dup2(writer, 1)
os.close(reader)
sys.argv = ["zero-study", "compare", "--view", "parity", "reports/cpu/records/smoke"]
main()
"""
    done = launching.attempt(["python", "-c", code])
    assert (done.returncode, done.stderr) == (1, "")
