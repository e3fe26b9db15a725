"""Read facts about a built engine, model and optimizer. An unknown fact is None."""

from __future__ import annotations

import importlib.metadata
import sys
from collections import Counter
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ..keys import engine_settings
from .dtypes import dtype_name, dtype_names, precision_of, precision_of_autocast
from .parameters import COMPILED, plain_name, whole_parameters, whole_size
from .states import engine_tensors

_LIBRARIES = ("torch", "deepspeed", "accelerate", "transformers", "trl")


def uncompiled(model: Any) -> Any:
    """Return the engine or model without torch.compile's wrapper."""
    return getattr(model, COMPILED, model)


def is_compiled(model: Any) -> bool:
    """Return whether torch.compile compiled the model or a part of it."""
    parts = model.modules()
    return any(hasattr(m, COMPILED) or getattr(m, "_compiled_call_impl", None) is not None for m in parts)


def is_deepspeed(model: Any) -> bool:
    return hasattr(model, "zero_optimization_stage")


def ddp_of(model: Any) -> DistributedDataParallel | None:
    """Return the DDP module that a model is or contains. None if there is none.

    Lightning's Fabric and others wrap it.
    """
    return next((part for part in model.modules() if isinstance(part, DistributedDataParallel)), None)


def inner_module(model: Any) -> torch.nn.Module:
    """Return the module inside an engine. Its flag `training` is right, that of DeepSpeed's engine is not."""
    is_wrapper = is_deepspeed(model) or isinstance(model, DistributedDataParallel)
    module: torch.nn.Module = uncompiled(model.module) if is_wrapper else model
    return module


def engine_optimizer(model: Any, optimizer: Any) -> Any:
    """Return the optimizer that holds the model states: DeepSpeed's own, or torch's without its wrappers.

    Raises ValueError if there is no torch optimizer under the wrappers.
    """
    if is_deepspeed(model):
        return model.optimizer
    return base_optimizer(optimizer)


def base_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer that does the arithmetic, without any wrappers. Raises ValueError if there is none."""
    optimizer = unwrapped_optimizer(optimizer)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(
            f"{type(optimizer).__name__} is not an optimizer of torch. Write prove.watch(model, optimizer)"
        )
    return optimizer


def unwrapped_optimizer(optimizer: Any) -> Any:
    """Return the innermost optimizer of an optimizer with wrappers."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


# ---------------------------------------------------------------- parameters


def replicated_names(model: Any) -> set[str]:
    """Return the names of the parameters that every data-parallel rank stores in full.

    Sharded parameters, DeepSpeed's experts and the parameters that DDP ignores are left out.
    """
    ignored = set(map(plain_name, getattr(ddp_of(model), "parameters_to_ignore", ())))
    return {
        name
        for name, parameter in model.named_parameters()
        if plain_name(name) not in ignored
        and all(placement.is_replicate() for placement in getattr(parameter, "placements", ()))
        and not hasattr(parameter, "ds_tensor")
        and getattr(parameter, "allreduce", True)
    }


# ---------------------------------------------------------------- facts


def read_back(
    model: Any,
    optimizer: Any,
    *,
    device: torch.device | None = None,
    block_class: str | None = None,
    is_strict: bool = False,
) -> dict[str, Any]:
    """Return facts about a built engine by their names. Read only this rank, without collectives.

    `model` is a DeepSpeed engine, DDP, an FSDP2 module or a plain model, without torch.compile's wrapper. `device` is
    the device on which the rank computes; None means that of the DeepSpeed engine, or else of the first parameter.
    `facts_of_fsdp2` explains `block_class`. Errors of an engine of an unknown release are passed on. If `is_strict`,
    this includes errors in reading a single setting; otherwise that setting is left out.
    """
    parameters = list(model.parameters())
    if device is None:
        device = model.device if is_deepspeed(model) else parameters[0].device
    whole = whole_parameters(model)
    facts: dict[str, Any] = {
        "engine": engine_kind(model),
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
        "parameter_dtypes": dtype_names(p.dtype for p in parameters),
        "data_parallel_ranks": data_parallel_ranks(model),
        "num_params": sum(map(whole_size, whole)),
        "num_trainable_params": sum(whole_size(p) for p in whole if p.requires_grad),
        "versions": versions(),
    }
    if facts["engine"] == "DeepSpeed":
        return facts | facts_of_deepspeed(model) | _facts_of_zero(model, is_strict)
    if facts["engine"] == "FSDP2":
        sharding = facts_of_fsdp2(model, block_class)
        return facts | sharding | {"precision": precision_of(sharding["compute_dtypes"])}
    return facts


def engine_kind(model: Any) -> str:
    """Return the engine's kind: DeepSpeed, DDP, FSDP2, FSDP1 or none.

    FSDP2 changes the class of a module, and FSDP1 wraps it. Both may apply to a part of the model only.
    """
    if is_deepspeed(model):
        return "DeepSpeed"
    if ddp_of(model) is not None:
        return "DDP"
    for kind, module_class in (("FSDP2", FSDPModule), ("FSDP1", FullyShardedDataParallel)):
        if any(isinstance(module, module_class) for module in model.modules()):
            return kind
    return "none"


def versions() -> dict[str, str]:
    """Return the versions of the engines and related libraries that this process has imported, by name."""
    return {name: importlib.metadata.version(name) for name in _LIBRARIES if name in sys.modules}


def backend(device: torch.device) -> str | None:
    """Return the name of the communication backend for a device. None if there is no process group.

    A group may have one backend per device, for instance under accelerate's FSDP.
    """
    if not dist.is_initialized():
        return None
    return str(dist.distributed_c10d._get_default_group()._get_backend(device).name())


def data_parallel_ranks(model: Any) -> list[int] | None:
    """Return the ranks over which gradients are averaged. For a plain model, these are all ranks.

    None if there is no process group, or if the ranks are unknown, as for a pipeline.
    """
    kind, group = engine_kind(model), None
    if not dist.is_initialized() or (kind == "DeepSpeed" and not model.enable_backward_allreduce):
        return None
    if kind == "FSDP2":
        # FSDP2 averages gradients over the mesh of the shards, or with replicas over the full mesh.
        ranks: list[int] = _parameter_groups(model)[0].mesh_info.mesh.mesh.flatten().tolist()
        return ranks
    if kind == "DeepSpeed":
        group = model.data_parallel_group
    elif kind != "none":
        wrapper = ddp_of(model) or next(part for part in model.modules() if hasattr(part, "_handle"))
        group = wrapper.process_group
    return sorted(dist.get_process_group_ranks(group))


# ---------------------------------------------------------------- facts of DeepSpeed


def facts_of_deepspeed(engine: Any) -> dict[str, Any]:
    """Return the facts of a DeepSpeed engine of any stage."""
    zero = engine._config.zero_config
    stage = engine.zero_optimization_stage()
    facts = {
        "gradient_clipping": engine.gradient_clipping(),
        "gradient_accumulation_steps": engine.gradient_accumulation_steps(),
        "micro_batch_size": engine.train_micro_batch_size_per_gpu(),
        "zero_stage": stage,
        "offload_optimizer_device": _offload_device(zero.offload_optimizer),
        "offload_param_device": _offload_device(zero.offload_param),
        "precision": _deepspeed_precision(engine),
        "accumulation_dtype": dtype_name(engine.get_data_types()[1]),
        "overlap_comm": zero.overlap_comm if stage else None,
    }
    if _has_autocast(engine):
        facts["autocast_dtype"] = dtype_name(engine.torch_autocast_dtype())
    return facts


def _offload_device(section: Any) -> str:
    return "none" if section is None else str(getattr(section.device, "value", section.device))


def _has_autocast(engine: Any) -> bool:
    """Return whether a DeepSpeed engine calls torch's autocast itself. Older releases cannot."""
    is_enabled = getattr(engine, "torch_autocast_enabled", None)
    return is_enabled is not None and bool(is_enabled())


def _deepspeed_precision(engine: Any) -> str:
    if _has_autocast(engine):
        return precision_of_autocast(engine.torch_autocast_dtype())
    return "bf16" if engine.bfloat16_enabled() else "fp16" if engine.fp16_enabled() else "fp32"


def _facts_of_zero(engine: Any, is_strict: bool) -> dict[str, Any]:
    """Return the value of each key of a DeepSpeed JSON, and the facts of the ZeRO optimizer of stages 1 to 3."""
    optimizer, stage = engine.optimizer, engine.zero_optimization_stage()
    facts: dict[str, Any] = {"settings": _settings(engine, is_strict)}
    if stage:
        facts["zero_optimizer_class"] = type(optimizer).__name__
        masters = engine_tensors(engine, optimizer)["optimizer_states"]
        facts["master_dtypes"] = dtype_names(m.dtype for m in masters) or None
    if stage == 3:
        facts["partitioned_parameters"] = sum(hasattr(p, "ds_tensor") and not p.ds_persist for p in engine.parameters())
    return facts


def _settings(engine: Any, is_strict: bool) -> dict[str, Any]:
    if is_strict:
        return engine_settings.read(engine, engine.optimizer)
    settings = {}
    for key in engine_settings.readers():
        with suppress(AttributeError, KeyError, TypeError):  # another release keeps it elsewhere: unknown
            settings[key] = engine_settings.value(key, engine, engine.optimizer)
    return settings


# ---------------------------------------------------------------- facts of FSDP2


def facts_of_fsdp2(model: torch.nn.Module, block_class: str | None) -> dict[str, Any]:
    """Read facts about a model's FSDP2 modules, named as in `records.schema.Sharding`. Issue no collectives.

    The fact `reshard_after_forward` is about the units of class `block_class`. If `block_class` is None, it is about
    every unit except the root, which stays gathered.
    """
    groups = _parameter_groups(model)
    blocks = groups[1:] if block_class is None else [group for group in groups if _unit(group) == block_class]
    parameters = list(model.parameters())
    sharded = [p for p in parameters if isinstance(p, DTensor)]
    meshes = {tuple(p.device_mesh.shape) for p in sharded}
    return {
        "units": dict(Counter(map(_unit, groups))),
        "reshard_after_forward": all(group.post_forward_mesh_info for group in blocks),
        "sharded_parameters": sum(p.placements[-1].is_shard() for p in sharded),
        "unsharded_parameters": len(parameters) - len(sharded),
        "mesh": list(*meshes) if len(meshes) == 1 else [],
        **_dtypes_of_policies([each.mp_policy for group in groups for each in group.fsdp_params], parameters),
        "offloads": bool(groups) and all(isinstance(group.offload_policy, CPUOffloadPolicy) for group in groups),
    }


def _dtypes_of_policies(policies: list[Any], parameters: list[torch.nn.Parameter]) -> dict[str, list[str]]:
    """Return the data types in which FSDP2 computes and reduces. By default, they are those of the parameters."""
    own = torch.float64 if {p.dtype for p in parameters} == {torch.float64} else torch.float32
    return {
        "compute_dtypes": dtype_names(policy.param_dtype or own for policy in policies),
        "reduce_dtypes": dtype_names(policy.reduce_dtype or policy.param_dtype or own for policy in policies),
    }


def _parameter_groups(model: torch.nn.Module) -> list[Any]:
    """Return the groups of parameters that are gathered together, the root's group first."""
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    groups = [group for module in modules for group in groups_of_module(module)]
    return list({id(group): group for group in groups}.values())  # several modules may share one


def groups_of_module(module: FSDPModule) -> list[Any]:
    """Return the groups of parameters of one module. Older releases of torch, for example 2.8, have at most one."""
    state: Any = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    return list(filter(None, [state._fsdp_param_group]) if groups is None else groups)


def _unit(group: Any) -> str:
    """Return the names of the classes that a group's modules had before `fully_shard`, joined by "+"."""
    return "+".join(type(module).__bases__[1].__name__ for module in group.modules)
