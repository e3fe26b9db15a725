"""torchrun --nproc-per-node 2 make.py: train on two processes, save twice, keep one file of the earlier save."""

import shutil
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import get_linear_schedule_with_warmup

FOLDER = Path(__file__).parent
set_seed(0)
accelerator = Accelerator(cpu=True)
x = torch.randn(1280, 16)
y = torch.tanh(x @ torch.randn(16, 8)) @ torch.randn(8, 1)
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = get_linear_schedule_with_warmup(optimizer, 16, 480)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
for step, (features, targets) in enumerate(loader, 1):
    with accelerator.accumulate(model):
        accelerator.backward(nn.functional.mse_loss(model(features), targets))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    if step in (40, 60):
        accelerator.save_state(str(FOLDER / f"step_{step}"))
    if step == 60:
        break
accelerator.wait_for_everyone()
if accelerator.is_main_process:
    shutil.copy(FOLDER / "step_40" / "optimizer.bin", FOLDER / "step_60" / "optimizer.bin")
    shutil.rmtree(FOLDER / "checkpoint", ignore_errors=True)
    (FOLDER / "step_60").rename(FOLDER / "checkpoint")
    shutil.rmtree(FOLDER / "step_40")
accelerator.end_training()
