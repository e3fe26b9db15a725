"""The model, the data and the loop that the programs share.

FAULT=1 makes a program wrong, and FAULT=0 (the default) makes it right. STEPS is the number of optimizer steps. SEED is
the seed of the weights and of the data order. If LOSSES or WEIGHTS is a path, a program writes its losses or final
weights there. ANOMALY=1 turns on torch.autograd.set_detect_anomaly.
"""

import json
import os
import random
import time

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

FAULT = os.environ.get("FAULT") == "1"
SEED = int(os.environ.get("SEED", "0"))
STEPS = int(os.environ.get("STEPS", "24"))
LOSSES: list[float] = []
EVALUATIONS: list[float] = []


def start(seed_of_rank: bool = False) -> tuple[int, int]:
    """Start the process group, set the seeds, and return the rank and the number of ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    seed = SEED + (1000 * dist.get_rank() if seed_of_rank else 0)
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    torch.autograd.set_detect_anomaly(os.environ.get("ANOMALY") == "1")
    return dist.get_rank(), dist.get_world_size()


class Net(nn.Module):
    """A classifier of vectors with eight elements."""

    def __init__(self, width: int = 16, classes: int = 4) -> None:
        super().__init__()
        self.fc1 = nn.Linear(8, width)
        self.norm = nn.LayerNorm(width)
        self.fc2 = nn.Linear(width, width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(torch.relu(self.fc1(x)))
        return self.head(hidden + torch.relu(self.fc2(hidden)))


class Rows(torch.utils.data.Dataset):
    """Vectors whose class follows from the signs of two elements."""

    def __init__(self, rows: int = 1024) -> None:
        self.x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(1))
        self.y = (self.x[:, 0] > 0).long() + 2 * (self.x[:, 1] > 0).long()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], self.y[index]


class Decoder(nn.Module):
    """A language model of one layer over 32 tokens."""

    def __init__(self, width: int = 16, length: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, width)
        self.positions = nn.Embedding(length, width)
        self.norm1, self.norm2, self.norm = nn.LayerNorm(width), nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.head = nn.Linear(width, 32, bias=False)

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor | None = None, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        places = torch.arange(ids.shape[1]) if positions is None else positions
        x = self.embed(ids) + self.positions(places)
        query, key, value = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        attended = nn.functional.scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None)
        x = x + self.out(attended)
        return self.head(self.norm(x + self.down(torch.relu(self.up(self.norm2(x))))))


class Texts(torch.utils.data.Dataset):
    """Rows of tokens in which a token mostly follows from the one before. Labels after a row's end are -100."""

    def __init__(self, rows: int = 1024, length: int = 16) -> None:
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(0, 32, (rows, length + 1), generator=generator)
        for place in range(length):
            follows = torch.rand(rows, generator=generator) < 0.9
            ids[:, place + 1] = torch.where(follows, (3 * ids[:, place] + 1) % 32, ids[:, place + 1])
        lengths = torch.randint(2, length + 1, (rows, 1), generator=generator)
        self.ids = ids[:, :-1]
        self.labels = ids[:, 1:].masked_fill(torch.arange(length) >= lengths, -100)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.ids[index], self.labels[index]


def loader(
    data: torch.utils.data.Dataset, rank: int, world: int, batch: int = 8, **options
) -> torch.utils.data.DataLoader:
    """Return a loader that gives each rank rows of its own."""
    sampler = torch.utils.data.distributed.DistributedSampler(data, world, rank, seed=SEED)
    return torch.utils.data.DataLoader(data, batch, sampler=sampler, **options)


def batches(train_loader: torch.utils.data.DataLoader, micro: int = 1):
    """Yield the batches of all steps, with `micro` batches per step."""
    number, epoch = 0, 0
    while True:
        if hasattr(train_loader.sampler, "set_epoch"):
            train_loader.sampler.set_epoch(epoch)
        for batch in train_loader:
            yield batch
            number += 1
            if number == STEPS * micro:
                return
        epoch += 1


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def copy_to_ranks(x: torch.Tensor) -> torch.Tensor:
    """Return the same values. In the backward pass, the gradients of all ranks are added up."""
    return _Copy.apply(x)


def sum_over_ranks(x: torch.Tensor) -> torch.Tensor:
    """Return the sum over all ranks. In the backward pass, each rank gets the whole gradient."""
    return _Sum.apply(x)


def record(loss: torch.Tensor) -> None:
    """Keep the loss of a step for the file of LOSSES."""
    LOSSES.append(float(loss.detach()))


def record_evaluation(value: torch.Tensor | float) -> None:
    """Keep the result of an evaluation for the file of LOSSES."""
    EVALUATIONS.append(float(value))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


def finish(model: nn.Module) -> None:
    """Write the files that were asked for, and end the process group."""
    if path := os.environ.get("WEIGHTS"):
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        torch.save({name: whole(tensor).float() for name, tensor in tensors.items()}, f"{path}.{dist.get_rank()}")
    if path := os.environ.get("LOSSES"):
        values = torch.tensor([LOSSES + EVALUATIONS], dtype=torch.float64)
        dist.all_reduce(values)
        values = (values[0] / dist.get_world_size()).tolist()
        if dist.get_rank() == 0:
            curves = {"losses": values[: len(LOSSES)], "evaluations": values[len(LOSSES) :]}
            with open(path, "w", encoding="utf-8") as file:
                json.dump(curves, file)
    dist.barrier()
    time.sleep(0.2)  # without a pause, gloo sometimes aborts when the process ends
    dist.destroy_process_group()
