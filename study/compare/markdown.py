"""How does a table become Markdown, for a terminal or a page of a repository?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from study.files import shown_path
from study.records.find import RecordFile


def not_ok(record_files: Iterable[RecordFile]) -> list[str]:
    """Lines about the runs that did not finish, so that no table drops them unseen."""
    lines = [f"- {r.run_id}: {r.status}" for r in (file.record for file in record_files) if r.status != "ok"]
    return ["", "Runs without a result:", "", *lines] if lines else []


def command(name: str, folders: Sequence[Path]) -> str:
    """The command that makes a page, with folders as seen from the current one."""
    return " ".join(["zero-study", name, *map(shown_path, folders)])


def shown(text: Any) -> str:
    """What a record says, on one line: nothing in it ends a cell, is HTML, or turns the direction of what follows."""
    line = " ".join(str(text).split())
    visible = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)
    return visible.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")


def markdown(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """A Markdown table; all columns but the first are to the right."""
    ruler = "|" + "|".join([" --- ", *[" ---: "] * (len(head) - 1)]) + "|"
    first, *others = ["| " + " | ".join(map(shown, row)) + " |" for row in (head, *rows)]
    return [first, ruler, *others]
