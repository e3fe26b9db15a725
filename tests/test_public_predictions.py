"""The predictions of public_logs.yaml: the committed file is up to date, and no row has a measured value."""

from __future__ import annotations

import json
import math

import public_predictions
import yaml

from study.theory import measured_by_others

SETTINGS = yaml.safe_load(public_predictions.SETTINGS.read_text(encoding="utf-8"))
COMMITTED = json.loads(public_predictions.PREDICTIONS.read_text(encoding="utf-8"))


def test_committed_predictions_are_those_of_the_planner():
    content = public_predictions.predictions()
    assert public_predictions.PREDICTIONS.read_text(encoding="utf-8") == public_predictions.as_text(content)


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
