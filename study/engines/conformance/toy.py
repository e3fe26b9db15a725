"""The toy: a model of some thousand parameters with structures that engines have failed on, and its batches.

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

from .cells import NEWER_TWISTS, Cell

VOCABULARY = 32
LENGTH = 6  # tokens of a sequence
WIDTH, HIDDEN = 24, 40
LARGE_WIDTH, LARGE_HIDDEN = 192, 1536  # 603,840 parameters: more than 1 MiB in fp32 on each of two ranks
FROZEN = ("block.up.weight", "block.up.bias")

# With an epsilon far above the gradients Adam's step is nearly proportional to them: weights show a wrong scale.
LEARNING_RATE, LEARNING_RATE_LARGE = 0.1, 0.02
BETAS, EPSILON, WEIGHT_DECAY = (0.9, 0.95), 0.1, 0.01
SECOND_LOSS_SHARE = 0.1
RATES = (0.5, 1.0, 0.25, 0.75)  # of a step, where the rate changes
GROUP_DECAY = 0.5  # of matrices, where there are groups; vectors have none, and half the rate
BUCKET = 800  # elements: the head and a bias fill one, the block's matrices are larger


class Block(nn.Module):
    """The part that activation checkpointing computes twice, and that FSDP2 shards as one."""

    def __init__(self, width: int, hidden: int, drops: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.drops = drops

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        inner = torch.tanh(self.up(inputs))
        if self.drops:
            inner = inner * dropout_factors(inner.shape).to(inner.dtype)
        outputs: torch.Tensor = self.down(inner)
        return inputs + outputs


class Toy(nn.Module):
    """Returns logits (sequences x LENGTH x VOCABULARY) and the last hidden states; where it has one output, logits."""

    def __init__(self, cell: Cell) -> None:
        super().__init__()
        width, hidden = (LARGE_WIDTH, LARGE_HIDDEN) if cell.is_large else (WIDTH, HIDDEN)
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.block = Block(width, hidden, cell.does("dropout"))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.cell = cell
        with torch.no_grad():
            for seed, parameter in enumerate(self.parameters()):
                scale = 0.5 if parameter.ndim == 1 else 1.5 / math.sqrt(parameter.shape[-1])
                # Numbers that bf16 has: an engine may make its masters of what it has rounded.
                parameter.copy_((scale * uniform(parameter.shape, seed)).bfloat16())
        if cell.does("tied"):
            self.head.weight = self.embedding.weight
        if cell.does("frozen"):
            for name in FROZEN:
                self.get_parameter(name).requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        hidden = self.embedding(tokens)
        for _ in range(1 + self.cell.does("used_twice")):
            if self.cell.does("checkpointing") or self.cell.does("reentrant"):
                hidden = checkpoint(self.block, hidden, use_reentrant=self.cell.does("reentrant"))
            else:
                hidden = self.block(hidden)
        logits: torch.Tensor = self.head(hidden)
        return logits if self.cell.twist in NEWER_TWISTS else (logits, hidden)


def uniform(shape: Any, seed: int) -> torch.Tensor:
    """Return numbers between -1 and 1 in fp64, by the generator splitmix64, which is written out here."""
    count = torch.arange(1, math.prod(shape) + 1, dtype=torch.int64)
    state = (count + (seed + 1) * 0x632BE59BD9B4E019 % (1 << 62)) * -0x61C8864680B583EB  # wraps, as it is to
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        state = (state ^ ((state >> shift) & ((1 << (64 - shift)) - 1))) * factor
    state = state ^ ((state >> 31) & ((1 << 33) - 1))
    return ((state >> 11).double() / (1 << 52)).reshape(shape)


def dropout_factors(shape: Any, generator: torch.Generator | None = None) -> torch.Tensor:
    """Return the factors of dropout, 0 or 2. `generator` None: torch's own, as in any dropout."""
    return 2 * torch.empty(shape).bernoulli_(0.5, generator=generator)


def seed(step: int, rank: int, micro_batch: int) -> int:
    """Return the seed of torch's generator before the forward pass of a micro batch."""
    return 100 * step + 10 * rank + micro_batch


def options(cell: Cell, num_dimensions: int) -> dict[str, float]:
    """Return the optimizer's options (lr, weight_decay) for a parameter of so many dimensions."""
    rate = LEARNING_RATE_LARGE if cell.is_large else LEARNING_RATE
    if not cell.does("groups"):
        return {"lr": rate, "weight_decay": WEIGHT_DECAY}
    return {"lr": rate, "weight_decay": GROUP_DECAY} if num_dimensions > 1 else {"lr": rate / 2, "weight_decay": 0.0}


def tokens(cell: Cell, step: int) -> torch.Tensor:
    """Return the batch of one step: sequences x (LENGTH + 1). The last token is only a target."""
    drawn = uniform((cell.batch_size, LENGTH + 1), 1000 + step)
    return ((drawn + 1) / 2 * VOCABULARY).long().clamp(0, VOCABULARY - 1)


def losses(cell: Cell, model: Any, outputs: Any, tokens: torch.Tensor) -> list[torch.Tensor]:
    """Return the losses to minimize, as shares of the whole batch's mean that add up to it. `model`: the toy itself."""
    if cell.does("part_outside"):
        outputs = (outputs, model.block(outside_inputs(tokens).to(next(model.parameters()).dtype)))
    logits, *hidden = outputs if isinstance(outputs, tuple) else (outputs,)
    num_targets = cell.batch_size * LENGTH
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1)
    first = functional.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="sum") / num_targets
    if not (cell.does("two_backward") or cell.does("part_outside")):
        return [first]
    second = hidden[0].to(first.dtype).square().sum() * SECOND_LOSS_SHARE / num_targets
    return [first, second] if cell.does("two_backward") else [first + second]


def outside_inputs(tokens: torch.Tensor) -> torch.Tensor:
    """Return the inputs of the block outside the forward pass: numbers for each token, which bf16 can represent."""
    return uniform((VOCABULARY, WIDTH), 100).bfloat16().double()[tokens[:, :-1]]
