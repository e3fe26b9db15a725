"""What an engine says of itself (DeepSpeed's, PyTorch's FSDP2), and which tensors are a rank's model states."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
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


def data_parallel_mesh(model: torch.nn.Module) -> Any:
    """The mesh whose ranks FSDP2 averages among: that of shards, with replicas of them the whole of it."""
    return _groups(model)[0].mesh_info.mesh


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
    own = torch.float64 if {p.dtype for p in parameters} == {torch.float64} else torch.float32
    computed = {policy.param_dtype or own for policy in policies}
    reduced = {policy.reduce_dtype or policy.param_dtype or own for policy in policies}
    return {
        "units": dict(Counter(map(_unit, groups))),
        "reshard_after_forward": all(group.post_forward_mesh_info for group in blocks),
        "sharded_parameters": sum(isinstance(p, DTensor) and p.placements[-1].is_shard() for p in parameters),
        "unsharded_parameters": sum(not isinstance(p, DTensor) for p in parameters),
        "mesh": list(*meshes) if len(meshes) == 1 else [],
        "compute_dtypes": dtype_names(computed),
        "reduce_dtypes": dtype_names(reduced),
        "offloads": bool(groups) and all(isinstance(group.offload_policy, CPUOffloadPolicy) for group in groups),
    }


# ---------------------------------------------------------------- model states


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of nested lists and dicts."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, dict):
        yield from (t for value in values.values() for t in _tensors(value))
    elif isinstance(values, (list, tuple)):
        yield from (t for value in values for t in _tensors(value))


def _address(tensor: torch.Tensor) -> int:
    """Where a tensor's storage is; of one without memory, where that is described."""
    storage = tensor.untyped_storage()
    return storage._cdata if isinstance(tensor, FakeTensor) else storage.data_ptr()


class Ledger:
    """Counts storages once, in the category that claims them first."""

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self.by_device: dict[str, int] = {}

    def claim(self, tensors: Iterable[torch.Tensor]) -> tuple[int, int]:
        """Return the bytes of new storages, and how many of them the tensors themselves cover."""
        held = 0
        covered: dict[tuple[int, Any], int] = {}
        new: set[int] = set()
        for tensor in (t.to_local() if hasattr(t, "to_local") else t for t in tensors):  # this rank's part of FSDP2's
            storage = tensor.untyped_storage()
            if tensor.device.type == "meta" or storage.nbytes() == 0:
                continue
            pointer = _address(tensor)
            if pointer not in self._seen:
                self._seen.add(pointer)
                new.add(pointer)
                held += storage.nbytes()
                kind = tensor.device.type
                self.by_device[kind] = self.by_device.get(kind, 0) + storage.nbytes()
            if pointer in new:
                size = tensor.numel() * tensor.element_size()
                covered[(pointer, tensor.storage_offset())] = max(
                    size, covered.get((pointer, tensor.storage_offset()), 0)
                )
        return held, min(held, sum(covered.values()))


def engine_tensors(model: Any, optimizer: Any) -> dict[str, list[torch.Tensor]]:
    """Collect the tensors of each model state from wherever the engine keeps them.

    Takes the prepared model and the innermost ZeRO or torch optimizer. DeepSpeed's flat buffers are read by the names
    of release 0.19 (deepspeed/runtime/zero/stage_1_and_2.py, stage3.py, for bf16 stage 1 bf16_optimizer.py, and for 16
    bits at stage 0 fp16/unfused_optimizer.py or, with a fused Adam, fused_optimizer.py).
    """
    parameters = list(model.parameters())
    base = getattr(optimizer, "optimizer", optimizer)  # the torch optimizer inside a ZeRO optimizer
    base = getattr(base, "optim", base)  # or inside PyTorch's ZeroRedundancyOptimizer
    masters = [
        *_tensors(getattr(optimizer, "single_partition_of_fp32_groups", [])),
        *_tensors(getattr(optimizer, "fp32_partitioned_groups_flat", [])),
        *_tensors(getattr(optimizer, "fp32_groups_flat_partition", [])),
        *_tensors(getattr(optimizer, "fp32_groups", [])),
        *_tensors(getattr(optimizer, "fp32_groups_flat", [])),
    ]
    states = list(_tensors([dict(state) for state in base.state.values()]))
    working = [
        *(p.data for p in parameters),
        *(p.ds_tensor for p in parameters if hasattr(p, "ds_tensor")),
        *(t for p in parameters if (t := getattr(p, "ds_secondary_tensor", None)) is not None),
        *_tensors(getattr(optimizer, "bit16_groups_flat", [])),
        *_tensors(getattr(optimizer, "bf16_groups_flat", [])),
        *_tensors(getattr(optimizer, "lp_param_buffer", None)),
    ]
    gradients = [
        *_tensors(getattr(optimizer, "averaged_gradients", {})),
        *_tensors(getattr(optimizer, "all_grad_tensors", {})),
        *_tensors(getattr(optimizer, "grad_partitions_flat_buffer", None)),
        *_tensors(getattr(optimizer, "accumulated_grads_in_cpu", {})),
        *_tensors(getattr(optimizer, "fp32_groups_gradients_flat", [])),
        *(t.grad for t in [*parameters, *masters] if t.grad is not None),
    ]
    buckets = [bucket.buffer for bucket in getattr(optimizer, "ipg_buckets", {}).values()]
    return {
        "parameters": working,
        "gradients": gradients,
        "optimizer_states": [*masters, *states],
        "communication_buffers": list(_tensors(buckets)),
    }


def count_states(model: Any, optimizer: Any, bucket_bytes: int | None = None) -> dict[str, Any]:
    """Count the bytes of model states in this rank's memory, by their names in `ModelStateBytes`.

    `bucket_bytes`: of DDP's buckets; None: not DDP, or its buckets are not asked for.
    """
    ledger = Ledger()
    tensors = engine_tensors(model, optimizer)
    counts = {name: ledger.claim(tensors[name])[0] for name in ("parameters", "optimizer_states")}
    # Stages 1 and 2 keep their gradients as views of whole buffers; what these hold beyond is no gradient of theirs.
    held, counts["gradients"] = ledger.claim(tensors["gradients"])
    counts["communication_buffers"] = held - counts["gradients"] + ledger.claim(tensors["communication_buffers"])[0]
    if bucket_bytes is not None:
        gradients = tensors["gradients"]
        # Gradients that share storages are views of the buckets, which are then among them.
        if len({_address(g) for g in gradients}) < len(gradients):
            bucket_bytes -= held
        counts["communication_buffers"] += bucket_bytes
        kind = tensors["parameters"][0].device.type
        ledger.by_device[kind] = ledger.by_device.get(kind, 0) + bucket_bytes
    return {**counts, "by_device": ledger.by_device}
