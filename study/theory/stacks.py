"""The default settings of the programs with which people train, each with its source.

A stack decides what a strategy's file leaves open: kernels, attention, loss, the types in which gradients are
accumulated and reduced, and the optimizer kernel. The accuracy tables and `advise` use the same stacks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from study.theory.engine import (
    Attention,
    Checkpointing,
    Engine,
    Kernels,
    LossKernel,
    OptimizerKernel,
    PrecisionClass,
)

StackName = Literal["accelerate", "trainer", "trl", "axolotl", "torchtitan", "deepspeed", "study"]
# The type in which gradients are accumulated or reduced: fp32, or the type in which the model computes.
GradientType = Literal["model", "fp32"]
# The type of the weights under DDP and in one process: fp32 under autocast, or bf16 without fp32 masters.
WeightType = Literal["fp32", "16-bit"]


@dataclass(frozen=True)
class Stack:
    """The settings that a program has by default, and for each of them the file that decides it."""

    name: StackName
    version: str  # of the programs in which the settings were read
    runs: tuple[str, ...]  # distributed types of accelerate's files that it can run
    sources: Mapping[str, str]  # by field
    kernels: Kernels = "transformers"
    attention: Attention = "sdpa"
    loss_kernel: LossKernel = "eager"
    grad_accum_dtype: GradientType = "model"  # deepspeed
    sync_each_batch: bool = False  # fsdp: gradients are reduced in every micro step
    reduce_dtype: GradientType = "model"  # fsdp
    optimizer_kernel: OptimizerKernel = "fused"
    activation_checkpointing: Checkpointing | None = None  # None: off, so the planner chooses
    weights: WeightType = "fp32"
    allocator: str = "PyTorch's default"  # stated, but not modelled

    def precision_without_masters(self, precision: PrecisionClass) -> PrecisionClass:
        """Return the class in which DDP or one process trains if this precision is requested."""
        if precision == "bf16":
            return "pure-bf16" if self.weights == "16-bit" else "bf16-autocast"
        return "fp16-autocast" if precision == "fp16" else precision

    def applied(self, engine: Engine) -> Engine:
        """Return an engine with this stack's optimizer kernel, and with its settings of FSDP2.

        The type in which DeepSpeed accumulates is not set here, because it decides which optimizer class DeepSpeed
        takes.
        """
        fsdp: dict[str, Any] = {}
        if engine.kind == "fsdp":
            fsdp = {"syncs_each_micro_step": self.sync_each_batch, "reduces_in_fp32": self.reduce_dtype == "fp32"}
        return dataclasses.replace(engine, optimizer_kernel=self.optimizer_kernel, **fsdp)

    def loss_if(self, compiled: bool) -> LossKernel:
        """Return the kernel of the loss. torch.compile fuses the casts and copies of the eager loss."""
        return "upcast" if compiled and self.loss_kernel == "eager" else self.loss_kernel

    @property
    def job(self) -> dict[str, Any]:
        """The fields of `StepConfig` that this stack decides. Activation checkpointing is not among them."""
        return {"kernels": self.kernels, "attention": self.attention, "loss_kernel": self.loss_kernel}


# Programs that give DeepSpeed an optimizer of PyTorch if the JSON file has no section `optimizer`: transformers 5.23,
# integrations/deepspeed.py, deepspeed_optim_sched; accelerate 1.15, accelerator.py, _prepare_deepspeed; deepspeed
# 0.19.8, runtime/engine.py, _configure_optimizer. The optimizer of the others under DeepSpeed is always fused.
PASS_THEIR_OPTIMIZER: tuple[StackName, ...] = ("accelerate", "trainer", "trl", "axolotl")

_ALL = ("NO", "MULTI_GPU", "DEEPSPEED", "FSDP")
_TRANSFORMERS = {
    "kernels": "transformers 5.23, models/llama/modeling_llama.py: norms are composed of PyTorch's operators",
    "attention": "transformers 5.23, modeling_utils.py, get_correct_attn_implementation: sdpa if none is requested",
    "loss_kernel": "transformers 5.23, loss/loss_utils.py, ForCausalLMLoss: logits.float()",
}
_ACCELERATE = {
    **_TRANSFORMERS,
    "grad_accum_dtype": "deepspeed 0.19.8, runtime/engine.py, get_data_types: the model's type if none is written",
    "sync_each_batch": "accelerate 1.15, utils/dataclasses.py, GradientAccumulationPlugin: False",
    "reduce_dtype": "accelerate 1.15, utils/dataclasses.py, set_mixed_precision: reduce_dtype is param_dtype",
    "optimizer_kernel": "assumed: the script creates AdamW with fused=True, as its Trainer does",
    "activation_checkpointing": "accelerate 1.15, utils/dataclasses.py, FullyShardedDataParallelPlugin: off",
    "weights": "assumed: fp32. transformers 5 loads a bf16 checkpoint in bf16 unless dtype=torch.float32 is passed",
    "allocator": "accelerate 1.15 sets none",
}
_TRAINER = {
    **_ACCELERATE,
    "sync_each_batch": "transformers 5.23, trainer.py, _run_epoch: no_sync in all but the last micro step",
    "optimizer_kernel": "transformers 5.23, training_args.py: optim is adamw_torch_fused since torch 2.8",
    "activation_checkpointing": "transformers 5.23, training_args.py: off",
}
STACKS: dict[StackName, Stack] = {
    stack.name: stack
    for stack in (
        Stack("accelerate", "accelerate 1.15, transformers 5.23, DeepSpeed 0.19.8", _ALL, _ACCELERATE),
        Stack("trainer", "transformers 5.23, accelerate 1.15, DeepSpeed 0.19.8", _ALL, _TRAINER),
        Stack(
            "trl",
            "trl 1.10 (July 2026), transformers 5.23, accelerate 1.15",
            _ALL,
            {
                **_TRAINER,
                "loss_kernel": "trl 1.10, trainer/sft_config.py: loss_type is chunked_nll",
                "activation_checkpointing": "trl 1.10, trainer/base_config.py: gradient_checkpointing is True",
                "weights": "trl 1.10, trainer/utils.py, create_model_from_path: float32",
            },
            loss_kernel="chunked",
            activation_checkpointing="full",
        ),
        Stack(
            "axolotl",
            "axolotl 0.18 (July 2026), transformers 5.23, accelerate 1.15",
            _ALL,
            {
                **_TRAINER,
                "optimizer_kernel": "axolotl 0.18, utils/schemas/training.py: adamw_torch_fused",
                "activation_checkpointing": "axolotl 0.18, utils/schemas/config.py: gradient_checkpointing is False",
                "weights": "axolotl 0.18, utils/config/__init__.py: bfloat16, because bf16 is on by default",
                "allocator": "axolotl 0.18, utils/__init__.py, set_pytorch_cuda_alloc_conf",
            },
            weights="16-bit",
            allocator="expandable_segments:True",
        ),
        Stack(
            "torchtitan",
            "torchtitan 0.2.2 (August 2026)",
            ("NO", "MULTI_GPU", "FSDP"),
            {
                "kernels": "torchtitan 0.2.2, models/common/nn_modules.py: RMSNorm is torch.nn.RMSNorm, one kernel",
                "attention": "torchtitan 0.2.2, models/llama3: torch's scaled_dot_product_attention",
                "loss_kernel": "torchtitan 0.2.2, models/llama3/config_registry.py: ChunkedLossWrapper",
                "grad_accum_dtype": "has no DeepSpeed",
                "sync_each_batch": "torchtitan 0.2.2, trainer.py: micro steps never turn synchronization off",
                "reduce_dtype": "torchtitan 0.2.2, config/configs.py: mixed_precision_reduce is float32",
                "optimizer_kernel": "torchtitan 0.2.2, components/optimizer/optimizer.py: implementation is fused",
                "activation_checkpointing": "torchtitan 0.2.2, trainer.py: SelectiveAC, every second matrix product",
                "weights": "torchtitan 0.2.2, config/configs.py: dtype is float32, under autocast without sharding",
                "allocator": "torchtitan 0.2.2, run_train.sh",
            },
            kernels="fused",
            loss_kernel="chunked",
            sync_each_batch=True,
            reduce_dtype="fp32",
            activation_checkpointing="selective-op",
            allocator="expandable_segments:True",
        ),
        Stack(
            "deepspeed",
            "DeepSpeed 0.19.8, transformers 5.23",
            ("DEEPSPEED",),
            {
                **_TRANSFORMERS,
                "grad_accum_dtype": _ACCELERATE["grad_accum_dtype"],
                "sync_each_batch": "has no FSDP",
                "reduce_dtype": "has no FSDP",
                "optimizer_kernel": "deepspeed 0.19.8, runtime/engine.py, _configure_basic_optimizer: FusedAdam",
                "activation_checkpointing": "deepspeed 0.19.8: a model switches it on itself",
                "weights": "deepspeed 0.19.8: fp32 masters, or torch.autocast at stage 0",
                "allocator": "deepspeed 0.19.8 sets none",
            },
        ),
        Stack(
            "study",
            "this project's trainer",
            _ALL,
            {
                **_TRANSFORMERS,
                "grad_accum_dtype": "study/config.py: accumulation_dtype is fp32",
                "sync_each_batch": "study/training/accelerators.py: True for FSDP2",
                "reduce_dtype": "study/training/accelerators.py, make_fsdp_plugin: fp32",
                "optimizer_kernel": "study/training/weights.py, make_optimizer: fused=True",
                "activation_checkpointing": "study/config.py: off",
                "weights": "study/training/accelerators.py: fp32, under autocast without sharding",
                "allocator": "sets none",
            },
            grad_accum_dtype="fp32",
            sync_each_batch=True,
            reduce_dtype="fp32",
        ),
    )
}
DEFAULT_STACK: StackName = "accelerate"
assert tuple(STACKS) == get_args(StackName)
