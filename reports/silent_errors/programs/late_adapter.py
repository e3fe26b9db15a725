"""An adapter is added after FSDP2 has sharded the model. Nothing makes its weights equal or averages its gradients."""

import torch
import torch.distributed as dist
from common import FAULT, Net, Rows, batches, finish, loader, record, start
from torch import nn
from torch.distributed.fsdp import fully_shard


class Adapted(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(16, 4, bias=False), nn.Linear(4, 4, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


rank, world = start(seed_of_rank=True)
model = Net()
for parameter in model.parameters():
    dist.broadcast(parameter.data, 0)
    parameter.requires_grad_(False)
fully_shard(model.head)
fully_shard(model)
model.head = Adapted(model.head)
adapter = [model.head.down.weight, model.head.up.weight]
if not FAULT:
    for parameter in adapter:
        dist.broadcast(parameter.data, 0)
optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], 1e-2)
for x, y in batches(loader(Rows(), rank, world)):
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    for parameter in [] if FAULT else adapter:
        dist.all_reduce(parameter.grad)
        parameter.grad /= world
    optimizer.step()
    record(loss)
finish(model)
