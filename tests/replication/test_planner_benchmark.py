"""The benchmark for planners: its table is that of the measurements, and any function is scored on what it predicts."""

from __future__ import annotations

import numpy as np
import planner_benchmark
import pytest
from planner_benchmark import MEASURED

from zero_study.planner import calibration


def test_the_committed_table_has_the_measurements():
    """Where this fails: python tools/derive/planner_benchmark.py --write."""
    assert planner_benchmark.TABLE.read_text(encoding="utf-8") == planner_benchmark.text()


def test_a_planner_sees_no_measured_value():
    seen = set()
    planner_benchmark.answers(lambda setting: seen.update(setting) or {})
    assert not seen & {*MEASURED}
    assert {"num_params", "gpu", "num_gpus", "micro_batch_size", "sequence_length", "zero_stage"} <= seen


def test_only_grades_a_and_b_without_fitted_trainings_count():
    rows = planner_benchmark.read()
    scores = planner_benchmark.scores([(row, {"seconds": row["seconds"] or 1.0}) for row in rows])
    described = [row for row in rows if row["seconds"] and row["grade"] != "C" and not row["outside"]]
    of_all = {score.trainings: score for score in scores}["all times"]
    assert of_all.count == len([row for row in described if not row["fitted"]]) < len(described)
    with_fitted = planner_benchmark.scores([(row, {"seconds": row["seconds"] or 1.0}) for row in rows], True)
    assert {score.trainings: score for score in with_fitted}["all times"].count == len(described)


def test_errors_and_intervals_are_of_the_predicted_over_the_measured_value():
    rows = [row for row in planner_benchmark.read() if row["seconds"] and planner_benchmark.class_of(row) == "one GPU"]
    answer = [(row, {"seconds": 1.1 * row["seconds"], "low": row["seconds"], "high": None}) for row in rows]
    score = planner_benchmark.scores(answer)[0]  # an interval without an upper end is not judged
    assert (score.trainings, score.with_ends, score.inside) == (
        "time, one GPU",
        0,
        None,
    )
    assert (score.median, score.percentile_90, score.worst) == pytest.approx((0.1, 0.1, 0.1))
    half = [(row, answer | {"high": (0.5 + index % 2) * row["seconds"]}) for index, (row, answer) in enumerate(answer)]
    score = planner_benchmark.scores(half)[0]
    assert score.with_ends == score.count
    assert 0 < score.inside < 1


def test_trainings_that_ran_out_of_memory_count_if_they_are_predicted_to_fit():
    rows = planner_benchmark.read()
    found = planner_benchmark.fitting([(row, {"fits": True}) for row in rows])
    assert len(found[True]) > 1000
    assert len(found[False]) >= 55
    assert {*found[True], *found[False]} == {True}
    assert planner_benchmark.fitting([(row, {}) for row in rows]) == {True: [], False: []}


def test_a_function_of_any_module_is_scored(tmp_path, monkeypatch, capsys):
    (tmp_path / "my_planner.py").write_text("def constant(setting):\n    return {'bytes': 2.0**34}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["", *planner_benchmark.sys.path])
    monkeypatch.setattr("sys.argv", ["planner_benchmark.py", "my_planner:constant"])
    planner_benchmark.main()
    printed = capsys.readouterr().out
    assert "peak_allocated_bytes" in printed
    assert "seconds " not in printed


def test_a_calibration_finds_the_components_that_are_slower_than_predicted():
    """One factor cannot, unless the steps consist of one component."""
    rows = planner_benchmark.groups()["LLaMA on A800", "a100-80gb"]
    assert planner_benchmark.is_mixed(rows)
    speeds = 2.0, 1.0, 3.0
    slower = [(step, float(np.dot(calibration.parts_of(step), speeds))) for step, _ in rows]
    uncalibrated, one_factor, by_component = planner_benchmark.calibrated(slower, 2)
    assert by_component < one_factor < uncalibrated
    assert by_component < 0.01
