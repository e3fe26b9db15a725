"""What was built, read from the engine, the model and the optimizer themselves; what is unknown is None."""

from __future__ import annotations

import importlib.metadata
import sys
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ..engine_facts import (
    backend,
    data_parallel_mesh,
    dtype_names,
    engine_tensors,
    facts_of_deepspeed,
    facts_of_sharding,
)
from ..keys import engine_settings

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


def ddp_of(model: Any) -> DistributedDataParallel | None:
    """The DDP that a model is, or has in it: Lightning's Fabric and others put a module around it."""
    return next((part for part in model.modules() if isinstance(part, DistributedDataParallel)), None)


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
    optimizer = unwrapped(optimizer)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"no torch optimizer: {type(optimizer).__name__}; write prove.watch(model, optimizer)")
    return optimizer


def unwrapped(optimizer: Any) -> Any:
    """What is under all wrappers of an optimizer, whatever that is."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
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
        "data_parallel_ranks": _data_parallel_ranks(model),
        "num_params": sum(whole_size(p) for p in whole_parameters(model)),
        "num_trainable_params": sum(whole_size(p) for p in whole_parameters(model) if p.requires_grad),
        "versions": versions(),
    }
    if is_deepspeed(model):
        return facts | facts_of_deepspeed(model) | _facts_of_zero(model)
    if facts["engine"] == "FSDP2":
        sharding = facts_of_sharding(model, None)
        return facts | sharding | {"precision": precision(sharding["compute_dtypes"])}
    return facts


def versions() -> dict[str, str]:
    """Of the libraries of an engine that the script has imported."""
    return {name: importlib.metadata.version(name) for name in _LIBRARIES if name in sys.modules}


def precision(dtypes: list[str]) -> str:
    """The names of types as they are asked for: fp32, bf16."""
    return "+".join(_PRECISIONS.get(name, name) for name in dtypes)


def _engine(model: Any) -> str:
    if is_deepspeed(model):
        return "DeepSpeed"
    if ddp_of(model) is not None:
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
    for key in engine_settings.readers():
        with suppress(AttributeError, KeyError, TypeError):  # another release keeps it elsewhere: unknown
            read[key] = engine_settings.value(key, engine, optimizer)
    facts: dict[str, Any] = {"settings": read}
    if engine.zero_optimization_stage():
        facts["zero_optimizer_class"] = type(optimizer).__name__
        masters = engine_tensors(engine, optimizer)["optimizer_states"]
        facts["master_dtypes"] = dtype_names({m.dtype for m in masters}) or None
    if engine.zero_optimization_stage() == 3:
        facts["partitioned_parameters"] = sum(hasattr(p, "ds_tensor") and not p.ds_persist for p in engine.parameters())
    return facts


def _data_parallel_ranks(model: Any) -> list[int] | None:
    """The ranks that average gradients; of a plain model all; None: unknown, as of a pipeline."""
    engine, group = _engine(model), None
    if not dist.is_initialized() or (engine == "DeepSpeed" and not model.enable_backward_allreduce):
        return None
    if engine == "FSDP2":
        ranks: list[int] = data_parallel_mesh(model).mesh.flatten().tolist()
        return ranks
    if engine == "DeepSpeed":
        group = model.data_parallel_group
    elif engine != "none":
        kept = ddp_of(model) or next(part for part in model.modules() if hasattr(part, "_handle"))
        group = kept.process_group
    return sorted(dist.get_process_group_ranks(group))


def replicated(model: Any) -> set[str]:
    """The names of parameters that each data-parallel rank has the whole of: no shards, no experts of DeepSpeed's."""
    ignored = getattr(ddp_of(model), "parameters_to_ignore", ())
    return {
        name
        for name, parameter in model.named_parameters()
        if name.removeprefix("module.") not in ignored
        and all(placement.is_replicate() for placement in getattr(parameter, "placements", ()))
        and not hasattr(parameter, "ds_tensor")
        and getattr(parameter, "allreduce", True)
    }


def whole_parameters(model: Any) -> list[Any]:
    """A model's parameters; of FSDP1 also the flat ones, whose originals are views of a shard."""
    flat = [m._handle.flat_param for m in model.modules() if getattr(m, "_handle", None) is not None]
    views = {id(p) for each in flat for p in each._params or ()}
    found = {id(p): p for p in (*flat, *(p for p in model.parameters() if id(p) not in views))}
    return list(found.values())


def whole_size(parameter: Any) -> int:
    """Elements of a whole parameter: stage 3 leaves none in place, a DTensor (FSDP2) says its own, FSDP1 pads it."""
    if hasattr(parameter, "_unpadded_unsharded_size"):
        return int(parameter._unpadded_unsharded_size.numel())
    return int(getattr(parameter, "ds_numel", parameter.numel()))
