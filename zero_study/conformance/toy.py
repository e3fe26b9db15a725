"""Define the small test model (toy), with structures on which engines have failed, and its batches.

It has some thousand parameters in an embedding, a block with a nonlinearity and a residual path, and a head that may
share the embedding's weights. Weights and batches come from a generator in this module, because the numbers of a
library's generator may change between releases.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ..engines.readback.parameters import whole_shape
from .cells import IN_8_BITS, OF_ADAMW, Cell

VOCABULARY = 32
LENGTH = 6  # tokens of a sequence
WIDTH, HIDDEN = 24, 40
LARGE_WIDTH, LARGE_HIDDEN = 192, 1536  # 603,840 parameters: more than 1 MiB in fp32 on each of two ranks
# For states in 8 bits: whole matrices of the block are large enough for them, and their halves are not.
WIDTH_IN_8_BITS, HIDDEN_IN_8_BITS = 96, 64
RANK = 4  # of a LoRA adapter
ADAPTER_SCALE = 2.0  # factor on its output
FROZEN = ("block.up.weight", "block.up.bias")

# Epsilon is far above the gradients. Adam's step is then nearly proportional to them, so weights show a wrong scale.
LEARNING_RATE, LEARNING_RATE_LARGE = 0.1, 0.02
BETAS, EPSILON, WEIGHT_DECAY = (0.9, 0.95), 0.1, 0.01
# The learning rates of other optimizers than AdamW.
RATE_OF = {"sgd": 0.3, "adafactor": 0.05, "lion": 0.005, "muon": 0.02, "torch_muon": 0.02}
MOMENTUM = 0.9  # of SGD and Muon
LION_BETAS = (0.9, 0.99)
OVERFLOW = 1e30  # the factor on the loss of a step whose gradients have to overflow in fp16
SECOND_LOSS_SHARE = 0.1
RATES = (0.5, 1.0, 0.25, 0.75)  # factor on the learning rate in each step, if the cell has a schedule
GROUP_DECAY = 0.5  # of matrices, if the cell has groups; vectors have no decay and half the learning rate
BUCKET = 800  # elements: the head and a bias fill one, the block's matrices are larger


class Block(nn.Module):
    """The block of the test model, which is the unit of activation checkpointing and of FSDP2's sharding."""

    def __init__(self, width: int, hidden: int, drops: bool, has_adapter: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.drops, self.has_adapter = drops, has_adapter
        if has_adapter:
            self.lora_a, self.lora_b = nn.Linear(width, RANK, bias=False), nn.Linear(RANK, hidden, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outer = self.up(inputs)
        if self.has_adapter:
            outer = outer + ADAPTER_SCALE * self.lora_b(self.lora_a(inputs))
        inner = torch.tanh(outer)
        if self.drops:
            inner = inner * dropout_factors(inner.shape).to(inner.dtype)
        outputs: torch.Tensor = self.down(inner)
        return inputs + outputs


class Toy(nn.Module):
    """The small model that is trained in every configuration.

    It returns the logits (sequences x LENGTH x VOCABULARY) and the last hidden states, or in a newer variation only the
    logits.
    """

    def __init__(self, cell: Cell) -> None:
        super().__init__()
        width, hidden = size(cell)
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.block = Block(width, hidden, cell.does("dropout"), cell.does("adapter"))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.cell = cell
        if not cell.does("zero_init"):  # there, the parameters are sharded by now, and the engine fills them
            self.fill()
        if cell.optimizer == "torch_muon":
            for parameter in self.parameters():
                parameter.requires_grad_(len(whole_shape(parameter)) > 1)
        if cell.does("tied"):
            self.head.weight = self.embedding.weight
        if cell.does("frozen"):
            for name in FROZEN:
                self.get_parameter(name).requires_grad_(False)
        if cell.does("adapter"):
            for name, parameter in self.named_parameters():
                parameter.requires_grad_("lora" in name)

    @torch.no_grad()
    def fill(self) -> None:
        """Set the parameters to their initial values."""
        for seed, parameter in enumerate(self.parameters()):
            scale = 0.5 if parameter.ndim == 1 else 1.5 / math.sqrt(parameter.shape[-1])
            # Numbers that bf16 can represent, because an engine may make its masters from rounded weights.
            parameter.copy_((scale * uniform(parameter.shape, seed)).bfloat16())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        hidden = self.embedding(tokens)
        if self.cell.does("adapter") and self.cell.does("reentrant"):
            hidden.requires_grad_()  # as `enable_input_require_grads` of transformers does
        for _ in range(1 + self.cell.does("used_twice")):
            if self.cell.does("checkpointing") or self.cell.does("reentrant"):
                hidden = checkpoint(self.block, hidden, use_reentrant=self.cell.does("reentrant"))
            else:
                hidden = self.block(hidden)
        logits: torch.Tensor = self.head(hidden)
        return logits if self.cell.returns_logits_alone else (logits, hidden)


def size(cell: Cell) -> tuple[int, int]:
    """Return the width of the test model in a configuration, and the hidden width of its block."""
    if cell.optimizer in IN_8_BITS:
        return WIDTH_IN_8_BITS, HIDDEN_IN_8_BITS
    return (LARGE_WIDTH, LARGE_HIDDEN) if cell.is_large else (WIDTH, HIDDEN)


def uniform(shape: Any, seed: int) -> torch.Tensor:
    """Return random numbers between -1 and 1 in fp64, from the generator splitmix64, which is implemented here."""
    count = torch.arange(1, math.prod(shape) + 1, dtype=torch.int64)
    state = (count + (seed + 1) * 0x632BE59BD9B4E019 % (1 << 62)) * -0x61C8864680B583EB  # wraps around, as intended
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        state = (state ^ ((state >> shift) & ((1 << (64 - shift)) - 1))) * factor
    state = state ^ ((state >> 31) & ((1 << 33) - 1))
    return ((state >> 11).double() / (1 << 52)).reshape(shape)


def dropout_factors(shape: Any, generator: torch.Generator | None = None) -> torch.Tensor:
    """Return the random factors of dropout, each 0 or 2. If `generator` is None, torch's default generator is used."""
    return 2 * torch.empty(shape).bernoulli_(0.5, generator=generator)


def seed(step: int, rank: int, micro_batch: int) -> int:
    """Return the seed to which torch's generator is set before the forward pass of a micro batch."""
    return 100 * step + 10 * rank + micro_batch


def options(cell: Cell, num_dimensions: int) -> dict[str, float]:
    """Return the optimizer's options (lr, weight_decay) for a parameter with this number of dimensions."""
    rate = RATE_OF.get(cell.optimizer, LEARNING_RATE_LARGE if cell.is_large else LEARNING_RATE)
    if not cell.does("groups"):
        return {"lr": rate, "weight_decay": WEIGHT_DECAY}
    return {"lr": rate, "weight_decay": GROUP_DECAY} if num_dimensions > 1 else {"lr": rate / 2, "weight_decay": 0.0}


def settings(cell: Cell) -> dict[str, Any]:
    """Return the optimizer's arguments in a configuration (if it has parameter groups, those for matrices)."""
    arguments: dict[str, Any] = options(cell, 2)
    if cell.optimizer in ("sgd", "muon", "torch_muon"):
        arguments["momentum"] = MOMENTUM
    if cell.optimizer == "lion":
        arguments["betas"] = LION_BETAS
    if cell.optimizer in (*OF_ADAMW, *IN_8_BITS, "muon"):  # Muon trains some parameters by Adam
        arguments |= {"betas": BETAS, "eps": EPSILON}
    return arguments


def uses_muon(name: str, num_dimensions: int) -> bool:
    """Return whether DeepSpeed's Muon optimizer trains a parameter by Muon. It trains all other parameters by Adam."""
    return num_dimensions > 1 and not name.startswith("embedding")


def tokens(cell: Cell, step: int) -> torch.Tensor:
    """Return the batch of one step, with the shape sequences x (LENGTH + 1). The last token is only a target."""
    drawn = uniform((cell.batch_size, LENGTH + 1), 1000 + step)
    return ((drawn + 1) / 2 * VOCABULARY).long().clamp(0, VOCABULARY - 1)


def losses(cell: Cell, model: Any, outputs: Any, tokens: torch.Tensor) -> list[torch.Tensor]:
    """Return the losses of a micro batch, scaled so that the losses of all micro batches add up to the batch's mean.

    `model` is the test model itself, not the engine around it.
    """
    if cell.does("part_outside"):
        outputs = (outputs, model.block(outside_inputs(cell, tokens).to(next(model.parameters()).dtype)))
    logits, *hidden = outputs if isinstance(outputs, tuple) else (outputs,)
    num_targets = cell.batch_size * LENGTH
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1)
    first = functional.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="sum") / num_targets
    if not (cell.does("two_backward") or cell.does("part_outside")):
        return [first]
    second = hidden[0].to(first.dtype).square().sum() * SECOND_LOSS_SHARE / num_targets
    return [first, second] if cell.does("two_backward") else [first + second]


def outside_inputs(cell: Cell, tokens: torch.Tensor) -> torch.Tensor:
    """Return inputs for calling the test model's block separately, outside the model's forward pass.

    Each token has a fixed vector of numbers that bf16 can represent.
    """
    width, _ = size(cell)
    return uniform((VOCABULARY, width), 100).bfloat16().double()[tokens[:, :-1]]
