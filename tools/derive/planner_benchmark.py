"""Score a planner on published measurements of trainings, or write the table of these measurements.

    python tools/derive/planner_benchmark.py [MODULE:FUNCTION] [--fitted]
    python tools/derive/planner_benchmark.py --write

reports/public/planner_benchmark.json is a table with one training per line: its setting, who measured it, and what
was measured. The function gets a line as a dictionary, without the measured values. It returns a dictionary with any of
these keys: `seconds` (of an optimizer step), `low` and `high` (the ends of their interval), `bytes` (of a GPU's memory
at the peak) and `fits`. Without a function, today's planner is scored. Times to which a constant of today's planner was
fitted are left out unless --fitted is given. --write makes the table from the settings in
zero_study.theory.measured_by_others and from the public runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import itertools
import json
import math
import sys
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import cross_validation
import numpy as np

from study.accuracy import public_errors
from study.accuracy.published_rows import COMPARED_WITH_PRINTED, summarize
from zero_study import terminal
from zero_study.files import ROOT
from zero_study.planner import calibration
from zero_study.theory import hardware, measured_by_others, peaks, prediction, step_time
from zero_study.theory.measured_by_others import TIMES, MeasuredCase
from zero_study.theory.step_time import StepTime

TABLE = ROOT / "reports" / "public" / "planner_benchmark.json"
OTHERS = TABLE.with_name("other_planners.csv")  # scores of other tools on other trainings
MEASURED = ("seconds", *COMPARED_WITH_PRINTED, "fits")
OF_MODEL = ("architecture", "layers", "hidden", "heads", "kv_heads", "head_size", "feed_forward", "vocabulary", "tied",
            "experts", "experts_per_token", "num_params", "active_params")  # fmt: skip
OF_MACHINE = ("num_gpus", "gpus_per_node", "num_nodes", "node_bandwidth", "host_cores", "host_memory_bandwidth")
OF_GPU = ("memory_bandwidth", "link_bandwidth", "pcie_bandwidth")
COUNTED = ("A", "B")  # grades

Setting = dict[str, Any]
Planner = Callable[[Setting], Mapping[str, Any]]


class Score(NamedTuple):
    """The errors of one quantity for one class of trainings."""

    quantity: str
    trainings: str  # the class
    sources: int
    count: int
    median: float
    percentile_90: float
    worst: float
    with_ends: int  # predicted times whose interval has both ends
    inside: float | None  # share of these intervals that contain the measured time


# ---------------------------------------------------------------- the table


@cache
def measurements() -> dict[tuple[str, str], list[MeasuredCase]]:
    """Return the measured quantities of each training, by its family and name."""
    found: dict[tuple[str, str], list[MeasuredCase]] = {}
    published = (*measured_by_others.cases("times"), *measured_by_others.cases("memory"))
    files = public_errors.PREDICTIONS, public_errors.LATER, public_errors.REST
    of_public_runs = itertools.chain.from_iterable(map(public_errors.measured_cases, files))
    for case in (*published, *measured_by_others.cases_of("adapters"), *of_public_runs):
        if case.quantity in (*TIMES, *MEASURED):
            found.setdefault((case.family, case.name), []).append(case)
    return found


def lines() -> list[Setting]:
    """Return the lines of the table."""
    published = cross_validation.published()
    fitted = {(timed.family, timed.name) for timed in published if timed.fitted or timed.kind == "offload"}
    # The constants of TCP, of launches and of uneven heads in step_time.py are fitted to public logs of this source.
    return [_line(cases, key in fitted or key[0].startswith("ptd_benchmark")) for key, cases in measurements().items()]


def _line(cases: list[MeasuredCase], is_fitted: bool) -> Setting:
    case = cases[0]
    shape, box, gpu = case.shape, case.box, case.box.gpu
    of_engine, of_job = dataclasses.asdict(case.engine), dataclasses.asdict(case.job)
    values = {"seconds" if each.quantity in TIMES else each.quantity: each for each in cases}
    return {
        **{name: getattr(case, name) for name in ("family", "name", "measured_by", "grade", "outside")},
        "fitted": is_fitted,
        **{name: getattr(shape, name) for name in OF_MODEL},
        "adapter": shape.adapter and dataclasses.asdict(shape.adapter),
        "gpu": gpu.name,
        "gpu_flops_per_second": hardware.product_flops_per_second(gpu, case.engine.precision),
        **{f"gpu_{name}": getattr(gpu, name) for name in OF_GPU},
        **{name: getattr(box, name) for name in OF_MACHINE},
        **{name: value for name, value in of_engine.items() if name != "world_size"},
        **{name: value for name, value in of_job.items() if name != "device"},
        **{
            name: (each.seconds if name == "seconds" else each.published) if (each := values.get(name)) else None
            for name in MEASURED
        },
    }


def text() -> str:
    """Return the table in JSON: the names of the columns, and a line of values for each training."""
    rows = [[float(f"{value:.6g}") if isinstance(value, float) else value for value in row.values()] for row in lines()]
    body = ",\n".join(map(json.dumps, rows))
    return f'{{"columns": {json.dumps([*lines()[0]])}, "rows": [\n{body}\n]}}\n'


def read() -> list[Setting]:
    """Read the committed table. What is not known, or was not measured, is None."""
    content = json.loads(TABLE.read_text(encoding="utf-8"))
    return [dict(zip(content["columns"], row, strict=True)) for row in content["rows"]]


# ---------------------------------------------------------------- planners


def planner(setting: Setting) -> Mapping[str, Any]:
    """Predict a training with this project's planner, as `advise` prints it."""
    case = measurements()[setting["family"], setting["name"]][0]
    peak = peaks.peak(case.shape, case.engine, case.job)
    answer = {"bytes": prediction.needed_for(peak), "fits": prediction.fits(peak, case.box)}
    try:
        step = step_time.seconds(case.shape, case.engine, case.job, case.box)
    except ValueError:  # the host of an offload is not known
        return answer
    return answer | {"seconds": step.total, "low": step.low, "high": None if math.isinf(step.high) else step.high}


def six_nd(setting: Setting, utilization: float = 0.4) -> Mapping[str, Any]:
    """Predict the time as 6 FLOPs per parameter and token, at 40 % of the GPU's peak."""
    tokens = setting["micro_batch_size"] * setting["sequence_length"] * setting["gradient_accumulation_steps"]
    return {"seconds": 6 * setting["active_params"] * tokens / (utilization * setting["gpu_flops_per_second"])}


# ---------------------------------------------------------------- scores


def class_of(setting: Setting) -> str:
    """Return the class of a training in the scores."""
    if setting["adapter"]:
        return "LoRA and QLoRA"
    if setting["experts"]:
        return "mixtures of experts"
    if setting["offload_optimizer"] != "none" or setting["offload_param"] != "none":
        return "offload"
    if setting["num_gpus"] == 1:
        return "one GPU"
    if setting["num_nodes"] > 1:
        return "several machines"
    return {"fsdp": "one machine, FSDP", "ddp": "one machine, DDP"}.get(setting["kind"], "one machine, ZeRO")


def answers(predict: Planner) -> list[tuple[Setting, Mapping[str, Any]]]:
    """Return each line of the table with what a planner predicts, which does not see the measured values."""
    return [(row, predict({name: value for name, value in row.items() if name not in MEASURED})) for row in read()]


def scores(answered: list[tuple[Setting, Mapping[str, Any]]], with_fitted: bool = False) -> list[Score]:
    """Score a planner: its times by class and of all classes, and its memory by what was measured."""
    groups: dict[tuple[str, str], list[tuple[Setting, float, bool | None]]] = {}
    for row, answer in answered:
        if row["grade"] not in COUNTED or row["outside"]:
            continue
        for quantity in MEASURED[:-1]:
            value, predicted = row[quantity], answer.get("seconds" if quantity == "seconds" else "bytes")
            is_left_out = quantity == "seconds" and row["fitted"] and not with_fitted
            if value is None or predicted is None or is_left_out:
                continue
            low, high = (answer.get(end) if quantity == "seconds" else None for end in ("low", "high"))
            is_inside = None if low is None or high is None else bool(low <= value <= high)
            for name in (f"time, {class_of(row)}", "all times") if quantity == "seconds" else ("all",):
                groups.setdefault((quantity, name), []).append((row, float(predicted / value - 1), is_inside))
    order = sorted(groups, key=lambda key: (MEASURED.index(key[0]), key[1] == "all times", key[1]))
    return [_score(*key, groups[key]) for key in order]


def _score(quantity: str, name: str, members: list[tuple[Setting, float, bool | None]]) -> Score:
    summary = summarize((row["name"], error) for row, error, _ in members)
    known = [is_inside for _, _, is_inside in members if is_inside is not None]
    errors = (summary[key] for key in ("count", "median", "percentile_90", "worst"))
    num_sources = len({row["measured_by"] for row, _, _ in members})
    return Score(quantity, name, num_sources, *errors, len(known), sum(known) / len(known) if known else None)


def fitting(answered: list[tuple[Setting, Mapping[str, Any]]]) -> dict[bool, list[bool]]:
    """Return whether trainings are predicted to fit, by whether they trained. Trainings of all grades count."""
    found: dict[bool, list[bool]] = {True: [], False: []}
    for row, answer in answered:
        if (fits := answer.get("fits")) is not None:
            found[row["fits"] is not False].append(bool(fits))
    return found


# ---------------------------------------------------------------- calibration

Timed = tuple[StepTime, float]  # a predicted step, and its measured seconds


def groups(by_model: bool = False) -> dict[tuple[str, ...], list[Timed]]:
    """Return the trainings of each family on one kind of GPU, and with `by_model` of one model, of grades A and B."""
    found: dict[tuple[str, ...], list[Timed]] = {}
    for cases in measurements().values():
        case = next((case for case in cases if case.quantity in TIMES), None)
        if case is not None and case.grade in COUNTED and not case.outside:
            key = (case.family, case.box.gpu.name, *([case.shape.name] if by_model else []))
            step = step_time.seconds(case.shape, case.engine, case.job, case.box)
            found.setdefault(key, []).append((step, case.seconds))
    return {key: rows for key, rows in found.items() if len({round(step.total, 9) for step, _ in rows}) > 2}


def is_mixed(rows: list[Timed]) -> bool:
    """Return whether different components are the largest in the predictions of a group."""
    return len({int(np.argmax(calibration.parts_of(step))) for step, _ in rows}) > 1


def calibrated(rows: list[Timed], num_logs: int) -> tuple[float, float, float]:
    """Return the median error of a group: uncalibrated, with one factor, and by component.

    Each choice of `num_logs` trainings calibrates the others in turn.
    """
    parts = np.array([calibration.parts_of(step) for step, _ in rows])
    measured = np.array([seconds for _, seconds in rows])
    errors = []
    for logs in map(list, itertools.combinations(range(len(rows)), num_logs)):
        by_component = calibration.factors_of([rows[index] for index in logs])
        factor = np.exp(np.log(measured[logs] / parts[logs].sum(axis=1)).mean())
        factors = np.array([[1.0, factor, by_component.get(name, 1.0)] for name in calibration.COMPONENTS])
        others = np.delete(parts @ factors / measured[:, None], logs, axis=0)
        errors.append(np.abs(others - 1))
    uncalibrated, one_factor, by_component = np.median(np.concatenate(errors), axis=0)
    return float(uncalibrated), float(one_factor), float(by_component)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("function", nargs="?", default="planner_benchmark:planner", metavar="MODULE:FUNCTION")
    parser.add_argument("--fitted", action="store_true", help="count trainings to which constants were fitted, too")
    parser.add_argument("--write", action="store_true", help="write the table")
    options = parser.parse_args()
    if options.write:
        TABLE.write_text(text(), encoding="utf-8")
        return
    module, _, name = options.function.partition(":")
    sys.path.insert(0, ".")
    answered = answers(getattr(importlib.import_module(module), name))
    cells = [
        [f"{100 * cell:.1f} %" if isinstance(cell, float) else str(cell or "") for cell in score]
        for score in scores(answered, options.fitted)
    ]
    print(*terminal.table(list(Score._fields), cells), sep="\n")
    for trained, fits in fitting(answered).items():
        if fits:
            print(f"{'trained' if trained else 'ran out of memory'}: {fits.count(trained)} of {len(fits)} right")


if __name__ == "__main__":
    main()
