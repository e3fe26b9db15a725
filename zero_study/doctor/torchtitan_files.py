"""Examine the TOML files of torchtitan: the degrees of parallelism, and the keys that FSDP2 reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .findings import Finding, Instead
from .kinds import near

# The keys of [parallelism] in torchtitan's job configuration. Releases before it had some of them in [training].
PARALLELISM = frozenset({
    "data_parallel_replicate_degree", "data_parallel_shard_degree", "fsdp_reshard_after_forward",
    "tensor_parallel_degree", "disable_loss_parallel", "enable_async_tensor_parallel", "pipeline_parallel_degree",
    "module_fqns_per_model_part", "pipeline_parallel_first_stage_less_layers",
    "pipeline_parallel_last_stage_less_layers", "pipeline_parallel_layers_per_stage", "pipeline_parallel_schedule",
    "pipeline_parallel_schedule_csv", "pipeline_parallel_microbatch_size", "pipeline_parallel_expert_parallel_overlap",
    "pipeline_parallel_split_points", "context_parallel_degree", "context_parallel_load_balancer",
    "context_parallel_rotate_method", "expert_parallel_degree", "expert_tensor_parallel_degree",
    "expert_parallel_comm_backend", "enable_compiled_autograd",
})  # fmt: skip
CHOICES: dict[str, tuple[Any, ...]] = {
    "parallelism.fsdp_reshard_after_forward": ("default", "always", "never"),
    "parallelism.context_parallel_rotate_method": ("allgather", "alltoall"),
    "training.mixed_precision_param": ("bfloat16", "float32"),
    "training.mixed_precision_reduce": ("float32",),
    "training.dtype": ("bfloat16", "float32"),
    "training.enable_cpu_offload": (True, False),
    "activation_checkpoint.mode": ("none", "selective", "full", "memory_budget"),
}


def of_toml(file: str, content: Mapping[str, Any]) -> list[Finding]:
    """Return a finding for each key that decides how torchtitan distributes a training."""
    findings = []
    for section in ("parallelism", "training", "activation_checkpoint"):
        keys = content.get(section)
        for name, value in keys.items() if isinstance(keys, dict) else ():
            if finding := _finding(file, section, str(name), value, content):
                findings.append(finding)
    return findings


def _finding(file: str, section: str, name: str, value: Any, content: Mapping[str, Any]) -> Finding | None:
    """Return the finding for a key. None if the key does not influence how a training is distributed."""
    key = f"{section}.{name}"
    if key in CHOICES:
        return _of_choice(file, key, value)
    if name.endswith("_degree") and section in ("parallelism", "training"):
        return _of_degree(file, key, value)
    if section != "parallelism":
        return None
    right = None if name in PARALLELISM or _has_own_keys(content) else near(name, PARALLELISM)
    if right is not None:
        return Finding(
            file=file, key=key, value=value, effect="crashes", matters=True, mend=Instead(f"{section}.{right}"),
            message="torchtitan refuses unknown keys.", remedy=f"Write {right}.", error="Invalid field names",
        )  # fmt: skip
    return Finding(file=file, key=key, value=value, effect="honoured" if name in PARALLELISM else "not examined")


def _has_own_keys(content: Mapping[str, Any]) -> bool:
    """Return whether the file names a module that may add keys to the configuration."""
    sections = (content.get("job"), content.get("experimental"))
    return any(isinstance(section, dict) and any("custom" in str(name) for name in section) for section in sections)


def _of_choice(file: str, key: str, value: Any) -> Finding:
    choices = CHOICES[key]
    if value in choices and isinstance(value, bool) == isinstance(choices[0], bool):
        return Finding(file=file, key=key, value=value, effect="honoured")
    words = ", ".join(str(choice).lower() if isinstance(choice, bool) else f'"{choice}"' for choice in choices)
    return Finding(
        file=file, key=key, value=value, effect="crashes", matters=True, message="torchtitan refuses this value.",
        remedy=f"Write one of {words}.",
    )  # fmt: skip


def _of_degree(file: str, key: str, value: Any) -> Finding:
    """Return the finding for a degree of parallelism. Only that of sharding may be -1, which means all other ranks."""
    may_be_open = key.endswith(("data_parallel_shard_degree", "data_parallel_degree"))
    if type(value) is int and (value >= 1 or (value == -1 and may_be_open)):
        return Finding(file=file, key=key, value=value, effect="honoured")
    remedy = "Write 1 or more, or -1 for all other ranks." if may_be_open else "Write 1 or more."
    return Finding(
        file=file, key=key, value=value, effect="crashes", matters=True, remedy=remedy,
        message="torchtitan needs a whole number of ranks here.",
    )  # fmt: skip
