"""The router's scores are gathered over expert-parallel ranks without gradients: only the auxiliary loss trains it."""

import torch
import torch.distributed as dist
from common import FAULT, SEED, Rows, batches, copy_to_ranks, finish, loader, record, start, sum_over_ranks
from torch import nn

rank, world = start()


def gather(x: torch.Tensor) -> torch.Tensor:
    """Return the rows of all ranks. Each rank gets the gradients of its own rows."""
    rows = [x if place == rank else torch.zeros_like(x) for place in range(world)]
    return copy_to_ranks(sum_over_ranks(torch.cat(rows)))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.router, self.head = nn.Linear(8, 16), nn.Linear(16, world), nn.Linear(16, 4)
        torch.manual_seed(SEED + 1 + rank)  # each rank has an expert of its own
        self.expert = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.relu(self.first(x))
        scores = torch.softmax(self.router(hidden), dim=-1)
        if FAULT:
            of_ranks = [torch.empty_like(scores) for _ in range(world)]
            dist.all_gather(of_ranks, scores.detach())
            gathered = torch.cat(of_ranks)
        else:
            gathered = gather(scores)
        outputs = gathered[:, rank : rank + 1] * self.expert(gather(hidden))
        mine = copy_to_ranks(sum_over_ranks(outputs)).chunk(world)[rank]
        return self.head(hidden + mine), world * scores.mean(0).square().sum()


model = Experts()
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
replicated = [*model.first.parameters(), *model.router.parameters(), *model.head.parameters()]
for x, y in batches(loader(Rows(), rank, world)):
    outputs, balance = model(x)
    loss = nn.functional.cross_entropy(outputs, y) + 0.01 * balance
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        if any(parameter is other for other in replicated):
            dist.all_reduce(parameter.grad)
        parameter.grad /= world
    optimizer.step()
    record(loss)
finish(model)
