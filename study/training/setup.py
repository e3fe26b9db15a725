"""Build the model, the optimizer and the batches of a run, let the engine prepare them, and verify the result."""

from __future__ import annotations

import os
import shutil
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any

from study.records.schema import Checksum, Proof, StepDigest
from study.run import Run
from study.training.accelerators import build_accelerator
from zero_study.engines import workarounds
from zero_study.errors import Refusal

if TYPE_CHECKING:
    from accelerate import Accelerator
    from evaluate import EvaluationModule
    from torch.utils.data import DataLoader

    from study.training.manifest import Checkpoint
    from study.training.memory import PhaseMemory
    from study.workloads.sources import Splits


@dataclass
class Built:
    """Everything that a run trains with: model, optimizer and batches, prepared by the engine and verified."""

    run: Run
    accelerator: Accelerator
    workload: ModuleType
    splits: Splits
    model: Any
    optimizer: Any
    train_batches: DataLoader
    eval_batches: DataLoader
    metric: EvaluationModule | None  # only on rank 0
    memory: PhaseMemory
    bucket_bytes: int | None  # size of this rank's DDP buckets; None: not DDP, or not measured
    proof: Proof
    initial_parameters: Checksum
    planned_tokens: int  # tokens of all steps and ranks, without padding
    checkpoint: Checkpoint | None  # the one that the run resumes from
    digests: list[StepDigest] = field(default_factory=list)


def build(run: Run, accelerator: Accelerator) -> Built:
    """Build and prepare everything that the run trains with. Collective: every rank must call this.

    Raises Refusal if the engine is not what was requested.
    """
    import torch
    from torch.utils.data import DataLoader

    from study.training import engine_state, fixed_order, manifest, perturbations, weights
    from study.training.memory import BucketBytes, PhaseMemory
    from study.training.optimizer_steps import TrainingOrder
    from study.workloads import WORKLOADS, load_metric

    config = run.config
    checkpoint = manifest.choose(run, accelerator)
    if run.is_first_of_machine(accelerator.process_index):
        _remove_stale(run)
    if checkpoint and engine_state.is_universal(checkpoint.manifest.engine) and not checkpoint.is_exact:
        engine_state.expect_universal(accelerator)
    workload = WORKLOADS[config.workload]
    splits = workload.load(config)
    memory = PhaseMemory(accelerator.device, config.measure)
    memory.begin("built")
    model: Any = weights.build_model(accelerator, workload, splits, run)
    if config.activation_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    fixed_order.before_prepare(model, config, run.strategy.zero_stage)
    optimizer = weights.make_optimizer(model, config)
    perturbations.perturb(model, optimizer, run)
    arrangement = (len(splits.train), config.global_batch_size, config.num_steps, config.seed)
    order = TrainingOrder(*arrangement, steps_done=checkpoint.manifest.step if checkpoint else 0)
    pinned = accelerator.device.type == "cuda"
    train_batches = DataLoader(splits.train, run.micro_batch_size, sampler=order, pin_memory=pinned)
    eval_batches = DataLoader(splits.evaluation, run.micro_batch_size, pin_memory=pinned)

    memory.begin("prepared")
    buckets = BucketBytes(accelerator.device)
    with buckets if config.measure else nullcontext():
        model, optimizer, train_batches, eval_batches = accelerator.prepare(
            model, optimizer, train_batches, eval_batches
        )
    fixed_order.after_prepare(model, optimizer.optimizer, config, run.strategy.zero_stage)
    proof = _prove(accelerator, model, optimizer, splits, run)
    memory.begin(None)
    # Seed dropout here, so that it does not depend on the random numbers that were used to build the model.
    torch.manual_seed(config.seed * 1_000_003 + accelerator.process_index)
    return Built(
        run=run,
        accelerator=accelerator,
        workload=workload,
        splits=splits,
        model=model,
        optimizer=optimizer,
        train_batches=train_batches,
        eval_batches=eval_batches,
        metric=load_metric(workload.METRIC) if accelerator.is_main_process else None,
        memory=memory,
        bucket_bytes=buckets.num_bytes,
        proof=proof,
        initial_parameters=weights.checksum(model),
        planned_tokens=sum(int(splits.train[i]["attention_mask"].sum()) for i in TrainingOrder(*arrangement)),
        checkpoint=checkpoint,
    )


def start(run: Run) -> Accelerator:
    """Return the Accelerator of a run, and print how its batch is divided. Collective: every rank must call this.

    The ranks connect to each other. Raises Refusal if their number is not the run's world size.
    """
    import transformers

    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    accelerator = build_accelerator(run)
    if accelerator.num_processes != run.world_size:
        raise Refusal(
            f"world_size: the run requests {run.world_size}, but the engine has {accelerator.num_processes}. "
            f"Change distributed_type in {run.strategy.path}"
        )
    if run.strategy.offloads_to_nvme:
        workarounds.align_swapped_gradients()
    config = run.config
    accelerator.print(
        f"{config.workload} {config.size} under {run.strategy.name}: {run.world_size} process(es) x "
        f"{run.micro_batch_size} sequence(s) x {run.gradient_accumulation_steps} micro step(s) = "
        f"{config.global_batch_size} sequences of {config.sequence_length} tokens per step, {config.num_steps} steps, "
        f"{config.precision}"
    )
    return accelerator


def _remove_stale(run: Run) -> None:
    """Remove the files that an earlier, unfinished run left in the folder."""
    names = ("steps.jsonl", "record.json", "warnings.log")
    for stale in [*(run.own_folder / name for name in names), *run.own_folder.glob("failure-rank*.json")]:
        stale.unlink(missing_ok=True)
    shutil.rmtree(run.initial_weights_folder, ignore_errors=True)
    run.remove_swap_folder()


def _prove(accelerator: Accelerator, model: Any, optimizer: Any, splits: Splits, run: Run) -> Proof:
    """Return the settings that are read back from the prepared engine, after comparing them with the request.

    Raises Refusal if they differ. Collective: every rank must call this.
    """
    from accelerate.utils import gather_object

    from study.training import manifest, proof

    read = proof.read_back(accelerator, model, optimizer, run)
    proof.verify(read, run)
    ranks = gather_object([(proof.gpu_of(accelerator.device), int(os.environ.get("GROUP_RANK", "0")))])
    num_gpus = proof.verify_gpus([gpu for gpu, _ in ranks], run)
    machines = proof.verify_machines([machine for _, machine in ranks], run)
    proof.verify_alike("data", gather_object([splits.description.get("digest")]), run)
    proof.verify_alike("strategy's file", gather_object([manifest.identity_of(run).strategy_sha256]), run)
    return read.model_copy(update={"num_gpus": num_gpus, "ranks_of_machines": machines})
