"""Read a printed launch as the program that it starts would, into the fields of a request.

It knows the options of the programs from their documentation, and nothing of the planner's tables.
"""

from __future__ import annotations

import ast
import json
import math
import re
import shlex
from collections.abc import Mapping
from typing import Any

import yaml

from study import config
from zero_study.planner.launch import Launch
from zero_study.theory.stacks import STACKS

OF_TRAINER = {
    "adamw_bnb_8bit": "adamw-8bit", "adamw_torch_8bit": "adamw-8bit", "adafactor": "adafactor", "sgd": "sgd",
    "adamw_torch": "adamw",
}  # fmt: skip
# By the names in transformers.
ATTENTION = {"sdpa": "sdpa", "eager": "eager"} | {f"flash_attention_{n}": f"flash-{n}" for n in (2, 3, 4)}
OF_CLASSES = {
    r"(bitsandbytes|torchao)\.optim\.AdamW8bit\b": "adamw-8bit", r"\bLAMB\b|FusedLamb": "lamb",
    r"torch\.optim\.Muon": "muon", r"torch\.optim\.Adafactor": "adafactor", r"torch\.optim\.SGD": "sgd",
}  # fmt: skip
KERNELS_OF_LIGER = {"rope", "rms_norm", "swiglu", "geglu", "layer_norm"}
PRECISIONS = {"bf16": "bf16", "fp16": "fp16", "fp8": "fp8", "no": "fp32"}


class Reading:
    """The files, flags and lines of a launch."""

    def __init__(self, start: Launch) -> None:
        words = shlex.split(start.command.replace("\\\n", " "))
        self.stack, self.words, self.lines = start.stack, words, "\n".join(start.settings)
        self.files = [yaml.safe_load(text) for text in start.files.values()]  # JSON is YAML, too
        self.main: dict[str, Any] = self.files[0] if self.files else {}
        jsons = [content for content in self.files if "zero_optimization" in content]
        self.json: dict[str, Any] = jsons[0] if jsons else {}

    def flag(self, name: str) -> str | None:
        """The word after a flag. None without the flag."""
        return self.words[self.words.index(name) + 1] if name in self.words else None

    def is_true(self, name: str) -> bool:
        return self.flag(name) == "True"

    def match(self, pattern: str) -> re.Match[str] | None:
        return re.search(pattern, self.lines)


def read(start: Launch) -> dict[str, Any]:
    """Return the fields of a request that a launch sets, with the defaults of its program for the others."""
    reading, stack = Reading(start), STACKS[start.stack]
    fields: dict[str, Any] = {
        "optimizer": "adamw",
        "optimizer_kernel": "fused",
        "attention": stack.attention,
        "kernels": stack.kernels,
        "loss_kernel": stack.loss_kernel,
        "compile": False,
        "reduce_dtype": stack.reduce_dtype,
        "sync_each_batch": stack.sync_each_batch,
        "grad_accum_dtype": stack.grad_accum_dtype,
        "activation_checkpointing": "none",
        "dropout": None,  # as the model has it
        "lora_rank": None,
        "lora_target": None,
        "lora_dropout": 0.0,
        "adapter": "lora",
        "load_in_4bit": False,
        "context_parallel": _mesh(reading).get("parallelism_config_cp_size"),
        "sequence_parallel": _mesh(reading).get("parallelism_config_sp_size"),
    }
    by_stack = {
        "accelerate": _accelerate, "trainer": _trainer, "trl": _trl, "axolotl": _axolotl, "torchtitan": _torchtitan,
        "deepspeed": _deepspeed, "study": _study,
    }  # fmt: skip
    fields |= by_stack[start.stack](reading)
    fields |= _json(reading)
    fields |= _lines(reading, fields)
    if fields["compile"] and fields["loss_kernel"] == "eager" and "torch.compiler.disable" not in reading.lines:
        is_outside = reading.flag("--compile.components") == "model"
        fields["loss_kernel"] = "eager" if is_outside else "upcast"
    return fields | {"precision": precision(reading)}


def _mesh(reading: Reading) -> dict[str, int]:
    """The sizes of accelerate's parallelism_config, whose product is the number of processes."""
    section = reading.main.get("parallelism_config") or {}
    sizes = {key: value for key, value in section.items() if key.endswith("_size")}
    assert not sizes or math.prod(sizes.values()) == reading.main["num_processes"]
    return sizes


def _json(reading: Reading) -> dict[str, Any]:
    """What a DeepSpeed JSON says, apart from the precision. This project's trainer decides the type itself."""
    fields: dict[str, Any] = {}
    if "data_types" in reading.json and reading.stack != "study":
        fields["grad_accum_dtype"] = {"fp32": "fp32"}[reading.json["data_types"]["grad_accum_dtype"]]
    if "optimizer" in reading.json:
        fields["optimizer"] = reading.json["optimizer"]["type"].lower()
    return fields


OFFLOADS_CHECKPOINTS = r"get_checkpoint_hidden_states_offloading_ctx_manager\(\)"


def _lines(reading: Reading, fields: Mapping[str, Any]) -> dict[str, Any]:
    """What the lines say that a user has to write into a program."""
    read: dict[str, Any] = {}
    for pattern, name in OF_CLASSES.items():
        if reading.match(pattern):
            read["optimizer"] = name
    for kernel, pattern in (("foreach", r"foreach(=|\": )True"), ("loop", r"foreach(=|\": )False")):
        if reading.match(pattern):
            read["optimizer_kernel"] = kernel
    if reading.match(r'dynamo_backend="inductor"|engine\.compile\(\)'):
        read["compile"] = True
    if named := reading.match(r'attn_implementation="(\w+)"'):
        read["attention"] = ATTENTION[named[1]]
    if reading.match("FlashAttention 1"):
        read["attention"] = "flash-1"
    if reading.match(r"model\.gradient_checkpointing_enable\(\)"):
        read["activation_checkpointing"] = "full"
    if reading.match(OFFLOADS_CHECKPOINTS):
        read["activation_checkpointing"] = "offload"
    if reading.match("activation checkpointing of every second block"):
        read["activation_checkpointing"] = "selective"
    if reading.match("activation checkpointing of every block that keeps attention and every second matrix product"):
        read["activation_checkpointing"] = "selective-op"
    if reading.match(r"sync_each_batch=True"):
        read["sync_each_batch"] = True
    if reading.match(r"reduce_dtype=torch\.float32"):
        read["reduce_dtype"] = "fp32"
    rates = re.findall(
        r"(?:dropout|pdrop)\w*\"?[=:] ?([\d.]+)|every dropout rate .* to ([\d.]+)", _without_peft(reading)
    )
    if rates:
        read["dropout"] = any(float(first or second) > 0 for first, second in rates)
    return read | _loss(reading, fields) | _peft(reading)


def _without_peft(reading: Reading) -> str:
    return "\n".join(line for line in reading.lines.split("\n") if "get_peft_model" not in line)


def _loss(reading: Reading, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Which kernels and which loss the lines ask for."""
    read: dict[str, Any] = {}
    if call := reading.match(r"apply_liger_kernel_to_\w+\(([^)]*)\)"):
        pairs = [word.split("=") for word in call[1].split(", ") if word]
        read |= _liger({name: value == "True" for name, value in pairs}, fields)
    if reading.match("modules with one kernel for each norm"):
        read["kernels"] = "fused"
    if reading.match(r"LigerFusedLinearCrossEntropyLoss\(\) in the model's forward"):
        read["loss_kernel"] = "chunked"
    if reading.match(r"LigerCrossEntropyLoss\(\)"):
        read["loss_kernel"] = "fused" if reading.match(r"without logits\.float\(\)") else "upcast"
    if reading.match(r"torch\.compiler\.disable\(transformers"):
        read["loss_kernel"] = "eager"
    if reading.match("loss=CrossEntropyLoss.Config"):
        read["loss_kernel"] = "eager"
    return read


def _liger(arguments: Mapping[str, bool], fields: Mapping[str, Any]) -> dict[str, Any]:
    """What Liger's functions replace with these arguments, which are all True by default."""
    are_off = {name for name in KERNELS_OF_LIGER if arguments.get(name) is False}
    kernels = {"kernels": "transformers" if are_off else "fused"}
    is_chunked = arguments.get("fused_linear_cross_entropy", True)
    return kernels | {"loss_kernel": "chunked" if is_chunked else "eager"}


def _peft(reading: Reading) -> dict[str, Any]:
    if not (call := reading.match(r"peft\.get_peft_model\(\S+, LoraConfig\((.*)\)\)")):
        return {}
    text = call[1]
    target = re.search(r"target_modules=(\[.*?\]|\".*?\")", text)
    names = json.loads(target[1]) if target else None
    dropout = re.search(r"lora_dropout=([\d.]+)", text)
    return {
        "lora_rank": int(re.search(r"\br=(\d+)", text)[1]),
        "lora_target": names if names is None or isinstance(names, str) else ",".join(names),
        "lora_dropout": float(dropout[1]) if dropout else 0.0,
        "adapter": "dora" if "use_dora=True" in text else "lora",
        "load_in_4bit": "load_in_4bit=True" in reading.lines,
    }


# ---------------------------------------------------------------- the programs


def _accelerate(reading: Reading) -> dict[str, Any]:
    """A loop of one's own with accelerate."""
    batch = reading.match(r"batches of (\d+) sequences? of ([\d,]+) tokens")
    steps = reading.match(r"(?:gradient_accumulation_steps|num_steps)=(\d+)")
    return {
        "micro_batch_size": int(batch[1]),
        "sequence_length": int(batch[2].replace(",", "")),
        "gradient_accumulation_steps": int(steps[1]) if steps else 1,
        "optimizer_kernel": "fused"
        if reading.match(r"AdamW\(\.\.\., fused=True\)")
        else "foreach",  # PyTorch's default
    }


def _deepspeed(reading: Reading) -> dict[str, Any]:
    """A loop of one's own with DeepSpeed."""
    return {
        "micro_batch_size": reading.json["train_micro_batch_size_per_gpu"],
        "gradient_accumulation_steps": reading.json["gradient_accumulation_steps"],
        "sequence_length": int(reading.match(r"sequences of ([\d,]+) tokens")[1].replace(",", "")),
    }


def _trainer(reading: Reading) -> dict[str, Any]:
    """TrainingArguments of transformers."""
    fields: dict[str, Any] = {
        "compile": reading.is_true("--torch_compile"),
        "micro_batch_size": int(reading.flag("--per_device_train_batch_size")),
        "gradient_accumulation_steps": int(reading.flag("--gradient_accumulation_steps")),
    }
    if length := reading.match(r"sequences of ([\d,]+) tokens"):
        fields["sequence_length"] = int(length[1].replace(",", ""))
    if reading.is_true("--gradient_checkpointing"):
        offloads = reading.is_true("--activation_offloading") or reading.match(OFFLOADS_CHECKPOINTS)
        fields["activation_checkpointing"] = "offload" if offloads else "full"
    if optim := reading.flag("--optim"):
        fields["optimizer"] = OF_TRAINER[optim]
        fields["optimizer_kernel"] = "foreach" if optim == "adamw_torch" else "fused"
    if reading.is_true("--use_liger_kernel"):
        config = reading.match(r"training_args\.liger_kernel_config = (\{.*\})")
        fields |= _liger(ast.literal_eval(config[1]) if config else {}, fields)
    if text := reading.flag("--accelerator_config"):
        fields |= json.loads(text)["gradient_accumulation_kwargs"]
    return fields


def _trl(reading: Reading) -> dict[str, Any]:
    """Options of SFTConfig and ModelConfig."""
    fields = _trainer(reading)
    assert not (reading.flag("--loss_type") and reading.is_true("--use_liger_kernel"))
    if reading.flag("--loss_type"):
        fields["loss_kernel"] = {"nll": "eager", "chunked_nll": "chunked"}[reading.flag("--loss_type")]
    fields["attention"] = ATTENTION[reading.flag("--attn_implementation") or "sdpa"]
    fields["sequence_length"] = int(reading.flag("--max_length"))
    if reading.is_true("--use_peft"):
        begin = reading.words.index("--lora_target_modules") + 1 if "--lora_target_modules" in reading.words else 0
        names = []
        for word in reading.words[begin:] if begin else []:
            if word.startswith("--"):
                break
            names.append(word)
        fields |= {
            "lora_rank": int(reading.flag("--lora_r")),
            "lora_target": ",".join(names) or None,
            "lora_dropout": float(reading.flag("--lora_dropout")),
            "adapter": "dora" if reading.is_true("--use_dora") else "lora",
            "load_in_4bit": reading.is_true("--load_in_4bit"),
        }
    return fields


def _axolotl(reading: Reading) -> dict[str, Any]:
    """Keys of axolotl's schemas."""
    keys = reading.main
    optimizer = keys.get("optimizer", "adamw_torch_fused")
    fields: dict[str, Any] = {
        "optimizer": OF_TRAINER.get(optimizer, {"muon": "muon"}.get(optimizer, "adamw")),
        "optimizer_kernel": "foreach" if optimizer == "adamw_torch" else "fused",
        "attention": ATTENTION[keys.get("attn_implementation", "sdpa")],
        "compile": keys.get("torch_compile", False),
        "activation_checkpointing": "full" if keys["gradient_checkpointing"] else "none",
        **({"activation_checkpointing": "offload"} if keys.get("activation_offloading") else {}),
        "micro_batch_size": keys["micro_batch_size"],
        "gradient_accumulation_steps": keys["gradient_accumulation_steps"],
        "sequence_length": keys["sequence_len"],
        "lora_rank": keys.get("lora_r"),
        "lora_dropout": keys.get("lora_dropout", 0.0),
        "adapter": "dora" if keys.get("peft_use_dora") else "lora",
        "load_in_4bit": keys.get("load_in_4bit", False),
        "lora_target": "all-linear" if keys.get("lora_target_linear") else None,
    }
    if "lora_target_modules" in keys:
        fields["lora_target"] = ",".join(keys["lora_target_modules"])
    if "plugins" in keys:
        assert keys["plugins"] == ["axolotl.integrations.liger.LigerPlugin"]
        fields["kernels"] = "fused" if keys.get("liger_rms_norm") else "transformers"
    if keys.get("liger_fused_linear_cross_entropy"):
        fields["loss_kernel"] = "chunked"
    if keys.get("liger_cross_entropy"):
        fields["loss_kernel"] = "upcast"
    if "accelerator_config" in keys:
        fields |= keys["accelerator_config"]["gradient_accumulation_kwargs"]
    if "overrides_of_model_config" in keys:
        fields["dropout"] = any(keys["overrides_of_model_config"].values())
    return fields


def _torchtitan(reading: Reading) -> dict[str, Any]:
    """Options of torchtitan's TrainingConfig, CompileConfig and so on."""
    kinds = {"none": "none", "full": "full", "selective": "selective-op"}
    kernels = {"fused": "fused", "foreach": "foreach", "for-loop": "loop"}
    return {
        "compile": "--compile.enable" in reading.words,
        "optimizer_kernel": kernels[reading.flag("--optimizer.implementation") or "fused"],
        "activation_checkpointing": kinds[reading.words[-1].removeprefix("activation-checkpoint:")],
        "micro_batch_size": int(reading.flag("--training.local_batch_size")),
        "sequence_length": int(reading.flag("--training.seq_len")),
        "dropout": False,
    }


def _study(reading: Reading) -> dict[str, Any]:
    """Options of this project's trainer, as it parses and checks them itself."""
    flags = config.parse_flags(reading.words[reading.words.index("study/train.py") + 1 :])
    run = config.build_config(**{"workload": "gpt-wikitext", "size": "124m", **flags})
    micro, accumulation = run.batches(reading.main["num_processes"])
    return {
        "attention": run.attention,
        "compile": run.compile,
        "activation_checkpointing": "full" if run.activation_checkpointing else "none",
        "dropout": run.dropout > 0,
        "grad_accum_dtype": "fp32" if run.accumulation_dtype == "fp32" else "model",
        "micro_batch_size": micro,
        "gradient_accumulation_steps": accumulation,
        "sequence_length": run.sequence_length,
        "lora_rank": run.lora_rank,
        "lora_target": run.lora_target,
        "lora_dropout": run.lora_dropout,
        "load_in_4bit": run.load_in_4bit,
    }


# ---------------------------------------------------------------- the precision


def precision(reading: Reading) -> str:
    """Return the class of precision in which a launch trains. Without DeepSpeed, autocast has the name of its type."""
    if reading.stack == "torchtitan":
        if reading.match("Float8LinearConverter"):
            return "fp8"
        if reading.flag("--training.dtype") == "bfloat16":
            return "pure-bf16"
        return "fp32" if reading.flag("--training.mixed_precision_param") == "float32" else "bf16"
    if reading.stack == "study":
        run = reading.flag("--precision")
        return run if reading.main["distributed_type"] == "DEEPSPEED" else run.removesuffix("-autocast")
    of_json = _precision_of_json(reading.json)
    if of_json is not None:
        stated = of_json
    elif reading.stack == "axolotl":
        keys = reading.main
        names = {"fp8": "fp8", "bfloat16": "pure-bf16", "bf16": "bf16", "fp16": "fp16"}
        stated = next((name for key, name in names.items() if keys.get(key)), "fp32")
    else:
        stated = PRECISIONS[reading.main["mixed_precision"]]
    is_pure = reading.match(r"dtype=torch\.bfloat16") or reading.flag("--dtype") == "bfloat16"
    if stated == "fp32" and is_pure and "LoraConfig" not in reading.lines and not reading.flag("--use_peft"):
        stated = "pure-bf16"
    if reading.stack in ("trainer", "trl"):
        is_own = stated.endswith("-autocast") or stated in ("fp32", "fp8")
        options = {kind for kind in ("bf16", "fp16") if reading.is_true(f"--{kind}")}
        if stated != "pure-bf16":
            assert options == (set() if is_own else {stated})
    is_tf32 = reading.match("set_float32_matmul_precision") or reading.is_true("--tf32") or reading.main.get("tf32")
    return "tf32" if stated == "fp32" and is_tf32 else stated


def _precision_of_json(content: Mapping[str, Any]) -> str | None:
    if not content:
        return None
    if "torch_autocast" in content:
        return {"bfloat16": "bf16-autocast", "float16": "fp16-autocast"}[content["torch_autocast"]["dtype"]]
    if content.get("bf16", {}).get("bf16_master_weights_and_grads"):
        assert content["bf16"] == {
            "enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True,
        }  # fmt: skip
        return "pure-bf16"
    return next((kind for kind in ("bf16", "fp16") if content.get(kind, {}).get("enabled")), "fp32")
