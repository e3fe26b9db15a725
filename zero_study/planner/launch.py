"""Start the recommended strategy: the command, the files and the settings that a training program needs.

The options of each program for optimizer, attention, loss and so on are in `stack_tables`. The names of options are
those of accelerate 1.15, transformers 5.23, TRL 1.10, axolotl 0.18, torchtitan 0.3.0 and DeepSpeed 0.19.8.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from zero_study import files, terminal
from zero_study.errors import Refusal
from zero_study.files import FILL_IN
from zero_study.planner import reasons, stack_options
from zero_study.planner.stack_tables import Parts
from zero_study.planner.units import unit_of
from zero_study.strategy import train_job
from zero_study.theory import adapters
from zero_study.theory.shapes.adapter import ALL_LINEAR

if TYPE_CHECKING:
    from zero_study.planner.choose import Advice, StrategyPrediction
    from zero_study.theory.engine import Engine
    from zero_study.theory.stacks import StackName

DATA_TYPES = {"data_types": {"grad_accum_dtype": "fp32"}}
CLIPPING = 1.0  # what accelerate replaces "auto" by
NVME_PATH = "/FOLDER/ON/A/FAST/DISK"
# How a program freezes the vision tower. The projector, which Qwen calls merger, is inside its tower, and is trained.
TOWER = "model.model.vision_tower.requires_grad_(False)"
TOWER_OF_QWEN = (
    "model.model.visual.requires_grad_(False), and requires_grad_(True) for its merger and its deepstack_merger_list, "
    "which Qwen3-VL has"
)
# What keeps PEFT from adding adapters to a frozen vision tower and to its projector.
WITHOUT_TOWER = 'exclude_modules=r".*(visual|vision_tower|multi_modal_projector).*"'
PORT = 29500  # at which all machines meet
MOST_COMMANDS = 4  # of machines that are printed in full
SCRIPT_OF_TRL = "sft.py"
OWN_PROGRAM = "train.py: your own program"
ON_EVERY_MACHINE = (
    f"{FILL_IN}: the address at which the other machines reach the first one. Start a command on every machine"
)


@dataclass(frozen=True)
class Launch:
    """How a program starts a training with the recommended strategy."""

    stack: str
    command: str  # the lines of all machines, if they differ
    files: dict[str, str]  # content by path. The first one is what `--write` names
    settings: list[str]  # what the program has to set itself, and what to do on other machines
    pod_command: str = ""  # in each pod of a cluster; empty if accelerate does not start the program


def launch(advice: Advice, path: Path | None = None) -> Launch | None:
    """Return how the requested program (`Request.stack`) starts the recommended strategy. None if none is recommended.

    `path` is the name of the file that the command reads. By default it is the name of the strategy, or another name if
    the strategy is the user's own file.

    Raises Refusal if there is no way to start the strategy with this program.
    """
    if advice.recommended is None:
        return None
    option = advice.recommended
    accumulates = option.prediction.job.gradient_accumulation_steps > 1
    training = advice.request.training(option.strategy, option.shape, accumulates)
    name = "axolotl" if training.stack == "axolotl" else option.strategy.file_name
    path = path or Path(f"{name}{'.json' if training.stack == 'deepspeed' else '.yaml'}")
    start = _LAUNCHES[training.stack](advice, option, path, stack_options.parts(training))
    start.settings.extend([ON_EVERY_MACHINE] if FILL_IN in f"{start.command}{start.files}" else [])
    return start


def write(advice: Advice, path: Path, for_kubernetes: bool = False) -> list[Path]:
    """Write the files that the launch command of the recommended training reads; return their paths.

    If the advice recommends a change of the request, the files are for the training with the change. For Kubernetes,
    the last file is the manifest of a TrainJob.

    Raises Refusal if no strategy is recommended, if the program needs no file, or if a file cannot be written.
    """
    stack = advice.request.stack
    check_free(path, stack)
    answer, advice = reasons.answer(advice), advice.to_start
    start = launch(advice, path)
    if start is None:
        raise Refusal(f"--write {path}: there is no recommended strategy to write. {answer}")
    if not start.files:
        raise Refusal(f"--write {path}: {stack} needs no file, only a command. Leave --write out.")
    if for_kubernetes:
        start.files.update(_for_kubernetes(advice, start, path))
    # DDP's settings are read from a JSON with the same name, without being requested.
    beside = path.with_suffix(".json")
    if (
        advice.recommended is not None
        and advice.recommended.strategy.distributed_type == "MULTI_GPU"
        and beside.exists()
    ):
        raise Refusal(
            f"--write {path}: {beside} already exists, and DDP would read it together with this file. Use another name."
        )
    for name in list(start.files)[1:]:
        if Path(name).exists():
            raise Refusal(f"--write {path}: {name}, which would be written too, already exists. Use another name.")
    try:
        for name, text in reversed(start.files.items()):
            files.write_whole(Path(name), text.encode())
    except OSError as error:
        raise Refusal(f"--write {path}: the file cannot be written ({error.strerror}). Use another name.") from None
    return [Path(name) for name in start.files]


def _for_kubernetes(advice: Advice, start: Launch, path: Path) -> dict[str, str]:
    """Return the files of a launch for Kubernetes, with the manifest."""
    if not start.pod_command:
        raise Refusal(f"--kubernetes: accelerate does not start {start.stack}. Use --stack accelerate, trainer or trl.")
    box, name = advice.box, train_job.name_of(path.stem)
    comment = f"{path.stem} for {advice.shape.name} on {box.num_gpus} x {box.gpu.name}"
    manifest = train_job.manifest(name, comment, box.num_nodes, box.gpus_per_node, box.gpus_per_node, start.pod_command)
    files = {
        place: text.replace(f": {FILL_IN}\n", f": {name}-node-0-0.{name}\n") for place, text in start.files.items()
    }
    return {**files, str(path.with_suffix(".trainjob.yaml")): manifest}


def check_free(path: Path, stack: StackName) -> None:
    """Raise Refusal if the launch file cannot be written to a path.

    The path must not exist, its folder must exist, and its name must have the ending that the program expects.
    """
    if stack == "deepspeed" and path.suffix != ".json":
        raise Refusal(f"--write {path}: DeepSpeed reads a JSON file. Use a name that ends in .json.")
    if stack != "deepspeed" and path.suffix == ".json":
        raise Refusal(
            f"--write {path}: accelerate would read a file of this name as JSON, but it is YAML. Use a name that "
            "ends in .yaml."
        )
    if path.exists():
        raise Refusal(f"--write {path}: the file already exists. Use another name.")
    if not path.parent.is_dir():
        raise Refusal(f"--write {path}: the folder {path.parent} does not exist. Create it first.")


# ---------------------------------------------------------------- programs that accelerate launches


def _accelerate(advice: Advice, option: StrategyPrediction, path: Path, parts: Parts) -> Launch:
    job = option.prediction.job
    group = advice.request.group
    settings = [
        OWN_PROGRAM,
        f"batches of {unit_of(option.shape).batch(int(job.micro_batch_size), job.sequence_length)} on each {group}",
    ]
    steps, engine = job.gradient_accumulation_steps, option.prediction.engine
    arguments = [f"gradient_accumulation_steps={steps}"] if steps > 1 else []
    if steps > 1 and engine.kind == "fsdp" and engine.syncs_each_micro_step:
        plugin = f"GradientAccumulationPlugin(num_steps={steps}, sync_each_batch=True)"
        arguments = [f"gradient_accumulation_plugin={plugin}"]
    arguments += parts.accelerator
    if arguments:
        settings.append(f"Accelerator({', '.join(arguments)})")
    settings += _of_images(advice)
    settings += _of_own_program(option, parts)
    return _with_file(advice, option, path, "train.py", settings, [])


def _of_images(advice: Advice) -> list[str]:
    """Return what a program has to set to train on texts with images, and to freeze the vision tower."""
    shape, settings = advice.shape, []
    if shape.num_images and shape.with_image is not None:
        images = terminal.count(shape.num_images, "image")
        settings.append(
            f"{images} of {shape.with_image.size} in each sequence, {shape.num_image_tokens:,} of its tokens"
        )
    if advice.request.freeze_vision_tower and shape.adapter is None:
        model_type = str((shape.config or {}).get("model_type"))
        settings.append(TOWER_OF_QWEN if model_type.startswith("qwen") else TOWER)
    return settings


def _trainer(advice: Advice, option: StrategyPrediction, path: Path, parts: Parts) -> Launch:
    job, kind = option.prediction.job, _type_of(option)
    # transformers 5 also calls the last one --activation_checkpointing. TRL's default for it is True.
    flags = [
        f"--per_device_train_batch_size {job.micro_batch_size}",
        f"--gradient_accumulation_steps {job.gradient_accumulation_steps}",
        f"--{kind} True" if _is_option_of_trainer(option) else "--bf16 False",
        *(["--tf32 True"] if option.prediction.engine.precision == "tf32" else []),
        f"--gradient_checkpointing {job.checkpoints_all}",
    ]
    of_program = [*_of_images(advice), *parts.lines]
    if advice.request.stack == "trainer":
        settings = [f"{OWN_PROGRAM}, which passes these options to TrainingArguments"]
        settings += [] if option.shape.reads_images else [f"sequences of {job.sequence_length:,.0f} tokens"]
        settings += [*_of_the_model(option, parts), *of_program]  # TRL loads models in fp32
        return _with_file(advice, option, path, "train.py", settings, [*flags, *parts.flags])
    # Without packing, most sequences are shorter than the prediction assumes.
    flags += [f"--max_length {job.sequence_length:.0f}", "--packing True", *_lora_flags(advice)]
    if option.shape.adapter is not None or option.prediction.engine.precision == "pure-bf16":
        flags.append(f"--dtype {_NAMES_OF_TYPES[kind]}")  # fp32 is TRL's default
    flags.insert(0, "--model_name_or_path MODEL --dataset_name DATASET")
    of_program += [LOADED_BY_SCRIPT] if option.loads_on_host else []
    settings = ["MODEL and DATASET: names on the Hugging Face hub, or folders", *of_program]
    if of_program:
        settings.insert(1, f"{SCRIPT_OF_TRL}: a copy of trl/scripts/sft.py, which TRL installs, with these changes")
    return _with_file(advice, option, path, SCRIPT_OF_TRL if of_program else "", settings, [*flags, *parts.flags])


def _is_option_of_trainer(option: StrategyPrediction) -> bool:
    """Whether transformers' Trainer needs an option for 16 bits.

    DeepSpeed's own autocast is set in its JSON, and Trainer's option would replace it by 16-bit parameters. Trainer has
    no option for fp8, which it takes from the accelerate file. It refuses a JSON with another type than its option's.
    """
    engine, kind = option.prediction.engine, _type_of(option)
    if kind not in ("bf16", "fp16") or _is_autocast(option):
        return False
    return _is_mixed(option) or engine.kind == "deepspeed"


def _study(advice: Advice, option: StrategyPrediction, path: Path, parts: Parts) -> Launch:
    job, precision = option.prediction.job, option.prediction.engine.precision
    flags = [
        f"--sequence-length {job.sequence_length}",
        f"--global-batch-size {_global_batch(option)}",
        f"--micro-batch-size {job.micro_batch_size}",
        f"--precision {precision}",
        *(["--activation-checkpointing"] if job.checkpoints_all else []),
        *_lora_flags(advice),
        *parts.flags,
    ]
    return _with_file(advice, option, path, "study/train.py", [], flags)


def _with_file(
    advice: Advice,
    option: StrategyPrediction,
    path: Path,
    script: str,  # empty for TRL's own
    settings: list[str],
    flags: list[str],
) -> Launch:
    """Return a launch by `accelerate launch`, with the accelerate file and the JSON that belongs to it."""
    box, engine, chosen, stack = advice.box, option.prediction.engine, option.strategy, advice.request.stack
    settings = [*settings, *_of_adapters(advice)]
    begin = ["accelerate launch", f"--config_file {path}"] if script else ["trl sft", f"--accelerate_config {path}"]
    end = [*([script] if script else []), *flags]
    command = _of_machines(advice, begin, end)
    # What differs between machines is in the command, so that all of them read the same file.
    content = {**chosen.content, "num_processes": box.num_gpus, "num_machines": box.num_nodes}
    if box.num_nodes > 1:
        content["main_process_ip"] = content.get("main_process_ip") or FILL_IN
        content["main_process_port"] = content.get("main_process_port") or PORT
    ranks = option.prediction.job.sequence_ranks
    if not engine.is_fsdp1 and (chosen.mesh or ranks > 1 or (engine.replicas > 1 and engine.kind == "fsdp")):
        content["parallelism_config"] = {**(content.get("parallelism_config") or {}), **_mesh(engine, ranks)}
    if engine.replicas > 1 and engine.kind != "fsdp":
        raise Refusal(
            f"--write {path}: DeepSpeed can only shard stages 1 and 2 over all GPUs. Leave --shard-group-size out."
        )
    json_path, in_json = path.with_suffix(".json"), _json_of(option, stack)
    content |= _section_of_deepspeed(content, stack, None if in_json is None else json_path)
    if in_json is not None:  # accelerate refuses `mixed_precision` in a file that names a DeepSpeed JSON
        content.pop("mixed_precision", None)
    else:
        content["mixed_precision"] = _mixed_precision(option, stack)
    # The launcher is started by hand on each machine, and not by pdsh, which is accelerate's default.
    if box.num_nodes > 1 and "deepspeed_config" in content:
        content["deepspeed_config"] = {**content["deepspeed_config"], "deepspeed_multinode_launcher": "standard"}
    json_content = chosen.ddp_json if in_json is None else in_json
    if in_json is not None and "nvme" in (engine.offload_optimizer, engine.offload_param):
        settings.append(f"nvme_path: a folder on a fast disk, in place of {NVME_PATH}")
    if chosen.ddp_json is not None:  # DDP's YAML file cannot name a JSON file, so it is found by its name
        settings.append(
            f"zero-study reads DDP's settings from {json_path.name}. In your own program, use "
            "DistributedDataParallelKwargs."
        )
    comments = [
        f"{chosen.name} for {advice.shape.name} on {box.num_gpus} x {box.gpu.name}, by `zero-study advise`.",
        "Start it with",
        *(f"  {line}" for line in command.split("\n")),
        *(["Also needed:"] if settings else []),
        *(f"  {setting}" for setting in settings),
    ]
    text = "".join(f"# {line}\n" for line in comments) + yaml.safe_dump(content, sort_keys=False)
    written = {str(path): text}
    if json_content is not None:
        written[str(json_path)] = json.dumps(json_content, indent=2) + "\n"
    return Launch(stack, command, written, settings, _lines([*begin, *train_job.FLAGS, *end]))


def _of_machines(advice: Advice, begin: list[str], end: list[str]) -> str:
    """Return the command of `accelerate launch` for each machine."""
    nodes = advice.box.num_nodes
    if nodes == 1:
        return _lines([*begin, *end])
    lines = []
    for rank in range(min(nodes, MOST_COMMANDS)):
        lines.append(f"# on machine {rank}:\n{_lines([*begin, f'--machine_rank {rank}', *end])}")
    if nodes > MOST_COMMANDS:
        lines.append(f"# on machines {MOST_COMMANDS} to {nodes - 1}: the same, with their own --machine_rank")
    return "\n".join(lines)


def _mesh(engine: Engine, sequence_ranks: int) -> dict[str, Any]:
    """Return the sizes of accelerate's `parallelism_config`. Ranks that share a sequence also shard the model."""
    sizes = {
        "parallelism_config_dp_replicate_size": engine.replicas,
        "parallelism_config_dp_shard_size": engine.num_shards // sequence_ranks,
    }
    if sequence_ranks == 1:
        return sizes
    if engine.kind == "fsdp":
        return {**sizes, "parallelism_config_cp_size": sequence_ranks}
    return {
        **sizes,
        "parallelism_config_sp_size": sequence_ranks,
        "parallelism_config_sp_backend": "deepspeed",
        "parallelism_config_sp_attn_implementation": "sdpa",
    }


def _mixed_precision(option: StrategyPrediction, stack: str) -> str:
    """Return the precision that an accelerate file states.

    This project's trainer takes the precision from its own option, and refuses a file that contradicts it. Only its
    autocast under DeepSpeed cannot be stated in the file.
    """
    if not _is_mixed(option) or (stack == "study" and _is_autocast(option)):
        return "no"
    return _type_of(option)


def _json_of(option: StrategyPrediction, stack: str) -> dict[str, Any] | None:
    """Return the DeepSpeed JSON that an accelerate file names, with the precision; None if it needs none.

    DeepSpeed's autocast, its bf16 without fp32 masters, and the type in which it accumulates gradients can be requested
    only in its JSON.
    """
    chosen = option.strategy
    if chosen.deepspeed_json is not None:
        if stack == "study":  # whose own options decide the type in which gradients are accumulated
            return {**chosen.deepspeed_json, **_precision_sections(option)}
        types = DATA_TYPES if _accumulates_in_fp32(option) else {}
        return {**_without_auto(option, stack), **_precision_sections(option), **types}
    is_pure = option.prediction.engine.kind == "deepspeed" and option.prediction.engine.precision == "pure-bf16"
    if stack == "study" or not (is_pure or _is_autocast(option) or _accumulates_in_fp32(option)):
        return None
    batch = dict.fromkeys(
        ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto"
    )
    own = {"gradient_clipping": CLIPPING} if stack == "accelerate" else {}
    return {**batch, **own, **_deepspeed_content(option)}


def _section_of_deepspeed(content: dict[str, Any], stack: str, json_path: Path | None) -> dict[str, Any]:
    """Return the section for DeepSpeed of an accelerate file. It names the JSON, if there is one."""
    section = content.get("deepspeed_config")
    if section is None:
        return {}
    if stack == "accelerate" and section.get("gradient_clipping") == "auto":
        section = {**section, "gradient_clipping": CLIPPING}
    if json_path is not None:  # accelerate refuses other settings of DeepSpeed in a file that names a JSON
        retained = ("zero3_init_flag", "deepspeed_multinode_launcher")
        section = {"deepspeed_config_file": str(json_path)} | {key: section[key] for key in retained if key in section}
    return {"deepspeed_config": section}


# ---------------------------------------------------------------- programs with their own launcher


def _axolotl(advice: Advice, option: StrategyPrediction, path: Path, parts: Parts) -> Launch:
    """Use the keys of axolotl's schemas, and of its guide about several GPUs."""
    box, engine, job = advice.box, option.prediction.engine, option.prediction.job
    is_option, kind = _is_option_of_trainer(option), _type_of(option)
    more_types = {"pure-bf16": "bfloat16", "fp8": "fp8", "tf32": "tf32"}
    if engine.kind == "deepspeed":  # which reads this type from its JSON
        del more_types["pure-bf16"]
    content: dict[str, Any] = {
        "base_model": "MODEL",  # which also shows that the file is axolotl's
        "sequence_len": int(job.sequence_length),
        "sample_packing": True,
        "micro_batch_size": job.micro_batch_size,
        "gradient_accumulation_steps": job.gradient_accumulation_steps,
        "bf16": (is_option and kind == "bf16") or kind == "fp8",
        "fp16": is_option and kind == "fp16",
        **({more_types[engine.precision]: True} if engine.precision in more_types else {}),
        "gradient_checkpointing": bool(job.activation_checkpointing),
        **_axolotl_keys(advice),
        **parts.keys,
    }
    written = {}
    if engine.kind == "fsdp":
        content["fsdp_version"] = 2
        content["fsdp_config"] = {
            "reshard_after_forward": engine.reshard_after_forward,
            "offload_params": engine.offload_param != "none",
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "state_dict_type": "SHARDED_STATE_DICT",
            # axolotl then loads on the host, in the first process only.
            **({"cpu_ram_efficient_loading": True} if option.loads_on_host else {}),
        }
        if engine.replicas > 1:
            content |= {"dp_replicate_size": engine.replicas, "dp_shard_size": engine.num_shards}
    if engine.kind == "deepspeed":
        json_path = str(path.with_suffix(".json"))
        content["deepspeed"] = json_path
        # "auto" is filled in by transformers' integration of DeepSpeed.
        batch = dict.fromkeys(
            ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto"
        )
        written[json_path] = json.dumps(_deepspeed_content(option) | batch, indent=2) + "\n"
    command = f"axolotl train {path}"
    if box.num_nodes > 1:
        command = _lines([command, "--launcher torchrun --", *_torchrun(advice)])
    alpha = "" if advice.shape.adapter is None else ", lora_alpha"
    settings = [f"MODEL, datasets{alpha} and the learning rate, in the same file", *parts.lines]
    return Launch("axolotl", command, {str(path): yaml.safe_dump(content, sort_keys=False), **written}, settings)


def _torchtitan(advice: Advice, option: StrategyPrediction, path: Path, parts: Parts) -> Launch:
    """Use the options of `TrainingConfig` and `ParallelismConfig` in torchtitan 0.3.0."""
    engine, job = option.prediction.engine, option.prediction.job
    if engine.kind == "deepspeed":
        raise Refusal(f"torchtitan cannot run {option.strategy.name}. Use --strategy fsdp2.")
    shards, kind = engine.num_shards if engine.kind == "fsdp" else 1, job.activation_checkpointing
    checkpointing = "selective" if isinstance(kind, str) else "full" if kind else "none"
    flags = [
        f"--training.local_batch_size {job.micro_batch_size}",
        f"--training.global_batch_size {_global_batch(option)}",
        f"--training.seq_len {job.sequence_length:.0f}",
        f"--parallelism.data_parallel_replicate_degree {engine.world_size // shards}",
        f"--parallelism.data_parallel_shard_degree {shards}",
    ]
    if engine.kind == "fsdp":
        policy = "always" if engine.reshard_after_forward else "never"
        flags.append(f"--parallelism.fsdp_reshard_after_forward {policy}")
    if option.offloads:
        flags.append("--training.enable_cpu_offload")
    flags += [*parts.flags, f"activation-checkpoint:{checkpointing}"]
    begin = ["torchrun", *_torchrun(advice), "-m torchtitan.train", "--module MODULE", "--config CONFIG"]
    settings = ["MODULE and CONFIG: the model in torchtitan, for example llama3 and llama3_8b", *parts.lines]
    return Launch("torchtitan", _lines([*begin, *flags]), {}, settings)


def _deepspeed(advice: Advice, option: StrategyPrediction, path: Path, parts: Parts) -> Launch:
    box, engine, job = advice.box, option.prediction.engine, option.prediction.job
    if engine.kind != "deepspeed":
        raise Refusal(f"DeepSpeed's launcher cannot run {option.strategy.name}. Use --strategy zero3.")
    content = {
        "train_micro_batch_size_per_gpu": job.micro_batch_size,
        "gradient_accumulation_steps": job.gradient_accumulation_steps,
        "gradient_clipping": CLIPPING,
        **_deepspeed_content(option),
        **parts.json,
    }
    machines = f"--num_gpus {box.num_gpus}" if box.num_nodes == 1 else "--hostfile hostfile"
    command = f"deepspeed {machines} train.py --deepspeed --deepspeed_config {path}"
    settings = [OWN_PROGRAM]
    settings += [] if option.shape.reads_images else [f"sequences of {job.sequence_length:,.0f} tokens"]
    settings += _of_own_program(option, parts)
    settings += _of_images(advice)
    if "nvme" in (engine.offload_optimizer, engine.offload_param):
        settings.append(f"nvme_path: a folder on a fast disk, in place of {NVME_PATH}")
    if box.num_nodes > 1:
        settings.append(f"hostfile: one line per machine, NAME slots={box.gpus_per_node}; start on one of them only")
    settings += _of_adapters(advice)
    return Launch("deepspeed", command, {str(path): json.dumps(content, indent=2) + "\n"}, settings)


def _deepspeed_content(option: StrategyPrediction) -> dict[str, Any]:
    """Return precision and ZeRO settings as sections of a DeepSpeed JSON, with numbers in place of "auto"."""
    engine, chosen = option.prediction.engine, option.strategy
    own = dict((chosen.deepspeed_json or {}).get("zero_optimization", {}))
    sizes = {
        "reduce_bucket_size": engine.reduce_bucket_size,
        "stage3_prefetch_bucket_size": engine.prefetch_bucket_size,
        "stage3_param_persistence_threshold": engine.persistence_threshold,
    }
    zero = {
        "stage": engine.zero_stage,
        **{key: sizes.get(key, value) if value == "auto" else value for key, value in own.items()},
    }
    for target in ("optimizer", "param"):
        device = getattr(engine, f"offload_{target}")
        if device != "none":
            section = zero.get(f"offload_{target}", {"device": device, "pin_memory": True})
            zero[f"offload_{target}"] = _offload_section(section, engine)
    types = DATA_TYPES if _accumulates_in_fp32(option) else {}
    return {**_precision_sections(option), **types, "zero_optimization": zero}


def _precision_sections(option: StrategyPrediction) -> dict[str, Any]:
    """Return the sections of a DeepSpeed JSON for the precision, which is stated also if it is fp32."""
    kind = _type_of(option)
    if _is_autocast(option):
        dtype = {"bf16": "bfloat16", "fp16": "float16"}[kind]
        return {"bf16": {"enabled": False}, "torch_autocast": {"enabled": True, "dtype": dtype}}
    if option.prediction.engine.precision == "pure-bf16":
        return {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
    return {kind: {"enabled": True}} if kind != "fp32" else {"bf16": {"enabled": False}}


def _without_auto(option: StrategyPrediction, stack: str) -> dict[str, Any]:
    """Return the JSON of a strategy with values in place of the "auto" that only this project's trainer fills in."""
    content = dict(option.strategy.deepspeed_json or {})
    if stack == "accelerate" and content.get("gradient_clipping") == "auto":
        content["gradient_clipping"] = CLIPPING
    zero = dict(content["zero_optimization"])
    for target in ("offload_optimizer", "offload_param"):
        if target in zero:
            zero[target] = _offload_section(zero[target], option.prediction.engine)
    return content | {"zero_optimization": zero}


def _offload_section(section: dict[str, Any], engine: Engine) -> dict[str, Any]:
    """Return a section of a DeepSpeed JSON with a size of buffers, and with a path if it offloads to NVMe."""
    if section.get("buffer_size") == "auto":
        section = {**section, "buffer_size": engine.param_swap_buffer_size}
    return {"nvme_path": NVME_PATH, **section} if section.get("device") == "nvme" else section


# ---------------------------------------------------------------- shared parts


def _type_of(option: StrategyPrediction) -> str:
    """Return the type of products as accelerate names it: fp32, fp16, bf16 or fp8."""
    kind = option.prediction.engine.precision.removeprefix("pure-").removesuffix("-autocast")
    return "fp32" if kind == "tf32" else kind


def _is_autocast(option: StrategyPrediction) -> bool:
    """Whether DeepSpeed trains fp32 parameters under its own autocast."""
    engine = option.prediction.engine
    return engine.kind == "deepspeed" and engine.precision.endswith("-autocast")


def _accumulates_in_fp32(option: StrategyPrediction) -> bool:
    """Whether DeepSpeed accumulates 16-bit gradients in fp32, which is not its default."""
    engine = option.prediction.engine
    return engine.kind == "deepspeed" and engine.accumulation_bytes > engine.parameter_bytes


def _is_mixed(option: StrategyPrediction) -> bool:
    """Whether the engine multiplies in 16 bits while the optimizer updates fp32 weights."""
    return option.prediction.engine.precision not in ("fp32", "tf32", "pure-bf16")


# The types of products by the names that PyTorch has for them.
_NAMES_OF_TYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp8": "bfloat16"}


def _of_the_model(option: StrategyPrediction, parts: Parts) -> list[str]:
    """Return how the model has to be loaded.

    transformers 5 loads it in the type of its checkpoint, often bf16. DeepSpeed casts it for 16-bit parameters, and
    refuses it for fp32 parameters.
    """
    engine, adapter, kind = option.prediction.engine, option.shape.adapter, _type_of(option)
    dtype = "float32" if engine.kind != "deepspeed" or engine.parameter_bytes == 4 else None
    if adapter is not None and kind != "fp32":
        dtype = None if adapter.is_quantized else _NAMES_OF_TYPES[kind]
    elif engine.precision == "pure-bf16":
        dtype = "bfloat16"
    arguments = [*([] if dtype is None else [f"dtype=torch.{dtype}"]), *parts.model]
    return [f"from_pretrained(..., {', '.join(arguments)})"] if arguments else []


def _of_own_program(option: StrategyPrediction, parts: Parts) -> list[str]:
    """Return what the user's own program sets, because no file of an engine can."""
    settings = _of_the_model(option, parts)
    if option.prediction.engine.precision == "tf32":
        settings.append('torch.set_float32_matmul_precision("high")')
    if option.prediction.job.checkpoints_all:
        settings.append("model.gradient_checkpointing_enable()")
    return [*settings, *parts.lines]


# What transformers needs to load weights in four bits, as the prediction assumes.
FOUR_BITS = (
    'load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, '
    "bnb_4bit_compute_dtype=torch.bfloat16"
)
# Engines that shard the weights shard quantized ones only if they are stored in a floating-point type.
SHARDED_STORAGE = ", bnb_4bit_quant_storage=torch.bfloat16"
# transformers 5.23 loads quantized weights onto the current GPU unless it is told otherwise (quantizer_bnb_4bit.py), in
# every process. FSDP2 then moves one block after another from the host to the GPU, and shards it.
ON_HOST = 'device_map={"": "cpu"}, '
# TRL 1.10's script for supervised fine-tuning has no option for this, and SFTTrainer sets device_map to None. A model
# that the script has loaded stays where it is.
LOADED_BY_SCRIPT = (
    f"in {SCRIPT_OF_TRL}, because it would load all 4-bit weights onto each GPU: SFTTrainer(model=model, ...), where "
    f"model = AutoModelForCausalLM.from_pretrained(NAME, {ON_HOST}"
    "quantization_config=get_quantization_config(model_args), **training_args.model_init_kwargs)"
)
# Programs with options or keys for adapters.
WITH_OPTIONS: tuple[StackName, ...] = ("trl", "axolotl", "study")


def _of_adapters(advice: Advice) -> list[str]:
    """Return what a program without options for adapters has to set."""
    request, adapter = advice.request, advice.shape.adapter
    if adapter is None or request.stack in WITH_OPTIONS:
        return []
    arguments = [f"r={adapter.rank}"]
    if adapter.targets is not None:
        names = adapter.targets[0] if adapter.targets == (ALL_LINEAR,) else list(adapter.targets)
        arguments.append(f"target_modules={json.dumps(names)}")
    arguments += [WITHOUT_TOWER] if request.freeze_vision_tower else []
    arguments += [f"lora_dropout={request.lora_dropout:g}"] if adapter.has_dropout else []
    arguments += ["use_dora=True"] if adapter.kind == "dora" else []
    arguments += [f"modules_to_save={json.dumps(list(adapter.modules_to_save))}"] if adapter.modules_to_save else []
    model = "model"
    settings = []
    if adapter.is_quantized:
        storage = SHARDED_STORAGE if _shards_weights(advice) else ""
        place = ON_HOST if advice.recommended is not None and advice.recommended.loads_on_host else ""
        settings.append(f"from_pretrained(..., {place}quantization_config=BitsAndBytesConfig({FOUR_BITS}{storage}))")
        if advice.recommended is not None and adapter.has_fp32_stream(advice.recommended.prediction.engine):
            model = "prepare_model_for_kbit_training(model)"
    return [*settings, f"peft.get_peft_model({model}, LoraConfig({', '.join(arguments)}))"]


def _shards_weights(advice: Advice) -> bool:
    return advice.recommended is not None and advice.recommended.prediction.engine.zero_stage == 3


def _lora_flags(advice: Advice) -> list[str]:
    """Return the options for adapters of TRL and of this project's trainer, as far as their names agree."""
    request, adapter = advice.request, advice.shape.adapter
    if adapter is None:
        return []
    is_trl = request.stack == "trl"
    names = None if adapter.targets is None else ",".join(adapter.targets)
    flags = ["--use_peft True", f"--lora_r {request.lora_rank}"] if is_trl else [f"--lora-rank {request.lora_rank}"]
    if names is not None:
        flags.append(f"--lora_target_modules {names.replace(',', ' ')}" if is_trl else f"--lora-target {names}")
    dropout = f"{'--lora_dropout' if is_trl else '--lora-dropout'} {request.lora_dropout:g}"
    flags += [dropout] if request.lora_dropout or is_trl else []  # TRL's default is 0.05
    flags += ["--use_dora True"] if request.adapter == "dora" else []
    if request.load_in_4bit:
        flags += ["--load_in_4bit True", "--use_bnb_nested_quant True"] if is_trl else ["--load-in-4bit"]
        flags += ["--bnb_4bit_quant_storage bfloat16"] if is_trl and _shards_weights(advice) else []
    return flags


def _axolotl_keys(advice: Advice) -> dict[str, Any]:
    """Return the keys for adapters of an axolotl file."""
    request, adapter = advice.request, advice.shape.adapter
    if adapter is None:
        return {}
    keys: dict[str, Any] = {
        "adapter": "qlora" if request.load_in_4bit else "lora",
        "lora_r": adapter.rank,
        "lora_dropout": request.lora_dropout,
    }
    if adapter.targets == (ALL_LINEAR,):
        keys["lora_target_linear"] = True
    else:  # axolotl passes an empty list if the file names none, and PEFT then has no default
        keys["lora_target_modules"] = list(adapters.target_names(advice.shape, adapter))
    keys |= {"load_in_4bit": True} if request.load_in_4bit else {}
    return keys | ({"peft_use_dora": True} if adapter.kind == "dora" else {})


def _global_batch(option: StrategyPrediction) -> int:
    job = option.prediction.job
    groups = option.prediction.box.num_gpus // job.sequence_ranks
    return int(job.micro_batch_size * job.gradient_accumulation_steps * groups)


def _torchrun(advice: Advice) -> list[str]:
    box = advice.box
    if box.num_nodes == 1:
        return ["--standalone", f"--nproc_per_node {box.num_gpus}"]
    meet = [f"--rdzv_endpoint {FILL_IN}:{PORT}", "--rdzv_backend c10d"]
    return [f"--nnodes {box.num_nodes}", f"--nproc_per_node {box.gpus_per_node}", *meet]


def _lines(words: list[str], columns: int = 74) -> str:
    """Join parts of a command, with backslashes where a line would be longer than `columns`."""
    lines = [""]
    for word in words:
        if lines[-1] and len(lines[-1]) + len(word) + 3 > columns:
            lines[-1] += " \\"
            lines.append(f"    {word}")
        else:
            lines[-1] = f"{lines[-1]} {word}" if lines[-1] else word
    return "\n".join(lines)


_LAUNCHES: dict[StackName, Callable[[Advice, StrategyPrediction, Path, Parts], Launch]] = {
    "accelerate": _accelerate,
    "trainer": _trainer,
    "trl": _trainer,
    "axolotl": _axolotl,
    "torchtitan": _torchtitan,
    "deepspeed": _deepspeed,
    "study": _study,
}
