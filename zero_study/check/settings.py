"""Read the settings of `zero-study check` in pyproject.toml: files to leave out, and accepted findings with reasons."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import date
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from zero_study.answers.envelope import Finding
from zero_study.errors import Refusal, describe
from zero_study.files import StrictModel, read_whole

FILE = "pyproject.toml"
SECTION = "zero-study"
PLACEHOLDER = "TODO"  # how the reason of an entry begins that --accept prints
_OLD = "accepted"  # the key of the settings that had one table per finding


class Reason(StrictModel):
    """Why findings are accepted, and until when."""

    reason: str
    until: date | None = None  # the last day; None: always


@dataclass(frozen=True)
class Accepted:
    """An entry of the settings that accepts findings, with the reason of the project's owners."""

    id: str  # of the findings, such as doctor/ignored-key
    target: str  # pattern of the key, the package, the tensor or the file that they are about; empty: any
    reason: str
    until: date | None = None

    def covers(self, finding: Finding, path: str) -> bool:
        """Return whether this entry accepts a finding in the file with this path. An error must be named exactly."""
        if finding.id != self.id or (self.until is not None and date.today() > self.until):
            return False
        own = finding.name or finding.key or path
        if finding.severity == "error":
            return self.target in (own, f"{path} {own}")
        # A finding about several packages is accepted only if the pattern covers all of them.
        subjects = ([own], (finding.name or "").split(", "), [finding.key or ""], [path])
        return not self.target or any(all(name and self._fits(name) for name in names) for names in subjects)

    def _fits(self, name: str) -> bool:
        return name == self.target or fnmatchcase(name, self.target)

    def __str__(self) -> str:
        return f"{self.id}: {self.target}" if self.target else self.id


class Settings(StrictModel):
    """The section [tool.zero-study] of a project's pyproject.toml."""

    exclude: list[str] = Field(default_factory=list)  # patterns of files that are not checked
    checkpoints: list[str] = Field(default_factory=list)  # folders of checkpoints and saved models
    since: str = "HEAD"  # the commit with whose lock files those of the project are compared
    accept: dict[str, str | Reason] = Field(default_factory=dict)  # the reasons, by "id" or "id: what it is about"

    @cached_property
    def accepted(self) -> list[Accepted]:
        """The entries of `accept`."""
        entries = []
        for name, value in self.accept.items():
            identity, _, target = name.partition(":")
            reason = value if isinstance(value, Reason) else Reason(reason=value)
            entries.append(Accepted(identity.strip(), target.strip(), reason.reason, reason.until))
        return entries

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
    if isinstance(section, dict) and _OLD in section:
        new = _in_new_form(section[_OLD])
        raise Refusal(f"{path}: accepted findings have another form now. Replace the tables by this line: {new}")
    try:
        settings = Settings.model_validate(section)
    except ValidationError as error:
        raise Refusal(describe(error, f"{path}, [tool.{SECTION}]")) from None
    for entry in settings.accepted:
        if not entry.reason.strip() or entry.reason.startswith(PLACEHOLDER):
            raise Refusal(f"{path}: the accepted finding {entry} has no reason. Write why the project accepts it.")
    return settings


def _in_new_form(entries: Any) -> str:
    """Return the line for [tool.zero-study] that replaces tables of accepted findings."""
    tables = [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    lines = [_line(str(table.get("id")), _target(table), str(table.get("reason", ""))) for table in tables]
    return f"accept = {{{', '.join(dict.fromkeys(lines))}}}"


def _target(table: dict[str, Any]) -> str:
    return str(table.get("key") or table.get("name") or table.get("path") or "")


def entries(findings: Iterable[tuple[Finding, str]]) -> Iterator[str]:
    """Yield lines for pyproject.toml that make the project accept these findings, one line per kind and place.

    Each finding comes with the path of its file. The reasons are placeholders. The settings are refused until somebody
    has replaced them.
    """
    lines = [_line(finding.id, _place(finding, path), f"{PLACEHOLDER}: say why") for finding, path in findings]
    if lines:
        yield f"[tool.{SECTION}.accept]"
        yield from dict.fromkeys(lines)


def _place(finding: Finding, path: str) -> str:
    """Return what a finding is about, as an entry names it; empty if it is about several packages."""
    return "" if ", " in (finding.name or "") else finding.name or finding.key or path


def _line(identity: str, target: str, reason: str) -> str:
    return f"{_quoted(f'{identity}: {target}' if target else identity)} = {_quoted(reason)}"


def _quoted(text: str) -> str:
    """Return a text as a basic string of TOML."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in escaped) + '"'
