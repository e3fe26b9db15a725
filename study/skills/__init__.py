"""The skill for coding agents: a folder of instructions that is part of the package, and how it is installed."""

from __future__ import annotations

import shutil
from pathlib import Path

from study.errors import Refusal

NAME = "zero-study"
FOLDER = Path(__file__).resolve().parent / NAME
DEFAULT_TARGET = Path(".agents") / "skills"  # where several agents look in a project; Claude Code: .claude/skills


def files() -> dict[str, str]:
    """Return the text of each file of the skill by its path in the folder."""
    return {path.relative_to(FOLDER).as_posix(): path.read_text() for path in sorted(FOLDER.rglob("*.md"))}


def texts() -> list[str]:
    """Return the text of each file without its front matter, the overview first."""
    _, _, overview = files()["SKILL.md"].partition("\n---\n")
    return [overview.strip(), *(text.strip() for name, text in files().items() if name != "SKILL.md")]


def install(target: Path) -> Path:
    """Copy the skill into a folder of skills, and return the folder of the copy.

    A copy of an earlier release is replaced. Raises Refusal if there is something else of this name.
    """
    place = target / NAME
    if place.is_symlink() or (place.exists() and not _is_copy(place)):
        raise Refusal(
            f"{place}: this already exists, and is not a copy of the skill. Move this file or folder away, or "
            "choose another --target."
        )
    try:
        if place.exists():
            shutil.rmtree(place)
        shutil.copytree(FOLDER, place, ignore=shutil.ignore_patterns("__pycache__"))
    except OSError as error:
        raise Refusal(
            f"--target {target}: the skill cannot be written there ({error.strerror}). Choose another --target."
        ) from None
    return place


def _is_copy(place: Path) -> bool:
    overview = place / "SKILL.md"
    return overview.is_file() and f"name: {NAME}\n" in overview.read_text(errors="replace")
