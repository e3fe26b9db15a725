"""Predict trainings of others, before their measured values are read.

    python tools/collect/public_predictions.py [public_logs | later_public_logs | mpt_throughput_rest] [--write]

Prints a summary of each family. With --write, it also writes the files in reports/predicted that do not exist yet: for
each training the predicted seconds per step with their interval, the predicted memory, and the quantities that its log
states; and the settings that the planner cannot express, with the reasons.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import yaml

from study import terminal
from study.files import ROOT, write_whole
from study.planner import choose
from study.theory import measured_by_others, peaks, prediction, step_time
from study.theory.measured_by_others import MeasuredCase

REST = "mpt_throughput_rest"
NAMES = ("public_logs", "later_public_logs", REST)  # of files with settings, and of those with their predictions
PREDICTIONS = ROOT / "reports" / "predicted"
DIGITS = 4  # significant digits of seconds and rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", choices=NAMES, help="predict only these; otherwise all")
    parser.add_argument("--write", action="store_true", help="write the files that do not exist yet")
    options = parser.parse_args()
    for name in [options.name] if options.name else NAMES:
        path, content = PREDICTIONS / f"{name}.json", predictions(name)
        counts = Counter(row["family"] for row in content["predictions"])
        short = Counter(row["family"] for row in content["predictions"] if row["is_short"])
        rows = [(family, counts[family], short[family]) for family in counts]
        print(*terminal.table(["family", "trainings", "short"], rows, has_ruler=True), sep="\n")
        print(f"not expressible: {len(content['not_expressible'])} groups of settings")
        if options.write and path.exists():
            print(f"{path}: written before the values were read, and judged as it is. It is not written again.")
        elif options.write:
            write_whole(path, as_text(content).encode())
            print(f"{path}: written")


def settings(name: str) -> Any:
    """Return the content of the file with the settings. Empty for the rows of MosaicML's tables."""
    if name == REST:
        return {"families": [], "not_expressible": []}
    return yaml.safe_load((measured_by_others.FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))


def predictions(name: str) -> dict[str, Any]:
    """Return what the committed file has."""
    by_training = itertools.groupby(cases(name), key=lambda case: case.name)
    return {
        "command": f"python tools/collect/public_predictions.py {f'{name} ' if name == NAMES[1] else ''}--write",
        "predictions": [predict(list(members)) for _, members in by_training],
        "not_expressible": settings(name)["not_expressible"],
    }


def cases(name: str) -> list[MeasuredCase]:
    """Return the trainings to predict, without what was measured."""
    return measured_by_others.rest_of_throughput() if name == REST else measured_by_others.public_logs(f"{name}.yaml")


def predict(cases: Sequence[MeasuredCase]) -> dict[str, Any]:
    """Predict one training. It has one case for each quantity that its log states."""
    case = cases[0]
    step = step_time.seconds(case.shape, case.engine, case.job, case.box)
    is_short = choose.is_short(case.shape, case.engine, case.job, step)
    has_no_end = is_short or math.isinf(step.high)
    row: dict[str, Any] = {
        "id": case.name,
        "family": case.family,
        "log": case.log,
        "compare": [measurement.quantity for measurement in cases],
        "is_judged": not case.outside,
        "is_short": is_short,
        "seconds_per_step": _short(step.total),
        "interval": [_short(step.low), None if has_no_end else _short(step.high)],
        "tokens_per_second_per_gpu": _short(step_time.tokens_per_second_per_gpu(case.job, step.total)),
        "peak_allocated_bytes": round(float(peaks.peak(case.shape, case.engine, case.job).total)),
    }
    for measurement in cases:
        if measurement.quantity not in (*row, *measured_by_others.TIMES):
            value = prediction.predicted_memory(measurement)
            row[measurement.quantity] = value if isinstance(value, bool) else round(value)
    return row


def _short(value: float) -> float:
    return float(f"{float(value):.{DIGITS}g}")


def as_text(content: dict[str, Any]) -> str:
    """Return JSON with one line for each training."""
    parts = []
    for name, value in content.items():
        if isinstance(value, list):
            lines = ",\n".join(f"  {json.dumps(entry)}" for entry in value)
            parts.append(f' "{name}": [\n{lines}\n ]')
        else:
            parts.append(f' "{name}": {json.dumps(value)}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    main()
