"""Trainings of a small transformer, sound and with one fault each, recorded: test_diff.py compares them.

One of each engine is trained without a recorder, too, and is to have the same losses, bit by bit.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from study.engines import diff

VOCABULARY, WIDTH, LENGTH, ROWS, STEPS = 31, 16, 12, 8, 4
RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = (part.view(*part.shape[:2], 2, -1).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        attended = functional.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.out(attended))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Net(nn.Module):
    def __init__(self, tied: bool = False, dropout: float = 0.0, checkpointed: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.checkpointed = checkpointed
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            is_reentrant = self.checkpointed == "reentrant"
            x = checkpoint(block, x, use_reentrant=is_reentrant) if self.checkpointed else block(x)
        return self.head(self.norm(x))


def nothing(*_: Any) -> None: ...


def loss_of(outputs: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs.float().flatten(0, 1), rows[:, 1:].flatten())


@dataclass(frozen=True)
class Case:
    """One training; a fault is another value of something, or a function that does something wrong."""

    engine: str = "ddp"
    micro_steps: int = 1
    precision: str = "fp32"
    net: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)  # of DDP, or of ZeRO
    clip: float = 1.0
    rate: float = 1e-3
    seed: int = 0
    scale: Callable[[int], float] = lambda number: 1.0  # of the loss of a micro batch
    batch: Callable[[int, int], int] = lambda step, row: 100 * step + row  # the seed of a row
    parameters: Callable[[Any], Any] = nn.Module.parameters
    call: Callable[[Any], Any] = lambda model: model
    syncs: bool = True
    before_wrap: Callable[[Any], None] = nothing
    after_wrap: Callable[[Any], None] = nothing
    before_update: Callable[[Any, int], None] = nothing
    after_update: Callable[[Any, Any, int], None] = nothing

    def train(self, output: str | None = None, noise: int | None = None) -> list[torch.Tensor]:
        """Return the losses of this rank."""
        net = Net(**self.net)
        self.before_wrap(net)
        model, optimizer = self._wrapped(net)
        self.after_wrap(model)
        if output:
            diff.record(model, output, noise=noise)
        torch.manual_seed(self.seed)
        losses = []
        is_deepspeed = self.engine.startswith("zero")
        for step in range(STEPS):
            for number, rows in enumerate(self._rows(step).chunk(self.micro_steps)):
                is_last = self.syncs and number == self.micro_steps - 1
                if self.engine == "fsdp2":
                    model.set_requires_gradient_sync(is_last)
                with model.no_sync() if self.engine == "ddp" and WORLD > 1 and not is_last else nullcontext():
                    autocasts = self.precision == "bf16" and self.engine == "ddp"
                    with torch.autocast("cpu", torch.bfloat16, enabled=autocasts):
                        outputs = self.call(model)(rows[:, :-1])
                    loss = loss_of(outputs, rows) * self.scale(number) / (1 if is_deepspeed else self.micro_steps)
                    (model if is_deepspeed else torch.autograd).backward(loss)
                losses.append(loss.detach())
                if is_deepspeed:
                    model.step()
            if not is_deepspeed:
                self.before_update(model, step)
                if self.clip:
                    nn.utils.clip_grad_norm_(model.parameters(), self.clip)
                optimizer.step()
                optimizer.zero_grad()
            self.after_update(model, optimizer, step)
        return losses

    def _rows(self, step: int) -> torch.Tensor:
        """This rank's rows of a step's batch, which is the same however it is dealt out."""
        draws = [torch.Generator().manual_seed(self.batch(step, row)) for row in range(ROWS)]
        return torch.stack([torch.randint(VOCABULARY, (LENGTH + 1,), generator=draw) for draw in draws]).chunk(WORLD)[
            RANK
        ]

    def _wrapped(self, net: Net) -> tuple[Any, Any]:
        settings = {"lr": self.rate, "eps": 1e-6}
        if self.engine == "fsdp2":
            from torch.distributed import device_mesh, fsdp

            given = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if self.precision == "bf16" else {}
            shared = {
                "mesh": device_mesh.init_device_mesh("cpu", (WORLD,)),
                "mp_policy": fsdp.MixedPrecisionPolicy(**given),
            }
            for part in (*net.blocks, net):
                fsdp.fully_shard(part, **shared)
            return net, torch.optim.AdamW(self.parameters(net), **settings)
        optimizer = torch.optim.AdamW(self.parameters(net), **settings)
        if self.engine == "ddp":
            return nn.parallel.DistributedDataParallel(net, **self.options) if WORLD > 1 else net, optimizer
        import deepspeed

        asked = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": self.micro_steps,
            "gradient_clipping": self.clip,
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": self.precision == "bf16"},
            "zero_optimization": {
                "stage": int(self.engine[4]),
                "stage3_param_persistence_threshold": 0,
                **self.options,
            },
        }
        return deepspeed.initialize(model=net, optimizer=optimizer, config=asked)[0], optimizer


# ---------------------------------------------------------------- sound ones


def sound() -> dict[str, Case]:
    """Each is the same training in its class of precision, on any number of ranks."""
    cases = {}
    for precision in ("fp32", "bf16"):
        for engine in ("ddp", "fsdp2", "zero1", "zero2", "zero3") if WORLD > 1 else ("ddp",):
            for micro_steps in (1, 2):
                cases[f"{engine}-{micro_steps}-{precision}"] = Case(engine, micro_steps, precision)
        for how in ("plain", "reentrant"):
            cases[f"{how}-{precision}"] = Case(precision=precision, net={"checkpointed": how})
        if WORLD > 1:
            buckets = {"reduce_bucket_size": 300, "allgather_bucket_size": 300}
            cases[f"buckets-{precision}"] = Case(precision=precision, options={"bucket_cap_mb": 0.002})
            cases[f"zero2-buckets-{precision}"] = Case("zero2", 1, precision, options=buckets)
            cases[f"zero3-plain-{precision}"] = Case("zero3", 1, precision, {"checkpointed": "plain"})
    return cases


# ---------------------------------------------------------------- faults


class Fault(NamedTuple):
    """What is wrong beside a sound training, and what is to be said of it."""

    sound: Case
    changes: dict[str, Any]
    kind: str  # of the first difference; replicas: ranks of the faulty one differ
    name: str = ""  # that it begins with
    factor: float | None = None


class Scaled(torch.autograd.Function):
    """A flow whose gradient is so many times as much."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, times: float) -> torch.Tensor:
        context.times = times
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * context.times, None


def hooked(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], None]:
    return lambda net: net.get_parameter(name).register_hook(change)


def flowing(name: str, times: float) -> Callable[[Any], None]:
    return lambda net: net.get_submodule(name).register_forward_hook(lambda *seen: Scaled.apply(seen[2], times))


def then(**settings: Any) -> Callable[[Any, Any, int], None]:
    """Another setting of the optimizer after the first step."""
    return lambda model, optimizer, step: [group.update(settings) for group in optimizer.param_groups]


def without_last(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * torch.arange(gradient.numel()).ne(gradient.numel() - 1).view_as(gradient)


def changed(name: str, times: float, ranks: range = range(9)) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        parts = dict(model.named_parameters())
        with torch.no_grad():
            parts.get(name, parts.get(f"module.{name}")).mul_(times if RANK in ranks else 1.0)

    return change


def rounded(model: Any, *_: Any) -> None:
    for parameter in model.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        local.data.copy_(local.data.bfloat16())


KEPT: dict[str, torch.Tensor] = {}


def keep_shard(model: Any, *_: Any) -> None:
    KEPT["shard"] = model.blocks[0].up.weight.to_local().detach().clone()


def stale_shard(model: Any, *_: Any) -> None:
    if RANK == 1:
        model.blocks[0].up.weight.to_local().data.copy_(KEPT["shard"])


def add_old_gradients(model: Any, step: int) -> None:
    for name, parameter in model.named_parameters():
        if step:
            parameter.grad += KEPT[name]
        KEPT[name] = parameter.grad.clone()


def zero_first(net: Any) -> None:
    for parameter in list(net.parameters())[:6]:
        parameter.register_hook(torch.zeros_like)


DDP, DDP2, FSDP2, ZERO2, ZERO3 = Case(), Case(micro_steps=2), Case("fsdp2"), Case("zero2"), Case("zero3")
MASKED, CLIPPED = Case(net={"dropout": 0.1}), Case(clip=0.5)
HALF = {"before_wrap": hooked("blocks.1.down.weight", lambda gradient: gradient / 2)}
HALF_FLOW = {"before_wrap": flowing("blocks.1", 0.5)}
FROZEN = {"before_wrap": lambda net: net.blocks[0].up.weight.requires_grad_(False)}
EPSILON = {"before_wrap": lambda net: setattr(net.blocks[1].norm2, "eps", 1e-3)}
FAULTS = {
    "module_bypass": Fault(DDP, {"call": lambda model: model.module}, "replicas"),
    "no_sync_always": Fault(DDP2, {"syncs": False}, "replicas"),
    "drawn_anew": Fault(DDP, {"after_wrap": changed("blocks.0.up.bias", 2.0, range(1, 2))}, "replicas", "blocks.0.up"),
    "half_a_layer": Fault(DDP, HALF, "gradient", "blocks.1.down.weight", 0.5),
    "half_a_layer_zero2": Fault(ZERO2, HALF, "gradient", "blocks.1.down.weight", 0.5),
    "half_a_layer_zero3": Fault(ZERO3, HALF, "gradient", "blocks.1.down.weight", 0.5),
    "a_layer_less": Fault(
        DDP, {"before_wrap": hooked("blocks.0.qkv.weight", lambda gradient: 0.98 * gradient)}, "gradient",
        "blocks.0.qkv.weight", 0.98,
    ),
    "half_a_flow": Fault(DDP, HALF_FLOW, "gradient", "blocks.1.down", 0.5),
    "half_a_flow_zero3": Fault(ZERO3, HALF_FLOW, "gradient", "blocks.1.down", 0.5),
    "no_flow": Fault(DDP, {"before_wrap": flowing("blocks.0", 0.0)}, "gradient", "blocks.0.down", 0.0),
    "not_divided": Fault(DDP2, {"scale": lambda _: 2.0}, "gradient", "", 2.0),
    "divided_twice": Fault(DDP2, {"scale": lambda _: 0.5}, "gradient", "", 0.5),
    "divided_twice_zero2": Fault(Case("zero2", 2), {"scale": lambda _: 0.5}, "gradient", "", 0.5),
    "summed_over_ranks": Fault(FSDP2, {"scale": lambda _: 2.0}, "gradient", "", 2.0),
    "still_scaled": Fault(DDP, {"scale": lambda _: 1024.0}, "gradient", "", 1024.0),
    "a_micro_batch_lost": Fault(DDP2, {"scale": lambda number: float(number)}, "gradient", "head.weight"),
    "a_rank_lost": Fault(DDP, {"scale": lambda _: 1.0 - RANK}, "gradient", "head.weight"),
    "tied_twice": Fault(
        Case(net={"tied": True}), {"before_wrap": hooked("embedding.weight", lambda gradient: 2 * gradient)},
        "gradient", "embedding.weight", 2.0,
    ),
    "last_element_lost": Fault(DDP, {"before_wrap": hooked("head.weight", without_last)}, "gradient", "head.weight"),
    "a_bucket_lost": Fault(DDP, {"before_wrap": zero_first}, "gradient", "", 0.0),
    "no_zero_grad": Fault(DDP, {"before_update": add_old_gradients}, "gradient", "head.weight"),
    "frozen": Fault(DDP, FROZEN, "gradient", "blocks.0.up.weight"),
    "frozen_zero3": Fault(ZERO3, FROZEN, "gradient", "blocks.0.up.weight"),
    "part_optimized": Fault(DDP, {"parameters": lambda net: net.blocks.parameters()}, "update", "", 0.0),
    "part_optimized_fsdp2": Fault(FSDP2, {"parameters": lambda net: net.blocks[0].parameters()}, "update", "", 0.0),
    "rate_doubled": Fault(DDP, {"rate": 2e-3}, "update", "", 2.0),
    "rate_doubled_zero3": Fault(ZERO3, {"rate": 2e-3}, "update", "", 2.0),
    "rate_less": Fault(DDP, {"rate": 0.99e-3}, "whole", "", 0.99),
    "rate_late": Fault(DDP, {"after_update": then(lr=5e-4)}, "update", "", 0.5),
    "other_betas": Fault(DDP, {"after_update": then(betas=(0.5, 0.999))}, "update"),
    "clipped_lower": Fault(CLIPPED, {"clip": 0.25}, "clipped", "", 0.5),
    "clipped_lower_zero2": Fault(replace(ZERO2, clip=0.5), {"clip": 0.25}, "clipped", "", 0.5),
    "clipped_lower_zero3": Fault(replace(ZERO3, clip=0.5), {"clip": 0.25}, "clipped", "", 0.5),
    "not_clipped": Fault(CLIPPED, {"clip": 0.0}, "clipped"),
    "masters_rounded": Fault(DDP, {"after_update": rounded}, "update"),
    "masters_rounded_fsdp2": Fault(FSDP2, {"after_update": rounded}, "update"),
    "stale_shard": Fault(
        FSDP2, {"before_update": keep_shard, "after_update": stale_shard}, "update", "blocks.0.up.weight",
    ),
    "other_masks": Fault(MASKED, {"seed": 1}, "forward", "blocks.0.dropout"),
    "no_masks": Fault(MASKED, {"net": {}}, "forward", "blocks.0.dropout"),
    "other_epsilon": Fault(DDP, EPSILON, "forward", "blocks.1.norm2"),
    "other_epsilon_fsdp2": Fault(FSDP2, EPSILON, "forward", "blocks.1.norm2"),
    "other_start": Fault(
        DDP, {"before_wrap": changed("blocks.2.out.weight", 1.01)}, "weights", "blocks.2.out.weight", 1.01,
    ),
    "other_batch": Fault(DDP, {"batch": lambda step, row: 5000 + 100 * step + row}, "batch", "other rows"),
    "other_order": Fault(DDP, {"batch": lambda step, row: 100 * step + ROWS - 1 - row}, "batch", "the same rows"),
}  # fmt: skip


def main(folder: str) -> None:
    torch.set_num_threads(1)
    if WORLD > 1 and not dist.is_initialized():
        dist.init_process_group("gloo")
    for name, case in sound().items():
        recorded = case.train(f"{folder}/{name}")
        if name.endswith("1-fp32"):
            assert all(map(torch.equal, recorded, case.train())), name
        if case == Case(precision=case.precision):
            for noise in (1, 2):
                case.train(f"{folder}/{name}", noise)
    if WORLD == 2:
        held = {}
        for name, fault in FAULTS.items():
            if id(fault.sound) not in held:
                held[id(fault.sound)] = name
                for noise in (None, 1):
                    fault.sound.train(f"{folder}/beside-{name}", noise)
            replace(fault.sound, **fault.changes).train(f"{folder}/{name}")
    print("TRAINED", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else ".")
