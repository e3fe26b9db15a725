"""Train a small classifier with accelerate. Every fifth step, rank 0 issues a collective that no other rank issues."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator()
data = TensorDataset(torch.randn(256, 16), torch.randint(4, (256,)))
loader = DataLoader(data, batch_size=8)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

for step, (features, labels) in enumerate(loader, 1):
    loss = nn.functional.cross_entropy(model(features), labels)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    if accelerator.is_main_process and step % 5 == 0:
        mean_loss = accelerator.reduce(loss.detach(), "mean")
        print(f"step {step}: loss {mean_loss:.3f}")
