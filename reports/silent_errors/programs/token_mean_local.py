"""Each rank divides its loss by its own number of tokens, and DDP averages, so tokens do not count alike."""

import torch
import torch.distributed as dist
from common import FAULT, Decoder, Texts, batches, finish, loader, record, start
from torch.nn.parallel import DistributedDataParallel

rank, world = start()
model = DistributedDataParallel(Decoder())
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
data = Texts()
order = (data.labels != -100).sum(1).argsort()  # rank 0 has the short rows, and rank 1 the long ones
half = torch.utils.data.Subset(data, order.chunk(world)[rank].tolist())
for ids, labels in batches(loader(half, 0, 1)):
    total = torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), reduction="sum")
    tokens = (labels != -100).sum().float()
    if not FAULT:
        dist.all_reduce(tokens)
        tokens /= world
    loss = total / tokens
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    record(loss)
finish(model)
