"""How often `zero-study why` names the cause that a public thread found, and its complaints of sound trainings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import yaml

from study.files import ROOT
from study.terminal import count, markdown
from study.why import answer

PAGE = "reports/why.md"
CASES = ROOT / "tests" / "why"
# What the first cause of an answer is, as a person judged it who knew the thread.
OUTCOMES = {
    "right": "the cause of the thread",
    "partly": "the right kind, less precise",
    "unknown": "no cause named",
    "wrong": "another cause",
}


@cache
def cases(folder: str = ".") -> list[dict[str, Any]]:
    """Return the cases of a folder by name, with the present answers of the command."""
    found = []
    for path in sorted((CASES / folder).glob("*.yaml")):
        case = yaml.safe_load(path.read_text(encoding="utf-8"))
        cause = answer.answer([path.with_suffix(".log")]).cause
        found.append(case | {"name": path.stem, "path": path, "cause": cause})
    return found


def table(folder: str = ".") -> str:
    """Return a table of cases: the log, the cause that the thread found, the answer, and the judgment."""
    rows = [
        (
            f"[{case['name']}]({Path('..') / case['path'].with_suffix('.log').relative_to(ROOT)})",
            f"[thread]({case['source']})",
            case["truth"],
            f"`{case['cause'].id}`, {case['cause'].certainty}" if case["cause"] else "not known",
            OUTCOMES[case["right"]],
        )
        for case in cases(folder)
    ]
    return "\n".join(
        markdown(["log", "source", "cause that the thread found", "first cause named", "judgment"], rows, 5)
    )


def score(folder: str = ".") -> str:
    """Return how many answers of a folder are right, partly right, unknown and wrong."""
    outcomes = Counter(case["right"] for case in cases(folder))
    total = sum(outcomes.values())
    confident = sum(
        case["right"] == "wrong" and case["cause"] is not None and case["cause"].certainty != "possible"
        for case in cases(folder)
    )
    return (
        f"{outcomes['right']} of {total} answers name the cause first, {outcomes['partly']} name the right kind, "
        f"{outcomes['unknown']} say that it is not known, and {outcomes['wrong']} name another cause, of which "
        f"{confident} without calling it one of several"
    )


def complaints() -> str:
    """Return how many logs of sound trainings get a cause."""
    logs = sorted((CASES / "sound").glob("*.log"))
    with_cause = [path for path in logs if answer.answer([path]).num_found]
    return f"{count(len(with_cause), 'log')} of {len(logs)}"


TABLES: dict[tuple[str, str], Callable[[], str]] = {
    (PAGE, "cases"): table,
    (PAGE, "held_out"): partial(table, "held_out"),
}
NUMBERS: dict[tuple[str, str], Callable[[], str]] = {
    (PAGE, "score"): score,
    (PAGE, "held_out_score"): partial(score, "held_out"),
    (PAGE, "complaints"): complaints,
}
