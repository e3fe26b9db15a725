"""The order of samples: the same on one rank as on many, each example once per epoch."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from study.training.order import TrainingOrder


def dealt(order: TrainingOrder, micro_batch_size: int, world_size: int) -> list[list[int]]:
    """What each rank trains on, as accelerate deals batches out: one to each rank in turn."""
    batches = list(DataLoader(range(1000), micro_batch_size, sampler=order))
    return [[i for batch in batches[rank::world_size] for i in batch.tolist()] for rank in range(world_size)]


@pytest.mark.parametrize(("micro_batch_size", "world_size"), [(8, 1), (4, 1), (4, 2), (2, 2), (2, 4), (1, 8)])
def test_global_batches_do_not_depend_on_the_world_size(micro_batch_size, world_size):
    order = TrainingOrder(num_examples=50, global_batch_size=8, num_steps=9, seed=3)
    ranks = dealt(order, micro_batch_size, world_size)
    share = 8 // world_size
    for step in range(9):
        together = [i for rank in ranks for i in rank[step * share : (step + 1) * share]]
        assert sorted(together) == sorted(list(order)[step * 8 : (step + 1) * 8])


@pytest.mark.parametrize("num_examples", [48, 50])
def test_each_example_once_per_epoch(num_examples):
    """But those of an incomplete last batch; the last epoch may end early."""
    order = TrainingOrder(num_examples=num_examples, global_batch_size=8, num_steps=12, seed=0)
    whole = list(order)
    assert len(order) == len(whole) == 96
    for epoch in (whole[:48], whole[48:]):
        assert len(set(epoch)) == 48
        assert set(epoch) <= set(range(num_examples))
    assert whole[:48] != whole[48:]
    assert list(TrainingOrder(num_examples=num_examples, global_batch_size=8, num_steps=7, seed=0)) == whole[:56]


def test_only_its_own_seed_counts():
    orders = []
    for seed, other in ((0, 1), (0, 2), (1, 1)):
        torch.manual_seed(other)
        orders.append(list(TrainingOrder(num_examples=48, global_batch_size=8, num_steps=6, seed=seed)))
    assert orders[0] == orders[1] != orders[2]
