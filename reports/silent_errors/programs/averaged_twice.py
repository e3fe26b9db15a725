"""The loss is already divided by the tokens of all ranks, and DDP divides by the number of ranks once more."""

import torch
import torch.distributed as dist
from common import FAULT, Decoder, Texts, batches, finish, loader, record, start
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

rank, world = start()
model = DistributedDataParallel(Decoder())


def add_up(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    bucket.buffer().mul_(world)  # the hook divides by the number of ranks
    return allreduce_hook(dist.group.WORLD, bucket)


if not FAULT:
    model.register_comm_hook(None, add_up)
optimizer = torch.optim.SGD(model.parameters(), 0.5)
for ids, labels in batches(loader(Texts(), rank, world)):
    total = torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), reduction="sum")
    tokens = (labels != -100).sum()
    dist.all_reduce(tokens)
    loss = total / tokens
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    record(loss * world)
finish(model)
