"""Train as train.py does on two processes, and without its own sharding; count the rows and compare the groups' errors.

torchrun --nproc-per-node 2 check.py
"""

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, set_seed
from torch import nn
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    def __init__(self, features, targets, rank, world):
        self.features, self.targets, self.rank, self.world = features, targets, rank, world

    def __iter__(self):
        for row in range(self.rank, len(self.features), self.world):
            yield self.features[row], self.targets[row], row


for repaired in (False, True):
    set_seed(0)
    accelerator = Accelerator(cpu=True)
    x = torch.randn(512, 16)
    group = torch.arange(512) % 2
    y = (x[:, :8].sum(1) + 2.0 * group).unsqueeze(1)
    features_of_all = torch.cat([x, group.unsqueeze(1)], 1)
    place = (0, 1) if repaired else (accelerator.process_index, accelerator.num_processes)
    loader = DataLoader(Stream(features_of_all, y, *place), batch_size=8)
    model = nn.Sequential(nn.Linear(17, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    rows, steps = [], 0
    for epoch in range(10):
        for features, targets, row in loader:
            rows += row.tolist() if epoch == 0 else []
            accelerator.backward(nn.functional.mse_loss(model(features), targets))
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
    used = gather_object(rows)
    with torch.no_grad():
        errors = [nn.functional.mse_loss(model(features_of_all[group == g]), y[group == g]).item() for g in (0, 1)]
    accelerator.print(
        "repaired:" if repaired else "train.py:",
        f"{type(loader).__name__}, {steps // 10} steps per epoch, {len(set(used))} different rows of {len(used)} used,",
        f"odd rows {sum(r % 2 for r in set(used))}, loss on even rows {errors[0]:.4f}, on odd rows {errors[1]:.4f}",
    )
