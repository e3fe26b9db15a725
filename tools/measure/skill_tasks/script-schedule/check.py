"""Train as train.py does on two processes, and with a schedule of the right length; print rates and losses.

torchrun --nproc-per-node 2 check.py
"""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import get_linear_schedule_with_warmup

EPOCHS = 4
for repaired in (False, True):
    set_seed(0)
    accelerator = Accelerator(cpu=True)
    x = torch.randn(640, 16)
    y = torch.tanh(x @ torch.randn(16, 8)) @ torch.randn(8, 1)
    loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    total = EPOCHS * len(loader) * (accelerator.num_processes if repaired else 1)
    scheduler = accelerator.prepare(get_linear_schedule_with_warmup(optimizer, int(0.1 * total), total))
    rates = []
    for _ in range(EPOCHS):
        for features, targets in loader:
            accelerator.backward(nn.functional.mse_loss(model(features), targets))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            rates.append(optimizer.param_groups[0]["lr"])
    with torch.no_grad():
        final = nn.functional.mse_loss(model(x), y).item()
    zero = next(step for step, rate in enumerate(rates, 1) if rate == 0)
    accelerator.print(
        "repaired:" if repaired else "train.py:",
        f"{len(rates)} optimizer steps, rate is 0 from step {zero}, largest {max(rates):.2e}, final loss {final:.4f}",
    )
