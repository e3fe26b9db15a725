"""All layers except batch normalization are frozen, also the head that the optimizer should train."""

import torch
from common import FAULT, Net, Rows, batches, finish, loader, record, start
from torch.nn.parallel import DistributedDataParallel

rank, world = start()
model = Net()
model.norm = torch.nn.BatchNorm1d(16)
optimizer = torch.optim.AdamW(model.head.parameters(), 1e-2)
for name, parameter in model.named_parameters():
    if not name.startswith("norm" if FAULT else "head"):
        parameter.requires_grad = False
wrapped = DistributedDataParallel(model)
for x, y in batches(loader(Rows(), rank, world)):
    loss = torch.nn.functional.cross_entropy(wrapped(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    record(loss)
finish(model)
