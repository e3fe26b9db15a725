"""Train a small classifier on every process that torchrun starts, with 16 rows per optimizer step in all."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(256, 16), torch.randint(4, (256,)))
batch_size = 16 // dist.get_world_size()
loader = DataLoader(data, batch_size=batch_size, sampler=DistributedSampler(data))
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for features, labels in loader:
    logits = model(features)
    loss = nn.functional.cross_entropy(logits, labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
