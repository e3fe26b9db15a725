"""What does an engine say of itself: DeepSpeed's, and PyTorch's FSDP2? It needs torch alone."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor


def dtype_names(dtypes: set[torch.dtype]) -> list[str]:
    """Types as a proof writes them: bfloat16, float32."""
    return sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)


def backend(device: torch.device) -> str | None:
    """The backend that moves a device's tensors; a group may have one for each device (accelerate's FSDP has)."""
    if not dist.is_initialized():
        return None
    return str(dist.distributed_c10d._get_default_group()._get_backend(device).name())


def facts_of_deepspeed(engine: Any) -> dict[str, Any]:
    """What a DeepSpeed engine says of itself, whatever its stage."""
    zero = engine._config.zero_config
    devices = {
        key: "none" if part is None else str(getattr(part.device, "value", part.device))
        for key, part in (("optimizer", zero.offload_optimizer), ("param", zero.offload_param))
    }
    stage = engine.zero_optimization_stage()
    facts = {
        "gradient_clipping": engine.gradient_clipping(),
        "gradient_accumulation_steps": engine.gradient_accumulation_steps(),
        "micro_batch_size": engine.train_micro_batch_size_per_gpu(),
        "zero_stage": stage,
        "offload_optimizer_device": devices["optimizer"],
        "offload_param_device": devices["param"],
        "precision": deepspeed_precision(engine),
        "accumulation_dtype": str(engine.get_data_types()[1]).removeprefix("torch."),
        "overlap_comm": zero.overlap_comm if stage else None,
    }
    if _has_autocast(engine):
        facts["autocast_dtype"] = str(engine.torch_autocast_dtype()).removeprefix("torch.")
    return facts


def _has_autocast(engine: Any) -> bool:
    """Whether the engine calls torch's autocast by itself; older releases cannot."""
    is_enabled = getattr(engine, "torch_autocast_enabled", None)
    return is_enabled is not None and bool(is_enabled())


def deepspeed_precision(engine: Any) -> str:
    if _has_autocast(engine):
        return {torch.bfloat16: "bf16-autocast", torch.float16: "fp16-autocast"}[engine.torch_autocast_dtype()]
    return "bf16" if engine.bfloat16_enabled() else "fp16" if engine.fp16_enabled() else "fp32"


def _groups(model: torch.nn.Module) -> list[Any]:
    """The groups of parameters that are gathered together, the root's first (torch 2.13)."""
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    groups = [group for module in modules for group in module._get_fsdp_state()._fsdp_param_groups]
    return list({id(group): group for group in groups}.values())  # one may be of several modules


def _unit(group: Any) -> str:
    """The classes of a group's modules; `fully_shard` has put one of its own in front of each."""
    return "+".join(type(module).__bases__[1].__name__ for module in group.modules)


def facts_of_sharding(model: torch.nn.Module, block: str | None) -> dict[str, Any]:
    """What FSDP2's modules say of themselves, by the names in `Sharding`. Rank-local: no collective.

    `block`: the class of the blocks, for what they let go of; None: of every unit but the root's, which keeps its own.
    """
    groups = _groups(model)
    blocks = groups[1:] if block is None else [group for group in groups if _unit(group) == block]
    policies = {group.mp_policy for group in groups}
    parameters = list(model.parameters())
    meshes = {tuple(p.device_mesh.shape) for p in parameters if isinstance(p, DTensor)}
    return {
        "units": dict(Counter(map(_unit, groups))),
        "reshard_after_forward": all(group.post_forward_mesh_info for group in blocks),
        "sharded_parameters": sum(isinstance(p, DTensor) and p.placements[-1].is_shard() for p in parameters),
        "unsharded_parameters": sum(not isinstance(p, DTensor) for p in parameters),
        "mesh": list(*meshes) if len(meshes) == 1 else [],
        "compute_dtypes": dtype_names({policy.param_dtype or torch.float32 for policy in policies}),
        "reduce_dtypes": dtype_names(
            {policy.reduce_dtype or policy.param_dtype or torch.float32 for policy in policies}
        ),
        "offloads": bool(groups) and all(isinstance(group.offload_policy, CPUOffloadPolicy) for group in groups),
    }
