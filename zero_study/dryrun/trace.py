"""Simulate one step of an engine, and return a rank's peak memory, reserved memory and collectives.

Nothing is allocated and nothing is sent, so a laptop can trace a model of seven billion parameters. The traced code is
what `study/training` builds, too: the modules of transformers, DeepSpeed's engine, accelerate's sharding, and torch's
DDP and AdamW.
"""

from __future__ import annotations

import os
import time
import warnings
from functools import partial
from importlib.util import find_spec
from typing import Any

import transformers

from zero_study.dryrun import models, prepare, step, world
from zero_study.dryrun.fake import without_memory
from zero_study.dryrun.models import Trainable
from zero_study.dryrun.traced import Traced, check_traceable
from zero_study.engines import extensions
from zero_study.errors import Refusal
from zero_study.ranks import forks
from zero_study.theory.engine import Engine, StepConfig
from zero_study.theory.shapes import ModelShape

RANKS_PER_MACHINE = 8
ZERO = {  # DeepSpeed's option -> the engine's
    "overlap_comm": "overlap_comm", "reduce_bucket_size": "reduce_bucket_size", "sub_group_size": "sub_group_size",
    "stage3_prefetch_bucket_size": "prefetch_bucket_size", "stage3_max_live_parameters": "max_live_parameters",
    "stage3_param_persistence_threshold": "persistence_threshold", "stage3_max_reuse_distance": "max_reuse_distance",
    "zero_hpz_partition_size": "secondary_partition_size",
}  # fmt: skip
FILLED_IN_BY_ACCELERATE = ("gradient_accumulation_steps", "gradient_clipping", "train_micro_batch_size_per_gpu")


def trace(shape: ModelShape, engine: Engine, job: StepConfig) -> Traced:
    """Simulate one optimizer step of rank 0, and return its memory and its collectives.

    Raises Refusal if the model, the engine or the job cannot be traced. For DeepSpeed, the rank is a fork of this
    process, so call this before any backward pass in this process. Torch's engines are traced in this process itself,
    so call this before a process group exists.
    """
    check_traceable(shape, engine, job)
    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    answer = trace_deepspeed(shape, engine, job) if engine.kind == "deepspeed" else trace_torch(shape, engine, job)
    return Traced(
        parts=answer["parts"],
        moment=answer["moment"],
        seconds=answer["seconds"],
        peak_bytes=answer["peak_bytes"],
        reserved_bytes=answer["reserved_bytes"]["default"],
        calls=answer["calls"],
    )


def trace_torch(shape: ModelShape, engine: Engine, job: StepConfig) -> dict[str, Any]:
    """Simulate a step of a single process, DDP or FSDP2 in this process.

    Returns the result of `step.trace_training`, and the `seconds` that it took.
    """
    began = time.perf_counter()
    described = models.with_adapter(models.of_shape(shape, int(job.sequence_length)), shape, engine)
    with warnings.catch_warnings(), world.first_rank(engine) as mesh, without_memory():
        warnings.simplefilter("ignore")  # the warnings are about real trainings
        answer = step.trace_training(partial(prepare.torch_engine, described, engine, job, mesh))
    return answer | {"seconds": time.perf_counter() - began}


def trace_deepspeed(shape: ModelShape, engine: Engine, job: StepConfig) -> dict[str, Any]:
    """Simulate a step of ZeRO stages 1 to 3, on rank 0 in a fork of this process.

    Returns the result of `step.trace_training`, and the `seconds` that it took. Options of DeepSpeed that are not part
    of `engine` have their defaults. Raises Refusal if DeepSpeed is not installed, or if the rank refuses.
    """
    if find_spec("deepspeed") is None:
        raise Refusal("DeepSpeed is not installed, so it cannot be traced. Run `pip install deepspeed`.")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    extensions.use_own_folder()
    world.import_engines(may_use_deepspeed=True)
    precision = "bf16" if engine.precision == "bf16" else "no"
    variables = {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_MIXED_PRECISION": precision,
        "ACCELERATE_DEEPSPEED_ZERO3_INIT": str(engine.zero_stage == 3).lower(),
        "CUDA_VISIBLE_DEVICES": "",
    }
    local_world_size = min(RANKS_PER_MACHINE, engine.world_size)
    place = world.rank_of_many(0, engine.world_size, local_world_size, variables)
    model = models.with_adapter(models.of_shape(shape, int(job.sequence_length)), shape, engine)
    zero = {"stage": engine.zero_stage} | {key: getattr(engine, name) for key, name in ZERO.items()}
    if not engine.reduce_bucket_size:  # stage 1 in bf16 with sums in fp32 uses an optimizer that has no such bucket
        del zero["reduce_bucket_size"]
    sums = {"data_types": {"grad_accum_dtype": "fp32"}} if engine.accumulation_bytes == 4 else {}
    configuration = {"zero_optimization": zero} | sums | dict.fromkeys(FILLED_IN_BY_ACCELERATE, "auto")
    program = trainer(model, job, has_memory=False, deepspeed=configuration)
    return forks.run(program, {0: place})[0]


def trainer(
    model: Trainable, job: StepConfig, has_memory: bool, deepspeed: dict[str, Any] | None = None
) -> forks.Program:
    """Return the program with which a rank trains a model through accelerate.

    `has_memory` says whether its tensors have real memory. `deepspeed` is DeepSpeed's configuration. If it is None, the
    environment names the configuration.
    """
    prepare_training = partial(prepare.through_accelerate, model, job, deepspeed)

    def program() -> dict[str, Any]:
        if has_memory:
            return step.trace_training(prepare_training)
        with without_memory():
            return step.trace_training(prepare_training)

    return program
