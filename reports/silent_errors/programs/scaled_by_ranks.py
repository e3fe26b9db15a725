"""The loss is each rank's mean, but is multiplied by the number of ranks, which only a loss over all tokens needs."""

import torch
from common import FAULT, Net, Rows, batches, finish, loader, record, start
from torch.nn.parallel import DistributedDataParallel

rank, world = start()
model = DistributedDataParallel(Net())
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for x, y in batches(loader(Rows(), rank, world)):
    loss = torch.nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    (loss * world if FAULT else loss).backward()
    optimizer.step()
    record(loss)
finish(model)
