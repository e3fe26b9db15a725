"""How is a matrix run? Launches of one or more ranks train cell after cell; each in a process of its own."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from study.engines.conformance.cells import Cell
from study.files import ROOT

LAST_LINES = 5

# What is said by a rank that only lost another one; and the ports of connections, which are drawn anew in every launch.
LOST = ("Connection reset by peer", "Connection closed by peer", "Broken pipe")
PORT = re.compile(r"(?<=\]):\d+")


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
    module: str = "study.engines.conformance.probe",
) -> dict[Cell, Failure]:
    """Train every cell, those of as many ranks in one launch, and return those that failed.

    What the others left lies in `folder` (`traces`). `module`: what each rank runs; tests plant faults in it.
    """
    failures: dict[Cell, Failure] = {}
    for num_ranks in sorted({cell.num_ranks for cell in cells}):
        asked = {number: cell for number, cell in enumerate(cells) if cell.num_ranks == num_ranks}
        say(f"{len(asked)} cells of {num_ranks} rank{'s'[: num_ranks > 1]} ...")
        (folder / "cells.json").write_text(json.dumps([(n, dataclasses.asdict(cell)) for n, cell in asked.items()]))
        _launch(folder, num_ranks, environment, module)
        for number, cell in asked.items():
            if failure := _failure(folder, number, num_ranks):
                failures[cell] = failure
    return failures


def traces(folder: Path, number: int, num_ranks: int) -> list[Path]:
    """What the ranks of a cell left, by its place in the list that `train` was given."""
    return [folder / f"{number}-{rank}.pt" for rank in range(num_ranks)]


def _launch(folder: Path, num_ranks: int, environment: Mapping[str, str], module: str) -> None:
    """Start the ranks and wait until they end; each gives up a cell that takes too long."""
    common = dict(environment) | {
        "WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu",
        "PYTHONPATH": os.pathsep.join(filter(None, (environment.get("PYTHONPATH"), str(ROOT)))),
    }  # fmt: skip
    ranks = []
    try:
        for rank in range(num_ranks):
            own = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            with open(folder / f"{rank}.log", "ab") as log:
                command = [sys.executable, "-m", module, str(folder)]
                ranks.append(subprocess.Popen(command, env=own, stdout=log, stderr=subprocess.STDOUT, cwd=folder))
        for process in ranks:
            process.wait()
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def _failure(folder: Path, number: int, num_ranks: int) -> Failure | None:
    """Why a cell did not end on every rank, as the rank says it that failed first.

    One that a signal ended comes before those that met an error, and one that only lost another rank after them.
    """
    said = [path for rank in range(num_ranks) if (path := folder / f"{number}-{rank}.txt").exists()]
    if said:
        message, stage, _ = min((json.loads(path.read_text()) for path in said), key=_order)
        return Failure(PORT.sub("", message), stage)
    if all(path.exists() for path in traces(folder, number, num_ranks)):
        return None
    return Failure(_last_lines(folder), "ended")


def _order(said: tuple[str, str, float]) -> tuple[bool, bool, float]:
    message, stage, at = said
    return any(words in message for words in LOST), stage != "ended", at


def _last_lines(folder: Path) -> str:
    lines = (folder / "0.log").read_text(errors="replace").splitlines()
    return " ".join(line.strip() for line in lines[-LAST_LINES:] if line.strip())
