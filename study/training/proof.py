"""Is this run really what was asked for? The engine's own view after `prepare`, held against the request.

Runs that silently were something else are the commonest fault of published comparisons.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator

from study.config import RunConfig
from study.errors import Refusal
from study.records.schema import Proof
from study.run import swap_folder
from study.training.accelerators import uses_gloo
from study.training.measure.memory import engine_tensors
from study.training.request import Launch


def _names(dtypes: set[torch.dtype]) -> list[str]:
    return sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)


def innermost(optimizer: Any) -> Any:
    """The optimizer under accelerate's wrapper: a ZeRO optimizer, or torch's own."""
    return optimizer.optimizer


def base_optimizer(optimizer: Any) -> Any:
    """The optimizer that does the arithmetic, under accelerate's and DeepSpeed's wrappers."""
    inner = innermost(optimizer)
    return getattr(inner, "optimizer", inner)


def read_back(accelerator: Accelerator, model: Any, optimizer: Any, config: RunConfig, launch: Launch) -> Proof:
    """Read what `prepare` built from the engine itself. Rank-local: no collective."""
    parameters = list(model.parameters())
    engine = getattr(model, "_orig_mod", model)  # torch.compile wraps DDP once more
    facts: dict[str, Any] = {
        "world_size": dist.get_world_size() if dist.is_initialized() else 1,
        "distributed_type": accelerator.distributed_type.value,
        "backend": dist.get_backend() if dist.is_initialized() else None,
        "device": accelerator.device.type,
        "engine_class": type(engine).__name__,
        "optimizer_class": type(base_optimizer(optimizer)).__name__,
        "gradient_clipping": config.gradient_clipping,
        "gradient_accumulation_steps": accelerator.gradient_accumulation_steps,
        "micro_batch_size": config.batches(accelerator.num_processes)[0],
        "parameter_dtypes": _names({p.dtype for p in parameters}),
    }
    if accelerator.distributed_type.value != "DEEPSPEED":
        autocast = accelerator.mixed_precision
        facts["autocast_dtype"] = {"no": None, "bf16": "bfloat16", "fp16": "float16"}[autocast]
        facts["precision"] = "fp32" if autocast == "no" else f"{autocast}-autocast"
        return Proof(**facts)

    stage = model.zero_optimization_stage()
    zero = model._config.zero_config
    devices = {
        key: "none" if part is None else str(getattr(part.device, "value", part.device))
        for key, part in (("optimizer", zero.offload_optimizer), ("param", zero.offload_param))
    }
    facts |= {
        "gradient_clipping": model.gradient_clipping(),
        "gradient_accumulation_steps": model.gradient_accumulation_steps(),
        "micro_batch_size": model.train_micro_batch_size_per_gpu(),
        "zero_stage": stage,
        "offload_optimizer_device": devices["optimizer"],
        "offload_param_device": devices["param"],
        "precision": _deepspeed_precision(model),
        "accumulation_dtype": str(model.get_data_types()[1]).removeprefix("torch."),
        "overlap_comm": zero.overlap_comm if stage else None,
    }
    if model.torch_autocast_enabled():
        facts["autocast_dtype"] = str(model.torch_autocast_dtype()).removeprefix("torch.")
    if stage:
        built = innermost(optimizer)
        facts["zero_optimizer_class"] = type(built).__name__
        facts["reduce_bucket_size"] = getattr(built, "reduce_bucket_size", None)  # BF16_Optimizer has none
        facts["allgather_bucket_size"] = zero.allgather_bucket_size
        masters = engine_tensors(model, innermost(optimizer))["optimizer_states"]
        facts["master_dtypes"] = _names({m.dtype for m in masters}) or None
    if stage in (1, 2):
        facts["use_multi_rank_bucket_allreduce"] = getattr(
            innermost(optimizer), "use_multi_rank_bucket_allreduce", None
        )
    if stage == 3:
        offload = innermost(optimizer).parameter_offload
        facts |= {
            "prefetch_bucket_size": offload._prefetch_bucket_sz,
            "param_persistence_threshold": offload.param_numel_persistence_threshold,
            "max_live_parameters": offload._max_available_parameters_in_numel,
            "max_reuse_distance": offload._max_reuse_distance_in_numel,
            "sub_group_size": int(innermost(optimizer).sub_group_size),
            "partitioned_parameters": sum(hasattr(p, "ds_tensor") and not p.ds_persist for p in parameters),
        }
    if launch.strategy.offloads_to_nvme:
        facts["swap_folder"] = _shown(_swap_folder_in_use(innermost(optimizer), parameters))
    return Proof(**facts)


def _shown(folder: Path | None) -> str | None:
    """A folder as it stands in a record: below the current directory without the part that is this machine's."""
    if folder is None:
        return None
    return str(folder.relative_to(Path.cwd())) if folder.is_relative_to(Path.cwd()) else str(folder)


def _deepspeed_precision(engine: Any) -> str:
    if engine.torch_autocast_enabled():
        return {torch.bfloat16: "bf16-autocast", torch.float16: "fp16-autocast"}[engine.torch_autocast_dtype()]
    return "bf16" if engine.bfloat16_enabled() else "fp16" if engine.fp16_enabled() else "fp32"


def _swap_folder_in_use(optimizer: Any, parameters: list[Any]) -> Path | None:
    """The folder that the engine's swappers were given; None where no swapper was built."""
    swapper = getattr(optimizer, "optimizer_swapper", None)
    if swapper is not None:
        return Path(swapper.swap_config.nvme_path)
    for parameter in parameters:
        if getattr(parameter, "nvme_swapper", None) is not None:
            return Path(parameter.nvme_swapper.swap_config.nvme_path)
    return None


def verify(proof: Proof, config: RunConfig, launch: Launch, run_dir: Path) -> None:
    """Raise Refusal naming the first thing that is not as asked, and the key to change."""
    strategy = launch.strategy
    micro_batch_size, accumulation = config.batches(launch.num_processes)
    key = f"{strategy.path}"
    # Accelerate names DDP by where it runs.
    names = {"MULTI_GPU": "MULTI_GPU" if torch.cuda.is_available() else "MULTI_CPU"}
    swap = _shown(swap_folder(config, run_dir)) if strategy.offloads_to_nvme else None
    asked = [
        ("world_size", launch.num_processes, f"num_processes in {key}, or --num_processes"),
        (
            "distributed_type",
            names.get(strategy.distributed_type, strategy.distributed_type),
            f"distributed_type in {key}",
        ),
        ("zero_stage", strategy.zero_stage, f"zero_stage in {key}, and pass no --zero_stage to the launcher"),
        ("offload_optimizer_device", strategy.offload_optimizer_device, f"offload_optimizer_device in {key}"),
        ("offload_param_device", strategy.offload_param_device, f"offload_param_device in {key}"),
        ("gradient_clipping", config.gradient_clipping, f"gradient_clipping in {key}, or --gradient-clipping"),
        ("gradient_accumulation_steps", accumulation, f"gradient_accumulation_steps in {key}, or --micro-batch-size"),
        ("micro_batch_size", micro_batch_size, "--micro-batch-size or --global-batch-size"),
        ("precision", config.precision, f"mixed_precision in {key}, or --precision"),
        ("device", "cuda" if torch.cuda.is_available() else "cpu", "CUDA_VISIBLE_DEVICES"),
        ("swap_folder", swap, "--swap-dir"),
        (
            "parameter_dtypes",
            [{"bf16": "bfloat16", "fp16": "float16"}.get(config.precision, "float32")],
            f"--precision, or zero3_init_flag in {key}",
        ),
    ]
    asked += _asked_of_the_engine(proof, config, launch)
    if proof.zero_stage and config.precision in ("bf16", "fp16"):
        dtype = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[config.accumulation_dtype]
        asked.append(("accumulation_dtype", dtype, "--accumulation-dtype"))
    for name, wanted, remedy in asked:
        found = getattr(proof, name)
        if found != wanted:
            raise Refusal(f"{name}: the run asks for {wanted}, the engine has {found}; change {remedy}")
    if proof.zero_stage and proof.master_dtypes not in (None, ["float32"]):
        raise Refusal(
            f"master_dtypes: the run asks for ['float32'], the engine has {proof.master_dtypes}; change --precision"
        )
    if launch.num_processes > 1 and proof.zero_stage == 3 and not proof.partitioned_parameters:
        raise Refusal(
            "partitioned_parameters: stage 3 shards none of this model's parameters, each is below the engine's "
            f"persistence threshold of {proof.param_persistence_threshold} elements; change --size, or take zero3_tuned"
        )


# DeepSpeed's keys and what the proof calls them; a strategy's JSON that gives one is held to it.
_ZERO_FACTS = {
    "reduce_bucket_size": "reduce_bucket_size",
    "allgather_bucket_size": "allgather_bucket_size",
    "overlap_comm": "overlap_comm",
    "use_multi_rank_bucket_allreduce": "use_multi_rank_bucket_allreduce",
    "stage3_prefetch_bucket_size": "prefetch_bucket_size",
    "stage3_param_persistence_threshold": "param_persistence_threshold",
    "stage3_max_live_parameters": "max_live_parameters",
    "stage3_max_reuse_distance": "max_reuse_distance",
    "sub_group_size": "sub_group_size",
}


def _asked_of_the_engine(proof: Proof, config: RunConfig, launch: Launch) -> list[tuple[str, Any, str]]:
    """What the strategy's kind, and its JSON where it has one, imply for the engine."""
    strategy = launch.strategy
    classes = {"MULTI_GPU": "DistributedDataParallel", "DEEPSPEED": "DeepSpeedEngine"}
    offloads = strategy.offload_optimizer_device != "none"
    has_group = strategy.distributed_type != "NO"
    backend = ("gloo" if uses_gloo(config, on_cpu=proof.device == "cpu") else "nccl") if has_group else None
    asked = [
        ("backend", backend, "nothing of the study's: the process group was set up by something else"),
        ("engine_class", classes.get(strategy.distributed_type, proof.engine_class), f"{strategy.path}"),
        (
            "optimizer_class",
            "DeepSpeedCPUAdam" if offloads else "AdamW",
            f"offload_optimizer_device in {strategy.path}",
        ),
    ]
    for key, value in (strategy.deepspeed_json or {}).get("zero_optimization", {}).items():
        if key in _ZERO_FACTS and value != "auto":
            asked.append((_ZERO_FACTS[key], value, f"zero_optimization.{key} in the JSON of {strategy.path}"))
    return asked


def gpu_of(device: torch.device) -> str | None:
    """Name the GPU that a rank is on, whatever CUDA_VISIBLE_DEVICES calls it; None for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def verify_gpus(gpus: list[str | None], config: RunConfig, launch: Launch) -> int | None:
    """Return on how many GPUs the ranks were; `gpus` has each rank's by its UUID, or None on a CPU.

    Raises Refusal where ranks share a GPU that should not, or do not that should.
    """
    if None in gpus:
        return None
    found, asked = len(set(gpus)), launch.num_machines if config.share_device else launch.num_processes
    if found != asked:
        raise Refusal(
            f"num_gpus: the run asks for {asked}, its {len(gpus)} ranks are on {found}; change --share-device"
        )
    return found


def read_optimizer_dtypes(proof: Proof, model: Any, optimizer: Any) -> Proof:
    """Add the types of gradients and moments, which exist only as the optimizer steps."""
    tensors = engine_tensors(model, innermost(optimizer))
    states = base_optimizer(optimizer).state.values()
    moments = {s[k].dtype for s in states for k in ("exp_avg", "exp_avg_sq") if isinstance(s.get(k), torch.Tensor)}
    gradients = {g.dtype for g in tensors["gradients"]}
    return proof.model_copy(
        update={"gradient_dtypes": _names(gradients) or None, "moment_dtypes": _names(moments) or None}
    )
