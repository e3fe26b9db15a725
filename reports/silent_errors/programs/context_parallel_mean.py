"""Two ranks have one half of each row. Each divides by the tokens of its own half instead of those of the whole row."""

import torch
import torch.distributed as dist
from common import FAULT, Texts, batches, finish, loader, record, start
from torch import nn
from torch.nn.parallel import DistributedDataParallel

rank, world = start()
model = DistributedDataParallel(nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32)))
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
for ids, labels in batches(loader(Texts(), 0, 1)):
    ids, labels = ids.chunk(world, dim=1)[rank], labels.chunk(world, dim=1)[rank]
    total = nn.functional.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), reduction="sum")
    tokens = (labels != -100).sum().float()
    if not FAULT:
        dist.all_reduce(tokens)
        tokens /= world
    loss = total / tokens.clamp(min=1)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    record(loss)
finish(model)
