"""Compute the errors of predicted step times on published ones, and the interval of each kind of case.

    python tools/derive/planner_accuracy.py [--write]

Prints the constants of a new fit, the errors of the present constants, and the errors of fits without a family of rows,
a model size, a number of GPUs, a GPU or a generation of GPUs, compared with two rules of thumb. Also prints the
intervals and the errors of memory. With --write, it also writes evidence.json of zero_study.theory.measured_by_others,
which `advise` reads, and the validation under reports/predicted, if their contents changed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import cross_validation

from study.accuracy import published_rows
from study.accuracy.published_rows import DIGITS, VALIDATION
from study.records.machine import benchmark_header
from zero_study import files, terminal
from zero_study.theory import intervals, measured_by_others, step_time
from zero_study.theory.intervals import STORED
from zero_study.theory.measured_by_others import MeasuredCase

EVIDENCE = measured_by_others.FOLDER / "evidence.json"
CASE = ("name", "family", "grade", "outside")  # what is said of a published time
TOLERANCE = 1e-3  # relative: another machine's least squares end elsewhere


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the committed files where they changed")
    options = parser.parse_args()
    times = cross_validation.published()
    others = cross_validation.further()
    result = cross_validated(times, others) | {"cases": compared()}
    say(result)
    if options.write:
        head = benchmark_header("published_throughput", f"{published_rows.COMMAND} --write")
        _write(VALIDATION, head, result)
        _write(EVIDENCE, {}, evidence(times, others, result["intervals"]))


def evidence(
    times: list[cross_validation.Timed], others: list[cross_validation.Timed], spreads: list[dict[str, Any]]
) -> dict[str, Any]:
    """Gather what zero_study/theory/intervals.py reads: the published times, and the intervals derived from them."""
    rows = [timed for timed in times if timed.fitted]
    generations = sorted({row.generation for row in rows})
    counted = [timed for timed in (*times, *others) if timed.grade != "C" and not timed.outside]
    gpu_counts: dict[str, dict[str, list[int]]] = {}
    for timed in sorted(counted, key=lambda timed: (timed.kind, timed.generation)):
        if timed.generation in generations:
            least, most = gpu_counts.setdefault(timed.kind, {}).get(timed.generation, (math.inf, 0))
            count = timed.box.num_gpus
            gpu_counts[timed.kind][timed.generation] = [int(min(least, count)), max(most, count)]
    return {
        "generations": generations,
        "timed_generations": sorted({timed.generation for timed in counted}),
        "gpu_counts": gpu_counts,
        "optimizers": sorted({timed.engine.optimizer for timed in times}),
        # A T4 stands in for the Titan RTX of one row, and is no card of theirs.
        "cards": sorted({timed.box.gpu.name for timed in times} - {"t4"}),
        "intervals": [{name: interval[name] for name in STORED} for interval in spreads],
        "memory": memory_errors(),
    }


def memory_errors() -> list[dict[str, Any]]:
    """Summarize the errors of the memory that `advise` prints, by class of engine and by what was measured."""
    groups: dict[tuple[str, str], list[tuple[MeasuredCase, float]]] = {}
    for case, error in published_rows.printed_memory():
        kind = intervals.memory_class(case.shape, case.engine)
        groups.setdefault((kind, case.quantity), []).append((case, error))
    summaries = []
    for (kind, quantity), errors in sorted(groups.items()):
        summary = published_rows.summarize((case.name, error) for case, error in errors)
        sources = len({published_rows.source_of(case) for case, _ in errors})
        summaries.append(
            {"engine": kind, "quantity": quantity, "sources": sources, "too_low": summary["too_fast"]}
            | {name: summary[name] for name in ("count", "median", "percentile_90", "worst")}
        )
    return summaries


def _write(path: Path, head: dict[str, Any], content: dict[str, Any]) -> None:
    """Write a file if its content has changed."""
    existing = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if is_same({name: existing.get(name) for name in content}, json.loads(json.dumps(content))):
        print(f"{path}: unchanged")
        return
    files.write_json(path, {**head, **content})
    print(f"{path}: written")


def is_same(a: Any, b: Any) -> bool:
    """Return whether two contents are equal, except for the last digits of numbers."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(is_same(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(is_same, a, b))
    if isinstance(a, float) and isinstance(b, int | float):
        return math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    return bool(a == b)


def cross_validated(times: list[cross_validation.Timed], others: list[cross_validation.Timed]) -> dict[str, Any]:
    """Fit to all times and to all but one group, and judge these fits."""
    fitted, judged = cross_validation.fit(times), cross_validation.judge(times)
    return {
        "fit": {
            **{name: dataclasses.asdict(constants) for name, constants in sorted(fitted.constants.items())},
            "host_thread_bandwidth": fitted.host_thread_bandwidth,
            "share_of_peak": fitted.share,
        },
        "errors": cross_validation.tables(judged),
        "unseen": [  # how far a time is missed by a fit without its family
            {name: getattr(judgment.timed, name) for name in CASE}
            | {"error": round(judgment.left_out["family"]["planner"], DIGITS)}
            for judgment in judged
            if "family" in judgment.left_out
        ],
        "intervals": cross_validation.intervals(cross_validation.predicted_apart(judged, others)),
    }


def compared() -> list[dict[str, Any]]:
    """Compare every published time with its prediction by the present constants."""
    return [compare(case) for case in (*measured_by_others.cases_of("mpt_throughput"), *measured_by_others.cases())]


def compare(case: MeasuredCase) -> dict[str, Any]:
    """Predict one published time in the published quantity. The error is that of the step time."""
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


def say(result: dict[str, Any]) -> None:
    """Print the errors, predicted over published less one: first of step times, then of memory."""
    for name, constants in result["fit"].items():
        print(f"fitted, {name}: {constants}")
    errors = [row for row in result["errors"] if row["by"] == "grade" or row["predictor"] == "planner"]
    for rows in errors, result["intervals"], result["cases"], published_rows.memory():
        cells = [[f"{cell:.3g}" if isinstance(cell, float) else cell for cell in row.values()] for row in rows]
        print("", *terminal.table(list(rows[0]), cells), sep="\n")


if __name__ == "__main__":
    main()
