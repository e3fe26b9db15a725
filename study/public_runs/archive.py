"""Read and write public runs: the committed archive in reports/public, and folders that `zero-study import` wrote."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from pydantic import ValidationError

from zero_study import files
from zero_study.errors import Refusal
from zero_study.public_runs import folder
from zero_study.public_runs.schema import PublicRun

ARCHIVE = files.ROOT / "reports" / "public"  # one file per source, one run per line
COLLECTED = ".jsonl.gz"


def line_of(run: PublicRun) -> str:
    """Return a run as one line of JSON."""
    return json.dumps(run.content(), ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def write(path: Path, runs: Iterable[PublicRun]) -> None:
    """Write the runs of one source to a file of the archive, ordered by name. Equal runs give equal bytes."""
    lines = [f"{line_of(run)}\n" for run in sorted(runs, key=lambda run: run.name)]
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_whole(path, gzip.compress("".join(lines).encode(), mtime=0))


@cache
def source(name: str) -> tuple[PublicRun, ...]:
    """Return the runs of one source of the archive. Raises Refusal if there is no such source."""
    path = ARCHIVE / f"{name}{COLLECTED}"
    if not path.is_file():
        known = ", ".join(sources()) or "none"
        raise Refusal(f"{ARCHIVE} has no public runs of {name!r}. It has those of: {known}")
    return tuple(_of_lines(path))


def sources() -> list[str]:
    """Return the names of the sources in the archive."""
    return sorted(path.name.removesuffix(COLLECTED) for path in ARCHIVE.glob(f"*{COLLECTED}"))


def find(places: Iterable[Path]) -> list[Path]:
    """Return the files of public runs among these paths and below these folders."""
    paths: list[Path] = []
    for place in places:
        if place.is_dir():
            paths += sorted(place.rglob(f"*{folder.SUFFIX}"))
        elif place.name.endswith(folder.SUFFIX):
            paths.append(place)
        if ARCHIVE in (place.resolve(), place.resolve().parent):
            paths += sorted(place.glob(f"*{COLLECTED}")) if place.is_dir() else [place]
    return paths


def read(paths: Iterable[Path]) -> list[PublicRun]:
    """Return the public runs in these files. Raises Refusal if one of them cannot be read."""
    runs: list[PublicRun] = []
    for path in paths:
        runs += _of_lines(path) if path.name.endswith(COLLECTED) else [folder.read(path)]
    return runs


def _of_lines(path: Path) -> Iterator[PublicRun]:
    with gzip.open(path) as file:
        for number, line in enumerate(file, 1):
            yield _parse(line, path, number)


def _parse(content: bytes, path: Path, number: int) -> PublicRun:
    try:
        return PublicRun.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise Refusal(f"{path}, line {number}: not a public run: {place}: {first['msg']}") from None
