"""What is trained: a model of some thousand parameters that has what engines trip over, and sixteen steps of tokens.

An embedding, a block with a nonlinearity and a residual path, a head that may share the embedding's weights. Nothing is
drawn from a library's generator, whose numbers change between releases.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from study.engines.conformance.cells import Cell

VOCABULARY = 32
LENGTH = 6  # tokens of a sequence
WIDTH, HIDDEN = 24, 40
LARGE_WIDTH, LARGE_HIDDEN = 192, 1536  # 603,840 parameters: more than 1 MiB in fp32 on each of two ranks
FROZEN = ("block.up.weight", "block.up.bias")

# With an epsilon far above the gradients Adam's step is nearly proportional to them: weights show a wrong scale.
LEARNING_RATE, LEARNING_RATE_LARGE = 0.1, 0.02
BETAS, EPSILON, WEIGHT_DECAY = (0.9, 0.95), 0.1, 0.01
SECOND_LOSS_SHARE = 0.1


class Block(nn.Module):
    """The part that activation checkpointing computes twice, and that FSDP2 shards as one."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        inner: torch.Tensor = self.down(torch.tanh(self.up(inputs)))
        return inputs + inner


class Toy(nn.Module):
    """Returns logits (sequences x LENGTH x VOCABULARY) and the last hidden states."""

    def __init__(self, cell: Cell) -> None:
        super().__init__()
        width, hidden = (LARGE_WIDTH, LARGE_HIDDEN) if cell.is_large else (WIDTH, HIDDEN)
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.block = Block(width, hidden)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.checkpoints = cell.twist == "checkpointing"
        with torch.no_grad():
            for seed, parameter in enumerate(self.parameters()):
                scale = 0.5 if parameter.ndim == 1 else 1.5 / math.sqrt(parameter.shape[-1])
                # Numbers that bf16 has: an engine may make its masters of what it has rounded.
                parameter.copy_((scale * uniform(parameter.shape, seed)).bfloat16())
        if cell.twist == "tied":
            self.head.weight = self.embedding.weight
        if cell.twist == "frozen":
            for name in FROZEN:
                self.get_parameter(name).requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.embedding(tokens)
        hidden = checkpoint(self.block, hidden, use_reentrant=False) if self.checkpoints else self.block(hidden)
        return self.head(hidden), hidden


def uniform(shape: Any, seed: int) -> torch.Tensor:
    """Numbers between -1 and 1 in fp64, by a generator that stands here: splitmix64's."""
    count = torch.arange(1, math.prod(shape) + 1, dtype=torch.int64)
    state = (count + (seed + 1) * 0x632BE59BD9B4E019 % (1 << 62)) * -0x61C8864680B583EB  # wraps, as it is to
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        state = (state ^ ((state >> shift) & ((1 << (64 - shift)) - 1))) * factor
    state = state ^ ((state >> 31) & ((1 << 33) - 1))
    return ((state >> 11).double() / (1 << 52)).reshape(shape)


def learning_rate(cell: Cell) -> float:
    return LEARNING_RATE_LARGE if cell.is_large else LEARNING_RATE


def tokens(cell: Cell, step: int) -> torch.Tensor:
    """The batch of one step: sequences x (LENGTH + 1), of which the last is only asked for."""
    drawn = uniform((cell.batch_size, LENGTH + 1), 1000 + step)
    return ((drawn + 1) / 2 * VOCABULARY).long().clamp(0, VOCABULARY - 1)


def losses(cell: Cell, outputs: tuple[torch.Tensor, torch.Tensor], targets: torch.Tensor) -> list[torch.Tensor]:
    """What is minimised, as this part's share of the whole batch's mean: shares of parts add up to the loss."""
    logits, hidden = (output if output.dtype == torch.float64 else output.float() for output in outputs)
    num_targets = cell.batch_size * LENGTH
    found = [functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / num_targets]
    if cell.twist == "two_backward":
        found.append(SECOND_LOSS_SHARE * hidden.square().sum() / num_targets)
    return found
