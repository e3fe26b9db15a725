"""Each rank averages before the gather, so that a row which pads the last batch counts twice in the evaluation."""

import torch
import torch.distributed as dist
from common import FAULT, Net, Rows, batches, finish, loader, record, record_evaluation, start
from torch.nn.parallel import DistributedDataParallel

rank, world = start()
model = DistributedDataParallel(Net())
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
held_out = Rows(9)  # one row less than two ranks with five rows each
eval_loader = torch.utils.data.DataLoader(
    held_out, 5, sampler=torch.utils.data.distributed.DistributedSampler(held_out, world, rank, shuffle=False)
)
for step, (x, y) in enumerate(batches(loader(Rows(), rank, world)), 1):
    loss = torch.nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    record(loss)
    if step % 8 == 0:
        model.eval()
        with torch.no_grad():
            for x, y in eval_loader:
                losses = torch.nn.functional.cross_entropy(model(x), y, reduction="none")
        values = losses.mean(0, keepdim=True) if FAULT else losses
        of_ranks = [torch.empty_like(values) for _ in range(world)]
        dist.all_gather(of_ranks, values)
        gathered = torch.stack(of_ranks, dim=1).flatten()  # in the order of the rows
        record_evaluation(gathered[: len(held_out)].mean())
        model.train()
finish(model)
