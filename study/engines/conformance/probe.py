"""Train cells one after the other as one rank of a launch, and write the result of each.

`python -m zero_study.engines.conformance.probe FOLDER` reads FOLDER/cells.json and writes, for its rank,
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

from .. import extensions
from . import adapters, toy
from .cells import NUM_STEPS, SAVED_AFTER, Cell

MOST_VALUES = 4096  # kept of a parameter, evenly spread: the disk would be all that a large model measures
COLLECTIVE_SECONDS = 60
CELL_SECONDS = 90


def main(folder: Path) -> None:
    """Train each cell in a process of its own, forked from one that has imported everything.

    Engines leave traces: where one process trained cell after cell, DeepSpeed 0.17.5 carried the wrong norms that its
    stages 1 and 2 have under autocast into engines that have right ones alone.
    """
    worker = rank = int(os.environ["RANK"])
    os.dup2(2, 1)  # the log, a file, has all that is said
    torch.set_num_threads(1)
    cells = {number: Cell(**fields) for number, fields in json.loads((folder / "cells.json").read_text())}
    if all(cell.num_ranks == 1 for cell in cells.values()):  # each process is a world of its own, with every other cell
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
    """Import and load once what every cell needs, before the first is forked. No thread may have been started."""
    if any(cell.is_deepspeed for cell in cells):
        import cpuinfo  # comes with DeepSpeed, which asks it for a second whenever it loads an extension

        cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
        extensions.use_built()
    if any("offload" in cell.engine for cell in cells):
        from deepspeed.ops.op_builder import CPUAdamBuilder

        CPUAdamBuilder().load()
    gc.freeze()


def _import_what_it_did(names: Path) -> None:
    """Import what the last cell imported while it trained, so that the next cell need not."""
    for name in names.read_text().splitlines() if names.exists() else ():
        if name not in sys.modules:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    gc.freeze()  # each engine collects garbage dozens of times, a third of a second each over what was imported


def _wait_for(child: int) -> str | None:
    """Return the name of the signal that ended a child, but for the one sent here when its time is up."""
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
    """Return the last line of the log after so many bytes, with a colon before it; empty: there is none."""
    lines = os.pread(2, os.fstat(2).st_size - offset, offset).decode(errors="replace").split("\n")
    return next((f": {line.strip()}" for line in reversed(lines) if line.strip()), "")


def _train_and_leave(folder: Path, number: int, cell: Cell, rank: int) -> NoReturn:
    """Train one cell and write what came of it: NUMBER-RANK.pt, or NUMBER-RANK.txt."""
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
    """Train one cell; return its losses, norms, masters and weights after every step, as this rank sees them."""
    rank = torch.distributed.get_rank()
    own = scratch / "checkpoint"
    own.mkdir()  # before others know of it: a rank whose engine is refused removes its folder at once
    shared = [str(own)]
    torch.distributed.broadcast_object_list(shared)
    checkpoint = Path(shared[0])
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
        trace["norms"].append(norm)
        trace["masters"].append({name: sampled(value) for name, value in masters.items()})
        trace["weights"].append({name: sampled(value) for name, value in weights.items()})
    engine.close()
    torch.distributed.barrier()  # nobody removes a folder that another still reads
    return trace


def sampled(values: torch.Tensor) -> torch.Tensor:
    """Up to MOST_VALUES values of a tensor, evenly spread, in fp32: of a matrix, some of each row and each column."""
    flat = values.detach().flatten().float()
    stride = -(-len(flat) // MOST_VALUES)
    while math.gcd(stride, len(flat)) > 1:  # or it would come upon the same columns in every row
        stride += 1
    return flat[::stride].clone()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
