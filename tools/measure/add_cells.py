"""Train the cells with a loss scale that committed matrices of DeepSpeed lack, and add them. Other cells stay.

python tools/measure/add_cells.py            # every release in reports/conformance, the newest first
python tools/measure/add_cells.py 0.18.2 0.17.5
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

from zero_study import files
from zero_study.conformance import cells, matrix, reference, results

PLACE = results.PLACE


def main(versions: Sequence[str]) -> None:
    newest, committed = results.newest(PLACE), results.read(folder=PLACE)
    for version in versions or [*committed][::-1]:
        record = committed[version]
        is_newest = record["versions"] == newest["versions"]
        missing = [
            cell
            for cell in cells.of_loss_scales((1, 2) if is_newest else (2,), tuple(cells.ENGINES))
            if cell.name not in record["cells"] and (is_newest or "offload" not in cell.engine)
        ]
        if missing:
            print(f"DeepSpeed {version}: {len(missing)} cells are missing.", flush=True)
            chosen = {} if is_newest else {"deepspeed": version}
            add(record, matrix.run(missing, lambda line: print(f"  {line}", flush=True), chosen=chosen))
            files.write_json(PLACE / f"{version}.json", record)


def add(record: dict[str, Any], examined: dict[str, Any]) -> None:
    """Add the cells of a new matrix to a record. Fails if other packages have changed since the record was made."""
    assert examined["versions"] == record["versions"], (examined["versions"], record["versions"])
    record["cells"] |= examined["cells"]
    record["loss_scales"] = {key: examined[key] for key in ("examined_at", "seconds")}


if __name__ == "__main__":
    reference.expect = functools.cache(reference.expect)  # the same for every release
    main(sys.argv[1:])
