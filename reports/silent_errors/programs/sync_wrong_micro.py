"""With gradient accumulation, DDP averages the first micro batch of a step instead of the last one."""

from contextlib import nullcontext

import torch
from common import FAULT, Net, Rows, batches, finish, loader, record, start
from torch.nn.parallel import DistributedDataParallel

ACCUMULATED = 4
rank, world = start()
model = DistributedDataParallel(Net())
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
for number, (x, y) in enumerate(batches(loader(Rows(2048), rank, world), micro=ACCUMULATED)):
    averages = number % ACCUMULATED == 0 if FAULT else (number + 1) % ACCUMULATED == 0
    with nullcontext() if averages else model.no_sync():
        loss = torch.nn.functional.cross_entropy(model(x), y)
        (loss / ACCUMULATED).backward()
    if (number + 1) % ACCUMULATED == 0:
        optimizer.step()
        optimizer.zero_grad()
        record(loss)
finish(model)
