"""Count the models of tools/hub_models.json, and write the table that the planner reads without PyTorch.

    python tools/hub_table.py [--write] [NAME ...]

The table is study/theory/shapes/hub_models.json.gz. Each model is counted in a process of its own. All of them take
about half an hour. `--write` with names replaces only these models.
"""

from __future__ import annotations

import argparse
import gzip
import json
import logging
import sys
from typing import Any

from study import files
from study.dryrun import models
from study.errors import Refusal, RunFailed
from study.files import ROOT
from study.theory.shapes.counts import to_content

CONFIGURATIONS = ROOT / "tools" / "hub_models.json"
TABLE = ROOT / "study" / "theory" / "shapes" / "hub_models.json.gz"


def counted(entry: dict[str, Any]) -> dict[str, Any]:
    """Return the entry of a model in the table. Raises Refusal if the model cannot be traced."""
    built, config = models.class_of(entry["config"], entry["name"])
    shape = models.shape_of_class(built, config, entry["name"])
    assert shape.counts is not None
    if shape.num_params != entry["parameters"]:
        raise Refusal(f"{entry['name']}: counted {shape.num_params:,} of {entry['parameters']:,} parameters")
    return {
        "name": entry["name"],
        "hub_ids": entry["hub_ids"],
        "source": entry["source"],
        "positions": shape.positions,
        "notes": list(shape.notes),
        "config": entry["config"],
        "counts": to_content(shape.counts),
    }


def read() -> dict[str, dict[str, Any]]:
    """Return the entries of the committed table by name. Empty if there is no table."""
    if not TABLE.exists():
        return {}
    return {entry["name"]: entry for entry in json.loads(gzip.decompress(TABLE.read_bytes()))}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    entries = [
        each for each in json.loads(CONFIGURATIONS.read_text()) if not options.names or each["name"] in options.names
    ]
    table = read() if options.names else {}
    refused = 0
    for entry in entries:
        try:
            table[entry["name"]] = counted(entry)
            print(f"{entry['name']}: {entry['parameters']:,} parameters", flush=True)
        except (Refusal, RunFailed) as reason:
            refused += 1
            print(f"refused: {reason}", file=sys.stderr, flush=True)
    print(f"{len(entries) - refused} of {len(entries)} counted")
    if options.write:
        content = json.dumps([table[name] for name in sorted(table)], separators=(",", ":"))
        files.write_whole(TABLE, gzip.compress(content.encode(), mtime=0))
    return int(refused > 0)


if __name__ == "__main__":
    sys.exit(main())
