"""A validated request to the planner: GPUs, batch and strategies."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from typing import Literal, get_args

from study import progress
from study.errors import Refusal, refusing
from study.strategy import file
from study.strategy.file import Strategy
from study.terminal import printable
from study.theory import adapters, hardware, shapes
from study.theory.adapters import Adapter, AdapterKind
from study.theory.engine import (
    Attention,
    Checkpointing,
    Kernels,
    LossKernel,
    Optimizer,
    OptimizerKernel,
    PrecisionClass,
    StepConfig,
)
from study.theory.hardware import Cluster
from study.theory.shapes import DEFAULT_LENGTH, ModelShape
from study.theory.stacks import DEFAULT_STACK, STACKS, GradientType, Stack, StackName

INSTALL = "pip install 'zero-study[train]'"
CLASS_NAME = re.compile(r"[A-Z]\w*For[A-Z]\w+|[A-Z]\w*LMHeadModel")
CHECKPOINTED: dict[Checkpointing, bool | Literal["selective", "selective-op"]] = {
    "full": True, "selective": "selective", "selective-op": "selective-op", "none": False,
}  # fmt: skip

_CHOICES: dict[str, tuple[str | None, ...]] = {
    "stack": get_args(StackName),
    "precision": (None, *get_args(PrecisionClass)),
    "activation_checkpointing": (None, *get_args(Checkpointing)),
    "kernels": get_args(Kernels),
    "attention": get_args(Attention),
    "loss_kernel": (None, *get_args(LossKernel)),
    "optimizer": get_args(Optimizer),
    "optimizer_kernel": get_args(OptimizerKernel),
    "grad_accum_dtype": get_args(GradientType),
    "reduce_dtype": get_args(GradientType),
    "adapter": get_args(AdapterKind),
}
# The fields of Request that are the stack's if they are not requested.
OF_STACK = ("kernels", "attention", "loss_kernel", "optimizer_kernel", "activation_checkpointing", "grad_accum_dtype",
            "sync_each_batch", "reduce_dtype")  # fmt: skip

# Units of the options that are not whole numbers.
_RATES = {
    "network_gbps": "Gbit/s of a node",
    "gpu_memory": "GiB",
    "gpu_tflops": "TFLOP/s, dense and in 16 bits",
    "gpu_bandwidth": "GB/s",
    "host_memory": "GiB of a node",
    "host_bandwidth": "GB/s of a node",
    "disk": "TB of a node",
    "disk_bandwidth": "GB/s, for reading and writing",
    "link_bandwidth": "GB/s in one direction",
}
_IN_GROUPS = "fsdp2_hybrid, zero1 or zero2"
MOST_GPUS = 1_000_000
# Sequences per GPU and step, if no global batch is requested. A requested micro batch that does not divide it replaces
# it, so that there is no gradient accumulation.
SEQUENCES_PER_GPU = 8


@dataclass(frozen=True)
class Request:
    """The question of a user to the planner. Raises Refusal if a value is not valid."""

    gpu: str | None = None  # None: the GPU is given by its three numbers below
    num_gpus: int = 1
    sequence_length: int | None = None  # None: 1,024, or the model's number of positions if that is smaller
    global_batch_size: int | None = None
    strategy: str | None = None  # None: all strategies
    micro_batch_size: int | None = None
    gradient_accumulation_steps: int | None = None
    precision: PrecisionClass | None = None  # None: bf16 if the GPU supports it, else fp16
    # The program whose defaults apply to all settings that are not requested. The fields of OF_STACK are None in a call
    # if they are not requested, and are filled in then.
    stack: StackName = DEFAULT_STACK
    # None if neither the request nor the stack sets it: full, if it makes a strategy fit or faster
    activation_checkpointing: Checkpointing | None = None
    kernels: Kernels = None  # type: ignore[assignment]
    compile: bool = False
    attention: Attention = None  # type: ignore[assignment]
    dropout: bool = False
    loss_kernel: LossKernel | None = None  # None: the same kind as the other kernels
    optimizer: Optimizer = "adamw"
    optimizer_kernel: OptimizerKernel = None  # type: ignore[assignment]
    grad_accum_dtype: GradientType = None  # type: ignore[assignment]  # DeepSpeed
    sync_each_batch: bool = None  # type: ignore[assignment]  # FSDP2 reduces gradients in every micro step
    reduce_dtype: GradientType = None  # type: ignore[assignment]  # FSDP2
    lora_rank: int | None = None  # None: no adapters, all weights are trained
    lora_target: str | None = None  # names of modules with commas, or all-linear; None: PEFT's default
    lora_dropout: float = 0.0
    adapter: AdapterKind = "lora"
    load_in_4bit: bool = False  # frozen weights in NF4
    network_gbps: float | None = None  # Gbit/s between a node and all others; None: that of typical rented machines
    gpus_per_node: int | None = None
    # GPUs per copy of the model states; None: those of a node, for strategies with groups
    shard_group_size: int | None = None
    # The user's own GPU and machine. None: those of the GPU `gpu`, and of a typical machine with it.
    gpu_memory: float | None = None  # GiB
    gpu_tflops: float | None = None  # dense, in 16 bits, with accumulation in fp32
    gpu_bandwidth: float | None = None  # GB/s of the GPU's memory
    host_memory: float | None = None  # GiB of a node
    host_cores: int | None = None  # of a node
    host_bandwidth: float | None = None  # GB/s of a node's host memory
    disk: float | None = None  # TB of a node
    disk_bandwidth: tuple[float, float] | None = None  # GB/s that a node's disks read and write
    link_bandwidth: float | None = None  # GB/s between the GPUs of a node, in one direction

    def __post_init__(self) -> None:
        counts = ("num_gpus", "sequence_length", "global_batch_size", "micro_batch_size", "gradient_accumulation_steps")
        for name in (*counts, "gpus_per_node", "shard_group_size", "host_cores", "lora_rank"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise Refusal(f"{name}={value!r}: must be a whole number of at least 1")
        if self.num_gpus > MOST_GPUS:
            raise Refusal(f"num_gpus={self.num_gpus}: must be at most {MOST_GPUS:,}")
        for name, unit in _RATES.items():
            value = getattr(self, name)
            for number in value if isinstance(value, tuple) else () if value is None else (value,):
                if not 0 < number < math.inf:
                    raise Refusal(f"{name}={value!r}: must be a number above 0, in {unit}")
        if self.stack in STACKS:
            self._fill_in_from_stack()
        for name, values in _CHOICES.items():
            if getattr(self, name) not in values:
                raise Refusal(f"{name}={getattr(self, name)!r}: unknown; take one of {', '.join(filter(None, values))}")
        self._check_adapter()

    def _check_adapter(self) -> None:
        """Raise Refusal for settings of adapters that have no effect or no meaning."""
        if self.lora_rank is None:
            settings = {"--lora-target": self.lora_target, "--lora-dropout": self.lora_dropout,
                        "--load-in-4bit": self.load_in_4bit, "--adapter": self.adapter != "lora"}  # fmt: skip
            if unused := [flag for flag, value in settings.items() if value]:
                raise Refusal(
                    f"{unused[0]} has no effect without adapters, because all weights would be trained. "
                    "Add --lora-rank, for example --lora-rank 16."
                )
            return
        if self.lora_target is not None and not self.lora_target.replace(",", " ").strip():
            raise Refusal("--lora-target names no module. Name modules, such as q_proj,v_proj, or use all-linear.")
        if not 0 <= self.lora_dropout < 1:
            raise Refusal(f"--lora-dropout {self.lora_dropout}: must be at least 0 and below 1.")
        if self.stack == "torchtitan":
            raise Refusal("--stack torchtitan: adapters are predicted for PEFT only. Take another stack, such as trl.")

    def _fill_in_from_stack(self) -> None:
        """Set every field of OF_STACK that is not requested to the stack's default.

        If other kernels are requested than the stack's, the loss has their kind.
        """
        stack = STACKS[self.stack]
        if self.loss_kernel is None and self.kernels in (None, stack.kernels):
            object.__setattr__(self, "loss_kernel", stack.loss_if(self.compile))
        for name in OF_STACK:
            if getattr(self, name) is None and name != "loss_kernel":
                object.__setattr__(self, name, getattr(stack, name))

    @property
    def settings(self) -> Stack:
        """The stack with the requested settings instead of its own."""
        requested = {name: getattr(self, name) for name in OF_STACK if name != "loss_kernel"}
        return dataclasses.replace(STACKS[self.stack], loss_kernel=self.job().loss, **requested)

    def box(self, num_gpus: int | None = None) -> Cluster:
        """Return the machine: the requested numbers, and those of a typical machine where the request has none."""
        with refusing():
            base = None if self.gpu is None else hardware.find_gpu(self.gpu)
            gpu = hardware.from_numbers(base, self.gpu_memory, self.gpu_tflops, self.gpu_bandwidth)
            return hardware.with_host(
                hardware.typical_box(gpu, num_gpus or self.num_gpus, self.gpus_per_node),
                memory_gib=self.host_memory,
                cores=self.host_cores,
                gigabytes_per_second=self.host_bandwidth,
                disk_terabytes=self.disk,
                disk_gigabytes_per_second=self.disk_bandwidth,
                link_gigabytes_per_second=self.link_bandwidth,
                network_gigabits_per_second=self.network_gbps,
            )

    def job(self, micro_batch_size: int = 1, gradient_accumulation_steps: int = 1) -> StepConfig:
        """Return what each rank computes.

        Without a requested setting, there is no activation checkpointing. The planner tries both settings then.
        """
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
        )

    def with_adapter(self, shape: ModelShape) -> ModelShape:
        """Return a shape with the requested adapters. Raises Refusal if they do not suit the model."""
        with refusing():
            shape = adapters.with_adapter(shape, self._adapter(shape))
        return shape

    def _adapter(self, shape: ModelShape) -> Adapter | None:
        """Return the adapters as the stack trains them.

        TRL 1.10 casts adapters of quantized weights to bf16 in its SFTTrainer. For the others it is assumed
        that the program calls PEFT's prepare_model_for_kbit_training, as PEFT's guide says. This project's trainer
        creates its models in fp32.
        """
        adapter = adapters.from_options(
            self.lora_rank, self.lora_target, self.adapter, self.lora_dropout, self.load_in_4bit, shape.head
        )
        if adapter is None:
            return None
        if self.load_in_4bit:
            if self.stack == "trl":
                return dataclasses.replace(adapter, in_fp32=False)
            return dataclasses.replace(adapter, unquantized="fp32")
        return dataclasses.replace(adapter, frozen="fp32") if self.stack == "study" else adapter

    @cached_property
    def chosen_precision(self) -> PrecisionClass:
        has = self.box(1).gpu.peak_flops_per_second
        precision = self.precision or ("bf16" if "bf16" in has else "fp16")
        kind = precision.removeprefix("pure-").removesuffix("-autocast")
        if kind not in has:
            name, supported = self.box(1).gpu.name, ", ".join(kind for kind in has if kind != "tf32")
            raise Refusal(f"--precision {precision}: {name} does not support it. It supports {supported}.")
        return precision

    def strategies(self, num_gpus: int) -> list[Strategy]:
        """Return the requested strategy, or all shipped strategies that can train on this many GPUs.

        Raises Refusal if the requested strategy cannot run on this many GPUs.
        """
        if self.shard_group_size is not None and self.strategy is None:
            raise Refusal(f"--shard-group-size goes with --strategy {_IN_GROUPS}. Add one of them.")
        if self.strategy is not None:
            chosen = file.read_by_name(self.strategy)
            if reason := cannot_run(STACKS[self.stack], chosen):
                raise Refusal(f"--strategy {self.strategy}: {reason}. Take another strategy, or another --stack.")
            if self.shard_group_size is None and not chosen.could_run(num_gpus):
                is_single = chosen.distributed_type == "NO"
                limit, remedy = (
                    ("runs one process", "ddp") if is_single else ("has groups of ranks", "zero3_tuned or fsdp2")
                )
                raise Refusal(f"--strategy {self.strategy}: {limit}, --gpus asks for {num_gpus}; take {remedy}")
            return [chosen]
        return [chosen for chosen in self._possible(num_gpus) if self._why_left_out(chosen, num_gpus) is None]

    def left_out(self, num_gpus: int) -> dict[str, str]:
        """Return why shipped strategies are not among `strategies`, by name.

        Strategies that cannot run on this many GPUs are not listed. The result is empty if a strategy is requested.
        """
        if self.strategy is not None:
            return {}
        reasons = {chosen.name: self._why_left_out(chosen, num_gpus) for chosen in self._possible(num_gpus)}
        return {name: reason for name, reason in reasons.items() if reason is not None}

    def _possible(self, num_gpus: int) -> list[Strategy]:
        shipped = map(file.read_by_name, file.names())
        return [chosen for chosen in shipped if chosen.could_run(num_gpus)]

    def _why_left_out(self, chosen: Strategy, num_gpus: int) -> str | None:
        stack = STACKS[self.stack]
        return cannot_run(stack, chosen) or _makes_no_sense(chosen, num_gpus, has_single="NO" in stack.runs)

    def could_run(self, num_gpus: int) -> bool:
        """Return whether the requested strategy can train on this many GPUs.

        True if no strategy is requested, because some strategy runs on any number. With `shard_group_size`, the number
        of GPUs must be a multiple of it.
        """
        if self.shard_group_size is not None:
            return num_gpus % self.shard_group_size == 0
        return self.strategy is None or file.read_by_name(self.strategy).could_run(num_gpus)

    def replicas(self, chosen: Strategy, num_gpus: int) -> int:
        """Return the number of copies of the model states that a strategy keeps.

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
        if chosen.mesh is None and chosen.zero_stage not in (1, 2):
            raise Refusal(f"--shard-group-size {size}: {chosen.name} has no groups. Use --strategy {_IN_GROUPS}.")
        if size == 1 or num_gpus % size:
            raise Refusal(
                f"--shard-group-size {size}: the size must be at least 2, and --gpus {num_gpus} a multiple of it."
            )
        return num_gpus // size

    def batch(self) -> tuple[int, int | None, int | None]:
        """Return the sequences per GPU and step, the micro batch size and the number of accumulation steps.

        The last two are None if the planner is to choose them. A micro batch alone does not change the default of
        `SEQUENCES_PER_GPU` sequences if it divides it. Raises Refusal if a number does not divide another.
        """
        micro, accumulation = self.micro_batch_size, self.gradient_accumulation_steps
        if micro is not None and self.has_other_default_batch:
            accumulation = 1
        if micro is not None and accumulation is not None:
            self._check_product(micro, accumulation)
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
        """Whether the requested micro batch replaces the default number of sequences, which is no multiple of it."""
        return (
            self.micro_batch_size is not None
            and self.gradient_accumulation_steps is None
            and self.global_batch_size is None
            and SEQUENCES_PER_GPU % self.micro_batch_size != 0
        )

    def _check_product(self, micro: int, accumulation: int) -> None:
        """Raise Refusal if the global batch is not the product of micro batch, accumulation steps and GPUs."""
        product = micro * accumulation * self.num_gpus
        if self.global_batch_size not in (None, product):
            raise Refusal(
                f"--global-batch-size {self.global_batch_size} is not --micro-batch-size {micro} x "
                f"--gradient-accumulation-steps {accumulation} x --gpus {self.num_gpus} = {product}. Leave one of "
                "them out."
            )

    def _sequences_per_gpu(self) -> int:
        if self.global_batch_size is None:
            return SEQUENCES_PER_GPU
        sequences, remainder = divmod(self.global_batch_size, self.num_gpus)
        if remainder or sequences == 0:
            raise Refusal(
                f"--global-batch-size {self.global_batch_size} cannot be divided equally among --gpus "
                f"{self.num_gpus}. Change one of them."
            )
        return sequences

    def _divide(self, sequences: int, factor: int, flag: str) -> int:
        """Divide a GPU's sequences by the value of a flag. Raises Refusal if there is a remainder."""
        quotient, remainder = divmod(sequences, factor)
        if remainder or quotient == 0:
            total = self.global_batch_size or sequences * self.num_gpus
            raise Refusal(
                f"--global-batch-size {total} on --gpus {self.num_gpus} is {sequences} sequences per GPU, which "
                f"{flag} {factor} does not divide. Change one of them."
            )
        return quotient


def _makes_no_sense(chosen: Strategy, num_gpus: int, has_single: bool) -> str | None:
    """Return why a strategy is useless on this many GPUs. None if it is useful.

    On one GPU there is nothing to average or to shard. Only training without an engine and offload are useful there.
    `has_single` says whether the stack can train without an engine. If it cannot, DeepSpeed's stages are useful too.
    """
    if num_gpus > 1 or chosen.offloads or chosen.distributed_type == "NO":
        return None
    if chosen.distributed_type == "DEEPSPEED" and not has_single:
        return None
    return "on one GPU there is nothing to shard or to average"


def cannot_run(stack: Stack, chosen: Strategy) -> str | None:
    """Return why a program cannot run a strategy. None if it can."""
    if chosen.distributed_type not in stack.runs:
        return f"{stack.name} has no {_ENGINES[chosen.distributed_type]}"
    if stack.name == "torchtitan" and chosen.ddp_json is not None:
        return "torchtitan has no option for DDP's gradient_as_bucket_view"
    return None


_ENGINES = {"NO": "training without an engine", "MULTI_GPU": "DDP", "DEEPSPEED": "ZeRO", "FSDP": "FSDP2"}


def find_model(name: str, asked: Request) -> tuple[ModelShape, Request, list[str]]:
    """Find a model by its name.

    Returns its shape, the request with the sequence length filled in, and notes on how the model is counted. Raises
    Refusal if the model is unknown. Texts of a foreign configuration are returned without control characters.
    """
    if not name.isprintable():
        raise Refusal(f"--model {printable(name)}: the name has a line break or another control character. Rename it.")
    try:
        shape, asked, notes = _found(name, asked)
    except Refusal as refusal:
        raise Refusal(printable(str(refusal))) from None
    return shape, asked, [printable(note) for note in notes]


def _found(name: str, asked: Request) -> tuple[ModelShape, Request, list[str]]:
    try:
        shape, length, notes = shapes.find_for_length(name, asked.sequence_length)
    except ValueError as not_known:
        if isinstance(not_known, shapes.NotRead) and not CLASS_NAME.fullmatch(name):
            raise Refusal(str(not_known)) from None
        with refusing():
            shape, length, notes = shapes.for_length(_traced(name, str(not_known)), asked.sequence_length)
    return asked.with_adapter(shape), dataclasses.replace(asked, sequence_length=length), notes


def _traced(name: str, not_known: str) -> ModelShape:
    """Return the shape of a model that theory does not know, from a trace of its modules.

    Raises Refusal with the text `not_known` if the name stands for no model of transformers, or if PyTorch is not
    installed.
    """
    if find_spec("torch") is None or find_spec("transformers") is None:
        raise Refusal(f"{str(not_known).rstrip('.')}. With PyTorch, other models of transformers are traced: {INSTALL}")
    from study.dryrun import models

    found = models.find_class(name)
    if found is None:
        raise Refusal(not_known)
    progress.at_once(f"Tracing the modules of {name}")  # starts no thread, because the trace is in a fork
    return models.shape_of_class(*found, name)
