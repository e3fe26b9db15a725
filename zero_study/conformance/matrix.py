"""Train every configuration (cell) of the conformance matrix with the installed engines, and judge the results.

All cells with the same number of ranks share one launch. The ranks of each cell are forks of the launched process.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import math
import os
import platform
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from .. import files, processes, terminal
from ..engines import extensions
from ..files import ROOT
from . import releases
from .cells import ADAMW, Cell
from .judge import References, judge
from .refusals import is_refusal

PACKAGES = ("torch", "deepspeed", "accelerate")

MESSAGE_LENGTH = 300
LAST_LINES = 5


def run(
    cells: Sequence[Cell],
    say: Callable[[str], None] = print,
    *,
    chosen: Mapping[str, str] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train and judge the configurations `cells`, and return the conformance matrix as a dict.

    A verdict is same, wrong, refused (the engine reported that it does not support the cell, see `refusals`) or
    crashed. `chosen` maps packages to the releases that are used instead of the installed ones. `options` are passed on
    to `launch_cells`.
    """
    chosen = chosen or {}
    options.setdefault("environment", _environment(cells, chosen))
    began = time.monotonic()
    references = References()
    verdicts: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        with ThreadPoolExecutor(1) as executor:  # references are computed while ranks wait for one another
            executor.submit(lambda: [references.of(cell) for cell in cells])
            failures = launch_cells(cells, Path(scratch), say=say, **options)
        trained = time.monotonic()
        say("Comparing the trainings with the reference ...")
        for number, cell in enumerate(cells):
            if cell in failures:
                verdicts[cell.name] = failure_verdict(failures[cell], cell.optimizer)
            else:
                paths = traces(Path(scratch), number, cell.num_ranks)
                ranks = [torch.load(path, weights_only=True) for path in paths]
                verdicts[cell.name] = judge(cell, references.of(cell), ranks)
    return {
        "versions": {**installed(), **chosen},
        "python": platform.python_version(),
        "num_cores": os.cpu_count(),
        "examined_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "seconds": {"training": round(trained - began), "judging": round(time.monotonic() - trained)},
        "cells": verdicts,
    }


def _environment(cells: Sequence[Cell], chosen: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the training processes.

    Raises Refusal if a release or an extension is not available.
    """
    needs = {name for cell in cells for name in cell.extensions}
    if not {"torch", "deepspeed"} & set(chosen):  # chosen releases build their own extensions
        extensions.use_own_folder()
        extensions.provide(needs, "conformance")
    return releases.environment(chosen, needs) if chosen else dict(os.environ)


def failure_verdict(failure: Failure, optimizer: str = ADAMW) -> dict[str, Any]:
    """Return the verdict on a configuration whose training failed: refused or crashed, with stage and message."""
    refused = is_refusal(failure.message, failure.stage, optimizer)
    return {
        "verdict": "refused" if refused else "crashed",
        "stage": failure.stage,
        "message": failure.message[:MESSAGE_LENGTH],
    }


def installed() -> dict[str, str]:
    """Return the versions of the installed engines, by package."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


# ---------------------------------------------------------------- training the cells


@dataclasses.dataclass(frozen=True)
class Failure:
    """The error that ended the training of one configuration."""

    message: str
    stage: str  # built, trained, saved and taken up (resumed), or ended (the process died or took too long)


def launch_cells(
    cells: Sequence[Cell],
    folder: Path,
    *,
    environment: Mapping[str, str] = os.environ,
    say: Callable[[str], None] = print,
    module: str = f"{__package__}.probe",
) -> dict[Cell, Failure]:
    """Train the configurations `cells`, and return the errors of those that failed.

    All cells with the same number of ranks share one launch. Results of successful cells are in `folder`, in the files
    that `traces` names. `module` is the Python module that each rank runs. Tests replace it to inject faults.
    """
    failures: dict[Cell, Failure] = {}
    for num_ranks in sorted({cell.num_ranks for cell in cells}):
        numbered = {number: cell for number, cell in enumerate(cells) if cell.num_ranks == num_ranks}
        say(f"Training {len(numbered)} configurations on {terminal.count(num_ranks, 'rank')} ...")
        (folder / "cells.json").write_text(json.dumps([(n, dataclasses.asdict(cell)) for n, cell in numbered.items()]))
        errors = _launch(folder, environment, module)
        for number, cell in numbered.items():
            if failure := _failure(folder, number, num_ranks, errors):
                failures[cell] = failure
    return failures


def traces(folder: Path, number: int, num_ranks: int) -> list[Path]:
    """Return the paths of the result files of one configuration, one per rank.

    `number` is the position of the cell in the list that was passed to `launch_cells`.
    """
    return [folder / f"{number}-{rank}.pt" for rank in range(num_ranks)]


def _launch(folder: Path, environment: Mapping[str, str], module: str) -> list[str]:
    """Run the process that trains all configurations, and return the lines of its error output.

    There is no time limit here, because the process itself ends a training that takes too long.
    """
    common = dict(environment) | {
        "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu",
        "PYTHONPATH": os.pathsep.join(filter(None, (environment.get("PYTHONPATH"), str(ROOT)))),
    }  # fmt: skip
    program = ["-m", module, str(folder)]
    return processes.run(program, timeout_seconds=math.inf, environment=common, folder=folder)[0].errors


def _failure(folder: Path, number: int, num_ranks: int, errors: Sequence[str]) -> Failure | None:
    """Return the error of one configuration's training. None if every rank completed it."""
    report = folder / f"{number}.json"
    if report.exists():
        return Failure(**files.load(report, "a failure of a cell"))
    if all(path.exists() for path in traces(folder, number, num_ranks)):
        return None
    return Failure(" ".join(line.strip() for line in errors[-LAST_LINES:]), "ended")
