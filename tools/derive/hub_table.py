"""Count the models of tools/collect/hub_models.json, and write the table that the planner reads without PyTorch.

    python tools/derive/hub_table.py [--write] [NAME ...]

The table is zero_study/theory/shapes/hub_models.json.gz. A model whose architecture has no formulas is traced, in a
process of its own. All of them take about a quarter of an hour. `--write` with names replaces only these models.
"""

from __future__ import annotations

import argparse
import gzip
import json
import logging
import sys
from typing import Any

from zero_study import files
from zero_study.dryrun import models
from zero_study.dryrun.images import FAMILIES
from zero_study.errors import Refusal, RunFailed
from zero_study.files import ROOT
from zero_study.theory import shapes
from zero_study.theory.shapes.counts import to_content

CONFIGURATIONS = ROOT / "tools" / "collect" / "hub_models.json"
TABLE = ROOT / "zero_study" / "theory" / "shapes" / "hub_models.json.gz"


def entry_of(described: dict[str, Any]) -> dict[str, Any]:
    """Return the entry of a model in the table. It has counts only if there are no formulas for the configuration.

    Raises Refusal if the model cannot be traced, or if it has another number of parameters.
    """
    entry = {key: described[key] for key in ("name", "hub_ids", "source", "config")}
    try:
        shape = shapes.from_config(described["config"], described["name"])
    except ValueError:
        name = described["name"]
        has_image = described["config"]["model_type"] in FAMILIES  # then it is counted with images and adapters, too
        built, config = models.class_of(described["config"], name)
        shape = models.shape_of_class(built, config, name, has_image, has_adapters=has_image)
        entry |= {"positions": shape.positions, "notes": list(shape.notes), "dropout": shape.dropout}
        entry |= {} if shape.image is None else {"image": shape.image}
        entry |= {"counts": to_content(shape.counts)}
        entry |= {} if shape.with_image is None else {"with_image": to_content(shape.with_image)}
    if shape.num_params != described["parameters"]:
        raise Refusal(
            f"{described['name']}: {shape.num_params:,} of {described['parameters']:,} parameters were counted"
        )
    return entry


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
    for described in entries:
        try:
            table[described["name"]] = entry_of(described)
            print(f"{described['name']}: {described['parameters']:,} parameters", flush=True)
        except (Refusal, RunFailed) as reason:
            refused += 1
            print(f"refused: {described['name']}: {reason}", file=sys.stderr, flush=True)
        if options.write:
            write(table)
    print(f"{len(entries) - refused} of {len(entries)} counted")
    return int(refused > 0)


def write(table: dict[str, dict[str, Any]]) -> None:
    """Write the table, with its models in the order of their names."""
    content = json.dumps([table[name] for name in sorted(table)], separators=(",", ":"))
    files.write_whole(TABLE, gzip.compress(content.encode(), mtime=0))


if __name__ == "__main__":
    sys.exit(main())
