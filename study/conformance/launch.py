"""How is a matrix run? Launches of one or more ranks train cell after cell; what ends a launch costs one cell."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from study.conformance.cells import Cell
from study.files import ROOT

CELL_SECONDS = 120  # in which a cell must end, a first build of an extension apart
LAST_LINES = 5


@dataclasses.dataclass(frozen=True)
class Failure:
    """What kept a cell from being trained."""

    message: str
    stage: str  # built, trained, saved and taken up; ended: the process did, or it was ended for its time


def train(
    cells: Sequence[Cell],
    folder: Path,
    *,
    python: str = sys.executable,
    environment: Mapping[str, str] = os.environ,
    say: Callable[[str], None] = print,
    module: str = "study.conformance.probe",
) -> dict[Cell, Failure]:
    """Train every cell, those of as many ranks in one launch, and return those that failed.

    What the others left lies in `folder` (`traces`).
    """
    failures: dict[Cell, Failure] = {}
    for num_ranks in sorted({cell.num_ranks for cell in cells}):
        left = [cell for cell in cells if cell.num_ranks == num_ranks]
        while left:
            say(f"{len(left)} cells of {num_ranks} rank{'s'[: num_ranks > 1]} ...")
            asked = [(cells.index(cell), dataclasses.asdict(cell)) for cell in left]
            (folder / "cells.json").write_text(json.dumps(asked))
            _launch(folder, num_ranks, [number for number, _ in asked], python, environment, module)
            again = []
            for (number, _), cell in zip(asked, left, strict=True):
                if not (folder / f"{number}-0.begun").exists():
                    again.append(cell)
                elif failure := _failure(folder, number, num_ranks):
                    failures[cell] = failure
            if len(again) == len(left):  # no cell was begun
                failures |= dict.fromkeys(left, Failure(_last_lines(folder), "ended"))
                break
            left = again
    return failures


def traces(folder: Path, number: int, num_ranks: int) -> list[Path]:
    """What the ranks of a cell left, by its place in the list that `train` was given."""
    return [folder / f"{number}-{rank}.pt" for rank in range(num_ranks)]


def _launch(
    folder: Path, num_ranks: int, numbers: Sequence[int], python: str, environment: Mapping[str, str], module: str
) -> None:
    """Start the ranks and wait until they end; where a cell takes too long, end them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = dict(environment) | {
        "WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), environment.get("PYTHONPATH")))),
    }  # fmt: skip
    ranks = []
    for rank in range(num_ranks):
        own = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        with open(folder / f"{rank}.log", "ab") as log:
            command = [python, "-m", module, str(folder)]
            ranks.append(subprocess.Popen(command, env=own, stdout=log, stderr=subprocess.STDOUT, cwd=folder))
    last_seen, num_begun = time.monotonic(), 0
    try:
        while any(rank.poll() is None for rank in ranks):
            time.sleep(0.05)
            begun = sum((folder / f"{number}-0.begun").exists() for number in numbers)
            if begun != num_begun:
                last_seen, num_begun = time.monotonic(), begun
            # One that died leaves the others waiting at a collective.
            died = any(rank.poll() not in (None, 0) for rank in ranks)
            if time.monotonic() - last_seen > (10 if died else CELL_SECONDS):
                break
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def _failure(folder: Path, number: int, num_ranks: int) -> Failure | None:
    """Why a cell that was begun did not end on every rank."""
    said = [folder / f"{number}-{rank}.txt" for rank in range(num_ranks)]
    for path in said:
        if path.exists():
            return Failure(*json.loads(path.read_text()))
    if all(path.exists() for path in traces(folder, number, num_ranks)):
        return None
    return Failure(_last_lines(folder), "ended")


def _last_lines(folder: Path) -> str:
    lines = (folder / "0.log").read_text(errors="replace").splitlines()
    return " ".join(line.strip() for line in lines[-LAST_LINES:] if line.strip())
