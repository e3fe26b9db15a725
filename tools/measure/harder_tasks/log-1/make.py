"""Write train.log of a run that resumes with the weights of an earlier checkpoint: python make.py."""

import copy
from pathlib import Path

import torch
from torch import nn

OLD, SAVED, LAST = 400, 600, 800
torch.manual_seed(0)
teacher = torch.randn(512, 16) / 16**0.5
model = nn.Sequential(nn.Embedding(512, 48), nn.Linear(48, 96), nn.Tanh(), nn.Linear(96, 16))
optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 50, 1 - step / 2000))
lines = [
    "***** Running training *****",
    "  Num examples = 128,000",
    "  Num Epochs = 1",
    "  Instantaneous batch size per device = 8",
    "  Total train batch size (w. parallel, distributed & accumulation) = 64",
    "  Total optimization steps = 2,000",
]
weights, losses, norms = {}, [], []
for step in range(1, LAST + 1):
    if step == SAVED + 1:
        model.load_state_dict(weights[OLD])
        lines += [
            "^C",
            "KeyboardInterrupt",
            "$ accelerate launch train.py --resume_from_checkpoint out/checkpoint-600",
            "***** Running training *****",
            "  Num examples = 128,000",
            "  Num Epochs = 1",
            "  Instantaneous batch size per device = 8",
            "  Total train batch size (w. parallel, distributed & accumulation) = 64",
            "  Total optimization steps = 2,000",
            "  Continuing training from checkpoint, will skip to saved global_step",
            "  Continuing training from epoch 0",
            "  Continuing training from global step 600",
            "  Will skip the first 0 epochs then the first 600 batches in the first epoch.",
        ]
    rows = torch.randint(0, 512, (64,))
    loss = (model(rows) - teacher[rows] - 0.1 * torch.randn(64, 16)).pow(2).mean()
    loss.backward()
    norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
    losses.append(loss.item())
    rate = scheduler.get_last_lr()[0]
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    if step % 20 == 0:
        mean = sum(losses) / len(losses)
        lines.append(
            str(
                {
                    "loss": round(mean, 4),
                    "grad_norm": round(norms[-1], 4),
                    "learning_rate": float(f"{rate:.4e}"),
                    "epoch": round(step / 2000, 2),
                }
            )
        )
        losses, norms = [], []
    if step % 200 == 0:
        weights[step] = copy.deepcopy(model.state_dict())
        lines.append(f"Saving model checkpoint to out/checkpoint-{step}")
(Path(__file__).parent / "train.log").write_text("\n".join(lines) + "\n")
