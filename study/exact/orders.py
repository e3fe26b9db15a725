"""Determine in which order each engine adds gradients, and when it divides them: `python -m study.exact.orders`.

Sums of floating-point numbers depend on their order. Two questions are answered by comparing the bits of weights:

- Three micro batches on two ranks. A loop without an engine adds the gradients of a rank's micro batches first and
  those of the ranks second, and another loop adds over the ranks first. Each engine must end with the bits of one of
  the two.
- One micro batch on three ranks. A third has no exact value in binary, so it matters whether an engine multiplies every
  gradient by 1/3 before the sum, divides it by 3 before the sum, or divides the sum. With SGD and a rate of 0.5, a
  weight shows its gradient. gloo adds the ranks in an order that depends on the position in its buffer, so each weight
  may have any order.

The engines are built without accelerate and are not modified. The model and its values are random.
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zero_study.engines.readback.parameters import full_value
from zero_study.errors import RunFailed
from zero_study.ranks import worlds

WIDTH, HIDDEN, BATCH = 20, 44, 4
NUM_STEPS = 4  # of the training with micro batches
NUM_MICRO_BATCHES = 3
RATE_OF_SGD = 0.5  # a power of two, so that the product with a gradient is exact
SECONDS = 120  # for the ranks of one engine
STAGES = {"zero1": 1, "zero2": 2, "zero3": 3}
ENGINES = ("ddp", *STAGES, "fsdp2")
Optimizer = Literal["adamw", "sgd"]
Values = dict[str, Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.tanh(self.down(torch.tanh(self.up(inputs))))


def build_model() -> nn.Sequential:
    """Return a small model with its initial weights, which are always the same."""
    torch.manual_seed(7)
    return nn.Sequential(Block(), Block())


def batch(step: int, number: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return the inputs and the targets of one micro batch of a rank."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * number + rank)
    inputs, targets = (torch.randn(BATCH, WIDTH, generator=generator) for _ in range(2))
    return inputs, targets


def build_optimizer(parameters: Any, kind: Optimizer) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(parameters, lr=RATE_OF_SGD, foreach=False)
    return torch.optim.AdamW(parameters, lr=0.01, foreach=False, fused=False)  # rounds every element in the same way


# ---------------------------------------------------------------- loops without an engine


def gradients_of(model: nn.Module, step: int, number: int, rank: int, divisor: int) -> Values:
    """Return the gradients of one micro batch, whose loss is divided by `divisor`."""
    inputs, targets = batch(step, number, rank)
    model.zero_grad()
    ((model(inputs) - targets).square().mean() / divisor).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def add(terms: list[Tensor]) -> Tensor:
    """Add tensors one after another, beginning with the first."""
    return functools.reduce(torch.add, terms)


def train_without_engine(num_ranks: int, micro_batches_first: bool) -> Values:
    """Train with AdamW on the data of all ranks in one process, and return the weights."""
    model = build_model()
    optimizer = build_optimizer(model.parameters(), "adamw")
    for step in range(NUM_STEPS):
        gradients = {
            (number, rank): gradients_of(model, step, number, rank, NUM_MICRO_BATCHES)
            for number in range(NUM_MICRO_BATCHES)
            for rank in range(num_ranks)
        }
        for name, parameter in model.named_parameters():
            rows = [[gradients[number, rank][name] for rank in range(num_ranks)] for number in range(NUM_MICRO_BATCHES)]
            if micro_batches_first:
                parameter.grad = add([add([*column]) for column in zip(*rows, strict=True)]) / num_ranks
            else:
                parameter.grad = add([add(row) / num_ranks for row in rows])
        optimizer.step()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


# When the mean over three ranks is divided. Each rule returns it for gradients in a given order of ranks.
DIVISIONS: dict[str, Callable[[list[Tensor]], Tensor]] = {
    "multiplies by 1/3 before the sum": lambda terms: add([term * (1 / len(terms)) for term in terms]),
    "divides by 3 before the sum": lambda terms: add([term / len(terms) for term in terms]),
    "divides by 3 after the sum": lambda terms: add(terms) / len(terms),
    "multiplies by 1/3 after the sum": lambda terms: add(terms) * (1 / len(terms)),
}


def explained(weights: Values) -> dict[str, int]:
    """Return how many trained weights each rule explains. A rule says when an engine divides the gradients.

    The weights are those after one step of SGD on three ranks.
    """
    model = build_model()
    gradients = [gradients_of(model, 0, 0, rank, 1) for rank in range(3)]
    counts = dict.fromkeys(DIVISIONS, 0)
    for name, parameter in model.named_parameters():
        for rule, mean in DIVISIONS.items():
            is_equal = torch.zeros_like(parameter, dtype=torch.bool)
            for order in itertools.permutations(range(3)):
                moved = parameter.detach() - RATE_OF_SGD * mean([gradients[rank][name] for rank in order])
                is_equal |= moved == weights[name]
            counts[rule] += int(is_equal.sum())
    return counts


# ---------------------------------------------------------------- engines


def train_with_engine(name: str, kind: Optimizer, num_ranks: int, rank: int, folder: Path) -> dict[str, Any]:
    """Join a training as one rank, run its steps with an engine, and return the weights. Collective.

    AdamW trains with micro batches, and SGD trains one step with a single one.
    """
    worlds.join(rank, num_ranks, folder)
    num_steps, num_micro_batches = (NUM_STEPS, NUM_MICRO_BATCHES) if kind == "adamw" else (1, 1)
    make = _deepspeed if name in STAGES else _ddp if name == "ddp" else _fsdp2
    module, train_step = make(name, kind, num_micro_batches)
    for step in range(num_steps):
        train_step([batch(step, number, dist.get_rank()) for number in range(num_micro_batches)])
    weights = {n: full_value(p).tolist() for n, p in sorted(module.named_parameters())}
    dist.barrier()  # no rank leaves while another still reads
    return {"weights": weights}


TrainStep = Callable[[list[tuple[Tensor, Tensor]]], None]


def _ddp(name: str, kind: Optimizer, num_micro_batches: int) -> tuple[nn.Module, TrainStep]:
    module = build_model()
    model = nn.parallel.DistributedDataParallel(module)
    optimizer = build_optimizer(module.parameters(), kind)

    def train_step(batches: list[tuple[Tensor, Tensor]]) -> None:
        for number, (inputs, targets) in enumerate(batches, 1):
            model.require_backward_grad_sync = number == num_micro_batches  # as its no_sync does
            ((model(inputs) - targets).square().mean() / num_micro_batches).backward()
        optimizer.step()
        optimizer.zero_grad()

    return module, train_step


def _fsdp2(name: str, kind: Optimizer, num_micro_batches: int) -> tuple[nn.Module, TrainStep]:
    """Shard the model with FSDP2 as this project's trainer does, which reduces gradients after every micro batch."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    module = build_model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (*module, module):
        fully_shard(part, mesh=mesh)
    optimizer = build_optimizer(module.parameters(), kind)

    def train_step(batches: list[tuple[Tensor, Tensor]]) -> None:
        for inputs, targets in batches:
            ((module(inputs) - targets).square().mean() / num_micro_batches).backward()
        optimizer.step()
        optimizer.zero_grad()

    return module, train_step


def _deepspeed(name: str, kind: Optimizer, num_micro_batches: int) -> tuple[nn.Module, TrainStep]:
    import deepspeed

    zero: dict[str, Any] = {"stage": STAGES[name], "reduce_bucket_size": 100_000}
    if name == "zero3":  # with PyTorch's linear layer, which all other engines use
        zero |= {"stage3_param_persistence_threshold": 50, "memory_efficient_linear": False}
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": num_micro_batches,
        "zero_optimization": zero,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
    }
    module = build_model()
    engine, *_ = deepspeed.initialize(model=module, optimizer=build_optimizer(module.parameters(), kind), config=config)

    def train_step(batches: list[tuple[Tensor, Tensor]]) -> None:
        for inputs, targets in batches:
            engine.backward((engine(inputs) - targets).square().mean())
            engine.step()

    return module, train_step


def launch(name: str, num_ranks: int, kind: Optimizer) -> Values:
    """Train with an engine on forks of this process, and return the weights.

    Raises RunFailed if a rank fails, if the ranks take too long, or if their weights differ from each other.
    """
    program = functools.partial(train_with_engine, name, kind, num_ranks)
    ((_, result),) = worlds.run([worlds.World(num_ranks, program, SECONDS)])
    if result.failure:
        raise RunFailed(f"{name}: {result.failure}")
    weights = [answer["weights"] for answer in result.answers.values()]
    if any(values_of_rank != weights[0] for values_of_rank in weights):
        raise RunFailed(f"{name}: the ranks end with different weights")
    return {key: torch.tensor(values) for key, values in weights[0].items()}


# ---------------------------------------------------------------- the two answers


def same_bits(first: Values, second: Values) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def order_of(name: str) -> str:
    """Return whether an engine adds over "micro batches" or "ranks" first, or "neither" if its bits fit no order."""
    weights = launch(name, 2, "adamw")
    loops = {"micro batches": True, "ranks": False}
    matching = [order for order, first in loops.items() if same_bits(train_without_engine(2, first), weights)]
    return " and ".join(matching) or "neither"


def main() -> int:
    """Print the order in which each engine adds gradients, and when it divides. Return 1 if a result is unclear."""
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    from study.exact import runner

    torch.set_num_threads(1)
    runner.import_engines()
    is_clear = True
    for name in ENGINES:
        order = order_of(name)
        print(f"{name}, three micro batches on two ranks: the engine adds over the {order} first", flush=True)
        is_clear &= order in ("micro batches", "ranks")
    for name in ENGINES:
        weights = launch(name, 3, "sgd")
        number = sum(values.numel() for values in weights.values())
        for rule, count in explained(weights).items():
            print(
                f"{name}, three ranks: assuming that the engine {rule} explains {count:,} of {number:,} weights",
                flush=True,
            )
        is_clear &= [count == number for count in explained(weights).values()].count(True) == 1
    return 0 if is_clear else 1


if __name__ == "__main__":
    sys.exit(main())
