"""Read the settings of `zero-study check` in pyproject.toml: files to leave out, and accepted findings with reasons."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from pydantic import Field, ValidationError

from zero_study.answers.envelope import Finding
from zero_study.errors import Refusal, describe
from zero_study.files import StrictModel, read_whole

FILE = "pyproject.toml"
SECTION = "zero-study"
LONGEST_TEXT = 80  # characters of a finding's text in an entry that --accept prints
# Findings of which a key of a file has at most one.
OF_KEYS = {"doctor/ignored-key", "doctor/overridden-key", "doctor/acts-differently", "doctor/missing-key"}
PLACEHOLDER = "TODO"  # how the reason of an entry begins that --accept prints


class Accepted(StrictModel):
    """An entry of the settings that accepts findings, with the reason of the project's owners."""

    id: str  # of the finding, such as doctor/ignored-key
    reason: str  # why it is accepted
    path: str = "*"  # pattern of the files, relative to the folder of pyproject.toml
    key: str | None = None  # of the file; None for every key
    name: str | None = None  # of the package or tensor; None for every one
    text: str = ""  # a part of the finding's text

    def covers(self, finding: Finding, path: str) -> bool:
        """Return whether this entry accepts a finding in the file with this path."""
        return (
            finding.id == self.id
            and fnmatchcase(path, self.path)
            and self.key in (None, finding.key)
            and self.name in (None, finding.name)
            and self.text in finding.text
        )

    def __str__(self) -> str:
        parts = [self.id, "" if self.path == "*" else self.path, self.key or "", self.name or ""]
        return " ".join(filter(None, parts))


class Settings(StrictModel):
    """The section [tool.zero-study] of a project's pyproject.toml."""

    exclude: list[str] = Field(default_factory=list)  # patterns of files that are not checked
    checkpoints: list[str] = Field(default_factory=list)  # folders of checkpoints and saved models
    since: str = "HEAD"  # the commit with whose lock files those of the project are compared
    accepted: list[Accepted] = Field(default_factory=list)

    def excludes(self, path: str) -> bool:
        """Return whether the settings leave out a file. A pattern without a wildcard names everything in a folder."""
        return any(fnmatchcase(path, pattern) or path.startswith(f"{pattern.rstrip('/')}/") for pattern in self.exclude)


def find(folder: Path) -> Path | None:
    """Return the nearest pyproject.toml in a folder or in its parents. None if there is none."""
    candidates = (above / FILE for above in (folder, *folder.parents))
    return next((path for path in candidates if path.is_file()), None)


def read(path: Path) -> Settings:
    """Return the settings in a pyproject.toml. Raises Refusal if they cannot be read or have an unknown key."""
    try:
        content = tomllib.loads(read_whole(path).decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise Refusal(f"{path}: this is not TOML ({error}). Correct the file.") from None
    section = content.get("tool", {}).get(SECTION, {})
    try:
        settings = Settings.model_validate(section)
    except ValidationError as error:
        raise Refusal(describe(error, f"{path}, [tool.{SECTION}]")) from None
    for entry in settings.accepted:
        if not entry.reason.strip() or entry.reason.startswith(PLACEHOLDER):
            raise Refusal(f"{path}: the accepted finding {entry} has no reason. Write why the project accepts it.")
    return settings


def entries(findings: Iterable[tuple[Finding, str]]) -> Iterator[str]:
    """Yield lines for pyproject.toml that make the project accept these findings.

    Each finding comes with the path of its file. The reasons are placeholders. The settings are refused until somebody
    has replaced them.
    """
    for finding, path in findings:
        yield f"[[tool.{SECTION}.accepted]]"
        values = {"id": finding.id, "path": path, "key": finding.key, "name": finding.name}
        if finding.id not in OF_KEYS:  # a key or a package may have several
            values["text"] = finding.text[:LONGEST_TEXT]
        for key, value in (values | {"reason": f"{PLACEHOLDER}: say why"}).items():
            if value is not None:
                yield f"{key} = {_quoted(value)}"
        yield ""


def _quoted(text: str) -> str:
    """Return a text as a basic string of TOML."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in escaped) + '"'
