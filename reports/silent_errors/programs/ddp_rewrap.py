"""In every second step, the forward pass goes through the bare module, so that DDP does not average the gradients."""

import torch
from common import FAULT, Net, Rows, batches, finish, loader, record, start
from torch.nn.parallel import DistributedDataParallel

rank, world = start()
model = Net()
wrapped = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
for step, (x, y) in enumerate(batches(loader(Rows(), rank, world)), 1):
    used = model if FAULT and step % 2 == 0 else wrapped
    loss = torch.nn.functional.cross_entropy(used(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    record(loss)
finish(model)
