"""How far is the model of step times from what others published?

    zero-study accuracy [FILE.csv] [--output FILE]

Prints the constants that a fit gives; errors of predicted step times, as the constants stand and by fits without a
family of rows, a model size, a number of GPUs, a card or a generation of GPUs, beside two rules of thumb; and the
interval that held for each kind of case. FILE.csv: other rows of the tables in study/theory/measured_by_others; then
only the constants as they stand are judged, by these rows.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from study import files
from study.errors import Refusal
from study.files import ROOT
from study.planner import cross_validation
from study.planner.cross_validation import PREDICTORS, SPLITS
from study.records.machine import header
from study.theory import measured_by_others, on_box, peaks, step_time, trust
from study.theory.measured_by_others import MeasuredCase, MeasuredRow

VALIDATION = ROOT / "reports" / "predicted" / "validation" / "published_throughput.json"
COMMAND = "zero-study accuracy"
CASE = ("name", "family", "grade", "outside")  # what is told of a published time


@dataclass(frozen=True)
class Validation:
    """What the benchmark wrote, and the published rows that it is about, in the same order."""

    content: dict[str, Any]
    rows: list[MeasuredRow]

    def find(self, left_out: str, predictor: str, by: str, group: str) -> dict[str, Any] | None:
        """Find one row of the table of errors; None where nothing could be predicted there."""
        asked = {"left_out": left_out, "predictor": predictor, "by": by, "group": group}
        return next((row for row in self.content["errors"] if asked.items() <= row.items()), None)

    def summary(self, left_out: str, predictor: str, by: str, group: str) -> dict[str, Any]:
        """Find one row that is there."""
        found = self.find(left_out, predictor, by, group)
        assert found is not None
        return found


def load(path: Path = VALIDATION) -> Validation:
    """Read what the benchmark wrote; raises Refusal where it is not there, or is of other rows."""
    again = f"run {COMMAND} --output {VALIDATION.relative_to(ROOT)}"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        titles = [entry["row"] for entry in content["rows"]]
    except OSError as error:
        raise Refusal(f"{path.name}: {error.strerror}; {again}") from None
    except (ValueError, KeyError, TypeError):
        raise Refusal(f"{path.name}: not what {COMMAND} writes; {again}") from None
    rows = measured_by_others.throughput_rows()
    if titles != [row.title for row in rows]:
        raise Refusal(f"{path.name}: has other rows than {measured_by_others.THROUGHPUT.name}; {again}")
    return Validation(content, rows)


def measure(path: Path | None, output: Path | None, command: str) -> None:
    """Print the errors by the rows of a file, by default of all that is published, and write them with the command."""
    try:
        rows = measured_by_others.throughput_rows(path or measured_by_others.THROUGHPUT)
    except OSError as error:
        columns = f"give a CSV with the columns of {measured_by_others.THROUGHPUT.name}"
        raise Refusal(f"{path}: {error.strerror.lower()}; {columns}") from None
    except ValueError as error:
        raise Refusal(str(error)) from None
    if all(row.fp8 for row in rows):
        raise Refusal(
            f"{path}: has no row to judge by; give rows with the columns of {measured_by_others.THROUGHPUT.name}"
        )
    result = judge(rows)
    if path is None:
        result |= cross_validated(cross_validation.published())
        result["cases"] = [compare(case) for case in measured_by_others.cases()]
    say(result)
    if output:
        files.write_json(output, {**header("published_throughput", command), **result})


def judge(rows: list[MeasuredRow]) -> dict[str, Any]:
    """Judge the constants as they stand. Rows in fp8 apart: they are predicted as if they were in bf16."""
    judged = []
    for row in rows:
        time = step_time.seconds(row.shape, row.engine, row.job, row.box)
        predicted = float(step_time.tokens_per_second_per_gpu(row.job, time.total))
        judged.append(
            {
                "row": row.title,
                "published": row.tokens_per_second_per_gpu,
                "predicted": predicted,
                "error": row.tokens_per_second_per_gpu / predicted - 1,  # of the step's time
                "fp8": row.fp8,
            }
        )
    errors = [(entry["row"], entry["error"]) for entry in judged if not entry["fp8"]]
    return {"as_they_stand": cross_validation.summarize(errors), "rows": judged}


def cross_validated(times: list[cross_validation.Timed]) -> dict[str, Any]:
    """Fit to all times, and to all but some, and judge by those."""
    fitted, judged = cross_validation.fit(times), cross_validation.judge(times)
    return {
        "fit": {
            **{name: dataclasses.asdict(constants) for name, constants in sorted(fitted.constants.items())},
            "host_thread_bandwidth": fitted.host_thread_bandwidth,
            "share_of_peak": fitted.share,
        },
        "errors": cross_validation.tables(judged),
        "unseen": [_unseen(one) for one in judged if "family" in one.left_out],
        "intervals": cross_validation.intervals(judged),
    }


def _unseen(one: cross_validation.Judged) -> dict[str, Any]:
    """Say how far a time is missed by a fit without its family."""
    error = one.left_out["family"]["planner"]
    assert error is not None
    return {name: getattr(one.timed, name) for name in CASE} | {"error": round(error, cross_validation.DIGITS)}


def compare(case: MeasuredCase) -> dict[str, Any]:
    """Predict one published time, in the quantity that was published; its error is of the step's time."""
    time = step_time.seconds(case.shape, case.engine, case.job, case.box)
    timed = cross_validation.of_case(case)
    total, slower = float(time.total), case.quantity == "seconds_per_step"
    return {
        **{name: getattr(case, name) for name in (*CASE, "quantity", "published")},
        "predicted": case.published * (total / timed.seconds if slower else timed.seconds / total),
        "error": total / timed.seconds - 1,
        "inside_interval": bool(time.low <= timed.seconds <= time.high),
        "calibrates": timed.fitted or timed.kind == "offload",
    }


def by_deepspeed(case: MeasuredCase) -> float:
    """Reckon bytes as DeepSpeed's estimators do: states of 16-bit training; nothing of activations.

    runtime/zero/stage_1_and_2.py and stage3.py, estimate_zero2_model_states_mem_needs and estimate_zero3_...; without
    ZeRO as its stage 2 on one GPU, FSDP as stage 3.
    """
    psi, gpus = case.shape.num_params, case.engine.world_size
    if case.engine.zero_stage == 3:
        return 18 * psi / gpus + 4 * max(case.shape.parameters.matrices)
    return 4 * psi + 16 * psi / (gpus if case.engine.zero_stage else 1)


def by_accelerate(case: MeasuredCase) -> float:
    """Reckon bytes as `accelerate estimate-memory` does for training with Adam: four times the parameters."""
    return 4.0 * case.engine.parameter_bytes * case.shape.num_params


ESTIMATORS: dict[str, Callable[[MeasuredCase], float]] = {
    "planner": lambda case: float(on_box.predicted_memory(case)),
    "DeepSpeed's estimator": by_deepspeed,
    "accelerate's estimator": by_accelerate,
}


METRICS = {
    "peak_allocated_bytes": "peak of tensors",
    "peak_unknown_bytes": "peak, instrument not named",
    "peak_reserved_bytes": "peak reserved by the allocator",
    "used_bytes": "whole card",
    "allocated_bytes": "tensors between steps",
}
ACTIVATIONS = "of these, peaks that activations decide"


def amounts() -> list[MeasuredCase]:
    """List published amounts of memory; what a family measured alike in one setting twice counts once."""
    found: dict[Any, MeasuredCase] = {}
    for case in measured_by_others.cases("memory"):
        if case.quantity != "fits":
            alike = case.family, case.quantity, case.published, float(on_box.predicted_memory(case))
            found.setdefault(alike, case)
    return list(found.values())


def activations_decide(case: MeasuredCase) -> bool:
    """Whether theory's peak is in forward or backward: in the optimizer's step states decide."""
    moment = int(peaks.peak(case.shape, case.engine, case.job).moment)
    return peaks.MOMENTS[moment] != "optimizer step"


def memory() -> list[dict[str, Any]]:
    """Sum up errors of predicted memory by metric and grade, and of peaks of tensors by family, these beside
    estimators: predicted over published, less one. Nothing is fitted to memory."""
    cases = amounts()
    kinds = [(name, [case for case in cases if case.quantity == quantity]) for quantity, name in METRICS.items()]
    tensors = kinds[0][1]
    kinds.insert(1, (ACTIVATIONS, [case for case in tensors if activations_decide(case)]))
    groups = [
        ("metric", f"{name}, grade {grade}", [case for case in members if case.grade == grade])
        for name, members in kinds
        for grade in "ABC"
    ]
    families = dict.fromkeys((case.family, case.grade) for case in tensors)
    groups += [
        ("family", f"{family}, {grade}", [case for case in tensors if (case.family, case.grade) == (family, grade)])
        for family, grade in families
    ]
    rows = []
    for by, group, members in groups:
        for estimator, estimate in ESTIMATORS.items():
            if members and (estimator == "planner" or members[0].quantity == "peak_allocated_bytes"):
                errors = [(case.name, estimate(case) / case.published - 1) for case in members]
                rows.append({"by": by, "group": group, "predictor": estimator, **cross_validation.summarize(errors)})
    return rows


@dataclass(frozen=True)
class Verdict:
    """Whether a published configuration is said to fit, and whether it trained."""

    case: MeasuredCase
    predicted: bool

    @property
    def trained(self) -> bool:
        return bool(self.case.published)


def fits_verdicts() -> list[Verdict]:
    """Hold what is said to fit against every configuration of published.yaml: it trained, or ran out of memory."""
    found: dict[Any, Verdict] = {}
    for kind in ("times", "memory"):
        for case in measured_by_others.cases(kind):
            predicted = bool(on_box.fits(peaks.peak(case.shape, case.engine, case.job), case.box))
            found.setdefault((case.shape, case.engine, case.job, case.box), Verdict(case, predicted))
    return list(found.values())


# ---------------------------------------------------------------- in words


def say(result: dict[str, Any]) -> None:
    """Print what was found."""
    print("errors of a step's time: predicted over published, less one")
    print(f"as the constants stand: {_shown(result['as_they_stand'])}")
    worst_first = sorted(result["rows"], key=lambda entry: (not entry["fp8"], -abs(entry["error"])))
    num_fp8 = sum(entry["fp8"] for entry in worst_first)
    for entry in worst_first[: num_fp8 + 5]:
        print(f"  {'predicted as bf16' if entry['fp8'] else 'among the worst'} {entry['error']:+.1%} {entry['row']}")
    if "errors" not in result:
        return
    for name, constants in result["fit"].items():
        values = constants.items() if isinstance(constants, dict) else [("", constants)]
        print(f"fitted, {name}: {', '.join(f'{key} {value:.3g}'.strip() for key, value in values)}")
    for left_out in ("nothing", *SPLITS):
        print(f"left out: {left_out if left_out != 'nothing' else 'nothing, so that these are in sample'}")
        for row in result["errors"]:
            if row["left_out"] == left_out and (row["by"] == "grade" or row["predictor"] == next(iter(PREDICTORS))):
                print(f"  {row['predictor']}, {row['by']} {row['group']}: {_shown(row)}")
    print("intervals that nine of ten predictions lay in, each by a fit without what is named")
    for found in result["intervals"]:
        checked = f"with the rows that the model does not describe, {found['held_all']} of {found['tried_all']}"
        print(f"  {found['engine']}, {found['distance']}: {evidence(found).sentence}; {checked}")
    for case in result["cases"]:
        print(
            f"{case['name']}: {case['quantity']} {case['predicted']:.4g}, "
            f"published {case['published']:g}, time {case['error']:+.0%}"
        )


def evidence(found: dict[str, Any]) -> trust.Evidence:
    """Read one of the intervals as study/theory/trust.py has it."""
    names = [field.name for field in dataclasses.fields(trust.Evidence) if field.name != "lacks"]  # that is of a case
    return trust.Evidence(**{name: found[name] for name in names} | {"left_out": tuple(found["left_out"])})


def _shown(summary: dict[str, Any]) -> str:
    return (
        f"{summary['count']} times: median {summary['median']:.1%}, 90th percentile {summary['percentile_90']:.1%}, "
        f"{summary['too_slow']} too slow, {summary['too_fast']} too fast, worst {summary['worst']:+.1%} "
        f"({summary['worst_case']})"
    )
