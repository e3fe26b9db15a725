"""How far is the model of step times from throughput that others published?

    zero-study accuracy [FILE.csv] [--output FILE]

Prints the errors of the constants in study/theory/step_time.py; what a new fit of them gives, and its errors on rows
that it has not seen: of a model size, of a fifth of the rows, of a device; and single published numbers. FILE.csv:
other rows of the tables in study/theory/measured_by_others; then only the constants as they stand are judged, by these
rows.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from study import files
from study.errors import Refusal
from study.files import ROOT
from study.records.results import header
from study.theory import flops, measured_by_others, step_time
from study.theory.measured_by_others import MeasuredCase, MeasuredRow
from study.theory.step_time import AMPERE, HOPPER, Constants

GENERATIONS = {"Ampere": AMPERE, "Hopper": HOPPER}
TARGET = {"median": 0.12, "percentile_90": 0.25}  # of the absolute relative error of tokens/s/GPU
FOLDS = 5
# Beyond this relative error a row pulls on the fit no more than in proportion: a few published rows are odd.
ROBUST_SCALE = 0.03
# Where rows say nothing of a constant, as those of one node say nothing of hops, it stays near what one would guess. A
# factor of e away from the guess counts as much as one row that is 3 % off.
GUESS = Constants(0.8, 0.4, 0.6, 0.5, 20e-6)

Numbers = list[float]

VALIDATION = ROOT / "reports" / "predicted" / "validation" / "published_throughput.json"
COMMAND = "zero-study accuracy"


@dataclass(frozen=True)
class Validation:
    """What the benchmark wrote, and the published rows that it is about, in the same order."""

    content: dict[str, Any]
    rows: list[MeasuredRow]

    @property
    def errors(self) -> list[float]:
        """Predicted over published tokens per second and GPU, less one; in the order of the rows."""
        return [entry["error"] for entry in self.content["rows"]]


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
    """Print the errors by the rows of a file, by default the published, and write them with the command that asked."""
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
    result = {"target": TARGET, **judge(rows)}
    if path is None:
        result["fit"] = {name: cross_validate(known(rows, constants)) for name, constants in GENERATIONS.items()}
        result["other_device"] = other_devices(rows)
        result["cases"] = [compare(case) for case in measured_by_others.cases()]
    say(result)
    if output:
        files.write_json(output, {**header("published_throughput", command), **result})


def known(rows: Iterable[MeasuredRow], constants: Constants) -> list[MeasuredRow]:
    """The rows of one generation that the models of theory can know."""
    return [row for row in rows if not row.fp8 and step_time.constants_of(row.box.gpu) is constants]


def relative_error(row: MeasuredRow, constants: Constants | None = None) -> float:
    """Predicted over published tokens/s/GPU, less one."""
    time = step_time.seconds(row.shape, row.engine, row.job, row.box, constants)
    return float(step_time.tokens_per_second_per_gpu(row.job, time.total) / row.tokens_per_second_per_gpu - 1)


def summarize(errors: Numbers) -> dict[str, float]:
    sizes = np.abs(errors)
    return {
        "count": len(sizes),
        "median": float(np.median(sizes)),
        "percentile_90": float(np.quantile(sizes, 0.9)),
        "maximum": float(sizes.max()),
        "median_signed": float(np.median(errors)),
    }


def judge(rows: list[MeasuredRow]) -> dict[str, Any]:
    """Judge the constants as they stand. Rows in fp8 apart: they are predicted as if they were in bf16."""
    judged = [
        {
            "row": row.title,
            "published": row.tokens_per_second_per_gpu,
            "predicted": row.tokens_per_second_per_gpu * (1 + error),
            "error": error,
            "fp8": row.fp8,
        }
        for row, error in zip(rows, map(relative_error, rows), strict=True)
    ]
    errors = [entry["error"] for entry in judged if not entry["fp8"]]
    spread = step_time.FITTED_SPREAD
    return {
        "as_they_stand": summarize(errors),
        "inside_interval": sum(1 / spread <= 1 + error <= spread for error in errors) / len(errors),
        "rows": judged,
    }


def fit(rows: list[MeasuredRow]) -> Constants:
    """Fit the constants of one generation by robust least squares of the relative errors."""
    from scipy.optimize import least_squares

    start = np.log(dataclasses.astuple(GUESS))

    def errors(logarithms: np.ndarray) -> np.ndarray:
        constants = Constants(*map(float, np.exp(logarithms)))
        of_rows = np.log([1 + relative_error(row, constants) for row in rows])
        return np.concatenate([of_rows, ROBUST_SCALE * (logarithms - start)])

    best = least_squares(errors, start, loss="soft_l1", f_scale=ROBUST_SCALE, bounds=(-np.inf, np.log(1.0)))
    return Constants(*map(float, np.exp(best.x)))


def cross_validate(rows: list[MeasuredRow]) -> dict[str, Any]:
    """Fit to all rows of a generation; then to all but some, and judge by those."""
    fold = np.random.default_rng(0).permutation(len(rows)) % FOLDS
    return {
        "constants": dataclasses.asdict(fit(rows)),
        "model_size": summarize(held_out(rows, lambda index: rows[index].model)),
        "folds": summarize(held_out(rows, lambda index: fold[index])),
    }


def held_out(rows: list[MeasuredRow], group: Callable[[int], Any]) -> Numbers:
    """Errors of each row by constants that were fitted without its group."""
    groups = [group(index) for index in range(len(rows))]
    errors = []
    for left_out in sorted(set(groups)):
        constants = fit([row for row, own in zip(rows, groups, strict=True) if own != left_out])
        errors += [relative_error(row, constants) for row, own in zip(rows, groups, strict=True) if own == left_out]
    return errors


def other_devices(rows: list[MeasuredRow]) -> dict[str, Any]:
    """Judge a device's rows by constants fitted to another: of its generation where there is one."""
    usable = [row for row in rows if not row.fp8]
    names = sorted({row.box.gpu.name for row in usable})
    fitted = {name: fit([row for row in usable if row.box.gpu.name == name]) for name in names}
    return {
        f"{name} by {other}": summarize(
            [relative_error(row, fitted[other]) for row in usable if row.box.gpu.name == name]
        )
        for name in names
        for other in names
        if other != name
    }


def compare(case: MeasuredCase) -> dict[str, Any]:
    """Predict one published number, in the quantity that was published."""
    time = step_time.seconds(case.shape, case.engine, case.job, case.box)
    total = float(time.total)
    sequences = case.job.micro_batch_size * case.job.gradient_accumulation_steps
    if case.quantity == "seconds_per_step":
        predicted = total
    elif case.quantity == "samples_per_second":
        predicted = sequences * case.engine.world_size / total
    else:
        sequence_flops = flops.hardware_flops_per_sequence(
            case.shape, case.job.sequence_length, case.job.activation_checkpointing
        )
        predicted = sequences * sequence_flops / total / 1e12
    return {
        "name": case.name,
        "quantity": case.quantity,
        "published": case.published,
        "predicted": predicted,
        "error": predicted / case.published - 1,
        "inside_interval": 1 / time.spread <= predicted / case.published <= time.spread,
        "calibrates": case.calibrates,
        "source": case.source,
        "conditions": case.conditions,
    }


def say(result: dict[str, Any]) -> None:
    print(f"as they stand      {_shown(result['as_they_stand'])}; {result['inside_interval']:.0%} inside the interval")
    worst_first = sorted(result["rows"], key=lambda entry: (not entry["fp8"], -abs(entry["error"])))
    num_fp8 = sum(entry["fp8"] for entry in worst_first)
    for entry in worst_first[: num_fp8 + 5]:
        print(f"  {'predicted as bf16' if entry['fp8'] else 'among the worst'} {entry['error']:+.1%} {entry['row']}")
    for name, summary in result.get("fit", {}).items():
        print(f"{name}: fitted {', '.join(f'{key} {value:.3g}' for key, value in summary['constants'].items())}")
        print(f"  unseen size      {_shown(summary['model_size'])}")
        print(f"  unseen fifth     {_shown(summary['folds'])}")
    for name, summary in result.get("other_device", {}).items():
        print(f"{name}: {_shown(summary)}")
    for case in result.get("cases", []):
        note = " (a constant was set by it)" if case["calibrates"] else ""
        print(
            f"{case['name']}: {case['quantity']} {case['predicted']:.4g}, published {case['published']:g}, "
            f"{case['error']:+.0%}{note}"
        )


def _shown(summary: dict[str, float]) -> str:
    return (
        f"{summary['count']} rows: median {summary['median']:.1%}, 90th percentile {summary['percentile_90']:.1%}, "
        f"worst {summary['maximum']:.1%}, bias {summary['median_signed']:+.1%}"
    )
