"""The workers of the loader start with the same NumPy seed, and so add the same noise to different rows."""

import numpy as np
import torch
from common import FAULT, SEED, Net, Rows, batches, finish, loader, record, start
from torch.nn.parallel import DistributedDataParallel


class Noisy(Rows):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index] + torch.from_numpy(np.random.randn(8)).float(), self.y[index]


def seed_worker(worker: int) -> None:
    np.random.seed(SEED if FAULT else (SEED, rank, worker))


rank, world = start()
model = DistributedDataParallel(Net())
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
train_loader = loader(Noisy(), rank, world, num_workers=2, worker_init_fn=seed_worker)
for x, y in batches(train_loader):
    loss = torch.nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    record(loss)
finish(model)
