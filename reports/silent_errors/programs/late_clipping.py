"""Gradients are clipped after the optimizer step, so clipping has no effect."""

import torch
from common import FAULT, Net, Rows, batches, finish, loader, record, start
from torch.nn.parallel import DistributedDataParallel

rank, world = start()
model = DistributedDataParallel(Net())
optimizer = torch.optim.SGD(model.parameters(), 0.5)
for x, y in batches(loader(Rows(), rank, world)):
    loss = torch.nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    if FAULT:
        optimizer.step()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    if not FAULT:
        optimizer.step()
    record(loss)
finish(model)
