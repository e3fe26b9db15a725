"""The optimizer is made before FSDP2 replaces the parameters, and so updates parameters that are no longer used."""

import torch
from common import FAULT, Net, Rows, batches, finish, loader, record, start
from torch.distributed.fsdp import fully_shard

rank, world = start()
model = Net()
parameters = list(model.parameters())
fully_shard(model)
optimizer = torch.optim.AdamW(parameters if FAULT else model.parameters(), 1e-2)
for x, y in batches(loader(Rows(), rank, world)):
    loss = torch.nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    record(loss)
finish(model)
