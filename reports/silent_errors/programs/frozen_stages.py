"""A setting freezes the first layer when train() is called, but the script never calls train()."""

import torch
from common import FAULT, Net, Rows, batches, finish, loader, record, start
from torch.nn.parallel import DistributedDataParallel


class Staged(Net):
    def __init__(self, frozen_stages: int) -> None:
        super().__init__()
        self.frozen_stages = frozen_stages

    def train(self, mode: bool = True) -> "Staged":
        for stage in (self.fc1, self.norm)[: self.frozen_stages]:
            stage.requires_grad_(False)
        return super().train(mode)


rank, world = start()
model = Staged(frozen_stages=1)
if not FAULT:
    model.train()
wrapped = DistributedDataParallel(model)
optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], 1e-2)
for x, y in batches(loader(Rows(), rank, world)):
    loss = torch.nn.functional.cross_entropy(wrapped(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    record(loss)
finish(model)
