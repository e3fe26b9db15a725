"""Read a user's accelerate file or DeepSpeed JSON as accelerate does, with accelerate's defaults.

`file` reads the strategies of this project's trainer, which accepts only settings that it tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, cast, get_args

from zero_study.doctor import examine, kinds
from zero_study.doctor.config_files import AccelerateFile, DeepSpeedFile
from zero_study.doctor.findings import cut
from zero_study.doctor.fsdp_sections import STRATEGIES, is_true
from zero_study.engines.keys.patterns import ABSENT
from zero_study.engines.strategy_names import OffloadDevice
from zero_study.errors import Refusal
from zero_study.files import CONFIGS, check_name, load, require_address
from zero_study.strategy import shipped
from zero_study.strategy.file import Strategy, find_strategy

_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_BATCH_FIELDS = ("global_batch_size", "micro_batch_size")  # of a request, in the order of _BATCH
# Settings that the launch decides, so that the file need not have a value that accelerate accepts.
_OF_LAUNCH = {
    "num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port", "gpu_ids",
    "deepspeed_config.deepspeed_hostfile", *_BATCH,
}  # fmt: skip
# Settings of a DeepSpeed JSON with which a step needs other memory or another time, in ways that are not predicted.
_NOT_PREDICTED = (
    "zero_optimization.zero_quantized_weights", "zero_optimization.zero_quantized_nontrainable_weights",
    "zero_optimization.zero_quantized_gradients", "zero_optimization.mics_shard_size", "zero_optimization.zenflow",
    "zero_optimization.offload_optimizer.ratio", "tensor_parallel", "sequence_parallel_size", "compression_training",
    "curriculum_learning", "data_efficiency", "sparse_attention", "hybrid_engine", "progressive_layer_drop",
    "elasticity", "amp",
)  # fmt: skip
_OFF = ("None", "False", "0", "-1", "1", "1.0", "{}")


@dataclass(frozen=True)
class OwnFile:
    """The strategy in a file of a user, and what else the file decides about a training."""

    strategy: Strategy
    options: Mapping[str, Any]  # fields of a planner's request; options of the command take precedence
    num_steps: int | None  # accumulation steps
    is_open: bool  # whether the program decides the precision, because the JSON has "auto"
    notes: tuple[str, ...]  # what is assumed or left out


def filled_in(content: Mapping[str, Any], stack: str) -> dict[str, Any]:
    """Return the content of a planner's request, with what the user's own strategy file decides in place of None.

    Without a precision in the file, Accelerator trains in fp32. The options of the other programs decide it.
    """
    given = {name: value for name, value in content.items() if value is not None}
    if (own := read(given.get("strategy"), stack)) is None:
        return dict(content)
    filled = {**own.options, **given}
    if "precision" not in filled and not own.is_open and stack in ("accelerate", "deepspeed"):
        filled["precision"] = "fp32"
    if own.num_steps and filled.keys() & _BATCH_FIELDS:
        filled.setdefault("gradient_accumulation_steps", own.num_steps)
    return filled


def read(name: Any, stack: str) -> OwnFile | None:
    """Return a user's file. None for other strategies, and for this project's trainer, which reads files strictly.

    Raises Refusal if there is no such file, if accelerate would stop with it, or if such a training is not predicted.
    """
    if not isinstance(name, str) or not name.endswith((".yaml", ".yml", ".json")) or stack == "study":
        return None
    path = find_strategy(name)
    is_shipped = path.absolute().is_relative_to(CONFIGS)
    return None if is_shipped else _read(path, path.stat().st_mtime_ns, Path.cwd())


@lru_cache(maxsize=64)
def _read(path: Path, _changed: int, _folder: Path) -> OwnFile:
    examined = examine.examine(path)
    if examined.kind not in ("accelerate", "deepspeed"):
        title = "of an unknown kind" if examined.kind is None else f"of {kinds.TITLES[examined.kind]}"
        raise Refusal(f"--strategy {path}: this file is {title}. Name an accelerate file or a DeepSpeed JSON.")
    require_address(path, examined.content)
    matter = [finding for finding in examined.findings if finding.matters and finding.key not in _OF_LAUNCH]
    if stops := [f for f in matter if f.effect == "crashes" and f.error != "does not match num_processes"]:
        values = ("missing" if finding.value is ABSENT else repr(cut(finding.value)) for finding in stops)
        reasons = (f"{f.key} is {value}. {f.message} {f.remedy}" for f, value in zip(stops, values, strict=True))
        raise Refusal(f"--strategy {path}: {' '.join(reasons).rstrip()}")
    json = examined.deepspeed
    if examined.kind == "deepspeed":
        section: dict[str, Any] = {"deepspeed_config_file": str(path)}
        content = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "DEEPSPEED", "deepspeed_config": section}
    else:
        content = dict(AccelerateFile(examined.content).content)
    _check_type(path, content)
    keys = ", ".join(finding.key for finding in matter if finding.effect != "crashes")
    notes = [f"not all of {path} works as written; `zero-study doctor {path}` explains {keys}"] if keys else []
    options = _of_mesh(path, content)
    if json is not None:
        json = _of_json(path, json, options, notes)
    if content["distributed_type"] == "FSDP":
        content["fsdp_config"] = _of_fsdp(path, content, options, notes)
    return _own_file(path, content, json, options, notes)


def _check_type(path: Path, content: dict[str, Any]) -> None:
    """Raise Refusal for a training that is not on GPUs, or not data parallel.

    The content keeps only the settings of its type, and none of one machine. Unquoted NO becomes "NO".
    """
    kind = content["distributed_type"] = AccelerateFile(content).kind
    for name, of_kind in (("deepspeed_config", "DEEPSPEED"), ("fsdp_config", "FSDP"), ("gpu_ids", "")):
        section = content.pop(name, None)
        if kind == of_kind:
            content[name] = dict(section or {})
    place = content.get("compute_environment", "LOCAL_MACHINE")
    reason = f"distributed_type {kind} is not predicted, only NO, MULTI_GPU, DEEPSPEED and FSDP"
    if kind == "MULTI_CPU" or content.get("use_cpu"):
        reason = "this file trains on CPUs, and only trainings on GPUs are predicted"
    elif place != "LOCAL_MACHINE":
        reason = f"compute_environment {place} is not predicted, only LOCAL_MACHINE"
    elif kind in ("NO", "MULTI_GPU", "DEEPSPEED", "FSDP"):
        return
    raise Refusal(f"--strategy {path}: {reason}. Use another file.")


def _of_mesh(path: Path, content: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a request for `parallelism_config`, whose sizes are taken out of the content."""
    section = dict(content.pop("parallelism_config", None) or {})
    names = ("dp_replicate", "dp_shard", "tp", "cp", "sp")
    sizes = {name: _number(path, section, f"parallelism_config_{name}_size") for name in names}
    section = {key: value for key, value in section.items() if not key.endswith("_size")}
    content |= {"parallelism_config": section} if section else {}
    if sizes["tp"] > 1:
        raise Refusal(
            f"--strategy {path}: tensor parallelism (parallelism_config_tp_size {sizes['tp']}) is not predicted. Set "
            "the size to 1 to see whether the training fits without it."
        )
    shared = {"context_parallel": sizes["cp"], "sequence_parallel": sizes["sp"]}
    options = {name: size for name, size in shared.items() if size > 1}
    if content["distributed_type"] == "FSDP" and sizes["dp_replicate"] > 1:
        options["shard_group_size"] = sizes["dp_shard"] * sizes["cp"]
    content |= {name: _number(path, content, name) for name in ("num_machines", "num_processes")}
    if content["num_machines"] > 1 and content["num_processes"] > 1:
        options["gpus_per_node"] = max(content["num_processes"] // content["num_machines"], 1)
    return options


def _number(path: Path, section: Mapping[str, Any], key: str) -> int:
    """Return a number of processes or machines, which is 1 if the section does not state it."""
    try:
        return int(section.get(key) or 1)
    except (TypeError, ValueError):
        raise Refusal(f"--strategy {path}: {key} is {section[key]!r}. Write a whole number.") from None


def _of_json(path: Path, json: dict[str, Any], options: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """Return a DeepSpeed JSON without what the program decides. Adds what it decides itself to `options`.

    Raises Refusal for settings that are not predicted.
    """
    read = DeepSpeedFile(json)
    for key in _NOT_PREDICTED:
        value = read.get(key, None)
        if str(value) not in _OFF and not (isinstance(value, dict) and value.get("enabled") is False):
            raise Refusal(f"--strategy {path}: {key} is not predicted. Remove it to predict the training without it.")
    dropped = [name for name in ("optimizer", "scheduler") if json.get(name)]
    if dropped:
        notes.append(f"the program sets its own {' and '.join(dropped)}, in place of the JSON's")
    kind = str(read.get("optimizer.type", "adamw")).lower()
    if kind not in ("adam", "adamw"):
        options["optimizer"] = kind
    fields = (*_BATCH_FIELDS, "gradient_accumulation_steps")
    options |= {field: json[key] for field, key in zip(fields, _BATCH, strict=True) if isinstance(json.get(key), int)}
    if accumulated := read.get("data_types.grad_accum_dtype", None):
        options["grad_accum_dtype"] = "fp32" if accumulated == "fp32" else "model"
    if read.get("torch_autocast.enabled", False) is True:
        options["precision"] = "fp16-autocast" if read.get("torch_autocast.dtype") == "float16" else "bf16-autocast"
    elif read.precision:
        is_pure = read.get("bf16.bf16_master_weights_and_grads", False) is True
        options["precision"] = "pure-bf16" if is_pure and read.precision == "bf16" else read.precision
    zero = {
        key: int(value) if isinstance(value, str) and value.isdigit() else value
        for key, value in (json.get("zero_optimization") or {}).items()
        if value is not None
    }
    rest = {key: value for key, value in json.items() if key not in (*_BATCH, *dropped)}
    automatic = dict.fromkeys(_BATCH[1:], "auto")
    return {**rest, **automatic, "zero_optimization": {**zero, "stage": read.stage}}


def _of_fsdp(path: Path, content: dict[str, Any], options: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """Return the section of FSDP with accelerate's defaults.

    Activation checkpointing becomes a setting of the program. Raises Refusal for units that are not predicted.
    """
    section = dict(content["fsdp_config"])
    version, policy = AccelerateFile(content).fsdp_version, str(section.get("fsdp_auto_wrap_policy") or "NO_WRAP")
    if policy.upper() == "NO_WRAP":
        raise Refusal(
            f"--strategy {path}: with fsdp_auto_wrap_policy NO_WRAP, which is accelerate's default, all weights are "
            "gathered at once. FSDP is predicted only with one unit per block. Write TRANSFORMER_BASED_WRAP."
        )
    if policy.upper() == "SIZE_BASED_WRAP":
        notes.append("FSDP is predicted with one unit per block, and not with the units of SIZE_BASED_WRAP")
    section |= {"fsdp_version": version, "fsdp_offload_params": is_true(section.get("fsdp_offload_params"))}
    if is_true(section.get("fsdp_activation_checkpointing")):
        section["fsdp_activation_checkpointing"] = False
        options["activation_checkpointing"] = "full"
    reshards = section.pop("fsdp_reshard_after_forward", True)
    if version == 2:
        return section | {"fsdp_reshard_after_forward": is_true(reshards)}
    sharding = str(section.get("fsdp_sharding_strategy") or STRATEGIES[0]).upper()
    sharding = STRATEGIES[int(sharding) - 1] if sharding in "12345" else sharding
    if sharding == "NO_SHARD":
        raise Refusal(f"--strategy {path}: NO_SHARD is DDP. Write distributed_type: MULTI_GPU without fsdp_config.")
    notes.append("the memory of FSDP1 is predicted as that of FSDP2 with the same sharding")
    return section | {"fsdp_sharding_strategy": sharding}


def _own_file(
    path: Path, content: dict[str, Any], json: dict[str, Any] | None, options: dict[str, Any], notes: list[str]
) -> OwnFile:
    """Return what a file decides, from its content and the content of its DeepSpeed JSON."""
    kind = content["distributed_type"]
    deepspeed, fsdp = content.get("deepspeed_config", {}), content.get("fsdp_config", {})
    compiles = (content.get("dynamo_config") or {}).get("dynamo_backend") or content.pop("dynamo_backend", None) or "NO"
    if kind != "DEEPSPEED" and str(compiles).upper() != "NO":
        options["compile"] = True
    if json is None:
        stage = AccelerateFile(content).stage
        devices = [deepspeed.get(f"offload_{target}_device") for target in ("optimizer", "param")]
        num_steps, is_open = deepspeed.pop("gradient_accumulation_steps", None), False
        if (precision := content.get("mixed_precision")) not in (None, "no"):
            options["precision"] = precision
    else:
        zero = json["zero_optimization"]
        stage, num_steps = zero["stage"], options.pop("gradient_accumulation_steps", None)
        devices = [zero.get(f"offload_{target}", {}).get("device") for target in ("optimizer", "param")]
        is_open = "auto" in (DeepSpeedFile(json).get(f"{name}.enabled", None) for name in ("bf16", "fp16"))
    if fsdp.get("fsdp_offload_params"):
        devices = ["cpu", "cpu"]
    if unknown := [device for device in devices if device not in (None, *get_args(OffloadDevice))]:
        raise Refusal(f"--strategy {path}: there is no device {unknown[0]!r} for offload. Write none, cpu or nvme.")
    of_optimizer, of_param = (cast(OffloadDevice, device or "none") for device in devices)
    if num_steps and not options.keys() & _BATCH_FIELDS:
        notes.append(f"gradient_accumulation_steps of {path} counts only if a batch size is requested, too")
    if "precision" not in options and not is_open:
        notes.append(
            f"{path} states no 16-bit precision, so accelerate trains in fp32 unless the program requests 16 bits"
        )
    ddp_path = path.with_suffix(".json")
    ddp = load(ddp_path, "JSON") if kind == "MULTI_GPU" and path != ddp_path and ddp_path.is_file() else None
    ddp = ddp if isinstance(ddp, dict) and ddp.keys() <= kinds.OF_DDP.keys() else None
    strategy = Strategy(
        name=shipped.name_of(
            check_name(path.stem, f"{path}: the strategy's name"), {"yaml": content, "json": json or ddp}
        ),
        path=path,
        distributed_type=kind,
        num_processes=content["num_processes"],
        num_machines=content["num_machines"],
        zero_stage=stage,
        offload_optimizer_device=of_optimizer,
        offload_param_device=of_param if stage in (None, 3) else "none",
        zero3_init=deepspeed.get("zero3_init_flag") or False,
        deepspeed_json=json,
        ddp_json=ddp,
        gradient_clipping=None,
        gradient_accumulation_steps=None,
        content=content,
        mixed_precision=None,
    )
    return OwnFile(strategy, options, num_steps, is_open, tuple(notes))
