"""FSDP2 through accelerate on a CPU, where accelerate 1.15 would drop it."""

from __future__ import annotations

from typing import Any


def shard_on_cpu(accelerator: Any, plugin: Any, mesh: Any) -> None:
    """Make an Accelerator of a CPU's one that shards: only as it initialises does accelerate 1.15 drop FSDP there.

    `mesh`: accelerate's ParallelismConfig of replicas and shards; None: all ranks are one group of shards.
    """
    from accelerate import DistributedType, PartialState

    # Each new AcceleratorState, as every prepared optimizer makes one, takes over what PartialState says.
    PartialState().distributed_type = accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    if mesh is not None:
        accelerator.state.parallelism_config = mesh
        accelerator.state.device_mesh = mesh.get_device_mesh("cpu")
