"""The skill for coding agents: a folder of instructions that is part of the package, and how it is installed."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

from zero_study.errors import Refusal

NAME = "zero-study"
FOLDER = Path(__file__).resolve().parent / NAME
DIGESTS = ".digests.json"  # of the installed files, by path; a file with another digest was changed by the user
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

    A copy of an earlier release is replaced. Raises Refusal if there is something else of this name, or if a file in
    the copy was added or changed after it was installed.
    """
    place = target / NAME
    if place.is_symlink() or (place.exists() and not _is_copy(place)):
        raise Refusal(
            f"{place}: this already exists, and is not a copy of the skill. Move this file or folder away, or "
            "choose another --target."
        )
    if changed := _changed(place):
        raise Refusal(
            f"{place / changed}: this file was changed or added after the skill was installed, and would be lost. Move "
            f"{place} away, or choose another --target."
        )
    try:
        if place.exists():
            shutil.rmtree(place)
        shutil.copytree(FOLDER, place, ignore=shutil.ignore_patterns("__pycache__"))
        (place / DIGESTS).write_text(json.dumps(_digests(place), indent=1) + "\n")
    except OSError as error:
        raise Refusal(
            f"--target {target}: the skill cannot be written there ({error.strerror}). Choose another --target."
        ) from None
    return place


def _is_copy(place: Path) -> bool:
    overview = place / "SKILL.md"
    return overview.is_file() and f"name: {NAME}\n" in overview.read_text(errors="replace")


def _changed(place: Path) -> str | None:
    """Return the path of a file in a copy that is not as it was installed. None if there is no such file."""
    try:
        installed = json.loads((place / DIGESTS).read_text())
    except (OSError, ValueError):
        installed = _digests(FOLDER)
    return next((name for name, digest in _digests(place).items() if installed.get(name) != digest), None)


def _digests(folder: Path) -> dict[str, str]:
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file() and "__pycache__" not in path.parts)
    names = {path.relative_to(folder).as_posix(): path for path in paths}
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in names.items() if name != DIGESTS}
