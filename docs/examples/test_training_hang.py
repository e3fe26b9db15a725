"""The training of test_training.py with a mistake: only rank 0 calls a collective. The test fails."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from zero_study.testing import assert_never_hangs


def train():
    accelerator = Accelerator()
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, 16), torch.randint(4, (64,)))
    loader = DataLoader(data, batch_size=16 // accelerator.num_processes)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    for step, (features, labels) in enumerate(loader, 1):
        loss = nn.functional.cross_entropy(model(features), labels)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if accelerator.is_main_process and step % 2 == 0:
            print(f"loss {accelerator.reduce(loss.detach(), 'mean'):.3f}")


def test_never_hangs():
    assert_never_hangs(train, ranks=8)
