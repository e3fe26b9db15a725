"""Make the object that a command prints with --json: the keys that all commands share, and those of the command.

`models` has the types of these objects. This module does not use them, because `prove` also runs where pydantic is not
installed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..verdict import FOUND, REFUSED, SOUND, UNKNOWN, Verdict

# The commands that answer, with the version of each schema. A version changes only if a key is removed or changes its
# meaning. New keys may come at any time.
VERSIONS = {
    "advise": 1, "check": 1, "claims": 1, "compare": 1, "conformance": 1, "diff": 1, "doctor": 1, "dry-run": 1,
    "exact": 1,
    "import": 1, "plan": 1, "predict": 1, "prove": 1, "saved": 1, "upgrade": 1, "why": 1,
}  # fmt: skip
PREFIX = "zero-study/"  # of the name of a schema
OTHER = "zero-study/refusal"  # the schema of a refusal if the command is not one of these, for instance misspelt

# error: the training fails or is wrong. warning: something else than requested or expected. Both are found, so that the
# verdict is "found". note: worth knowing, and no finding of the verdict.
Severity = Literal["error", "warning", "note"]
ErrorKind = Literal["refused", "failed", "not checked", "interrupted", "internal"]

_WORDS = {SOUND: "sound", FOUND: "found", REFUSED: "refused", UNKNOWN: "unknown"}


@dataclass(frozen=True)
class Finding:
    """One problem or note that a command reports, with its location and its remedy."""

    id: str  # stable, such as "doctor/ignored-key"; see `ids`
    severity: Severity
    text: str
    remedy: str = ""  # what to do; empty if nothing is known
    file: str | None = None
    line: int | None = None  # in the file, counted from 1
    key: str | None = None  # of the file, with dots
    name: str | None = None  # of the tensor, package, cell, strategy or check that it concerns
    step: int | None = None
    rank: int | None = None

    def content(self) -> dict[str, Any]:
        """Return the finding as a dict for JSON."""
        place = {part: getattr(self, part) for part in ("file", "line", "key", "name", "step", "rank")}
        return {
            "id": self.id, "severity": self.severity, "place": place, "text": self.text, "remedy": self.remedy,
        }  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """What a command prints with --json, and the exit status with which it ends."""

    content: dict[str, Any] = field(repr=False)
    status: int

    def text(self) -> str:
        """Return the object as JSON in ASCII, so that no terminal or encoding can change it."""
        return json.dumps(plain(self.content), indent=1, default=str, allow_nan=False)


def answer(
    command: str,
    verdict: Verdict | None,
    findings: Iterable[Finding] = (),
    fields: Mapping[str, Any] | None = None,
    status: int | None = None,
) -> Answer:
    """Return the answer of a command. `fields` are the command's own keys, which must differ from the shared keys.

    `verdict` is None if the command only reports, so that there is nothing to judge. `status` is the exit status, if it
    does not follow from the verdict.
    """
    judged = {"verdict": None, "checked": [], "could_not_check": []} if verdict is None else verdict.content()
    if status is None:
        status = SOUND if verdict is None else verdict.status
    content = _envelope(
        command,
        judged["verdict"],
        status,
        findings=[finding.content() for finding in findings],
        checked=judged["checked"],
        could_not_check=judged["could_not_check"],
    )
    return Answer({**content, **{key: value for key, value in (fields or {}).items() if key not in content}}, status)


def error(command: str | None, kind: ErrorKind, message: str, status: int) -> Answer:
    """Return what a command prints with --json after an error. `command` is None if no command was recognized."""
    verdict = _WORDS.get(status, "unknown")
    return Answer(_envelope(command, verdict, status, error={"kind": kind, "message": message}), status)


def _envelope(command: str | None, verdict: str | None, status: int, **parts: Any) -> dict[str, Any]:
    """Return the keys that all commands print, in their order. Keys that are not among `parts` are empty."""
    is_known = command in VERSIONS
    return {
        "schema": f"{PREFIX}{command}" if is_known else OTHER,
        "version": VERSIONS.get(command or "", 1),
        "verdict": verdict,
        "exit_status": status,
        "findings": [],
        "checked": [],
        "could_not_check": [],
        "error": None,
        **parts,
    }


def plain(value: Any) -> Any:
    """Return a copy of a value for JSON, in which None replaces NaN and infinite numbers."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(member) for key, member in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(member) for member in value]
    return value
