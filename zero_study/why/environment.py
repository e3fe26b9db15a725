"""Look at the installed packages that a traceback names: their releases, and the lines of source that were executed.

Only files of Python packages are read, because a log may name any file of this machine. Nothing is imported.
"""

from __future__ import annotations

import linecache
import re
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from zero_study.logs.printed_failures import Failure, Frame

_INSTALLED = re.compile(r"^(?P<folder>(?:.*/)?(?:site|dist)-packages)/(?P<rest>(?P<package>\w+)/[\w/.-]+\.py)$")


@dataclass(frozen=True)
class Environment:
    """The installed packages that the frames of a traceback name."""

    folder: Path  # of the packages
    versions: dict[str, str]  # by package

    def source_of(self, frame: Frame) -> str:
        """Return the line of the installed source that a frame names. Empty if there is none."""
        path = _source(self.folder, frame.file)
        return linecache.getline(str(path), frame.line).strip() if path is not None else ""

    def differs(self, frames: Iterable[Frame]) -> bool:
        """Return whether the installed source has another line at one of these frames than the log."""
        return any(frame.code and (source := self.source_of(frame)) and source != frame.code for frame in frames)


def look(failures: Iterable[Failure], is_requested: bool | None) -> Environment | None:
    """Return the environment of a traceback, or None.

    `is_requested`: True looks at the packages beside this program, although the log names other folders; False looks at
    none; None looks only if the log's folder of packages is on this machine.
    """
    if is_requested is False:
        return None
    frames = [frame for failure in failures for frame in failure.frames]
    matches = [match for frame in frames if (match := _INSTALLED.match(frame.file))]
    folders = (Path(match["folder"]) for match in matches)
    here = next((each for each, match in zip(folders, matches, strict=True) if _source(each, match[0])), None)
    if here is None and not is_requested:
        return None
    folder = here or Path(sysconfig.get_paths()["purelib"])
    names = dict.fromkeys(match["package"] for match in matches)
    versions = {name: version for name in names if (version := _version(folder, name))}
    found = Environment(folder, versions)
    return None if found.differs(frames) else found


def _source(folder: Path, file: str) -> Path | None:
    """Return a regular file of Python in a folder of packages. None if there is none, or if it is a link elsewhere."""
    match = _INSTALLED.match(file)
    try:
        path = (folder / match["rest"]).resolve(strict=True) if match else None
        return path if path is not None and path.is_file() and folder.resolve() in path.parents else None
    except OSError:
        return None


def _version(folder: Path, package: str) -> str:
    """Return the release of a package, from the name of the folder with its metadata. Empty if it is not installed."""
    pattern = re.compile(rf"(?i){re.escape(package)}-(\d[^-]*)\.dist-info")
    names = (pattern.fullmatch(path.name) for path in folder.glob("*.dist-info"))
    return next((match[1] for match in names if match), "")
