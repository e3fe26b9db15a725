"""The checks of a training in environments with older and newer releases: reports/releases_matrix.json."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

from wording import tabulate

from zero_study.files import ROOT

PAGE = "docs/works-with.md"
COMMANDS = ("prove", "diff", "saved", "testing", "doctor")


@cache
def environments() -> list[dict[str, Any]]:
    return json.loads((ROOT / "reports" / "releases_matrix.json").read_text(encoding="utf-8"))


def releases(environment: dict[str, Any]) -> list[str]:
    return [release.partition("+")[0] for release in environment["packages"].values()]


def summary() -> str:
    """Count the right answers of each command by environment."""
    rows = []
    for environment in environments():
        cells = []
        for command in COMMANDS:
            answers = [result["answer"] for result in environment["results"] if result["command"] == command]
            cells.append(f"{answers.count('right')} of {len(answers)}")
        rows.append([*releases(environment), *cells])
    return tabulate(
        ["PyTorch", "accelerate", "transformers", "DeepSpeed", *COMMANDS], rows
    )  # not as code, which phones break


def others() -> str:
    """List the answers that are not right, with their reasons."""
    rows = [
        [releases(environment)[0], f"`{result['command']}`", result["example"], result["answer"],
         re.sub(r"^(?:E +|\[rank\d\]: )", "", result["why"]).replace("|", "\\|")]
        for environment in environments() for result in environment["results"] if result["answer"] != "right"
    ]  # fmt: skip
    return tabulate(["PyTorch", "command", "example", "answer", "reason"], rows)


def examples() -> str:
    """List the examples, and whether each is sound."""
    rows = [
        [f"`{result['command']}`", result["example"], "sound" if result["is_sound"] else "wrong"]
        for result in environments()[-1]["results"]
    ]
    return tabulate(["command", "example", "it is"], rows)


def changed() -> str:
    """Say in how many environments the installation changed a package."""
    names = [name for environment in environments() for name in environment["changed_by_installation"]]
    if names:
        return f"In the environments below, the installation changed {', '.join(sorted(set(names)))}."
    return f"In all {len(environments())} environments below, the installation changed no installed package."


def sizes() -> str:
    """Say how large the environments with the two kinds of builds are."""
    by_kind: dict[bool, list[float]] = {True: [], False: []}
    for environment in environments():
        by_kind[environment["packages"]["torch"].endswith("+cpu")].append(environment["bytes"] / 1e9)
    return f"{min(by_kind[True]):.1f} GB with this build, and up to {max(by_kind[False]):.1f} GB with the ordinary one"


TABLES = {(PAGE, "summary"): summary, (PAGE, "others"): others, (PAGE, "examples"): examples}
NUMBERS = {(PAGE, "changed"): changed, (PAGE, "sizes"): sizes}
