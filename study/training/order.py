"""In which order are examples trained on? The same on one rank as on many."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler


class TrainingOrder(Sampler[int]):
    """The indices of a whole run: one seeded permutation per epoch, its incomplete last global batch left out.

    It covers all epochs at once, so that consecutive micro batches, dealt to the ranks in turn, make up exactly the
    global batches, whatever the world size and the accumulation. It begins after the steps that are done.
    """

    def __init__(
        self, num_examples: int, global_batch_size: int, num_steps: int, seed: int, steps_done: int = 0
    ) -> None:
        per_epoch = num_examples // global_batch_size * global_batch_size
        generator = torch.Generator().manual_seed(seed)
        order: list[int] = []
        while len(order) < num_steps * global_batch_size:
            order += torch.randperm(num_examples, generator=generator)[:per_epoch].tolist()
        self._order = order[steps_done * global_batch_size : num_steps * global_batch_size]

    def __iter__(self) -> Iterator[int]:
        return iter(self._order)

    def __len__(self) -> int:
        return len(self._order)
