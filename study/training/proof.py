"""Verify that a run is what was requested: read the engine's settings after `prepare`, and compare them.

Runs that silently differ from their description are the most common fault of published comparisons.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from study.records.schema import Proof, Sharding
from study.run import Run
from study.training import fixed_order
from study.training.accelerators import uses_gloo
from study.workloads import WORKLOADS
from zero_study.engines.keys import engine_settings
from zero_study.engines.readback import facts
from zero_study.engines.readback.demands import Demand, compare
from zero_study.engines.readback.dtypes import TORCH_NAMES, dtype_names
from zero_study.engines.readback.facts import base_optimizer, engine_optimizer
from zero_study.engines.readback.states import engine_tensors
from zero_study.errors import Failed, Refusal
from zero_study.models import SIZES


def read_back(accelerator: Accelerator, model: Any, optimizer: Any, run: Run) -> Proof:
    """Return the settings that the prepared engine itself reports. This is not collective."""
    engine = facts.uncompiled(model)  # torch.compile adds a wrapper around DDP's
    block_class = WORKLOADS[run.config.workload].block_class(run.config)
    built = facts.read_back(engine, optimizer, device=accelerator.device, block_class=block_class, is_strict=True)
    kind = built["engine"]
    proven = {
        # Under DeepSpeed, these three values are read from the engine below. Under the other engines, the study's
        # training loop and accelerate apply them directly.
        "gradient_clipping": run.config.gradient_clipping,
        "gradient_accumulation_steps": accelerator.gradient_accumulation_steps,
        "micro_batch_size": run.config.batches(accelerator.num_processes)[0],
        "settings": {},
        **{name: value for name, value in built.items() if name in Proof.model_fields and value is not None},
        "distributed_type": accelerator.distributed_type.value,
        # an attribute of DDP; None for other engines
        "gradient_as_bucket_view": getattr(engine, "gradient_as_bucket_view", None),
    }
    if kind == "DeepSpeed":
        proven |= _sizes_of_zero(engine)
        if run.strategy.offloads_to_nvme:
            proven["swap_folder"] = _shown(_swap_folder_in_use(engine.optimizer, list(engine.parameters())))
    elif kind == "FSDP2":
        device = "cpu" if built["offloads"] else "none"
        sharding = Sharding(**{name: built[name] for name in Sharding.model_fields})
        proven |= {"sharding": sharding, "offload_optimizer_device": device, "offload_param_device": device}
    else:
        autocast = accelerator.mixed_precision
        is_fp64 = built["parameter_dtypes"] == ["float64"]
        proven["autocast_dtype"] = TORCH_NAMES.get(autocast)
        proven["precision"] = f"{autocast}-autocast" if autocast != "no" else "fp64" if is_fp64 else "fp32"
    return Proof(**proven)


def _sizes_of_zero(engine: Any) -> dict[str, Any]:
    """Return the sizes of buckets and partitions, in elements, of the ZeRO optimizer. Empty for stage 0."""
    optimizer, stage = engine.optimizer, engine.zero_optimization_stage()
    if not stage:
        return {}
    sizes: dict[str, Any] = {
        "reduce_bucket_size": getattr(optimizer, "reduce_bucket_size", None),  # BF16_Optimizer has none
        "allgather_bucket_size": engine._config.zero_config.allgather_bucket_size,
    }
    if stage != 3:
        return sizes | {"use_multi_rank_bucket_allreduce": getattr(optimizer, "use_multi_rank_bucket_allreduce", None)}
    offload = optimizer.parameter_offload
    return sizes | {
        "prefetch_bucket_size": offload._prefetch_bucket_sz,
        "param_persistence_threshold": offload.param_numel_persistence_threshold,
        "max_live_parameters": offload._max_available_parameters_in_numel,
        "max_reuse_distance": offload._max_reuse_distance_in_numel,
        "sub_group_size": int(optimizer.sub_group_size),
        "secondary_partition_size": engine_settings.value(engine_settings.HPZ, engine, optimizer),
    }


def _shown(folder: Path | None) -> str | None:
    """Return the path of a folder for the record: relative to the current folder if it is inside it."""
    if folder is None:
        return None
    return str(folder.relative_to(Path.cwd())) if folder.is_relative_to(Path.cwd()) else str(folder)


def _swap_folder_in_use(optimizer: Any, parameters: list[Any]) -> Path | None:
    """Return the folder that the engine's swappers use. None if there is no swapper."""
    swapper = getattr(optimizer, "optimizer_swapper", None)
    if swapper is not None:
        return Path(swapper.swap_config.nvme_path)
    for parameter in parameters:
        if getattr(parameter, "nvme_swapper", None) is not None:
            return Path(parameter.nvme_swapper.swap_config.nvme_path)
    return None


# ---------------------------------------------------------------- the comparison with the request


def verify(proof: Proof, run: Run) -> None:
    """Raise Refusal if the engine has another setting than the run requests.

    The message names the first such setting and what to change.
    """
    demands = [*_demands_of_run(run), *_demands_of_strategy(proof, run), *_demands_of_fsdp(run), *_demands_of_json(run)]
    sharding = {} if proof.sharding is None else proof.sharding.model_dump()
    for judged in compare(demands, proof.model_dump() | sharding):
        # A setting that cannot be read satisfies only a request for None.
        if not (judged.outcome == "agreed" or (judged.outcome == "unread" and judged.demand.value is None)):
            demand = judged.demand
            raise Refusal(
                f"{demand.name}: the run requests {demand.value}, but the engine has {judged.actual}. To correct this,"
                f" {demand.remedy}"
            )
    if proof.sharding is not None:
        _verify_units(proof.sharding, run)
    if run.world_size > 1 and proof.zero_stage == 3 and not proof.partitioned_parameters:
        raise Refusal(
            f"partitioned_parameters: stage 3 shards none of this model's parameters, because each is "
            f"below the engine's persistence threshold of {proof.param_persistence_threshold} elements. "
            "Change --size, or use zero3_tuned"
        )


def _verify_units(sharding: Sharding, run: Run) -> None:
    """Raise Refusal unless every transformer block is a sharding unit of its own."""
    config = run.config
    block, layers = WORKLOADS[config.workload].block_class(config), SIZES[config.workload][config.size]["layers"]
    if sharding.units.get(block) != layers:
        raise Refusal(
            f"units: the run requests {layers} FSDP units of {block}, but the engine has {sharding.units}. Change "
            f"fsdp_auto_wrap_policy in {run.strategy.path}, and pass no --fsdp_* to the launcher"
        )


def _demand(name: str, value: Any, remedy: str) -> Demand:
    return Demand(name, value, "the run", remedy)


def _demands_of_run(run: Run) -> list[Demand]:
    """Return the demands of the configuration, the strategy and the world size. They are the same for every engine."""
    config, strategy, path = run.config, run.strategy, run.strategy.path
    on_gpu = torch.cuda.is_available()
    kind: str = strategy.distributed_type
    if kind == "MULTI_GPU" and not on_gpu:
        kind = "MULTI_CPU"  # accelerate's name for DDP on a CPU
    return [
        _demand("world_size", run.world_size, f"change num_processes in {path}, or --num_processes"),
        _demand("distributed_type", kind, f"change distributed_type in {path}"),
        _demand(
            "zero_stage",
            strategy.zero_stage,
            f"change zero_stage in {path}, and pass no --zero_stage to the launcher",
        ),
        _demand(
            "offload_optimizer_device",
            strategy.offload_optimizer_device,
            f"change offload_optimizer_device in {path}",
        ),
        _demand("offload_param_device", strategy.offload_param_device, f"change offload_param_device in {path}"),
        _demand(
            "gradient_clipping",
            config.gradient_clipping,
            f"change gradient_clipping in {path}, or --gradient-clipping",
        ),
        _demand(
            "gradient_accumulation_steps",
            run.gradient_accumulation_steps,
            f"change gradient_accumulation_steps in {path}, or --micro-batch-size",
        ),
        _demand("micro_batch_size", run.micro_batch_size, "change --micro-batch-size or --global-batch-size"),
        _demand(
            "gradient_as_bucket_view",
            strategy.gradient_as_bucket_view,
            f"change gradient_as_bucket_view in {path.with_suffix('.json')}",
        ),
        _demand("precision", config.precision, f"change mixed_precision in {path}, or --precision"),
        _demand("device", "cuda" if on_gpu else "cpu", "change CUDA_VISIBLE_DEVICES"),
        _demand("swap_folder", _shown(run.swap_folder) if strategy.offloads_to_nvme else None, "change --swap-dir"),
        _demand(
            "parameter_dtypes",
            [_parameter_dtype(run), *(["uint8"] if config.load_in_4bit else [])],
            f"change --precision, or zero3_init_flag in {path}",
        ),
    ]


def _parameter_dtype(run: Run) -> str:
    """Return the type of the prepared model's parameters.

    It has 16 bits only under DeepSpeed, which keeps separate fp32 master weights. FSDP2's parameters are the master
    weights themselves, and are converted when they are gathered.
    """
    precision = run.config.precision
    if precision.endswith("-autocast") or (run.strategy.distributed_type == "FSDP" and precision != "fp64"):
        return "float32"
    return TORCH_NAMES[precision]


def _demands_of_strategy(proof: Proof, run: Run) -> list[Demand]:
    """Return the demands on the engine that follow from the kind of strategy."""
    strategy, path = run.strategy, run.strategy.path
    classes = {"MULTI_GPU": "DistributedDataParallel", "DEEPSPEED": "DeepSpeedEngine"}
    backend = None
    if strategy.distributed_type != "NO":
        backend = "gloo" if uses_gloo(run.config, on_cpu=proof.device == "cpu") else "nccl"
    steps_on_host = "cpu_adam" in strategy.needed_extensions and "optimizer" not in fixed_order.pins(run.config)
    optimizer_class = "DeepSpeedCPUAdam" if steps_on_host else "AdamW"
    demands = [
        _demand(
            "backend", backend, "another part of the program created the process group, so start the run without it"
        ),
        _demand("engine_class", classes.get(strategy.distributed_type, proof.engine_class), f"change {path}"),
        _demand("optimizer_class", optimizer_class, f"change offload_optimizer_device in {path}"),
    ]
    if proof.zero_stage and run.config.precision in ("bf16", "fp16"):
        dtype = TORCH_NAMES[run.config.accumulation_dtype]
        demands.append(_demand("accumulation_dtype", dtype, "change --accumulation-dtype"))
    if proof.zero_stage and proof.master_dtypes is not None:
        demands.append(_demand("master_dtypes", ["float32"], "change --precision"))
    return demands


def _demands_of_fsdp(run: Run) -> list[Demand]:
    """Return the demands on sharding that follow from an FSDP2 strategy and the precision.

    Empty for other strategies.
    """
    strategy, path = run.strategy, run.strategy.path
    if strategy.distributed_type != "FSDP":
        return []
    compute = TORCH_NAMES[run.config.precision] if run.config.precision in ("bf16", "fp64") else "float32"
    reduce = "float64" if run.config.precision == "fp64" else "float32"
    precision = "change --precision, and pass no --mixed_precision to the launcher"
    return [
        _demand("mesh", strategy.mesh or [run.world_size], f"change parallelism_config in {path}"),
        _demand(
            "reshard_after_forward",
            strategy.reshard_after_forward,
            f"change fsdp_reshard_after_forward in {path}",
        ),
        _demand("unsharded_parameters", 0, f"change {path}"),
        _demand("offloads", strategy.offload_param_device == "cpu", f"change fsdp_offload_params in {path}"),
        _demand("compute_dtypes", [compute], precision),
        _demand("reduce_dtypes", [reduce], precision),
    ]


def _demands_of_json(run: Run) -> list[Demand]:
    """Return the demands of the strategy's DeepSpeed JSON, one per key."""
    remedy = f"change the JSON of {run.strategy.path}"
    return [_demand(key, value, remedy) for key, value in engine_settings.requested(run.strategy.deepspeed_json or {})]


# ---------------------------------------------------------------- what all ranks must have alike


def gpu_of(device: torch.device) -> str | None:
    """Return the UUID of a rank's GPU, which does not depend on CUDA_VISIBLE_DEVICES. None for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def verify_gpus(gpus: list[str | None], run: Run) -> int | None:
    """Return the number of GPUs that the ranks use. None on a CPU.

    `gpus` has the UUID of each rank's GPU. Raises Refusal if ranks share a GPU without --share-device, or do not share
    one with it.
    """
    if None in gpus:
        return None
    num_gpus, requested = len(set(gpus)), run.num_machines if run.config.share_device else run.world_size
    if num_gpus != requested:
        raise Refusal(
            f"num_gpus: the run requests {requested} GPUs, but its {len(gpus)} ranks use {num_gpus}. Add "
            "or remove --share-device"
        )
    return num_gpus


def verify_machines(machines: list[int], run: Run) -> list[int]:
    """Return the number of ranks on each machine.

    `machines` has the machine number of each rank, from torchrun. Raises Refusal if the ranks are distributed
    differently from the request.
    """
    ranks_by_machine = [machines.count(machine) for machine in range(max(machines) + 1)]
    if ranks_by_machine != [run.num_local_ranks] * run.num_machines:
        raise Refusal(
            f"ranks_of_machines: the run requests {run.num_local_ranks} ranks on each of {run.num_machines} machines, "
            f"but the machines have {ranks_by_machine} ranks. Pass the same --num_machines on every machine."
        )
    return ranks_by_machine


def verify_alike(fact: str, digests: list[str | None], run: Run) -> None:
    """Raise Refusal if a rank has read other content than rank 0. `digests` has the digest of each rank's content."""
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise Refusal(
                f"{fact}: rank {run.machine_of(rank)} has a different value from rank 0 ({digest}, {digests[0]}). Give "
                "every machine the same files, and do not change them while a run starts."
            )


def read_optimizer_dtypes(proof: Proof, model: Any, optimizer: Any) -> Proof:
    """Add the data types of gradients and moments to the proof, which says how the engine was set up.

    Call this during an optimizer step, when they exist.
    """
    gradients = {g.dtype for g in engine_tensors(model, engine_optimizer(model, optimizer))["gradients"]}
    states = base_optimizer(optimizer).state.values()
    moments = {s[k].dtype for s in states for k in ("exp_avg", "exp_avg_sq") if isinstance(s.get(k), torch.Tensor)}
    return proof.model_copy(
        update={"gradient_dtypes": dtype_names(gradients) or None, "moment_dtypes": dtype_names(moments) or None}
    )


def prove_compiled(proof: Proof, is_asked: bool) -> Proof:
    """Return the proof with the number of graphs that TorchDynamo has compiled so far.

    Call this after a step. Raises Failed if the run requests compilation and nothing was compiled, or if the reverse is
    true. This is not collective.
    """
    dynamo = sys.modules.get("torch._dynamo.utils")  # torch imports this module only when something uses it
    graphs = 0 if dynamo is None else int(dynamo.counters["stats"]["unique_graphs"])
    if is_asked != bool(graphs):
        if is_asked:
            raise Failed("compile: the run requests compilation, but nothing was compiled")
        raise Failed(f"compile: the run requests no compilation, but {graphs} graphs were compiled")
    return proof if proof.compiled_graphs == graphs else proof.model_copy(update={"compiled_graphs": graphs})
