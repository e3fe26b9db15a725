"""Which matrices have been committed, a file for each installation that was examined?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from study import files
from study.engines import known_bad
from study.engines.conformance import matrix_text
from study.files import ROOT, parse_yaml

PLACE = ROOT / "reports" / "conformance"


def read(package: str = "deepspeed", folder: Path = PLACE) -> dict[str, dict[str, Any]]:
    """The matrices of a package's releases, by version, the oldest first. Raises Refusal where a file is none.

    Among accelerate's and torch's is the newest installation, which was asked what they were and more.
    """
    paths = [path for path in folder.glob("*.json") if _package_of(path) == package]
    found = {_version(matrix, package): matrix for matrix in (_load(path) for path in paths)}
    if package != "deepspeed":
        whole = newest(folder)
        found.setdefault(_version(whole, package), whole)
    return dict(sorted(found.items(), key=lambda item: known_bad.release(item[0])))


def newest(folder: Path = PLACE) -> dict[str, Any]:
    """The matrix of the newest installation, which was asked every cell: that of the newest DeepSpeed."""
    return list(read("deepspeed", folder).values())[-1]


def released(package: str, folder: Path = PLACE) -> dict[str, str]:
    """When the releases of a package were published, by version: year, month and day, where that was looked up."""
    dates: dict[str, str] = parse_yaml((folder / "released.yaml").read_text())[package]
    return dates


def _load(path: Path) -> dict[str, Any]:
    matrix: dict[str, Any] = files.load(path, "a matrix of conformance")
    return matrix


def _package_of(path: Path) -> str:
    """Whose release a file is of: accelerate-1.4.0.json; DeepSpeed's are named by their version alone."""
    return path.stem.rpartition("-")[0] or "deepspeed"


def _version(matrix: Mapping[str, Any], package: str) -> str:
    version: str = matrix["versions"][package]
    return version.partition("+")[0]


def faults() -> list[known_bad.Fault]:
    """What is known to be wrong, the newest last."""
    return sorted(known_bad.read(), key=lambda fault: (known_bad.begins(fault), fault.id))


def worst(verdicts: Mapping[str, int]) -> str:
    """What to say of several cells at once: wrong where one is, then crashed, refused, same."""
    return next(verdict for verdict in ("wrong", "crashed", "refused", "same") if verdicts.get(verdict))


def by_group(matrix: Mapping[str, Any], asked: Collection[str]) -> dict[str, str]:
    """The worst verdict of the cells of these names, by engine and class."""
    cells = matrix["cells"]
    groups = matrix_text.grouped(name for name in cells if name in asked)
    return {group: worst(Counter(cells[name]["verdict"] for name in names)) for group, names in groups.items()}


def twist_of(name: str) -> str:
    """What a cell does beside the plain step, by its name; empty: nothing."""
    last = name.rpartition("/")[2]
    return "" if last == "clipped" or last.startswith("accumulation-") else last


def column_of(name: str) -> str:
    """A cell's name without engine, class and ranks: what it asks of each of them."""
    words = name.split("/")[3:]
    return twist_of(name).replace("_", " ") or " ".join(words).replace("accumulation-", "micro batches: ")
