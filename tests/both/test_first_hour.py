"""Test the plan of the first hour on GPUs: the limits of its predictions, and the order of its runs."""

from __future__ import annotations

import re

import first_hour
import one_gpu
import pytest

from study.running import studies
from study.running.predictions import PredictedRun
from zero_study.engines import this_machine
from zero_study.engines.this_machine import Machine
from zero_study.errors import Refusal

pytestmark = pytest.mark.pages

GIB = 2**30


def predicted(strategy: str = "ddp", **changes) -> PredictedRun:
    (run,) = [
        run
        for run in first_hour.predicted_runs("gpu-lora", "a100-40gb")
        if (run.size, run.strategy, run.precision, run.load_in_4bit) == ("1.5b", strategy, "bf16-autocast", False)
    ]
    return run.model_copy(update=changes)


def test_a_peak_at_its_limit_has_the_published_error():
    run = predicted()
    low, high = first_hour.limits(run)
    error = first_hour.memory_error()
    assert 0.05 < error < 0.3
    assert run.peak_bytes_per_gpu / low - 1 == pytest.approx(error)
    assert run.peak_bytes_per_gpu / high - 1 == pytest.approx(-error)


def test_a_run_that_may_fit_within_the_limits_is_open():
    sizes = {"peak_bytes_per_gpu": 40 * GIB, "fits": False}
    low = 40 * GIB / (1 + first_hour.memory_error())
    assert first_hour.outcome(predicted(**sizes, usable_bytes=int(low) - GIB)) == "runs out"
    assert first_hour.outcome(predicted(**sizes, usable_bytes=int(low) + GIB)) == "open"
    assert first_hour.outcome(predicted(fits=True)) == "trains"
    assert first_hour.outcome(predicted(lacking="host memory", fits=False)) == "lacks host memory"


def test_strategies_are_ordered_unless_their_peaks_are_close():
    sizes = {"zero2": 100, "zero3": 104, "ddp": 106}
    runs = [predicted().model_copy(update={"strategy": name, "peak_bytes_per_gpu": sizes[name]}) for name in sizes]
    assert first_hour.in_order(reversed(runs)) == "`zero2`, `zero3`; `ddp`"


@pytest.mark.parametrize(("number", "most"), [(1, 1), (10, 3), (40, 7)])
def test_more_runs_outside_their_intervals_are_improbable(number, most):
    assert first_hour.tolerated(number) == most


def test_every_machine_has_its_own_minutes(tmp_path, monkeypatch):
    """A slower GPU takes more minutes, as long as no GPU is here."""
    monkeypatch.setattr(this_machine, "find", lambda: Machine((), 10**12))
    item = one_gpu.ITEMS[1]
    minutes = [item.state(one_gpu.Place(tmp_path, None, False, gpu)).seconds for gpu in first_hour.ALONE]
    assert minutes == sorted(minutes, reverse=True)
    assert len(set(minutes)) == len(minutes)


def test_on_a_gpu_no_minutes_of_others_are_said(monkeypatch):
    monkeypatch.setattr(this_machine, "find", lambda: Machine((80 * 10**9,), 10**12, "NVIDIA H100"))
    with pytest.raises(Refusal):
        first_hour.order_on_one_gpu()


def test_the_committed_predictions_are_those_of_today():
    """To mend it: python tools/derive/first_hour.py --write."""
    assert first_hour.PREDICTIONS.read_text(encoding="utf-8") == first_hour.predictions_as_json()


def test_the_tables_have_the_machines_that_the_page_is_about():
    page = first_hour.on_one_gpu() + first_hour.on_several_gpus()
    machines = [*first_hour.ALONE, *(f"{number} {first_hour.SEVERAL[0]}" for number in first_hour.SEVERAL[1])]
    for machine in machines:
        assert f"| {machine} |" in page


@pytest.mark.parametrize("machine", first_hour.PLANNED, ids=lambda machine: machine.name)
def test_set_up_and_runs_fit_the_paid_hour(machine):
    limits = [command.limit for command in first_hour.commands(machine)]
    assert one_gpu.SET_UP_MINUTES + sum(limits) == one_gpu.PAID_MINUTES
    for command in first_hour.commands(machine):
        num_rounds = 3 if command.study == first_hour.FILLING else 1  # of which at least one ends within the limit
        assert command.minutes / num_rounds < command.limit


@pytest.mark.parametrize("machine", first_hour.PLANNED, ids=lambda machine: machine.name)
def test_runs_of_a_plan_use_all_gpus_that_are_paid_for(machine):
    """Except for those that check the strategies, which are on one GPU."""
    for command in first_hour.commands(machine):
        runs = [run for run in studies.runs(studies.find(command.study)) if command.only in run.run_id]
        expected = 1 if command.study == "gpu-acceptance" else machine.num_gpus
        assert {run.world_size for run in runs if not run.config.share_device} == {expected}


@pytest.mark.parametrize("machine", [each for each in first_hour.MACHINES if each.file], ids=lambda each: each.file)
def test_a_file_that_rents_a_machine_has_the_plan_and_the_price(machine):
    """To mend it: python tools/derive/first_hour.py --write."""
    assert (first_hour.CLOUDS / machine.file).read_text() == first_hour.written(machine)
    assert f"{machine.dollars_per_hour:.2f} |" in (first_hour.files.ROOT / "docs" / "machines.md").read_text()


def test_every_place_that_names_the_minutes_of_one_gpu_names_the_same():
    root = first_hour.files.ROOT
    assert f"MINUTES ?= {one_gpu.MINUTES}\n" in (root / "Makefile").read_text()
    for page in ("reports/first-hour.md", "docs/gpus.md"):
        limits = re.findall(r"one_gpu.py --minutes (\d+)", (root / page).read_text())
        assert limits == [str(one_gpu.MINUTES)], page
    (minutes,) = re.findall(r"^  MINUTES: (\d+)", (root / "docs" / "clouds" / "a100.yaml").read_text(), re.MULTILINE)
    assert int(minutes) == one_gpu.MINUTES
