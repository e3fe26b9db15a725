"""Check a run before it starts, and refuse a run that cannot work here as requested."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import os
from collections.abc import Callable

from study.records.schema import CUT_OFF, RENAMED
from study.run import Run
from study.workloads import sources
from zero_study import files
from zero_study.engines import extensions, inductor
from zero_study.errors import Refusal, install_command
from zero_study.files import why_not_writable
from zero_study.upgrade import faults


def check(run: Run) -> None:
    """Raise Refusal if a run cannot work on this machine as requested. Nothing is started or written."""
    run.check_machines()
    _check_strategy(run)
    _check_precision(run)
    _check_perturb(run)
    _check_fixed_order(run)
    _check_adapter(run)
    _check_devices(run)
    _check_packages(run)
    _check_compile(run)
    _check_release(run)
    _check_swap_dir(run)
    _check_gds(run)
    extensions.check(run.strategy.needed_extensions)
    sources.check(run.config)


def provide_extensions(run: Run, say: Callable[[str], None] = extensions.say_on_stderr) -> None:
    """Build the DeepSpeed extensions that the run's strategy needs, if they are not built yet.

    `say` receives progress messages. Raises Refusal if a build fails.
    """
    extensions.provide(run.strategy.needed_extensions, run.strategy.name, say)


def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _check_strategy(run: Run) -> None:
    """Raise Refusal if the strategy's file contradicts the run, or if the launcher would not read all of it."""
    config, strategy, where = run.config, run.strategy, run.strategy.path
    if strategy.distributed_type == "NO" and run.world_size != 1:
        raise Refusal(
            f"{where}: distributed_type NO runs one process, but {run.world_size} are requested. Use another strategy."
        )
    if strategy.mesh is not None and math.prod(strategy.mesh) != run.world_size:
        replicas, shards = strategy.mesh
        raise Refusal(
            f"{where}: parallelism_config makes {replicas} replicas of {shards} shards, but the run requests "
            f"{run.world_size} processes. Use --num_processes {replicas * shards}, or change the file."
        )
    strategy.check_json_is_seen()
    if run.world_size % strategy.secondary_partition_size:
        raise Refusal(
            f"{where}: the run's {run.world_size} process(es) cannot be divided into groups of "
            f"zero_hpz_partition_size {strategy.secondary_partition_size}. Use --num_processes "
            f"{strategy.secondary_partition_size}, or a multiple."
        )
    if strategy.gradient_clipping not in (None, config.gradient_clipping):
        raise Refusal(
            f"{where}: gradient_clipping {strategy.gradient_clipping} differs from the run's "
            f"{config.gradient_clipping}. Write 'auto', and use --gradient-clipping."
        )
    shards = strategy.distributed_type in ("DEEPSPEED", "FSDP")
    # DDP trains in 16 bits only by autocast
    requested = config.precision if shards else config.precision.replace("-autocast", "")
    if strategy.mixed_precision not in (None, requested):
        means = strategy.mixed_precision + ("" if shards else "-autocast")
        raise Refusal(
            f"{where}: mixed_precision is {strategy.mixed_precision}, but the run requests --precision "
            f"{config.precision}. Use --precision {means}, or remove mixed_precision from the file."
        )
    if strategy.gradient_accumulation_steps not in (None, run.gradient_accumulation_steps):
        raise Refusal(
            f"{where}: gradient_accumulation_steps {strategy.gradient_accumulation_steps} differs from "
            f"the run's {run.gradient_accumulation_steps}. Remove this key, and use --micro-batch-size."
        )


def _check_precision(run: Run) -> None:
    """Raise Refusal if the strategy's engine does not support the requested precision.

    A precision is also refused if the engine would implement it differently from the other engines.
    """
    _check_fp64(run)
    if run.strategy.distributed_type == "FSDP":
        _check_precision_of_fsdp(run)
    elif run.config.precision in ("bf16", "fp16"):
        _check_16_bit_parameters(run)
    _check_accumulation_dtype(run)
    _check_fp16(run)


def _check_fp64(run: Run) -> None:
    config, strategy = run.config, run.strategy
    if config.precision == "fp64" and strategy.distributed_type == "DEEPSPEED":
        raise Refusal(
            f"--precision fp64: DeepSpeed keeps master weights in fp32, so {strategy.name} would train in fp32. Use "
            "ddp, single or an FSDP2 strategy."
        )
    if config.precision == "fp64" and config.measure:
        raise Refusal(
            "--precision fp64 is meant for comparing weights, and its memory is not predicted. Add --no-measure."
        )


def _check_precision_of_fsdp(run: Run) -> None:
    config, strategy = run.config, run.strategy
    if config.precision not in ("fp64", "fp32", "bf16"):
        raise Refusal(
            f"--precision {config.precision}: {strategy.name} computes in fp32, or in bf16 with fp32 shards. Use "
            "--precision bf16."
        )
    if config.accumulation_dtype != "fp32":
        raise Refusal(
            f"--accumulation-dtype {config.accumulation_dtype}: {strategy.name} adds gradients in fp32, the type of "
            "its shards. Use --accumulation-dtype fp32."
        )


def _check_16_bit_parameters(run: Run) -> None:
    config, strategy = run.config, run.strategy
    if strategy.zero_stage is None:
        raise Refusal(
            f"--precision {config.precision} (16-bit parameters with fp32 masters) needs DeepSpeed, which "
            f"{strategy.name} does not use. Use --precision {config.precision}-autocast."
        )
    if strategy.zero_stage == 0:
        raise Refusal(
            f"--precision {config.precision} at ZeRO stage 0 makes an extra Adam step when the engine is built, so "
            f"it cannot be a baseline. Use --precision {config.precision}-autocast."
        )


def _check_accumulation_dtype(run: Run) -> None:
    dtype, precision = run.config.accumulation_dtype, run.config.precision
    if dtype not in ("fp32", precision):
        raise Refusal(
            f"--accumulation-dtype {dtype} needs --precision {dtype}, but the run has {precision}. Change one of them."
        )


def _check_fp16(run: Run) -> None:
    config = run.config
    if config.precision == "fp16" and run.strategy.offloads_to_nvme and config.checkpoint_every:
        raise Refusal(
            f"--checkpoint-every {config.checkpoint_every}: the loss scaler of fp16 is not saved under NVMe offload, "
            "so the run could not be resumed exactly. Use --precision bf16, or leave checkpoints out."
        )
    if config.precision.startswith("fp16") and not _num_gpus():
        raise Refusal(f"--precision {config.precision} needs a GPU. On a CPU, use bf16 or bf16-autocast.")


def _check_perturb(run: Run) -> None:
    """Raise Refusal if `--perturb` is used with a strategy other than the control (DDP).

    A micro batch cannot be dropped if a step has only one.
    """
    perturb, strategy = run.config.perturb, run.strategy
    if perturb in (None, "bad-release"):
        return
    if strategy.distributed_type != "MULTI_GPU":
        raise Refusal(
            f"--perturb {perturb}: only DDP can be changed on purpose, but the strategy is {strategy.name}. Use ddp."
        )
    if perturb == "dropped-micro-batch" and run.gradient_accumulation_steps == 1:
        raise Refusal(
            "--perturb dropped-micro-batch: a step has only one micro batch, so none can be dropped. Lower "
            "--micro-batch-size."
        )


def _check_fixed_order(run: Run) -> None:
    """Raise Refusal for `--fixed-order` with NVMe offload or with `--compile`, where the order cannot be fixed."""
    config, strategy = run.config, run.strategy
    if config.fixed_order is None:
        return
    if strategy.offloads_to_nvme:
        raise Refusal(
            f"--fixed-order: {strategy.name} keeps its gradients on a disk, where the order cannot be fixed. Leave "
            "--fixed-order out."
        )
    if config.compile:
        raise Refusal("--fixed-order: with --compile, torch chooses the order of additions. Leave one of the two out.")


def _check_adapter(run: Run) -> None:
    """Raise Refusal for an adapter, or weights in 4 bits, with options that this program cannot combine with them."""
    config, strategy = run.config, run.strategy
    if config.lora_rank is not None and config.perturb not in (None, "bad-release"):
        raise Refusal(
            f"--perturb {config.perturb} changes the training of all weights, but --lora-rank freezes them. Leave one "
            "of the two out."
        )
    if config.lora_rank is not None and config.save_model and strategy.offloads_to_nvme:
        raise Refusal(
            f"--save-model: under NVMe offload, a checkpoint has no frozen weights, so {strategy.name} could not write "
            "the model that the adapter belongs to. Use zero3_cpu_offload, or leave --save-model out."
        )
    if config.load_in_4bit and config.precision == "fp64":
        raise Refusal("--load-in-4bit: weights in 4 bits are not computed in fp64. Use another --precision.")
    if config.load_in_4bit and (strategy.zero_stage == 3 or strategy.distributed_type == "FSDP"):
        raise Refusal(
            f"--load-in-4bit: {strategy.name} would shard the weights, but this program shards no weights that are "
            "stored in 4 bits. Use ddp, or ZeRO-1 or ZeRO-2 with or without offload."
        )


def _check_devices(run: Run) -> None:
    """Raise Refusal if the run has more ranks than GPUs, or if it needs a GPU and there is none."""
    num_gpus = _num_gpus()
    if num_gpus and run.num_local_ranks > num_gpus and not run.config.share_device:
        each = f" on this one of {run.num_machines} machines" if run.num_machines > 1 else ""
        found = "1 GPU is" if num_gpus == 1 else f"{num_gpus} GPUs are"
        raise Refusal(
            f"the run requests {run.world_size} processes, but only {found} found{each}. Use --num_processes "
            f"{num_gpus * run.num_machines}, or --share-device."
        )
    if run.strategy.distributed_type == "FSDP" and run.strategy.offload_param_device == "cpu" and not num_gpus:
        raise Refusal(
            f"{run.strategy.name} needs a GPU, because PyTorch's CPUOffloadPolicy moves shards between a GPU and the "
            "host. Use fsdp2."
        )


def _check_packages(run: Run) -> None:
    """Raise Refusal if the run needs a package that is not installed."""
    if run.strategy.distributed_type == "DEEPSPEED" and importlib.util.find_spec("deepspeed") is None:
        raise Refusal(f"{run.strategy.name} needs deepspeed, which is not installed. Run `make setup`.")
    for package, flag in (("peft", "lora-rank"), ("bitsandbytes", "load-in-4bit")):
        if getattr(run.config, flag.replace("-", "_")) and importlib.util.find_spec(package) is None:
            raise Refusal(f"--{flag} needs {package}, which is not installed. Run `{install_command('peft')}`.")
    tracker = run.config.log_with
    if tracker != "none" and importlib.util.find_spec(tracker) is None:
        raise Refusal(f"--log-with {tracker}: the package is not installed. Run `pip install {tracker}`.")


def _check_compile(run: Run) -> None:
    """Raise Refusal if the run would compile its model, and this machine lacks what that takes."""
    if not run.config.compile:
        return
    reason = inductor.obstacle(on_gpu=bool(_num_gpus()))
    if reason:
        raise Refusal(f"--compile: {reason}")


def _check_release(run: Run) -> None:
    """Raise Refusal if the installed DeepSpeed is known to train this run wrongly without an error message."""
    strategy, config = run.strategy, run.config
    if strategy.zero_stage is None or config.perturb == "bad-release":
        return
    version = importlib.metadata.version("deepspeed")
    fault = faults.find(
        deepspeed=version,
        zero_stage=strategy.zero_stage,
        offload=strategy.offload_optimizer_device,
        precision=config.precision,
        sums_in_fp32=config.accumulation_dtype == "fp32",
        micro_batches=run.gradient_accumulation_steps,
    )
    if fault:
        raise Refusal(f"{faults.sentence(fault, version)}. Run `pip install -c constraints.txt deepspeed`.")


def _check_swap_dir(run: Run) -> None:
    swap_dir = run.config.swap_dir
    if swap_dir is None:
        return
    if not run.strategy.offloads_to_nvme:
        raise Refusal(f"--swap-dir {swap_dir}: {run.strategy.name} does not offload to NVMe. Remove the option.")
    if not swap_dir.is_dir():
        raise Refusal(
            f"--swap-dir {swap_dir}: the folder does not exist. Create this folder on the disk that you want to use."
        )
    if reason := why_not_writable(swap_dir):
        raise Refusal(f"--swap-dir {swap_dir}: the folder cannot be written ({reason}). Use another folder.")


def _check_gds(run: Run) -> None:
    """Raise Refusal if the run would swap with GPUDirect Storage, whose extension this program does not build."""
    aio = (run.strategy.deepspeed_json or {}).get("aio", {})
    if run.strategy.offloads_to_nvme and aio.get("use_gds"):
        raise Refusal(
            f"{run.strategy.path}: aio.use_gds is true, so DeepSpeed would compile its extension gds during the run. "
            "This needs nvcc and cuFile, and this program has not tested it. Remove aio.use_gds."
        )


def check_folder(run: Run) -> None:
    """Raise Refusal if a run cannot be written to its folder, or if the folder holds a run that has ended.

    A run that was interrupted can be repeated in the same folder.
    """
    folder = run.folder
    if (folder / "record.json").exists():
        status = files.load(folder / "record.json", "a record").get("status")
        status = RENAMED.get(status, status)
        if status not in (*CUT_OFF, "failed", "out_of_memory"):
            raise Refusal(f"{folder} already contains a finished run. Use another --output-dir, or delete the folder.")
        if status not in CUT_OFF:
            raise Refusal(
                f"{folder} already contains a run that ended with {status}. Use another --output-dir, or delete its "
                "record.json to run it again."
            )
    for path in (folder, run.checkpoints_folder):
        if os.path.lexists(path) and not path.is_dir():  # a file, or a broken link
            raise Refusal(f"{path} is not a folder. Use another --output-dir, or delete it.")
    if run.config.save_model and run.model_folder.exists():
        raise Refusal(f"{run.model_folder} already exists. Use another --output-dir, or delete it.")
    parent = next(p for p in [folder, *folder.absolute().parents] if p.exists())
    if reason := why_not_writable(parent):
        raise Refusal(f"{folder} cannot be written ({reason}). Use another --output-dir.")
