"""Build the Accelerator of a run, from the strategy's file and from what must agree between strategies."""

from __future__ import annotations

import copy
import datetime
import os
from typing import TYPE_CHECKING, Any

from study.config import RunConfig
from study.engines import extensions
from study.engines.readback.dtypes import computed_in
from study.engines.workarounds import shard_on_cpu
from study.formatting import GIB
from study.models import SIZES, suited_buckets, swap_buffer_size
from study.run import Run
from study.running import memory_limits

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator, ParallelismConfig
    from accelerate.utils import FullyShardedDataParallelPlugin


def build_accelerator(run: Run) -> Accelerator:
    """Make the Accelerator: the strategy from its file, everything that must agree between strategies from the run.

    Collective: every rank calls it.
    """
    import torch
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin, TorchDynamoPlugin

    class Replicas(Accelerator):  # type: ignore[misc]
        """Accelerate's own leaves out DDP, and its no_sync, where a GPU's process is the only one."""

        @property
        def use_distributed(self) -> bool:
            return True

    from study.training import fixed_order

    config, strategy = run.config, run.strategy
    fixed_order.before_engine(config)
    on_cpu = not torch.cuda.is_available()
    is_fsdp = strategy.distributed_type == "FSDP"
    is_deepspeed = strategy.distributed_type == "DEEPSPEED"
    if on_cpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed would find it too, and warn each time
    if is_deepspeed:
        extensions.use_built()
    _wait_at_most(config.collective_timeout)
    if config.share_device and strategy.distributed_type != "NO":
        _share_device()
    fsdp_plugin = make_fsdp_plugin(run) if is_fsdp else None
    mesh = make_mesh(run)
    multiplies_in_tf32 = torch.backends.cuda.matmul.allow_tf32
    accelerator = (Replicas if strategy.distributed_type == "MULTI_GPU" else Accelerator)(
        # Without a GPU, DDP needs to be told so; DeepSpeed must not be, or accelerate drops it.
        cpu=on_cpu and not is_deepspeed,
        mixed_precision=_mixed_precision(run),
        dataloader_config=DataLoaderConfiguration(non_blocking=True),  # from pinned memory, while the GPU computes
        # FSDP reduces in every micro step, too: kept whole, gradients would undo what sharding saves.
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=run.gradient_accumulation_steps, sync_each_batch=is_fsdp
        ),
        deepspeed_plugin=_deepspeed_plugin(run) if is_deepspeed else None,
        fsdp_plugin=fsdp_plugin,
        parallelism_config=None if on_cpu else mesh,
        dynamo_plugin=TorchDynamoPlugin(backend="inductor" if config.compile else "no"),
        kwargs_handlers=_handlers(run, on_cpu),
        log_with=None if config.log_with == "none" else config.log_with,
        project_dir=run.folder,
    )
    _wait_at_most(config.collective_timeout)
    if on_cpu and fsdp_plugin is not None:
        shard_on_cpu(accelerator, fsdp_plugin, mesh)
    if config.memory_cap is not None and not on_cpu:
        total = torch.cuda.get_device_properties(accelerator.device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, config.memory_cap * GIB / total), accelerator.device)
        memory_limits.described["memory_cap"] = "torch's allocator"
    torch.backends.cuda.matmul.allow_tf32 = multiplies_in_tf32  # accelerate allows it, where a model is compiled
    return accelerator


def _handlers(run: Run, on_cpu: bool) -> list[Any] | None:
    """What accelerate is to do otherwise: over which backend ranks talk, and how DDP keeps its gradients."""
    from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs

    strategy = run.strategy
    if strategy.distributed_type == "NO":
        return None
    handlers: list[Any] = [InitProcessGroupKwargs(backend="gloo")] if uses_gloo(run.config, on_cpu) else []
    if strategy.distributed_type == "MULTI_GPU":
        handlers.append(DistributedDataParallelKwargs(**strategy.ddp_json or {}))
    return handlers


def _mixed_precision(run: Run) -> str:
    """What accelerate is to know of the precision: nothing where the engine, or FSDP2's policy, has it from us."""
    precision, kind = run.config.precision, run.strategy.distributed_type
    if precision in ("fp32", "fp64") or kind == "FSDP" or (kind == "DEEPSPEED" and precision.endswith("-autocast")):
        return "no"
    return precision.removesuffix("-autocast")


def _wait_at_most(seconds: int) -> None:
    """Set the time that a collective may take, in the groups that are there and in those that engines make.

    Engines name none for their groups, which then have torch's default; DeepSpeed names 30 minutes for the first one.
    """
    import torch
    from torch.distributed import distributed_c10d

    limit = datetime.timedelta(seconds=seconds)
    vars(distributed_c10d).update(default_pg_timeout=limit, default_pg_nccl_timeout=limit)
    if torch.distributed.is_initialized():
        distributed_c10d._set_pg_timeout(limit)


def uses_gloo(config: RunConfig, on_cpu: bool) -> bool:
    """Say which runs communicate through the host: NCCL is for GPUs, and refuses two ranks on one."""
    return on_cpu or config.share_device


def _share_device() -> None:
    """Put this rank on the first GPU, in a group of gloo's, before anything else chooses a GPU or a backend.

    By the sources (torch 2.13, accelerate 1.15, deepspeed 0.19.8), for no GPU has run it yet: DDP and DeepSpeed's
    engine take the GPU from LOCAL_RANK. DeepSpeed would bind its group to a GPU, which gloo cannot; a group that is
    there it takes as it is. gloo moves CUDA tensors through the host in what DDP and the stages call: broadcast,
    reduce, all-reduce, all-gather. Its reduce-scatter, stage 3's, is the all-reduce of a copy on the GPU: up to a
    reduce bucket more at the peak than under NCCL, whose own buffers there are none of. Only what gathers several
    tensors in one call would fail, and no strategy here does.
    """
    import torch

    os.environ["LOCAL_RANK"] = "0"
    if torch.cuda.is_available():
        torch.cuda.set_device(0)
    torch.distributed.init_process_group("gloo")


def _deepspeed_plugin(run: Run) -> Any:
    """Make accelerate's DeepSpeed plugin and set what the run says: after it, no value is left to a default unseen.

    It has the strategy as it was read, which the record keeps. By itself it would take the launcher's variables, and
    read the JSON once more: files that may have been edited meanwhile.
    """
    from accelerate.utils import DeepSpeedPlugin

    from study.training import fixed_order

    config, strategy = run.config, run.strategy
    section = strategy.content["deepspeed_config"]
    plugin = DeepSpeedPlugin(
        hf_ds_config=copy.deepcopy(strategy.deepspeed_json) or "none",
        zero_stage=strategy.zero_stage,
        offload_optimizer_device=strategy.offload_optimizer_device,
        offload_param_device=strategy.offload_param_device,
        zero3_init_flag=strategy.zero3_init,
        zero3_save_16bit_model=section.get("zero3_save_16bit_model", False),
        gradient_accumulation_steps=run.gradient_accumulation_steps,
        gradient_clipping=config.gradient_clipping,
    )
    engine = plugin.deepspeed_config
    hidden = SIZES[config.workload][config.size]["hidden"]
    zero = engine["zero_optimization"]
    # An absent, "auto" or zero clipping in accelerate's own fields means 1.0 to the engine; a number put here does not.
    engine["gradient_clipping"] = config.gradient_clipping
    engine["gradient_accumulation_steps"] = run.gradient_accumulation_steps
    engine["train_micro_batch_size_per_gpu"] = run.micro_batch_size
    engine["train_batch_size"] = config.global_batch_size
    if config.precision in ("bf16", "fp16"):
        engine[config.precision] = {"enabled": True}
        engine["data_types"] = {"grad_accum_dtype": config.accumulation_dtype}
    elif config.precision.endswith("-autocast"):
        dtype = computed_in(config.precision)
        engine["torch_autocast"] = {"enabled": True, "dtype": dtype}
    if "linear" in fixed_order.pins(config):
        zero["memory_efficient_linear"] = False
    if "optimizer" in fixed_order.pins(config):
        engine.update(zero_force_ds_cpu_optimizer=False, zero_allow_untested_optimizer=True)
    for key, value in suited_buckets(hidden).items():  # now, because zero.Init reads the config before `prepare`
        if zero.get(key) == "auto":
            zero[key] = value
    if zero.get("offload_param", {}).get("buffer_size") == "auto":
        zero["offload_param"]["buffer_size"] = swap_buffer_size(hidden, run.world_size)
    for key in ("offload_optimizer", "offload_param"):
        if zero.get(key, {}).get("device") == "nvme":
            zero[key]["nvme_path"] = str(run.swap_folder)
    return plugin


# ---------------------------------------------------------------- FSDP2


def make_fsdp_plugin(run: Run) -> FullyShardedDataParallelPlugin:
    """Make accelerate's FSDP plugin from the strategy's file: what is left out would be read from the environment.

    The unit is named, because accelerate takes transformers' `_no_split_modules` otherwise: BERT's name its embeddings
    too (5.23), whose table accelerate then shards twice, which ends in a TypeError. In 16 bits parameters and their
    shards stay fp32, what is gathered and computed is bf16, and gradients are reduced in fp32: accelerate's own policy
    would reduce them in bf16, and return the model's output in it.
    """
    import torch
    from accelerate.utils import FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from study.workloads import WORKLOADS

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


def reshard(model: torch.nn.Module) -> None:
    """Reshard what FSDP2 keeps gathered after a forward pass without a backward: the root's parameters."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
