"""The default settings of the programs with which people train. stacks.yaml has each of them with its source.

A stack decides what a strategy's file leaves open: kernels, attention, loss, the types in which gradients are
accumulated and reduced, and the optimizer kernel. The accuracy tables and `advise` use the same stacks.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, get_args

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from zero_study.errors import Refusal, refusing
from zero_study.files import FROM_LIST, read_yaml
from zero_study.theory.engine import (
    Attention,
    Checkpointing,
    Engine,
    Kernels,
    LossKernel,
    OptimizerKernel,
)

StackName = Literal["accelerate", "trainer", "trl", "axolotl", "torchtitan", "deepspeed", "study"]
# The type in which gradients are accumulated or reduced: fp32, or the type in which the model computes.
GradientType = Literal["model", "fp32"]
# The type of the weights under DDP and in one process: fp32 under autocast, or bf16 without fp32 masters.
WeightType = Literal["fp32", "16-bit"]
Text: TypeAlias = Annotated[str, Field(min_length=1)]


@dataclass(frozen=True, config=ConfigDict(extra="forbid", strict=True))
class Stack:
    """The default settings of a program, and for each setting the file that decides it."""

    name: StackName
    version: Text  # of the programs in which the settings were read
    # Distributed types of accelerate's files that it can run.
    runs: Annotated[tuple[Literal["NO", "MULTI_GPU", "DEEPSPEED", "FSDP"], ...], Field(min_length=1), FROM_LIST]
    sources: dict[str, Text]  # by field
    kernels: Kernels
    attention: Attention
    loss_kernel: LossKernel
    grad_accum_dtype: GradientType  # deepspeed
    sync_each_batch: bool  # fsdp: gradients are reduced in every micro step
    reduce_dtype: GradientType  # fsdp
    optimizer_kernel: OptimizerKernel
    activation_checkpointing: Checkpointing | None  # None: off, so the planner chooses
    weights: WeightType
    allocator: str  # stated, but not modelled

    def applied(self, engine: Engine) -> Engine:
        """Return an engine with this program's optimizer kernel, and with its settings of FSDP2.

        The type in which DeepSpeed accumulates is not set here, because it decides which optimizer class DeepSpeed
        takes.
        """
        fsdp: dict[str, Any] = {}
        if engine.kind == "fsdp":
            fsdp = {"syncs_each_micro_step": self.sync_each_batch, "reduces_in_fp32": self.reduce_dtype == "fp32"}
        return dataclasses.replace(engine, optimizer_kernel=self.optimizer_kernel, **fsdp)

    def loss_if(self, compiled: bool) -> LossKernel:
        """Return the kernel of the loss with or without torch.compile, which fuses the casts of the eager loss."""
        return "upcast" if compiled and self.loss_kernel == "eager" else self.loss_kernel

    @property
    def job(self) -> dict[str, Any]:
        """The fields of `StepConfig` that this program decides. Activation checkpointing is not among them."""
        return {"kernels": self.kernels, "attention": self.attention, "loss_kernel": self.loss_kernel}


# Programs that give DeepSpeed an optimizer of PyTorch if the JSON file has no section `optimizer`: transformers 5.23,
# integrations/deepspeed.py, deepspeed_optim_sched; accelerate 1.15, accelerator.py, _prepare_deepspeed; deepspeed
# 0.19.8, runtime/engine.py, _configure_optimizer. The optimizer of the others under DeepSpeed is always fused.
PASS_THEIR_OPTIMIZER: tuple[StackName, ...] = ("accelerate", "trainer", "trl", "axolotl")

FILE = Path(__file__).with_name("stacks.yaml")


def _stack(name: str, entry: Any) -> Stack:
    """Return a stack from its entry, in which each setting has a value and a source.

    Raises ValueError if the entry is wrong.
    """
    if not isinstance(entry, dict):
        raise ValueError("it needs a version, `runs` and settings")
    content = {key: entry[key] for key in ("version", "runs") if key in entry}
    settings = {key: setting for key, setting in entry.items() if key not in content}
    for key, setting in settings.items():
        if not isinstance(setting, dict) or setting.keys() != {"value", "source"}:
            raise ValueError(f"{key} needs a value and a source")
    sources = {key: setting["source"] for key, setting in settings.items()}
    values = {key: setting["value"] for key, setting in settings.items()}
    return Stack(**{**content, "name": name, "sources": sources, **values})


def read_stacks(path: Path = FILE) -> dict[StackName, Stack]:
    """Return the stacks of a file like stacks.yaml, by name. Raises Refusal with the name of a stack that is wrong."""
    entries, names = read_yaml(path, path.parent).get("stacks"), get_args(StackName)
    if not isinstance(entries, dict) or tuple(entries) != names:
        raise Refusal(f"{path}: `stacks` must have the entries {', '.join(names)}, in this order")
    stacks: dict[StackName, Stack] = {}
    for name, entry in entries.items():
        with refusing(f"{path}, {name}"):
            stacks[name] = _stack(name, entry)
    return stacks


STACKS = read_stacks()
DEFAULT_STACK: StackName = "accelerate"
