"""How many of doctor's findings about public configuration files are right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache

from measuring import doctor_observed
from wording import tabulate

from zero_study.doctor.findings import Finding
from zero_study.doctor.text import VERDICTS


@cache
def judged() -> dict[str, list[tuple[Finding | None, str]]]:
    """Return doctor's findings about each file that was started, and whether they are right."""
    return doctor_observed.judged()


def by_kind_of_file() -> str:
    """Count how many findings were right, by the kind of the files."""
    verdicts = judged()
    groups = {
        "as in their repositories": [name for name in verdicts if not name.startswith(("mended ", "trap "))],
        "corrected by `doctor --fix`": [name for name in verdicts if name.startswith("mended ")],
        "one trap per file": [name for name in verdicts if name.startswith("trap ")],
    }
    rows = []
    for words, names in groups.items():
        counts = Counter(verdict for name in names for _, verdict in verdicts[name])
        rows.append([words, len(names), counts.total(), counts["right"], counts["wrong"], counts["not seen"]])
    return tabulate(["files", "number of files", "findings", "right", "wrong", "cannot be compared"], rows)


def by_file() -> str:
    """List for each public file what doctor reports, whether it started, and how many findings were right."""
    observed = doctor_observed.committed()
    rows = []
    for row in doctor_observed.index():
        name = row["file"]
        findings = [f for f, _ in judged()[name] if f is not None and f.matters]
        to_change = "; ".join(f"`{f.key.rpartition('.')[2]}` {VERDICTS[f.effect]}" for f in findings) or "none"
        counts = Counter(verdict for _, verdict in judged()[name])
        starts = "no" if "error" in observed[name] else "not tried" if "not_started" in observed[name] else "yes"
        address = f"https://github.com/{row['repository']}/blob/{row['commit']}/{row['path']}"
        link = f"[{name.partition('.')[0].replace('_', ' ')}]({address})"
        rows.append([link, to_change, starts, counts["right"], counts["wrong"], counts["not seen"]])
    return tabulate(["file", "keys to change", "starts", "right", "wrong", "cannot be compared"], rows)


def doctor_findings() -> list[str]:
    """Return whether each finding of doctor about the public files was right."""
    return [verdict for row in doctor_observed.index() for _, verdict in judged()[row["file"]]]


def doctor_right() -> str:
    """Count the findings of doctor that could be compared, and those that were right."""
    outcomes = Counter(doctor_findings())
    compared = outcomes["right"] + outcomes["wrong"]
    return f"{compared} of them could be compared, and {outcomes['right']} of these were right"


def started_files() -> str:
    """Count the public configuration files, and those that were started."""
    observed = [doctor_observed.committed()[row["file"]] for row in doctor_observed.index()]
    started = sum("not_started" not in each for each in observed)
    return f"{len(observed)} configuration files from public repositories. We started {started} of them"


TABLES: dict[tuple[str, str], Callable[[], str]] = {
    ("reports/doctor.md", "judged"): by_kind_of_file,
    ("reports/doctor.md", "files"): by_file,
}


NUMBERS: dict[tuple[str, str], Callable[[], str]] = {
    ("docs/doctor.md", "files"): started_files,
    ("docs/doctor.md", "findings"): lambda: f"{len(doctor_findings()):,}",
    ("docs/doctor.md", "right"): doctor_right,
}
