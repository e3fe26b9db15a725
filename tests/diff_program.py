"""Trainings of a small transformer, sound and with one fault each, recorded: test_diff.py compares them.

One of each engine is trained without a recorder, too, and is to have the same losses, bit by bit.
`python tests/diff_program.py --limits FILE`: how small a fault is seen, and what a recording costs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import device_mesh, fsdp
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from zero_study import diff
from zero_study.diff.compare import compare
from zero_study.diff.recorded import Recording
from zero_study.engines import extensions

VOCABULARY, WIDTH, LENGTH, ROWS, STEPS = 31, 16, 12, 8, 4
PRECISIONS = ("fp32", "bf16")
PERSISTS = {"stage3_param_persistence_threshold": 0}  # nothing does
RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class Block(nn.Module):
    def __init__(self, dropout: float, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = (part.view(*part.shape[:2], 2, -1).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        attended = functional.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.out(attended))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Net(nn.Module):
    def __init__(self, tied: bool = False, dropout: float = 0.0, checkpointed: str = "", width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(dropout, width) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        self.checkpointed = checkpointed
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            is_reentrant = self.checkpointed == "reentrant"
            x = checkpoint(block, x, use_reentrant=is_reentrant) if self.checkpointed else block(x)
        return self.head(self.norm(x))


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
    steps: int = STEPS
    length: int = LENGTH
    scale: Callable[[int], float] = lambda number: 1.0  # of the loss of a micro batch
    batch: Callable[[int, int], int] = lambda step, row: 100 * step + row  # the seed of a row
    parameters: Callable[[Any], Any] = nn.Module.parameters
    call: Callable[[Any], Any] = lambda model: model
    syncs: bool = True
    before_wrap: Callable[[Any], Any] = lambda net: None
    adapted: Callable[[Any], Any] = lambda net: net  # returns the net with PEFT's adapters
    after_wrap: Callable[[Any], Any] = lambda model: None
    before_update: Callable[[Any, int], Any] = lambda model, step: None
    after_update: Callable[[Any, Any, int], Any] = lambda model, optimizer, step: None

    def train(self, output: str | None = None, noise: int | None = None) -> list[torch.Tensor]:
        """Return the losses of this rank."""
        net = Net(**self.net)
        self.before_wrap(net)
        net = self.adapted(net)
        model, optimizer = self._wrapped(net)
        self.after_wrap(model)
        if output:
            diff.record(model, output, steps=self.steps - 1, noise=noise)  # it is written in the last step
        torch.manual_seed(self.seed)
        losses, is_deepspeed = [], self.engine.startswith("zero")
        for step in range(self.steps):
            for number, rows in enumerate(self._rows(step).chunk(self.micro_steps)):
                is_last = self.syncs and number == self.micro_steps - 1
                if self.engine == "fsdp2":
                    model.set_requires_gradient_sync(is_last)
                is_ddp = self.engine == "ddp"
                with model.no_sync() if is_ddp and WORLD > 1 and not is_last else nullcontext():
                    with torch.autocast("cpu", torch.bfloat16, enabled=is_ddp and self.precision == "bf16"):
                        outputs = self.call(model)(rows[:, :-1])
                    loss = functional.cross_entropy(outputs.float().flatten(0, 1), rows[:, 1:].flatten())
                    loss = loss * self.scale(number) / (1 if is_deepspeed else self.micro_steps)
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
        rows = [torch.randint(VOCABULARY, (self.length + 1,), generator=draw) for draw in draws]
        return torch.stack(rows).chunk(WORLD)[RANK]

    def _wrapped(self, net: Net) -> tuple[Any, Any]:
        settings = {"lr": self.rate, "eps": 1e-6}
        if self.engine == "fsdp2":
            given = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if self.precision == "bf16" else {}
            mesh = device_mesh.init_device_mesh("cpu", (WORLD,))
            for part in (*net.blocks, net):
                fsdp.fully_shard(part, mesh=mesh, mp_policy=fsdp.MixedPrecisionPolicy(**given))
            return net, torch.optim.AdamW(self.parameters(net), **settings)
        optimizer = torch.optim.AdamW(self.parameters(net), **settings)
        if self.engine == "ddp":
            return nn.parallel.DistributedDataParallel(net, **self.options) if WORLD > 1 else net, optimizer
        import deepspeed

        asked = {
            "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": self.micro_steps,
            "gradient_clipping": self.clip, "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": self.precision == "bf16"},
            "zero_optimization": {"stage": int(self.engine[4]), **PERSISTS, **self.options},
        }  # fmt: skip
        return deepspeed.initialize(model=net, optimizer=optimizer, config=asked)[0], optimizer


BUCKETS = {"reduce_bucket_size": 300, "allgather_bucket_size": 300}
COMPILED = cache(partial(torch.compile, backend="aot_eager"))


def sound(world: int = WORLD) -> dict[str, Case]:
    """Each is the same training in its class of precision, on any number of ranks."""
    cases = {}
    for precision in PRECISIONS:
        for engine in ("ddp", "fsdp2", "zero1", "zero2", "zero3") if world > 1 else ("ddp",):
            for micro_steps in (1, 2):
                cases[f"{engine}-{micro_steps}-{precision}"] = Case(engine, micro_steps, precision)
        for how in ("plain", "reentrant"):
            cases[f"{how}-{precision}"] = Case(precision=precision, net={"checkpointed": how})
        cases[f"compiled-{precision}"] = Case(precision=precision, call=COMPILED)
        if world > 1:
            cases[f"buckets-{precision}"] = Case(precision=precision, options={"bucket_cap_mb": 0.002})
            cases[f"zero2-buckets-{precision}"] = Case("zero2", 1, precision, options=BUCKETS)
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
    cause: str = ""  # a part of what is said of it


def hooked(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], None]:
    return lambda net: net.get_parameter(name).register_hook(change)


def flowing(name: str, times: float) -> Callable[[Any], None]:
    """What flows back into a module is so many times as much."""
    return lambda net: net.get_submodule(name).register_forward_hook(
        lambda *seen: seen[2].register_hook(lambda gradient: times * gradient) and None
    )


def then(**settings: Any) -> Callable[[Any, Any, int], None]:
    return lambda model, optimizer, step: [group.update(settings) for group in optimizer.param_groups]


def changed(name: str, times: float, ranks: range = range(9)) -> Callable[..., Any]:
    scale = times if RANK in ranks else 1.0
    return lambda model, *_: getattr(model, "module", model).get_parameter(name).data.mul_(scale)


def rounded(model: Any, *_: Any) -> None:
    for parameter in model.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        local.data.copy_(local.data.bfloat16())


KEPT: dict[str, torch.Tensor] = {}


def stale_shard(model: Any, *_: Any) -> None:
    shard = model.get_parameter(UP).to_local().data
    shard.copy_(KEPT.setdefault("shard", shard.clone()) if RANK else shard)


def add_old_gradients(model: Any, step: int) -> None:
    for name, parameter in model.named_parameters():
        if step:
            parameter.grad += KEPT[name]
        KEPT[name] = parameter.grad.clone()


DDP, DDP2, FSDP2, ZERO2, ZERO3 = Case(), Case(micro_steps=2), Case("fsdp2"), Case("zero2"), Case("zero3")
MASKED, CLIPPED, TIED = Case(net={"dropout": 0.1}), Case(clip=0.5), Case(net={"tied": True})
UP, DOWN, QKV, TOKENS = (f"{part}.weight" for part in ("blocks.0.up", "blocks.1.down", "blocks.0.qkv", "embedding"))
HALF = {"before_wrap": hooked(DOWN, lambda gradient: gradient / 2)}
LAST = {"before_wrap": hooked("head.weight", lambda got: got * torch.arange(got.numel()).view_as(got).ne(495))}
HALF_FLOW = {"before_wrap": flowing("blocks.1", 0.5)}
BUCKET = {"before_wrap": lambda net: [each.register_hook(torch.zeros_like) for each in list(net.parameters())[:6]]}
FROZEN = {"before_wrap": lambda net: net.blocks[0].up.weight.requires_grad_(False)}
EPSILON = {"before_wrap": lambda net: setattr(net.blocks[1].norm2, "eps", 1e-3)}


def with_rate_of_one_norm(net: Any) -> list[dict[str, Any]]:
    """Groups of parameters: the 16 weights of one norm have another rate than all others."""
    (norm, others) = ([], [])
    for name, parameter in net.named_parameters():
        (norm if name == "blocks.1.norm2.weight" else others).append(parameter)
    return [{"params": others}, {"params": norm, "lr": 0.7e-3}]


FAULTS = {
    "module_bypass": Fault(DDP, {"call": lambda model: model.module}, "replicas"),
    "no_sync_always": Fault(DDP2, {"syncs": False}, "replicas"),
    "drawn_anew": Fault(DDP, {"after_wrap": changed("blocks.0.up.bias", 2.0, range(1, 2))}, "replicas", "blocks.0.up"),
    "half_a_layer": Fault(DDP, HALF, "gradient", DOWN, 0.5),
    "half_a_layer_zero2": Fault(ZERO2, HALF, "gradient", DOWN, 0.5, "only this gradient"),
    "half_a_layer_zero3": Fault(ZERO3, HALF, "gradient", DOWN, 0.5),
    "a_layer_less": Fault(DDP, {"before_wrap": hooked(QKV, lambda got: 0.98 * got)}, "gradient", QKV, 0.98),
    "half_a_flow": Fault(DDP, HALF_FLOW, "gradient", "blocks.1.down", 0.5, "through this module"),
    "half_a_flow_zero3": Fault(ZERO3, HALF_FLOW, "gradient", "blocks.1.down", 0.5),
    "no_flow": Fault(DDP, {"before_wrap": flowing("blocks.0", 0.0)}, "gradient", "blocks.0.down", 0.0),
    "not_divided": Fault(DDP2, {"scale": lambda _: 2.0}, "gradient", "", 2.0, "factor is 2, the number of"),
    "divided_twice": Fault(DDP2, {"scale": lambda _: 0.5}, "gradient", "", 0.5),
    "divided_twice_zero2": Fault(Case("zero2", 2), {"scale": lambda _: 0.5}, "gradient", "", 0.5, "the factor is 1/2"),
    "summed_over_ranks": Fault(FSDP2, {"scale": lambda _: 2.0}, "gradient", "", 2.0),
    "still_scaled": Fault(DDP, {"scale": lambda _: 1024.0}, "gradient", "", 1024.0, "loss scale"),
    "a_micro_batch_lost": Fault(DDP2, {"scale": lambda number: float(number)}, "gradient", "head.weight"),
    "a_rank_lost": Fault(DDP, {"scale": lambda _: 1.0 - RANK}, "gradient", "head.weight"),
    "tied_twice": Fault(TIED, {"before_wrap": hooked(TOKENS, lambda got: 2 * got)}, "gradient", TOKENS, 2.0),
    "last_element_lost": Fault(DDP, LAST, "gradient", "head.weight"),
    "a_bucket_lost": Fault(DDP, BUCKET, "gradient", "", 0.0),
    "no_zero_grad": Fault(DDP, {"before_update": add_old_gradients}, "gradient", "head.weight"),
    "frozen": Fault(DDP, FROZEN, "gradient", UP),
    "frozen_zero3": Fault(ZERO3, FROZEN, "gradient", UP),
    "part_optimized": Fault(DDP, {"parameters": lambda net: net.blocks.parameters()}, "update", "", 0.0, "not have"),
    "part_optimized_fsdp2": Fault(FSDP2, {"parameters": lambda net: net.blocks[0].parameters()}, "update", "", 0.0),
    "rate_doubled": Fault(DDP, {"rate": 2e-3}, "update", "", 2.0),
    "rate_doubled_zero3": Fault(ZERO3, {"rate": 2e-3}, "update", "", 2.0),
    "rate_less": Fault(DDP, {"rate": 0.99e-3}, "update", "", 0.99),
    "rate_of_one_norm": Fault(DDP, {"parameters": with_rate_of_one_norm}, "update", "blocks.1.norm2", 0.7),
    "rate_of_one_norm_zero2": Fault(ZERO2, {"parameters": with_rate_of_one_norm}, "update", "blocks.1.norm2", 0.7),
    "rate_late": Fault(DDP, {"after_update": then(lr=5e-4)}, "update", "", 0.5),
    "other_betas": Fault(DDP, {"after_update": then(betas=(0.5, 0.999))}, "update"),
    "clipped_lower": Fault(CLIPPED, {"clip": 0.25}, "clipped", "", 0.5),
    "clipped_lower_zero2": Fault(replace(ZERO2, clip=0.5), {"clip": 0.25}, "clipped", "", 0.5),
    "clipped_lower_zero3": Fault(replace(ZERO3, clip=0.5), {"clip": 0.25}, "clipped", "", 0.5),
    "not_clipped": Fault(CLIPPED, {"clip": 0.0}, "clipped"),
    "masters_rounded": Fault(DDP, {"after_update": rounded}, "update"),
    "masters_rounded_fsdp2": Fault(FSDP2, {"after_update": rounded}, "update"),
    "stale_shard": Fault(FSDP2, {"after_update": stale_shard}, "update", UP),
    "other_masks": Fault(MASKED, {"seed": 1}, "forward", "blocks.0.dropout", cause="dropout masks"),
    "no_masks": Fault(MASKED, {"net": {}}, "forward", "blocks.0.dropout"),
    "other_epsilon": Fault(DDP, EPSILON, "forward", "blocks.1.norm2"),
    "other_epsilon_fsdp2": Fault(FSDP2, EPSILON, "forward", "blocks.1.norm2"),
    "other_start": Fault(DDP, {"before_wrap": changed(DOWN, 1.01)}, "weights", DOWN, 1.01),
    "other_batch": Fault(DDP, {"batch": lambda step, row: 5000 + 100 * step + row}, "batch", "different rows"),
    "other_order": Fault(DDP, {"batch": lambda step, row: 100 * step + ROWS - 1 - row}, "batch", "the same rows"),
}  # fmt: skip
# ZeRO's take longest to record; faults of these kinds are asked of other engines, and half a layer of ZeRO, too.
RARE = {name for name in FAULTS if name.endswith(("zero2", "zero3")) and not name.startswith("half_a_layer")}
# One of each kind of first difference, of each cause that is named, and of each engine.
QUICK = {
    "module_bypass", "drawn_anew", "half_a_layer", "half_a_layer_zero2", "half_a_flow", "not_divided", "still_scaled",
    "a_micro_batch_lost", "summed_over_ranks", "last_element_lost", "frozen", "part_optimized", "rate_doubled",
    "rate_of_one_norm", "clipped_lower", "stale_shard", "other_masks", "other_epsilon", "other_start", "other_batch",
    "other_order",
}  # fmt: skip
# Of the sound trainings, one of each engine and of each way to divide a step; the rest is trained for slower tests.
QUICK_SOUND = {
    "ddp-1-fp32", "ddp-2-fp32", "fsdp2-1-fp32", "zero2-1-fp32", "zero3-1-fp32", "reentrant-fp32", "buckets-fp32",
    "ddp-1-bf16", "zero2-1-bf16",
}  # fmt: skip


def counterpart(fault: str) -> str:
    """Return the name of the sound training with which a faulty one is compared."""
    sound_case = FAULTS[fault].sound
    same = (name for name, case in sound(world=2).items() if case == sound_case)  # faults are of two ranks
    return next(same, None) or next(f"beside-{name}" for name, other in FAULTS.items() if other.sound is sound_case)


def chosen(how: str) -> tuple[dict[str, Case], list[str]]:
    """Return the sound trainings and the faults of a set: quick, more than the quick ones, or the whole."""
    cases = sound()
    if how == "whole":
        return cases, [*FAULTS]
    if how == "quick":
        return {name: case for name, case in cases.items() if name in QUICK_SOUND}, sorted(QUICK)
    return (
        {name: case for name, case in cases.items() if name.endswith(("fp32", "1-bf16"))},
        [name for name in FAULTS if name not in QUICK | RARE],
    )


# ---------------------------------------------------------------- adapters


def lora(alpha: int, begins_with_zero: bool = True) -> Callable[[Any], Any]:
    def adapted(net: Any) -> Any:
        import peft

        torch.manual_seed(1)
        settings = {"lora_alpha": alpha, "init_lora_weights": begins_with_zero, "target_modules": ["qkv", "down"]}
        return peft.get_peft_model(net, peft.LoraConfig(r=4, **settings))

    return adapted


def trainable(net: Any) -> list[Any]:
    return [parameter for parameter in net.parameters() if parameter.requires_grad]


def adapters() -> dict[str, Case]:
    """Trainings of adapters under each engine: two equal ones, one with another scale, and one with another base."""
    cases = {}
    for engine in ("ddp", "zero3", "fsdp2"):
        case = Case(engine, adapted=lora(8), parameters=trainable, rate=1e-2)
        cases |= {
            engine: case,
            f"{engine}-repeated": case,
            f"{engine}-doubled": replace(case, adapted=lora(16)),
            f"{engine}-other-base": replace(case, before_wrap=changed("blocks.1.up.weight", 1.01)),
        }
    for name, alpha in (("trained", 8), ("trained-doubled", 16)):
        cases[f"ddp-{name}"] = replace(cases["ddp"], adapted=lora(alpha, begins_with_zero=False))
    return cases


# ---------------------------------------------------------------- how small a fault is seen, and what a recording costs


# By kind: beside what, and what is changed by so much of itself; of one element, of the gradient's norm.
LIMITS: dict[str, tuple[Case, Callable[[float], dict[str, Any]]]] = {
    "a module's output": (DDP, lambda size: {"before_wrap": lambda net: net.blocks[1].down.register_forward_hook(
        lambda *seen: (1 + size) * seen[2])}),
    "a parameter's gradient": (DDP, lambda size: {"before_wrap": hooked(DOWN, lambda got: (1 + size) * got)}),
    "one element of it": (DDP, lambda size: {"before_update": lambda model, _: (
        got := model.module.get_parameter(DOWN).grad.view(-1))[:1].sub_(size * got.norm())}),
    "one rank's shard of it": (FSDP2, lambda size: {"before_update": lambda model, _:
        model.get_parameter(UP).grad.to_local().mul_(1 + size * RANK)}),
    "clipping": (CLIPPED, lambda size: {"clip": 0.5 * (1 + size)}),
    "learning rate": (DDP, lambda size: {"rate": 1e-3 * (1 + size)}),
    "a weight after a step": (DDP, lambda size: {"after_update": changed(UP, 1 + size)}),
    "a weight of one rank": (DDP, lambda size: {"after_wrap": changed(UP, 1 + size, range(1, 2))}),
}  # fmt: skip


def limit(kind: str, precision: str, folder: str) -> float:
    """The smallest relative size of a fault, a power of 1/3, that is seen; by bisection."""
    sound, changes = LIMITS[kind]
    for noise in (None, 1, 2):
        replace(sound, precision=precision).train(folder, noise)
    seen, missed, power = -1, 20, 0
    while missed - seen > 1:
        replace(sound, precision=precision, **changes(3.0**-power)).train(f"{folder}-{power}")
        dist.barrier()
        result = compare(*(Recording.read(Path(path)) for path in (folder, f"{folder}-{power}")))
        seen, missed = (seen, power) if result.is_same else (power, missed)
        power = (seen + missed) // 2
    assert seen >= 0, f"{kind}: no size is seen"
    return 3.0**-seen


def costs(folder: str) -> dict[str, float]:
    """Times of a step, over those of steps that are not recorded in the same run: medians of rounds of ten steps."""
    ends: list[float] = []

    def after(model: Any, optimizer: Any, step: int) -> None:
        ends.append(time.perf_counter())
        if step % 10 == 5:  # three are recorded; the next reads the last weights, and writes
            diff.record(model, f"{folder}/{step}", noise=1 if step > 40 else None)

    Case(net={"width": 256}, length=128, steps=71, after_update=after).train()
    seconds = torch.tensor(ends, dtype=torch.float64).diff().view(7, 10)
    plain = seconds[:, 1:5].median(1).values
    ratios = (seconds[:, 5:9].sum(1) / plain - 1) / 3
    found = {"recorded": ratios[:4], "recorded_with_noise": ratios[4:], "others": plain[1:] / plain[0]}
    return {name: round(float(values.median()), 2) for name, values in found.items()}


def measure(file: str, folder: str) -> None:
    seen = {kind: {each: limit(kind, each, f"{folder}/{kind}-{each}") for each in PRECISIONS} for kind in LIMITS}
    facts = Recording.read(Path(folder, "clipping-fp32")).facts
    content = {name: facts[name] for name in ("made_by", "versions")}
    content |= {"smallest_seen": seen, "times_of_a_step": costs(f"{folder}/costs")}
    if not RANK:
        Path(file).write_text(json.dumps(content, indent=2) + "\n")


def main(*words: str) -> None:
    if WORLD == 1 and words[0] == "--limits":
        with tempfile.TemporaryDirectory() as folder:
            launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__, *words, folder]
            subprocess.run([sys.executable, *launch], env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)
        return
    torch.set_num_threads(1)
    extensions.use_own_folder()
    extensions.use_built()  # or DeepSpeed compiles for half a minute
    if WORLD > 1 and not dist.is_initialized():
        dist.init_process_group("gloo")
    if words[0] == "--limits":
        return measure(*words[1:])
    folder, how = words
    if how == "adapters":
        for name, case in adapters().items():
            for noise in (None, 1) if name == case.engine else (None,):
                case.train(f"{folder}/{name}", noise)
        print("TRAINED", file=sys.stderr, flush=True)
        return None
    cases, faults = chosen(how) if WORLD == 2 else (chosen(how)[0], [])
    others = {counterpart(name): FAULTS[name].sound for name in faults}
    num_steps = 3 if how == "quick" else STEPS
    for name, sound_case in (cases | others).items():
        case = replace(sound_case, steps=num_steps)
        recorded = case.train(f"{folder}/{name}")
        if name.endswith("1-fp32"):
            assert all(map(torch.equal, recorded, case.train())), name
        is_plain = sound_case == Case(precision=case.precision)
        for noise in (1, 2) if is_plain else (1,) if name in others else ():
            case.train(f"{folder}/{name}", noise)
    for name in faults:
        replace(FAULTS[name].sound, **FAULTS[name].changes, steps=num_steps).train(f"{folder}/{name}")
    print("TRAINED", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["."]))
