"""The gradients are never set to zero, so that each step uses the sum of all gradients until then."""

import torch
from common import FAULT, Net, Rows, batches, finish, loader, record, start
from torch.nn.parallel import DistributedDataParallel

rank, world = start()
model = DistributedDataParallel(Net())
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
for x, y in batches(loader(Rows(), rank, world)):
    loss = torch.nn.functional.cross_entropy(model(x), y)
    if not FAULT:
        optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    record(loss)
finish(model)
