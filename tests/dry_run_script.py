"""A script with one fault that makes ranks wait for each other for ever, as its argument says; or `sound`."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from torch import nn

WHICH, WIDTH, STEPS = sys.argv[1], 512, 3  # so wide that stage 3 shards every layer


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.tower, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor, images: int = 1) -> torch.Tensor:
        hidden = self.first(x)
        return self.last(sum((self.tower(hidden) for _ in range(images)), hidden))  # type: ignore[no-any-return]


PartialState()  # as transformers' TrainingArguments make one
accelerator = Accelerator(cpu=False)
is_other = accelerator.process_index == 1
torch.manual_seed(0)
model = Net()
if WHICH == "frozen" and is_other:
    model.tower.requires_grad_(False)
if accelerator.state.deepspeed_plugin:
    accelerator.state.deepspeed_plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 2
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-6))
for step in range(STEPS - (WHICH == "uneven" and is_other)):
    if WHICH == "continued" and is_other and step == 1:
        continue
    images = {"skipped": 0, "twice": 2}.get(WHICH * is_other, 1)  # both as in QwenLM/Qwen3-VL#126
    loss = model(torch.ones(2, WIDTH), images).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
if WHICH == "unequal" and is_other:
    accelerator.gather(loss.detach())
if WHICH == "evaluated" and not is_other:
    with torch.no_grad():
        model(torch.ones(2, WIDTH))
if WHICH == "sound":  # what no two ranks do alike
    own, rank, world = torch.ones(1, 1), accelerator.process_index, accelerator.num_processes
    alone = [dist.new_group([one]) for one in range(world)][rank]
    part = nn.parallel.DistributedDataParallel(nn.Linear(1, 1), process_group=alone)
    for _ in range(1 + is_other):
        part(own).sum().backward()
    dist.gather(own, None if rank else [own] * world)
    (dist.recv if rank else dist.send)(own, 0 if rank else 1)
    sys.exit()
