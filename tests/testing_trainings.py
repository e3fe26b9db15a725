"""Trainings for the tests of zero_study.testing: one that is right, and the same with planted faults."""

from __future__ import annotations

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset


def sound(steps: int = 4, fault: str = "", clip: float | None = None) -> None:
    """Train a small classifier with accelerate. `fault` names what is wrong with the training."""
    accelerator = Accelerator()
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(16 * steps, 8), torch.randint(3, (16 * steps,)))
    loader = DataLoader(data, batch_size=16 // accelerator.num_processes)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for step, (features, labels) in enumerate(loader):
        called = model.module if fault == "not averaged" else model
        loss = nn.functional.cross_entropy(called(features), labels)
        divides = fault == "divided twice" or (fault == "late" and step > 5)
        accelerator.backward(loss / accelerator.num_processes if divides else loss)
        if clip is not None:
            accelerator.clip_grad_norm_(model.parameters(), clip)
        if fault == "raises" and accelerator.num_processes > 1:
            raise RuntimeError("planted")
        optimizer.step()
        optimizer.zero_grad()
        if fault == "hangs" and accelerator.process_index == 1:
            dist.barrier()


def not_averaged() -> None:
    sound(fault="not averaged")


def divided_twice() -> None:
    sound(fault="divided twice")


def late() -> None:
    sound(steps=8, fault="late")


def hangs() -> None:
    sound(fault="hangs")


def raises() -> None:
    sound(fault="raises")


def two_steps() -> None:
    sound(steps=2)


def nothing() -> None:
    """Train nothing."""


def always_ddp() -> None:
    """Train with DDP, whatever the launcher requests."""
    torch.manual_seed(0)
    features, labels = torch.randn(4, 16, 8), torch.randint(3, (4, 16))
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rows = slice(dist.get_rank(), None, dist.get_world_size())
    for step in range(4):
        nn.functional.cross_entropy(model(features[step, rows]), labels[step, rows]).backward()
        optimizer.step()
        optimizer.zero_grad()


def by_name(strategy: str) -> None:
    """Train with what the parameter names, as a framework of its own would."""
    assert strategy in ("single", "ddp"), strategy
    always_ddp()
