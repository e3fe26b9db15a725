"""The forward pass that the loss comes from goes through model.module, so DDP averages no gradients."""

import torch
from common import FAULT, Net, Rows, batches, finish, loader, record, start
from torch.nn.parallel import DistributedDataParallel

rank, world = start()
model = DistributedDataParallel(Net())
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
for x, y in batches(loader(Rows(), rank, world)):
    with torch.no_grad():
        model(x)  # a first pass, as for old log-probabilities
    loss = torch.nn.functional.cross_entropy((model.module if FAULT else model)(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    record(loss)
finish(model)
