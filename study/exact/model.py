"""Define the model that is trained exactly: layers of torch, with a rounding function between them.

The function rounds every number to a coarse grid, so that sums are exact.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from study.exact import problem

STEP = 2.0**-problem.ACTIVATION_BITS
LARGEST = problem.LARGEST_ACTIVATION * STEP
GRADIENT_STEP = 3 * STEP
LARGEST_GRADIENT = problem.LARGEST_GRADIENT * GRADIENT_STEP


class Quantize(torch.autograd.Function):
    """An operation that rounds activations to multiples of 2^-3 in [-1, 1], and gradients to multiples of 3 * 2^-3.

    The grid of the gradients is for single sequences, before the division by the batch size. The incoming gradient has
    already been divided by `divisor`. It is multiplied by it for the rounding, and then divided again, which is exact.
    If `divisor` is None, the gradient is not changed.
    """

    @staticmethod
    def forward(context: Any, values: Tensor, divisor: int | None) -> Tensor:
        context.divisor = divisor
        return (values / STEP).round().mul(STEP).clamp(-LARGEST, LARGEST)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        if context.divisor is None:
            return gradient, None
        steps = (gradient * context.divisor / GRADIENT_STEP).round()
        return steps.mul(GRADIENT_STEP).clamp(-LARGEST_GRADIENT, LARGEST_GRADIENT) / context.divisor, None


def quantize(values: Tensor, divisor: int | None) -> Tensor:
    quantized: Tensor = Quantize.apply(values, divisor)  # type: ignore[no-untyped-call]
    return quantized


class Block(nn.Module):
    """The unit that FSDP2 shards: two linear layers and a residual connection."""

    def __init__(self, divisor: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(problem.WIDTH, problem.HIDDEN), nn.Linear(problem.HIDDEN, problem.WIDTH)
        self.divisor = divisor

    def forward(self, inputs: Tensor) -> Tensor:
        inner = quantize(self.up(inputs), self.divisor)
        return quantize(inputs + self.down(inner), self.divisor)


class Model(nn.Module):
    """The model that is trained exactly. It maps tokens to quantized outputs.

    Tokens have the shape (sequences x LENGTH), and outputs (sequences x VOCABULARY). `divisor` is the number by which
    the backward pass divides the gradient of each sequence: the sequences of a micro batch times the number of micro
    batches.
    """

    def __init__(self, divisor: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(problem.VOCABULARY, problem.WIDTH)
        self.blocks = nn.ModuleList(Block(divisor) for _ in range(problem.NUM_BLOCKS))
        self.head = nn.Linear(problem.WIDTH, problem.VOCABULARY)
        self.head.weight = self.embedding.weight
        self.divisor = divisor

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = quantize(self.embedding(tokens).sum(1), self.divisor)
        for block in self.blocks:
            hidden = block(hidden)
        return quantize(self.head(hidden), None)  # the loss's own gradient shows how the engine scales the loss


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss over the sequences.

    The factor 1.5 makes the gradient three times the error, so that a division by 3 is exact.
    """
    return (1.5 * (outputs - targets).square()).sum(1).mean()


def set_initial_weights(model: nn.Module) -> None:
    """Set the weights of a model to the initial values of the exact problem.

    Collective if ZeRO stage 3 has partitioned the model.
    """
    from contextlib import nullcontext

    values = problem.initial_weights()
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        gathered: Any = nullcontext()
        if hasattr(parameter, "ds_id"):
            import deepspeed

            gathered = deepspeed.zero.GatheredParameters([parameter], modifier_rank=0)
        with gathered, torch.no_grad():
            if parameter.numel():
                written = torch.tensor(values[name]) * 2.0**-problem.INITIAL_BITS
                parameter.copy_(written.reshape(parameter.shape))


def tensors(sequences: list[problem.Sequence]) -> tuple[Tensor, Tensor]:
    """Return a micro batch as two tensors: tokens (sequences x LENGTH) and targets (sequences x VOCABULARY)."""
    tokens = torch.tensor([sequence.tokens for sequence in sequences])
    return tokens, torch.tensor([sequence.targets for sequence in sequences]) * STEP
