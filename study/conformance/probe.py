"""Train cells, one after the other, and leave what came of each: one rank of a launch.

`python -m study.conformance.probe FOLDER` reads FOLDER/cells.json and writes, for its rank, FOLDER/NUMBER-RANK.pt of
each cell that trained and FOLDER/NUMBER-RANK.txt of each that did not. It judges nothing, so that any release of torch
and DeepSpeed can run it.
"""

from __future__ import annotations

import datetime
import functools
import gc
import json
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from study.conformance import engines, toy
from study.conformance.cells import NUM_STEPS, SAVED_AFTER, Cell

MOST_VALUES = 4096  # kept of a parameter, evenly spread: the disk would be all that a large model measures
COLLECTIVE_SECONDS = 60
CONTROL_SECONDS = 5


def main(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=COLLECTIVE_SECONDS))
    # Ranks of which one failed are at different collectives: the next cell wants a new launch.
    control = torch.distributed.new_group(backend="gloo", timeout=datetime.timedelta(seconds=CONTROL_SECONDS))
    asked = json.loads((folder / "cells.json").read_text())
    if any(written["engine"].startswith("zero") for _, written in asked):
        import cpuinfo  # comes with DeepSpeed, which asks it for a second whenever it loads an extension
        import deepspeed

        cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
        gc.freeze()  # each engine collects garbage dozens of times, a third of a second each over what was imported
        deepspeed.init_distributed("gloo")
    for number, written in asked:
        cell = Cell(**written)
        (folder / f"{number}-{rank}.begun").touch()
        began = time.perf_counter()
        stage = ["built"]
        try:
            with tempfile.TemporaryDirectory() as scratch:
                found = train(cell, Path(scratch), stage)
        except Exception as error:
            traceback.print_exc()
            lines = [f"{type(error).__name__}: {error}".strip(), stage[0]]
            (folder / f"{number}-{rank}.txt").write_text(json.dumps(lines))
            if not _all_failed(control):
                break
        else:
            found["seconds"] = time.perf_counter() - began
            scratch_file = folder / f"{number}-{rank}.part"
            torch.save(found, scratch_file)
            scratch_file.rename(folder / f"{number}-{rank}.pt")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # some releases hang in their own destructors


def _all_failed(control: Any) -> bool:
    try:
        torch.distributed.barrier(control)
    except RuntimeError:  # the time is over
        return False
    return True


def train(cell: Cell, scratch: Path, stage: list[str]) -> dict[str, Any]:
    """Train one cell; return its losses, norms, masters and weights after every step, as this rank sees them."""
    rank = torch.distributed.get_rank()
    shared = [str(scratch)]
    torch.distributed.broadcast_object_list(shared)
    checkpoint = Path(shared[0]) / "checkpoint"
    checkpoint.mkdir(exist_ok=True)
    engine = engines.build(cell, scratch)
    stage[0] = "trained"
    found: dict[str, Any] = {"losses": [], "norms": [], "masters": [], "weights": []}
    for step in range(NUM_STEPS):
        if cell.twist == "resume" and step == SAVED_AFTER:
            stage[0] = "saved and taken up"
            engine.save(checkpoint)
            torch.distributed.barrier()
            engine.close()
            engine = engines.build(cell, scratch)
            engine.load(checkpoint)
            torch.distributed.barrier()
            stage[0] = "trained"
        batch = toy.tokens(cell, step)
        parts = cell.micro_batches(rank)
        loss = torch.zeros(1, dtype=torch.float64)
        for part in parts:
            loss += engine.run(batch[part.start : part.stop], is_last=part is parts[-1])
        norm = engine.step()
        torch.distributed.all_reduce(loss)
        masters, weights = engine.values()
        found["losses"].append(float(loss))
        found["norms"].append(norm)
        found["masters"].append({name: sampled(value) for name, value in masters.items()})
        found["weights"].append({name: sampled(value) for name, value in weights.items()})
    engine.close()
    torch.distributed.barrier()  # nobody removes a folder that another still reads
    return found


def sampled(values: torch.Tensor) -> torch.Tensor:
    """Up to MOST_VALUES values of a tensor, evenly spread, in fp32."""
    flat = values.detach().flatten().float()
    return flat[:: -(-len(flat) // MOST_VALUES)].clone()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
