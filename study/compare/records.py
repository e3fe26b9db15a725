"""Which records lie below these folders? Run directories and folders of collected records alike."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from study import record
from study.config import Refusal
from study.record import Record


class Found(NamedTuple):
    path: Path
    record: Record


def find(folders: Iterable[Path]) -> list[Found]:
    """Read every record below the folders, in the order of their paths; a run that is found twice counts once.

    A record is a record.json, and any other JSON file that says it is one by a schema_version or a run_id. Raises
    Refusal for one that does not hold the schema, naming file and key, and where there is none.
    """
    folders = list(folders)
    found: dict[tuple[str, str], Found] = {}
    for folder in folders:
        if not folder.is_dir():
            raise Refusal(f"{folder}: no such folder; pass a folder of run directories or of collected records")
        for path in sorted(folder.rglob("*.json")):
            if path.name == "record.json" or _says_it_is_a_record(path):
                read = record.read(path)
                found.setdefault((read.run_id, read.started_at), Found(path, read))
    if not found:
        raise Refusal(f"{' '.join(map(str, folders))}: no record below; `zero-study run STUDY` makes some")
    return list(found.values())


def _says_it_is_a_record(path: Path) -> bool:
    if (path.parent / "record.json").exists():  # another file of a run directory
        return False
    try:
        content = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise Refusal(f"{path}: cannot be read as JSON ({error})") from None
    return isinstance(content, dict) and not {"schema_version", "run_id"}.isdisjoint(content)


def not_ok(found: Iterable[Found]) -> list[str]:
    """Lines about the runs that did not finish, so that no table drops them unseen."""
    lines = [f"- {r.run_id}: {r.status}" for _, r in found if r.status != "ok"]
    return ["", "Runs without a result:", "", *lines] if lines else []


def command(name: str, folders: Sequence[Path]) -> str:
    """The command that makes a page, with folders as seen from the current one."""
    shown = []
    for folder in folders:
        if folder.is_absolute():
            folder = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else Path(folder.name)
        shown.append(str(folder))
    return f"zero-study {name} {' '.join(shown)}"


def markdown(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """A Markdown table; all columns but the first are to the right."""
    lines = ["| " + " | ".join(head) + " |", "|" + "|".join([" --- ", *[" ---: "] * (len(head) - 1)]) + "|"]
    return lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows]
