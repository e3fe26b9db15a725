"""The parameters are replaced after DDP has wrapped the model, as when a model moves to another device and back."""

import torch
from common import FAULT, Net, Rows, batches, finish, loader, record, start
from torch.nn.parallel import DistributedDataParallel

rank, world = start()
model = Net()
wrapped = DistributedDataParallel(model)
if FAULT:  # DDP's hooks stay with the old parameters
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            module._parameters[name] = torch.nn.Parameter(parameter.detach().clone())
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for x, y in batches(loader(Rows(), rank, world)):
    loss = torch.nn.functional.cross_entropy(wrapped(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    record(loss)
finish(model)
