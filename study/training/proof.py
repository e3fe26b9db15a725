"""Is this run really what was asked for? The engine's own view after `prepare`, held against the request.

Runs that silently were something else are the commonest fault of published comparisons.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator

from study.engines.engine_facts import backend, dtype_names, engine_tensors, facts_of_deepspeed
from study.engines.keys import engine_settings
from study.errors import Failed, Refusal
from study.models import SIZES
from study.records.schema import Proof, Sharding
from study.run import Run
from study.training import fixed_order
from study.training.accelerators import uses_gloo
from study.training.fsdp import read_sharding
from study.workloads import WORKLOADS


def innermost(optimizer: Any) -> Any:
    """The optimizer under accelerate's wrapper: a ZeRO optimizer, or torch's own."""
    return optimizer.optimizer


def base_optimizer(optimizer: Any) -> Any:
    """The optimizer that does the arithmetic, under accelerate's and DeepSpeed's wrappers."""
    inner = innermost(optimizer)
    return getattr(inner, "optimizer", inner)


def read_back(accelerator: Accelerator, model: Any, optimizer: Any, run: Run) -> Proof:
    """Read what `prepare` built from the engine itself. Rank-local: no collective."""
    engine = getattr(model, "_orig_mod", model)  # torch.compile wraps DDP once more
    facts: dict[str, Any] = {
        "world_size": dist.get_world_size() if dist.is_initialized() else 1,
        "distributed_type": accelerator.distributed_type.value,
        "backend": backend(accelerator.device),
        "device": accelerator.device.type,
        "engine_class": type(engine).__name__,
        "optimizer_class": type(base_optimizer(optimizer)).__name__,
        "gradient_clipping": run.config.gradient_clipping,
        "gradient_accumulation_steps": accelerator.gradient_accumulation_steps,
        "micro_batch_size": run.config.batches(accelerator.num_processes)[0],
        "parameter_dtypes": dtype_names({p.dtype for p in model.parameters()}),
        "gradient_as_bucket_view": getattr(engine, "gradient_as_bucket_view", None),  # of DDP
        "settings": {},
    }
    if accelerator.distributed_type.value == "FSDP":
        return Proof(**facts | _facts_of_fsdp(model, WORKLOADS[run.config.workload].block_class(run.config)))
    if accelerator.distributed_type.value != "DEEPSPEED":
        autocast = accelerator.mixed_precision
        is_fp64 = facts["parameter_dtypes"] == ["float64"]
        facts["autocast_dtype"] = {"no": None, "bf16": "bfloat16", "fp16": "float16"}[autocast]
        facts["precision"] = f"{autocast}-autocast" if autocast != "no" else "fp64" if is_fp64 else "fp32"
        return Proof(**facts)
    facts |= facts_of_deepspeed(model)
    facts["settings"] = engine_settings.read(model, innermost(optimizer))
    if facts["zero_stage"]:
        facts |= _facts_of_zero(model, innermost(optimizer), facts["zero_stage"])
    if run.strategy.offloads_to_nvme:
        facts["swap_folder"] = _shown(_swap_folder_in_use(innermost(optimizer), list(model.parameters())))
    return Proof(**facts)


def _facts_of_fsdp(model: Any, block: str) -> dict[str, Any]:
    """What FSDP2's modules say of themselves."""
    sharding = read_sharding(model, block)
    device = "cpu" if sharding.offloads else "none"
    precisions = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16"}
    return {
        "sharding": sharding,
        "offload_optimizer_device": device,
        "offload_param_device": device,
        "precision": "+".join(precisions.get(dtype, dtype) for dtype in sharding.compute_dtypes),
    }


def _facts_of_zero(engine: Any, optimizer: Any, stage: int) -> dict[str, Any]:
    """What the ZeRO optimizer of stages 1 to 3 says of itself: types, buckets, and how much it partitioned."""
    masters = engine_tensors(engine, optimizer)["optimizer_states"]
    facts: dict[str, Any] = {
        "zero_optimizer_class": type(optimizer).__name__,
        "reduce_bucket_size": getattr(optimizer, "reduce_bucket_size", None),  # BF16_Optimizer has none
        "allgather_bucket_size": engine._config.zero_config.allgather_bucket_size,
        "master_dtypes": dtype_names({m.dtype for m in masters}) or None,
    }
    if stage != 3:
        return facts | {"use_multi_rank_bucket_allreduce": getattr(optimizer, "use_multi_rank_bucket_allreduce", None)}
    offload = optimizer.parameter_offload
    return facts | {
        "prefetch_bucket_size": offload._prefetch_bucket_sz,
        "param_persistence_threshold": offload.param_numel_persistence_threshold,
        "max_live_parameters": offload._max_available_parameters_in_numel,
        "max_reuse_distance": offload._max_reuse_distance_in_numel,
        "sub_group_size": int(optimizer.sub_group_size),
        "secondary_partition_size": engine_settings.value(engine_settings.HPZ, engine, optimizer),
        "partitioned_parameters": sum(hasattr(p, "ds_tensor") and not p.ds_persist for p in engine.parameters()),
    }


def _shown(folder: Path | None) -> str | None:
    """A folder as it stands in a record: below the current directory without the part that is this machine's."""
    if folder is None:
        return None
    return str(folder.relative_to(Path.cwd())) if folder.is_relative_to(Path.cwd()) else str(folder)


def _swap_folder_in_use(optimizer: Any, parameters: list[Any]) -> Path | None:
    """The folder that the engine's swappers were given; None where no swapper was built."""
    swapper = getattr(optimizer, "optimizer_swapper", None)
    if swapper is not None:
        return Path(swapper.swap_config.nvme_path)
    for parameter in parameters:
        if getattr(parameter, "nvme_swapper", None) is not None:
            return Path(parameter.nvme_swapper.swap_config.nvme_path)
    return None


def verify(proof: Proof, run: Run) -> None:
    """Raise Refusal naming the first thing that is not as asked, and what to change."""
    asked = [*_asked_of_the_run(run), *_asked_of_the_engine(proof, run), *_asked_of_fsdp(run)]
    for name, wanted, remedy in asked:
        actual = getattr(proof.sharding if name in Sharding.model_fields else proof, name)
        if actual != wanted:
            raise Refusal(f"{name}: the run asks for {wanted}, the engine has {actual}; {remedy}")
    for key, wanted in engine_settings.requested(run.strategy.deepspeed_json or {}):
        actual = (proof.settings or {}).get(key)
        if actual != wanted:
            raise Refusal(
                f"{key}: the run asks for {wanted}, the engine has {actual}; change the JSON of {run.strategy.path}"
            )
    if proof.sharding is not None:
        _verify_units(proof.sharding, run)
    if proof.zero_stage and proof.master_dtypes not in (None, ["float32"]):
        raise Refusal(
            f"master_dtypes: the run asks for ['float32'], the engine has {proof.master_dtypes}; change --precision"
        )
    if run.world_size > 1 and proof.zero_stage == 3 and not proof.partitioned_parameters:
        raise Refusal(
            "partitioned_parameters: stage 3 shards none of this model's parameters, each is below the engine's "
            f"persistence threshold of {proof.param_persistence_threshold} elements; change --size, or take zero3_tuned"
        )


def _verify_units(sharding: Sharding, run: Run) -> None:
    """Raise Refusal unless every block is a unit of its own."""
    config = run.config
    block, layers = WORKLOADS[config.workload].block_class(config), SIZES[config.workload][config.size]["layers"]
    if sharding.units.get(block) != layers:
        raise Refusal(
            f"units: the run asks for {layers} of {block}, the engine has {sharding.units}; change "
            f"fsdp_auto_wrap_policy in {run.strategy.path}, and pass no --fsdp_* to the launcher"
        )


# A field of the proof, what it must be, and what to do where it is not.
Demand = tuple[str, Any, str]


def _asked_of_the_run(run: Run) -> list[Demand]:
    """What configuration, strategy and world size ask for, whichever engine runs."""
    config, strategy, path = run.config, run.strategy, run.strategy.path
    on_gpu = torch.cuda.is_available()
    # Accelerate names DDP by where it runs.
    types = {"MULTI_GPU": "MULTI_GPU" if on_gpu else "MULTI_CPU"}
    # FSDP2's parameters are the masters themselves, and lowered as they are gathered.
    lowered = {} if strategy.distributed_type == "FSDP" else {"bf16": "bfloat16", "fp16": "float16"}
    parameter_dtype = "float64" if config.precision == "fp64" else lowered.get(config.precision, "float32")
    return [
        ("world_size", run.world_size, f"change num_processes in {path}, or --num_processes"),
        (
            "distributed_type",
            types.get(strategy.distributed_type, strategy.distributed_type),
            f"change distributed_type in {path}",
        ),
        ("zero_stage", strategy.zero_stage, f"change zero_stage in {path}, and pass no --zero_stage to the launcher"),
        ("offload_optimizer_device", strategy.offload_optimizer_device, f"change offload_optimizer_device in {path}"),
        ("offload_param_device", strategy.offload_param_device, f"change offload_param_device in {path}"),
        ("gradient_clipping", config.gradient_clipping, f"change gradient_clipping in {path}, or --gradient-clipping"),
        (
            "gradient_accumulation_steps",
            run.gradient_accumulation_steps,
            f"change gradient_accumulation_steps in {path}, or --micro-batch-size",
        ),
        ("micro_batch_size", run.micro_batch_size, "change --micro-batch-size or --global-batch-size"),
        (
            "gradient_as_bucket_view",
            strategy.gradient_as_bucket_view,
            f"change gradient_as_bucket_view in {path.with_suffix('.json')}",
        ),
        ("precision", config.precision, f"change mixed_precision in {path}, or --precision"),
        ("device", "cuda" if on_gpu else "cpu", "change CUDA_VISIBLE_DEVICES"),
        ("swap_folder", _shown(run.swap_folder) if strategy.offloads_to_nvme else None, "change --swap-dir"),
        ("parameter_dtypes", [parameter_dtype], f"change --precision, or zero3_init_flag in {path}"),
    ]


def _asked_of_the_engine(proof: Proof, run: Run) -> list[Demand]:
    """What the strategy's kind implies for the engine."""
    strategy, precision = run.strategy, run.config.precision
    classes = {"MULTI_GPU": "DistributedDataParallel", "DEEPSPEED": "DeepSpeedEngine"}
    has_group = strategy.distributed_type != "NO"
    steps_on_host = "cpu_adam" in strategy.needed_extensions
    backend = "gloo" if uses_gloo(run.config, on_cpu=proof.device == "cpu") else "nccl"
    asked: list[Demand] = [
        (
            "backend",
            backend if has_group else None,
            "something else set up the process group; start the run without it",
        ),
        ("engine_class", classes.get(strategy.distributed_type, proof.engine_class), f"change {strategy.path}"),
        (
            "optimizer_class",
            "DeepSpeedCPUAdam" if steps_on_host and "optimizer" not in fixed_order.pins(run.config) else "AdamW",
            f"change offload_optimizer_device in {strategy.path}",
        ),
    ]
    if proof.zero_stage and precision in ("bf16", "fp16"):
        dtype = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[run.config.accumulation_dtype]
        asked.append(("accumulation_dtype", dtype, "change --accumulation-dtype"))
    return asked


def _asked_of_fsdp(run: Run) -> list[Demand]:
    """What an FSDP2 strategy's file and the run's precision imply for how the model is sharded; else nothing."""
    strategy = run.strategy
    if strategy.distributed_type != "FSDP":
        return []
    compute = {"bf16": "bfloat16", "fp64": "float64"}.get(run.config.precision, "float32")
    precision = "change --precision, and pass no --mixed_precision to the launcher"
    return [
        ("mesh", strategy.mesh or [run.world_size], f"change parallelism_config in {strategy.path}"),
        (
            "reshard_after_forward",
            strategy.reshard_after_forward,
            f"change fsdp_reshard_after_forward in {strategy.path}",
        ),
        ("unsharded_parameters", 0, f"change {strategy.path}"),
        ("offloads", strategy.offload_param_device == "cpu", f"change fsdp_offload_params in {strategy.path}"),
        ("compute_dtypes", [compute], precision),
        ("reduce_dtypes", ["float64" if run.config.precision == "fp64" else "float32"], precision),
    ]


def gpu_of(device: torch.device) -> str | None:
    """Name the GPU that a rank is on, whatever CUDA_VISIBLE_DEVICES calls it; None for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def verify_gpus(gpus: list[str | None], run: Run) -> int | None:
    """Return on how many GPUs the ranks were; `gpus` has each rank's by its UUID, or None on a CPU.

    Raises Refusal where ranks share a GPU that should not, or do not that should.
    """
    if None in gpus:
        return None
    num_gpus, asked = len(set(gpus)), run.num_machines if run.config.share_device else run.world_size
    if num_gpus != asked:
        raise Refusal(
            f"num_gpus: the run asks for {asked}, its {len(gpus)} ranks are on {num_gpus}; change --share-device"
        )
    return num_gpus


def verify_machines(machines: list[int], run: Run) -> list[int]:
    """Return how many ranks each machine has; `machines` has the machine of each rank, as torchrun told it.

    Raises Refusal where the ranks are spread otherwise than asked.
    """
    found = [machines.count(machine) for machine in range(max(machines) + 1)]
    if found != [run.num_local_ranks] * run.num_machines:
        raise Refusal(
            f"ranks_of_machines: the run asks for {run.num_local_ranks} on each of {run.num_machines}, they are "
            f"{found}; pass the same --num_machines everywhere"
        )
    return found


def verify_alike(what: str, digests: list[str | None], run: Run) -> None:
    """Raise Refusal where a rank has read other content than rank 0; `digests` has that of each rank's."""
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise Refusal(
                f"{what}: rank {run.machine_of(rank)} has another than rank 0 ({digest}, {digests[0]}); give every "
                "machine the same files, and leave them alone while a run begins"
            )


def read_optimizer_dtypes(proof: Proof, model: Any, optimizer: Any) -> Proof:
    """Add the types of gradients and moments, which exist only as the optimizer steps."""
    tensors = engine_tensors(model, innermost(optimizer))
    states = base_optimizer(optimizer).state.values()
    moments = {s[k].dtype for s in states for k in ("exp_avg", "exp_avg_sq") if isinstance(s.get(k), torch.Tensor)}
    gradients = {g.dtype for g in tensors["gradients"]}
    return proof.model_copy(
        update={"gradient_dtypes": dtype_names(gradients) or None, "moment_dtypes": dtype_names(moments) or None}
    )


def prove_compiled(proof: Proof, is_asked: bool) -> Proof:
    """Say how many graphs TorchDynamo has made so far, to be called after a step.

    Raises Failed where there are some and the run is not to be compiled, or none and it is. Rank-local.
    """
    dynamo = sys.modules.get("torch._dynamo.utils")  # which torch imports when something asks for it
    graphs = 0 if dynamo is None else int(dynamo.counters["stats"]["unique_graphs"])
    if is_asked != bool(graphs):
        wish = "is to be compiled, and nothing was" if is_asked else f"is not to be compiled, and {graphs} graphs were"
        raise Failed(f"compile: the run {wish}; something switches torch.compile {'off' if is_asked else 'on'}")
    return proof if proof.compiled_graphs == graphs else proof.model_copy(update={"compiled_graphs": graphs})
