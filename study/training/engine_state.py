"""Save and restore what an engine needs to resume exactly where another process stopped, including two gaps.

According to its sources, DeepSpeed 0.19.8 does not save the moments that were swapped under NVMe offload, nor the
states of groups that are too small to be swapped. Its Adam for CPUs, resumed at step k, computes the powers of beta
with `pow`, where an uninterrupted run multiplies them step by step, which differs in the last bit.
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from study.engines.readback.facts import base_optimizer
from study.run import Run

MOMENTS = ("exp_avg", "exp_avg_sq")
LAYOUT = "layout.json"
STATES = "pytorch_model"  # DeepSpeed's folder, as accelerate names it


def kind_of(run: Run) -> str:
    """Name how a run's engine lays its states out: `plain`, `fsdp`, `zero3 offload` ...

    Between two runs of one kind they can be laid out anew for other ranks, but for `subgroups`.
    """
    strategy = run.strategy
    if strategy.offloads_to_nvme:
        return "subgroups"
    if strategy.zero_stage is None:
        return "fsdp" if strategy.distributed_type == "FSDP" else "plain"
    stage = {1: "1-2", 2: "1-2"}.get(strategy.zero_stage, strategy.zero_stage)
    return f"zero{stage}" + (" offload" if strategy.offload_optimizer_device == "cpu" else "")


def is_universal(kind: str) -> bool:
    """Whether other ranks take such states by way of DeepSpeed's universal checkpoint."""
    return kind.startswith(("zero1-2", "zero3"))


def save(accelerator: Accelerator, model: Any, optimizer: Any, run: Run, folder: Path) -> None:
    """Write model and optimizer into a folder. Collective."""
    if kind_of(run) == "subgroups":
        _save_subgroups(model, model.optimizer, folder, accelerator)
    else:
        accelerator.save_state(str(folder))


def load(accelerator: Accelerator, model: Any, optimizer: Any, run: Run, folder: Path, step: int, anew: bool) -> None:
    """Read model and optimizer from a folder, into an engine that has not stepped. Collective.

    `anew`: they are another run's, perhaps of other ranks.
    """
    if kind_of(run) == "subgroups":
        _load_subgroups(model.optimizer, folder, accelerator)
    elif anew and is_universal(kind_of(run)):
        groups = base_optimizer(optimizer).param_groups
        settings = [{name: value for name, value in group.items() if name != "params"} for group in groups]
        scratch = run.checkpoints_folder / "universal.part"
        if accelerator.is_main_process:
            _make_universal(folder / STATES, scratch / STATES)
        accelerator.wait_for_everyone()
        model.load_checkpoint(str(scratch), STATES)
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            shutil.rmtree(scratch)
        # Stage 3 gives the first group's settings to all, weight decay too, and one step counter (DeepSpeed 0.19.8).
        for group, own in zip(groups, settings, strict=True):
            group.update(own)
        for state in base_optimizer(optimizer).state.values():
            if isinstance(state["step"], torch.Tensor):
                state["step"] = state["step"].clone()
    else:
        accelerator.load_state(str(folder))
    if anew:
        accelerator.step = 0  # micro steps, which other ranks count otherwise
    if hasattr(base_optimizer(optimizer), "ds_opt_adam"):
        _count_to(step, base_optimizer(optimizer))


def expect_universal(accelerator: Accelerator) -> None:
    """Tell DeepSpeed, before it builds its engine, that it will load a universal checkpoint."""
    accelerator.state.deepspeed_plugin.deepspeed_config["checkpoint"] = {"load_universal": True}


def _make_universal(folder: Path, target: Path) -> None:
    """Convert a checkpoint of DeepSpeed's stages to its universal format, in this process; it prints as it goes."""
    from deepspeed.checkpoint import ds_to_universal

    target.parent.mkdir(parents=True, exist_ok=True)
    arguments = argparse.Namespace(
        input_folder=str(folder),
        output_folder=str(target),
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    with redirect_stdout(io.StringIO()):
        ds_to_universal.main(arguments)


def _count_to(step: int, adam: Any) -> None:
    """Let DeepSpeed's Adam on the CPU count its steps from 1 on, as it did, on one number that nobody needs."""
    group = adam.param_groups[0]
    number, gradient, first, second = (torch.zeros(1) for _ in range(4))
    for n in range(1, step + 1):
        settings = (group["lr"], *group["betas"], group["eps"], group["weight_decay"], group["bias_correction"])
        adam.ds_opt_adam.adam_update(adam.opt_id, n, *settings, number, gradient, first, second)


# ---------------------------------------------------------------- stage 3 under NVMe offload, one group after another


def _save_subgroups(engine: Any, optimizer: Any, folder: Path, accelerator: Accelerator) -> None:
    """Write masters and moments of every sub-group of this rank, and which parameters a group is made of."""
    folder.mkdir(parents=True, exist_ok=True)
    for index, master in enumerate(optimizer.fp32_partitioned_groups_flat):
        with _in_memory(optimizer, index):
            state = dict(optimizer.optimizer.state[master])
            tensors = {"master": master.data, **{name: state[name] for name in MOMENTS}}
            whole = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        path = subgroup_file(folder, accelerator.process_index, index)
        save_file(whole, path, metadata={"step": str(int(state["step"]))})
    if accelerator.is_main_process:
        names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
        layout = [
            [{"name": names[id(p)], "shape": list(p.ds_shape), "partition": p.ds_tensor.ds_numel} for p in group]
            for group in optimizer.fp16_groups
        ]
        (folder / LAYOUT).write_text(json.dumps(layout))


def _load_subgroups(optimizer: Any, folder: Path, accelerator: Accelerator) -> None:
    for index, master in enumerate(optimizer.fp32_partitioned_groups_flat):
        path = subgroup_file(folder, accelerator.process_index, index)
        tensors = load_file(path)
        with safe_open(path, "pt") as file:
            step = int(file.metadata()["step"])
        is_swapped = optimizer._swappable_optimizer_subgroup(index)
        if is_swapped:
            optimizer._optimizer_states_and_gradient_swap_in(index)
        master.data.copy_(tensors["master"])
        optimizer.optimizer.state[master] = {"step": step, **{name: tensors[name] for name in MOMENTS}}
        optimizer._reassign_or_swap_out_partitioned_parameters(index)
        if is_swapped:
            optimizer._optimizer_states_and_gradient_swap_out(index)
    optimizer.checkpoint_event_epilogue()  # gathers what is kept whole


@contextmanager
def _in_memory(optimizer: Any, index: int) -> Iterator[None]:
    """Have a sub-group's states in memory inside a `with` block; they are not written back."""
    if not optimizer._swappable_optimizer_subgroup(index):
        yield
        return
    optimizer._optimizer_states_and_gradient_swap_in(index)
    yield
    optimizer._release_swap_buffers(index)


def subgroup_file(folder: Path, rank: int | str, index: int) -> Path:
    return folder / f"rank-{rank}-group-{index}.safetensors"
