"""The committed matrices, a file for each installation that was examined, and what a matrix says in words."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ... import files
from ...files import ROOT, parse_yaml
from .. import known_bad

PLACE = ROOT / "reports" / "conformance"
VERDICTS = ("same", "wrong", "refused", "crashed")
FAULTS = ("wrong", "crashed")
KNOWN_UP_TO = 10  # times as far from the right weights as in an earlier matrix, a fault is still the same


def read(package: str = "deepspeed", folder: Path = PLACE) -> dict[str, dict[str, Any]]:
    """The matrices of a package's releases, by version, the oldest first. Raises Refusal where a file is none.

    Among accelerate's and torch's is the newest installation, which was asked what they were and more.
    """
    # As accelerate-1.4.0.json; DeepSpeed's are named by their version alone.
    paths = [path for path in folder.glob("*.json") if (path.stem.rpartition("-")[0] or "deepspeed") == package]
    found = {_version(matrix, package): matrix for matrix in (load(path) for path in paths)}
    if package != "deepspeed":
        whole = newest(folder)
        found.setdefault(_version(whole, package), whole)
    return dict(sorted(found.items(), key=lambda item: known_bad.base_release(item[0])))


def newest(folder: Path = PLACE) -> dict[str, Any]:
    """The matrix of the newest installation, which was asked every cell: that of the newest DeepSpeed."""
    return list(read("deepspeed", folder).values())[-1]


def released(package: str, folder: Path = PLACE) -> dict[str, str]:
    """When the releases of a package were published, by version: year, month and day, where that was looked up."""
    dates: dict[str, str] = parse_yaml((folder / "released.yaml").read_text())[package]
    return dates


def load(path: Path) -> dict[str, Any]:
    """One matrix. Raises Refusal where the file is none."""
    matrix: dict[str, Any] = files.load(path, "a matrix of conformance")
    return matrix


def _version(matrix: Mapping[str, Any], package: str) -> str:
    version: str = matrix["versions"][package]
    return version.partition("+")[0]


def faults() -> list[known_bad.Fault]:
    """What is known to be wrong, the newest last."""
    return sorted(known_bad.read(), key=lambda fault: (known_bad.first_release(fault), fault.id))


# ---------------------------------------------------------------- in words


def failures(matrix: Mapping[str, Any], known: Mapping[str, Any] | None = None) -> list[str]:
    """The names of the cells that are wrong or crashed, and not so in an earlier matrix, where one is `known`."""
    bad = {name: cell for name, cell in matrix["cells"].items() if cell["verdict"] in FAULTS}
    earlier = known["cells"] if known else {}
    return [name for name, cell in bad.items() if not _is_known(cell, earlier.get(name, {}))]


def _is_known(cell: Mapping[str, Any], earlier: Mapping[str, Any]) -> bool:
    """Say whether a cell fails as it did in an earlier matrix: a small fault that is known hides no large one."""
    if cell["verdict"] != earlier.get("verdict"):
        return False
    if "message" in cell:  # it crashed
        kinds = [(each["stage"], each["message"].partition(":")[0]) for each in (cell, earlier)]
        return kinds[0] == kinds[1]
    share, before = (math.inf if each["share_of_bound"] is None else each["share_of_bound"] for each in (cell, earlier))
    is_larger = share > before * KNOWN_UP_TO and share != before
    return not is_larger and bool(cell["ranks_apart"]) <= bool(earlier["ranks_apart"])


def lines(matrix: Mapping[str, Any]) -> list[str]:
    """The matrix of one installation in words, for a terminal."""
    cells = matrix["cells"]
    versions = ", ".join(f"{name} {version}" for name, version in matrix["versions"].items())
    counts = Counter(cell["verdict"] for cell in cells.values())
    seconds = sum(matrix["seconds"].values())
    said = [
        f"{versions}; {len(cells)} cells in {seconds} s, {seconds / max(1, len(cells)):.1f} s each",
        ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS),
        "",
        f"{'':36}{''.join(f'{verdict:>9}' for verdict in VERDICTS)}",
    ]
    for group, members in grouped(cells).items():
        counts = Counter(cells[name]["verdict"] for name in members)
        said.append(f"{group:36}{''.join(f'{counts[verdict] or str():>9}' for verdict in VERDICTS)}")
    return [*said, "", *(f"{name}: {how(cells[name])}" for name in failures(matrix))]


def grouped(cells: Iterable[str]) -> dict[str, list[str]]:
    """Names of cells by engine and precision class."""
    groups: dict[str, list[str]] = {}
    for name in cells:
        groups.setdefault(" ".join(name.split("/")[:2]), []).append(name)
    return groups


def how(cell: Mapping[str, Any]) -> str:
    """In which way a cell is not the same, in one sentence."""
    if "message" in cell:
        return f"{cell['verdict']} when it was {cell['stage']}: {cell['message']}"
    if cell["verdict"] == "same":
        return f"same: the furthest, {cell['of']}, is at {cell['share_of_bound']:.2f} of what rounding explains"
    share = cell["share_of_bound"]
    beyond = "not a number" if share is None else f"{share:,.3g} times what rounding explains ({cell['of']})"
    if not cell["beyond"]:
        beyond = "not by what any rank has alone"
    words = [f"wrong from step {cell['first_step']}: {beyond}"]
    norms = [scale for scale in cell["norm_scale"] if scale is not None]
    if norms:
        words.append(f"gradient norm {norms[0]:.4g} to {norms[-1]:.4g} times the right one")
    if cell["update_scale"][-1] is not None:
        words.append(f"weights went {cell['update_scale'][-1]:.2f} of the right way")
    if apart := cell["ranks_apart"]:
        words.append("ranks end with different weights" if apart is True else _apart(apart))  # True: in older files
    return "; ".join(words)


def _apart(apart: Mapping[str, Any]) -> str:
    first, *others = apart["of"]
    more = f" and {len(others)} more" if others else ""
    return f"ranks have different weights from step {apart['step']} ({first}{more})"
