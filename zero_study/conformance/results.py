"""Read the committed conformance matrices, one file per examined installation, and describe a matrix as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .. import terminal
from ..files import ROOT, parse_yaml
from ..upgrade import faults as known_faults
from ..verdict import Checked, NotChecked, Verdict
from .matrix_file import failed_before, load

PLACE = ROOT / "reports" / "conformance"
OPTIMIZERS = PLACE / "optimizers"  # matrices of optimizers other than AdamW, one file per release of DeepSpeed
ADAPTERS = PLACE / "adapters"  # matrices of LoRA adapters, one file per release of DeepSpeed
VERDICTS = ("same", "wrong", "refused", "crashed")
FAILED = ("wrong", "crashed")
NEARLY_ALL = 0.9  # share of refused configurations from which the others say little about the installation


def read(package: str = "deepspeed", folder: Path = PLACE) -> dict[str, dict[str, Any]]:
    """Return the committed matrices of a package's releases by version, oldest first.

    For accelerate and torch, the matrix of the newest installation is included, because it has all of their cells.
    Raises Refusal if a file is not a matrix.
    """
    # Files are named like accelerate-1.4.0.json. The name of a file about DeepSpeed is only the version.
    paths = [path for path in folder.glob("*.json") if (path.stem.rpartition("-")[0] or "deepspeed") == package]
    by_version = {_version(matrix, package): matrix for matrix in (load(path) for path in paths)}
    if package != "deepspeed":
        whole = newest(folder)
        by_version.setdefault(_version(whole, package), whole)
    return dict(sorted(by_version.items(), key=lambda item: known_faults.base_release(item[0])))


def newest(folder: Path = PLACE) -> dict[str, Any]:
    """Return the committed matrix of the installation with the newest DeepSpeed, which has all configurations."""
    return list(read("deepspeed", folder).values())[-1]


def released(package: str, folder: Path = PLACE) -> dict[str, str]:
    """Return the publication dates of a package's releases by version. Only releases in released.yaml are included."""
    dates: dict[str, str] = parse_yaml((folder / "released.yaml").read_text())[package]
    return dates


def _version(matrix: Mapping[str, Any], package: str) -> str:
    version: str = matrix["versions"][package]
    return version.partition("+")[0]


def faults() -> list[known_faults.Fault]:
    """Return the known faults of DeepSpeed that conformance runs found, in chronological order."""
    return sorted(known_faults.measured(), key=lambda fault: (known_faults.first_release(fault), fault.id))


# ---------------------------------------------------------------- in words


def failed_cells(matrix: Mapping[str, Any], earlier: Mapping[str, Any] | None = None) -> list[str]:
    """Return the names of the configurations in a matrix that are wrong or crashed.

    If an earlier matrix is given, cells that failed there in the same way are left out.
    """
    bad = {name: cell for name, cell in matrix["cells"].items() if cell["verdict"] in FAILED}
    earlier_cells = earlier["cells"] if earlier else {}
    return [name for name, cell in bad.items() if not failed_before(cell, earlier_cells.get(name, {}))]


def verdict(matrix: Mapping[str, Any], earlier: Mapping[str, Any] | None = None) -> Verdict:
    """Return the verdict on a matrix. If an earlier matrix is given, only new failures count as findings.

    A cell that the engine refused was not compared with anything. If it was right in the earlier matrix, the comparison
    with that matrix could not be made.
    """
    cells = matrix["cells"]
    counts = Counter(cell["verdict"] for cell in cells.values())
    compared = Checked(counts["same"] + counts["wrong"], "configuration", "compared with a training without an engine")
    missing = [
        NotChecked(f"{terminal.count(number, 'configuration')} refused by the engine", message)
        for message, number in refusals(matrix).items()
    ]
    if counts["refused"] > NEARLY_ALL * len(cells):
        missing.append(
            NotChecked("nearly all configurations", f"the engines refused {counts['refused']} of {len(cells)}", True)
        )
    if earlier is not None:
        missing += _not_compared(cells, earlier["cells"])
    return Verdict.of(len(failed_cells(matrix, earlier)), [compared], missing)


def _not_compared(cells: Mapping[str, Any], earlier: Mapping[str, Any]) -> list[NotChecked]:
    """Return the checks that a comparison with an earlier matrix could not make."""
    if not set(cells) & set(earlier):
        return [NotChecked("known failures", "the file of --known has none of these configurations", True)]
    lost = [
        name
        for name, cell in cells.items()
        if cell["verdict"] == "refused" and earlier.get(name, {}).get("verdict") == "same"
    ]
    return [
        NotChecked(name, "the engine refuses it now, but it is right in the file of --known", True) for name in lost
    ]


def refusals(matrix: Mapping[str, Any]) -> dict[str, int]:
    """Return the messages with which engines refused configurations, and how often, the most frequent first."""
    messages = (cell["message"] for cell in matrix["cells"].values() if cell["verdict"] == "refused")
    return dict(Counter(terminal.printable(" ".join(message.split())) for message in messages).most_common())


def summary_lines(matrix: Mapping[str, Any]) -> list[str]:
    """Return lines that describe one installation's matrix in a terminal: the result, counts, then failures."""
    cells = matrix["cells"]
    versions = ", ".join(f"{name} {version}" for name, version in matrix["versions"].items())
    counts = Counter(cell["verdict"] for cell in cells.values())
    failed = failed_cells(matrix)
    result = f"{len(failed)} of {len(cells)} configurations are wrong or crashed" if failed else _sound(counts)
    counted = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS)
    seconds = sum(matrix["seconds"].values())
    text_lines = [
        terminal.wrap(f"{result}: {versions}."),
        terminal.wrap(f"{len(cells)} configurations in {seconds} s: {counted}."),
    ]
    rows = []
    groups: dict[str, list[str]] = {}
    for name in cells:
        groups.setdefault(" ".join(name.split("/")[:2]), []).append(name)
    for group, members in groups.items():
        counts = Counter(cells[name]["verdict"] for name in members)
        rows.append([group, *(counts[verdict] or "" for verdict in VERDICTS)])
    text_lines += ["", *terminal.table(["configurations by engine and precision", *VERDICTS], rows)]
    if failed:
        text_lines += ["", "Wrong or crashed:"]
        text_lines += [terminal.wrap(f"{name}: {explanation(cells[name])}", "  ", "    ") for name in failed]
    if counts_of_refusals := refusals(matrix):
        text_lines += ["", "Refused, and therefore not compared:"]
        text_lines += [
            terminal.wrap(f"{terminal.count(number, 'configuration')}: {message}", "  ", "    ")
            for message, number in counts_of_refusals.items()
        ]
    return "\n".join(text_lines).split("\n")


def _sound(counts: Mapping[str, int]) -> str:
    """Return a sentence about a matrix without failures. `counts` has the number of cells by verdict."""
    if not counts["same"]:
        return "No configuration could be compared, because the engines refused all of them"
    compared = "1 was" if counts["same"] == 1 else f"{counts['same']} were"
    if counts["refused"] > NEARLY_ALL * sum(counts.values()):
        return f"Nearly all configurations were refused by the engines, and {compared} compared and found right"
    return f"No configuration is wrong ({compared} compared with a training without an engine)"


def explanation(cell: Mapping[str, Any]) -> str:
    """Return a text that says how far a training deviates from the reference, or how it failed."""
    if "message" in cell:
        stage = cell["stage"].replace("taken up", "resumed")  # matrices have the older term
        return f"{cell['verdict']} in the stage '{stage}': {cell['message']}"
    if cell["verdict"] == "same":
        return (
            f"same: the largest deviation ({cell['of']}) is {cell['share_of_bound']:.2f} times the largest one that "
            "rounding can explain"
        )
    share = cell["share_of_bound"]
    beyond = (
        "a value is not a number"
        if share is None
        else f"the deviation is {share:,.3g} times as large as rounding can explain ({cell['of']})"
    )
    if not cell["beyond"]:
        beyond = "the deviation of each single rank can be explained by rounding"
    since = f" from step {cell['first_step']}" if cell["first_step"] else ""
    words = [f"wrong{since}: {beyond}"]
    norms = [scale for scale in cell["norm_scale"] if scale is not None]
    if norms:
        words.append(f"the gradient norm is {norms[0]:.4g} to {norms[-1]:.4g} times the right one")
    if cell["update_scale"][-1] is not None:
        words.append(f"the weights changed by {cell['update_scale'][-1]:.2f} times the right amount")
    if states := cell.get("wrong_states"):
        words.append(f"optimizer states have a wrong type ({', '.join(states)})")
    if difference := cell["ranks_apart"]:
        is_older_file = difference is True
        words.append("the ranks end with different weights" if is_older_file else _difference_of_ranks(difference))
    return "; ".join(words)


def _difference_of_ranks(difference: Mapping[str, Any]) -> str:
    first, *further = difference["of"]
    more = f" and {len(further)} more" if further else ""
    return f"the ranks have different weights from step {difference['step']} ({first}{more})"
