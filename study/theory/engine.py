"""The configuration of an engine, and the job of one rank: how much it computes, and how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from study.engines.strategy_names import OffloadDevice

if TYPE_CHECKING:  # the command line lists what these types allow, and does without numpy's import
    import numpy as np

# Of one configuration a number, of a grid an array of numbers; arrays of one expression must broadcast.
Numbers: TypeAlias = "int | float | np.ndarray"

PrecisionClass = Literal["fp32", "tf32", "bf16-autocast", "fp16-autocast", "bf16", "fp16", "pure-bf16", "fp8"]
Optimizer = Literal["adamw", "adamw-8bit", "lamb", "muon", "adafactor", "sgd"]
# How an optimizer step is computed: all parameters in one kernel; operation by operation over the list of all of them,
# which takes a copy of what one operation makes; or parameter by parameter.
OptimizerKernel = Literal["fused", "foreach", "loop"]
# What becomes of the logits: transformers casts them to fp32, and its loss keeps copies; the same cast, and a loss
# that puts the gradient in their place; no cast either; and never all of them at once (fused with the output layer).
LossKernel = Literal["eager", "upcast", "fused", "chunked"]
# transformers: its own modules, composed of PyTorch's operators, logits in fp32. fused: activation functions, norms and
# the loss in one kernel each, as LLM Foundry and Megatron have them.
Kernels = Literal["fused", "transformers"]
# sdpa: PyTorch's, FlashAttention-2; flash-1: its first version, as of 2022, in Triton too; eager: operators.
Attention = Literal["sdpa", "eager", "flash-1"]
Checkpointing = Literal["full", "selective", "none"]  # as one asks for it


@dataclass(frozen=True)
class Engine:
    """The settings that decide how an engine stores and moves model states. Every value is as the engine reports it."""

    kind: Literal["torch", "ddp", "deepspeed", "fsdp"]  # fsdp: FSDP2, always stage 3
    zero_stage: int  # 0: nothing is sharded
    world_size: int
    # config.py's classes; tf32: fp32 that is multiplied in TF32; pure-bf16: no fp32 copy of anything; fp8: bf16 whose
    # products with weights are in FP8.
    precision: PrecisionClass
    accumulation_bytes: int  # per gradient element
    offload_optimizer: OffloadDevice = "none"
    offload_param: OffloadDevice = "none"
    reduce_bucket_size: int = 0  # elements, as the sizes below
    persistence_threshold: int = 0
    prefetch_bucket_size: int = 0
    max_live_parameters: int = 0
    max_reuse_distance: int = 0
    sub_group_size: int = 1_000_000_000  # stage 3 updates so much at once
    secondary_partition_size: int = 1  # stage 3: ranks that share a second copy of the parameters; 1: there is none
    param_swap_buffer_size: int = 0  # of the host, where parameters are on a disk
    overlap_comm: bool = False
    multi_rank_allreduce: bool = True  # stages 1 and 2: reduce to every rank, not only to the owner
    reshard_after_forward: bool = True  # fsdp
    replicas: int = 1  # fsdp, stages 1 and 2: each sharded over world_size / replicas ranks
    reduces_in_fp32: bool = False  # fsdp: gradients of 16-bit products; otherwise in their own type
    gradient_as_bucket_view: bool = False  # ddp
    optimizer: Optimizer = "adamw"
    optimizer_kernel: OptimizerKernel = "fused"

    @property
    def name(self) -> str:
        """The engine as tables name it: FSDP, DDP, one process, ZeRO-0 to ZeRO-3."""
        return {"fsdp": "FSDP", "ddp": "DDP", "torch": "one process"}.get(self.kind, f"ZeRO-{self.zero_stage}")

    @property
    def num_shards(self) -> int:
        """Number of ranks over which the sharded model states are split."""
        return self.world_size // self.replicas

    @property
    def parameter_bytes(self) -> int:
        """Bytes per element of the model's parameters."""
        return parameter_bytes(self.precision)

    @property
    def compute_bytes(self) -> int:
        """Bytes per element of the inputs of matrix products; autocast casts them."""
        return 4 if self.precision in ("fp32", "tf32") else 2


def parameter_bytes(precision: str) -> int:
    return 2 if precision in ("bf16", "fp16", "pure-bf16", "fp8") else 4


@dataclass(frozen=True)
class Job:
    """The work of one rank in an optimizer step. The three numbers may be arrays that broadcast (a grid)."""

    micro_batch_size: Numbers  # sequences per rank and forward pass
    sequence_length: Numbers  # tokens
    gradient_accumulation_steps: Numbers = 1
    # Of every transformer block; selective: of every second, or every second product of each, which comes to the same.
    activation_checkpointing: bool | Literal["selective"] = False
    attention: Attention = "sdpa"
    dropout: bool = False
    kernels: Kernels = "transformers"
    compiled: bool = False  # torch.compile, which fuses what transformers composes
    loss_kernel: LossKernel | None = None  # None: as the other kernels are
    device: Literal["cpu", "gpu"] = "gpu"

    def __post_init__(self) -> None:
        import numpy as np

        for name in ("micro_batch_size", "sequence_length", "gradient_accumulation_steps"):
            if isinstance(value := getattr(self, name), np.ndarray):  # whose integers overflow
                object.__setattr__(self, name, value.astype(float))

    @property
    def tokens(self) -> Numbers:
        """Tokens per rank and micro step."""
        return self.micro_batch_size * self.sequence_length

    @property
    def recomputed(self) -> float:
        """The share of the blocks' forward pass that the backward pass recomputes instead of reading saved tensors."""
        return 0.5 if self.activation_checkpointing == "selective" else float(self.activation_checkpointing)

    @property
    def is_fused(self) -> bool:
        """Whether a norm or activation function is one kernel, which saves its input and no intermediate tensor."""
        return self.kernels == "fused" or self.compiled

    @property
    def loss(self) -> LossKernel:
        return self.loss_kernel or ("fused" if self.is_fused else "eager")
