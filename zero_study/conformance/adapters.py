"""Build each engine around the small test model (`toy`), in the way that the engine's documentation shows.

All engines get the same batches, optimizer and clipping. The module needs only torch, DeepSpeed and accelerate, and
runs under any release of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.data import DataLoader

from ..engines.readback import full_tensors
from ..engines.readback.parameters import full_value
from ..engines.strategy_names import StrategyName
from . import optimizers, toy
from .cells import ADAMW, NUM_STEPS, Cell
from .optimizers import NotOffered

# The masters, if the engine shows them, and the weights used in computation, as full tensors by parameter name.
Values = tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]


class Engine(Protocol):
    """The interface of an engine that trains the test model in one configuration (cell).

    Losses are those of `toy.losses`, which add up to the mean of the batch.
    """

    model: Any
    optimizer: Any
    loss_factor: float  # on each loss before its backward pass, but not on the losses that `run` returns

    def run(self, tokens: torch.Tensor, is_last: bool) -> float:
        """Run the forward and backward pass of one micro batch, and return its share of the step's loss."""

    def step(self) -> float | None:
        """Clip, update, and return the gradient norm before clipping. None if the engine does not report it."""

    def values(self) -> Values:
        """Return the master weights and the weights after a step. Collective: every rank must call it."""

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path) -> None: ...

    def close(self) -> None: ...


def build(cell: Cell, scratch: Path) -> Engine:
    if cell.through_accelerate:
        return Accelerated(cell, scratch)
    if cell.engine == "ddp":
        return DDP(cell)
    if cell.engine == "fsdp2":
        return FSDP2(cell)
    return DeepSpeed(cell, scratch)


def _schedule(cell: Cell, optimizer: torch.optim.Optimizer, times: int = 1) -> Any:
    """Return the scheduler of a configuration, stepped `times` times per update. None for a constant learning rate."""
    if not cell.does("schedule"):
        return None
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: toy.RATES[count // times % NUM_STEPS])


def _backward(cell: Cell, model: Any, outputs: Any, tokens: torch.Tensor, times: float, backward: Any) -> float:
    """Call `backward` with each loss multiplied by `times`, and return the sum of the losses before multiplication.

    `model` is the toy itself, not the engine around it. `backward` is the engine's function for a backward pass.
    """
    shares = toy.losses(cell, model, outputs, tokens)
    for i, share in enumerate(shares, 1):
        backward(share * times, **({"retain_graph": True} if i < len(shares) else {}))
    return float(sum(share.detach() for share in shares))


class _Plain:
    """The common base of DDP and FSDP2: torch's optimizer and clipping, and a loss that is scaled by hand."""

    loss_factor = 1.0

    def __init__(self, cell: Cell) -> None:
        self.cell, self.toy = cell, toy.Toy(cell)
        self.model = self.wrapped()
        self.optimizer = optimizers.build(cell, self.model)
        self.scheduler = _schedule(cell, self.optimizer)

    def wrapped(self) -> Any:
        raise NotImplementedError

    def _forward_and_backward(self, tokens: torch.Tensor) -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.cell.precision == "autocast"):
            outputs = self.model(tokens[:, :-1])
        # The engine averages over ranks, but shares must be added.
        times = self.cell.num_ranks * self.loss_factor
        return _backward(self.cell, self.toy, outputs, tokens, times, torch.autograd.backward)

    def step(self) -> float | None:
        norm = nn.utils.clip_grad_norm_(optimizers.trained(self.model), self.cell.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.scheduler is not None:
            self.scheduler.step()
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

    def _save_schedule(self, folder: Path) -> None:
        if self.scheduler is not None:
            torch.save(self.scheduler.state_dict(), folder / f"schedule-{_rank()}.pt")

    def _load_schedule(self, folder: Path) -> None:
        if self.scheduler is not None:
            self.scheduler.load_state_dict(torch.load(folder / f"schedule-{_rank()}.pt", weights_only=True))

    def close(self) -> None:
        pass


class DDP(_Plain):
    def wrapped(self) -> Any:
        buckets: dict[str, Any] = {"bucket_cap_mb": 4 * toy.BUCKET / 2**20} if self.cell.does("buckets") else {}
        return nn.parallel.DistributedDataParallel(self.toy, **buckets)

    def run(self, tokens: torch.Tensor, is_last: bool) -> float:
        with contextlib.nullcontext() if is_last else self.model.no_sync():
            return self._forward_and_backward(tokens)

    def values(self) -> Values:
        return _of_plain(self.model.module)

    def save(self, folder: Path) -> None:
        torch.save([self.model.module.state_dict(), self.optimizer.state_dict()], folder / f"{_rank()}.pt")
        self._save_schedule(folder)

    def load(self, folder: Path) -> None:
        model, optimizer = torch.load(folder / f"{_rank()}.pt", weights_only=True)
        self.model.module.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        self._load_schedule(folder)


class FSDP2(_Plain):
    def wrapped(self) -> Any:
        from torch.distributed import device_mesh, fsdp

        mesh = device_mesh.init_device_mesh("cpu", (self.cell.num_ranks,))
        in_bf16 = self.cell.precision != "fp32"
        policy = fsdp.MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if in_bf16 else None, reduce_dtype=torch.float32 if in_bf16 else None
        )
        fsdp.fully_shard(self.toy.block, mesh=mesh, mp_policy=policy)
        fsdp.fully_shard(self.toy, mesh=mesh, mp_policy=policy)
        return self.toy

    def run(self, tokens: torch.Tensor, is_last: bool) -> float:
        self.model.set_requires_gradient_sync(is_last)
        return self._forward_and_backward(tokens)

    def values(self) -> Values:
        return _of_fsdp2(self.model, self.cell)

    def save(self, folder: Path) -> None:
        from torch.distributed.checkpoint import state_dict_saver

        state_dict_saver.save(self._state(), checkpoint_id=folder)
        self._save_schedule(folder)

    def load(self, folder: Path) -> None:
        from torch.distributed.checkpoint import state_dict, state_dict_loader

        state = self._state()
        state_dict_loader.load(state, checkpoint_id=folder)
        state_dict.set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        self._load_schedule(folder)

    def _state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint import state_dict

        model, optimizer = state_dict.get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}


class DeepSpeed:
    model: Any
    loss_factor = 1.0

    def __init__(self, cell: Cell, scratch: Path) -> None:
        import deepspeed

        self.cell = cell
        settings = config(cell, scratch)
        if "fp16" in settings:
            # DeepSpeed refuses fp16 if the CPU has no fast instructions for it. PyTorch then computes it slowly.
            from deepspeed.accelerator import get_accelerator

            get_accelerator().is_fp16_supported = lambda: True
        self.model = _toy_of_deepspeed(cell, settings)
        # The names must be read before the engine partitions the parameters.
        self.names = [name for name, _ in self.model.named_parameters()]
        if "optimizer" in settings:
            own: dict[str, Any] = {"model_parameters": optimizers.groups(cell, self.model)}
            if cell.does("schedule"):
                own["lr_scheduler"] = functools.partial(_schedule, cell)
        else:
            optimizer = optimizers.build(cell, self.model)
            own = {"optimizer": optimizer, "lr_scheduler": _schedule(cell, optimizer)}
        self.engine, self.optimizer, *_ = deepspeed.initialize(model=self.model, config=settings, **own)
        if "torch_autocast" in settings and not hasattr(self.engine, "torch_autocast_enabled"):
            raise NotOffered("this release has no torch_autocast")

    def run(self, tokens: torch.Tensor, is_last: bool) -> float:
        # The engine averages over ranks and micro batches, but shares must be added.
        times = self.cell.num_ranks * self.cell.accumulation * self.loss_factor
        share = _backward(self.cell, self.model, self.engine(tokens[:, :-1]), tokens, times, self.engine.backward)
        if not is_last:
            self.engine.step()
        return share

    def step(self) -> float | None:
        self.engine.step()
        norm = self.engine.get_global_grad_norm()
        return None if norm is None else float(norm)

    def values(self) -> Values:
        return _of_deepspeed(self.model, self.names)

    def save(self, folder: Path) -> None:
        self.engine.save_checkpoint(str(folder), tag="saved")

    def load(self, folder: Path) -> None:
        self.engine.load_checkpoint(str(folder), tag="saved")

    def close(self) -> None:
        self.engine.destroy()


class Accelerated:
    """An engine that is used through accelerate, with the training loop of accelerate's documentation.

    accelerate counts micro batches itself. `run` therefore also updates the weights, and `step` only returns the norm.
    """

    model: Any
    loss_factor = 1.0

    def __init__(self, cell: Cell, scratch: Path) -> None:
        self.cell = cell
        self.accelerator = _accelerator(cell, scratch)
        self.toy = _toy_of_deepspeed(cell, config(cell, scratch)) if cell.is_deepspeed else toy.Toy(cell)
        self.names = [name for name, _ in self.toy.named_parameters()]
        optimizer = self._optimizer()
        scheduler = _schedule(cell, optimizer, cell.num_ranks)  # accelerate steps a prepared scheduler once per rank
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(self.toy, optimizer, scheduler)
        self.norm: Any = None
        self.loaded: Any = None
        if cell.does("loader"):
            rows: Any = torch.cat([toy.tokens(cell, step) for step in range(NUM_STEPS)])
            size = cell.batch_size // (cell.num_ranks * cell.accumulation)
            self.loaded = iter(self.accelerator.prepare(DataLoader(rows, batch_size=size)))

    def _optimizer(self) -> Any:
        if optimizers.in_file(self.cell) is None:
            return optimizers.build(self.cell, self.toy)
        from accelerate.utils import DummyOptim  # stands for the optimizer of DeepSpeed's file

        return DummyOptim(optimizers.groups(self.cell, self.toy))

    def run(self, tokens: torch.Tensor, is_last: bool) -> float:
        tokens = tokens if self.loaded is None else next(self.loaded)
        with self.accelerator.accumulate(self.model):
            # Each prepared engine averages over ranks and micro batches, but shares must be added.
            times = self.cell.num_ranks * self.cell.accumulation * self.loss_factor
            share = _backward(self.cell, self.toy, self.model(tokens[:, :-1]), tokens, times, self.accelerator.backward)
            if self.accelerator.sync_gradients:
                # DeepSpeed has already clipped, as its configuration says. It only returns the norm here.
                self.norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.cell.max_norm)
            self.optimizer.step()
            if self.scheduler is not None:
                self.scheduler.step()
            self.optimizer.zero_grad()
        return share

    def step(self) -> float | None:
        norm = self.norm.full_tensor() if hasattr(self.norm, "full_tensor") else self.norm
        return None if norm is None else float(norm)

    def values(self) -> Values:
        if self.cell.is_deepspeed:
            return _of_deepspeed(self.toy, self.names)
        return _of_fsdp2(self.toy, self.cell) if self.cell.engine.endswith("fsdp2") else _of_plain(self.toy)

    def save(self, folder: Path) -> None:
        self.accelerator.save_state(str(folder))

    def load(self, folder: Path) -> None:
        self.accelerator.load_state(str(folder))

    def close(self) -> None:
        from accelerate.state import AcceleratorState, GradientState

        self.accelerator.free_memory()
        # Outside of this test another process would resume the checkpoint, so accelerate's global state is reset.
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def _toy_of_deepspeed(cell: Cell, settings: dict[str, Any]) -> toy.Toy:
    """Build the test model, under deepspeed.zero.Init if the configuration says so."""
    if not cell.does("zero_init"):
        return toy.Toy(cell)
    import deepspeed

    with deepspeed.zero.Init(config_dict_or_path=settings):
        model = toy.Toy(cell)
    with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
        model.fill()
    return model


def _accelerator(cell: Cell, scratch: Path) -> Any:
    """Return the Accelerator of a configuration, on a CPU. Raises NotOffered if this release has no FSDP2."""
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin, InitProcessGroupKwargs

    settings: dict[str, Any] = {
        "mixed_precision": "no" if cell.precision == "fp32" else "bf16",
        "gradient_accumulation_steps": cell.accumulation,
    }
    if cell.is_deepspeed:
        # Without a GPU, the backend must be named. With cpu=True, accelerate would drop DeepSpeed.
        return Accelerator(
            deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config(cell, scratch), zero3_init_flag=False),
            kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
            **settings,
        )
    if not cell.engine.endswith("fsdp2"):
        return Accelerator(cpu=True, **settings)
    plugin = _fsdp2_plugin()
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, **settings)
    _shard_on_cpu(accelerator, plugin)
    return accelerator


def _fsdp2_plugin() -> Any:
    from accelerate.utils import FullyShardedDataParallelPlugin

    if "fsdp_version" not in {field.name for field in dataclasses.fields(FullyShardedDataParallelPlugin)}:
        raise NotOffered("this release has no FSDP2")
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        state_dict_type="SHARDED_STATE_DICT",
        cpu_ram_efficient_loading=False,  # which is for models that transformers loads
    )


def _shard_on_cpu(accelerator: Any, plugin: Any) -> None:
    """Set what accelerate sets on a GPU. On a CPU, it silently drops FSDP during initialization."""
    from accelerate import DistributedType, PartialState

    # Every prepared optimizer makes a new AcceleratorState, which copies the type from PartialState.
    PartialState().distributed_type = accelerator.state.distributed_type = DistributedType.FSDP
    if accelerator.mixed_precision != "no":
        plugin.set_mixed_precision(accelerator.mixed_precision)
    accelerator.state.fsdp_plugin = plugin


# ---------------------------------------------------------------- masters and weights of each engine


def _of_plain(model: nn.Module) -> Values:
    return {}, {name: parameter.detach() for name, parameter in model.named_parameters()}


def _of_fsdp2(model: Any, cell: Cell) -> Values:
    masters = {name: full_value(parameter) for name, parameter in model.named_parameters()}
    if cell.precision == "fp32":
        return {}, masters
    return masters, {name: value.bfloat16() for name, value in masters.items()}


def _of_deepspeed(model: nn.Module, names: Sequence[str]) -> Values:
    """Return the master weights and the weights of a DeepSpeed engine.

    `names` are the names of the parameters, which were read before the engine partitioned them.
    """
    masters, weights = {}, {}
    for name, parameter in zip(names, model.parameters(), strict=True):
        if (master := full_tensors.master(parameter)) is not None:
            masters[name] = master
        weights[name] = full_value(parameter)
    return masters, weights


# ---------------------------------------------------------------- settings


def config(cell: Cell, scratch: Path) -> dict[str, Any]:
    """Return the content of the DeepSpeed JSON for a tested configuration."""
    name = StrategyName.parse(cell.engine.removeprefix("accelerate_"))
    zero: dict[str, Any] = {"stage": name.zero_stage}
    if zero["stage"] == 3:
        zero["stage3_param_persistence_threshold"] = 0  # otherwise no parameter of the toy would be sharded
        if cell.optimizer == "muon":
            zero["reduce_scatter"] = False  # DeepSpeed refuses Muon at stage 3 otherwise
    if cell.does("buckets"):
        sizes = ("reduce_bucket_size", "stage3_prefetch_bucket_size" if zero["stage"] == 3 else "allgather_bucket_size")
        zero |= dict.fromkeys((*sizes, "sub_group_size"), toy.BUCKET)
    if name.offload == "cpu":
        zero["offload_optimizer"] = {"device": "cpu"}
        if zero["stage"] == 3:
            zero["offload_param"] = {"device": "cpu"}
    if name.offload == "nvme":
        zero["offload_optimizer"] = {"device": "nvme", "nvme_path": str(scratch)}
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,  # only bookkeeping, because the script draws its batches itself
        "gradient_accumulation_steps": cell.accumulation,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        # Without this key, some releases clip at 1.0.
        "gradient_clipping": 0.0 if math.isinf(cell.max_norm) else cell.max_norm,
    }
    if cell.does("clipping_absent"):
        del settings["gradient_clipping"]
    if (optimizer := optimizers.in_file(cell)) is not None:
        settings["optimizer"] = optimizer
    if name.offload != "none" and cell.optimizer != ADAMW:
        settings["zero_force_ds_cpu_optimizer"] = False  # otherwise only DeepSpeed's Adam is accepted
    if cell.precision.startswith("autocast"):
        dtype = "float16" if cell.precision == "autocast_fp16" else "bfloat16"
        settings["torch_autocast"] = {"enabled": True, "dtype": dtype}
    if cell.precision == "fp16":
        settings["fp16"] = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}
        if cell.does("scale_grows"):
            settings["fp16"]["loss_scale_window"] = 3
    if cell.precision.startswith("bf16"):
        settings["bf16"] = {"enabled": True}
    if cell.precision == "bf16_fp32_sum":
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    return settings


def _rank() -> int:
    return torch.distributed.get_rank()
