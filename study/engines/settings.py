"""What became of every key that a DeepSpeed JSON may hold? Read from the engine as it was built, key by key.

Where the ZeRO optimizer, or what it offloads with, has a value of its own, that counts: the engine's configuration is
what was asked, and is read only where nothing built keeps the value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

Value = bool | int | float | str | None
Reader = Callable[[Any, Any], Any]  # of a DeepSpeed engine and its ZeRO optimizer, or torch's at stage 0

# As DeepSpeed's JSON names them, and as torch does.
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def _zero(name: str, built: str | None = None) -> Reader:
    """Read an attribute of the ZeRO optimizer, which may lie deeper; else the engine's configuration of ZeRO."""

    def read(engine: Any, optimizer: Any) -> Any:
        holder = optimizer
        for part in (built or name).split("."):
            if not hasattr(holder, part):
                return getattr(engine._config.zero_config, name)
            holder = getattr(holder, part)
        return holder

    return read


def _offload(section: str, name: str) -> Reader:
    """Read what is offloaded, and how; None where nothing is."""

    def read(engine: Any, _: Any) -> Any:
        part = getattr(engine._config.zero_config, section)
        return ("none" if name == "device" else None) if part is None else getattr(part, name)

    return read


def _aio(name: str) -> Reader:
    return lambda engine, _: engine._config.aio_config[name]


def _loss_scaling(name: str) -> Reader:
    return lambda engine, _: getattr(engine._config.float16_config, name)


def _secondary_partition_size(engine: Any, _: Any) -> int:
    """Ranks that share a second copy of the parameters at stage 3; 1: there is none."""
    parameter = next(engine.parameters())
    has_one = getattr(parameter, "ds_zero_param_process_group", None) is not None
    return parameter.ds_secondary_tensor_group_size if has_one else 1


def _communication_dtype(engine: Any, optimizer: Any) -> Any:
    return getattr(optimizer, "communication_data_type", engine.communication_data_type)


ZERO = "zero_optimization"

READERS: dict[str, Reader] = {
    f"{ZERO}.stage": lambda engine, _: engine.zero_optimization_stage(),
    f"{ZERO}.contiguous_gradients": _zero("contiguous_gradients"),
    f"{ZERO}.reduce_scatter": _zero("reduce_scatter"),
    f"{ZERO}.reduce_bucket_size": _zero("reduce_bucket_size"),
    f"{ZERO}.use_multi_rank_bucket_allreduce": _zero("use_multi_rank_bucket_allreduce"),
    f"{ZERO}.allgather_partitions": _zero("allgather_partitions"),
    f"{ZERO}.allgather_bucket_size": _zero("allgather_bucket_size"),
    f"{ZERO}.overlap_comm": _zero("overlap_comm"),
    f"{ZERO}.sub_group_size": _zero("sub_group_size"),
    f"{ZERO}.round_robin_gradients": _zero("round_robin_gradients"),
    f"{ZERO}.stage3_prefetch_bucket_size": _zero("prefetch_bucket_size", "parameter_offload._prefetch_bucket_sz"),
    f"{ZERO}.stage3_param_persistence_threshold": _zero(
        "param_persistence_threshold", "parameter_offload.param_numel_persistence_threshold"
    ),
    f"{ZERO}.stage3_model_persistence_threshold": _zero(
        "model_persistence_threshold", "parameter_offload.model_persistence_threshold"
    ),
    f"{ZERO}.stage3_max_live_parameters": _zero(
        "max_live_parameters", "parameter_offload._max_available_parameters_in_numel"
    ),
    f"{ZERO}.stage3_max_reuse_distance": _zero("max_reuse_distance", "parameter_offload._max_reuse_distance_in_numel"),
    f"{ZERO}.stage3_gather_16bit_weights_on_model_save": _zero("gather_16bit_weights_on_model_save"),
    f"{ZERO}.stage3_module_granularity_threshold": _zero("module_granularity_threshold"),
    f"{ZERO}.zero_hpz_partition_size": _secondary_partition_size,
    **{
        f"{ZERO}.offload_optimizer.{name}": _offload("offload_optimizer", name)
        for name in ("device", "buffer_count", "pin_memory", "pipeline_read", "pipeline_write", "fast_init")
    },
    **{
        f"{ZERO}.offload_param.{name}": _offload("offload_param", name)
        for name in ("device", "buffer_count", "buffer_size", "max_in_cpu", "pin_memory")
    },
    **{
        f"aio.{name}": _aio(name)
        for name in ("block_size", "queue_depth", "intra_op_parallelism", "single_submit", "overlap_events", "use_gds")
    },
    "gradient_accumulation_steps": lambda engine, _: engine.gradient_accumulation_steps(),
    "gradient_clipping": lambda engine, _: engine.gradient_clipping(),
    "train_micro_batch_size_per_gpu": lambda engine, _: engine.train_micro_batch_size_per_gpu(),
    "train_batch_size": lambda engine, _: engine.train_batch_size(),
    "communication_data_type": _communication_dtype,
    "bf16.enabled": lambda engine, _: engine.bfloat16_enabled(),
    **{
        f"fp16.{name}": _loss_scaling(name)
        for name in (
            "enabled",
            "auto_cast",
            "loss_scale",
            "loss_scale_window",
            "initial_scale_power",
            "hysteresis",
            "min_loss_scale",
        )
    },
    "zero_allow_untested_optimizer": lambda engine, _: engine.zero_allow_untested_optimizer(),
    "zero_force_ds_cpu_optimizer": lambda engine, _: engine.zero_force_ds_cpu_optimizer(),
    "wall_clock_breakdown": lambda engine, _: engine.wall_clock_breakdown(),
}

PRINTS = {"steps_per_print"}  # accelerate puts infinity in its place, which no JSON has


def read(engine: Any, optimizer: Any) -> dict[str, Value]:
    """Read every key from a DeepSpeed engine, whether or not a file sets it: a default, too, is a setting."""
    return {key: value(key, engine, optimizer) for key in READERS}


def value(key: str, engine: Any, optimizer: Any) -> Value:
    """Read one key, as JSON has it. Raises AttributeError and the like where a release keeps it elsewhere."""
    return _plain(READERS[key](engine, optimizer))


def asked(content: dict[str, Any]) -> Iterator[tuple[str, Value]]:
    """The keys that a DeepSpeed JSON sets to a value, as `read` writes them; "auto" is for others to fill in."""
    for key, wanted in _flat(content):
        if wanted != "auto" and key not in PRINTS:
            yield key, DTYPES[wanted] if key == "communication_data_type" else wanted


def _flat(section: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def _plain(value: Any) -> Value:
    """A value as JSON has it: types by their names, an enumeration by its value."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    plain: Value = getattr(value, "value", value)
    return plain
