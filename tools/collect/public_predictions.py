"""Predict trainings of others, before their measured values are read.

    python tools/collect/public_predictions.py [public_logs | later_public_logs | mpt_throughput_rest] [--write]

Prints a summary of each family. With --write, it also writes the files in reports/predicted that do not exist yet: for
each training the predicted seconds per step with their interval, the predicted memory, and the quantities that its log
states; and the settings that the planner cannot express, with the reasons.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from typing import Any

import yaml

from study.accuracy import public_errors
from zero_study import terminal
from zero_study.files import write_whole
from zero_study.theory import measured_by_others

# The files with settings, and those with their predictions.
NAMES = ("public_logs", "later_public_logs", "mpt_throughput_rest")
PREDICTIONS = public_errors.PREDICTIONS.parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", choices=NAMES, help="predict only these; otherwise all")
    parser.add_argument("--write", action="store_true", help="write the files that do not exist yet")
    options = parser.parse_args()
    for name in [options.name] if options.name else NAMES:
        path, content = PREDICTIONS / f"{name}.json", predictions(name)
        counts = Counter(row["family"] for row in content["predictions"])
        rough = Counter(row["family"] for row in content["predictions"] if row["interval"][1] is None)
        rows = [(family, counts[family], rough[family]) for family in counts]
        print(*terminal.table(["family", "trainings", "no upper end"], rows, has_ruler=True), sep="\n")
        print(f"not expressible: {len(content['not_expressible'])} groups of settings")
        if options.write and path.exists():
            print(f"{path}: written before the values were read, and judged as it is. It is not written again.")
        elif options.write:
            write_whole(path, as_text(content).encode())
            print(f"{path}: written")


def settings(name: str) -> Any:
    """Return the content of the file with the settings."""
    return yaml.safe_load((measured_by_others.FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))


def predictions(name: str) -> dict[str, Any]:
    """Return what the committed file has."""
    return {
        "command": f"python tools/collect/public_predictions.py {f'{name} ' if name == NAMES[1] else ''}--write",
        "predictions": public_errors.predict_all(measured_by_others.cases_of(name)),
        "not_expressible": settings(name)["not_expressible"],
    }


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
