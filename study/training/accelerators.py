"""Build the Accelerator of a run from the strategy's file and from the settings that all strategies share."""

from __future__ import annotations

import copy
import datetime
import os
from typing import TYPE_CHECKING, Any

from study.config import RunConfig
from study.run import Run
from study.running import memory_limits
from zero_study.engines import extensions
from zero_study.engines.readback.dtypes import computed_in
from zero_study.engines.workarounds import shard_on_cpu
from zero_study.models import SIZES, suited_buckets, swap_buffer_size
from zero_study.terminal import GIB

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator, ParallelismConfig
    from accelerate.utils import FullyShardedDataParallelPlugin


def build_accelerator(run: Run) -> Accelerator:
    """Return the Accelerator of a run.

    The strategy's settings come from its file. The settings that must be the same under all strategies come from the
    run. Collective: every rank must call this.
    """
    import torch
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin, TorchDynamoPlugin

    class Replicas(Accelerator):  # type: ignore[misc]
        """An Accelerator that uses DDP (with its no_sync) even for a single process on a GPU.

        Accelerate's own class does not.
        """

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
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed would find it itself, but with a warning
    if is_deepspeed:
        extensions.use_built()
    _wait_at_most(config.collective_timeout)
    if config.share_device and strategy.distributed_type != "NO":
        _share_device()
    fsdp_plugin = make_fsdp_plugin(run) if is_fsdp else None
    mesh = make_mesh(run)
    multiplies_in_tf32 = torch.backends.cuda.matmul.allow_tf32
    accelerator = (Replicas if strategy.distributed_type == "MULTI_GPU" else Accelerator)(
        # On a CPU, DDP needs this flag. With DeepSpeed it must not be set, because accelerate would then not use
        # DeepSpeed.
        cpu=on_cpu and not is_deepspeed,
        mixed_precision=_mixed_precision(run),
        # copies from pinned memory while the GPU computes
        dataloader_config=DataLoaderConfiguration(non_blocking=True),
        # Under FSDP, gradients are reduced in every micro step. Otherwise they would be kept unsharded, and would use
        # up the memory that sharding saves.
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
    torch.backends.cuda.matmul.allow_tf32 = multiplies_in_tf32  # accelerate sets it to True for a compiled model
    return accelerator


def _handlers(run: Run, on_cpu: bool) -> list[Any] | None:
    """Return accelerate's handlers for the communication backend and the options of DDP.

    None without a process group.
    """
    from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs

    strategy = run.strategy
    if strategy.distributed_type == "NO":
        return None
    handlers: list[Any] = [InitProcessGroupKwargs(backend="gloo")] if uses_gloo(run.config, on_cpu) else []
    if strategy.distributed_type == "MULTI_GPU":
        handlers.append(DistributedDataParallelKwargs(**strategy.ddp_json or {}))
    return handlers


def _mixed_precision(run: Run) -> str:
    """Return the precision that accelerate applies.

    It is "no" for fp32 and fp64. It is also "no" if DeepSpeed's configuration or FSDP2's policy sets the precision.
    """
    precision, kind = run.config.precision, run.strategy.distributed_type
    if precision in ("fp32", "fp64") or kind == "FSDP" or (kind == "DEEPSPEED" and precision.endswith("-autocast")):
        return "no"
    return precision.removesuffix("-autocast")


def _wait_at_most(seconds: int) -> None:
    """Set the time limit of collectives in seconds, for the existing process groups and for those created later.

    Engines create most groups without a limit, so that torch's default applies. DeepSpeed sets 30 minutes for its first
    group.
    """
    import torch
    from torch.distributed import distributed_c10d

    limit = datetime.timedelta(seconds=seconds)
    vars(distributed_c10d).update(default_pg_timeout=limit, default_pg_nccl_timeout=limit)
    if torch.distributed.is_initialized():
        distributed_c10d._set_pg_timeout(limit)


def uses_gloo(config: RunConfig, on_cpu: bool) -> bool:
    """Return whether a run communicates with gloo instead of NCCL.

    NCCL needs GPUs, and refuses two ranks on one GPU.
    """
    return on_cpu or config.share_device


def _share_device() -> None:
    """Put this rank on the first GPU and create a gloo process group, before other code chooses a GPU or a backend.

    This follows from the sources of torch 2.13, accelerate 1.15 and deepspeed 0.19.8. It has not been run on a GPU yet.

    * DDP and DeepSpeed's engine take the GPU from LOCAL_RANK.
    * DeepSpeed would bind its own group to a GPU, which gloo does not support. It uses an existing group unchanged.
    * gloo copies CUDA tensors through the host in the operations that DDP and the ZeRO stages call: broadcast, reduce,
      all-reduce and all-gather.
    * gloo's reduce-scatter, which stage 3 uses, is an all-reduce of a copy on the GPU. Compared with NCCL, this adds up
      to one reduce bucket to the peak. In return, NCCL's own buffers do not exist.
    * An operation that gathers several tensors in one call would fail. No strategy of the study uses one.
    """
    import torch

    os.environ["LOCAL_RANK"] = "0"
    if torch.cuda.is_available():
        torch.cuda.set_device(0)
    torch.distributed.init_process_group("gloo")


def _deepspeed_plugin(run: Run) -> Any:
    """Return accelerate's DeepSpeed plugin with every value that the run sets.

    The plugin gets the strategy as it was read, which is also what the record contains. By default the plugin would use
    the launcher's environment variables and read the JSON file again, although it may have been edited since.
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
    # If accelerate's own field for clipping is missing, "auto" or zero, the engine clips at 1.0. A number that is set
    # here is used as it is.
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
    if config.compile:
        # On a GPU, the engine's throughput timer calls torch.cuda.synchronize(None) in the compiled forward pass from
        # the third step on. TorchDynamo of torch 2.13 cannot capture that call and ends the run with a TypeError.
        engine.setdefault("timers", {})["throughput"] = {"enabled": False}
    if "linear" in fixed_order.pins(config):
        zero["memory_efficient_linear"] = False
    if "optimizer" in fixed_order.pins(config):
        engine.update(zero_force_ds_cpu_optimizer=False, zero_allow_untested_optimizer=True)
    for key, value in suited_buckets(hidden).items():  # set here, because zero.Init reads them before `prepare`
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
    """Return accelerate's FSDP plugin for the strategy's file.

    All fields are set, so that none is read from the environment.

    The class of the sharded unit is named explicitly. Otherwise accelerate uses transformers' `_no_split_modules`,
    which for BERT includes the embeddings (transformers 5.23). Accelerate then shards the embedding table twice, which
    ends in a TypeError.

    In bf16, parameters and their shards stay fp32, parameters are gathered and used as bf16, and gradients are reduced
    in fp32. Accelerate's own policy would reduce the gradients in bf16 and return the model's output as bf16.
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
        # accelerate's would draw other dropout masks; the run uses transformers' instead
        activation_checkpointing=False,
        activation_checkpointing_offload=False,
        cpu_ram_efficient_loading=False,
        ignored_modules=[],
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[WORKLOADS[run.config.workload].block_class(run.config)],
        mixed_precision_policy=policy,
    )


def make_mesh(run: Run) -> ParallelismConfig | None:
    """Return accelerate's mesh of replicas and shards. None if the strategy's file has none.

    The launcher's environment variable for the mesh is removed, because it may also enable dimensions other than
    replicas and shards, whose ranks get equal batches.
    """
    from accelerate import ParallelismConfig

    os.environ.pop("ACCELERATE_USE_PARALLELISM_CONFIG", None)
    if run.strategy.mesh is None:
        return None
    replicas, shards = run.strategy.mesh
    return ParallelismConfig(dp_replicate_size=replicas, dp_shard_size=shards, tp_size=1, cp_size=1, sp_size=1)


def reshard(model: torch.nn.Module) -> None:
    """Free the full parameters that FSDP2 still holds after a forward pass without a backward pass.

    These are the parameters of the root module.
    """
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
