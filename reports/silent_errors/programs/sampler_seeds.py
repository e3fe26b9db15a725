"""Each rank shuffles with a seed of its own, so that ranks share some rows and leave others out."""

import torch
from common import FAULT, SEED, Net, Rows, batches, finish, record, start
from torch.nn.parallel import DistributedDataParallel

rank, world = start()
model = DistributedDataParallel(Net())
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
data = Rows(192)
seed = SEED + 7 * rank if FAULT else SEED
sampler = torch.utils.data.distributed.DistributedSampler(data, world, rank, seed=seed)
train_loader = torch.utils.data.DataLoader(data, 8, sampler=sampler)
for x, y in batches(train_loader):
    loss = torch.nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    record(loss)
finish(model)
