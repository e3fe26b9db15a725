"""What was built? Facts read from the engine, the model and the optimizer themselves; what is unknown is None."""

from __future__ import annotations

import importlib.metadata
import sys
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from study.engines import settings
from study.engines.engine_facts import backend, dtype_names, facts_of_deepspeed, facts_of_sharding
from study.engines.tensors import engine_tensors

_PRECISIONS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_LIBRARIES = ("torch", "deepspeed", "accelerate", "transformers", "trl")


def uncompiled(model: Any) -> Any:
    """The engine or model under torch.compile's wrapper."""
    return getattr(model, "_orig_mod", model)


def is_compiled(model: Any) -> bool:
    """Whether torch.compile made something of the model, or of a part of it."""
    parts = model.modules()
    return any(hasattr(m, "_orig_mod") or getattr(m, "_compiled_call_impl", None) is not None for m in parts)


def is_deepspeed(model: Any) -> bool:
    return hasattr(model, "zero_optimization_stage")


def inner(model: Any) -> torch.nn.Module:
    """The module whose flag says whether it trains: DeepSpeed's engine leaves its own as it is."""
    is_wrapper = is_deepspeed(model) or isinstance(model, DistributedDataParallel)
    found: torch.nn.Module = uncompiled(model.module) if is_wrapper else model
    return found


def engine_optimizer(model: Any, optimizer: Any) -> Any:
    """The optimizer that holds the model states: DeepSpeed's own, or torch's under whatever wraps it.

    Raises ValueError where there is none to be found.
    """
    if is_deepspeed(model):
        return model.optimizer
    return base_optimizer(optimizer)


def base_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer that does the arithmetic, under all wrappers. Raises ValueError where there is none."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"no torch optimizer: {type(optimizer).__name__}; write prove.watch(model, optimizer)")
    return optimizer


def read_back(model: Any, optimizer: Any) -> dict[str, Any]:
    """Read what was built. Rank-local: no collective. Raises what an engine of an unknown release raises."""
    parameters = list(model.parameters())
    device = model.device if is_deepspeed(model) else parameters[0].device
    facts: dict[str, Any] = {
        "engine": _engine(model),
        "engine_class": type(model).__name__,
        "optimizer_class": type(base_optimizer(engine_optimizer(model, optimizer))).__name__,
        "world_size": dist.get_world_size() if dist.is_initialized() else 1,
        "backend": backend(device),
        "device": device.type,
        "zero_stage": None,
        "offload_optimizer_device": None,
        "offload_param_device": None,
        "precision": None,
        "gradient_clipping": None,
        "gradient_accumulation_steps": None,
        "parameter_dtypes": dtype_names({p.dtype for p in parameters}),
        "num_params": sum(map(_size, parameters)),
        "num_trainable_params": sum(_size(p) for p in parameters if p.requires_grad),
        "versions": {name: importlib.metadata.version(name) for name in _LIBRARIES if name in sys.modules},
    }
    if is_deepspeed(model):
        return facts | facts_of_deepspeed(model) | _facts_of_zero(model)
    if facts["engine"] == "FSDP2":
        sharding = facts_of_sharding(model, None)
        return facts | sharding | {"precision": precision(sharding["compute_dtypes"])}
    return facts


def precision(dtypes: list[str]) -> str:
    """The names of types as they are asked for: fp32, bf16."""
    return "+".join(_PRECISIONS.get(name, name) for name in dtypes)


def _engine(model: Any) -> str:
    if is_deepspeed(model):
        return "DeepSpeed"
    if isinstance(model, DistributedDataParallel):
        return "DDP"
    # Whoever shards has imported these; in torch's own names FSDP1 wraps, and FSDP2 changes the module's class.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and any(isinstance(module, fsdp.FSDPModule) for module in model.modules()):
        return "FSDP2"
    if fsdp is not None and any(isinstance(module, fsdp.FullyShardedDataParallel) for module in model.modules()):
        return "FSDP1"
    return "none"


def _facts_of_zero(engine: Any) -> dict[str, Any]:
    optimizer = engine.optimizer
    read = {}
    for key in settings.READERS:
        with suppress(AttributeError, KeyError, TypeError):  # another release keeps it elsewhere: unknown
            read[key] = settings.value(key, engine, optimizer)
    facts: dict[str, Any] = {"settings": read}
    if engine.zero_optimization_stage():
        facts["zero_optimizer_class"] = type(optimizer).__name__
        masters = engine_tensors(engine, optimizer)["optimizer_states"]
        facts["master_dtypes"] = dtype_names({m.dtype for m in masters}) or None
    if engine.zero_optimization_stage() == 3:
        facts["partitioned_parameters"] = sum(hasattr(p, "ds_tensor") and not p.ds_persist for p in engine.parameters())
    return facts


def _size(parameter: Any) -> int:
    """Elements of a whole parameter: stage 3 leaves none in place, and a DTensor (FSDP2) says its whole size."""
    size: int = getattr(parameter, "ds_numel", parameter.numel())
    return size
