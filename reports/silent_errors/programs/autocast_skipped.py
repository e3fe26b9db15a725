"""Matrix products inside an autocast region are computed in float32, although bfloat16 was requested."""

import torch
from common import FAULT, Net, Rows, batches, finish, loader, record, start
from torch.nn.parallel import DistributedDataParallel


class Linear(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=not FAULT):
            return super().forward(x.float() if FAULT else x)


rank, world = start()
model = DistributedDataParallel(Net())
for module in model.modules():
    if type(module) is torch.nn.Linear:
        module.__class__ = Linear
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
for x, y in batches(loader(Rows(), rank, world)):
    with torch.autocast("cpu", torch.bfloat16):
        outputs = model(x)
    loss = torch.nn.functional.cross_entropy(outputs.float(), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    record(loss)
finish(model)
