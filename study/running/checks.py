"""Check a run before it starts: refuse what cannot run here as requested, before anything is started or written."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import os
from collections.abc import Callable

from study import files
from study.engines import extensions, known_bad
from study.errors import Refusal
from study.files import why_not_writable
from study.records.schema import CUT_OFF, RENAMED
from study.run import Run
from study.workloads import sources


def check(run: Run) -> None:
    """Refuse, before anything is started or written, what cannot run here as asked."""
    run.check_machines()
    _check_strategy(run)
    _check_precision(run)
    _check_perturb(run)
    _check_fixed_order(run)
    _check_devices(run)
    _check_packages(run)
    _check_release(run)
    _check_swap_dir(run)
    extensions.check(run.strategy.needed_extensions)
    sources.check(run.config)


def provide_extensions(run: Run, say: Callable[[str], None] = extensions.say_on_stderr) -> None:
    """Build what the run's strategy needs of DeepSpeed's extensions, if it is not built yet, and say so.

    Raises Refusal if that fails.
    """
    extensions.provide(run.strategy.needed_extensions, run.strategy.name, say)


def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _check_strategy(run: Run) -> None:
    """Refuse a file that says otherwise than the run, or that the launcher would not find whole."""
    config, strategy, where = run.config, run.strategy, run.strategy.path
    if strategy.distributed_type == "NO" and run.world_size != 1:
        raise Refusal(
            f"{where}: distributed_type NO runs one process, the run asks for {run.world_size}; take another strategy"
        )
    if strategy.mesh is not None and math.prod(strategy.mesh) != run.world_size:
        replicas, shards = strategy.mesh
        raise Refusal(
            f"{where}: parallelism_config makes {replicas} replicas of {shards} shards, the run asks for "
            f"{run.world_size} processes; pass --num_processes {replicas * shards}, or change it"
        )
    strategy.check_json_is_seen()
    if run.world_size % strategy.secondary_partition_size:
        raise Refusal(
            f"{where}: zero_hpz_partition_size {strategy.secondary_partition_size} does not divide the run's "
            f"{run.world_size} process(es); pass --num_processes {strategy.secondary_partition_size}, or a multiple"
        )
    if strategy.gradient_clipping not in (None, config.gradient_clipping):
        raise Refusal(
            f"{where}: gradient_clipping {strategy.gradient_clipping} differs from the run's "
            f"{config.gradient_clipping}; write 'auto' and pass --gradient-clipping"
        )
    shards = strategy.distributed_type in ("DEEPSPEED", "FSDP")
    requested = config.precision if shards else config.precision.replace("-autocast", "")  # DDP's 16 bits are autocast
    if strategy.mixed_precision not in (None, requested):
        means = strategy.mixed_precision + ("" if shards else "-autocast")
        raise Refusal(
            f"{where}: asks for {strategy.mixed_precision}, the run for --precision {config.precision}; pass "
            f"--precision {means}, or leave it out of the file"
        )
    if strategy.gradient_accumulation_steps not in (None, run.gradient_accumulation_steps):
        raise Refusal(
            f"{where}: gradient_accumulation_steps {strategy.gradient_accumulation_steps} differs from the run's "
            f"{run.gradient_accumulation_steps}; remove it and pass --micro-batch-size"
        )


def _check_precision(run: Run) -> None:
    """Refuse a precision class that the strategy's engine does not have, or has otherwise than the others."""
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
            f"--precision fp64: DeepSpeed keeps its masters in fp32, so that {strategy.name} would train in fp32; use "
            "ddp, single or an FSDP2 strategy"
        )
    if config.precision == "fp64" and config.measure:
        raise Refusal("--precision fp64 is there to compare weights: no theory has its bytes; add --no-measure")


def _check_precision_of_fsdp(run: Run) -> None:
    config, strategy = run.config, run.strategy
    if config.precision not in ("fp64", "fp32", "bf16"):
        raise Refusal(
            f"--precision {config.precision}: {strategy.name} computes in fp32, or in bf16 of fp32 shards; use "
            "--precision bf16"
        )
    if config.accumulation_dtype != "fp32":
        raise Refusal(
            f"--accumulation-dtype {config.accumulation_dtype}: {strategy.name} adds gradients up in fp32, its "
            "shards' type; use --accumulation-dtype fp32"
        )


def _check_16_bit_parameters(run: Run) -> None:
    config, strategy = run.config, run.strategy
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


def _check_accumulation_dtype(run: Run) -> None:
    dtype, precision = run.config.accumulation_dtype, run.config.precision
    if dtype not in ("fp32", precision):
        raise Refusal(
            f"--accumulation-dtype {dtype} needs --precision {dtype}, the run has {precision}; change one of them"
        )


def _check_fp16(run: Run) -> None:
    config = run.config
    if config.precision == "fp16" and run.strategy.offloads_to_nvme and config.checkpoint_every:
        raise Refusal(
            f"--checkpoint-every {config.checkpoint_every}: of fp16 under NVMe offload the loss scaler is not saved; "
            "use --precision bf16, or leave checkpoints out"
        )
    if config.precision.startswith("fp16") and not _num_gpus():
        raise Refusal(f"--precision {config.precision} needs a GPU; use bf16 or bf16-autocast on a CPU")


def _check_perturb(run: Run) -> None:
    """Refuse to perturb what is not the control, and a micro batch to drop where a step has one alone."""
    perturb, strategy = run.config.perturb, run.strategy
    if perturb in (None, "bad-release"):
        return
    if strategy.distributed_type != "MULTI_GPU":
        raise Refusal(f"--perturb {perturb}: is done to DDP alone, the run is of {strategy.name}; use ddp.yaml")
    if perturb == "dropped-micro-batch" and run.gradient_accumulation_steps == 1:
        raise Refusal("--perturb dropped-micro-batch: a step has one micro batch; lower --micro-batch-size")


def _check_fixed_order(run: Run) -> None:
    """Refuse to fix the order of what lies on a disk, and of what is compiled."""
    config, strategy = run.config, run.strategy
    if config.fixed_order is None:
        return
    if strategy.offloads_to_nvme:
        raise Refusal(
            f"--fixed-order: {strategy.name} keeps its gradients on a disk, where no order is fixed; leave it out"
        )
    if config.compile:
        raise Refusal("--fixed-order: --compile lets torch order additions by itself; leave one of the two out")


def _check_devices(run: Run) -> None:
    """Refuse more ranks than GPUs, and what a CPU cannot do."""
    num_gpus = _num_gpus()
    if num_gpus and run.num_local_ranks > num_gpus and not run.config.share_device:
        each = f" on this one of {run.num_machines} machines" if run.num_machines > 1 else ""
        found = "1 GPU is" if num_gpus == 1 else f"{num_gpus} GPUs are"
        raise Refusal(
            f"the run asks for {run.world_size} processes, {found} found{each}; pass --num_processes "
            f"{num_gpus * run.num_machines}, or --share-device"
        )
    if run.strategy.distributed_type == "FSDP" and run.strategy.offload_param_device == "cpu" and not num_gpus:
        raise Refusal(
            f"{run.strategy.name} needs a GPU: PyTorch's CPUOffloadPolicy moves shards between a GPU and the host, and "
            "without a GPU there is nothing to move them from; take fsdp2"
        )


def _check_packages(run: Run) -> None:
    """Refuse what needs a package that is not installed."""
    if run.strategy.distributed_type == "DEEPSPEED" and importlib.util.find_spec("deepspeed") is None:
        raise Refusal(f"{run.strategy.name} needs deepspeed, which is not installed; run: make setup")
    tracker = run.config.log_with
    if tracker != "none" and importlib.util.find_spec(tracker) is None:
        raise Refusal(f"--log-with {tracker}: the package is not installed; run: pip install {tracker}")


def _check_release(run: Run) -> None:
    """Refuse a release of DeepSpeed that is known to train wrongly what the run asks for, and to say nothing."""
    strategy, config = run.strategy, run.config
    if strategy.zero_stage is None or config.perturb == "bad-release":
        return
    version = importlib.metadata.version("deepspeed")
    fault = known_bad.find(
        deepspeed=version,
        zero_stage=strategy.zero_stage,
        offload=strategy.offload_optimizer_device,
        precision=config.precision,
        sums_in_fp32=config.accumulation_dtype == "fp32",
        micro_batches=run.gradient_accumulation_steps,
    )
    if fault:  # the study's models return their loss beside their logits
        raise Refusal(f"{known_bad.sentence(fault, version)}; run: pip install -c constraints.txt deepspeed")


def _check_swap_dir(run: Run) -> None:
    swap_dir = run.config.swap_dir
    if swap_dir is None:
        return
    if not run.strategy.offloads_to_nvme:
        raise Refusal(f"--swap-dir {swap_dir}: {run.strategy.name} does not offload to NVMe; remove the flag")
    if not swap_dir.is_dir():
        raise Refusal(f"--swap-dir {swap_dir}: the folder does not exist; make it on the disk to be measured")
    if reason := why_not_writable(swap_dir):
        raise Refusal(f"--swap-dir {swap_dir}: cannot be written ({reason}); choose another folder")


def check_folder(run: Run) -> None:
    """Refuse a folder that holds a finished run, or that a run could not end in; one that was cut off is done again."""
    folder = run.folder
    if (folder / "record.json").exists():
        status = files.load(folder / "record.json", "a record").get("status")
        status = RENAMED.get(status, status)
        if status not in (*CUT_OFF, "failed", "out_of_memory"):
            raise Refusal(f"{folder} already holds a finished run; pass another --output-dir, or delete it")
        if status not in CUT_OFF:
            raise Refusal(
                f"{folder} already holds a run that ended {status}; pass another --output-dir, or delete the "
                "record.json there to do it again"
            )
    for path in (folder, run.checkpoints_folder):
        if os.path.lexists(path) and not path.is_dir():  # a file, or a link that leads nowhere
            raise Refusal(f"{path} is not a folder; pass another --output-dir, or delete it")
    if run.config.save_model and run.model_folder.exists():
        raise Refusal(f"{run.model_folder} is there already; pass another --output-dir, or delete it")
    parent = next(p for p in [folder, *folder.absolute().parents] if p.exists())
    if reason := why_not_writable(parent):
        raise Refusal(f"{folder} cannot be written ({reason}); pass another --output-dir")
