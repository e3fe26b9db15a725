"""Can a run start here, as it is asked for? Refused before anything is started or written."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from study.config import RunConfig
from study.errors import Refusal
from study.files import is_writable
from study.preflight import extensions
from study.strategy.file import Strategy
from study.workloads import sources


def check(config: RunConfig, strategy: Strategy, world_size: int, num_machines: int = 1) -> None:
    """Refuse, before anything is started or written, what cannot run here as asked."""
    where = strategy.path
    if strategy.distributed_type == "NO" and world_size != 1:
        raise Refusal(
            f"{where}: distributed_type NO runs one process, the run asks for {world_size}; take another strategy"
        )
    _, accumulation = config.batches(world_size)
    if strategy.gradient_clipping not in (None, config.gradient_clipping):
        raise Refusal(
            f"{where}: gradient_clipping {strategy.gradient_clipping} differs from the run's "
            f"{config.gradient_clipping}; write 'auto' and pass --gradient-clipping"
        )
    if strategy.gradient_accumulation_steps not in (None, accumulation):
        raise Refusal(
            f"{where}: gradient_accumulation_steps {strategy.gradient_accumulation_steps} differs from the run's "
            f"{accumulation}; remove it and pass --micro-batch-size"
        )
    if strategy.distributed_type == "FSDP" and config.precision != "fp32":
        # accelerate's policy: parameters gathered, gradients reduced and outputs returned in that type.
        raise Refusal(
            f"--precision {config.precision} under {strategy.name} reduces gradients in 16 bits, which no other "
            "strategy does; use --precision fp32"
        )
    if config.precision in ("bf16", "fp16"):
        if strategy.zero_stage is None:
            raise Refusal(
                f"--precision {config.precision} (16-bit parameters with fp32 masters) needs DeepSpeed, which "
                f"{strategy.name} does not use; use --precision {config.precision}-autocast"
            )
        if strategy.zero_stage == 0:
            raise Refusal(
                f"--precision {config.precision} at ZeRO stage 0 takes a dummy Adam step as the engine is built, so it "
                f"cannot be a baseline; use --precision {config.precision}-autocast"
            )
    if config.accumulation_dtype not in ("fp32", config.precision):
        raise Refusal(
            f"--accumulation-dtype {config.accumulation_dtype} needs --precision {config.accumulation_dtype}, the run "
            f"has {config.precision}; change one of them"
        )
    import torch

    num_gpus = torch.cuda.device_count()
    if num_gpus and world_size > num_gpus * num_machines and not config.share_device:
        each = f" on this one of {num_machines} machines" if num_machines > 1 else ""
        raise Refusal(
            f"the run asks for {world_size} processes, {_gpus(num_gpus)} found{each}; pass --num_processes "
            f"{num_gpus * num_machines}, or --share-device"
        )
    if strategy.distributed_type == "FSDP" and not num_gpus:
        raise Refusal(
            f"{strategy.name} needs GPUs: on a CPU accelerate trains without sharding; take ddp or a zero strategy"
        )
    if config.precision.startswith("fp16") and not num_gpus:
        raise Refusal(f"--precision {config.precision} needs a GPU; use bf16 or bf16-autocast on a CPU")
    if strategy.distributed_type == "DEEPSPEED" and importlib.util.find_spec("deepspeed") is None:
        raise Refusal(f"{strategy.name} needs deepspeed, which is not installed; run: make setup")
    if config.log_with != "none" and importlib.util.find_spec(config.log_with) is None:
        raise Refusal(f"--log-with {config.log_with}: the package is not installed; run: pip install {config.log_with}")
    _check_swap_dir(config, strategy)
    # DeepSpeed's communication on a CPU loads one more extension, at every stage.
    on_cpu = {"deepspeed_shm_comm"} if strategy.distributed_type == "DEEPSPEED" and not num_gpus else set()
    extensions.check(strategy.needed_extensions | on_cpu)
    sources.check(config)


def _gpus(number: int) -> str:
    return f"{number} GPU is" if number == 1 else f"{number} GPUs are"


def _check_swap_dir(config: RunConfig, strategy: Strategy) -> None:
    if config.swap_dir is None:
        return
    if not strategy.offloads_to_nvme:
        raise Refusal(f"--swap-dir {config.swap_dir}: {strategy.name} does not offload to NVMe; remove the flag")
    if not config.swap_dir.is_dir():
        raise Refusal(f"--swap-dir {config.swap_dir}: the folder does not exist; make it on the disk to be measured")
    if not is_writable(config.swap_dir):
        raise Refusal(f"--swap-dir {config.swap_dir}: this user cannot write there; choose another folder")


def check_output_dir(run_dir: Path) -> None:
    """Refuse a folder that holds a finished run or cannot be one; an unfinished run is done again."""
    if (run_dir / "record.json").exists():
        raise Refusal(f"{run_dir} already holds a finished run; pass another --output-dir, or delete it")
    if run_dir.exists() and not run_dir.is_dir():
        raise Refusal(f"{run_dir} is not a folder; pass another --output-dir")
    parent = next(p for p in [run_dir, *run_dir.absolute().parents] if p.exists())
    if not is_writable(parent):
        raise Refusal(f"{run_dir} cannot be written; pass another --output-dir")
