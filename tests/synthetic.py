"""Synthetic records of runs that never took place: deterministic, and valid under the record schema."""

from __future__ import annotations

import datetime
import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from study.compare import predicted
from study.config import RunConfig, build_config
from study.records import schema
from study.records.schema import Checksum, Proof
from study.run import as_words
from zero_study import files
from zero_study.theory.engine import Engine, parameter_bytes
from zero_study.theory.model_states import STATE_PARTS, engine_differences, paper_bytes
from zero_study.theory.shapes import ParameterSizes

Box = Literal["cpu", "gpu"]

NUM_PARAMS = {("bert-imdb", "tiny"): 1_527_938, ("gpt-wikitext", "tiny"): 1_576_448}
FIRST_RUN = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
GPU = {"name": "NVIDIA H200", "memory_bytes": 150_754_820_096, "capability": "9.0"}
SHARDING = {
    "units": {"Model": 1, "Block": 2}, "reshard_after_forward": True, "sharded_parameters": 41,
    "unsharded_parameters": 0, "compute_dtypes": ["float32"], "reduce_dtypes": ["float32"], "offloads": False,
}  # fmt: skip
WARMUP_STEPS = 5
_IN_RUN_ID = {"workload", "size", "seed", "global_batch_size", "max_steps", "precision", "num_train_examples"}


def write_run(
    folder: Path, *, workload: str = "gpt-wikitext", size: str = "tiny", strategy: str = "zero2", world_size: int = 2,
    seed: int = 0, repeat: int = 0, global_batch_size: int = 8, num_steps: int = 40, precision: str = "fp32",
    box: Box = "cpu", seconds: float = 0.5, loss_shift: float = 0.0,
    status: Literal["ok", "out_of_memory", "failed", "interrupted"] = "ok", study: str | None = None,
    outcome: schema.OutcomeStatus | None = None, machine: dict[str, Any] | None = None, **settings: Any,
) -> Path:  # fmt: skip
    """Write one run's directory, with `study` its outcome too; return the path of the record.

    `seconds` is the median of a step, `settings` are further fields of RunConfig, `machine` replaces facts of it. Equal
    settings and seed give equal losses on a CPU, and on a GPU losses that differ as those of repeats do.
    """
    settings |= {"workload": workload, "size": size, "seed": seed, "precision": precision, "max_steps": num_steps}
    config = _config(global_batch_size, settings)
    run_id = _run_id(config, strategy, world_size, repeat)
    generator = np.random.default_rng(_number(run_id, box, machine))
    steps_done = num_steps if status == "ok" else min(3, num_steps)
    lines = _steps(config, strategy, box, steps_done, seconds, loss_shift, generator)
    path = folder / run_id / "record.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    steps = path.with_name("steps.jsonl")
    steps.write_text("".join(json.dumps(line) + "\n" for line in lines))
    made = _record(config, run_id, strategy, world_size, repeat, box, status, lines, files.sha256(steps))
    made = made.model_copy(update={"machine": {**made.machine, **(machine or {})}})
    path.write_text(made.model_dump_json(indent=1) + "\n")
    path.with_name("config.json").write_text(json.dumps({"config": made.config}))
    if study is not None:
        became = outcome or ("crashed" if status == "interrupted" else status)
        ended = (0, []) if became == "ok" else (1, ["the last line of stderr"])
        facts = {"position": 1 + _number(run_id) % 1000, "wall_seconds": made.wall_seconds + 5}
        facts |= dict(zip(("returncode", "stderr_tail"), ended, strict=True))
        seen = _outcome(config, run_id, strategy, world_size, repeat, study, became).model_copy(update=facts)
        path.with_name("outcome.json").write_text(seen.model_dump_json(indent=1) + "\n")
    return path


def write_outcome(
    folder: Path, status: schema.OutcomeStatus, *, study: str = "synthetic", workload: str = "gpt-wikitext",
    strategy: str = "zero2", world_size: int = 2, repeat: int = 0, global_batch_size: int = 8,
    message: str | None = None, **settings: Any,
) -> Path:  # fmt: skip
    """Write the outcome of a run that left no record: it was killed, say, or skipped."""
    config = _config(global_batch_size, settings | {"workload": workload})
    run_id = _run_id(config, strategy, world_size, repeat)
    made = _outcome(config, run_id, strategy, world_size, repeat, study, status)
    if status == "skipped":
        facts = {"message": "needs 8 GPUs, found 1", "wall_seconds": None, "returncode": None, "command": []}
        made = made.model_copy(update=facts | {"stderr_tail": []})
    path = folder / run_id / "outcome.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(made.model_copy(update={"message": message or made.message}).model_dump_json(indent=1) + "\n")
    return path


def change(path: Path, **facts: Any) -> None:
    """Change facts of a JSON file; a dict changes what is in it."""
    content = json.loads(path.read_text())
    for name, value in facts.items():
        content[name] = (content[name] or {}) | value if isinstance(value, dict) else value
    path.write_text(json.dumps(content))


def change_step(path: Path, number: int, **values: Any) -> None:
    """Change one step of a record, and what the record says of its steps with it."""
    steps = path.with_name("steps.jsonl")
    lines = [json.loads(line) for line in steps.read_text().splitlines()]
    lines[number - 1].update(values)
    steps.write_text("".join(json.dumps(line) + "\n" for line in lines))
    change(path, steps_sha256=files.sha256(steps), final_loss=lines[-1]["loss"])


def _config(global_batch_size: int, settings: dict[str, Any]) -> RunConfig:
    examples = max(256, global_batch_size)
    return RunConfig(
        global_batch_size=global_batch_size, **{"num_train_examples": examples, "size": "tiny", **settings}
    )


def _run_id(config: RunConfig, strategy: str, world_size: int, repeat: int) -> str:
    words = [config.workload, config.size, strategy, f"{world_size}x", f"seed{config.seed}"]
    words += [f"batch{config.global_batch_size}"]
    words += [config.precision.replace("-", "_")] if config.precision != "fp32" else []
    others = config.model_dump(exclude=_IN_RUN_ID, exclude_defaults=True)
    words += [f"{name}_{value}" for name, value in others.items()]
    words += [f"repeat{repeat}"] if repeat else []
    return "-".join(words)


def _number(*words: Any) -> int:
    """A seed for these words, the same in every process."""
    return int(_sha256(*words)[:16], 16)


def _sha256(*words: Any) -> str:
    return hashlib.sha256(repr(words).encode()).hexdigest()


def _started_at(run_id: str, repeat: int) -> str:
    """Later repeats later; all within hours, as their times are compared."""
    minutes = repeat * 60 + _number(run_id) % 60
    return (FIRST_RUN + datetime.timedelta(minutes=minutes)).isoformat(timespec="seconds")


def _command(config: RunConfig, strategy: str, world_size: int) -> list[str]:
    words = ["accelerate", "launch", "--config_file", f"accelerate_configs/{strategy}.yaml"]
    words += ["--num_processes", str(world_size), "study/train.py"]
    default = build_config().model_dump(mode="json")
    changed = {name: value for name, value in config.model_dump(mode="json").items() if value != default[name]}
    return words + as_words(changed)


def _steps(
    config: RunConfig, strategy: str, box: Box, steps_done: int, seconds: float, loss_shift: float,
    generator: np.random.Generator,
) -> list[dict[str, float]]:  # fmt: skip
    """Losses that fall from chance, with the noise of small batches that all strategies of a seed share."""
    shared = np.random.default_rng(_number(config.workload, config.size, config.seed))
    number = np.arange(1, steps_done + 1)
    start, end = (0.693, 0.35) if config.workload == "bert-imdb" else (7.0, 5.2)
    noise = shared.normal(0, 0.03 * start, config.num_steps)[:steps_done] / np.sqrt(config.global_batch_size / 8)
    grad_norms = shared.lognormal(0.0, 0.2, config.num_steps)[:steps_done]
    rounding = generator.normal(0, 2e-7 if box == "cpu" else 2e-4, steps_done)
    if box == "cpu":  # sums in another order: the same in every repeat of a strategy
        rounding = np.random.default_rng(_number(strategy)).normal(0, 2e-7, config.num_steps)[:steps_done]
    losses = (end + (start - end) * np.exp(-3 * number / config.num_steps) + noise) * (1 + rounding) + loss_shift
    taken = seconds * generator.lognormal(0.0, 0.03, steps_done)
    taken[:WARMUP_STEPS] *= np.linspace(2.0, 1.1, WARMUP_STEPS)[:steps_done]
    tokens = config.global_batch_size * config.sequence_length
    return [
        {
            "step": int(step), "loss": float(losses[i]), "learning_rate": config.learning_rate_at(int(step)),
            "grad_norm": float(grad_norms[i] * (1 + rounding[i])), "seconds": float(taken[i]),
            "elapsed_seconds": float(taken[: i + 1].sum()), "data_wait_seconds": 0.0004, "tokens": tokens,
            "samples": config.global_batch_size,
        }
        for i, step in enumerate(number)
    ]  # fmt: skip


def _record(
    config: RunConfig, run_id: str, strategy: str, world_size: int, repeat: int, box: Box, status: str,
    lines: list[dict[str, float]], steps_sha256: str,
) -> schema.Record:  # fmt: skip
    micro, accumulation = config.batches(world_size)
    timed = [line["seconds"] for line in lines[WARMUP_STEPS + 1 :]]
    ok = status == "ok"
    device = "cpu" if box == "cpu" else "cuda"
    learned = [config.workload, config.size, config.seed, config.precision, config.num_steps, config.global_batch_size]
    made = schema.Record(
        run_id=run_id, status=status,
        failure=None if ok else schema.Failure(step=len(lines), error=f"synthetic: {status}"),
        started_at=_started_at(run_id, repeat), wall_seconds=10.0 + sum(line["seconds"] for line in lines),
        command=_command(config, strategy, world_size), workload=config.workload, size=config.size,
        strategy=strategy, world_size=world_size, seed=config.seed, init=config.effective_init,
        config=config.model_dump(mode="json"), num_params=NUM_PARAMS[config.workload, config.size],
        model_flops_per_sequence=6 * NUM_PARAMS[config.workload, config.size] * config.sequence_length,
        data={"source": config.data, "digest": _sha256(config.workload, config.data, config.num_train_examples)},
        proof=_proof(config, strategy, world_size, micro, accumulation, device),
        initial_parameters=_checksum("initial", config.workload, config.size, config.seed),
        final_parameters=_checksum("final", strategy, *learned, repeat if box == "gpu" else 0) if ok else None,
        steps_done=len(lines), final_loss=lines[-1]["loss"],
        energy_joules=[400.0 * sum(line["seconds"] for line in lines)] * world_size if box == "gpu" and ok else None,
        tokens=sum(int(line["tokens"]) for line in lines), samples=sum(int(line["samples"]) for line in lines),
        evaluation=[_evaluation(config, lines[-1])] if ok else [],
        timing=_timing(config, lines, timed) if ok and timed else None, machine=_machine(box),
        steps_sha256=steps_sha256,
    )  # fmt: skip
    engine, sizes = predicted.engine_of(made), predicted.shape_of(made).parameters
    stepping = [_state_bytes(engine, sizes, made.num_params, rank, "stepping", device) for rank in range(world_size)]
    resting = [_state_bytes(engine, sizes, made.num_params, rank, "resting", device) for rank in range(world_size)]
    measured = {
        "model_state_bytes": stepping,
        "resting_state_bytes": resting,
        "peak_memory": [_peaks(config, box, engine, micro, rank, states) for rank, states in enumerate(stepping)],
        "collectives_per_step": _collectives(strategy, made.num_params, world_size, parameter_bytes(config.precision)),
    }
    return made.model_copy(update=measured)


def _proof(config: RunConfig, strategy: str, world_size: int, micro: int, accumulation: int, device: str) -> Proof:
    stage = int(strategy[4]) if strategy.startswith("zero") else None
    offload = "nvme" if "nvme" in strategy else "cpu" if "cpu" in strategy else "none"
    masters = "float32" if stage or parameter_bytes(config.precision) == 2 else None
    held = {"bf16": "bfloat16", "fp16": "float16"}.get(config.precision, "float32")
    classes = {"ddp": "DistributedDataParallel", "single": "Module", "fsdp2": "FSDPModule"}
    return Proof(
        world_size=world_size,
        distributed_type="DEEPSPEED" if stage is not None else {"single": "NO", "fsdp2": "FSDP"}.get(strategy, "MULTI"),
        backend=None if strategy == "single" else "gloo" if device == "cpu" else "nccl", device=device,
        engine_class="DeepSpeedEngine" if stage is not None else classes[strategy],
        optimizer_class="DeepSpeedCPUAdam" if offload != "none" else "AdamW",
        zero_optimizer_class=f"DeepSpeedZeroOptimizer{'_Stage3' * (stage == 3)}" if stage else None,
        zero_stage=stage, sharding=schema.Sharding(**SHARDING, mesh=[world_size]) if strategy == "fsdp2" else None,
        offload_optimizer_device=offload, offload_param_device=offload if stage == 3 else "none",
        gradient_clipping=config.gradient_clipping, gradient_accumulation_steps=accumulation,
        micro_batch_size=micro, precision=config.precision,
        autocast_dtype={"bf16-autocast": "bfloat16", "fp16-autocast": "float16"}.get(config.precision),
        accumulation_dtype="float32" if stage is not None else None, parameter_dtypes=[held],
        gradient_dtypes=[held], master_dtypes=[masters] if masters else None, moment_dtypes=["float32"],
        overlap_comm=False if stage is not None else None,
        reduce_bucket_size=(int(5e5) if "tuned" in strategy else int(5e8)) if stage else None,
        partitioned_parameters=37 if stage == 3 else None,
    )  # fmt: skip


@cache
def _state_bytes(
    engine: Engine, sizes: ParameterSizes | None, num_params: int, rank: int, moment: str, device: str
) -> schema.ModelStateBytes:
    """What theory says that the engine holds."""
    paper = paper_bytes(engine, num_params, moment)
    held = {part: getattr(paper, part) for part in STATE_PARTS}
    if sizes is not None and (engine.kind == "deepspeed" or not engine.zero_stage):
        for difference in engine_differences(engine, sizes, rank, moment):
            held[difference.part] += difference.num_bytes
    counts = {part: round(value) for part, value in held.items()}
    return schema.ModelStateBytes(**counts, by_device={device: sum(counts.values())})


def _peaks(
    config: RunConfig, box: Box, engine: Engine, micro: int, rank: int, states: schema.ModelStateBytes
) -> dict[str, schema.PeakMemory]:
    """Model states, activations by the tokens of a micro batch, and a little more on rank 0."""
    held = sum(getattr(states, part) for part in STATE_PARTS)
    unseen = states.communication_buffers if engine.kind == "ddp" else 0  # by who looks for live tensors
    activations = 40 * 1024 * micro * config.sequence_length
    shares = {"built": 0.3, "prepared": 0.8, "first_step": 0.95, "settling_steps": 0.98, "steady_steps": 1.0}
    peaks = {}
    for phase, share in {**shares, "evaluation": 0.7}.items():
        alive = int(share * (held + activations)) + (1 << 20) * (rank == 0)
        if box == "cpu":
            tensors = alive - unseen if phase == "steady_steps" else None
            peaks[phase] = schema.PeakMemory(tensor_bytes=tensors, resident_bytes=1_000_000_000 + alive)
        else:
            reserved = -(-int(alive * 1.1) // (1 << 21)) * (1 << 21)
            process = reserved + 550_000_000
            peaks[phase] = schema.PeakMemory(
                allocated_bytes=alive, reserved_bytes=reserved, process_bytes=process, process_average_bytes=process
            )
    return peaks


def _collectives(strategy: str, num_params: int, world_size: int, element_bytes: int) -> list[schema.Collective]:
    if world_size == 1:
        return []
    whole = num_params * element_bytes
    stage = int(strategy[4]) if strategy.startswith("zero") else 3 if strategy == "fsdp2" else 0
    kinds = {
        0: [("all_reduce", 2, whole)],
        1: [("all_reduce", 3, whole), ("all_gather", 2, whole)],
        2: [("all_reduce", 3, whole), ("all_gather", 2, whole)],
        3: [("reduce_scatter", 2, whole), ("all_gather", 20, 2 * whole)],
    }
    return [schema.Collective(kind=kind, count=count, bytes=sent) for kind, count, sent in kinds[stage]]


def _checksum(*words: Any) -> Checksum:
    return Checksum(absolute_sum=_number(*words) / 2**48, square_sum=_number(*words) / 2**52, sha256=_sha256(*words))


def _evaluation(config: RunConfig, last: dict[str, float]) -> dict[str, float]:
    loss = last["loss"] * 1.02
    figure = {"accuracy": 0.84} if config.workload == "bert-imdb" else {"perplexity": float(np.exp(loss))}
    return {"step": float(config.num_steps), "loss": loss, **figure}


def _timing(config: RunConfig, lines: list[dict[str, float]], timed: list[float]) -> schema.Timing:
    lower, median, upper = (float(value) for value in np.quantile(timed, [0.25, 0.5, 0.75]))
    return schema.Timing(
        num_steps=len(timed), num_warmup_steps=WARMUP_STEPS, probed_steps=[WARMUP_STEPS + 1], median_seconds=median,
        lower_quartile_seconds=lower, upper_quartile_seconds=upper, data_wait_median_seconds=0.0004,
        samples_per_second=config.global_batch_size / median, tokens_per_second=lines[-1]["tokens"] / median,
    )  # fmt: skip


def _machine(box: Box) -> dict[str, Any]:
    """Eight cores, or eight GPUs."""
    facts = {
        "cpu": "Synthetic CPU", "num_cores": 8, "num_threads_per_process": 1, "host_memory_bytes": 32_000_000_000,
        "gpus": [], "driver": None, "interconnect": None, "cuda": None, "tf32": None, "system": "Linux",
        "python": "3.11.7", "environment": {"OMP_NUM_THREADS": "1"}, "git_commit": "0" * 40, "git_dirty": False,
        "libraries": {"torch": "2.13.0", "accelerate": "1.15.0", "deepspeed": "0.19.8", "transformers": "5.23.0"},
    }  # fmt: skip
    if box == "gpu":
        facts |= {"cpu": "AMD EPYC 9654", "num_cores": 96, "host_memory_bytes": 800_000_000_000, "gpus": [GPU] * 8}
        facts |= {"driver": "570.86", "cuda": "12.8", "tf32": False}
    return facts


def _outcome(
    config: RunConfig, run_id: str, strategy: str, world_size: int, repeat: int, study: str, status: str
) -> schema.Outcome:
    """What the runner saw of a run that was killed."""
    return schema.Outcome(
        study=study, run_id=run_id, status=status, message="ok" if status == "ok" else f"synthetic: {status}",
        workload=config.workload, size=config.size, strategy=strategy, world_size=world_size, seed=config.seed,
        global_batch_size=config.global_batch_size, round=repeat, position=1,
        started_at=_started_at(run_id, repeat), wall_seconds=12.5, returncode=-9,
        command=_command(config, strategy, world_size), stderr_tail=["Killed"],
    )  # fmt: skip
