"""Which matrices have been committed, a file for each installation that was examined?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from study import files
from study.conformance import say
from study.files import ROOT
from study.preflight import known_bad

PLACE = ROOT / "reports" / "conformance"


def read(folder: Path = PLACE) -> list[dict[str, Any]]:
    """The matrices, of the oldest release of DeepSpeed first. Raises Refusal where a file is none."""
    matrices = [files.load(path, "a matrix of conformance") for path in folder.glob("*.json")]
    return sorted(matrices, key=lambda matrix: known_bad.release(matrix["versions"]["deepspeed"]))


def faults() -> list[known_bad.Fault]:
    """What is known to be wrong, the newest last."""
    return sorted(known_bad.read(), key=lambda fault: (known_bad.release(fault.first), fault.id))


def worst(verdicts: Mapping[str, int]) -> str:
    """What to say of several cells at once: wrong where one is, then crashed, refused, same."""
    return next(verdict for verdict in ("wrong", "crashed", "refused", "same") if verdicts.get(verdict))


def by_group(matrix: Mapping[str, Any], asked: Collection[str]) -> dict[str, str]:
    """The worst verdict of the cells of these names, by engine and class."""
    cells = matrix["cells"]
    groups = say.grouped(name for name in cells if name in asked)
    return {group: worst(Counter(cells[name]["verdict"] for name in names)) for group, names in groups.items()}


def twist_of(name: str) -> str:
    """What a cell does beside the plain step, by its name; empty: nothing."""
    last = name.rpartition("/")[2]
    return "" if last == "clipped" or last.startswith("accumulation-") else last


def column_of(name: str) -> str:
    """A cell's name without engine, class and ranks: what it asks of each of them."""
    words = name.split("/")[3:]
    return twist_of(name).replace("_", " ") or " ".join(words).replace("accumulation-", "micro batches: ")
