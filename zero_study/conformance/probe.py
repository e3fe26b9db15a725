"""Train configurations (cells) one after the other, and write the result of each.

`python -m zero_study.conformance.probe FOLDER` reads FOLDER/cells.json and writes FOLDER/NUMBER-RANK.pt for each rank
of a cell that trained, and FOLDER/NUMBER.json for a cell that did not. It judges nothing, so that any release of torch,
DeepSpeed and accelerate can run it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import math
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from .. import files
from ..engines import extensions
from ..ranks import worlds
from ..ranks.forks import Ending
from . import adapters, optimizers, toy
from .cells import ADAMW, NUM_STEPS, SAVED_AFTER, SKIPPED, Cell

MOST_VALUES = 4096  # kept per parameter; with more, a large model would mostly wait for the disk
CELL_SECONDS = 90
RANKS_AT_ONCE = 2  # of cells on one rank
LAST_LINES = 5
# LOST: messages of a rank that only lost its connection to another rank. PORT: the port number in a message, which
# differs from launch to launch.
LOST = ("Connection reset by peer", "Connection closed by peer", "Broken pipe")
PORT = re.compile(r"(?<=\]):\d+")


def main(folder: Path) -> None:
    """Train each configuration in FOLDER/cells.json, in processes that are forked from this one, and write the results.

    This process has imported everything. New processes are needed because DeepSpeed 0.17.5 carries the wrong norms of
    its stages 1 and 2 under autocast over to engines whose norms are right on their own.
    """
    cells = [(number, Cell(**fields)) for number, fields in json.loads((folder / "cells.json").read_text())]
    _import_engines([cell for _, cell in cells])
    worlds_of_cells = [
        worlds.World(
            cell.num_ranks, functools.partial(_train_and_save, cell, folder / str(number)), CELL_SECONDS, _judge
        )
        for number, cell in cells
    ]
    at_once = max(RANKS_AT_ONCE, *(cell.num_ranks for _, cell in cells))
    for position, result in worlds.run(worlds_of_cells, at_once):
        number, _ = cells[position]
        failures = [answer["failure"] for answer in result.answers.values() if "failure" in answer]
        if result.failure and not failures:
            failures = [[result.failure, "ended", 0.0]]
        if failures:
            message, stage, _ = min(failures, key=_order)
            files.write_json(folder / f"{number}.json", {"message": PORT.sub("", message), "stage": stage})
        _import_what_it_did(result.answers)


def _import_engines(cells: Collection[Cell]) -> None:
    """Import and load what the configurations need, before the first fork. No thread may have been started yet."""
    worlds.import_before_forks((), deepspeed=any(cell.is_deepspeed for cell in cells))
    for name in {name for cell in cells for name in cell.extensions if name != "async_io"}:
        extension = extensions.EXTENSIONS[name]
        getattr(importlib.import_module(extension.module), extension.builder)().load()
    worlds.freeze()


def _import_what_it_did(answers: Mapping[int, dict[str, Any]]) -> None:
    """Import the modules that the last training imported, so that the next training need not.

    The order is that of the training. In another order, modules that import each other can fail, and then all later
    trainings fail, too.
    """
    for name in dict.fromkeys(name for answer in answers.values() for name in answer.get("modules", ())):
        if name not in sys.modules:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    worlds.freeze()  # without this, each of an engine's dozens of garbage collections takes a third of a second


def _judge(rank: int, ending: Ending) -> dict[str, Any]:
    """Return the failure of a rank whose process ended without an answer."""
    message = " ".join(line.strip() for line in ending.lines[-LAST_LINES:])
    if ending.status < 0:
        last_line = "".join(f": {line.strip()}" for line in ending.lines[-1:])
        message = f"rank {rank} was ended by {signal.Signals(-ending.status).name}{last_line}"
    return {"failure": [message, "ended", time.time()]}


def _order(failure: tuple[str, str, float]) -> tuple[bool, bool, float]:
    """Return a sort key for the failures of one configuration's ranks. The first failure is the cause of the others.

    A rank that was killed by a signal takes precedence over ranks that raised an error. Ranks that only lost their
    connection to another rank come last.
    """
    message, stage, time_of_failure = failure
    return any(words in message for words in LOST), stage != "ended", time_of_failure


def _train_and_save(cell: Cell, path: Path, rank: int, folder: Path) -> dict[str, Any]:
    """Join a training as one rank, train one configuration, and write the results to PATH-RANK.pt.

    Returns the names of all imported modules, and the `failure` if the training failed.
    """
    began, stage = time.perf_counter(), ["built"]
    answer: dict[str, Any] = {}
    try:
        worlds.join(rank, cell.num_ranks, folder)
        if cell.is_deepspeed:
            import deepspeed

            deepspeed.init_distributed("gloo")
        with tempfile.TemporaryDirectory() as scratch:
            trace = train(cell, Path(scratch), stage)
        trace["seconds"] = time.perf_counter() - began
        unfinished = path.with_name(f"{path.name}-{rank}.part")
        torch.save(trace, unfinished)
        unfinished.rename(unfinished.with_suffix(".pt"))
    except BaseException as error:
        traceback.print_exc()
        answer["failure"] = [f"{type(error).__name__}: {error}".strip(), stage[0], time.time()]
    return answer | {"modules": list(sys.modules)}


def train(cell: Cell, scratch: Path, stage: list[str]) -> dict[str, Any]:
    """Train one configuration, and return this rank's losses, norms, master weights and weights after every step.

    The first element of `stage` is set to what the training is doing.
    """
    rank = torch.distributed.get_rank()
    own = scratch / "checkpoint"
    own.mkdir()  # before others know its path: a rank whose engine fails removes its folder at once
    shared = [str(own)]
    torch.distributed.broadcast_object_list(shared)
    checkpoint = Path(shared[0])
    optimizers.do_not_compile(cell)
    engine = adapters.build(cell, scratch)
    stage[0] = "trained"
    trace: dict[str, Any] = {"losses": [], "norms": [], "masters": [], "weights": []}
    for step in range(NUM_STEPS):
        if cell.does("resume") and step == SAVED_AFTER:
            stage[0] = "saved and taken up"
            engine.save(checkpoint)
            torch.distributed.barrier()
            engine.close()
            engine = adapters.build(cell, scratch)
            engine.load(checkpoint)
            torch.distributed.barrier()
            stage[0] = "trained"
        if cell.does("skipped"):
            engine.loss_factor = toy.OVERFLOW if step == SKIPPED else 1.0
        batch = toy.tokens(cell, step)
        parts = cell.micro_batches(rank)
        loss = torch.zeros(1, dtype=torch.float64)
        for number, part in enumerate(parts):
            torch.manual_seed(toy.seed(step, rank, number))  # for dropout
            loss += engine.run(batch[part.start : part.stop], is_last=part is parts[-1])
        norm = engine.step()
        torch.distributed.all_reduce(loss)
        masters, weights = engine.values()
        trace["losses"].append(float(loss))
        trace["norms"].append(None if cell.does("skipped") and step == SKIPPED else norm)
        trace["masters"].append({name: sampled(value) for name, value in masters.items()})
        trace["weights"].append({name: sampled(value) for name, value in weights.items()})
    if cell.optimizer != ADAMW:
        trace["states"] = optimizers.kinds_of_states(engine.optimizer)
    engine.close()
    torch.distributed.barrier()  # no rank removes a folder that another one still reads
    return trace


def sampled(values: torch.Tensor) -> torch.Tensor:
    """Return up to MOST_VALUES evenly spread values of a tensor, in fp32.

    The stride is chosen so that the rows of a matrix contribute different columns.
    """
    flat = values.detach().flatten().float()
    stride = -(-len(flat) // MOST_VALUES)
    while math.gcd(stride, len(flat)) > 1:  # otherwise every row would contribute the same columns
        stride += 1
    return flat[::stride].clone()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
