"""Describe the settings that a prediction assumes: those of the user, and the defaults of the training program."""

from __future__ import annotations

from zero_study.planner.request import Request, reading
from zero_study.theory.engine import Attention, Checkpointing, Kernels, LossKernel, OptimizerKernel
from zero_study.theory.shapes import ModelShape
from zero_study.theory.stacks import STACKS, GradientType, Stack

KERNELS: dict[Kernels, str] = {
    "transformers": "the modules of transformers, without fused kernels",
    "fused": "fused: one kernel for each norm and activation function",
}
LOSSES: dict[LossKernel, str] = {
    "eager": "computed from logits in fp32 and copies of them",
    "upcast": "computed from logits in fp32",
    "fused": "computed by one fused kernel from logits in 16 bits",
    "chunked": "computed from a few logits at a time (chunked)",
}
OPTIMIZER_KERNELS: dict[OptimizerKernel, str] = {
    "fused": "all parameters in one fused kernel",
    "foreach": "operation by operation for all parameters (foreach)",
    "loop": "parameter by parameter (loop)",
}
CHECKPOINTING: dict[Checkpointing | None, str] = {
    None: "full if a strategy only fits or is faster with it, otherwise off",
    "none": "off",
    "full": "full: every block",
    "offload": "full: every block, whose inputs are moved to the host",
    "selective": "selective: every second block",
    "selective-op": "selective: the results of every second matrix product and of attention are kept",
}


def described(request: Request, shape: ModelShape | None = None) -> list[tuple[str, str]]:
    """Return every assumed setting with its value in words.

    Values that differ from the stack's default say so, and so does dropout if it has no effect. `shape` is the model,
    if there is only one.
    """
    stack, settings = STACKS[request.stack], request.settings
    precision, kinds = request.chosen_precision, stack.runs
    is_sixteen = precision in ("bf16", "fp16", "fp8")
    weights = {"fp32": "fp32 under autocast", "16-bit": "bf16, without fp32 master weights"}[settings.weights]

    def words(name: str, value: str) -> str:
        """Return a value as text, with a mark if it is not the training program's default."""
        default = stack.loss_if(request.compile) if name == "loss_kernel" else getattr(stack, name)
        is_default = getattr(settings, name) == default
        return value if is_default else f"{value} (as you requested; the default of {stack.name} is different)"

    kernels = "compiled (torch.compile)" if request.compile else words("kernels", KERNELS[settings.kernels])
    optimizer = f"{request.optimizer}, {OPTIMIZER_KERNELS[settings.optimizer_kernel]}"
    pairs = [
        ("name of the GPU", reading(request.gpu)),
        ("stack", f"{stack.name} ({stack.version})"),
        ("precision", precision),
        ("weights of DDP and one process",
         weights if is_sixteen and "MULTI_GPU" in kinds and request.lora_rank is None else ""),
        ("kernels", kernels),
        ("attention", words("attention", _attention(request, settings.attention))),
        ("loss", words("loss_kernel", LOSSES[settings.loss_kernel])),
        ("gradients under DeepSpeed", words("grad_accum_dtype", _accumulated(settings, precision))
         if "DEEPSPEED" in kinds else ""),
        ("gradients under FSDP2", _reduced(stack, settings, precision) if "FSDP" in kinds else ""),
        ("optimizer", words("optimizer_kernel", optimizer)),
        ("activation checkpointing",
         words("activation_checkpointing", CHECKPOINTING[settings.activation_checkpointing])),
        ("frozen weights", _frozen(request)),
        ("adapters", _adapters(request)),
        ("dropout", _dropout(request, settings.attention, shape)),
        ("images", _images(request, shape)),
        ("allocator", f"{stack.allocator} (the prediction is the same for every allocator)"),
    ]  # fmt: skip
    return [(name, value) for name, value in pairs if value]


def _dropout(request: Request, attention: Attention, shape: ModelShape | None) -> str:
    if shape is None:
        return "on" if request.dropout else "off"
    rates = ", ".join(f"{name} {rate:g}" for name, rate in shape.default_dropout.items())
    if not request.dropout:
        if request.stack in ("study", "torchtitan") or not rates or not shape.counts.has_dropout_outside_attention:
            return "off"
        return f"not counted, although {shape.name} has it by default ({rates}; add --dropout to count it)"
    if not shape.counts.is_dropout_counted:
        return f"on, but the prediction does not count it for {shape.name}"
    if not shape.counts.has_dropout:
        return f"on, but without an effect, because the modules of {shape.name} have no dropout"
    if not shape.counts.has_dropout_outside_attention and attention != "eager":
        return "on in attention only, without an effect on memory, because the fused kernel saves no mask"
    return f"on, as {shape.name} has it by default ({rates})" if rates else "on"


def _images(request: Request, shape: ModelShape | None) -> str:
    """Describe the images that a vision-language model gets. The text is empty for other models."""
    if shape is None or not (shape.num_images or shape.has_idle_part):
        return ""
    if shape.num_images and shape.with_image is not None:
        tower = "frozen, so that it has no gradients" if request.freeze_vision_tower else "trained like the rest"
        number = f"{shape.num_images} of {shape.with_image.size} in each sequence"
        return f"{number}, which take {shape.num_image_tokens:,} of its tokens. The vision tower is {tower}"
    if request.freeze_vision_tower:
        return "none, because all sequences are text. The vision tower is frozen"
    more = "" if shape.with_image is None else " Add --images for images in each sequence."
    return (
        f"none, because all sequences are text. The part of {shape.name} that reads inputs other than text does not "
        f"run.{more}"
    )


def _frozen(request: Request) -> str:
    """Return the types of the frozen weights. The text is empty without adapters."""
    if request.lora_rank is None:
        return ""
    if request.load_in_4bit:
        others = "16 bits"
        if request.stack != "trl":
            others = "fp32 (prepare_model_for_kbit_training), or 16 bits under FSDP2 and DeepSpeed"
        return f"NF4 with double quantization, and the weights that are not quantized in {others}"
    return "fp32" if request.stack == "study" else _type("model", request.chosen_precision)


def _adapters(request: Request) -> str:
    """Return the types of the adapters. The text is empty without adapters."""
    if request.lora_rank is None:
        return ""
    if request.stack == "trl" and request.load_in_4bit:
        return "bf16, because TRL casts them (DeepSpeed keeps fp32 master weights)"
    return "fp32, as PEFT 0.21 creates them (DeepSpeed casts them, and keeps fp32 master weights)"


def _attention(request: Request, attention: Attention) -> str:
    # FlashAttention-2 needs 16-bit types and a GPU since Ampere. Otherwise PyTorch uses another kernel that does not
    # store the scores.
    if attention != "sdpa":
        return {"eager": "separate operators (eager)"}.get(attention, f"FlashAttention-{attention[-1]}")
    generation = request.box(1).gpu.generation
    kernel = "that of cuDNN, from PyTorch 2.11 on" if generation in ("Hopper", "Blackwell") else "FlashAttention-2"
    if generation in ("Volta", "Turing") or "32" in request.chosen_precision:
        kernel = "memory-efficient"
    return f"PyTorch's scaled_dot_product_attention ({kernel})"


def _type(kind: GradientType, precision: str) -> str:
    """Return the name of the type of gradients. "model" stands for the type in which the model computes."""
    if kind == "fp32" or precision in ("fp32", "tf32"):
        return "fp32"
    return "fp16" if precision.startswith("fp16") else "bf16"


def _accumulated(settings: Stack, precision: str) -> str:
    # Under autocast, parameters and their gradients are fp32.
    kind = "fp32" if precision.endswith("-autocast") else settings.grad_accum_dtype
    return f"accumulated in {_type(kind, precision)}"


def _reduced(stack: Stack, settings: Stack, precision: str) -> str:
    when = "every micro step" if settings.sync_each_batch else "the last micro step, and not sharded until then"
    value = f"reduced in {_type(settings.reduce_dtype, precision)} in {when}"
    changed = [name for name in ("sync_each_batch", "reduce_dtype") if getattr(settings, name) != getattr(stack, name)]
    return f"{value} (as you requested; the default of {stack.name} is different)" if changed else value
