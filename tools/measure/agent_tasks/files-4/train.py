"""Train for 1,000 updates: warm up for 100 of them, then follow a cosine to zero."""

import torch
from accelerate import Accelerator
from data import build_loader, build_model
from transformers import get_scheduler

accelerator = Accelerator()
model = build_model()
loader = build_loader(batch_size=8)  # 16,000 sequences
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)
scheduler = get_scheduler("cosine", optimizer, num_warmup_steps=100, num_training_steps=1000)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
for batch in loader:
    loss = model(**batch).loss
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
