"""Prepare a training for a dry run, with accelerate from a file, or from the planner's description of an engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import accelerate
import torch
from accelerate.utils import FullyShardedDataParallelPlugin, convert_outputs_to_fp32
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

from zero_study.dryrun.models import Trainable
from zero_study.dryrun.step import Training
from zero_study.engines import extensions
from zero_study.engines.readback.dtypes import computed_in
from zero_study.errors import Refusal
from zero_study.theory.engine import Engine, StepConfig

RATE = 1e-6
MAX_NORM = 1.0  # to which gradients are clipped


# ---------------------------------------------------------------- through accelerate


def through_accelerate(model: Trainable, job: StepConfig, deepspeed: dict[str, Any] | None = None) -> Training:
    """Prepare a training of a model with accelerate, as the environment variables of this rank configure it.

    `deepspeed` is DeepSpeed's configuration. If it is None, the environment names the configuration. Raises Refusal if
    its settings contradict the job.
    """
    micro_steps = int(job.gradient_accumulation_steps)
    plugin = accelerate.DeepSpeedPlugin(hf_ds_config=deepspeed) if deepspeed is not None else None
    accelerator = accelerate.Accelerator(gradient_accumulation_steps=micro_steps, deepspeed_plugin=plugin)
    offloaded = _configure_deepspeed(accelerator.state.deepspeed_plugin, int(job.micro_batch_size), micro_steps)
    built = model.build(job)
    fsdp_plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if fsdp_plugin is not None and not fsdp_plugin.transformer_cls_names_to_wrap:
        # Transformers' own list includes BERT's embeddings, which accelerate 1.15 would shard a second time.
        fsdp_plugin.transformer_cls_names_to_wrap = model.blocks(built)
    prepared, optimizer = accelerator.prepare(built, _make_optimizer(built, "optimizer" in offloaded))
    batch: dict[str, Any] = {}  # of the micro step that runs

    @contextmanager
    def accumulate(is_last: bool) -> Iterator[None]:
        with accelerator.accumulate(prepared), _batch_of_rank(accelerator, model, job) as of_rank:
            batch.clear()
            batch.update(of_rank)
            yield

    return Training(
        prepared,
        optimizer,
        micro_steps,
        compute_loss=lambda: model.loss(prepared, batch),
        backward=accelerator.backward,
        accumulate=accumulate,
        clip_gradients=lambda: accelerator.clip_grad_norm_(prepared.parameters(), MAX_NORM),
        offloads=bool(offloaded),
        has_parts=accelerator.state.deepspeed_plugin is None,
    )


@contextmanager
def _batch_of_rank(accelerator: Any, model: Trainable, job: StepConfig) -> Iterator[dict[str, Any]]:
    """Yield this rank's batch for a micro step. If ranks share a sequence, it is the rank's part of each sequence.

    Torch's context parallelism shards the tensors in place, for as long as the context lasts. It includes the backward
    pass. With DeepSpeed's, the loader shards them, as UlyssesSPDataLoaderAdapter does.
    """
    sizes = accelerator.parallelism_config
    if sizes is not None and sizes.sp_enabled:
        length = int(job.sequence_length) // sizes.sp_size
        first = length * (accelerator.process_index % sizes.sp_size)
        yield _with_positions(model.batch(replace(job, sequence_length=length)), first)
        return
    batch = model.batch(job)
    if sizes is None or not sizes.cp_enabled:
        yield batch
        return
    batch = _with_positions(batch, 0)
    tensors = [each for each in batch.values() if isinstance(each, torch.Tensor)]
    with accelerator.maybe_context_parallel(tensors, [1] * len(tensors), no_restore_buffers=set(tensors)):
        yield batch


def _with_positions(batch: dict[str, Any], first: int) -> dict[str, Any]:
    """Return a batch of tokens with positions and shifted labels, which are needed if ranks share a sequence."""
    tokens = batch["input_ids"]
    positions = torch.arange(first, first + tokens.shape[1]).repeat(tokens.shape[0], 1)
    return batch | {"position_ids": positions, "shift_labels": batch["labels"].clone()}


def _configure_deepspeed(plugin: Any, micro_batch_size: int, micro_steps: int) -> list[str]:
    """Write the job's batch sizes into DeepSpeed's configuration, and return which parts it offloads.

    The parts are "optimizer" and "param". The list is empty without DeepSpeed. Raises Refusal if the configuration has
    other batch sizes.
    """
    if plugin is None:
        return []
    requested = {"train_micro_batch_size_per_gpu": micro_batch_size, "gradient_accumulation_steps": micro_steps}
    for key, value in requested.items():
        if (written := plugin.deepspeed_config.get(key)) not in (None, "auto", 1, value):
            raise Refusal(
                f"The strategy's file sets {key} to {written}, but {value} is requested. "
                f"Request {written}, or change the file."
            )
    plugin.deepspeed_config |= requested
    zero = plugin.deepspeed_config["zero_optimization"]
    devices = {part: zero.get(f"offload_{part}", {}).get("device", "none") for part in ("optimizer", "param")}
    return [part for part, device in devices.items() if device != "none"]


def _make_optimizer(model: Any, is_offloaded: bool) -> Any:
    """Return AdamW with the kernels that torch uses on a GPU, or DeepSpeed's CPU Adam under offload."""
    if is_offloaded:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        extensions.provide(["cpu_adam"], "the offloaded optimizer")
        return DeepSpeedCPUAdam(model.parameters(), lr=RATE)
    return torch.optim.AdamW(model.parameters(), lr=RATE, foreach=True)


# ---------------------------------------------------------------- torch's engines, as theory describes them


def torch_engine(described: Trainable, engine: Engine, job: StepConfig, mesh: DeviceMesh | None) -> Training:
    """Prepare a training of a model with one process, DDP or FSDP2, without accelerate.

    `mesh` has the ranks of FSDP2. At most two micro steps are run, because memory is the same in all later ones as in
    the second. If FSDP2 reduces only in the last micro step, three are run: the first, one between, and the last.
    Gradients are not clipped, because clipping works in place.
    """
    defers = engine.kind == "fsdp" and not engine.syncs_each_micro_step
    micro_steps = min(int(job.gradient_accumulation_steps), 3 if defers else 2)
    model: nn.Module = described.build(job)
    if engine.precision == "pure-bf16":
        model = model.bfloat16()
    if engine.kind == "fsdp" and mesh is not None:
        _shard(model, described.blocks(model), engine, mesh)
    elif engine.precision.endswith("-autocast"):
        dtype = getattr(torch, computed_in(engine.precision))
        model.forward = convert_outputs_to_fp32(torch.autocast("cpu", dtype)(model.forward))  # as accelerate does
    kernel = engine.optimizer_kernel
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, foreach=kernel == "foreach", fused=kernel == "fused")
    trained: Any = model
    if engine.kind == "ddp":
        trained = DistributedDataParallel(model, gradient_as_bucket_view=engine.gradient_as_bucket_view)

    def accumulate(is_last: bool) -> AbstractContextManager[Any]:
        if defers and mesh is not None:
            trained.set_requires_gradient_sync(is_last)  # as accelerate's no_sync does for FSDP2
        return nullcontext() if is_last or engine.kind != "ddp" else trained.no_sync()

    return Training(
        trained,
        optimizer,
        micro_steps,
        compute_loss=lambda: described.loss(trained, described.batch(job)),
        backward=lambda value: value.backward(),  # type: ignore[no-untyped-call]
        accumulate=accumulate,
        clip_gradients=lambda: None,
        micro_steps_left_out=int(job.gradient_accumulation_steps) - micro_steps,
    )


def _shard(model: nn.Module, blocks: list[str], engine: Engine, mesh: DeviceMesh) -> None:
    """Shard a model with the function of accelerate that real runs also use (study/training/accelerators.py)."""
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32 if engine.reduces_in_fp32 else None)
    if engine.precision not in ("fp32", "pure-bf16"):
        dtype = getattr(torch, computed_in(engine.precision))
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=policy.reduce_dtype)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, reshard_after_forward=engine.reshard_after_forward, cpu_offload=False,
        state_dict_type="SHARDED_STATE_DICT", activation_checkpointing=False, activation_checkpointing_offload=False,
        cpu_ram_efficient_loading=False, ignored_modules=[], auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=blocks, mixed_precision_policy=policy,
    )  # fmt: skip
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin), torch_device_mesh=mesh, mixed_precision="no",
        parallelism_config=SimpleNamespace(fsdp_dim_names=mesh.mesh_dim_names),
        device=torch.device("cpu"), is_main_process=True,
    )  # fmt: skip
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model  # since accelerate 1.6

    fsdp2_prepare_model(accelerator, model)
