"""What do predicted records say? One tidy table of them, which shares no row and no column with measured ones."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from study import files
from study.errors import Refusal
from study.records import schema
from study.records.schema import PredictedRun, PredictedStudy, UnpredictedRun
from study.theory import hardware

# What, beside strategy, batch and processes, tells configurations of one study apart.
SETTING = (
    "workload",
    "size",
    "precision",
    "accumulation_dtype",
    "sequence_length",
    "dropout",
    "attention",
    "activation_checkpointing",
)
COLUMNS = tuple(dict.fromkeys(["box", "num_gpus", "study", *PredictedRun.model_fields, *UnpredictedRun.model_fields]))


def read(folders: Iterable[Path]) -> pd.DataFrame:
    """Read all predicted records below these folders: a row for each configuration, in the order of their files.

    A row has a prediction, or in `why` the reason that it has none. A folder that is not there has none. Raises Refusal
    for a JSON file that says by a schema_version that it is a record and is no predicted one, and where two files are
    of one study and box.
    """
    path_of: dict[tuple[str, str], Path] = {}
    rows: list[dict[str, Any]] = []
    for path in dict.fromkeys(path for folder in folders for path in sorted(folder.rglob("*.json"))):
        content = files.load(path, "JSON")
        if not isinstance(content, dict) or "schema_version" not in content:  # another file
            continue
        read = schema.parse(path, content, PredictedStudy)
        box = _box(path, read)
        other = path_of.setdefault((box, read.study), path)
        if other != path:
            raise Refusal(f"{path}: {read.study} on {box} is predicted in {other} too; give one of them")
        shared = {"box": box, "num_gpus": read.box.num_gpus, "study": read.study}
        rows += [{**shared, **run.model_dump()} for run in (*read.predictions, *read.left_out)]
    table = pd.DataFrame(rows, columns=list(COLUMNS))
    return table.astype({"why": object, "lacking": object})  # None: nothing, also where that is so of all


def _box(path: Path, read: PredictedStudy) -> str:
    """Name a box by what torch calls its GPU, as the tables of measured runs do."""
    gpu = hardware.GPUS.get(read.box.gpu)
    if gpu is None:
        raise Refusal(f"{path}: box.gpu={read.box.gpu!r} is unknown; known are {', '.join(hardware.GPUS)}")
    return f"{read.box.num_gpus} x {gpu.torch_name}"


def setting_in_words(row: dict[str, Any]) -> str:
    """What is trained, and how; what most configurations have goes without saying."""
    words = [f"{row['workload']} {row['size']}", row["precision"]]
    words += [f"gradients added in {row['accumulation_dtype']}"] if row["accumulation_dtype"] != "fp32" else []
    words += [f"length {row['sequence_length']}"]
    words += [f"dropout {row['dropout']:g}"] if row["dropout"] else []
    words += [f"{row['attention']} attention"] if row["attention"] != "sdpa" else []
    words += ["activation checkpointing"] if row["activation_checkpointing"] else []
    return ", ".join(words)
