"""How does PyTorch shard a run's model (FSDP2), on GPUs as on a CPU, and what did it build?"""

from __future__ import annotations

import os
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from study.records.schema import Sharding
from study.run import Run
from study.workloads import WORKLOADS

if TYPE_CHECKING:
    from accelerate import Accelerator, ParallelismConfig
    from accelerate.utils import FullyShardedDataParallelPlugin


def make_plugin(run: Run) -> FullyShardedDataParallelPlugin:
    """Make accelerate's FSDP plugin from the strategy's file: what is left out would be read from the environment.

    The unit is named, because accelerate takes transformers' `_no_split_modules` otherwise: BERT's name its embeddings
    too (5.23), whose table accelerate then shards twice, which ends in a TypeError. In 16 bits parameters and their
    shards stay fp32, what is gathered and computed is bf16, and gradients are reduced in fp32: accelerate's own policy
    would reduce them in bf16, and return the model's output in it.
    """
    from accelerate.utils import FullyShardedDataParallelPlugin

    policy = MixedPrecisionPolicy()
    if run.config.precision == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=run.strategy.reshard_after_forward,
        cpu_offload=run.strategy.offload_param_device == "cpu",
        state_dict_type="SHARDED_STATE_DICT",
        activation_checkpointing=False,  # accelerate's draws other dropout masks; the run has its own
        activation_checkpointing_offload=False,
        cpu_ram_efficient_loading=False,
        ignored_modules=[],
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[WORKLOADS[run.config.workload].block_class(run.config)],
        mixed_precision_policy=policy,
    )


def make_mesh(run: Run) -> ParallelismConfig | None:
    """Make accelerate's mesh of replicas and shards, where the strategy's file has one.

    What the launcher says of it is taken back: beside replicas and shards it may name ranks that get equal batches.
    """
    from accelerate import ParallelismConfig

    os.environ.pop("ACCELERATE_USE_PARALLELISM_CONFIG", None)
    if run.strategy.mesh is None:
        return None
    replicas, shards = run.strategy.mesh
    return ParallelismConfig(dp_replicate_size=replicas, dp_shard_size=shards, tp_size=1, cp_size=1, sp_size=1)


def shard_on_cpu(
    accelerator: Accelerator, plugin: FullyShardedDataParallelPlugin, mesh: ParallelismConfig | None
) -> None:
    """Make an Accelerator of a CPU's one that shards: only as it initialises does accelerate 1.15 drop FSDP there."""
    from accelerate import DistributedType, PartialState

    # Each new AcceleratorState, as every prepared optimizer makes one, takes over what PartialState says.
    PartialState().distributed_type = accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    if mesh is not None:
        accelerator.state.parallelism_config = mesh
        accelerator.state.device_mesh = mesh.get_device_mesh("cpu")


def _groups(model: torch.nn.Module) -> list[Any]:
    """The groups of parameters that are gathered together, the root's first (torch 2.13)."""
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    groups = [group for module in modules for group in module._get_fsdp_state()._fsdp_param_groups]
    return list({id(group): group for group in groups}.values())  # one may be of several modules


def _unit(group: Any) -> str:
    """The classes of a group's modules; `fully_shard` has put one of its own in front of each."""
    return "+".join(type(module).__bases__[1].__name__ for module in group.modules)


def read_sharding(model: torch.nn.Module, block: str) -> Sharding:
    """Read what was sharded from the modules themselves; `block` is the blocks' class. Rank-local: no collective."""
    groups = _groups(model)
    policies = {group.mp_policy for group in groups}
    parameters = list(model.parameters())
    meshes = {tuple(p.device_mesh.shape) for p in parameters if isinstance(p, DTensor)}
    return Sharding(
        units=dict(Counter(map(_unit, groups))),
        reshard_after_forward=all(group.post_forward_mesh_info for group in groups if _unit(group) == block),
        sharded_parameters=sum(isinstance(p, DTensor) and p.placements[-1].is_shard() for p in parameters),
        unsharded_parameters=sum(not isinstance(p, DTensor) for p in parameters),
        mesh=list(*meshes) if len(meshes) == 1 else [],
        compute_dtypes=dtype_names({policy.param_dtype or torch.float32 for policy in policies}),
        reduce_dtypes=dtype_names({policy.reduce_dtype or policy.param_dtype or torch.float32 for policy in policies}),
        offloads=bool(groups) and all(isinstance(group.offload_policy, CPUOffloadPolicy) for group in groups),
    )


def dtype_names(dtypes: set[torch.dtype]) -> list[str]:
    """Types as a proof writes them: bfloat16, float32."""
    return sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)


def reshard(model: torch.nn.Module) -> None:
    """Let go of what a forward pass without a backward leaves whole: the root's parameters; nothing elsewhere."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
