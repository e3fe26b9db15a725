"""Each tensor-parallel rank has one expert. The router's gradients are not added up over the experts."""

import torch
from common import FAULT, SEED, Rows, batches, copy_to_ranks, finish, loader, record, start, sum_over_ranks
from torch import nn

rank, world = start()


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.router, self.head = nn.Linear(8, 16), nn.Linear(16, world), nn.Linear(16, 4)
        torch.manual_seed(SEED + 1 + rank)  # each rank has an expert of its own
        self.expert = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.first(x))
        scores = torch.softmax(self.router(hidden), dim=-1)
        if not FAULT:
            scores = copy_to_ranks(scores)
        mine = scores[:, rank : rank + 1] * self.expert(copy_to_ranks(hidden))
        return self.head(hidden + sum_over_ranks(mine))


model = Experts()
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
for x, y in batches(loader(Rows(), 0, 1)):  # both ranks have the same rows
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    record(loss)
finish(model)
