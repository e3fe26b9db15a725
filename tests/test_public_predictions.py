"""The predictions of public_logs.yaml: the committed file stays, and no row has a measured value."""

from __future__ import annotations

import hashlib
import json
import math
import re

import public_predictions
import yaml
from subjects import public_logs

from study.planner import public_errors
from study.theory import measured_by_others

SETTINGS = yaml.safe_load(public_predictions.SETTINGS.read_text(encoding="utf-8"))
COMMITTED = json.loads(public_predictions.PREDICTIONS.read_text(encoding="utf-8"))


# Of the file that was committed before the logs were read.
REGISTERED = "bb89fa4d2100ff5a5eefb79064b22cf2363f98dd14d187a178ff269254ee5004"


def test_predictions_stay_that_were_committed_before_the_logs_were_read():
    """Errors are judged for them, so that a later version of the planner does not change them."""
    assert hashlib.sha256(public_predictions.PREDICTIONS.read_bytes()).hexdigest() == REGISTERED


def test_the_planner_predicts_the_same_rows_today():
    today = public_predictions.predictions()
    assert [row["id"] for row in today["predictions"]] == [row["id"] for row in COMMITTED["predictions"]]


def test_errors_of_todays_planner_are_of_the_same_trainings_and_change_none_of_the_committed_ones():
    committed, today = (public_errors.compared(is_today) for is_today in (False, True))
    assert [(row.id, row.measured) for row in committed] == [(row.id, row.measured) for row in today]
    by_id = {row["id"]: row for row in COMMITTED["predictions"]}
    assert all(row.predicted == by_id[row.id][row.quantity] for row in committed)
    assert any(first.predicted != second.predicted for first, second in zip(committed, today, strict=True))


def test_readme_shows_the_worst_group_of_times_with_its_ninetieth_percentile():
    times = [each for each in public_errors.summaries() if each.quantity in public_logs.TIMES]
    worst = max(times, key=lambda each: each.ninetieth)
    assert worst.ninetieth > 10 * worst.median
    (row,) = [line for line in public_logs.trust().splitlines() if "mixtures of experts" in line]
    assert [f"{100 * error:.0f} %" for error in (worst.median, worst.ninetieth)] == re.findall(r"\d+ %", row)


def test_no_row_has_a_measured_value():
    assert all("published" not in row for family in SETTINGS["families"] for row in [family["same"], *family["rows"]])
    assert all(math.isnan(case.published) for case in measured_by_others.public_logs())


def test_every_row_has_an_id_a_log_and_something_to_compare():
    rows = COMMITTED["predictions"]
    assert len({row["id"] for row in rows}) == len(rows)
    assert all(row["log"] and row["compare"] for row in rows)
    assert not [row["id"] for row in rows if "{" in row["id"] + row["log"]]
    assert all(group["settings"] and group["reason"] for group in COMMITTED["not_expressible"])


def test_an_interval_has_no_upper_end_if_the_step_is_short():
    rows = COMMITTED["predictions"]
    for row in rows:
        low, high = row["interval"]
        assert low < row["seconds_per_step"] < (high or math.inf)
    assert all(row["interval"][1] is None for row in rows if row["is_short"])
