"""Start with the file of the task in one CPU process, and count the micro batches between two optimizer steps.

accelerate launch --config_file accelerate.yaml --num_processes 1 --mixed_precision no check.py
"""

import os
import sys

os.environ.setdefault("DS_ACCELERATOR", "cpu")
import deepspeed.comm.torch  # noqa: F401
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

# The attribute deepspeed.comm.torch is torch itself, so the module is taken by its name.
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # gloo alone is enough, so nothing has to be compiled

accelerator = Accelerator(gradient_accumulation_steps=2)
loader = DataLoader(TensorDataset(torch.randn(256, 8)), batch_size=4, drop_last=True)
model = nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
steps = []
for micro_batch, (x,) in enumerate(loader):
    before = [p.detach().clone() for p in model.parameters()]
    with accelerator.accumulate(model):
        accelerator.backward(model(x).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
    if any((p - b).abs().max() > 0 for p, b in zip(model.parameters(), before, strict=True)):
        steps.append(micro_batch + 1)
accelerator.print(
    "processes",
    accelerator.num_processes,
    "accelerator",
    accelerator.gradient_accumulation_steps,
    "engine",
    model.gradient_accumulation_steps(),
    "weights move after micro batches",
    steps,
)
