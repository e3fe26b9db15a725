"""The configuration of an engine, and the work of one rank in a step, which is called a job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zero_study.engines.strategy_names import OffloadDevice

PrecisionClass = Literal["fp32", "tf32", "bf16-autocast", "fp16-autocast", "bf16", "fp16", "pure-bf16", "fp8"]
Optimizer = Literal["adamw", "adamw-8bit", "lamb", "muon", "adafactor", "sgd"]
# How an optimizer step is computed. fused: one kernel for all parameters. foreach: operation by operation for all
# parameters, which needs memory for the result of one operation. loop: parameter by parameter.
OptimizerKernel = Literal["fused", "foreach", "loop"]
# How the loss handles the logits. eager: transformers casts them to fp32, and the loss makes copies. upcast: the same
# cast, and the gradient replaces the logits. fused: no cast, and the gradient replaces the logits. chunked: the loss is
# fused with the output layer, so that only a few logits exist at a time.
LossKernel = Literal["eager", "upcast", "fused", "chunked"]
# transformers: the modules of transformers, which are composed of PyTorch's operators, with fp32 logits. fused: one
# kernel each for activation functions, norms and the loss, as in LLM Foundry and Megatron.
Kernels = Literal["fused", "transformers"]
# sdpa: PyTorch's fused attention, which is that of cuDNN on Hopper and Blackwell since PyTorch 2.11, and otherwise
# FlashAttention-2. flash-1: the FlashAttention of 2022, also the one in Triton. flash-3: for Hopper only. flash-4: for
# Blackwell only. eager: separate operators.
Attention = Literal["sdpa", "eager", "flash-1", "flash-2", "flash-3", "flash-4"]
Checkpointing = Literal["full", "offload", "selective", "selective-op", "none"]  # as users request it


@dataclass(frozen=True)
class Engine:
    """The settings that decide how an engine stores and moves model states, as the engine itself reports them."""

    kind: Literal["torch", "ddp", "deepspeed", "fsdp"]  # fsdp: always stage 3
    zero_stage: int  # 0 if nothing is sharded
    world_size: int
    # The classes of study/config.py, and: tf32 is fp32 multiplied in TF32, pure-bf16 has no fp32 copy of anything, and
    # fp8 is bf16 with products with weights in FP8.
    precision: PrecisionClass
    accumulation_bytes: int  # per gradient element
    offload_optimizer: OffloadDevice = "none"
    offload_param: OffloadDevice = "none"
    reduce_bucket_size: int = 0  # in elements, as all sizes below
    persistence_threshold: int = 0
    prefetch_bucket_size: int = 0
    max_live_parameters: int = 0
    max_reuse_distance: int = 0
    sub_group_size: int = 1_000_000_000  # stage 3 updates this many elements at a time
    secondary_partition_size: int = 1  # stage 3: ranks that share a second copy of the parameters; 1 without one
    param_swap_buffer_size: int = 0  # size of the host's buffers if parameters are on a disk
    overlap_comm: bool = False
    multi_rank_allreduce: bool = True  # stages 1 and 2: gradients are reduced to every rank, not only to the owner
    reshard_after_forward: bool = True  # fsdp
    is_fsdp1: bool = False  # fsdp: FullyShardedDataParallel, whose hooks take longer than those of fully_shard (FSDP2)
    replicas: int = 1  # fsdp and stages 1 and 2: each replica is sharded over world_size / replicas ranks
    # Gradients of 16-bit products are reduced in fp32, not in their own type: fsdp, and DeepSpeed with sequence
    # parallelism.
    reduces_in_fp32: bool = False
    # fsdp: gradients are reduced and sharded in every micro step. If False, which is accelerate's default
    # (sync_each_batch), every rank keeps unsharded gradients until the last micro step.
    syncs_each_micro_step: bool = True
    gradient_as_bucket_view: bool = False  # ddp
    optimizer: Optimizer = "adamw"
    optimizer_kernel: OptimizerKernel = "fused"

    @property
    def name(self) -> str:
        """The name of the engine in tables: FSDP, DDP, one process, or ZeRO-0 to ZeRO-3."""
        return {"fsdp": "FSDP", "ddp": "DDP", "torch": "one process"}.get(self.kind, f"ZeRO-{self.zero_stage}")

    @property
    def reduced_bytes(self) -> int:
        """Bytes per element of the gradients that FSDP2 reduces, and of those that it accumulates unsharded."""
        return 4 if self.reduces_in_fp32 else self.compute_bytes

    @property
    def num_shards(self) -> int:
        """Number of ranks over which one copy of the model states is sharded."""
        return self.world_size // self.replicas

    @property
    def parameter_bytes(self) -> int:
        """Bytes per element of the model's parameters."""
        return parameter_bytes(self.precision)

    @property
    def compute_bytes(self) -> int:
        """Bytes per element of the inputs of matrix products, after autocast has cast them."""
        return 4 if self.precision in ("fp32", "tf32") else 2


def parameter_bytes(precision: str) -> int:
    return 2 if precision in ("bf16", "fp16", "pure-bf16", "fp8") else 4


@dataclass(frozen=True)
class StepConfig:
    """The work of one rank in an optimizer step."""

    micro_batch_size: int  # sequences per forward pass of a rank, or of the ranks that share them
    sequence_length: int  # tokens
    gradient_accumulation_steps: int = 1
    # True applies to every block, and "selective" to every second block. With "selective-op", every block keeps the
    # outputs of attention and of every second matrix product, as torchtitan's selective checkpointing of operators.
    # "offload" applies to every block, and moves the inputs of the blocks, which are all that is saved, to the host.
    activation_checkpointing: bool | Literal["offload", "selective", "selective-op"] = False
    attention: Attention = "sdpa"
    dropout: bool = False
    kernels: Kernels = "transformers"
    # Among `kernels` that are fused, the product of an activation function with a gate is a kernel of its own, which
    # saves the output of the function. In Liger's kernels, it is not.
    has_separate_gates: bool = False
    compiled: bool = False  # torch.compile, which fuses the operators of transformers
    loss_kernel: LossKernel | None = None  # None if it follows from `kernels` and `compiled`
    device: Literal["cpu", "gpu"] = "gpu"
    # Ranks that share each sequence: under FSDP2 by torch's context parallelism, under ZeRO by DeepSpeed's sequence
    # parallelism (Ulysses).
    sequence_ranks: int = 1

    @property
    def rank_length(self) -> int:
        """Tokens of each sequence that a rank computes. Only attention sees the whole sequence."""
        return self.sequence_length // self.sequence_ranks

    @property
    def tokens(self) -> int:
        """Tokens per rank and micro step."""
        return self.micro_batch_size * self.rank_length

    @property
    def checkpoints_all(self) -> bool:
        """Whether the backward pass computes every block again."""
        return self.activation_checkpointing in (True, "offload")

    @property
    def recomputed(self) -> float:
        """The share of the blocks' matrix products that the backward pass computes again."""
        return 1.0 if self.checkpoints_all else 0.5 if self.activation_checkpointing else 0.0

    @property
    def is_fused(self) -> bool:
        """Whether each norm and activation function is a single kernel, which saves only its input."""
        return self.kernels == "fused" or self.compiled

    @property
    def loss(self) -> LossKernel:
        """The requested kernel of the loss. If none is requested, the one that fits the job's other kernels.

        torch.compile alone gives `upcast`. The compiled graph of PyTorch's cross_entropy keeps the logits, the
        log-softmax and the gradient. Published peaks at the loss need 7.0 to 8.3 bytes per logit more than the other
        tensors (KempnerForge, benchmarks/mfu_scaling; lightning-thunder, issue 1176 and pull request 1261).
        """
        if self.loss_kernel is not None:
            return self.loss_kernel
        if self.kernels == "fused":
            return "fused"
        return "upcast" if self.compiled else "eager"
