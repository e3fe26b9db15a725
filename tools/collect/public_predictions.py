"""Predict the trainings of public_logs.yaml, before their measured values are read into the project.

    python tools/collect/public_predictions.py [--write]

Prints a summary of each family. With --write, it also writes reports/predicted/public_logs.json: for each training the
predicted seconds per step with their interval, the predicted memory, and the quantities that its log states; and the
settings that the planner cannot express, with the reasons.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from typing import Any

import yaml

from study import terminal
from study.files import write_whole
from study.planner import public_errors
from study.planner.public_errors import PREDICTIONS
from study.theory import measured_by_others

SETTINGS = measured_by_others.FOLDER / "public_logs.yaml"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the file, unless it was written before")
    options = parser.parse_args()
    content = predictions()
    counts = Counter(row["family"] for row in content["predictions"])
    short = Counter(row["family"] for row in content["predictions"] if row["is_short"])
    rows = [(family, counts[family], short[family]) for family in counts]
    print(*terminal.table(["family", "trainings", "short"], rows, has_ruler=True), sep="\n")
    print(f"not expressible: {len(content['not_expressible'])} groups of settings")
    if options.write and PREDICTIONS.exists():
        raise SystemExit(f"{PREDICTIONS}: written before the logs were read, and judged as it is. Nothing is written.")
    if options.write:
        write_whole(PREDICTIONS, as_text(content).encode())
        print(f"{PREDICTIONS}: written")


def predictions() -> dict[str, Any]:
    """Return what the committed file has."""
    settings = yaml.safe_load(SETTINGS.read_text(encoding="utf-8"))
    return {
        "command": "python tools/collect/public_predictions.py --write",
        "predictions": public_errors.predictions(),
        "not_expressible": settings["not_expressible"],
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
