"""A model by its name through the engine that a file configures, as some ranks of many."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import yaml

from study import files
from study.engines import extensions
from study.engines.dry_run import order, pretend, ranks, scripted, text, together, training
from study.engines.dry_run.watch import Call
from study.engines.dry_run.without_memory import without_memory
from study.errors import Refusal
from study.planner import fake_tensors, trainable
from study.planner.fake_tensors import one_document_a_sequence
from study.planner.trace import Traced, check_traceable
from study.planner.trainable import Trainable
from study.theory.engine import Engine, Job
from study.theory.shapes import ModelShape

MOST_RANKS = 1 << 14  # in a world: engines keep lists of all of them, and stage 3 then takes 40 s
MOST_OF_A_SCRIPT = 4  # ranks of a world that are all asked by default
REAL_BYTES = 40  # of a parameter where tensors have memory: fp32 states, whole gradients and buckets, twice at most
SHARE = 0.5  # of this machine's free memory that one may take

ZERO = {  # DeepSpeed's option -> the engine's
    "overlap_comm": "overlap_comm", "reduce_bucket_size": "reduce_bucket_size", "sub_group_size": "sub_group_size",
    "stage3_prefetch_bucket_size": "prefetch_bucket_size", "stage3_max_live_parameters": "max_live_parameters",
    "stage3_param_persistence_threshold": "persistence_threshold", "stage3_max_reuse_distance": "max_reuse_distance",
    "zero_hpz_partition_size": "secondary_partition_size",
}  # fmt: skip
ACCELERATES = ("gradient_accumulation_steps", "gradient_clipping", "train_micro_batch_size_per_gpu")


def command(
    file: Path,
    script: Sequence[str],
    world_size: int,
    ranks_asked: str | None,
    per_machine: int,
    output: Path | None,
    model: str,
    sequence_length: int | None,
    mixed_precision: str | None,
    activation_checkpointing: bool,
    **batch: int,
) -> int:
    """Ask the ranks, print what they said, and return the exit status. Raises Refusal."""
    if output is not None:
        files.require_folder(output)
    if world_size > MOST_RANKS:
        raise Refusal(f"--world {world_size}: engines keep lists of all ranks; ask for at most {MOST_RANKS:,}")
    asked = _ranks(ranks_asked, world_size, bool(script))
    if script and not Path(script[0]).is_file():
        raise Refusal(f"{script[0]}: no such script; options of dry-run stand before the strategy")
    found = trainable.find(model, sequence_length)
    job = Job(
        batch["micro_batch_size"], found.sequence_length, batch["gradient_accumulation_steps"], activation_checkpointing
    )
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    extensions.use_own_folder()
    made = pretend.environment(file, world_size, mixed_precision, bool(script))
    local = min(per_machine, world_size)
    are_all_there = bool(script) and len(asked) == world_size <= together.MOST_RANKS
    if are_all_there:
        said = of_script_together(script, world_size, local, made)
    else:
        program = _scripted(script) if script else trained(found, job, _has_memory(made, found, len(asked)))
        said = ranks.ask(program, {rank: pretend.rank_of_many(rank, world_size, local, made) for rank in asked})
    calls = {rank: [Call.read(call) for call in one["calls"]] for rank, one in said.items()}
    partings = order.partings(calls, by_module=not are_all_there)
    if output is not None:
        exchange = "real" if are_all_there else "pretended"
        files.write_json(output, {"file": str(file), "world_size": world_size, "exchange": exchange, "ranks": said})
    what = Path(script[0]).name if script else f"{found.name}, {job.micro_batch_size} x {job.sequence_length} tokens"
    print(f"{file.stem}: {what}, as ranks {', '.join(map(str, asked))} of {world_size:,}")
    print("\n".join([*found.notes, text.REAL if are_all_there else text.TRACED, ""]))
    if not script:
        print(text.held(said), end="\n\n")
    print(text.sent(calls[asked[0]], world_size), end="\n\n")
    raised = text.raised(said, is_explained=bool(partings))
    waiting = {rank: calls[rank] for rank, one in said.items() if one.get("waits")}
    told = [*text.order(partings, asked, are_all_there), *([] if partings else text.waiting(waiting)), *raised]
    print("\n".join(told))
    return 1 if partings or waiting or any(one.get("raised") or one.get("ended") for one in said.values()) else 0


def of_script_together(
    script: Sequence[str], world_size: int, local_world_size: int, made: dict[str, str]
) -> dict[int, dict[str, Any]]:
    """What all ranks of a world say of a script, as they exchange what is real. Raises Refusal and RunFailed."""
    with tempfile.TemporaryDirectory(prefix="zero-study-") as name:
        folder = Path(name)
        places = {
            rank: pretend.rank_of_many(rank, world_size, local_world_size, made, folder / "meeting")
            for rank in range(world_size)
        }
        return together.ask(_scripted(script, folder), places, folder)


def _ranks(asked: str | None, world_size: int, has_script: bool) -> list[int]:
    """The ranks that are asked; by default the first and the last, of a script in a small world all. Raises Refusal."""
    if asked is None:
        return [*range(world_size)] if has_script and world_size <= MOST_OF_A_SCRIPT else sorted({0, world_size - 1})
    words = asked.split(",")
    if not all(word.isdecimal() and int(word) < world_size for word in words):
        raise Refusal(f"--ranks {asked}: must be numbers from 0 to {world_size - 1} with commas between them")
    return sorted({int(word) for word in words})


def _scripted(script: Sequence[str], journals: Path | None = None) -> ranks.Program:
    return lambda: scripted.run(Path(script[0]), script[1:], journals)


def trained(model: Trainable, job: Job, has_memory: bool) -> ranks.Program:
    """What a rank does with a model: its tensors have memory, or none."""

    def program() -> dict[str, Any]:
        if has_memory:
            return _train(model, job)
        with one_document_a_sequence(), without_memory():
            return _train(model, job)

    return program


def _train(model: Trainable, job: Job) -> dict[str, Any]:
    return training.train(
        lambda: model.build(job),
        model.loss,
        lambda: model.batch(job),
        int(job.gradient_accumulation_steps),
        model.blocks,
    )


def _has_memory(made: Mapping[str, str], model: Trainable, num_ranks: int) -> bool:
    """Whether tensors are to have memory: where the model fits here, and where they must. Raises Refusal."""
    offload = {made.get(f"ACCELERATE_DEEPSPEED_OFFLOAD_{part}_DEVICE", "none") for part in ("OPTIMIZER", "PARAM")}
    if "nvme" in offload:
        raise Refusal(pretend.NO_SWAPPING)
    free = psutil.virtual_memory().available * SHARE
    takes = REAL_BYTES * model.num_params * min(num_ranks, 2)
    if takes < free:
        return True
    if made.get("ACCELERATE_USE_DEEPSPEED") == "true" and offload == {"none"}:
        return False
    why = "offload computes on the host's own numbers" if offload != {"none"} else "DDP and FSDP2 take real tensors"
    raise Refusal(
        f"{model.name} takes {takes / 2**30:.0f} GiB here, {free / 2**30:.0f} are to be had, and {why}; name a smaller "
        "model, or a file of stages 1 to 3 without offload"
    )


# ---------------------------------------------------------------- an engine of theory's


def trace(shape: ModelShape, engine: Engine, job: Job) -> Traced:
    """Trace a steady step of rank 0: torch's engines by their parts, DeepSpeed's as a rank of many. Raises Refusal."""
    if engine.kind != "deepspeed":
        return fake_tensors.trace(shape, engine, job)
    said = of_deepspeed(shape, engine, job)
    return Traced({}, None, said["seconds"], said["peak_bytes"], said["reserved_bytes"]["default"])


def of_deepspeed(shape: ModelShape, engine: Engine, job: Job) -> dict[str, Any]:
    """What rank 0 says of stages 1 to 3, in tensors without memory; only their own options are those of the engine."""
    check_traceable(shape, dataclasses.replace(engine, kind="torch", precision="fp32"), job)
    if engine.zero_stage == 0 or engine.precision not in ("fp32", "bf16"):
        raise Refusal(f"ZeRO-{engine.zero_stage} in {engine.precision} is not traced: only 1 to 3 in fp32 and bf16 are")
    if find_spec("deepspeed") is None:
        raise Refusal("DeepSpeed is not traced where it is not installed")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    extensions.use_own_folder()
    with tempfile.TemporaryDirectory(prefix="zero-study-") as folder:
        file, config = Path(folder) / "traced.yaml", Path(folder) / "traced.json"
        zero = {"stage": engine.zero_stage} | {key: getattr(engine, name) for key, name in ZERO.items()}
        if not engine.reduce_bucket_size:  # of the optimizer that stage 1 takes in bf16 with sums in fp32: it has none
            del zero["reduce_bucket_size"]
        sums = {"data_types": {"grad_accum_dtype": "fp32"}} if engine.accumulation_bytes == 4 else {}
        files.write_json(config, {"zero_optimization": zero} | sums | dict.fromkeys(ACCELERATES, "auto"))
        deepspeed = {"deepspeed_config_file": str(config), "zero3_init_flag": engine.zero_stage == 3}
        file.write_text(yaml.safe_dump({"distributed_type": "DEEPSPEED", "deepspeed_config": deepspeed}))
        made = pretend.environment(file, engine.world_size, "bf16" if engine.precision == "bf16" else None)
        place = pretend.rank_of_many(0, engine.world_size, min(8, engine.world_size), made)
        model = trainable.of_shape(shape, int(job.sequence_length))
        return ranks.ask(trained(model, job, has_memory=False), {0: place})[0]
