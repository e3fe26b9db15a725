"""A script whose ranks decide by what they hear from each other, as its argument says; or which wait for each other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.file_baton import FileBaton

WHICH, WIDTH = sys.argv[1], 8

dist.init_process_group("gloo")
rank = dist.get_rank()
if WHICH == "prepares":  # before any call
    time.sleep(3)
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(WIDTH, WIDTH))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
batches = [torch.full((2, WIDTH), float(rank + 1))] * (3 + (WHICH == "joins") * rank)


def step(batch: torch.Tensor) -> None:
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


if WHICH == "joins":  # uneven batches
    with Join([model]):
        for batch in batches:
            step(batch)
elif WHICH == "decides":  # early stopping, by one rank's loss
    for batch in batches:
        step(batch)
        has_enough = torch.tensor([float(rank == 1)])
        dist.all_reduce(has_enough, dist.ReduceOp.MAX)
        if has_enough.item():
            break
    else:
        raise RuntimeError("nobody has had enough")
elif WHICH == "decides alone":
    for batch in batches:
        step(batch)
        if rank == 1:
            break
elif WHICH == "receives":  # both wait for what neither sends
    dist.recv(torch.ones(1), 1 - rank)
elif WHICH == "raises":
    step(batches[0])
    if rank == 1:
        raise ValueError("no such file")
    step(batches[0])
elif WHICH == "sleeps":
    time.sleep(3 * rank)
    step(batches[0])
elif WHICH == "sends":
    sent = [{"lr": 0.1}] if rank == 0 else [None]
    dist.broadcast_object_list(sent)
    assert sent == [{"lr": 0.1}]
elif WHICH == "compiles":  # in a child
    subprocess.run(["timeout", "5", "sh", "-c", "while :; do :; done"] if rank == 0 else ["true"])
    step(batches[0])
elif WHICH == "builds":  # for ever: an extension, as torch does
    folder = Path(os.environ["TORCH_EXTENSIONS_DIR"], "made_up")
    folder.mkdir(parents=True, exist_ok=True)
    if rank == 0:
        assert FileBaton(str(folder / "lock")).try_acquire()
        subprocess.run(["sh", "-c", "sleep 98765; true"])  # as ninja starts the compiler
    while rank == 1:
        time.sleep(0.1)
elif WHICH == "other sizes":  # gloo ends the process by a signal
    dist.all_gather([torch.ones(4 + rank) for _ in range(2)], torch.ones(4 + rank))
elif WHICH == "is killed":
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    step(batches[0])
elif WHICH == "leaves":  # as some scripts end
    step(batches[0])
    os._exit(0)
