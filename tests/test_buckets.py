"""Are DDP's buckets measured? In a group of one process, which needs no other: by the allocator, not by a formula."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from study.records.schema import ModelStateBytes
from study.training.memory import BucketBytes, model_state_bytes

INPUTS = torch.ones(2, 64)


@pytest.fixture(autouse=True)
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def layers() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 64), torch.nn.Linear(64, 2))


def built(model: torch.nn.Module, **options: object) -> tuple[DistributedDataParallel, int | None]:
    """A module in DDP, and the bytes of buckets that were measured meanwhile."""
    with BucketBytes(torch.device("cpu")) as buckets:
        ddp = DistributedDataParallel(model, **options)
    return ddp, buckets.num_bytes


def held(ddp: DistributedDataParallel, bucket_bytes: int | None) -> tuple[ModelStateBytes, ModelStateBytes]:
    """What is held in the third step as the optimizer is about to step, and after it."""
    optimizer = torch.optim.AdamW(ddp.parameters())
    for _ in range(3):
        ddp(INPUTS).sum().backward()
        stepping = model_state_bytes(ddp, optimizer, None, bucket_bytes)
        optimizer.step()
        optimizer.zero_grad()
    return stepping, model_state_bytes(ddp, optimizer, None, bucket_bytes)


def size(model: torch.nn.Module) -> int:
    return sum(4 * p.numel() for p in model.parameters())


def test_buckets_are_held_beside_the_gradients():
    ddp, measured = built(layers())
    stepping, resting = held(ddp, measured)
    assert measured == size(ddp)
    assert (stepping.gradients, stepping.communication_buffers) == (size(ddp), size(ddp))
    assert (resting.gradients, resting.communication_buffers) == (0, size(ddp))
    assert sum(stepping.by_device.values()) == stepping.model_states + stepping.communication_buffers


def test_other_buckets_are_other_bytes():
    """A formula over all parameters, or of 4 bytes each, would not see these."""
    frozen = layers()
    frozen[1].weight.requires_grad = False
    assert built(frozen)[1] == size(frozen) - 4 * 64 * 256
    halves = layers().to(torch.bfloat16)
    assert built(halves)[1] == size(halves) / 2


@pytest.mark.parametrize("view", [False, True])
def test_buckets_that_are_arranged_anew_are_as_large(view):
    """DDP begins with one bucket, and after the first backward pass makes those that it keeps."""
    ddp, measured = built(layers(), bucket_cap_mb=0.05, gradient_as_bucket_view=view)
    numbers = set()
    for _ in range(3):
        ddp(INPUTS).sum().backward()
        buckets = [bucket.buffer().nbytes for bucket in ddp.reducer._get_zeros_like_grad_buckets()]
        assert sum(buckets) == measured
        numbers.add(len(buckets))
    assert len(numbers) == 2
