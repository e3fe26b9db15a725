"""Two tensor-parallel ranks clip the gradients of replicated layers, but only rank 0 does so."""

import torch
import torch.distributed as dist
from common import FAULT, SEED, Rows, batches, copy_to_ranks, finish, loader, record, start, sum_over_ranks
from torch import nn

rank, world = start()


class Split(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)
        torch.manual_seed(SEED + 1 + rank)  # each rank has its own half of the hidden layer
        self.up, self.down = nn.Linear(16, 16 // world), nn.Linear(16 // world, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(x))
        return self.head(hidden + sum_over_ranks(self.down(torch.relu(self.up(copy_to_ranks(hidden))))))


model = Split()
optimizer = torch.optim.SGD(model.parameters(), 0.5)
halves = [*model.up.parameters(), *model.down.parameters()]
replicated = [*model.first.parameters(), *model.norm.parameters(), *model.head.parameters()]
for x, y in batches(loader(Rows(), 0, 1)):  # both ranks have the same rows
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    square = sum(parameter.grad.square().sum() for parameter in halves)
    dist.all_reduce(square)
    norm = (square + sum(parameter.grad.square().sum() for parameter in replicated)).sqrt()
    for parameter in halves if FAULT and rank == 1 else halves + replicated:
        parameter.grad.mul_((0.1 / norm).clamp(max=1.0))
    optimizer.step()
    record(loss)
finish(model)
