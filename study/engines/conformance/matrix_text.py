"""What does a matrix say? A line for each engine and class, and one for each way of being wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

VERDICTS = ("same", "wrong", "refused", "crashed")
FAULTS = ("wrong", "crashed")


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
    said += ["", *(f"{name}: {how(cells[name])}" for name in cells if cells[name]["verdict"] in FAULTS)]
    return said


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
