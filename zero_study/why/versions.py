"""Recognize releases of packages that do not fit each other, from an exception whose message is not known."""

from __future__ import annotations

import re
from collections.abc import Iterator

from zero_study.why.cause import Cause
from zero_study.why.known import conclude
from zero_study.why.log import Failure, Frame, Line

_KINDS = ("AttributeError", "TypeError", "ImportError", "NameError", "NotImplementedError")
# An object without something, or a call with other arguments than the function has.
_OF_INTERFACE = re.compile(
    r"has no attribute|unexpected keyword argument|required positional argument|positional arguments? but|"
    r"cannot import name|is not defined|multiple values for|abstract"
)
_PACKAGE = re.compile(r"(?:site|dist)-packages/([A-Za-z_]\w*)")


def of(failure: Failure) -> Iterator[Cause]:
    """Yield a cause if an exception suggests that two installed packages do not fit each other."""
    if failure.kind in _KINDS and _OF_INTERFACE.search(failure.text) and "NoneType" not in failure.text:
        packages = _packages(failure.frames)
        if packages:
            yield _cause(failure, packages, Line(failure.number, failure.rank, failure.first_line))


def _cause(failure: Failure, packages: list[str], line: Line) -> Cause:
    inner = packages[0]
    other = packages[1] if len(packages) > 1 else ""
    who = f"{other} called {inner}, and {inner}" if other else f"A function of {inner}"
    both = f"{inner} and {other}" if other else inner
    return conclude(
        "start-up/packages-do-not-fit", (line,), what=failure.first_line[:160], who=who, both=both,
        names=f"{inner} {other}".strip(),
    )  # fmt: skip


def _packages(frames: tuple[Frame, ...]) -> list[str]:
    """Return the packages of a traceback, the innermost first. Empty if the innermost frame is in no package."""
    found: list[str] = []
    for frame in reversed(frames):
        match = _PACKAGE.search(frame.file)
        name = match[1] if match else ""
        if not found and not name:
            return []
        if name and name not in found and (name != "torch" or not found):
            found.append(name)
    return found[:2]
