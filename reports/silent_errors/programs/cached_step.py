"""A step without gradients leaves a stale decision behind, so that no later step updates the weights."""

import torch
from common import FAULT, Net, Rows, batches, finish, loader, record, start
from torch.nn.parallel import DistributedDataParallel

rank, world = start()
model = DistributedDataParallel(Net())
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)


class Compiled:
    """A step function that decides only when it is compiled again whether there is anything to update."""

    def __init__(self) -> None:
        self.updates = True

    def __call__(self) -> None:
        has_gradients = any(parameter.grad is not None for parameter in model.parameters())
        self.updates = has_gradients and (self.updates or not FAULT)
        if self.updates:
            optimizer.step()


compiled = Compiled()
for step, (x, y) in enumerate(batches(loader(Rows(), rank, world)), 1):
    loss = torch.nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    if step == 5:  # this batch is left out on purpose
        optimizer.zero_grad(set_to_none=True)
    compiled()
    record(loss)
finish(model)
