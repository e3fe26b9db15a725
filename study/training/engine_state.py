"""Save and restore the state that an engine needs to resume exactly where another process stopped.

Two gaps of DeepSpeed 0.19.8, found in its source code, are closed here.

* Under NVMe offload, DeepSpeed saves neither the moments that were swapped nor the states of the groups that are too
  small to be swapped.
* When DeepSpeed's CPU Adam resumes at step k, it computes the powers of beta with `pow`. A run without interruption
  multiplies them step by step, which differs in the last bit.
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

from study.run import Run
from zero_study.engines.readback.facts import base_optimizer
from zero_study.engines.readback.parameters import whole_shape

MOMENTS = ("exp_avg", "exp_avg_sq")
LAYOUT = "layout.json"
STATES = "pytorch_model"  # accelerate's name for DeepSpeed's folder


def kind_of(run: Run) -> str:
    """Return the name of the layout in which the engine saves its states, such as `plain`, `fsdp` or `zero3 offload`.

    Two runs with the same layout can use each other's states, even with different numbers of ranks. The exception is
    `subgroups`.
    """
    strategy = run.strategy
    if strategy.offloads_to_nvme:
        return "subgroups"
    if strategy.zero_stage is None:
        return "fsdp" if strategy.distributed_type == "FSDP" else "plain"
    stage = {1: "1-2", 2: "1-2"}.get(strategy.zero_stage, strategy.zero_stage)
    return f"zero{stage}" + (" offload" if strategy.offload_optimizer_device == "cpu" else "")


def is_universal(kind: str) -> bool:
    """Return whether another number of ranks can load this layout, through DeepSpeed's universal checkpoint."""
    return kind.startswith(("zero1-2", "zero3"))


def save(accelerator: Accelerator, model: Any, optimizer: Any, run: Run, folder: Path) -> None:
    """Write the states of model and optimizer to a folder. Collective: every rank must call this."""
    if kind_of(run) == "subgroups":
        _save_subgroups(model, model.optimizer, folder, accelerator)
    else:
        accelerator.save_state(str(folder))


def load(accelerator: Accelerator, model: Any, optimizer: Any, run: Run, folder: Path, step: int, anew: bool) -> None:
    """Load the states of model and optimizer from a folder into an engine that has not made a step.

    `anew` is True if the states belong to another run, which may have had other ranks. Collective: every rank must call
    this.
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
        # DeepSpeed 0.19.8, stage 3, gives all groups the settings of the first one, including its weight decay. It also
        # gives all parameters the same step counter.
        for group, own in zip(groups, settings, strict=True):
            group.update(own)
        for state in base_optimizer(optimizer).state.values():
            if isinstance(state["step"], torch.Tensor):
                state["step"] = state["step"].clone()
    else:
        accelerator.load_state(str(folder))
    if anew:
        accelerator.step = 0  # micro steps, whose number depends on the number of ranks
    if hasattr(base_optimizer(optimizer), "ds_opt_adam"):
        _count_to(step, base_optimizer(optimizer))


def expect_universal(accelerator: Accelerator) -> None:
    """Make DeepSpeed expect a universal checkpoint. Call this before DeepSpeed builds its engine."""
    accelerator.state.deepspeed_plugin.deepspeed_config["checkpoint"] = {"load_universal": True}


def _make_universal(folder: Path, target: Path) -> None:
    """Convert a checkpoint of a ZeRO stage to DeepSpeed's universal format. The converter's output is not printed."""
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
    """Advance the step counter of DeepSpeed's CPU Adam from 1 to `step`, by updates of a dummy parameter.

    The counter then has exactly the state that it has in a run without interruption.
    """
    group = adam.param_groups[0]
    number, gradient, first, second = (torch.zeros(1) for _ in range(4))
    for n in range(1, step + 1):
        settings = (group["lr"], *group["betas"], group["eps"], group["weight_decay"], group["bias_correction"])
        adam.ds_opt_adam.adam_update(adam.opt_id, n, *settings, number, gradient, first, second)


# ---------------------------------------------------------------- stage 3 under NVMe offload, one group after another


def _save_subgroups(engine: Any, optimizer: Any, folder: Path, accelerator: Accelerator) -> None:
    """Write the master weights and moments of each of this rank's sub-groups, and the parameters in each sub-group."""
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
            [{"name": names[id(p)], "shape": list(whole_shape(p)), "partition": p.ds_tensor.ds_numel} for p in group]
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
    optimizer.checkpoint_event_epilogue()  # gathers the parameters that are kept unsharded


@contextmanager
def _in_memory(optimizer: Any, index: int) -> Iterator[None]:
    """Load a sub-group's states into memory for the `with` block. Changes to them are not written back."""
    if not optimizer._swappable_optimizer_subgroup(index):
        yield
        return
    optimizer._optimizer_states_and_gradient_swap_in(index)
    yield
    optimizer._release_swap_buffers(index)


def subgroup_file(folder: Path, rank: int | str, index: int) -> Path:
    return folder / f"rank-{rank}-group-{index}.safetensors"
