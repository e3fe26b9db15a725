"""Tables of the settings with which each program trains as a prediction assumes, or of why it cannot.

There is one table per option of a request that a strategy's file does not state. Its rows are the values of the option,
and its cells have what a program needs: options of its command, keys of its files, or lines of its code. The cell of a
program that cannot train like this has the reason, and what to use instead. `stack_options` reads the tables.

The sources are transformers 5.23, accelerate 1.15, DeepSpeed 0.19.8, TRL 1.10, axolotl 0.18, torchtitan 0.3.0,
bitsandbytes 0.50, torchao 0.18 and Liger 0.8.5.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from zero_study.theory.engine import Optimizer, PrecisionClass
from zero_study.theory.stacks import StackName

# Kinds of strategies. plain: in one process, or DDP. zero: ZeRO's stages 1 to 3. "offload": of the optimizer.
Kind = Literal["plain", "zero0", "zero", "zero3", "zero offload", "fsdp", "fsdp offload"]


@dataclass(frozen=True)
class Parts:
    """The lines of code and the options that a program needs for some settings."""

    flags: tuple[str, ...] = ()  # options of the command
    keys: Mapping[str, Any] = field(default_factory=dict)  # of axolotl's file
    json: Mapping[str, Any] = field(default_factory=dict)  # keys of a DeepSpeed JSON
    model: tuple[str, ...] = ()  # arguments of from_pretrained
    accelerator: tuple[str, ...] = ()  # arguments of Accelerator
    lines: tuple[str, ...] = ()  # what else the program has to do
    liger: frozenset[str] = frozenset()  # what Liger has to replace: "kernels", "chunked" or "upcast"

    def __add__(self, more: Parts) -> Parts:
        joined: dict[str, Any] = {}
        for each in fields(Parts):
            mine, added = getattr(self, each.name), getattr(more, each.name)
            joined[each.name] = mine + added if isinstance(mine, tuple) else mine | added
        return Parts(**joined)


@dataclass(frozen=True)
class Refused:
    """The reason why a program cannot train as requested, and what to do instead."""

    reason: str
    remedy: str

    @property
    def message(self) -> str:
        """The reason and the remedy, as sentences."""
        return f"{self.reason}. {self.remedy}."


Cell = Parts | Refused
# What programs need. If that depends on the strategy, by kind; the key "any" stands for all others.
Cells = dict[tuple[StackName, ...], Cell | Mapping[Kind | Literal["any"], Cell]]

NOTHING = Parts()
ALL: tuple[StackName, ...] = ("accelerate", "trainer", "trl", "axolotl", "torchtitan", "deepspeed", "study")
# Programs in which the user's own code creates the model.
OWN_MODEL: tuple[StackName, ...] = ("accelerate", "trainer", "deepspeed")
# Programs that train models of transformers.
TRANSFORMERS: tuple[StackName, ...] = (*OWN_MODEL, "trl", "axolotl")


def _flags(*flags: str) -> Parts:
    return Parts(flags=flags)


def _keys(**keys: Any) -> Parts:
    return Parts(keys=keys)


def _lines(*lines: str) -> Parts:
    return Parts(lines=lines)


def _model(*arguments: str) -> Parts:
    return Parts(model=arguments)


# ---------------------------------------------------------------- the optimizer

_HOST_STEP = Refused(
    "DeepSpeed updates offloaded weights with its own AdamW in fp32",
    "Use --optimizer adamw, or a strategy without DeepSpeed's offload",
)
_ONLY_ADAMW = Refused("{stack} trains with AdamW only", "Use --optimizer adamw, or --stack accelerate")


def _client(optimizer: str) -> Parts:
    """Return how plain DeepSpeed gets an optimizer that is not its own."""
    return Parts(
        json={"zero_allow_untested_optimizer": True}, lines=(f"deepspeed.initialize(..., optimizer={optimizer})",)
    )


MUON = (
    "torch.optim.Muon(...) for the matrices of the blocks, torch.optim.AdamW(..., fused=True) for all other parameters"
)
OPTIMIZERS: dict[str, Cells] = {
    "adamw": {ALL: NOTHING},  # its kernel is in the next table
    "adamw-8bit": {
        ("accelerate",): {
            "any": _lines("bitsandbytes.optim.AdamW8bit(...)"),
            "fsdp": _lines("torchao.optim.AdamW8bit(...)"),  # bitsandbytes cannot update sharded weights of FSDP2
        },
        ("trainer", "trl"): {
            "any": _flags("--optim adamw_bnb_8bit"),
            "fsdp": _flags("--optim adamw_torch_8bit"),
        },
        ("axolotl",): {
            "any": _keys(optimizer="adamw_bnb_8bit"),
            "fsdp": _keys(optimizer="adamw_torch_8bit"),
        },
        ("deepspeed",): _client("bitsandbytes.optim.AdamW8bit(...)"),
        ("torchtitan", "study"): _ONLY_ADAMW,
    },
    "lamb": {
        ("accelerate",): _lines("bitsandbytes.optim.LAMB(...)"),
        ("trainer", "trl"): _lines('Trainer(optimizer_cls_and_kwargs=(bitsandbytes.optim.LAMB, {"lr": ...}))'),
        ("deepspeed",): _client("deepspeed.ops.lamb.FusedLamb(...)"),
        ("axolotl",): Refused("axolotl has no LAMB", "Use another optimizer, or --stack accelerate"),
        ("torchtitan", "study"): _ONLY_ADAMW,
    },
    "muon": {
        ("accelerate",): {
            "any": _lines(MUON),
            **dict.fromkeys(
                ("zero0", "zero"),
                Refused(
                    "Muon needs a second optimizer for vectors, and accelerate gives DeepSpeed only one",
                    "Use FSDP2 or DDP, or --stack deepspeed, which has its own Muon",
                ),
            ),
        },
        ("trainer", "trl"): Refused("{stack} has no Muon", "Use --stack accelerate or axolotl"),
        ("axolotl",): {
            "any": _keys(optimizer="muon"),
            **dict.fromkeys(
                ("zero0", "zero"),
                Refused("axolotl's Muon does not work with DeepSpeed", "Use FSDP2 or DDP, or --stack deepspeed"),
            ),
        },
        ("deepspeed",): Parts(
            # Under ZeRO, DeepSpeed clips the update of Muon instead of its gradient.
            json={"optimizer": {"type": "Muon", "params": {}}, "gradient_clipping": 0.0},
            lines=("in the JSON, optimizer.params: the learning rate (lr)",),
        ),
        ("torchtitan", "study"): _ONLY_ADAMW,
    },
    "adafactor": {
        ("accelerate",): _lines("torch.optim.Adafactor(...)"),
        ("trainer", "trl"): _flags("--optim adafactor"),
        ("axolotl",): _keys(optimizer="adafactor"),
        ("deepspeed",): _client("torch.optim.Adafactor(...)"),
        ("torchtitan", "study"): _ONLY_ADAMW,
    },
    "sgd": {
        ("accelerate",): _lines("torch.optim.SGD(...)"),
        ("trainer", "trl"): _flags("--optim sgd"),
        ("axolotl",): _keys(optimizer="sgd"),
        ("deepspeed",): _client("torch.optim.SGD(...)"),
        ("torchtitan", "study"): _ONLY_ADAMW,
    },
}
# Optimizers that do not work with an engine, whichever program uses it.
OF_ENGINES: dict[Optimizer, Mapping[Kind, Refused]] = {
    "adamw-8bit": {"zero offload": _HOST_STEP},
    "lamb": {
        "zero": Refused(
            "ZeRO flattens the weights, so LAMB cannot take the norm of each one", "Use DDP, or another optimizer"
        ),
        "fsdp": Refused(
            "no LAMB is known that can update the sharded weights of FSDP2", "Use DDP, or another optimizer"
        ),
        "zero offload": _HOST_STEP,
    },
    "muon": {
        "zero3": Refused(
            "DeepSpeed's Muon at stage 3 needs reduce_scatter: false, whose messages are not predicted",
            "Use stage 1 or 2, such as --strategy zero2",
        ),
        "zero offload": _HOST_STEP,
    },
    "adafactor": {
        "zero": Refused(
            "ZeRO flattens the weights, so Adafactor keeps its whole second moment", "Use DDP, or another optimizer"
        ),
        "fsdp": Refused(
            "the Adafactor of PyTorch and that of transformers fail with the sharded weights of FSDP2",
            "Use DDP, or another optimizer",
        ),
        "zero offload": _HOST_STEP,
    },
    "sgd": {"zero offload": _HOST_STEP},
}

# The kernel of AdamW. DeepSpeed's own optimizer, and that of an offload, is always one kernel.
KERNELS_OF_OPTIMIZER: dict[str, Cells] = {
    "fused": {
        ("accelerate",): {"any": _lines("torch.optim.AdamW(..., fused=True)"), "zero offload": NOTHING},
        ("trainer", "trl", "axolotl", "torchtitan", "deepspeed", "study"): NOTHING,
    },
    "foreach": {
        ("accelerate",): {"any": _lines("torch.optim.AdamW(..., foreach=True)"), "zero offload": NOTHING},
        ("trainer", "trl"): {"any": _flags("--optim adamw_torch"), "zero offload": NOTHING},
        ("axolotl",): {"any": _keys(optimizer="adamw_torch"), "zero offload": NOTHING},
        ("torchtitan",): _flags("--optimizer.implementation foreach"),
        ("deepspeed",): NOTHING,  # refused with the strategy
        ("study",): {
            "any": NOTHING,
            **dict.fromkeys(
                ("plain", "fsdp"), Refused("{stack} always uses the fused kernel", "Leave --optimizer-kernel out")
            ),
        },
    },
}
KERNELS_OF_OPTIMIZER |= {
    "loop": KERNELS_OF_OPTIMIZER["foreach"]
    | {
        ("accelerate",): {"any": _lines("torch.optim.AdamW(..., foreach=False)"), "zero offload": NOTHING},
        ("trainer", "trl"): {
            "any": _lines('Trainer(optimizer_cls_and_kwargs=(torch.optim.AdamW, {"lr": ..., "foreach": False}))'),
            "zero offload": NOTHING,
        },
        ("axolotl",): {
            "any": Refused("axolotl has no AdamW that updates one parameter after another", "Use foreach or fused"),
            "zero offload": NOTHING,
        },
        ("torchtitan",): _flags("--optimizer.implementation for-loop"),
    },
    "of another optimizer": {ALL: Refused("only AdamW has a choice of kernels", "Leave --optimizer-kernel out")},
}

# ---------------------------------------------------------------- kernels of the model and of the loss

_CROSS_ENTROPY = "model.loss_function: a copy of transformers' ForCausalLMLoss with LigerCrossEntropyLoss()"
_NO_SUCH_LOSS = Refused("{stack} has no such loss", "Leave --loss-kernel out, or use --stack accelerate")
_COMPILED_LOSS = Refused(
    "torch.compile compiles the loss of {stack}, too", "Leave --loss-kernel out, or use --stack accelerate"
)
_EAGER_LOSS = "model.loss_function = torch.compiler.disable(transformers.loss.loss_utils.ForCausalLMLoss)"
_TITAN_LOSS = "CONFIG: a function with loss=CrossEntropyLoss.Config(), such as llama3_debugmodel_ce_loss"

# The keys end in " compiled" with torch.compile. Then the loss of transformers is `upcast`.
LOSSES: dict[str, Cells] = {
    "eager": {
        (*OWN_MODEL, "axolotl", "study"): NOTHING,
        ("trl",): _flags("--loss_type nll"),
        ("torchtitan",): _lines(_TITAN_LOSS),
    },
    "upcast": {
        OWN_MODEL: _lines(_CROSS_ENTROPY),
        ("trl",): _flags("--loss_type nll") + _lines(f"trainer.{_CROSS_ENTROPY}"),
        ("axolotl",): Parts(liger=frozenset({"upcast"})),
        ("torchtitan", "study"): Refused("{stack} has this loss only with --compile", "Add --compile"),
    },
    "fused": {
        OWN_MODEL: _lines(f"{_CROSS_ENTROPY} and without logits.float()"),
        ("trl",): _flags("--loss_type nll") + _lines(f"trainer.{_CROSS_ENTROPY} and without logits.float()"),
        ("axolotl",): Refused("axolotl casts the logits to fp32", "Use --loss-kernel chunked, eager or upcast"),
        ("torchtitan", "study"): _NO_SUCH_LOSS,
    },
    "chunked": {
        (*OWN_MODEL, "axolotl"): Parts(liger=frozenset({"chunked"})),
        ("trl", "torchtitan"): NOTHING,
        ("study",): _NO_SUCH_LOSS,
    },
}
LOSSES |= {
    "eager compiled": {
        OWN_MODEL: _lines(_EAGER_LOSS),
        ("trl",): _flags("--loss_type nll") + _lines(f"trainer.{_EAGER_LOSS}"),
        ("torchtitan",): _flags("--compile.components model") + _lines(_TITAN_LOSS),
        ("axolotl", "study"): _COMPILED_LOSS,
    },
    "upcast compiled": {
        (*OWN_MODEL, "axolotl", "study"): NOTHING,
        ("trl",): _flags("--loss_type nll"),
        ("torchtitan",): _lines(_TITAN_LOSS),
    },
    "fused compiled": LOSSES["fused"],
    "chunked compiled": LOSSES["chunked"],
}

# Liger's kernels come with its loss in chunks, unless they are told not to. In TRL they always do.
_FUSED: Cells = {
    (*OWN_MODEL, "axolotl"): Parts(liger=frozenset({"kernels"})),
    ("torchtitan",): NOTHING,
    ("study",): Refused(
        "{stack} trains the unchanged modules of transformers",
        "Use --compile, which fuses kernels too, or --stack accelerate",
    ),
}
KERNELS_OF_MODEL: dict[str, Cells] = {
    "transformers": {
        (*TRANSFORMERS, "study"): NOTHING,
        ("torchtitan",): Refused(
            "torchtitan's norms are one kernel each", "Leave --kernels out, or use --stack accelerate"
        ),
    },
    "fused": _FUSED
    | {("trl",): Refused("TRL uses Liger's kernels only with a loss in chunks", "Add --loss-kernel chunked")},
    "fused, with a loss in chunks": _FUSED | {("trl",): Parts(liger=frozenset({"kernels"}))},
}

# What Liger replaces by default, by model_type (liger_kernel.transformers.monkey_patch). Gemma's activation function is
# called geglu there.
_LLAMA, _GEMMA = ("rope", "rms_norm", "swiglu"), ("rope", "rms_norm", "geglu")
LIGER: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("exaone4", "falcon_h1", "granite", "hunyuan_v1_dense", "hunyuan_v1_moe", "llama", "ministral", "mistral"),
        _LLAMA,
    ),
    **dict.fromkeys(
        ("mixtral", "olmo2", "olmo3", "phi3", "qwen2", "qwen2_5_vl", "qwen3", "qwen3_moe", "smollm3"), _LLAMA
    ),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), _GEMMA),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4", "qwen3_5", "qwen3_5_moe", "qwen3_next"), _LLAMA[1:]),
    "gpt_oss": ("rope", "rms_norm"),
}
# Liger's granite materializes the logits, because the model scales them.
WITHOUT_CHUNKS = ("granite",)
KEYS_OF_LIGER = {
    "rope": "liger_rope",
    "rms_norm": "liger_rms_norm",
    "swiglu": "liger_glu_activation",
    "geglu": "liger_glu_activation",
}
LOSSES_OF_LIGER = {"chunked": "liger_fused_linear_cross_entropy", "upcast": "liger_cross_entropy"}
LIGER_PLUGIN = "axolotl.integrations.liger.LigerPlugin"

# ---------------------------------------------------------------- other settings of the model

_NO_ATTENTION = Refused("{stack} has no such attention", "Leave --attention out, or use --stack accelerate")
ATTENTION: dict[str, Cells] = {
    "sdpa": {ALL: NOTHING},
    "eager": {
        OWN_MODEL: _model('attn_implementation="eager"'),
        ("trl",): _flags("--attn_implementation eager"),
        ("axolotl",): _keys(attn_implementation="eager"),
        ("torchtitan",): _NO_ATTENTION,
        ("study",): _flags("--attention eager"),
    },
    **{
        f"flash-{release}": {
            OWN_MODEL: _model(f'attn_implementation="flash_attention_{release}"'),
            ("trl",): _flags(f"--attn_implementation flash_attention_{release}"),
            ("axolotl",): _keys(attn_implementation=f"flash_attention_{release}"),
            ("torchtitan", "study"): _NO_ATTENTION,
        }
        for release in (2, 3, 4)
    },
    "flash-1": {
        OWN_MODEL: _lines("a model of your own with FlashAttention 1, which transformers does not have"),
        ("trl", "axolotl", "torchtitan", "study"): _NO_ATTENTION,
    },
}
# The rates of dropout depend on the model, so `parts` adds them.
DROPOUT: dict[str, Cells] = {
    "off": {ALL: NOTHING},
    "on": {
        (*TRANSFORMERS, "study"): NOTHING,
        ("torchtitan",): Refused("torchtitan's models have no dropout", "Leave --dropout out, or use another --stack"),
    },
}
_NOT_SHARED = Refused("this is predicted for accelerate, transformers' Trainer and TRL only", "Use --stack accelerate")
# `launch` has the sizes, which an accelerate file states. The Trainer shards the batches itself.
CONTEXT_PARALLEL: dict[str, Cells] = {
    "off": {ALL: NOTHING},
    "on": {
        ("accelerate",): _lines(
            "with accelerator.maybe_context_parallel(tensors, [1] * len(tensors), no_restore_buffers=set(tensors)): "
            "around the forward and the backward pass, where tensors are the batch's input_ids, position_ids, labels "
            "and shift_labels"
        ),
        ("trainer", "trl"): NOTHING,
        ("axolotl", "torchtitan", "deepspeed", "study"): _NOT_SHARED,
    },
}
SEQUENCE_PARALLEL: dict[str, Cells] = {
    "off": {ALL: NOTHING},
    "on": {
        ("accelerate",): _lines(
            "position_ids in every batch, and deepspeed_sp_compute_loss() of transformers.integrations.deepspeed, "
            "which averages the loss over the GPUs that share a sequence"
        ),
        ("trainer", "trl"): NOTHING,
        ("axolotl", "torchtitan", "deepspeed", "study"): _NOT_SHARED,
    },
}
COMPILE: dict[str, Cells] = {
    "off": {ALL: NOTHING},
    "on": {
        ("accelerate",): Parts(accelerator=('dynamo_backend="inductor"',)),
        ("trainer", "trl"): _flags("--torch_compile True"),
        ("axolotl",): _keys(torch_compile=True),
        ("torchtitan",): _flags("--compile.enable"),
        ("deepspeed",): _lines("engine.compile(), where engine is what deepspeed.initialize returns"),
        ("study",): _flags("--compile"),
    },
}
_NO_CHECKPOINTING = Refused(
    "{stack} has no such activation checkpointing", "Use --activation-checkpointing full or none, or --stack accelerate"
)
# `launch` sets the other kinds.
CHECKPOINTING: dict[str, Cells] = {
    "none": {ALL: NOTHING},
    "full": {ALL: NOTHING},
    "offload": {
        OWN_MODEL: _lines(
            "with get_checkpoint_hidden_states_offloading_ctx_manager(): around the forward and the backward pass, "
            "from deepspeed.runtime.activation_checkpointing.offload_activations"
        ),
        ("trl",): _flags("--activation_offloading True"),
        ("axolotl",): _keys(activation_offloading=True),
        ("torchtitan", "study"): Refused(
            "{stack} keeps the inputs of checkpointed blocks on the GPU", "Use another --stack, such as trl"
        ),
    },
    "selective": {
        (*OWN_MODEL, "trl"): _lines(
            "activation checkpointing of every second block, for which transformers has no option"
        ),
        ("axolotl", "torchtitan", "study"): _NO_CHECKPOINTING,
    },
    "selective-op": {
        (*OWN_MODEL, "trl"): _lines(
            "activation checkpointing of every block that keeps attention and every second matrix product "
            "(torch.utils.checkpoint.create_selective_checkpoint_contexts)"
        ),
        ("torchtitan",): NOTHING,
        ("axolotl", "study"): _NO_CHECKPOINTING,
    },
}

# `launch` has the options of adapters. torchtitan is refused with any.
ADAPTERS: dict[str, Cells] = {
    "lora": {ALL: NOTHING},
    "dora": {
        (*TRANSFORMERS, "torchtitan"): NOTHING,
        ("study",): Refused("{stack} has no DoRA", "Leave --adapter out, or use another --stack"),
    },
}

_NO_SHARDS_OF_4_BITS = Refused("{stack} shards no weights in four bits", "Use --strategy zero2, or another --stack")
LOAD_IN_4BIT: dict[str, Cells] = {
    "off": {ALL: NOTHING},
    "on": {
        (*TRANSFORMERS, "torchtitan"): NOTHING,
        ("study",): {"any": NOTHING, **dict.fromkeys(("zero3", "fsdp"), _NO_SHARDS_OF_4_BITS)},
    },
}

# ---------------------------------------------------------------- types

_NO_PRECISION = Refused("{stack} has no such precision", "Use --precision bf16 or fp32, or another --stack")
_LOADS_BF16 = Refused(
    "axolotl loads weights in bf16 if it computes in bf16",
    "Use --precision bf16, or --stack trainer with this precision",
)
_FSDP_OF_STUDY = Refused("{stack} trains FSDP2 in fp32 and bf16 only", "Use --precision bf16, or another strategy")
_PURE_BF16_OF_ENGINES: Mapping[Kind | Literal["any"], Cell] = {
    "zero0": Refused("DeepSpeed keeps fp32 masters at stage 0", "Use ddp, or ZeRO's stages 1 to 3"),
    "zero offload": Refused("DeepSpeed's offload keeps fp32 moments", "Use a strategy without DeepSpeed's offload"),
}
# The files that `launch` makes state the precision. These tables have what is missing in them.
PRECISIONS: dict[str, Cells] = {
    "fp32": {
        (*TRANSFORMERS, "study"): NOTHING,
        ("torchtitan",): _flags("--training.mixed_precision_param float32"),
    },
    "tf32": {TRANSFORMERS: NOTHING, ("torchtitan", "study"): _NO_PRECISION},
    "bf16": {ALL: NOTHING},
    "fp16": {
        TRANSFORMERS: NOTHING,
        ("torchtitan",): _NO_PRECISION,
        ("study",): {"any": NOTHING, "fsdp": _FSDP_OF_STUDY},
    },
    "bf16-autocast": {
        (*OWN_MODEL, "trl", "torchtitan"): NOTHING,
        ("axolotl",): {"any": NOTHING, "plain": _LOADS_BF16},
        ("study",): {"any": NOTHING, "fsdp": _FSDP_OF_STUDY},
    },
    "fp16-autocast": {
        TRANSFORMERS: NOTHING,
        ("torchtitan",): _NO_PRECISION,
        ("study",): {"any": NOTHING, "fsdp": _FSDP_OF_STUDY},
    },
    "pure-bf16": {
        (*OWN_MODEL, "trl"): {"any": NOTHING, **_PURE_BF16_OF_ENGINES},
        ("axolotl",): {
            "any": NOTHING,
            "fsdp": Refused("axolotl's FSDP2 keeps fp32 weights", "Use --precision bf16, or --stack trainer"),
            **_PURE_BF16_OF_ENGINES,
        },
        ("torchtitan",): _flags("--training.dtype bfloat16"),
        ("study",): _NO_PRECISION,
    },
    "fp8": {
        TRANSFORMERS: NOTHING,
        ("torchtitan",): _lines("CONFIG: a function with Float8LinearConverter, such as llama3_debugmodel_float8"),
        ("study",): _NO_PRECISION,
    },
}
SIXTEEN_BITS: dict[PrecisionClass, str] = {"bf16": "bfloat16", "bf16-autocast": "bfloat16", "fp8": "bfloat16"}
SIXTEEN_BITS |= {"fp16": "float16", "fp16-autocast": "float16"}


def _reduced_in_fp32(name: str) -> Cells:
    """Return how gradients of products in a 16-bit type are reduced in fp32 by FSDP2."""
    types = f"param_dtype=torch.{name}, reduce_dtype=torch.float32, output_dtype=torch.{name}"
    policy = f"MixedPrecisionPolicy({types})"
    return {
        ("accelerate",): Parts(
            accelerator=("fsdp_plugin=plugin",),
            lines=(
                f"where plugin = FullyShardedDataParallelPlugin(mixed_precision_policy=policy), and policy = {policy}",
            ),
        ),
        ("trainer", "trl"): _lines(f"trainer.accelerator.state.fsdp_plugin.mixed_precision_policy = {policy}"),
        ("axolotl",): Refused(
            "axolotl reduces gradients in the type in which it computes",
            "Leave --reduce-dtype out, or use --stack trainer",
        ),
        ("torchtitan", "study"): NOTHING,
        ("deepspeed",): NOTHING,  # has no FSDP2
    }


REDUCE_DTYPE: dict[str, Cells] = {
    "model": {
        TRANSFORMERS: NOTHING,
        ("torchtitan", "study"): Refused("{stack} reduces gradients in fp32", "Leave --reduce-dtype out"),
    },
    "fp32 bfloat16": _reduced_in_fp32("bfloat16"),
    "fp32 float16": _reduced_in_fp32("float16"),
}
SYNC_EACH_BATCH: dict[str, Cells] = {
    "off": {
        TRANSFORMERS: NOTHING,
        ("torchtitan", "study"): Refused("{stack} reduces gradients in every micro step", "Leave this setting out"),
    },
    "on": {
        ("accelerate", "torchtitan", "deepspeed", "study"): NOTHING,  # `launch` has the arguments of accelerate
        ("trainer", "trl"): _flags(
            "--accelerator_config", """'{"gradient_accumulation_kwargs": {"sync_each_batch": true}}'"""
        ),
        ("axolotl",): _keys(accelerator_config={"gradient_accumulation_kwargs": {"sync_each_batch": True}}),
    },
}
# Other programs take this type from DeepSpeed's JSON, which `launch` makes.
GRAD_ACCUM_DTYPE: dict[str, Cells] = {
    "fp32": {ALL: NOTHING},
    **{
        f"model {name}": {(*TRANSFORMERS, "torchtitan"): NOTHING, ("study",): _flags(f"--accumulation-dtype {name}")}
        for name in ("bf16", "fp16")
    },
}
