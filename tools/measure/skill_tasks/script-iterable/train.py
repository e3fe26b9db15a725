import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    """Rows of a table, each process its own."""

    def __init__(self, features, targets, rank, world):
        self.features, self.targets, self.rank, self.world = features, targets, rank, world

    def __iter__(self):
        for row in range(self.rank, len(self.features), self.world):
            yield self.features[row], self.targets[row]


set_seed(0)
accelerator = Accelerator(cpu=True)
x = torch.randn(512, 16)
group = torch.arange(512) % 2  # two sources of data, interleaved
y = (x[:, :8].sum(1) + 2.0 * group).unsqueeze(1)
data = Stream(torch.cat([x, group.unsqueeze(1)], 1), y, accelerator.process_index, accelerator.num_processes)
loader = DataLoader(data, batch_size=8)
model = nn.Sequential(nn.Linear(17, 64), nn.Tanh(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in range(10):
    for features, targets in loader:
        loss = nn.functional.mse_loss(model(features), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.print(f"epoch {epoch} loss {accelerator.reduce(loss.detach(), reduction='mean').item():.4f}")
