"""Convert a strategy into the Engine of theory."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from zero_study.engines.keys import known_keys
from zero_study.errors import Refusal
from zero_study.models import suited_buckets, swap_buffer_size
from zero_study.strategy.file import Strategy
from zero_study.theory.engine import Engine, PrecisionClass, parameter_bytes
from zero_study.theory.model_states import is_bf16_optimizer

# DeepSpeed's defaults of settings that a file leaves out, in elements.
_SILENT = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold",
           "stage3_max_live_parameters", "stage3_max_reuse_distance", "sub_group_size")  # fmt: skip
_ZERO = known_keys.engine_schema("deepspeed", "strict")["zero_optimization"]
# Settings that only stage 3 has, by the field of Engine.
_STAGE_3_SIZES = {
    "persistence_threshold": "stage3_param_persistence_threshold",
    "prefetch_bucket_size": "stage3_prefetch_bucket_size",
    "max_live_parameters": "stage3_max_live_parameters",
    "max_reuse_distance": "stage3_max_reuse_distance",
}
DEEPSPEED_DEFAULTS: dict[str, int] = {name: _ZERO[name]["default"] for name in _SILENT}


_AUTOCAST: dict[PrecisionClass, PrecisionClass] = {"bf16": "bf16-autocast", "fp16": "fp16-autocast"}


def precision_class(chosen: Strategy, precision: PrecisionClass) -> PrecisionClass:
    """Return the precision class in which a strategy trains if 16 bits are requested.

    DeepSpeed's stages 1 to 3 and FSDP2 compute in 16 bits and keep fp32 masters. All others compute under autocast."""
    has_masters = chosen.zero_stage or chosen.distributed_type == "FSDP"
    return precision if has_masters else _AUTOCAST.get(precision, precision)


def engine_of_strategy(
    chosen: Strategy, hidden: int, world_size: int, precision: PrecisionClass, accumulation_dtype: str = "fp32"
) -> Engine:
    """Return the engine that a strategy's file configures for a model of this hidden size.

    `accumulation_dtype` is the type in which gradients accumulate if the parameters are in 16 bits.
    """
    in_fp32 = parameter_bytes(precision) == 4 or (accumulation_dtype == "fp32" and precision != "pure-bf16")
    accumulation_bytes = 4 if in_fp32 else 2
    if chosen.distributed_type == "FSDP":
        return _fsdp_engine(chosen, world_size, precision, accumulation_bytes)
    if chosen.distributed_type == "DEEPSPEED":
        return _deepspeed_engine(chosen, hidden, world_size, precision, accumulation_bytes)
    kind: Literal["torch", "ddp"] = "torch" if chosen.distributed_type == "NO" else "ddp"
    return Engine(kind, 0, world_size, precision, accumulation_bytes, **chosen.ddp_json or {})


def _fsdp_engine(chosen: Strategy, world_size: int, precision: PrecisionClass, accumulation_bytes: int) -> Engine:
    return Engine(
        kind="fsdp",
        zero_stage=3,
        world_size=world_size,
        precision=precision,
        accumulation_bytes=accumulation_bytes,
        offload_optimizer=chosen.offload_param_device,  # FSDP2 offloads both or neither
        offload_param=chosen.offload_param_device,
        reshard_after_forward=chosen.reshard_after_forward,
        replicas=chosen.mesh[0] if chosen.mesh else 1,
        reduces_in_fp32=True,
        is_fsdp1=chosen.fsdp1_sharding is not None,
    )


def _deepspeed_engine(
    chosen: Strategy, hidden: int, world_size: int, precision: PrecisionClass, accumulation_bytes: int
) -> Engine:
    zero = _zero_settings(chosen, hidden)
    is_stage_3 = chosen.zero_stage == 3
    engine = Engine(
        kind="deepspeed",
        zero_stage=chosen.zero_stage or 0,
        world_size=world_size,
        precision=precision,
        accumulation_bytes=accumulation_bytes,
        offload_optimizer=chosen.offload_optimizer_device,
        offload_param=chosen.offload_param_device,
        reduce_bucket_size=zero["reduce_bucket_size"],
        sub_group_size=zero["sub_group_size"],
        secondary_partition_size=min(chosen.secondary_partition_size, world_size),  # as DeepSpeed, utils/groups.py
        param_swap_buffer_size=swap_buffer_size(hidden, world_size) if chosen.offload_param_device == "nvme" else 0,
        overlap_comm=zero.get("overlap_comm", is_stage_3),
        multi_rank_allreduce=zero.get("use_multi_rank_bucket_allreduce", True),
        **({field: zero[key] for field, key in _STAGE_3_SIZES.items()} if is_stage_3 else {}),
    )
    has_bucket = engine.zero_stage > 0 and not is_bf16_optimizer(engine)
    return engine if has_bucket else dataclasses.replace(engine, reduce_bucket_size=0)


def _zero_settings(chosen: Strategy, hidden: int) -> dict[str, Any]:
    """Return the settings of `zero_optimization`, with values instead of "auto" and DeepSpeed's defaults.

    Sizes that a file writes as whole floats, such as 1e9, are integers in the result, as DeepSpeed converts them
    (runtime/config_utils.py, pp_int and the types of zero/config.py).
    """
    in_file = (chosen.deepspeed_json or {}).get("zero_optimization", {})
    in_file = {
        key: int(value) if isinstance(value, float) and value.is_integer() else value for key, value in in_file.items()
    }
    explicit = {key: value for key, value in in_file.items() if value != "auto"}
    automatic = {key: value for key, value in suited_buckets(hidden).items() if in_file.get(key) == "auto"}
    return {**DEEPSPEED_DEFAULTS, **explicit, **automatic}


def advised_engine(
    chosen: Strategy, hidden: int, world_size: int, precision: PrecisionClass, accumulation_dtype: str = "fp32"
) -> Engine:
    """Return the engine settings with which a strategy trains in the precision that the user requests.

    If 16 bits are requested, a strategy without fp32 master weights trains under autocast.

    `accumulation_dtype` is the type in which DeepSpeed accumulates gradients of 16-bit parameters. Raises Refusal for
    fp8 with an engine other than FSDP2, because there is no model of that.
    """
    if precision == "fp8" and chosen.distributed_type != "FSDP":
        raise Refusal("fp8 is predicted only for FSDP2. Use another precision or strategy")
    return engine_of_strategy(chosen, hidden, world_size, precision_class(chosen, precision), accumulation_dtype)
