"""A validated request to the planner: GPUs, batch and strategies."""

from __future__ import annotations

import dataclasses
import math
import re
from functools import cached_property
from importlib.util import find_spec
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator, model_validator

from zero_study import progress
from zero_study.command_line import choices, is_optional, kind, option, unit
from zero_study.errors import Refusal, install_command, refusing
from zero_study.planner import stack_options
from zero_study.planner.stack_options import Training
from zero_study.strategy import file, own_file
from zero_study.strategy.file import Strategy
from zero_study.terminal import printable
from zero_study.theory import adapters, gpus, hardware, shapes
from zero_study.theory.adapters import AdapterKind
from zero_study.theory.engine import (
    Attention,
    Checkpointing,
    Kernels,
    LossKernel,
    Optimizer,
    OptimizerKernel,
    PrecisionClass,
    StepConfig,
)
from zero_study.theory.hardware import Cluster
from zero_study.theory.shapes import DEFAULT_LENGTH, ModelShape
from zero_study.theory.stacks import DEFAULT_STACK, STACKS, GradientType, Stack, StackName

CLASS_NAME = re.compile(r"[A-Z]\w*For[A-Z]\w+|[A-Z]\w*LMHeadModel")
CHECKPOINTED: dict[Checkpointing, Any] = {
    name: {"full": True, "none": False}.get(name, name) for name in get_args(Checkpointing)
}

# Stacks whose programs have no data set of images for a model that reads nothing else.
_OF_TEXTS = ("trl", "axolotl", "torchtitan", "study")
_IN_GROUPS = "fsdp2_hybrid, zero1 or zero2"
MOST_GPUS = 1_000_000
# Sequences per GPU and step, if no global batch is requested. A requested micro batch that does not divide it replaces
# it, so that there is no gradient accumulation.
SEQUENCES_PER_GPU = 8


# The groups of options in the help.
WORK = "Model and batch"
GPUS = "GPUs"
STRATEGY = "Strategy"
SETTINGS = "Settings of the training"
ADAPTER = "Adapter, instead of all weights"
MACHINE = "Nodes and network"


class Request(BaseModel):
    """A question of a user to the planner. Raises Refusal if a value is not valid.

    The options of `zero-study advise` are made from its fields. A field that the stack decides is None in a call if it
    is not requested, and is filled in then.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    gpu: str | None = option(
        None,
        "Kind of GPU: a100-80gb, h100-sxm, b200, l40s, rtx-4090, mi300x ... `--gpu list` prints all names.",
        GPUS,
        is_common=True,
    )
    num_gpus: int = option(
        1, "Number of GPUs. [default: the fewest that the model needs]", GPUS, is_common=True, flag="--gpus"
    )
    gpu_memory: float | None = option(
        None,
        "Memory of the GPU. For a GPU that --gpu does not know, give --gpu-memory, --gpu-tflops and --gpu-bandwidth. "
        "If --gpu names a GPU, --gpu-memory, --gpu-tflops and --gpu-bandwidth replace the values of this GPU.",
        GPUS,
        metavar="GIB",
        unit="GiB",
    )
    gpu_tflops: float | None = option(
        None,
        "Peak rate of the GPU for dense products in bf16 that are accumulated in fp32.",
        GPUS,
        metavar="TFLOPS",
        unit="TFLOP/s, dense and in 16 bits",
    )
    gpu_bandwidth: float | None = option(None, "Bandwidth of the GPU's memory.", GPUS, metavar="GB/S", unit="GB/s")
    sequence_length: int | None = option(
        None,
        "Number of tokens per sequence. [default: 1024, or the model's maximum if that is less]",
        WORK,
        is_common=True,
    )
    global_batch_size: int | None = option(
        None, "Number of sequences per optimizer step, over all GPUs. [default: 8 per GPU]", WORK, is_common=True
    )
    tokens: float | None = option(
        None,
        "Number of tokens of the whole training, from which hours and price are computed.",
        WORK,
        is_common=True,
        unit="tokens",
    )
    examples: int | None = option(
        None,
        "Number of examples in the training data, instead of --tokens. An example is one whole sequence, or one image.",
        WORK,
    )
    epochs: float | None = option(None, "Number of passes over the examples. [default: 1]", WORK, unit="passes")
    images: int | None = option(
        None, "Number of images in each sequence, for vision-language models. [default: no images, only text]", WORK
    )
    freeze_vision_tower: bool = option(
        False,
        "Freeze the image encoder of a vision-language model. The projector between this encoder and the language "
        "model is still trained. With --lora-rank, neither of them gets an adapter.",
        SETTINGS,
    )
    strategy: str | None = option(
        None, "Predict only this strategy: a name, an accelerate file or a DeepSpeed JSON.", STRATEGY, is_common=True
    )
    micro_batch_size: int | None = option(
        None,
        "Number of sequences per GPU and forward pass. [default: the fastest micro batch that leaves enough memory "
        "free]",
        WORK,
    )
    gradient_accumulation_steps: int | None = option(
        None, "Number of micro batches per optimizer step. [default: as the batch sizes require]", WORK
    )
    precision: PrecisionClass | None = option(
        None,
        "Precision of the training. [default: bf16 if the GPU supports it, otherwise fp16]",
        SETTINGS,
        is_common=True,
    )
    stack: StackName = option(
        DEFAULT_STACK,
        "The program that trains, which decides the defaults of the options below.",
        SETTINGS,
        is_common=True,
    )
    activation_checkpointing: Checkpointing | None = option(
        None,
        "Activations that the backward pass recomputes: those of every block (full), of every second block "
        "(selective), or of some operators in every block (selective-op, as torchtitan does). offload is like full, "
        "and moves the inputs of the blocks, which are all that is kept, to the host. "
        "[default: that of --stack, or full if the stack has none and a strategy only fits or is faster with full]",
        SETTINGS,
    )
    kernels: Kernels = option(
        None,
        "fused: each norm, activation function and loss is one kernel. transformers: each of them is several kernels, "
        "as in the models of transformers. [default: that of --stack]",
        SETTINGS,
    )
    compile: bool = option(
        False, "Assume torch.compile, which fuses small kernels and the copies of the logits.", SETTINGS
    )
    attention: Attention = option(
        None,
        "sdpa: PyTorch's function. eager: separate operators. flash-1 to flash-4: FlashAttention. flash-3 needs a "
        "Hopper GPU, and flash-4 a Blackwell GPU of a data center. [default: that of --stack]",
        SETTINGS,
    )
    dropout: bool = option(False, "Assume dropout.", SETTINGS)
    loss_kernel: LossKernel | None = option(
        None,
        "Logits from which the loss is computed. eager: fp32 logits and copies of them. upcast: fp32 logits. fused: "
        "16-bit logits. chunked: a few logits at a time. [default: that of --stack, or the one that fits --kernels]",
        SETTINGS,
    )
    optimizer: Optimizer = option(
        "adamw", "Optimizer, which determines the optimizer states. sgd has no momentum.", SETTINGS
    )
    optimizer_kernel: OptimizerKernel = option(
        None,
        "Implementation of the optimizer's step. PyTorch's default is foreach, which needs one more copy of the "
        "updated weights. With ZeRO, loop needs two more copies, because ZeRO joins the parameters to a few large "
        "tensors. [default: that of --stack]",
        SETTINGS,
    )
    grad_accum_dtype: GradientType = option(
        None,
        "Type in which DeepSpeed accumulates gradients (grad_accum_dtype): fp32, or the model's type. [default: that "
        "of --stack]",
        SETTINGS,
    )
    sync_each_batch: bool = option(
        None,
        "Reduce FSDP2's gradients in every micro step. Without this option, every GPU keeps unsharded gradients until "
        "the last micro step. [default: that of --stack]",
        SETTINGS,
    )
    reduce_dtype: GradientType = option(
        None,
        "Type in which FSDP2 reduces gradients: fp32, or the model's type. [default: that of --stack]",
        SETTINGS,
    )
    lora_rank: int | None = option(
        None,
        "Train LoRA adapters of this rank. The weights of the model are frozen. [default: train all weights]",
        ADAPTER,
        is_common=True,
    )
    lora_target: str | None = option(
        None,
        "Modules with an adapter: names separated by commas, such as q_proj,v_proj, or all-linear. [default: as PEFT "
        "chooses, or all-linear if PEFT has no default]",
        ADAPTER,
        metavar="NAMES",
    )
    lora_dropout: float = option(0.0, "Dropout of the adapters' inputs. [default: 0]", ADAPTER)
    adapter: AdapterKind = option(
        "lora", "Kind of the adapters. dora also trains the magnitudes of the weights.", ADAPTER
    )
    load_in_4bit: bool = option(
        False,
        "Keep the frozen weights of Linear modules in four bits (QLoRA: NF4 with double quantization).",
        ADAPTER,
    )
    network_gbps: float | None = option(
        None,
        "Network rate of a node. [default: as cloud providers offer it]",
        MACHINE,
        metavar="GBIT",
        unit="Gbit/s of a node",
    )
    network: hardware.Network | None = option(
        None,
        "Network between nodes. rdma: InfiniBand, RoCE, Amazon's EFA. tcp: without RDMA. [default: as cloud providers "
        "offer it; tcp if --network-gbps is at most 100 and not that of the machine]",
        MACHINE,
    )
    gpus_per_node: int | None = option(None, "GPUs in one node. [default: as cloud providers offer it]", MACHINE)
    link_bandwidth: float | None = option(
        None,
        "Bandwidth of a GPU to the other GPUs of its node, in one direction. [default: as in the GPU's data sheet]",
        MACHINE,
        metavar="GB/S",
        unit="GB/s in one direction",
    )
    host_memory: float | None = option(
        None,
        "Host memory of a node, which offload needs. [default: as cloud providers offer it]",
        MACHINE,
        metavar="GIB",
        unit="GiB of a node",
    )
    host_cores: int | None = option(None, "Physical cores of a node.", MACHINE)
    host_bandwidth: float | None = option(
        None, "Bandwidth of a node's host memory.", MACHINE, metavar="GB/S", unit="GB/s of a node"
    )
    disk: float | None = option(None, "Size of a node's local NVMe disks.", MACHINE, metavar="TB", unit="TB of a node")
    disk_bandwidth: tuple[float, float] | None = option(
        None,
        "Rates in GB/s at which a node's disks read and write. A single number is used for reading and writing.",
        MACHINE,
        metavar="READ[,WRITE]",
        unit="GB/s, for reading and writing",
    )
    shard_group_size: int | None = option(
        None,
        "Number of GPUs that share one copy of the model states (hybrid sharding, ZeRO-1 within nodes). [default "
        "for hybrid sharding: the number of GPUs in a node]",
        STRATEGY,
    )

    context_parallel: int | None = option(
        None,
        "Number of GPUs that share each sequence under FSDP2 (accelerate's cp_size). These GPUs pass the keys and "
        "values of attention to each other. [default: 1]",
        STRATEGY,
    )
    sequence_parallel: int | None = option(
        None,
        "Number of GPUs that share each sequence under ZeRO (accelerate's sp_size, DeepSpeed's Ulysses). Each of these "
        "GPUs computes some of the attention heads. [default: 1]",
        STRATEGY,
    )

    def __init__(self, gpu: str | None = None, num_gpus: int = 1, **settings: Any) -> None:
        with refusing():
            super().__init__(gpu=gpu, num_gpus=num_gpus, **settings)

    def replace(self, **settings: Any) -> Request:
        """Return the request with other values of some fields. Raises Refusal if they are not valid."""
        return Request(**{name: getattr(self, name) for name in Request.model_fields} | settings)

    @model_validator(mode="before")
    @classmethod
    def _fill_in_from_stack(cls, content: dict[str, Any]) -> dict[str, Any]:
        """Set fields that are not requested to what the user's own strategy file says, or to the stack's default.

        The latter are those of STACK_DEFAULTED_FIELDS. If other kernels are requested than the stack's, the loss has
        their kind.
        """
        stack = STACKS.get(content.get("stack", DEFAULT_STACK))
        if stack is None:
            return content
        content = own_file.filled_in(content, stack.name)
        defaults = {name: getattr(stack, name) for name in STACK_DEFAULTED_FIELDS if content.get(name) is None}
        if "loss_kernel" in defaults:
            has_its_loss = content.get("kernels") in (None, stack.kernels)
            defaults["loss_kernel"] = stack.loss_if(content.get("compile", False)) if has_its_loss else None
        return content | defaults

    @field_validator("*", mode="before")
    @classmethod
    def _check_value(cls, value: Any, info: ValidationInfo) -> Any:
        """Raise ValueError unless a value is one of the words of its field, or a number in its range."""
        name = info.field_name or ""
        field = cls.model_fields[name]
        if value is None and is_optional(field):
            return value
        if (words := choices(field)) and value not in words:
            raise ValueError(f"{name}={value!r}: this value is unknown. Use one of {', '.join(words)}.")
        if kind(field) is int and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"{name}={value!r}: must be a whole number of at least 1")
        if name == "num_gpus" and value > MOST_GPUS:
            raise ValueError(f"{name}={value}: must be at most {MOST_GPUS:,}")
        if number_unit := unit(field):
            for number in value if isinstance(value, tuple) else (value,):
                if not 0 < number < math.inf:
                    raise ValueError(f"{name}={value!r}: must be a number above 0, in {number_unit}")
        return value

    @model_validator(mode="after")
    def _check_length_of_training(self) -> Request:
        """Raise Refusal if the length of the training is stated twice, or not at all."""
        if self.tokens is not None and self.examples is not None:
            raise Refusal("--tokens and --examples both state how long the training is. Use only one of them.")
        if self.epochs is not None and self.examples is None:
            raise Refusal("--epochs needs the number of examples. Add --examples, or use --tokens.")
        return self

    @property
    def num_tokens(self) -> float | None:
        """The number of tokens of the whole training. None if the request does not state it."""
        if self.examples is None:
            return self.tokens
        return self.examples * (self.epochs or 1.0) * (self.sequence_length or DEFAULT_LENGTH)

    @model_validator(mode="after")
    def _check_adapter(self) -> Request:
        """Raise Refusal for settings of adapters that have no effect or no meaning."""
        if self.lora_rank is None:
            settings = {"--lora-target": self.lora_target, "--lora-dropout": self.lora_dropout,
                        "--load-in-4bit": self.load_in_4bit, "--adapter": self.adapter != "lora"}  # fmt: skip
            if unused := [flag for flag, value in settings.items() if value]:
                raise Refusal(
                    f"{unused[0]} has no effect without adapters, because all weights would be trained. "
                    "Add --lora-rank, for example --lora-rank 16."
                )
            return self
        if self.lora_target is not None and not self.lora_target.replace(",", " ").strip():
            raise Refusal("--lora-target names no module. Name modules, such as q_proj,v_proj, or use all-linear.")
        if not 0 <= self.lora_dropout < 1:
            raise Refusal(f"--lora-dropout {self.lora_dropout}: must be at least 0 and below 1.")
        if self.stack == "torchtitan":
            raise Refusal("--stack torchtitan: adapters are predicted for PEFT only. Take another stack, such as trl.")
        return self

    @model_validator(mode="after")
    def _check_shared_sequences(self) -> Request:
        """Raise Refusal for settings that an engine refuses if GPUs share a sequence, or that are not predicted."""
        if self.sequence_ranks == 1:
            return self
        if 1 not in (self.context_parallel or 1, self.sequence_parallel or 1):
            raise Refusal(
                "--context-parallel and --sequence-parallel are for different engines. Use --context-parallel for "
                "FSDP2, or --sequence-parallel for ZeRO."
            )
        flag, engine = self.sharing_flag, "DeepSpeed's Ulysses" if self.uses_ulysses else "torch's ring"
        if self.attention != "sdpa":
            raise Refusal(
                f"{flag}: {engine} needs PyTorch's scaled_dot_product_attention, and the training has --attention "
                f"{self.attention}. Use --attention sdpa."
            )
        if self.lora_rank is not None:
            raise Refusal(f"{flag}: this is not predicted for adapters. Leave {flag} or --lora-rank out.")
        if self.dropout:
            raise Refusal(f"{flag}: this is not predicted with dropout. Leave {flag} or --dropout out.")
        return self

    @property
    def sequence_ranks(self) -> int:
        """The number of GPUs that share each sequence."""
        return (self.context_parallel or 1) * (self.sequence_parallel or 1)

    @property
    def uses_ulysses(self) -> bool:
        """Whether GPUs share sequences by DeepSpeed's Ulysses, and not by torch's ring."""
        return (self.sequence_parallel or 1) > 1

    @property
    def sharing_flag(self) -> str:
        """The option that lets GPUs share a sequence, with its value."""
        return f"--{'sequence' if self.uses_ulysses else 'context'}-parallel {self.sequence_ranks}"

    @property
    def num_groups(self) -> int:
        """The number of groups of GPUs that share a sequence. A group is one GPU if they share none.

        Raises Refusal if the GPUs do not fill the groups.
        """
        self._check_groups(self.num_gpus)
        return self.num_gpus // self.sequence_ranks

    def _check_groups(self, num_gpus: int) -> None:
        if num_gpus % self.sequence_ranks:
            raise Refusal(f"{self.sharing_flag}: --gpus {num_gpus} must be a multiple of it. Change one of them.")

    @property
    def group(self) -> str:
        """The GPUs that share a sequence, in words: "GPU", or "group of 4 GPUs"."""
        return "GPU" if self.sequence_ranks == 1 else f"group of {self.sequence_ranks} GPUs"

    def why_not_shared(self, shape: ModelShape) -> str | None:
        """Return why GPUs cannot share the sequences of a model. None if they can, or if the user does not request it.

        Sources: accelerate/big_modeling.py, _attach_context_parallel_hooks, and
        deepspeed/runtime/sequence_parallel/ulysses_sp.py. Both drop the mask of attention. Torch's load balancing gives
        each rank two parts of the sequence.
        """
        ranks, length = self.sequence_ranks, self.sequence_length or DEFAULT_LENGTH
        if ranks == 1:
            return None
        if shape.head != "tokens" or shape.architecture == "traced" or not shape.is_causal:
            return f"only decoders with full causal attention are predicted, and {shape.name} is not one of them"
        if shape.has_sliding_window:
            return (
                f"{shape.name} has a sliding window, for which attention needs a mask, and the engine drops this mask"
            )
        if not self.uses_ulysses:
            is_divided = length % (2 * ranks) == 0
            return None if is_divided else f"--sequence-length {length} must be a multiple of {2 * ranks}, two per GPU"
        if length % ranks:
            return f"--sequence-length {length} must be a multiple of {ranks}"
        if shape.heads % ranks:
            return f"{shape.name} has {shape.heads} attention heads, but their number must be a multiple of {ranks}"
        if shape.kv_heads % ranks and ranks % shape.kv_heads:
            return (
                f"{shape.name} has {shape.kv_heads} key heads, and {ranks} must be a factor or a "
                "multiple of this number"
            )
        return None

    @property
    def settings(self) -> Stack:
        """The settings of the training program: those that the user requested, and its defaults for the others."""
        requested = {name: getattr(self, name) for name in STACK_DEFAULTED_FIELDS if name != "loss_kernel"}
        return dataclasses.replace(STACKS[self.stack], loss_kernel=self.job().loss, **requested)

    def box(self, num_gpus: int | None = None) -> Cluster:
        """Return the requested machine. Numbers that the user did not give are those of a typical machine.

        If no typical machine is known, the host is assumed.
        """
        with refusing():
            base = None if self.gpu is None else hardware.find_gpu(self.gpu)
            gpu = hardware.from_numbers(base, self.gpu_memory, self.gpu_tflops, self.gpu_bandwidth)
            box = hardware.with_host(
                hardware.typical_box(gpu, num_gpus or self.num_gpus, self.gpus_per_node),
                memory_gib=self.host_memory,
                cores=self.host_cores,
                gigabytes_per_second=self.host_bandwidth,
                disk_terabytes=self.disk,
                disk_gigabytes_per_second=self.disk_bandwidth,
                link_gigabytes_per_second=self.link_bandwidth,
                network_gigabits_per_second=self.network_gbps,
                network=self.network,
            )
        return hardware.with_assumed_host(box)

    def job(self, micro_batch_size: int = 1, gradient_accumulation_steps: int = 1) -> StepConfig:
        """Return the settings of the step that each rank computes, such as micro batch, sequence length and kernels.

        Without a requested setting, there is no activation checkpointing. The planner tries both settings then. Raises
        Refusal if the GPU cannot run the requested kernel of attention.
        """
        gpu = self.box(1).gpu
        if not hardware.can_run_attention(gpu, self.attention):
            needed = {"flash-3": "a Hopper GPU such as H100", "flash-4": "a Blackwell GPU such as B200"}
            raise Refusal(
                f"--attention {self.attention} needs {needed.get(self.attention, 'an Ampere GPU or a newer one')}, but "
                f"the GPU is {gpu.name}. Use --attention sdpa."
            )
        return StepConfig(
            micro_batch_size=micro_batch_size,
            sequence_length=self.sequence_length or DEFAULT_LENGTH,
            gradient_accumulation_steps=gradient_accumulation_steps,
            activation_checkpointing=CHECKPOINTED[self.activation_checkpointing or "none"],
            attention=self.attention,
            dropout=self.dropout,
            kernels=self.kernels,
            compiled=self.compile,
            loss_kernel=self.loss_kernel,
            sequence_ranks=self.sequence_ranks,
        )

    def with_adapter(self, shape: ModelShape) -> ModelShape:
        """Return a model's shape with the requested adapters, in the types in which the stack trains them.

        TRL 1.10 casts adapters of quantized weights to bf16 in its SFTTrainer. For the other programs it is assumed
        that the program calls PEFT's prepare_model_for_kbit_training, as PEFT's guide says. This project's trainer
        creates its models in fp32.

        Raises Refusal if the adapters do not suit the model.
        """
        with refusing():
            adapter = adapters.from_options(
                self.lora_rank, self.lora_target, self.adapter, self.lora_dropout, self.load_in_4bit, shape.head,
                frozen="fp32" if self.stack == "study" else "16-bit",
            )  # fmt: skip
            if adapter is not None and self.load_in_4bit:
                changes: dict[str, Any] = {"in_fp32": False} if self.stack == "trl" else {"unquantized": "fp32"}
                adapter = dataclasses.replace(adapter, **changes)
            shape = adapters.with_adapter(shape, adapter)
        return shape

    @cached_property
    def chosen_precision(self) -> PrecisionClass:
        has = self.box(1).gpu.peak_flops_per_second
        precision = self.precision or ("bf16" if "bf16" in has else "fp16")
        kind = precision.removeprefix("pure-").removesuffix("-autocast")
        if kind not in has:
            name, supported = self.box(1).gpu.name, ", ".join(kind for kind in has if kind != "tf32")
            raise Refusal(f"--precision {precision}: {name} does not support it. It supports {supported}.")
        return precision

    def training(self, chosen: Strategy, shape: ModelShape | None = None, accumulates: bool = True) -> Training:
        """Return the assumptions about the training program that the prediction of a strategy makes."""
        return Training(
            stack=self.stack,
            kinds=stack_options.kinds_of(chosen),
            precision=self.chosen_precision,
            adapter=None if self.lora_rank is None else self.adapter,
            is_in_4bit=self.load_in_4bit,
            accumulates=accumulates,
            optimizer=self.optimizer,
            optimizer_kernel=self.optimizer_kernel,
            attention=self.attention,
            kernels=self.kernels,
            loss=self.job().loss,
            compiled=self.compile,
            dropout=self.dropout,
            checkpointing=self.activation_checkpointing,
            grad_accum_dtype=self.grad_accum_dtype,
            sync_each_batch=self.sync_each_batch,
            reduce_dtype=self.reduce_dtype,
            context_parallel=self.context_parallel or 1,
            sequence_parallel=self.sequence_parallel or 1,
            shape=shape,
        )

    def check_images(self, shape: ModelShape) -> None:
        """Raise Refusal for settings that make no sense for a model that reads images only."""
        if not shape.reads_images:
            return
        if self.tokens is not None:
            raise Refusal(
                f"--tokens: {shape.name} reads images, which are not counted in tokens. State the number "
                "of images with --examples, and use --epochs."
            )
        if self.stack in _OF_TEXTS:
            raise Refusal(
                f"--stack {self.stack}: its program trains on texts only, and {shape.name} reads images. Use --stack "
                "trainer, accelerate or deepspeed."
            )

    def with_images(self, shape: ModelShape, length: int) -> ModelShape:
        """Return a model's shape with the requested images in each sequence.

        Raises Refusal if images are not counted for the model.
        """
        flag = "--freeze-vision-tower" if self.freeze_vision_tower else f"--images {self.images}"
        if self.images is None and not self.freeze_vision_tower:
            return shape
        if shape.with_image is None:
            if shape.has_idle_part:
                raise Refusal(
                    f"{flag}: images cannot be predicted for {shape.name}, only for models of the families LLaVA, "
                    f"InternVL, Qwen2-VL, Qwen2.5-VL and Qwen3-VL. Remove {flag} to predict a training on texts only."
                )
            raise Refusal(f"{flag}: {shape.name} cannot read images in addition to text. Leave {flag} out.")
        if self.stack in _OF_TEXTS:
            raise Refusal(
                f"--stack {self.stack}: trainings with images are supported only for trainer, accelerate "
                "and deepspeed. Use one of them."
            )
        with refusing():
            shape = shape.with_images(self.images or 0, self.freeze_vision_tower)
        if shape.num_image_tokens >= length:
            raise Refusal(
                f"--images {self.images}: these images become {shape.num_image_tokens:,} tokens, but a "
                f"sequence has only {length:,} tokens. Use a larger --sequence-length, or fewer images."
            )
        return shape

    @cached_property
    def requested_strategy(self) -> Strategy | None:
        """The requested strategy. None if the user requests none. Raises Refusal if the requested name is unknown."""
        if own := own_file.read(self.strategy, self.stack):
            return own.strategy
        return None if self.strategy is None else file.read_by_name(self.strategy)

    @property
    def notes_of_file(self) -> tuple[str, ...]:
        """What is assumed about the user's own strategy file."""
        own = own_file.read(self.strategy, self.stack)
        return own.notes if own else ()

    def strategies(self, num_gpus: int) -> list[Strategy]:
        """Return the requested strategy, or all shipped strategies that can train on this many GPUs.

        Raises Refusal if the requested strategy cannot run on this many GPUs, or if the stack's program cannot train as
        requested.
        """
        self._check_groups(num_gpus)
        if self.shard_group_size is not None and self.strategy is None:
            raise Refusal(f"--shard-group-size works only with --strategy {_IN_GROUPS}. Add one of these strategies.")
        if (chosen := self.requested_strategy) is not None:
            if reason := cannot_run(STACKS[self.stack], chosen):
                raise Refusal(f"--strategy {self.strategy}: {reason}. Use another strategy, or another --stack.")
            if reason := self._cannot_share(chosen, num_gpus):
                raise Refusal(f"{self.sharing_flag}: {reason}. Remove --strategy, or use another strategy.")
            if self.shard_group_size is None and not chosen.could_run(num_gpus):
                limit, remedy = "needs groups of ranks", "zero3_tuned or fsdp2"
                if chosen.distributed_type == "NO":
                    limit, remedy = "runs one process", "ddp"
                raise Refusal(
                    f"--strategy {self.strategy}: this strategy {limit}, but --gpus is {num_gpus}. Use {remedy}."
                )
            useful = [chosen]
        else:
            useful = [chosen for chosen in self._possible(num_gpus) if self._why_useless(chosen, num_gpus) is None]
        refused = [(chosen, stack_options.why_not(self.training(chosen))) for chosen in useful]
        possible = [chosen for chosen, reason in refused if reason is None]
        if not possible and refused and refused[0][1] is not None:
            raise Refusal(refused[0][1].message)
        return possible

    def left_out(self, num_gpus: int) -> dict[str, str]:
        """Return the reason why each shipped strategy that is not in `strategies` was left out, by name.

        Strategies that cannot run on this many GPUs are not listed. The result is empty if a strategy is requested.
        """
        reasons: dict[str, str] = {}
        for chosen in self._possible(num_gpus) if self.strategy is None else ():
            if (reason := self._why_useless(chosen, num_gpus)) is not None:
                reasons[chosen.name] = reason
            elif (refused := stack_options.why_not(self.training(chosen))) is not None:
                reasons[chosen.name] = refused.reason
        return reasons

    def _possible(self, num_gpus: int) -> list[Strategy]:
        shipped = map(file.read_by_name, file.names())
        return [chosen for chosen in shipped if chosen.could_run(num_gpus)]

    def _why_useless(self, chosen: Strategy, num_gpus: int) -> str | None:
        """Return why a strategy is impossible for the stack, or useless on this many GPUs. None if it is neither.

        On one GPU there is nothing to average or to shard. Only training without an engine and offload are useful
        there. DeepSpeed's stages are useful too if the stack cannot train without an engine.
        """
        stack = STACKS[self.stack]
        if reason := cannot_run(stack, chosen) or self._cannot_share(chosen, num_gpus):
            return reason
        if num_gpus > 1 or chosen.offloads or chosen.distributed_type == "NO":
            return None
        if chosen.distributed_type == "DEEPSPEED" and "NO" not in stack.runs:
            return None
        return "on one GPU there is nothing to shard or to average"

    def _cannot_share(self, chosen: Strategy, num_gpus: int) -> str | None:
        """Return why GPUs cannot share a sequence with a strategy. None if they can, or if it is not requested."""
        if self.sequence_ranks == 1:
            return None
        if self.uses_ulysses:
            return None if chosen.zero_stage else "DeepSpeed's Ulysses needs stage 1, 2 or 3 of ZeRO"
        if chosen.distributed_type != "FSDP" or chosen.fsdp1_sharding is not None:
            return "PyTorch's context parallelism needs FSDP2"
        if chosen.offloads:
            return "context parallelism is not predicted with offload"
        # accelerate/parallelism_config.py: several replicas need more shards than GPUs that share a sequence.
        shards = num_gpus // self.replicas(chosen, num_gpus)
        if shards < num_gpus and (shards % self.sequence_ranks or shards == self.sequence_ranks):
            return f"{shards} GPUs share a copy of the model states, which must be a larger multiple of this number"
        return None

    def could_run(self, num_gpus: int) -> bool:
        """Return whether the requested strategy can train on this many GPUs.

        True if no strategy is requested, because some strategy runs on any number. With `shard_group_size`, the number
        of GPUs must be a multiple of it.
        """
        if num_gpus % self.sequence_ranks:
            return False
        if self.shard_group_size is not None and num_gpus % self.shard_group_size:
            return False
        if (chosen := self.requested_strategy) is None:
            return True
        is_possible = self.shard_group_size is not None or chosen.could_run(num_gpus)
        return is_possible and self._cannot_share(chosen, num_gpus) is None

    def replicas(self, chosen: Strategy, num_gpus: int) -> int:
        """Return the number of copies of the model states that all GPUs together keep under a strategy.

        Each copy is sharded over a group of GPUs.

        With `shard_group_size`, there is one copy per group of this size. Without it, strategies without groups keep
        one copy. Strategies with groups keep one copy per node, or as many as their file says on a single node.

        Raises Refusal if the strategy cannot have groups, or if the size does not divide the number of GPUs.
        """
        size = self.shard_group_size
        if size is None:
            if chosen.mesh is None:
                return 1
            nodes = self.box(num_gpus).num_nodes
            return nodes if 1 < nodes < num_gpus else chosen.mesh[0]
        is_fsdp = chosen.distributed_type == "FSDP" and not chosen.offloads and chosen.fsdp1_sharding is None
        if not is_fsdp and chosen.zero_stage not in (1, 2):
            raise Refusal(
                f"--shard-group-size {size}: {chosen.name} does not shard within groups. Use --strategy {_IN_GROUPS}."
            )
        if size == 1 or num_gpus % size:
            raise Refusal(
                f"--shard-group-size {size}: the size must be at least 2, and --gpus {num_gpus} must be "
                "a multiple of it."
            )
        return num_gpus // size

    def batch(self) -> tuple[int, int | None, int | None]:
        """Return the sequences per GPU and step, the micro batch size and the number of accumulation steps.

        If GPUs share sequences, the first number is for all GPUs that share them. The last two are None if the planner
        is to choose them. A micro batch alone does not change the default of `SEQUENCES_PER_GPU` sequences if it
        divides it. Raises Refusal if a number does not divide another.
        """
        micro, accumulation = self.micro_batch_size, self.gradient_accumulation_steps
        if micro is not None and self.has_other_default_batch:
            accumulation = 1
        if micro is not None and accumulation is not None:
            product = micro * accumulation * self.num_groups
            if self.global_batch_size not in (None, product):
                raise Refusal(
                    f"--global-batch-size {self.global_batch_size} is not {product}, the product of "
                    f"--micro-batch-size {micro}, --gradient-accumulation-steps {accumulation} and "
                    f"{self._groups_in_words}. Leave one of these options out."
                )
            return micro * accumulation, micro, accumulation
        if accumulation is not None and self.global_batch_size is None:
            raise Refusal(
                "--gradient-accumulation-steps needs --micro-batch-size or --global-batch-size. Add one of them."
            )
        sequences = self._sequences_per_gpu()
        if micro is not None:
            return sequences, micro, self._divide(sequences, micro, "--micro-batch-size")
        if accumulation is not None:
            return sequences, self._divide(sequences, accumulation, "--gradient-accumulation-steps"), accumulation
        return sequences, None, None

    @property
    def has_other_default_batch(self) -> bool:
        """Whether the user requests only a micro batch size, and it does not divide the default number of sequences."""
        return (
            self.micro_batch_size is not None
            and self.gradient_accumulation_steps is None
            and self.global_batch_size is None
            and SEQUENCES_PER_GPU * self.sequence_ranks % self.micro_batch_size != 0
        )

    @property
    def _groups_in_words(self) -> str:
        """The number of groups, as the options state it."""
        shared = "" if self.sequence_ranks == 1 else f" / {self.sharing_flag}"
        return f"--gpus {self.num_gpus}{shared}"

    def _sequences_per_gpu(self) -> int:
        if self.global_batch_size is None:
            return SEQUENCES_PER_GPU * self.sequence_ranks
        sequences, remainder = divmod(self.global_batch_size, self.num_groups)
        if remainder or sequences == 0:
            raise Refusal(
                f"--global-batch-size {self.global_batch_size} cannot be divided equally among "
                f"{self._groups_in_words}. Change one of them."
            )
        return sequences

    def _divide(self, sequences: int, factor: int, flag: str) -> int:
        """Divide a GPU's sequences by the value of a flag. Raises Refusal if there is a remainder."""
        quotient, remainder = divmod(sequences, factor)
        if remainder or quotient == 0:
            total = self.global_batch_size or sequences * self.num_groups
            raise Refusal(
                f"--global-batch-size {total} on --gpus {self.num_gpus} is {sequences} sequences per "
                f"{self.group}. This is not a multiple of {flag} {factor}. Change one of these options."
            )
        return quotient


def cannot_run(stack: Stack, chosen: Strategy) -> str | None:
    """Return why a program cannot run a strategy. None if it can."""
    if chosen.distributed_type not in stack.runs:
        return f"{stack.name} has no {_ENGINES[chosen.distributed_type]}"
    if chosen.fsdp1_sharding is not None and stack.name in ("axolotl", "torchtitan"):
        return f"{stack.name} is predicted with FSDP2 only, not with FSDP1"
    if stack.name == "torchtitan" and chosen.ddp_json is not None:
        return "torchtitan has no option for DDP's gradient_as_bucket_view"
    return None


_ENGINES = {"NO": "training without an engine", "MULTI_GPU": "DDP", "DEEPSPEED": "ZeRO", "FSDP": "FSDP2"}


def reading(gpu: str | None) -> str:
    """Return how the name of a GPU is read if it is the beginning of several names. Empty for all other names."""
    if gpu is None or gpu in gpus.GPUS:
        return ""
    name = gpus.find_gpu(gpu).name
    others = [each for each in gpus.kinds(gpu) if each != name]
    return f"{gpu} is read as {name}; for another card, write {' or '.join(others)}" if others else ""


def find_model(name: str, asked: Request) -> tuple[ModelShape, Request, list[str]]:
    """Find a model by its name.

    Returns its shape, the request with the sequence length filled in, and notes on how the model is counted. Raises
    Refusal if the model is unknown. Texts of a configuration that a user names are returned without control characters.
    """
    if not name.isprintable():
        raise Refusal(f"--model {printable(name)}: the name has a line break or another control character. Rename it.")
    try:
        shape, asked, notes = _found(name, asked)
    except Refusal as refusal:
        raise Refusal(printable(str(refusal))) from None
    if (reason := asked.why_not_shared(shape)) is not None:
        raise Refusal(f"{asked.sharing_flag}: {printable(reason)}. Change or remove the option.")
    return shape, asked, [printable(note) for note in (*notes, *asked.notes_of_file)]


def _found(name: str, asked: Request) -> tuple[ModelShape, Request, list[str]]:
    try:
        shape, length, notes = shapes.find_for_length(name, asked.sequence_length)
    except ValueError as not_known:
        if isinstance(not_known, shapes.NotRead) and not CLASS_NAME.fullmatch(name):
            raise Refusal(str(not_known)) from None
        with refusing():
            traced = _traced(name, str(not_known), asked)
            shape, length, notes = shapes.for_length(traced, asked.sequence_length)
    asked.check_images(shape)
    shape = asked.with_images(shape, length)
    return asked.with_adapter(shape), asked.replace(sequence_length=length), notes


def _traced(name: str, not_known: str, asked: Request) -> ModelShape:
    """Return the shape of a model that theory does not know, from a trace of its modules.

    Raises Refusal with the text `not_known` if the name stands for no model of transformers, or if PyTorch is not
    installed.
    """
    if find_spec("torch") is None or find_spec("transformers") is None:
        command = install_command("check")
        raise Refusal(f"{str(not_known).rstrip('.')}. With PyTorch, other models of transformers are traced: {command}")
    from zero_study.dryrun import models

    found = models.find_class(name)
    if found is None:
        raise Refusal(not_known)
    progress.at_once(f"Tracing the modules of {name}")  # starts no thread, because the trace is in a fork
    has_image = asked.images is not None or asked.freeze_vision_tower
    return models.shape_of_class(
        *found, name, has_image, (asked.freeze_vision_tower,), has_adapters=asked.lora_rank is not None
    )


# The fields of Request that are the stack's if they are not requested.
STACK_DEFAULTED_FIELDS = tuple(field.name for field in dataclasses.fields(Stack) if field.name in Request.model_fields)
