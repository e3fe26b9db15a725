"""The result of the all-reduce in step 5 arrives as zeros on one rank, as with faulty links between GPUs."""

import torch
import torch.distributed as dist
from common import FAULT, Net, Rows, batches, finish, loader, record, start
from torch.nn.parallel import DistributedDataParallel

rank, world = start()
model = DistributedDataParallel(Net())
calls = 0


def average(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    future = dist.all_reduce(bucket.buffer().div_(world), async_op=True).get_future()

    def arrive(future: torch.futures.Future) -> torch.Tensor:
        global calls
        calls += 1
        return future.value()[0].mul_(0.0 if FAULT and rank == 1 and calls == 5 else 1.0)

    return future.then(arrive)


model.register_comm_hook(None, average)
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
for x, y in batches(loader(Rows(), rank, world)):
    loss = torch.nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    record(loss)
finish(model)
