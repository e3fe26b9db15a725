"""The predictions of trainings of others: the committed files stay, and no row has a measured value."""

from __future__ import annotations

import hashlib
import json
import math

import public_predictions
import pytest
import yaml

from study.public_runs import archive
from study.theory import measured_by_others

SETTINGS = yaml.safe_load(public_predictions.SETTINGS.read_text(encoding="utf-8"))
COMMITTED = json.loads(public_predictions.PREDICTIONS.read_text(encoding="utf-8"))


# Of the files that were committed before the measured values were read.
REGISTERED = {
    public_predictions.PREDICTIONS: "bb89fa4d2100ff5a5eefb79064b22cf2363f98dd14d187a178ff269254ee5004",
    public_predictions.REST: "34565f6e3b072862a31509271ea97e06510baebaca4700add5859626cefd0ce6",
}


@pytest.mark.parametrize("path", REGISTERED, ids=lambda path: path.stem)
def test_predictions_stay_that_were_committed_before_the_values_were_read(path):
    """Errors are judged for them, so that a later version of the planner does not change them."""
    assert hashlib.sha256(path.read_bytes()).hexdigest() == REGISTERED[path]


@pytest.mark.parametrize("make", [public_predictions.predictions, public_predictions.predictions_of_rest])
def test_the_planner_predicts_the_same_rows_today(make):
    path = public_predictions.PREDICTIONS if make is public_predictions.predictions else public_predictions.REST
    committed = json.loads(path.read_text(encoding="utf-8"))["predictions"]
    assert [row["id"] for row in make()["predictions"]] == [row["id"] for row in committed]


def test_no_row_has_a_measured_value():
    assert all("published" not in row for family in SETTINGS["families"] for row in [family["same"], *family["rows"]])
    cases = [*measured_by_others.public_logs(), *measured_by_others.rest_of_throughput()]
    assert all(math.isnan(case.published) for case in cases)


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


def test_the_rows_that_are_fitted_and_the_predicted_rows_are_all_rows_of_the_tables():
    fitted = [row.tokens_per_second_per_gpu for row in measured_by_others.throughput_rows()]
    names = {case.name.replace(" ", "-") for case in measured_by_others.rest_of_throughput()}
    other = [run for run in archive.source("llm-foundry") if run.name not in names]
    assert sorted(run.totals["tokens_per_second_per_gpu"] for run in other) == sorted(fitted)
    assert len(archive.source("llm-foundry")) == len(fitted) + len(names) == 216
