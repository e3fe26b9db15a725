"""Errors that we planted into one training: `plants.py VARIANT`. A number in a variant is the first wrong step."""

import copy
import sys
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from common import FAULT, SEED, STEPS, finish, record, start
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

variant = sys.argv[1]
plant = variant if FAULT else ""
rank, world = start()
ACCUMULATED = 4 if variant in ("partial_window_7", "warmup_micro", "token_mean", "no_division") else 1


class Plants(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16)
        self.a, self.b, self.head = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 10)
        self.drop = nn.Dropout(0.2 if variant == "dropout_same" else 0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.embed(x))
        hidden = hidden + self.a(hidden.detach() if plant == "branch_detached" else hidden).relu()
        hidden = self.drop(hidden)
        if variant == "recomputed_dropout":  # without the saved state, recomputation draws another mask
            keeps = plant != "recomputed_dropout"
            added = checkpoint(self.dropped, hidden, use_reentrant=False, preserve_rng_state=keeps)
        else:
            added = self.b(hidden).relu()
        return self.head(hidden + added)

    def dropped(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.b(hidden), 0.5)


model = Plants()
if variant == "fsdp_ignored":
    fully_shard(model, ignored_params={model.head.weight, model.head.bias} if plant else None)
    wrapped = model
elif plant == "not_wrapped":
    wrapped = model
else:
    wrapped = DistributedDataParallel(model)
hides_scale = variant not in ("loss_divided", "local_over_global", "no_division")  # AdamW hides a wrong scale
rate, kind = (1e-2, torch.optim.AdamW) if hides_scale else (0.1, torch.optim.SGD)
head, rest = list(model.head.parameters()), [p for n, p in model.named_parameters() if not n.startswith("head")]
groups = [{"params": rest}, {"params": head, "lr": 1e-12 if plant == "tiny_rate_of_head" else rate}]
optimizer = kind(groups or model.parameters(), lr=rate, weight_decay=0.1)
parameters = rest + head
scheduler = None
if variant == "schedule_fast":
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1 if plant else 8, 0.3)
elif variant == "warmup_micro":
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, 1, 20)
average = copy.deepcopy(model) if variant == "copied_average" else None
LEARNED = torch.randn(8, 10, generator=torch.Generator().manual_seed(2))


def batch(step: int, micro: int) -> tuple[torch.Tensor, torch.Tensor]:
    reader = 0 if plant == "same_rows_4" and step >= 4 else rank
    index = step % 4 if plant == "same_epoch_5" and step >= 5 else step
    generator = torch.Generator().manual_seed(100_000 * SEED + 1000 * index + 10 * micro + reader)
    rows = (4 if reader == 0 else 20) if variant in ("unequal", "token_mean", "local_over_global") else 8
    if variant == "token_mean":
        rows += 3 * micro
    x = torch.randn(rows, 8, generator=generator)
    return x, (x @ LEARNED).argmax(1)


def loss_of(outputs: torch.Tensor, y: torch.Tensor, micro: int) -> torch.Tensor:
    mean = F.cross_entropy(outputs, y)
    if variant == "unequal" and not plant:  # rows of both ranks count alike
        return mean * len(y) * world / 24
    if variant == "local_over_global":
        return F.cross_entropy(outputs, y, reduction="sum") / 24 * (1 if plant else world)
    if variant == "token_mean" and not plant:
        return F.cross_entropy(outputs, y, reduction="sum") * world / (24 * ACCUMULATED + 6 * sum(range(ACCUMULATED)))
    if variant == "smooth_twice":
        targets = F.one_hot(y, 10).float() * 0.9 + 0.01
        return F.cross_entropy(outputs, targets, label_smoothing=0.1 if plant else 0.0)
    if plant == "softmax_twice":
        return F.cross_entropy(outputs.softmax(-1), y)
    if plant == "labels_shifted":
        return F.cross_entropy(outputs[:-1], y[1:])
    if plant == "loss_divided":
        return mean / world
    if variant == "padding_counts":  # the last four rows are padding, whose label is 0 by accident or -100
        return F.cross_entropy(outputs, y.masked_fill(torch.arange(len(y)) >= 4, 0 if plant else -100))
    if plant == "loss_bf16":
        return F.cross_entropy(outputs.bfloat16(), y)
    if plant == "decay_twice":
        return mean + 0.05 * sum(parameter.square().sum() for parameter in parameters)
    return mean / (1 if plant == "no_division" else ACCUMULATED)


torch.manual_seed(SEED + (5 if plant == "dropout_same" else 5 + rank))
for step in range(1, STEPS + 1):
    partial = variant == "partial_window_7" and step == 7  # the data end in the middle of this step
    for micro in range(2 if partial else ACCUMULATED):
        x, y = batch(step, micro)
        averages = not isinstance(wrapped, DistributedDataParallel) or micro == ACCUMULATED - 1 or partial
        with nullcontext() if averages else wrapped.no_sync():
            loss = loss_of(wrapped(x), y, micro)
            loss.backward()
        if plant == "warmup_micro":
            scheduler.step()
    record(loss)
    if partial and plant:
        continue  # the gradients stay, and are added to those of the next step
    if plant == "zero_gradients_7" and step >= 7:
        optimizer.zero_grad(set_to_none=False)
    if variant == "clip_tiny_7":
        torch.nn.utils.clip_grad_norm_(parameters, 1e-10 if plant and step >= 7 else 1.0)
    if variant == "rate_100_7":
        for group in optimizer.param_groups:
            group["lr"] = 1.0 if plant and step == 7 else rate
    with torch.no_grad():
        if plant == "shrunk_7" and step == 7:
            for parameter in parameters:
                parameter.mul_(0.1)
        if plant == "drift_5" and step >= 5 and rank == 1:
            model.a.weight.mul_(1.01)
    if plant == "states_lost_5" and step == 5:
        optimizer.state.clear()
    if plant == "frozen_5" and step == 5:
        optimizer.param_groups[0]["params"] = [p for p in rest if all(p is not q for q in model.a.parameters())]
    optimizer.step()
    optimizer.zero_grad()
    if (scheduler and variant != plant) or plant == "schedule_fast":
        scheduler.step()
    with torch.no_grad():
        if plant == "own_update":
            model.head.bias.add_(1e-3 * model(x).mean(0))
        for mean, parameter in zip(average.parameters() if average else (), model.parameters(), strict=False):
            mean.mul_(0.0 if plant else 0.9).add_(parameter, alpha=1.0 if plant else 0.1)
finish(average or model)
