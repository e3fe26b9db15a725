"""Train cells one after the other as one rank of a launch, and write the result of each.

`python -m zero_study.conformance.probe FOLDER` reads FOLDER/cells.json and writes, for its rank,
FOLDER/NUMBER-RANK.pt of each cell that trained and FOLDER/NUMBER-RANK.txt of each that did not. It judges
nothing, so that any release of torch, DeepSpeed and accelerate can run it.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import gc
import importlib
import json
import math
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Collection
from pathlib import Path
from typing import Any, NoReturn

import torch

from ..engines import extensions
from . import adapters, optimizers, toy
from .cells import ADAMW, NUM_STEPS, SAVED_AFTER, SKIPPED, Cell

MOST_VALUES = 4096  # kept per parameter; with more, a large model would mostly wait for the disk
COLLECTIVE_SECONDS = 60
CELL_SECONDS = 90


def main(folder: Path) -> None:
    """Train each cell in a process of its own, forked from one that has imported everything.

    Engines leave global state behind. When one process trained one cell after the other, DeepSpeed 0.17.5 carried the
    wrong norms of its stages 1 and 2 under autocast over to engines whose norms are right on their own.
    """
    worker = rank = int(os.environ["RANK"])
    os.dup2(2, 1)  # stdout and stderr go to the same log file
    torch.set_num_threads(1)
    cells = {number: Cell(**fields) for number, fields in json.loads((folder / "cells.json").read_text())}
    if all(cell.num_ranks == 1 for cell in cells.values()):  # the processes share the cells, each as a world of its own
        cells, rank = dict(list(cells.items())[worker :: int(os.environ["WORLD_SIZE"])]), 0
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    _import_engines(cells.values())
    for number, cell in cells.items():
        log_size = os.fstat(2).st_size
        child = os.fork()
        if not child:
            _train_and_leave(folder, number, cell, rank)
        if name := _wait_for(child):
            _leave_failure(folder, number, rank, f"rank {rank} was ended by {name}{_last_line(log_size)}", "ended")
        _import_what_it_did(folder / f"{os.getpid()}.modules")


def _import_engines(cells: Collection[Cell]) -> None:
    """Import and load what the cells need, before the first fork. No thread may have been started yet."""
    if any(cell.is_deepspeed for cell in cells):
        import cpuinfo  # DeepSpeed calls it whenever it loads an extension, which takes a second

        cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
        extensions.use_built()
    for name in {name for cell in cells for name in cell.extensions if name != "async_io"}:
        extension = extensions.EXTENSIONS[name]
        getattr(importlib.import_module(extension.module), extension.builder)().load()
    gc.freeze()


def _import_what_it_did(names: Path) -> None:
    """Import the modules that the last cell imported while it trained, so that the next cell need not."""
    for name in names.read_text().splitlines() if names.exists() else ():
        if name not in sys.modules:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    gc.freeze()  # without this, each of an engine's dozens of garbage collections takes a third of a second


def _wait_for(child: int) -> str | None:
    """Wait for a child process, and return the name of the signal that ended it.

    None if it exited by itself, or if it was killed here after CELL_SECONDS.
    """
    deadline = time.monotonic() + CELL_SECONDS
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else None
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return None
        time.sleep(0.005)


def _leave_failure(folder: Path, number: int, rank: int, message: str, stage: str) -> None:
    (folder / f"{number}-{rank}.txt").write_text(json.dumps([message, stage, time.time()]))


def _last_line(offset: int) -> str:
    """Return the last line of the log behind `offset` bytes, with a colon in front; empty if there is none."""
    lines = os.pread(2, os.fstat(2).st_size - offset, offset).decode(errors="replace").split("\n")
    return next((f": {line.strip()}" for line in reversed(lines) if line.strip()), "")


def _train_and_leave(folder: Path, number: int, cell: Cell, rank: int) -> NoReturn:
    """Train one cell, write its trace (NUMBER-RANK.pt) or its error (NUMBER-RANK.txt), and exit."""
    began, stage = time.perf_counter(), ["built"]
    try:
        torch.distributed.init_process_group(
            "gloo",
            init_method=f"file://{folder / str(number)}.store",
            rank=rank,
            world_size=cell.num_ranks,
            timeout=datetime.timedelta(seconds=COLLECTIVE_SECONDS),
        )
        if cell.is_deepspeed:
            import deepspeed

            deepspeed.init_distributed("gloo")
        with tempfile.TemporaryDirectory() as scratch:
            trace = train(cell, Path(scratch), stage)
        trace["seconds"] = time.perf_counter() - began
        unfinished = folder / f"{number}-{rank}.part"
        torch.save(trace, unfinished)
        unfinished.rename(folder / f"{number}-{rank}.pt")
    except BaseException as error:
        traceback.print_exc()
        _leave_failure(folder, number, rank, f"{type(error).__name__}: {error}".strip(), stage[0])
    (folder / f"{os.getppid()}.modules").write_text("\n".join(list(sys.modules)))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # some releases hang in their own destructors


def train(cell: Cell, scratch: Path, stage: list[str]) -> dict[str, Any]:
    """Train one cell, and return this rank's losses, norms, masters and weights after every step.

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
