"""How does PyTorch shard a run's model (FSDP2), on GPUs as on a CPU, and what did it build?"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from study.engines.engine_facts import facts_of_sharding
from study.records.schema import Sharding
from study.run import Run
from study.workloads import WORKLOADS

if TYPE_CHECKING:
    from accelerate import ParallelismConfig
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


def read_sharding(model: torch.nn.Module, block: str) -> Sharding:
    """Read what was sharded from the modules themselves; `block` is the blocks' class. Rank-local: no collective."""
    return Sharding(**facts_of_sharding(model, block))


def reshard(model: torch.nn.Module) -> None:
    """Let go of what a forward pass without a backward leaves whole: the root's parameters; nothing elsewhere."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
