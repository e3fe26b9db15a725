"""How is the toy given to each engine? As its documentation has it, with one batch, optimizer and clipping for all.

Only torch and DeepSpeed, of whatever release is installed.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from study.conformance import toy
from study.conformance.cells import MAX_NORM, Cell


class NotOffered(Exception):
    """This release has no such way of training."""


class Engine(Protocol):
    """What a cell needs of an engine. Losses are those of `toy.losses`: shares of the batch's mean."""

    model: Any

    def run(self, tokens: torch.Tensor, is_last: bool) -> float:
        """Forward and backward passes of one micro batch; return its share of the loss."""

    def step(self) -> float | None:
        """Clip, update, and return the gradient's norm before clipping, as far as the engine tells it."""

    def values(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Masters, where the engine shows them, and the weights that it computes with, whole, by their names."""

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path) -> None: ...

    def close(self) -> None: ...


def build(cell: Cell, scratch: Path) -> Engine:
    if cell.engine == "ddp":
        return DDP(cell)
    if cell.engine == "fsdp2":
        return FSDP2(cell)
    return DeepSpeed(cell, scratch)


def _adamw(cell: Cell, model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(_trained(model), **_settings(cell))


def _trained(model: Any) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _settings(cell: Cell) -> dict[str, Any]:
    return {
        "lr": toy.learning_rate(cell),
        "betas": toy.BETAS,
        "eps": toy.EPSILON,
        "weight_decay": toy.WEIGHT_DECAY,
    }


class _Plain:
    """What DDP and FSDP2 share: torch's optimizer and clipping, a loss that is divided by hand."""

    model: Any
    optimizer: torch.optim.Optimizer

    def __init__(self, cell: Cell) -> None:
        self.cell = cell

    def _forward_and_backward(self, tokens: torch.Tensor) -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.cell.precision == "autocast"):
            outputs = self.model(tokens[:, :-1])
        shares = toy.losses(self.cell, outputs, tokens[:, 1:])
        for i, share in enumerate(shares, 1):
            # The engine takes the mean over ranks, where shares are to be added.
            torch.autograd.backward(share * self.cell.num_ranks, retain_graph=i < len(shares))
        return float(sum(share.detach() for share in shares))

    def step(self) -> float | None:
        max_norm = MAX_NORM if self.cell.clipping else float("inf")
        norm = nn.utils.clip_grad_norm_(_trained(self.model), max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

    def close(self) -> None:
        pass


class DDP(_Plain):
    def __init__(self, cell: Cell) -> None:
        super().__init__(cell)
        self.model = nn.parallel.DistributedDataParallel(toy.Toy(cell))
        self.optimizer = _adamw(cell, self.model)

    def run(self, tokens: torch.Tensor, is_last: bool) -> float:
        with contextlib.nullcontext() if is_last else self.model.no_sync():
            return self._forward_and_backward(tokens)

    def values(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        return {}, {name: parameter.detach() for name, parameter in self.model.module.named_parameters()}

    def save(self, folder: Path) -> None:
        torch.save([self.model.module.state_dict(), self.optimizer.state_dict()], folder / f"{_rank()}.pt")

    def load(self, folder: Path) -> None:
        model, optimizer = torch.load(folder / f"{_rank()}.pt", weights_only=True)
        self.model.module.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)


class FSDP2(_Plain):
    def __init__(self, cell: Cell) -> None:
        from torch.distributed import device_mesh, fsdp

        super().__init__(cell)
        mesh = device_mesh.init_device_mesh("cpu", (cell.num_ranks,))
        in_bf16 = cell.precision != "fp32"
        policy = fsdp.MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if in_bf16 else None, reduce_dtype=torch.float32 if in_bf16 else None
        )
        self.model = toy.Toy(cell)
        fsdp.fully_shard(self.model.block, mesh=mesh, mp_policy=policy)
        fsdp.fully_shard(self.model, mesh=mesh, mp_policy=policy)
        self.optimizer = _adamw(cell, self.model)

    def run(self, tokens: torch.Tensor, is_last: bool) -> float:
        self.model.set_requires_gradient_sync(is_last)
        return self._forward_and_backward(tokens)

    def values(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        masters = {name: parameter.detach().full_tensor() for name, parameter in self.model.named_parameters()}
        if self.cell.precision == "fp32":
            return {}, masters
        return masters, {name: value.bfloat16() for name, value in masters.items()}

    def save(self, folder: Path) -> None:
        from torch.distributed.checkpoint import state_dict_saver

        state_dict_saver.save(self._state(), checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        from torch.distributed.checkpoint import state_dict, state_dict_loader

        state = self._state()
        state_dict_loader.load(state, checkpoint_id=folder)
        state_dict.set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )

    def _state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint import state_dict

        model, optimizer = state_dict.get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}


class DeepSpeed:
    model: Any

    def __init__(self, cell: Cell, scratch: Path) -> None:
        import deepspeed

        self.cell = cell
        self.model = toy.Toy(cell)
        # Read before the engine takes the parameters apart.
        self.names = [name for name, _ in self.model.named_parameters()]
        if "offload" in cell.engine:
            from deepspeed.ops.adam import DeepSpeedCPUAdam

            optimizer = DeepSpeedCPUAdam(_trained(self.model), adamw_mode=True, **_settings(cell))
        else:
            optimizer = _adamw(cell, self.model)
        self.engine, *_ = deepspeed.initialize(model=self.model, optimizer=optimizer, config=config(cell, scratch))
        if cell.precision == "autocast" and not hasattr(self.engine, "torch_autocast_enabled"):
            raise NotOffered("this release has no torch_autocast")

    def run(self, tokens: torch.Tensor, is_last: bool) -> float:
        outputs = self.engine(tokens[:, :-1])
        shares = toy.losses(self.cell, outputs, tokens[:, 1:])
        for i, share in enumerate(shares, 1):
            # The engine takes the mean over ranks and over micro batches, where shares are to be added.
            loss = share * (self.cell.num_ranks * self.cell.accumulation)
            self.engine.backward(loss, **({"retain_graph": True} if i < len(shares) else {}))
        if not is_last:
            self.engine.step()
        return float(sum(share.detach() for share in shares))

    def step(self) -> float | None:
        self.engine.step()
        norm = self.engine.get_global_grad_norm()
        return None if norm is None else float(norm)

    def values(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        import deepspeed
        from deepspeed.utils import safe_get_full_fp32_param

        masters, weights = {}, {}
        for name, parameter in zip(self.names, self.model.parameters(), strict=True):
            if parameter.requires_grad and (master := safe_get_full_fp32_param(parameter)) is not None:
                masters[name] = master.detach().clone()
            gathered = (
                deepspeed.zero.GatheredParameters([parameter])
                if hasattr(parameter, "ds_id")
                else contextlib.nullcontext()
            )
            with gathered:
                weights[name] = parameter.detach().clone()
        return masters, weights

    def save(self, folder: Path) -> None:
        self.engine.save_checkpoint(str(folder), tag="saved")

    def load(self, folder: Path) -> None:
        self.engine.load_checkpoint(str(folder), tag="saved")

    def close(self) -> None:
        self.engine.destroy()


def config(cell: Cell, scratch: Path) -> dict[str, Any]:
    """The DeepSpeed JSON of a cell."""
    zero: dict[str, Any] = {"stage": int(cell.engine[len("zero")])}
    if zero["stage"] == 3:
        zero["stage3_param_persistence_threshold"] = 0  # or no parameter of the toy would be sharded
    if cell.engine.endswith("_cpu_offload"):
        zero["offload_optimizer"] = {"device": "cpu"}
        if zero["stage"] == 3:
            zero["offload_param"] = {"device": "cpu"}
    if cell.engine.endswith("_nvme_offload"):
        zero["offload_optimizer"] = {"device": "nvme", "nvme_path": str(scratch)}
    written: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,  # only bookkeeping where the script draws its batches itself
        "gradient_accumulation_steps": cell.accumulation,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": MAX_NORM if cell.clipping else 0.0,  # where nothing stands, some releases clip at 1.0
    }
    if cell.precision == "autocast":
        written["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
    if cell.precision.startswith("bf16"):
        written["bf16"] = {"enabled": True}
    if cell.precision == "bf16_fp32_sum":
        written["data_types"] = {"grad_accum_dtype": "fp32"}
    return written


def _rank() -> int:
    return torch.distributed.get_rank()
