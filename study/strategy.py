"""Which strategy is this, is it fit to run here, and how does it become an Accelerator?

A strategy is one accelerate file. It is read strictly, because accelerate and DeepSpeed ignore what they do not know
(a nested typo, an NVMe path in the YAML) and then silently run something else.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import psutil
import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from study import extensions
from study.config import SIZES, Refusal, RunConfig, describe, swap_buffer_size
from study.workloads import sources

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator

CONFIGS = Path(__file__).resolve().parent.parent / "accelerate_configs"

Device = Literal["none", "cpu", "nvme"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def _number_or_auto(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    if value == "auto":
        return value
    try:
        return validate(value)
    except ValidationError as error:
        # A union would name its branches in the key.
        raise PydanticCustomError("or_auto", "{text} or 'auto'", {"text": error.errors()[0]["msg"]}) from None


OrAuto = WrapValidator(_number_or_auto)  # only where the study fills "auto" in
# DeepSpeed's own examples write 5e8.
Count = Annotated[int, BeforeValidator(lambda n: int(n) if isinstance(n, float) and n.is_integer() else n), Field(ge=0)]


class _DeepSpeedSection(_Strict):
    """The deepspeed_config section of an accelerate file, without the keys that accelerate drops."""

    deepspeed_config_file: str | None = None
    zero_stage: int | None = Field(None, ge=0, le=3)
    offload_optimizer_device: Device = "none"
    offload_param_device: Device = "none"
    zero3_init_flag: bool = False
    zero3_save_16bit_model: bool = False
    gradient_accumulation_steps: int | None = None
    gradient_clipping: Annotated[float, OrAuto] = "auto"
    deepspeed_multinode_launcher: str | None = None
    deepspeed_hostfile: str | None = None


class _FSDPSection(_Strict):
    """The fsdp_config section of an accelerate file; a key left out would be the launcher's default, made for FSDP1."""

    fsdp_version: Literal[2]
    fsdp_reshard_after_forward: bool
    fsdp_auto_wrap_policy: Literal["TRANSFORMER_BASED_WRAP"]  # the layers that the model's `_no_split_modules` names
    fsdp_cpu_ram_efficient_loading: Literal[False]  # every rank builds the same weights
    fsdp_offload_params: Literal[False]  # no record would show it
    fsdp_state_dict_type: Literal["FULL_STATE_DICT", "SHARDED_STATE_DICT"]


class _AccelerateFile(_Strict):
    """An accelerate file as the study allows it: how a run is distributed, nothing about what is trained."""

    compute_environment: Literal["LOCAL_MACHINE"] = "LOCAL_MACHINE"
    distributed_type: Literal["NO", "MULTI_GPU", "DEEPSPEED", "FSDP"]
    deepspeed_config: _DeepSpeedSection | None = None
    fsdp_config: _FSDPSection | None = None
    num_processes: int = Field(ge=1)
    num_machines: int = Field(1, ge=1)
    machine_rank: int = Field(0, ge=0)
    main_process_ip: str | None = None
    main_process_port: int | None = None
    main_training_function: str | None = None
    gpu_ids: str | int | None = None
    rdzv_backend: str | None = None
    same_network: bool = True
    debug: bool = False
    enable_cpu_affinity: bool = False
    mixed_precision: Literal["no"] = "no"
    use_cpu: Literal[False] = False

    @field_validator("distributed_type", mode="before")
    @classmethod
    def _explain_multi_cpu(cls, value: Any) -> Any:
        if value == "MULTI_CPU":
            raise ValueError(
                "distributed_type: MULTI_CPU starts a single process unless mpirun starts it; write MULTI_GPU, "
                "which serves a box without a GPU too"
            )
        return value

    @field_validator("use_cpu", mode="before")
    @classmethod
    def _explain_use_cpu(cls, value: Any) -> Any:
        if value is True:
            raise ValueError(
                "use_cpu: true turns every strategy into plain DDP; remove it: the CPU is taken without it"
            )
        return value

    @field_validator("deepspeed_config", mode="before")
    @classmethod
    def _explain_auto_accumulation(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("gradient_accumulation_steps") == "auto":
            raise ValueError(
                "deepspeed_config.gradient_accumulation_steps: auto crashes accelerate; remove it: the run says it"
            )
        return value

    @field_validator("mixed_precision", mode="before")
    @classmethod
    def _explain_mixed_precision(cls, value: Any) -> Any:
        if value is False:
            raise ValueError("mixed_precision: no is YAML for false and crashes accelerate; write 'no' with quotes")
        if value != "no":
            raise ValueError(f"mixed_precision: {value} belongs to the run; write 'no' and pass --precision")
        return value


# A DeepSpeed JSON as the study allows it: what describes a distribution, nothing about a run. None stands for
# DeepSpeed's own default; null cannot be written.


class _OffloadOptimizer(_Strict):
    device: Device = "none"
    buffer_count: Count = None
    pin_memory: bool = None
    pipeline_read: bool = None
    pipeline_write: bool = None
    fast_init: bool = None
    ratio: float = Field(None, ge=0, le=1)


class _OffloadParam(_Strict):
    device: Device = "none"
    buffer_count: Count = None
    buffer_size: Annotated[Count, OrAuto] = None
    max_in_cpu: Count = None
    pin_memory: bool = None


class _ZeroSection(_Strict):
    stage: Literal[0, 1, 2, 3]
    contiguous_gradients: bool = None
    reduce_scatter: bool = None
    reduce_bucket_size: Annotated[Count, Field(gt=0), OrAuto] = None
    use_multi_rank_bucket_allreduce: bool = None
    allgather_partitions: bool = None
    allgather_bucket_size: Count = None
    overlap_comm: bool = None
    offload_param: _OffloadParam = _OffloadParam()
    offload_optimizer: _OffloadOptimizer = _OffloadOptimizer()
    sub_group_size: Count = None
    round_robin_gradients: bool = None
    stage3_prefetch_bucket_size: Annotated[Count, OrAuto] = None
    stage3_param_persistence_threshold: Annotated[Count, OrAuto] = None
    stage3_model_persistence_threshold: Count = None
    stage3_max_live_parameters: Count = None
    stage3_max_reuse_distance: Count = None
    stage3_gather_16bit_weights_on_model_save: bool = None
    stage3_module_granularity_threshold: Count = None
    zero_hpz_partition_size: Count = None

    @field_validator("stage", mode="before")
    @classmethod
    def _explain_stage(cls, value: Any) -> Any:
        if type(value) is not int or not 0 <= value <= 3:
            raise ValueError(f"zero_optimization.stage must be 0, 1, 2 or 3, is {value!r}")
        return value

    @field_validator("offload_param", "offload_optimizer", mode="before")
    @classmethod
    def _explain_nvme_path(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, dict) and "nvme_path" in value:
            raise ValueError(
                f"zero_optimization.{info.field_name}.nvme_path would be shared by runs; remove it, pass --swap-dir"
            )
        return value


class _AioSection(_Strict):
    block_size: Annotated[Count, Field(gt=0)] = None
    queue_depth: Annotated[Count, Field(gt=0)] = None
    intra_op_parallelism: Annotated[Count, Field(gt=0)] = None
    single_submit: bool = None
    overlap_events: bool = None
    use_gds: bool = None


class _DeepSpeedFile(_Strict):
    zero_optimization: _ZeroSection
    aio: _AioSection = None
    gradient_accumulation_steps: Annotated[int, Field(ge=1), OrAuto] = "auto"
    gradient_clipping: Annotated[float, Field(ge=0), OrAuto] = "auto"
    train_micro_batch_size_per_gpu: Literal["auto"] = "auto"  # a number here would be replaced by the run's
    train_batch_size: Literal["auto"] = "auto"
    communication_data_type: Literal["fp32", "bf16", "fp16"] = None

    @model_validator(mode="before")
    @classmethod
    def _explain_run_keys(cls, content: Any) -> Any:
        run_keys = {"optimizer", "scheduler", "bf16", "fp16", "torch_autocast", "data_types"} & set(content)
        if run_keys:
            raise ValueError(f"{min(run_keys)!r} belongs to the run, which sets it alike for every strategy; remove it")
        return content


@dataclass(frozen=True)
class Strategy:
    """One accelerate file, read and checked."""

    name: str
    path: Path
    distributed_type: Literal["NO", "MULTI_GPU", "DEEPSPEED", "FSDP"]
    num_processes: int  # what the file says; the launcher's --num_processes overrides it
    num_machines: int  # likewise
    zero_stage: int | None  # None: not DeepSpeed
    offload_optimizer_device: Device
    offload_param_device: Device
    zero3_init: bool  # build the model partitioned
    deepspeed_json: dict[str, Any] | None  # the JSON beside the file, where it names one
    gradient_clipping: float | None  # None: left to the run
    gradient_accumulation_steps: int | None  # None: left to the run
    content: dict[str, Any]  # the file as read

    @property
    def offloads_to_nvme(self) -> bool:
        return "nvme" in (self.offload_optimizer_device, self.offload_param_device)

    @property
    def needed_extensions(self) -> set[str]:
        """The compiled DeepSpeed extensions that a run of this strategy loads; a box without a GPU adds one."""
        needs = {"cpu_adam"} if self.offload_optimizer_device != "none" else set()
        return needs | ({"async_io"} if self.offloads_to_nvme else set())


def names() -> list[str]:
    """The strategies that the project ships, in the order of its tables."""
    found = [path.stem for path in CONFIGS.glob("*.yaml")]
    return sorted(found, key=lambda name: (name != "single", name != "ddp", name.startswith("fsdp"), name))


def find_strategy(name: str) -> Path:
    """Return the file of a shipped strategy, or of a path to a user's own. Raises Refusal for neither."""
    if name.endswith((".yaml", ".yml", ".json")):
        path = Path(name)
    else:  # also of a folder there, as buckets/
        path = next((path for path in sorted(CONFIGS.rglob("*.yaml")) if path.stem == name), CONFIGS / "none")
    if not path.is_file():
        raise Refusal(f"strategy {name!r} is unknown; name a file or one of {', '.join(names())}")
    return path


def read_yaml(path: Path, examples: Path) -> dict[str, Any]:
    """Read a YAML file of keys. Raises Refusal where it is none; `examples` is a folder of some that are."""
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise Refusal(f"{path}: cannot be read as YAML ({' '.join(str(error).split())})") from None
    if not isinstance(content, dict):
        raise Refusal(f"{path}: holds no keys; copy one of {examples.name}/")
    return content


@lru_cache(maxsize=64)
def read_by_name(name: str) -> Strategy:
    """Read a strategy that is not launched: a shipped one, with its JSON, wherever one stands. Raises Refusal."""
    path = find_strategy(name)
    return read_strategy(path, CONFIGS.parent if path.is_relative_to(CONFIGS) else Path())


def read_strategy(path: Path, folder: Path = Path()) -> Strategy:
    """Read an accelerate file strictly; `folder`: from where the path of its JSON is seen, as launched the current one.

    Raises Refusal naming the file, the key and the remedy.
    """
    content = read_yaml(path, CONFIGS)
    section = content.get("deepspeed_config")
    for key in ("offload_optimizer_nvme_path", "offload_param_nvme_path"):
        if isinstance(section, dict) and key in section:
            raise Refusal(f"{path}: deepspeed_config.{key} is dropped by accelerate; remove it and pass --swap-dir")
    try:
        file = _AccelerateFile.model_validate(content)
    except ValidationError as error:
        raise Refusal(describe(error, str(path))) from None
    if (file.distributed_type == "DEEPSPEED") != (file.deepspeed_config is not None):
        raise Refusal(f"{path}: distributed_type: DEEPSPEED and a deepspeed_config section belong together")
    if (file.distributed_type == "FSDP") != (file.fsdp_config is not None):
        raise Refusal(f"{path}: distributed_type: FSDP and an fsdp_config section belong together")

    deepspeed = file.deepspeed_config or _DeepSpeedSection()
    written = beside = None
    if deepspeed.deepspeed_config_file is not None:
        ignored = {"zero_stage", "offload_optimizer_device", "offload_param_device", "zero3_save_16bit_model"}
        extra = (ignored | {"gradient_clipping", "gradient_accumulation_steps"}) & set(section)
        if extra or "mixed_precision" in content:
            key = min(extra, default="mixed_precision")
            raise Refusal(f"{path}: {key} is ignored beside deepspeed_config_file; remove it, or say it in the JSON")
        written, beside = _read_json(path, folder / deepspeed.deepspeed_config_file)
    elif file.distributed_type == "DEEPSPEED" and deepspeed.zero_stage is None:
        raise Refusal(
            f"{path}: deepspeed_config.zero_stage is missing, and accelerate would take 2; write 0, 1, 2 or 3"
        )

    in_charge = beside or deepspeed
    zero = beside.zero_optimization if beside else None
    clipping, accumulation = in_charge.gradient_clipping, in_charge.gradient_accumulation_steps
    return Strategy(
        name=path.stem,
        path=path,
        distributed_type=file.distributed_type,
        num_processes=file.num_processes,
        num_machines=file.num_machines,
        zero_stage=zero.stage if zero else deepspeed.zero_stage,
        offload_optimizer_device=zero.offload_optimizer.device if zero else deepspeed.offload_optimizer_device,
        offload_param_device=zero.offload_param.device if zero else deepspeed.offload_param_device,
        zero3_init=deepspeed.zero3_init_flag,
        deepspeed_json=written,
        gradient_clipping=None if clipping == "auto" else clipping,
        gradient_accumulation_steps=None if accumulation == "auto" else accumulation,
        content=content,
    )


def _read_json(yaml_path: Path, path: Path) -> tuple[dict[str, Any], _DeepSpeedFile]:
    """Read the DeepSpeed JSON that an accelerate file names, refusing keys that DeepSpeed would ignore."""
    if not path.is_file():
        raise Refusal(f"{yaml_path}: deepspeed_config_file {path} is not a file seen from {Path.cwd()}; start there")
    try:
        content = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise Refusal(f"{path}: cannot be read as JSON ({error})") from None
    if not isinstance(content, dict):
        raise Refusal(f"{path}: holds no keys; copy one of {CONFIGS.name}/")
    try:
        return content, _DeepSpeedFile.model_validate(content)
    except ValidationError as error:
        raise Refusal(describe(error, str(path)) + _known_keys(error)) from None


def _known_keys(error: ValidationError) -> str:
    """What may stand in the place of a DeepSpeed JSON's unknown key, where that is the error."""
    unknown = next((e["loc"] for e in error.errors() if e["type"] == "extra_forbidden"), None)
    if unknown is None:
        return ""
    section: Any = _DeepSpeedFile
    for key in unknown[:-1]:
        section = section.model_fields[key].annotation
    return f"; known: {', '.join(sorted(section.model_fields))}"


@dataclass(frozen=True)
class Launch:
    """What the user asked of the launcher."""

    strategy: Strategy
    num_processes: int
    num_machines: int = 1


def read_launch() -> Launch:
    """Find the `accelerate launch` that started this process and what it was asked.

    Accelerate hands its children flags, not the name of the file they came from; the launcher's own command line,
    found among this process's ancestors, has it. Raises Refusal where there is none.
    """
    from accelerate.commands.launch import launch_command_parser

    for parent in psutil.Process().parents():
        try:
            command = parent.cmdline()
        except psutil.Error:  # a parent that ended or is not ours
            continue
        if (start := _launch_arguments(command)) is None:
            continue
        arguments = launch_command_parser().parse_args(command[start:])
        if arguments.config_file is None:
            break
        path = Path(parent.cwd()) / arguments.config_file
        strategy = read_strategy(path if not path.is_relative_to(Path.cwd()) else path.relative_to(Path.cwd()))
        return Launch(
            strategy,
            num_processes=arguments.num_processes or strategy.num_processes,
            num_machines=arguments.num_machines or strategy.num_machines,
        )
    raise Refusal(
        "no accelerate file: start it as `accelerate launch --config_file accelerate_configs/zero3.yaml "
        "study/train.py`, or as `zero-study train --strategy zero3`"
    )


def _launch_arguments(command: list[str]) -> int | None:
    """Index of the first argument of `accelerate launch` in a command line, None where it is another program's."""
    for index, word in enumerate(command[:4]):
        base = os.path.basename(word)
        if base == "accelerate-launch" or word == "accelerate.commands.launch":
            return index + 1
        if base in ("accelerate", "accelerate.commands.accelerate_cli") and command[index + 1 : index + 2] == [
            "launch"
        ]:
            return index + 2
    return None


def check(config: RunConfig, strategy: Strategy, world_size: int, num_machines: int = 1) -> None:
    """Refuse, before anything is started or written, what cannot run here as asked."""
    where = strategy.path
    if strategy.distributed_type == "NO" and world_size != 1:
        raise Refusal(f"{where}: distributed_type NO runs one process, asked for {world_size}; take another strategy")
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
            f"--precision {config.precision} under {strategy.name} also reduces gradients in 16 bits, as no other "
            "strategy does; use --precision fp32"
        )
    if config.precision in ("bf16", "fp16"):
        if strategy.zero_stage is None:
            raise Refusal(
                f"--precision {config.precision} (16-bit parameters with fp32 masters) is DeepSpeed's; {strategy.name} "
                f"has --precision {config.precision}-autocast"
            )
        if strategy.zero_stage == 0:
            raise Refusal(
                f"--precision {config.precision} at ZeRO stage 0 takes a dummy Adam step when it is built, so it is no "
                f"baseline; use --precision {config.precision}-autocast"
            )
    if config.accumulation_dtype not in ("fp32", config.precision):
        raise Refusal(
            f"--accumulation-dtype {config.accumulation_dtype} goes with --precision {config.accumulation_dtype}, not "
            f"with {config.precision}"
        )
    import torch

    num_gpus = torch.cuda.device_count()
    if num_gpus and world_size > num_gpus * num_machines and not config.share_device:
        each = f" on this one of {num_machines} machines" if num_machines > 1 else ""
        raise Refusal(
            f"{world_size} processes asked, {num_gpus} GPU(s) found{each}; pass --num_processes "
            f"{num_gpus * num_machines}, or --share-device"
        )
    if strategy.distributed_type == "FSDP" and not num_gpus:
        raise Refusal(f"{strategy.name} needs GPUs: on a CPU accelerate does not shard and trains something else")
    if config.precision.startswith("fp16") and not num_gpus:
        raise Refusal(f"--precision {config.precision} needs a GPU; use bf16 or bf16-autocast on a CPU")
    if strategy.distributed_type == "DEEPSPEED" and importlib.util.find_spec("deepspeed") is None:
        raise Refusal(f"{strategy.name} needs deepspeed, which is not installed; `make setup` installs it")
    if config.log_with != "none" and importlib.util.find_spec(config.log_with) is None:
        raise Refusal(f"--log-with {config.log_with}: the package is not installed; `pip install {config.log_with}`")
    _check_swap_dir(config, strategy)
    # DeepSpeed's communication on a CPU loads one more extension, at every stage.
    on_cpu = {"deepspeed_shm_comm"} if strategy.distributed_type == "DEEPSPEED" and not num_gpus else set()
    extensions.check(strategy.needed_extensions | on_cpu)
    sources.check(config)


def _check_swap_dir(config: RunConfig, strategy: Strategy) -> None:
    if config.swap_dir is None:
        return
    if not strategy.offloads_to_nvme:
        raise Refusal(f"--swap-dir {config.swap_dir}: {strategy.name} does not offload to NVMe; remove the flag")
    if not config.swap_dir.is_dir():
        raise Refusal(f"--swap-dir {config.swap_dir}: no such folder; make it on the disk to be measured")
    if not is_writable(config.swap_dir):
        raise Refusal(f"--swap-dir {config.swap_dir}: not writable by this user; choose another folder")


def is_writable(folder: Path) -> bool:
    """Try it with a file that has no name: what the permissions say is not all that counts, least of all for root."""
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return True


def default_output_dir(config: RunConfig, launch: Launch) -> Path:
    name = f"{config.workload}-{config.size}-{launch.strategy.name}-{launch.num_processes}x-seed{config.seed}"
    return Path("runs") / name


def check_output_dir(run_dir: Path) -> None:
    """Refuse a folder that holds a finished run or cannot be one; an unfinished run is done again."""
    if (run_dir / "record.json").exists():
        raise Refusal(f"{run_dir} already holds a finished run; pass another --output-dir, or delete it")
    if run_dir.exists() and not run_dir.is_dir():
        raise Refusal(f"{run_dir} is not a folder; pass another --output-dir")
    parent = next(p for p in [run_dir, *run_dir.absolute().parents] if p.exists())
    if not is_writable(parent):
        raise Refusal(f"{run_dir} cannot be written; pass another --output-dir")


def swap_folder(config: RunConfig, run_dir: Path) -> Path:
    """The folder of this run alone that NVMe offload swaps to; DeepSpeed empties it, so no two runs may share one."""
    return (config.swap_dir / f"zero-study-{run_dir.name}" if config.swap_dir else run_dir / "swap").resolve()


def build_accelerator(config: RunConfig, launch: Launch, world_size: int, run_dir: Path) -> Accelerator:
    """Make the Accelerator: the strategy from its file, everything that must agree between strategies from the run.

    Collective: every rank calls it. Raises Refusal where the process that came up is not the one that was asked for.
    """
    import torch
    from accelerate import Accelerator
    from accelerate.utils import (
        DataLoaderConfiguration,
        GradientAccumulationPlugin,
        InitProcessGroupKwargs,
        TorchDynamoPlugin,
    )

    class Replicas(Accelerator):
        """Accelerate's own leaves out DDP, and its no_sync, where a GPU's process is the only one."""

        @property
        def use_distributed(self) -> bool:
            return True

    strategy = launch.strategy
    _, accumulation = config.batches(world_size)
    on_cpu = not torch.cuda.is_available()
    is_deepspeed = strategy.distributed_type == "DEEPSPEED"
    if on_cpu and is_deepspeed:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed would find it too, and warn each time
    started = os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"
    # Then accelerate drops DeepSpeed.
    on_cpu_only = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
    if is_deepspeed != (started and not on_cpu_only):
        raise Refusal(
            f"{strategy.path}: distributed_type {strategy.distributed_type} was asked, the launcher started "
            f"{'a run without DeepSpeed' if is_deepspeed else 'DeepSpeed'}; "
            "remove --cpu, ACCELERATE_USE_CPU or --use_deepspeed"
        )
    if config.share_device and strategy.distributed_type != "NO":
        _share_device()
    autocast = config.precision.endswith("-autocast")
    mixed_precision = "no"
    if config.precision != "fp32" and not (is_deepspeed and autocast):
        mixed_precision = config.precision.removesuffix("-autocast")
    return (Replicas if strategy.distributed_type == "MULTI_GPU" else Accelerator)(
        # Without a GPU, DDP needs to be told so; DeepSpeed must not be, or accelerate drops it.
        cpu=on_cpu and not is_deepspeed,
        mixed_precision=mixed_precision,
        dataloader_config=DataLoaderConfiguration(non_blocking=True),  # from pinned memory, while the GPU computes
        # FSDP reduces in every micro step, too: kept whole, gradients would undo what sharding saves.
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=accumulation, sync_each_batch=strategy.distributed_type == "FSDP"
        ),
        deepspeed_plugin=_deepspeed_plugin(config, strategy, world_size, run_dir) if is_deepspeed else None,
        dynamo_plugin=TorchDynamoPlugin(backend="inductor") if config.compile else None,
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")]
        if uses_gloo(config, on_cpu) and strategy.distributed_type != "NO"
        else None,
        log_with=None if config.log_with == "none" else config.log_with,
        project_dir=run_dir,
    )


def uses_gloo(config: RunConfig, on_cpu: bool) -> bool:
    """Say which runs communicate through the host: NCCL is for GPUs, and refuses two ranks on one."""
    return on_cpu or config.share_device


def _share_device() -> None:
    """Put this rank on the first GPU, in a group of gloo's, before anything else chooses a GPU or a backend.

    By the sources (torch 2.13, accelerate 1.15, deepspeed 0.19.8), for no GPU has run it yet: DDP and DeepSpeed's
    engine take the GPU from LOCAL_RANK. DeepSpeed would bind its group to a GPU, which gloo cannot; a group that is
    there it takes as it is. gloo moves CUDA tensors through the host in what DDP and the stages call: broadcast,
    reduce, all-reduce, all-gather. Its reduce-scatter, stage 3's, is the all-reduce of a copy on the GPU: up to a
    reduce bucket more at the peak than under NCCL, whose own buffers there are none of. Only what gathers several
    tensors in one call would fail, and no strategy here does.
    """
    import torch

    os.environ["LOCAL_RANK"] = "0"
    if torch.cuda.is_available():
        torch.cuda.set_device(0)
    torch.distributed.init_process_group("gloo")


def _deepspeed_plugin(config: RunConfig, strategy: Strategy, world_size: int, run_dir: Path) -> Any:
    """Make accelerate's DeepSpeed plugin and set what the run says: after it, no value is left to a default unseen."""
    from accelerate.utils import DeepSpeedPlugin

    micro_batch_size, accumulation = config.batches(world_size)
    plugin = DeepSpeedPlugin()  # reads the strategy, as the launcher passes it on
    engine = plugin.deepspeed_config
    hidden = SIZES[config.workload][config.size]["hidden"]
    zero = engine["zero_optimization"]
    # An absent, "auto" or zero clipping in accelerate's own fields means 1.0 to the engine; a number put here does not.
    engine["gradient_clipping"] = config.gradient_clipping
    engine["gradient_accumulation_steps"] = accumulation
    engine["train_micro_batch_size_per_gpu"] = micro_batch_size
    engine["train_batch_size"] = config.global_batch_size
    if config.precision in ("bf16", "fp16"):
        engine[config.precision] = {"enabled": True}
        engine["data_types"] = {"grad_accum_dtype": config.accumulation_dtype}
    elif config.precision != "fp32":
        dtype = {"bf16-autocast": "bfloat16", "fp16-autocast": "float16"}[config.precision]
        engine["torch_autocast"] = {"enabled": True, "dtype": dtype}
    for key, value in suited_buckets(hidden).items():  # now, because zero.Init reads the config before `prepare`
        if zero.get(key) == "auto":
            zero[key] = value
    if zero.get("offload_param", {}).get("buffer_size") == "auto":
        zero["offload_param"]["buffer_size"] = swap_buffer_size(hidden, world_size)
    for key in ("offload_optimizer", "offload_param"):
        if zero.get(key, {}).get("device") == "nvme":
            zero[key]["nvme_path"] = str(swap_folder(config, run_dir))
    return plugin


def suited_buckets(hidden: int) -> dict[str, int]:
    """Sizes, in elements, that accelerate's `prepare` writes for "auto" to a model of this hidden size."""
    return {
        "reduce_bucket_size": hidden**2,
        "stage3_prefetch_bucket_size": int(0.9 * hidden**2),
        "stage3_param_persistence_threshold": 10 * hidden,
    }


def remove_swap_folder(config: RunConfig, strategy: Strategy, run_dir: Path) -> None:
    """Delete what NVMe offload left on the disk, once no rank steps any more."""
    if strategy.offloads_to_nvme:
        shutil.rmtree(swap_folder(config, run_dir), ignore_errors=True)


def global_norm(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """2-norm of all tensors together, as exact as DeepSpeed's stages 1 to 3 have it, which sum in fp64.

    On a CPU torch adds up the squares of a whole tensor in fp32: its norm of 31 million gradients is 1.7e-3 too small.
    Row by row, and the rows in fp64, it is right to 1e-7 and no slower. GPUs add in a tree, which is exact enough.
    """
    import torch

    tensors = list(tensors)
    if tensors[0].device.type != "cpu":
        whole = torch.nn.utils.get_total_norm(tensors)
        return whole.full_tensor() if hasattr(whole, "full_tensor") else whole  # FSDP2's is a DTensor
    rows = [torch.linalg.vector_norm(tensor, dim=-1).flatten() for tensor in tensors]
    return torch.linalg.vector_norm(torch.cat(rows), dtype=torch.float64).float()


def gradient_norm_reader(accelerator: Accelerator, model: Any, config: RunConfig) -> Callable[[], Any]:
    """Return a function that clips where the engine has not, and returns the global gradient norm before clipping.

    To be called between backward and the optimizer's step; DeepSpeed clips and steps inside accelerate's backward.
    """
    import torch

    if accelerator.distributed_type.value != "DEEPSPEED":
        parameters = [p for p in model.parameters() if p.requires_grad]

        def clip() -> torch.Tensor:
            accelerator.unscale_gradients()  # fp16-autocast's; does nothing otherwise
            norm = global_norm(p.grad for p in parameters)
            if config.gradient_clipping:
                torch.nn.utils.clip_grads_with_norm_(parameters, config.gradient_clipping, norm)
            return norm

        return clip
    if model.zero_optimization_stage():
        return model.get_global_grad_norm
    # Stage 0 keeps no norm; its gradients are whole and averaged when it steps, so the norm is taken just before it.
    latest: list[torch.Tensor] = []
    take_step = model.step

    def note_norm_and_step(*args: Any, **kwargs: Any) -> Any:
        scaler = model.torch_autocast_z0_gradscaler
        norm = global_norm(p.grad for p in model.module.parameters())
        latest[:] = [norm / scaler.get_scale() if scaler else norm]
        return take_step(*args, **kwargs)

    def clip_by_noted_norm() -> None:
        torch.nn.utils.clip_grads_with_norm_(model.module.parameters(), config.gradient_clipping, latest[0])

    model.step = note_norm_and_step
    model.clip_fp32_gradients = clip_by_noted_norm  # the engine's own clips by torch's inexact norm
    return lambda: latest[0]
