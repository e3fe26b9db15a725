import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import get_linear_schedule_with_warmup

EPOCHS = 4
set_seed(0)
accelerator = Accelerator(cpu=True)
x = torch.randn(640, 16)
y = torch.tanh(x @ torch.randn(16, 8)) @ torch.randn(8, 1)
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
total = EPOCHS * len(loader)
scheduler = accelerator.prepare(get_linear_schedule_with_warmup(optimizer, int(0.1 * total), total))
for epoch in range(EPOCHS):
    for features, targets in loader:
        loss = nn.functional.mse_loss(model(features), targets)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    mean = accelerator.reduce(loss.detach(), reduction="mean").item()
    accelerator.print(f"epoch {epoch} loss {mean:.4f}")
