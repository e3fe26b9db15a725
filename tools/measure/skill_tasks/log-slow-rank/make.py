"""torchrun --nproc-per-node 4 make.py: four gloo processes; rank 2 waits longer for its data. Writes train.log."""

import time
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist

STEPS = 12
LOADING = {2: 0.31}  # seconds; 0.06 on the other ranks
COMPUTING = {1: 0.46}  # seconds; 0.44 on the other ranks

dist.init_process_group("gloo")
rank = dist.get_rank()
gradients = torch.ones(1000)
dist.all_reduce(gradients)
lines = []
for step in range(1, STEPS + 1):
    marks = [time.perf_counter()]
    time.sleep(LOADING.get(rank, 0.06))
    marks.append(time.perf_counter())
    time.sleep(COMPUTING.get(rank, 0.44))
    marks.append(time.perf_counter())
    dist.all_reduce(gradients)
    marks.append(time.perf_counter())
    time.sleep(1.2 if rank == 0 and step == 6 else 0.03)  # rank 0 saves once
    marks.append(time.perf_counter())
    data, compute, reduce, update = (1000 * (b - a) for a, b in pairwise(marks))
    lines.append(
        f"[rank{rank}] step {step:3d} | data {data:6.0f} ms | fwd+bwd {compute:6.0f} ms | all_reduce {reduce:6.0f} ms"
        f" | optim {update:6.0f} ms | total {data + compute + reduce + update:6.0f} ms"
    )
gathered: list[list[str]] = [[] for _ in range(dist.get_world_size())]
dist.all_gather_object(gathered, lines)
if rank == 0:
    rows = [line for step in zip(*gathered, strict=True) for line in step]
    (Path(__file__).parent / "train.log").write_text("\n".join(rows) + "\n")
dist.destroy_process_group()
