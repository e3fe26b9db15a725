"""Make the matrix of an installation, one JSON: train cells in launches of ranks, each in a fork, and judge them."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import math
import os
import platform
import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from ... import processes
from ...files import ROOT
from .. import extensions
from . import releases
from .cells import Cell
from .judge import References, judge

PACKAGES = ("torch", "deepspeed", "accelerate")

# DeepSpeed's extensions, and the word in the names of the engines that load them.
NEEDED = {"cpu_adam": "offload", "async_io": "nvme"}

# An engine that cannot do something and says so, in the words of Python; anything else is a crash.
REFUSALS = ("AssertionError", "NotImplementedError", "NotOffered", "ValueError", "DeepSpeedConfigError")
MESSAGE_LENGTH = 300
LAST_LINES = 5
WORKERS = 2  # processes that share the cells of one rank

# What is said by a rank that only lost another one; and the ports of connections, which are drawn anew in every launch.
LOST = ("Connection reset by peer", "Connection closed by peer", "Broken pipe")
PORT = re.compile(r"(?<=\]):\d+")


def examine(
    cells: Sequence[Cell],
    say: Callable[[str], None] = print,
    *,
    chosen: Mapping[str, str] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train every cell and judge it: same, wrong, refused (the engine said that it cannot) or crashed.

    `chosen`: releases to take in place of those installed, by package. `options` are passed on to `train`.
    """
    chosen = chosen or {}
    options.setdefault("environment", _environment(cells, chosen))
    began = time.monotonic()
    references = References()
    verdicts: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        with ThreadPoolExecutor(1) as executor:  # ranks wait for one another, which leaves time for the references
            executor.submit(lambda: [references.of(cell) for cell in cells])
            failures = train(cells, Path(scratch), say=say, **options)
        trained = time.monotonic()
        say("Comparing the cells with the reference ...")
        for number, cell in enumerate(cells):
            if cell in failures:
                verdicts[cell.name] = failure_verdict(failures[cell])
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
    """Return the environment of the processes that train. Raises Refusal if a release or an extension is missing."""
    engines = {cell.engine for cell in cells}
    if not {"torch", "deepspeed"} & set(chosen):  # whose extensions are their own
        extensions.use_own_folder()
        needs = {name for name, word in NEEDED.items() if any(word in engine for engine in engines)}
        extensions.provide(needs, "conformance")
    return releases.environment(chosen, engines) if chosen else dict(os.environ)


def failure_verdict(failure: Failure) -> dict[str, Any]:
    """Return the verdict on a cell that was not trained to its end: refused or crashed."""
    kind, _, message = failure.message.partition(": ")
    refused = failure.stage != "ended" and kind in REFUSALS and bool(message)
    return {
        "verdict": "refused" if refused else "crashed",
        "stage": failure.stage,
        "message": failure.message[:MESSAGE_LENGTH],
    }


def installed() -> dict[str, str]:
    """Return the versions of those engines that are installed."""
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
    """What kept a cell from being trained."""

    message: str
    stage: str  # built, trained, saved and taken up; ended: the process did, or it was ended for its time


def train(
    cells: Sequence[Cell],
    folder: Path,
    *,
    environment: Mapping[str, str] = os.environ,
    say: Callable[[str], None] = print,
    module: str = f"{__package__}.probe",
) -> dict[Cell, Failure]:
    """Train every cell, those of as many ranks in one launch, and return those that failed.

    What the others left lies in `folder` (`traces`). `module`: what each rank runs; tests plant faults in it.
    """
    failures: dict[Cell, Failure] = {}
    for num_ranks in sorted({cell.num_ranks for cell in cells}):
        numbered = {number: cell for number, cell in enumerate(cells) if cell.num_ranks == num_ranks}
        say(f"Training {len(numbered)} cells on {num_ranks} rank{'s'[: num_ranks > 1]} ...")
        (folder / "cells.json").write_text(json.dumps([(n, dataclasses.asdict(cell)) for n, cell in numbered.items()]))
        errors = _launch(folder, max(num_ranks, WORKERS), environment, module)
        for number, cell in numbered.items():
            if failure := _failure(folder, number, num_ranks, errors):
                failures[cell] = failure
    return failures


def traces(folder: Path, number: int, num_ranks: int) -> list[Path]:
    """Return the files of a cell's ranks. `number`: the position of the cell in the list that `train` was given."""
    return [folder / f"{number}-{rank}.pt" for rank in range(num_ranks)]


def _launch(folder: Path, num_processes: int, environment: Mapping[str, str], module: str) -> list[str]:
    """Return what the first process said once all have ended; each gives up a cell that takes too long."""
    common = dict(environment) | {
        "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu",
        "PYTHONPATH": os.pathsep.join(filter(None, (environment.get("PYTHONPATH"), str(ROOT)))),
    }  # fmt: skip
    program = ["-m", module, str(folder)]
    return processes.run(program, num_processes, timeout_seconds=math.inf, environment=common, folder=folder)[0].errors


def _failure(folder: Path, number: int, num_ranks: int, errors: Sequence[str]) -> Failure | None:
    """Say why a cell did not end on every rank, in the words of the rank that failed first; None: it did.

    A rank that a signal ended comes before those that met an error. Those that only lost another rank come last.
    """
    reports = [path for rank in range(num_ranks) if (path := folder / f"{number}-{rank}.txt").exists()]
    if reports:
        message, stage, _ = min((json.loads(path.read_text()) for path in reports), key=_order)
        return Failure(PORT.sub("", message), stage)
    if all(path.exists() for path in traces(folder, number, num_ranks)):
        return None
    return Failure(" ".join(line.strip() for line in errors[-LAST_LINES:]), "ended")


def _order(report: tuple[str, str, float]) -> tuple[bool, bool, float]:
    message, stage, time_of_failure = report
    return any(words in message for words in LOST), stage != "ended", time_of_failure
