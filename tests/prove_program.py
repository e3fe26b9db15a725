"""Trainings of two ranks that are wrong on purpose, and sound ones, each with a proof of its own: test_prove.py.

Each is trained without a proof first, and is to end with the same weights, bit by bit.
"""

from __future__ import annotations

import copy
import functools
import importlib
import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import all_reduce
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from zero_study import prove

Made = tuple[Any, Any]  # what is called, and its optimizer
STEPS = 4


def net(seed: int = 0, norm: bool = False) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16) if norm else nn.GELU(), nn.Linear(16, 4))


def adam(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), **options)


def ddp(model: nn.Module | None = None, optimizer: Any = None, **options: Any) -> Made:
    wrapped = DistributedDataParallel(model or net(), **options)
    return wrapped, optimizer or adam(wrapped)


def sharded(is_late: bool, **options: Any) -> Made:
    model = net()
    early = adam(model)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return model, early if is_late else adam(model, **options)


def drawn_anew() -> Made:
    model, optimizer = ddp()
    torch.manual_seed(dist.get_rank())
    model.module[0].reset_parameters()
    return model, optimizer


def with_zero_gradients() -> Made:
    model = net()
    for parameter in model.parameters():
        parameter.register_hook(torch.zeros_like)
    return ddp(model)


def replaced() -> Made:
    model = net()
    optimizer = adam(model)
    model[2] = nn.Linear(16, 4)
    return ddp(model, optimizer)


def frozen() -> Made:
    model = net()
    model[0].requires_grad_(False)
    return ddp(model)


def redundant() -> Made:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # which warns of torch.jit

    model = DistributedDataParallel(net())
    return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)


def hooked() -> Made:
    model, optimizer = ddp()
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.5)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return model, optimizer


def served() -> Made:
    model, optimizer = plain()
    optimizer.register_step_post_hook(lambda *_: [dist.broadcast(p.data, 0) for p in model.parameters()])
    return model, optimizer


def muon_sharded() -> Made:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 17, bias=False), nn.GELU(), nn.Linear(17, 4, bias=False))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return model, torch.optim.Muon(model.parameters(), 0.02)


class BySize(torch.optim.SGD):
    """Keeps its momentum in 16 bits if a shard is large, as torchao's low-bit optimizers do (pytorch/ao #4912)."""

    def _new_buffer(self, parameter: Any, signed: bool) -> torch.Tensor:
        shard = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        return torch.zeros_like(shard, dtype=torch.bfloat16 if shard.numel() > 36 else torch.float32)

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            buffer = self.state[parameter].setdefault("buffer", self._new_buffer(parameter, True))
            gradient = parameter.grad.to_local()
            buffer.add_(gradient.to(buffer.dtype))
            parameter.detach().to_local().sub_(buffer.to(gradient.dtype), alpha=0.01)


def by_size(rows: int) -> Made:
    """A shard has 8 elements per row: 40 and 32 for 9 rows, 32 and 32 for 8 rows."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, rows, bias=False), nn.Linear(rows, 1, bias=False))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return model, BySize(model.parameters(), 0.01)


def plain(seed: int = 0) -> Made:
    model = net(seed)
    return model, adam(model)


def clip(model: Any, at: float = 0.05) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), at)


def set_aside(model: Any) -> None:
    """As in private training: each sample's gradients are clipped, and added up elsewhere."""
    clip(model)
    for parameter in model.parameters():
        parameter.kept = getattr(parameter, "kept", 0) + parameter.grad
        parameter.grad = None


def put_together(model: Any, optimizer: Any) -> None:
    for parameter in model.parameters():
        parameter.grad = parameter.__dict__.pop("kept")
    average(model, optimizer)


def clip_by_own_norm(model: Any, optimizer: Any) -> None:
    """As some scripts do under FSDP2: by the norm of this rank's shards, which is another on each."""
    shards = [p.grad.to_local() for p in model.parameters()]
    norm = torch.stack([shard.norm() for shard in shards]).norm()
    for shard in shards:
        shard.mul_(0.01 / norm)


def erase(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    clip(model)


def average(model: Any, optimizer: Any) -> None:
    for parameter in model.parameters():
        all_reduce(parameter.grad)  # an imported name


def send_on(model: Any, optimizer: Any) -> None:
    sent = dist.isend(torch.ones(4), 1 - dist.get_rank())
    dist.recv(torch.ones(4))
    sent.wait()


def batch(rank: int, step: int, micro_step: int) -> torch.Tensor:
    seed = 100 * rank + 10 * step + micro_step
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))


def train(
    make: Callable[[], Made],
    output: str | None,
    *,
    call: Callable[[Any, int], Any] = lambda model, micro_step: model,
    batch: Callable[[int, int, int], torch.Tensor] = batch,
    micro_steps: int = 1,
    no_sync: Callable[[int], bool] = lambda micro_step: False,
    zero_grad: bool = True,
    after: Callable[[Any, Any], Any] = lambda model, optimizer: None,
    after_each: Callable[[Any], Any] = lambda model: None,
    scaler: str = "",
    evaluates: bool = False,
    strict: bool = False,
    closure: bool = False,
) -> list[torch.Tensor]:
    """Return what this rank holds of the weights.

    `after`: a step's last backward pass, within it with `closure`. `after_each`: each of them.
    """
    model, optimizer = make()
    scaling = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=bool(scaler))
    if output:
        prove.watch(model, optimizer, output=output, strict=strict)

    def run(step: int, micro_step: int) -> None:
        with model.no_sync() if no_sync(micro_step) else nullcontext():
            loss = call(model, micro_step)(batch(dist.get_rank(), step, micro_step)).pow(2).mean()
            scaling.scale(loss).backward()
        after_each(model)
        if micro_step == micro_steps - 1:
            after(model, optimizer)

    for step in range(STEPS):
        for micro_step in range(micro_steps - closure):
            run(step, micro_step)
        if closure:
            optimizer.step(functools.partial(run, step, micro_steps - 1))
            optimizer.zero_grad()
            continue
        if scaler == "right":
            scaling.unscale_(optimizer)
        if scaler in ("right", "clipped"):
            clip(model)
        (optimizer.step if scaler == "beside" else functools.partial(scaling.step, optimizer))()
        if scaler != "beside":
            scaling.update()
        if zero_grad:
            optimizer.zero_grad()
        if evaluates and step == 1 and not dist.get_rank():
            model.eval()
            with torch.no_grad():
                model(torch.ones(1, 8))
            model.train()
    return [p.to_local() if hasattr(p, "to_local") else p.detach() for p in model.parameters()]


def train_within(output: str | None) -> list[torch.Tensor]:
    """Steps are taken by hand within DDP's forward pass, as in Lightning."""
    model, optimizer = ddp()

    def step(module: nn.Module, inputs: Any, outputs: torch.Tensor) -> None:
        model.reducer.prepare_for_backward([])
        outputs.pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    model.module.register_forward_hook(step)
    if output:
        prove.watch(model, optimizer, output=output)
    with model.no_sync():
        for number in range(STEPS):
            model(batch(dist.get_rank(), number, 0))
    return [p.detach() for p in model.parameters()]


def train_by_part(output: str | None) -> list[torch.Tensor]:
    """Each part has a loss and a norm of its own: no backward call adds to what is clipped already."""
    model, optimizer = plain()
    if output:
        prove.watch(model, optimizer, output=output)
    for number in range(STEPS):
        inputs = batch(dist.get_rank(), number, 0)
        for part, given in ((model[0], inputs), (model[2], torch.cat([inputs, inputs], 1))):
            part(given).pow(2).mean().backward()
            clip(part)
        average(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


def train_by_shard(output: str | None) -> list[torch.Tensor]:
    """Each rank orthogonalizes its own shard of Muon's matrices."""

    def orthogonalize(matrix: Any, *how: Any) -> Any:
        shard = call(matrix.to_local(), *how)
        return DTensor.from_local(
            shard, matrix.device_mesh, matrix.placements, shape=matrix.shape, stride=matrix.stride()
        )

    module = importlib.import_module("torch.optim._muon")
    call = module._zeropower_via_newtonschulz
    with mock.patch.object(module, "_zeropower_via_newtonschulz", orthogonalize):
        return train(muon_sharded, output)


CASES: dict[str, dict[str, Any]] = {
    "module_bypass": {"make": ddp, "call": lambda model, _: model.module},
    "no_sync_always": {"make": ddp, "micro_steps": 2, "no_sync": lambda _: True},
    "no_sync_at_the_wrong_one": {"make": ddp, "micro_steps": 2, "no_sync": lambda micro_step: micro_step == 1},
    "half_a_bypass": {"make": ddp, "micro_steps": 2, "call": lambda model, number: model.module if number else model},
    "drawn_anew": {"make": drawn_anew},
    "no_sampler": {"make": ddp, "batch": lambda _, *steps: batch(0, *steps)},
    "no_zero_grad": {"make": ddp, "zero_grad": False},
    "clipped_while_scaled": {"make": ddp, "scaler": "clipped"},
    "stepped_beside_the_scaler": {"make": ddp, "scaler": "beside"},
    "clipped_too_early": {"make": ddp, "micro_steps": 2, "call": lambda model, _: clip(model) or model},
    "clipped_each_time": {"make": ddp, "micro_steps": 2, "after_each": clip},
    "erased": {"make": ddp, "after": erase},
    "rate_of_zero": {"make": lambda: ddp(model := net(), torch.optim.SGD(model.parameters(), 0.0))},
    "rates_by_rank": {"make": lambda: sharded(False, lr=1e-3 + dist.get_rank())},
    "infinite_batch": {"make": ddp, "batch": lambda *steps: batch(*steps) / 0},
    "clipped_by_own_norm": {"make": lambda: sharded(False), "after": clip_by_own_norm},
    "optimizer_before_sharding": {"make": lambda: sharded(True)},
    "optimizer_of_a_copy": {"make": lambda: ddp(optimizer=adam(copy.deepcopy(net())))},
    "optimizer_of_a_part": {"make": lambda: ddp(model := net(), adam(model[2]))},
    "layer_replaced": {"make": replaced},
    "zero_gradients": {"make": with_zero_gradients},
    "two_plain_models": {"make": plain},
    "by_hand_but_drawn_apart": {"make": lambda: plain(dist.get_rank()), "after": average},
    "orthogonalized_by_shard": {"train": train_by_shard},
    "states_of_ranks_differ": {"make": lambda: by_size(9)},
    "states_by_size": {"make": lambda: by_size(8)},
    "muon_sharded": {"make": muon_sharded},
    "ddp": {"make": ddp},
    "batch_norm": {"make": lambda: ddp(net(norm=True))},
    "accumulation": {"make": ddp, "micro_steps": 2, "no_sync": lambda micro_step: micro_step == 0},
    "clipped_once": {"make": ddp, "micro_steps": 2, "after": lambda model, _: clip(model)},
    "clipped_each_time_without_effect": {"make": ddp, "micro_steps": 2, "after_each": lambda model: clip(model, 1e6)},
    "clipped_by_part": {"train": train_by_part},
    "clipped_by_sample": {"make": plain, "micro_steps": 2, "after_each": set_aside, "after": put_together},
    "by_hand": {"make": plain, "after": average},
    "by_hand_under_ddp": {"make": ddp, "no_sync": lambda _: True, "after": average},
    "parts_of_a_pipeline": {"make": lambda: plain(dist.get_rank()), "after": send_on},
    "comm_hook": {"make": hooked},
    "sent_by_rank_0": {"make": served},
    "scaler": {"make": ddp, "scaler": "right"},
    "frozen": {"make": frozen},
    "made_up_batch": {"make": ddp, "batch": lambda *_: torch.ones(4, 8)},
    "fsdp2": {"make": lambda: sharded(False)},
    "fsdp2_clipped": {"make": lambda: sharded(False), "after": lambda model, _: clip(model)},
    "fsdp1": {"make": lambda: (model := FullyShardedDataParallel(net(), device_id=torch.device("cpu")), adam(model))},
    "zero_redundancy": {"make": redundant},
    "around_ddp": {"make": lambda: (model := nn.Sequential(DistributedDataParallel(net())), adam(model))},
    "one_rank_evaluates": {"make": ddp, "evaluates": True},
    "closure": {"make": ddp, "micro_steps": 2, "after": lambda model, _: clip(model), "closure": True},
    "within": {"train": train_within},
}


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for name, case in CASES.items():
        how = case.pop("train", train)
        without, proven = (how(output=output, **case) for output in (None, f"{name}.json"))
        assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(without, proven, strict=True)), name
        dist.barrier()
    try:
        train(ddp, "strict.json", call=lambda model, _: model.module, strict=True)
    except prove.TrainingFault as error:
        Path(f"raised-{dist.get_rank()}.json").write_text(json.dumps(str(error)))
    print("TRAINED", file=sys.stderr, flush=True)
