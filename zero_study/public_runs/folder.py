"""Read and write public runs: one JSON file per run, NAME.run.json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zero_study.errors import Refusal, refusing
from zero_study.files import check_name, load, missing_folders, remove_empty, write_whole
from zero_study.public_runs.schema import PublicRun

SUFFIX = ".run.json"


def path_of(folder: Path, name: str) -> Path:
    """Return the path of a run's file."""
    return folder / (check_name(name, "The name of a run") + SUFFIX)


def text_of(run: PublicRun) -> str:
    """Return the text of a run's file. Each part and each column has a line of its own."""
    parts = [f" {json.dumps(key)}: {_text_of_part(value)}" for key, value in run.content().items()]
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _text_of_part(value: Any) -> str:
    if not isinstance(value, dict) or "columns" not in value:
        return json.dumps(value, allow_nan=False)
    columns = [
        f"   {json.dumps(name)}: {json.dumps(column, allow_nan=False, separators=(',', ':'))}"
        for name, column in value["columns"].items()
    ]
    others = "".join(f",\n  {json.dumps(key)}: {json.dumps(each)}" for key, each in value.items() if key != "columns")
    return '{\n  "columns": {\n' + ",\n".join(columns) + "\n  }" + others + "\n }"


def read(path: Path) -> PublicRun:
    """Read a run. Raises Refusal if the file is damaged or has another name than the run."""
    content = load(path, "a public run")
    with refusing(str(path)):
        run = PublicRun.model_validate(content)
        if path.name != run.name + SUFFIX:
            raise ValueError(f"the run in this file has the name {run.name!r}. Rename the file")
    return run


def write(runs: Sequence[PublicRun], folder: Path) -> list[PublicRun]:
    """Write runs to a folder, which is created. Return those that were not there yet.

    Raises Refusal, and writes nothing, if a different run of the same name is there, or if the folder is a file.
    """
    for place in (folder, *folder.parents):
        if place.exists() and not place.is_dir():
            raise Refusal(f"--output {folder}: {place} is a file. Name a folder.")
    texts = {path_of(folder, run.name): (run, text_of(run)) for run in runs}
    new = {path: each for path, each in texts.items() if not _is_there(path, each[0])}
    created = missing_folders(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, (_, text) in new.items():
            write_whole(path, text.encode())
    except OSError:
        remove_empty(created)
        raise
    return [run for run, _ in new.values()]


def _is_there(path: Path, run: PublicRun) -> bool:
    """Return whether the same run is in a file, perhaps imported by another release of this program.

    Raises Refusal if another run is there.
    """
    if not path.exists() and not path.is_symlink():
        return False
    there = read(path)
    if there.model_copy(update={"made_by": run.made_by}) != run:
        raise Refusal(f"{path} contains a different run. Choose another --output or --name, or remove this file.")
    return True
