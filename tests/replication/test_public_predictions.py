"""The predictions of trainings of others: the committed files stay, and no row has a measured value."""

from __future__ import annotations

import hashlib
import json
import math

import public_predictions
import pytest

from study.accuracy import public_errors
from study.public_runs import archive
from zero_study.theory import measured_by_others

# Of the files that were committed before the logs were read.
REGISTERED = {
    "public_logs": "bb89fa4d2100ff5a5eefb79064b22cf2363f98dd14d187a178ff269254ee5004",
    "mpt_throughput_rest": "34565f6e3b072862a31509271ea97e06510baebaca4700add5859626cefd0ce6",
    "later_public_logs": "3821e0b97915ef2c81700585116d6b5b948e8718a330a6cada9417e40ebb091f",
}
by_file = pytest.mark.parametrize("name", public_predictions.NAMES)


def committed(name):
    return (public_predictions.PREDICTIONS / f"{name}.json").read_bytes()


@by_file
def test_predictions_stay_that_were_committed_before_the_logs_were_read(name):
    """Errors are judged for them, so that a later version of the planner does not change them."""
    assert hashlib.sha256(committed(name)).hexdigest() == REGISTERED[name]


@by_file
def test_the_planner_predicts_the_same_rows_today(name):
    today = public_predictions.predictions(name)
    assert [row["id"] for row in today["predictions"]] == [
        row["id"] for row in json.loads(committed(name))["predictions"]
    ]


def test_errors_of_todays_planner_are_of_the_same_trainings_and_change_none_of_the_committed_ones():
    before, today = (public_errors.compared(is_today=is_today) for is_today in (False, True))
    assert [(row.id, row.measured) for row in before] == [(row.id, row.measured) for row in today]
    by_id = {row["id"]: row for row in json.loads(committed("public_logs"))["predictions"]}
    assert all(row.predicted == by_id[row.id][row.quantity] for row in before)
    assert any(first.predicted != second.predicted for first, second in zip(before, today, strict=True))


@by_file
def test_no_row_has_a_measured_value(name):
    families = public_predictions.settings(name)["families"]
    assert all("published" not in row for family in families for row in [family["same"], *family["rows"]])
    assert all(math.isnan(case.published) for case in measured_by_others.cases_of(name))


@by_file
def test_every_row_has_an_id_a_log_and_something_to_compare(name):
    content = json.loads(committed(name))
    rows = content["predictions"]
    assert len({row["id"] for row in rows}) == len(rows)
    assert all(row["log"] and row["compare"] for row in rows)
    assert not [row["id"] for row in rows if "{" in row["id"] + row["log"]]
    assert all(group["settings"] and group["reason"] for group in content["not_expressible"])


@by_file
def test_an_interval_has_no_upper_end_if_the_step_is_short(name):
    rows = json.loads(committed(name))["predictions"]
    for row in rows:
        low, high = row["interval"]
        assert low < row["seconds_per_step"] < (high or math.inf)
    assert all(row["interval"][1] is None for row in rows if row.get("is_short"))


def test_the_rows_that_are_fitted_and_the_predicted_rows_are_all_rows_of_the_tables():
    fitted = [row.published for row in measured_by_others.cases_of("mpt_throughput")]
    names = {case.name.replace(" ", "-") for case in measured_by_others.cases_of("mpt_throughput_rest")}
    other = [run for run in archive.source("llm-foundry") if run.name not in names]
    assert sorted(run.totals["tokens_per_second_per_gpu"] for run in other) == sorted(fitted)
    assert len(archive.source("llm-foundry")) == len(fitted) + len(names) == 216
