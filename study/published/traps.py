"""How large a difference does each parity trap make, between runs that read as the same training?

    zero-study traps --output FILE [--data-dir DIR] [--seeds 5] [--trap NAME]

A trap is an arm and its control that differ in a setting which nobody wrote down, and a pair of arms in which that
setting is matched. Arms are small trainings from scratch, started by accelerate as published scripts are; the file gets
what each engine was and what it learned. Arms and seeds that are in it already are kept.
`study.published.trap_effects` derives the effects. Without --data-dir the text is the bundled sample.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from study import files
from study.config import RunConfig
from study.engines import extensions, this_machine
from study.errors import Refusal
from study.published import child, trap_effects
from study.published.trap_effects import Trap
from study.records.machine import SAME
from study.running.launch import QUIET
from study.workloads import sources

ARM = Path(__file__).resolve().with_name("trap_arm.py")
TIMEOUT_SECONDS = 3600  # of one arm, with all its seeds

SETTINGS: dict[str, Any] = {
    "size": "tiny",
    "num_train_examples": 64,
    "num_eval_examples": 64,
    "sequence_length": 64,
    "dropout": 0.0,
    "epochs": 10,
    "learning_rate": 1e-3,
    "sgd_learning_rate": 0.02,
    "warmup_steps": 4,
    "weight_decay": 0.01,
    "last_updates": 10,  # whose mean loss is the final one
}

# What a script does unless an arm says otherwise. 16 sequences a step in every arm that is not about that number.
PROGRAM: dict[str, Any] = {
    "micro_batch_size": 16,
    "gradient_accumulation_steps": 1,
    "mixed_precision": "no",
    "clip_grad_norm": None,  # given to accelerator.clip_grad_norm_
    "optimizer": "adamw",  # adamw, adam or sgd: torch's, with two parameter groups; config: the DeepSpeed config's
    "prepares_scheduler": False,  # otherwise the rate is set by hand, from the number of the step
    "initial_weights": "whole",  # whole, partitioned (under zero.Init) or loaded (the whole ones, from a checkpoint)
    "own_generator": True,  # the DataLoader shuffles by a generator of its own
}


@dataclass(frozen=True)
class Arm:
    """One way to start the training: an accelerate file, a DeepSpeed JSON if it names one, and a script."""

    file: dict[str, Any]
    json: dict[str, Any] | None = None
    program: dict[str, Any] = field(default_factory=dict)


def plain(**program: Any) -> Arm:
    return Arm({"distributed_type": "NO", "num_processes": 1}, program=program)


def two(distributed_type: str = "MULTI_GPU", **program: Any) -> Arm:
    return Arm({"distributed_type": distributed_type, "num_processes": 2}, program={"micro_batch_size": 8, **program})


def in_yaml(num_processes: int, **section: Any) -> Arm:
    """DeepSpeed as accelerate's own keys describe it."""
    file = {"distributed_type": "DEEPSPEED", "num_processes": num_processes}
    file["deepspeed_config"] = {"zero_stage": 2, **section}
    return Arm(file, program={"micro_batch_size": 16 // num_processes})


def zero(stage: int, num_processes: int = 1, engine: dict[str, Any] | None = None, **program: Any) -> Arm:
    """DeepSpeed by a JSON, in which clipping is off and says so: the one place where 0.0 is honoured."""
    content = {
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 5_000_000},
        "gradient_clipping": 0.0,
        "gradient_accumulation_steps": program.get("gradient_accumulation_steps", 1),
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
    }
    for key, value in (engine or {}).items():
        content[key] = {**content[key], **value} if isinstance(content.get(key), dict) else value
    file = {"distributed_type": "DEEPSPEED", "num_processes": num_processes}
    return Arm(file, content, {"micro_batch_size": 16 // num_processes, **program})


BF16 = {"mixed_precision": "bf16"}
FOUR = {"micro_batch_size": 4, "gradient_accumulation_steps": 4}
FP32_SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}
OFFLOAD = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}


def in_config(kind: str) -> dict[str, Any]:
    # torch_adam: FusedAdam cannot be built without a GPU.
    params = {"lr": "auto", "weight_decay": "auto", "torch_adam": True}
    return {"optimizer": {"type": kind, "params": params}}


ARMS = {
    "single": plain(),
    "ddp-2x": two(),
    "multi-cpu-2x": two("MULTI_CPU"),
    "zero2": zero(2),
    "zero2-2x": zero(2, 2),
    # Clipping
    "zero2-2x-yaml": in_yaml(2),
    "zero2-yaml-auto": in_yaml(1, gradient_clipping="auto"),
    "zero2-yaml-zero": in_yaml(1, gradient_clipping=0.0),
    "ddp-2x-clip-grad-norm": two(clip_grad_norm=0.1),
    "zero2-2x-clip-grad-norm": zero(2, 2, clip_grad_norm=0.1),
    "zero2-2x-engine-clips": zero(2, 2, {"gradient_clipping": 0.1}),
    # Number formats
    "single-autocast": plain(**BF16),
    "zero0-autocast": zero(0, engine={"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}),
    "zero0-bf16": zero(0, **BF16),
    "zero1-bf16": zero(1, **BF16),
    "zero2-bf16": zero(2, **BF16),
    "zero2-bf16-sums-fp32": zero(2, engine=FP32_SUMS, **BF16, **FOUR),
    "zero1-bf16-sums-bf16": zero(1, **BF16, **FOUR),
    "zero1-bf16-sums-fp32": zero(1, engine=FP32_SUMS, **BF16, **FOUR),
    # Optimizers
    "zero2-sgd": zero(2, optimizer="sgd"),
    "zero2-offload-sgd": zero(2, engine=OFFLOAD, optimizer="sgd"),
    "zero2-offload-sgd-kept": zero(2, engine={**OFFLOAD, "zero_force_ds_cpu_optimizer": False}, optimizer="sgd"),
    "zero2-adamw-in-config": zero(2, engine=in_config("AdamW"), optimizer="config"),
    "single-adam": plain(optimizer="adam"),
    "zero2-adam": zero(2, optimizer="adam"),
    "zero2-adam-in-config": zero(2, engine=in_config("Adam"), optimizer="config"),
    # Schedule, weights, order, batches
    "single-scheduler": plain(prepares_scheduler=True),
    "ddp-2x-scheduler": two(prepares_scheduler=True),
    "zero3-partitioned": zero(3, initial_weights="partitioned"),
    "zero3-loaded": zero(3, initial_weights="loaded"),
    "single-shuffle": plain(own_generator=False),
    "ddp-2x-shuffle": two(own_generator=False),
    "single-accumulation": plain(**FOUR),
    "zero2-accumulation": zero(2, **FOUR),
    "zero2-accumulation-ignored": zero(2, engine={"gradient_accumulation_steps": 1}, **FOUR),
}

TRAPS = {
    "unmatched-clipping": Trap(
        "DDP that does not clip against ZeRO-2 whose accelerate file says nothing of gradient_clipping",
        *("ddp-2x", "zero2-2x-yaml", "zero2-2x"),
    ),
    "clip-grad-norm-ignored": Trap(
        "accelerator.clip_grad_norm_(..., 0.1) in the script, under DDP and under ZeRO-2",
        *("ddp-2x-clip-grad-norm", "zero2-2x-clip-grad-norm", "zero2-2x-engine-clips"),
    ),
    "bf16-stage-0": Trap(
        "bf16 at ZeRO stage 0 as the baseline of stage 2; matched: stage 1",
        *("zero2-bf16", "zero0-bf16", "zero1-bf16"),
        quantities=("train_loss", "eval_loss", "optimizer_steps"),
    ),
    "two-kinds-of-bf16": Trap(
        "mixed_precision bf16 without DeepSpeed (autocast) and with it (bf16 parameters); matched: torch_autocast",
        *("single-autocast", "zero1-bf16", "zero0-autocast"),
        quantities=("train_loss", "eval_loss", "model_state_bytes"),
    ),
    "bf16-accumulation": Trap(
        "four micro batches in bf16 at ZeRO-2, where gradients add up in fp32, and at ZeRO-1, where that is not said",
        *("zero2-bf16-sums-fp32", "zero1-bf16-sums-bf16", "zero1-bf16-sums-fp32"),
    ),
    "optimizer-replaced": Trap(
        "torch's SGD under ZeRO-2 without and with optimizer offload; matched: zero_force_ds_cpu_optimizer false",
        *("zero2-sgd", "zero2-offload-sgd", "zero2-offload-sgd-kept"),
    ),
    "optimizer-in-config": Trap(
        "the script's AdamW, which spares biases and norms, and AdamW in the DeepSpeed config; matched: the script's",
        *("single", "zero2-adamw-in-config", "zero2"),
    ),
    "adam-in-config": Trap(
        "the script's Adam and type Adam in the DeepSpeed config, which is AdamW; matched: the script's",
        *("single-adam", "zero2-adam-in-config", "zero2-adam"),
    ),
    "scheduler-steps-twice": Trap(
        "a scheduler given to prepare, on one process and on two; matched: on two, not given to prepare",
        *("single-scheduler", "ddp-2x-scheduler", "ddp-2x"),
    ),
    "other-initial-weights": Trap(
        "one seed, the model built whole and under zero.Init (ZeRO-3); matched: ZeRO-3 loads the first's weights",
        *("zero2", "zero3-partitioned", "zero3-loaded"),
    ),
    "other-sample-order": Trap(
        "DataLoader(shuffle=True) on one process and on two; matched: with a generator of its own",
        *("single-shuffle", "ddp-2x-shuffle", "ddp-2x", "single"),
    ),
    "accumulation-ignored": Trap(
        "four micro batches a step in the script, and one in the DeepSpeed config; matched: four in both",
        *("single-accumulation", "zero2-accumulation-ignored", "zero2-accumulation"),
        quantities=("train_loss", "eval_loss", "optimizer_steps"),
    ),
    "one-process-instead-of-two": Trap(
        "one process with batches of 16 against two with 8, which distributed_type MULTI_CPU does not start",
        *("single", "multi-cpu-2x", "ddp-2x"),
        quantities=("train_loss", "eval_loss", "optimizer_steps", "sequences_per_program_step"),
    ),
    "clipping-auto": Trap(
        "one process that does not clip, and ZeRO-2 with gradient_clipping: auto in the accelerate file",
        *("single", "zero2-yaml-auto", "zero2"),
    ),
    "clipping-zero": Trap(
        "one process that does not clip, and ZeRO-2 with gradient_clipping: 0.0 in the accelerate file",
        *("single", "zero2-yaml-zero", "zero2"),
    ),
}


def measure(names: Sequence[str], num_seeds: int, data_dir: Path | None, output: Path) -> None:
    """Measure what the file lacks of these traps, or of all. Raises Refusal, and RunFailed where a launch failed."""
    if unknown := [name for name in names if name not in TRAPS]:
        raise Refusal(f"--trap {unknown[0]}: is unknown; take one of {', '.join(TRAPS)}")
    files.require_folder(output)
    config = RunConfig(
        **{"data": "files", "data_dir": data_dir} if data_dir else {},
        **{name: SETTINGS[name] for name in SETTINGS if name in RunConfig.model_fields},
    )
    sources.check(config)
    arms = dict.fromkeys(arm for name in names or TRAPS for arm in arms_of(TRAPS[name]))
    content = read_or_begin(output, data_dir is not None)
    extensions.use_own_folder()
    check_machine(list(arms))
    for number, arm in enumerate(arms, 1):
        measured = content["arms"].get(arm, {}).get("seeds", {})
        if lacking := [seed for seed in range(num_seeds) if str(seed) not in measured]:
            print(f"{number} of {len(arms)}: {arm}, seeds {', '.join(map(str, lacking))}", flush=True)
            add(content, arm, start(arm, lacking, data_dir))
            content["traps"] = {
                name: asdict(trap) for name, trap in TRAPS.items() if set(arms_of(trap)) <= set(content["arms"])
            }
            content["date"] = datetime.datetime.now(datetime.UTC).date().isoformat()
            files.write_whole(output, shown(content).encode())


def arms_of(trap: Trap) -> list[str]:
    """The arms that a trap compares, by name."""
    return [arm for arm in (trap.control, trap.trapped, trap.matched, trap.matched_control) if arm]


def check_machine(arms: list[str]) -> None:
    """Refuse arms that would fail on this machine, or would first compile for minutes."""
    num_gpus = len(this_machine.find().gpu_memory_bytes)
    two = [arm for arm in arms if ARMS[arm].file["num_processes"] == 2]
    if num_gpus == 1 and two:
        raise Refusal(
            f"{two[0]} needs 2 GPUs, this machine has 1; hide it (CUDA_VISIBLE_DEVICES=) to measure on the CPU"
        )
    needed = set()
    for arm in arms:
        if ARMS[arm].file["distributed_type"] == "DEEPSPEED" and not num_gpus:
            needed.add("deepspeed_shm_comm")
        if "offload_optimizer" in (ARMS[arm].json or {}).get("zero_optimization", {}):
            needed.add("cpu_adam")
    extensions.check(needed)


def read_or_begin(path: Path, from_files: bool) -> dict[str, Any]:
    """The content of the file so far, or of a new one. Raises Refusal where it was made with other settings."""
    command = "zero-study traps" + (" --data-dir DIR" if from_files else "") + " --output FILE"
    begun = {"command": command, "date": None, "machine": None, "settings": SETTINGS, "data": None}
    if not path.exists():
        return {**begun, "arms": {}, "traps": {}}
    content = trap_effects.read(path)
    asked = {arm: asked_of(arm) for arm in ARMS}
    if (
        content["settings"] != SETTINGS
        or ("--data-dir" in content["command"]) != from_files
        or any(asked.get(arm) != facts["asked"] for arm, facts in content["arms"].items())
    ):
        raise Refusal(f"{path}: was made with other settings or another kind of text; choose another --output")
    return content


def asked_of(arm: str) -> dict[str, Any]:
    """What an arm was started with, as it stands in the file."""
    chosen = ARMS[arm]
    return {"accelerate_file": chosen.file, "deepspeed_json": chosen.json, "program": PROGRAM | chosen.program}


def start(arm: str, seeds: list[int], data_dir: Path | None) -> dict[str, Any]:
    """Launch one arm, which trains the seeds one after the other; return what it wrote. Raises RunFailed."""
    asked = asked_of(arm)
    with tempfile.TemporaryDirectory(prefix="zero-study-traps-") as folder:
        file, result = Path(folder) / "accelerate.yaml", Path(folder) / "result.json"
        content = {"compute_environment": "LOCAL_MACHINE", "num_machines": 1, "machine_rank": 0} | ARMS[arm].file
        if asked["deepspeed_json"]:
            (Path(folder) / "deepspeed.json").write_text(json.dumps(asked["deepspeed_json"]))
            stage = asked["deepspeed_json"]["zero_optimization"]["stage"]
            named = {"deepspeed_config_file": f"{folder}/deepspeed.json", "zero3_init_flag": stage == 3}
            content = content | {"deepspeed_config": named}
        file.write_text(json.dumps(content))  # JSON is YAML
        job = {"program": asked["program"], "settings": SETTINGS, "seeds": seeds, "result": str(result)}
        job["data_dir"] = str(data_dir.resolve()) if data_dir else None
        (Path(folder) / "job.json").write_text(json.dumps(job))
        arguments = ["-m", "accelerate.commands.launch", "--config_file", str(file), "--main_process_port", "0"]
        arguments += [str(ARM), f"{folder}/job.json"]
        environment = QUIET | {"OMP_NUM_THREADS": "1"} | os.environ
        remedy = "try fewer --seeds at once: the file keeps what it has"
        return child.run_python(arguments, result, arm, TIMEOUT_SECONDS, remedy, environment)


def add(content: dict[str, Any], arm: str, launched: dict[str, Any]) -> None:
    """Put one launch into the file's content. Raises Refusal where it does not belong to what is in there."""
    facts = {"machine": {name: launched["machine"][name] for name in SAME}, "data": launched["data"]}
    for key, value in facts.items():
        content[key] = content[key] or value
        if content[key] != value:
            raise Refusal(f"{key}: the file has {content[key]}, this launch has {value}; choose another --output")
    known = content["arms"].setdefault(arm, {"asked": asked_of(arm), "ran": launched["ran"], "seeds": {}})
    if known["ran"] != launched["ran"]:
        raise Refusal(f"{arm}: the file has {known['ran']}, this launch has {launched['ran']}; choose another --output")
    known["seeds"] |= launched["seeds"]


def shown(content: dict[str, Any]) -> str:
    """JSON with lists of plain values on one line."""
    text = json.dumps(content, indent=1, allow_nan=False)
    return re.sub(r"\[[^][{}]*\]", lambda match: re.sub(r"\s*\n\s*", " ", match[0]), text) + "\n"
