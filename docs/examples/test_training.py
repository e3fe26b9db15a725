"""Test that a training with accelerate trains under each engine as one process does, and that no rank waits forever."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from zero_study.testing import assert_never_hangs, assert_same_training


def train():
    accelerator = Accelerator()
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, 16), torch.randint(4, (64,)))
    loader = DataLoader(data, batch_size=16 // accelerator.num_processes)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    for features, labels in loader:
        loss = nn.functional.cross_entropy(model(features), labels)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


def test_trains_as_one_process():
    assert_same_training(train, ranks=2, strategies=["ddp", "zero2", "zero3", "fsdp2"])


def test_never_hangs():
    assert_never_hangs(train, ranks=8)
