"""Times and memory of the runs on rented GPUs, and the plan of the first hour."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import first_hour
from measuring import one_gpu
from wording import one_of

from study.running import estimate, studies
from zero_study.strategy.file import names as strategy_names
from zero_study.theory import hardware


def minutes_of_list(*numbers: int) -> str:
    """Return the predicted minutes of items of `make gpu` on an H200. The items are counted from 1."""
    with tempfile.TemporaryDirectory() as folder:
        place = one_gpu.Place(Path(folder), None, False)
        return f"{sum(one_gpu.ITEMS[number - 1].state(place).seconds for number in numbers) / 60:.0f}"


def hours_of_list() -> str:
    return f"about {float(minutes_of_list(*range(1, len(one_gpu.ITEMS) + 1))) / 60:.0f} hours"


def num_runs(study: str) -> str:
    return str(len(studies.runs(studies.find(study))))


def num_strategies(study: str) -> str:
    """Count the strategies of a study, and all strategies."""
    return f"{len({run.strategy.name for run in studies.runs(studies.find(study))})} of the {len(strategy_names())}"


def usable_gib(gpu: str, num_gpus: int = 1) -> str:
    return f"{hardware.usable_memory_bytes(hardware.find_gpu(gpu), num_gpus) / 2**30:.1f}"


def host_gib() -> str:
    """Return the host memory that the runs with offload need in the first hour on one GPU."""
    runs = [run for study in first_hour.OF_ONE_GPU for run in first_hour.predicted_runs(study, "a100-80gb")]
    return f"{max(run.host_bytes for run in runs) / 2**30:.0f}"


def hours_of_single_gpu() -> str:
    """Return the predicted hours of the study `single-gpu` on three kinds of GPUs."""
    hours = []
    for gpu in ("h200", "l4", "t4"):
        history = estimate.History(True, hardware.find_gpu(gpu))
        runs = studies.runs(studies.find("single-gpu"))
        hours.append(sum(history.estimate(run).seconds for run in runs) / 3600)
    return "about {:.0f} hours on an H200, {:.0f} hours on an L4, or {:.0f} hours on a T4".format(*hours)


TABLES: dict[tuple[str, str], Callable[[], str]] = {
    **{("reports/first-hour.md", name): make for name, make in first_hour.TABLES.items()},
}


NUMBERS: dict[tuple[str, str], Callable[[], str]] = {
    ("reports/first-hour.md", "host"): host_gib,
    ("reports/first-hour.md", "usable_40"): partial(usable_gib, "a100-40gb"),
    ("reports/first-hour.md", "usable_80"): lambda: one_of(map(usable_gib, ("a100-80gb", "h100-sxm"))),
    ("reports/first-hour.md", "usable_of_several"): lambda: one_of(usable_gib("h100-sxm", n) for n in (2, 8)),
    ("docs/gpus.md", "single_gpu"): hours_of_single_gpu,
    ("docs/gpus.md", "runs"): partial(num_runs, "single-gpu"),
    ("docs/gpus.md", "acceptance_runs"): partial(num_runs, "gpu-acceptance"),
    ("docs/gpus.md", "acceptance_strategies"): partial(num_strategies, "gpu-acceptance"),
    ("docs/gpus.md", "whole_list"): hours_of_list,
    ("docs/gpus.md", "item_1"): partial(minutes_of_list, 1),
    ("docs/gpus.md", "items_2_3"): partial(minutes_of_list, 2, 3),
    ("docs/gpus.md", "item_4"): partial(minutes_of_list, 4),
    ("docs/gpus.md", "item_5"): partial(minutes_of_list, 5),
    ("docs/gpus.md", "items_6_7_8"): partial(minutes_of_list, 6, 7, 8),
    ("docs/planner.md", "usable"): partial(usable_gib, "a100-80gb", 8),
    ("docs/planner.md", "usable_alone"): partial(usable_gib, "a100-80gb"),
}
