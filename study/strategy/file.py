"""Which strategy is this? One accelerate file, with the DeepSpeed JSON that it names.

It is read strictly, because accelerate and DeepSpeed ignore what they do not know (a nested typo, an NVMe path in the
YAML) and then silently run something else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from study.errors import Refusal, describe, describe_all
from study.files import ROOT, Written, check_name, load, read_yaml, shown_path
from study.strategy import shipped

CONFIGS = ROOT / "accelerate_configs"

Device = Literal["none", "cpu", "nvme"]


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


_WRITES_ENVIRONMENT = (
    "is DeepSpeed's to start, which writes this machine's whole environment, secrets included, to .deepspeed_env; "
    "write deepspeed_multinode_launcher: standard, and start the command on each machine"
)


class _DeepSpeedSection(Written):
    """The deepspeed_config section of an accelerate file, without the keys that accelerate drops."""

    deepspeed_config_file: str | None = None
    zero_stage: int | None = Field(None, ge=0, le=3)
    offload_optimizer_device: Device = "none"
    offload_param_device: Device = "none"
    zero3_init_flag: bool = False
    zero3_save_16bit_model: bool = False
    gradient_accumulation_steps: int | None = None
    gradient_clipping: Annotated[float, OrAuto] = "auto"
    deepspeed_multinode_launcher: Literal["standard"] | None = None
    deepspeed_hostfile: str | None = None
    offload_optimizer_nvme_path: Literal["none"] = "none"  # accelerate drops any other
    offload_param_nvme_path: Literal["none"] = "none"

    @field_validator("offload_optimizer_nvme_path", "offload_param_nvme_path", mode="before")
    @classmethod
    def _explain_nvme_path(cls, value: Any, info: ValidationInfo) -> Any:
        if value != "none":
            raise ValueError(
                f"deepspeed_config.{info.field_name} is dropped by accelerate; remove it and pass --swap-dir"
            )
        return value

    @field_validator("gradient_accumulation_steps", mode="before")
    @classmethod
    def _explain_auto_accumulation(cls, value: Any) -> Any:
        if value == "auto":
            raise ValueError(
                "deepspeed_config.gradient_accumulation_steps: auto crashes accelerate; remove it: the run sets it"
            )
        return value

    @field_validator("deepspeed_multinode_launcher", mode="before")
    @classmethod
    def _explain_launcher(cls, value: Any) -> Any:
        if value not in (None, "standard"):
            raise ValueError(f"deepspeed_config.deepspeed_multinode_launcher: {value} {_WRITES_ENVIRONMENT}")
        return value


class _FSDPSection(Written):
    """The fsdp_config section of an accelerate file; a key left out would be the launcher's default, made for FSDP1."""

    fsdp_version: Literal[2]
    fsdp_reshard_after_forward: bool
    fsdp_auto_wrap_policy: Literal["TRANSFORMER_BASED_WRAP"]  # by the class of block, which the run names
    fsdp_cpu_ram_efficient_loading: Literal[False]  # every rank builds the same weights
    fsdp_offload_params: bool
    fsdp_state_dict_type: Literal["FULL_STATE_DICT", "SHARDED_STATE_DICT"]
    fsdp_activation_checkpointing: Literal[False] = False  # --activation-checkpointing is the run's
    fsdp_backward_prefetch: Any = None  # this and what follows is FSDP1's: FSDP2 leaves it aside
    fsdp_forward_prefetch: Any = None
    fsdp_use_orig_params: Any = None
    fsdp_sync_module_states: Literal[True] = True  # of which the launcher wants to be told


class _MeshSection(Written):
    """The parallelism_config section of an accelerate file: FSDP2's replicas, each sharded over so many ranks."""

    parallelism_config_dp_replicate_size: int = Field(ge=2)
    parallelism_config_dp_shard_size: int = Field(ge=2)


class _AccelerateFile(Written):
    """An accelerate file as the study allows it: how a run is distributed, nothing about what is trained."""

    compute_environment: Literal["LOCAL_MACHINE"] = "LOCAL_MACHINE"
    distributed_type: Literal["NO", "MULTI_GPU", "DEEPSPEED", "FSDP"]
    deepspeed_config: _DeepSpeedSection | None = None
    fsdp_config: _FSDPSection | None = None
    parallelism_config: _MeshSection | None = None
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
    mixed_precision: Literal["no", "bf16", "fp16"] = "no"  # which the run must ask for, too
    use_cpu: Literal[False] = False
    downcast_bf16: Any = None  # this and what follows is for TPUs; `accelerate config` writes it
    tpu_env: Any = None
    tpu_name: Any = None
    tpu_use_cluster: Literal[False] = False
    tpu_use_sudo: Any = None
    tpu_vm: Any = None
    tpu_zone: Any = None
    commands: Any = None
    command_file: Any = None

    @model_validator(mode="before")
    @classmethod
    def _leave_out_what_is_empty(cls, content: Any) -> Any:
        """`accelerate config` writes every section, most of them empty."""
        sections = ("deepspeed_config", "fsdp_config", "parallelism_config", "megatron_lm_config", "dynamo_config",
                    "fp8_config", "mpirun_config")  # fmt: skip
        empty = {key for key in sections if key in content and content[key] in (None, {}, {"dynamo_backend": "NO"})}
        return {key: value for key, value in content.items() if key not in empty}

    @field_validator("distributed_type", mode="before")
    @classmethod
    def _explain_multi_cpu(cls, value: Any) -> Any:
        if value == "MULTI_CPU":
            raise ValueError(
                "distributed_type: MULTI_CPU starts one process unless mpirun starts it; write MULTI_GPU, which also "
                "serves a box without a GPU"
            )
        return value

    @field_validator("use_cpu", mode="before")
    @classmethod
    def _explain_use_cpu(cls, value: Any) -> Any:
        if value is True:
            raise ValueError(
                "use_cpu: true is not handed on by the launchers of several processes, and in the environment turns "
                "every strategy into plain DDP; remove it: a box without a GPU takes the CPU anyway"
            )
        return value

    @field_validator("mixed_precision", mode="before")
    @classmethod
    def _explain_mixed_precision(cls, value: Any) -> Any:
        if value is False:
            raise ValueError("mixed_precision: no is YAML for false and crashes accelerate; write 'no' with quotes")
        if value not in ("no", "bf16", "fp16", None):
            raise ValueError(f"mixed_precision: {value} belongs to the run; write 'no' and pass --precision")
        return value or "no"


# A DeepSpeed JSON as the study allows it: what describes a distribution, nothing about a run. None stands for
# DeepSpeed's own default; null cannot be written.


class _OffloadOptimizer(Written):
    device: Device = "none"
    buffer_count: Count = None
    pin_memory: bool = None
    pipeline_read: bool = None
    pipeline_write: bool = None
    fast_init: bool = None


class _OffloadParam(Written):
    device: Device = "none"
    buffer_count: Count = None
    buffer_size: Annotated[Count, OrAuto] = None
    max_in_cpu: Count = None
    pin_memory: bool = None


# Keys of zero_optimization that one is told to use, and why the study has none of them (DeepSpeed 0.19.8).
_LEFT_OUT = {
    **dict.fromkeys(
        ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients"),
        "needs DeepSpeed's CUDA quantizer, and changes what is trained",
    ),
    **dict.fromkeys(("mics_shard_size", "mics_hierarchical_params_gather"), "was removed from DeepSpeed, which stops"),
    "offload_optimizer.ratio": "leaves a part of the states to a second AdamW, whose learning rate stays as it began",
}


class _ZeroSection(Written):
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
    zero_hpz_partition_size: Annotated[Count, Field(gt=0)] = None

    @model_validator(mode="after")
    def _explain_hpz(self) -> _ZeroSection:
        if self.zero_hpz_partition_size is not None and self.stage != 3:
            raise ValueError(
                f"zero_optimization.zero_hpz_partition_size is stage 3's, stage is {self.stage}; remove one of them"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _explain_what_is_left_out(cls, content: Any) -> Any:
        written = content if isinstance(content, dict) else {}
        optimizer = written.get("offload_optimizer")
        keys = [*written, *(f"offload_optimizer.{key}" for key in (optimizer if isinstance(optimizer, dict) else ()))]
        for key in keys:
            if key in _LEFT_OUT:
                raise ValueError(f"zero_optimization.{key} {_LEFT_OUT[key]}; remove it")
        return content

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
                f"zero_optimization.{info.field_name}.nvme_path would be shared by runs; remove it and pass --swap-dir"
            )
        return value


class _AioSection(Written):
    block_size: Annotated[Count, Field(gt=0)] = None
    queue_depth: Annotated[Count, Field(gt=0)] = None
    intra_op_parallelism: Annotated[Count, Field(gt=0)] = None
    single_submit: bool = None
    overlap_events: bool = None
    use_gds: bool = None


class _BF16Section(Written):
    enabled: bool | Literal["auto"] = False


class _FP16Section(_BF16Section):
    """The block that everybody copies: DeepSpeed's own defaults, which a run has as well."""

    auto_cast: Literal[False] = False
    loss_scale: Literal[0] = 0
    loss_scale_window: Literal[1000] = 1000
    initial_scale_power: Literal[16] = 16
    hysteresis: Literal[2] = 2
    min_loss_scale: Literal[1] = 1


class _DeepSpeedFile(Written):
    zero_optimization: _ZeroSection
    bf16: _BF16Section = _BF16Section()
    fp16: _FP16Section = _FP16Section()
    steps_per_print: Any = None  # accelerate puts infinity in its place
    wall_clock_breakdown: Literal[False] = False
    zero_allow_untested_optimizer: Literal[True] = True  # as accelerate sets it
    zero_force_ds_cpu_optimizer: Literal[True] = True
    aio: _AioSection = None
    gradient_accumulation_steps: Annotated[int, Field(ge=1), OrAuto] = "auto"
    gradient_clipping: Annotated[float, Field(ge=0), OrAuto] = "auto"
    train_micro_batch_size_per_gpu: Literal["auto"] = "auto"  # a number here would be replaced by the run's
    train_batch_size: Literal["auto"] = "auto"
    communication_data_type: Literal["fp32", "bf16", "fp16"] = None

    @model_validator(mode="before")
    @classmethod
    def _explain_run_keys(cls, content: Any) -> Any:
        run_keys = {"optimizer", "scheduler", "torch_autocast", "data_types"} & set(content)
        if run_keys:
            words = ", ".join(map(repr, sorted(run_keys)))
            raise ValueError(f"{words} belong{'s' * (len(run_keys) == 1)} to the run, which sets it alike for every "
                             "strategy; remove it")  # fmt: skip
        return content

    @property
    def precision(self) -> str | None:
        """The 16 bits that the file asks for; None: it leaves them to the run."""
        return "bf16" if self.bf16.enabled is True else "fp16" if self.fp16.enabled is True else None


class _DDPFile(Written):
    """A JSON of the same name beside a DDP's file: arguments of DDP that accelerate takes from a program only."""

    gradient_as_bucket_view: bool


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
    ddp_json: dict[str, Any] | None  # the JSON of the same name beside the file, where it is DDP's and there is one
    gradient_clipping: float | None  # None: left to the run
    gradient_accumulation_steps: int | None  # None: left to the run
    content: dict[str, Any]  # the file as read
    mixed_precision: str | None  # bf16 or fp16, which a run of it must ask for; None: left to the run

    @property
    def written(self) -> dict[str, Any]:
        """The file whole, with the JSON that belongs to it, as records keep it."""
        beside = self.deepspeed_json or self.ddp_json
        return {"file": shown_path(self.path), "yaml": _shown(self.content), "json": beside}

    @property
    def mesh(self) -> list[int] | None:
        """FSDP2's ranks as the file arranges them, [replicas, shards]; None where it leaves them in one row."""
        section = self.content.get("parallelism_config")
        names = ("parallelism_config_dp_replicate_size", "parallelism_config_dp_shard_size")
        return [section[name] for name in names] if section else None

    @property
    def fixed_processes(self) -> int | None:
        """The only number of processes that the file can run; None: any."""
        return 1 if self.distributed_type == "NO" else math.prod(self.mesh) if self.mesh else None

    def could_run(self, num_processes: int) -> bool:
        """Say whether the file could be written for so many: `single` for one, groups of ranks for a multiple."""
        if self.mesh is None:
            divides = num_processes % self.secondary_partition_size == 0
            return divides and (num_processes == 1 or self.distributed_type != "NO")
        replicas = self.mesh[0]  # of two shards or more
        return num_processes % replicas == 0 and num_processes > replicas

    @property
    def reshard_after_forward(self) -> bool:
        """Whether FSDP2's units let go of what they gathered as forward leaves them."""
        return bool(self.content.get("fsdp_config", {}).get("fsdp_reshard_after_forward"))

    @property
    def gradient_as_bucket_view(self) -> bool | None:
        """Whether DDP's gradients are to be views of its buckets; None: not DDP."""
        if self.distributed_type != "MULTI_GPU":
            return None
        return self.ddp_json is not None and bool(self.ddp_json["gradient_as_bucket_view"])

    @property
    def offloads_to_nvme(self) -> bool:
        return "nvme" in (self.offload_optimizer_device, self.offload_param_device)

    @property
    def secondary_partition_size(self) -> int:
        """Ranks that share a second copy of the parameters at stage 3 (ZeRO++'s hpZ); 1: there is none."""
        return (self.deepspeed_json or {}).get("zero_optimization", {}).get("zero_hpz_partition_size", 1)

    def check_json_is_seen(self, folder: Path = Path()) -> None:
        """Refuse where the launcher, started in this folder, would not find the JSON that the file names."""
        if self.deepspeed_json is not None:
            _check_is_seen(self.path, folder / self.content["deepspeed_config"]["deepspeed_config_file"])

    @property
    def needed_extensions(self) -> set[str]:
        """The compiled DeepSpeed extensions that a run of this strategy loads; a box without a GPU adds one."""
        offloads = self.distributed_type == "DEEPSPEED" and self.offload_optimizer_device != "none"
        needs = {"cpu_adam"} if offloads else set()
        return needs | ({"async_io"} if self.offloads_to_nvme else set())


def _shown(content: Any) -> Any:
    """What a file holds, of a path from the root the part that is no place of this machine."""
    if isinstance(content, dict):
        return {key: _shown(value) for key, value in content.items()}
    return shown_path(Path(content)) if isinstance(content, str) and content.startswith("/") else content


def names() -> list[str]:
    """The strategies that the project ships, in the order of its tables."""
    stems = [path.stem for path in CONFIGS.glob("*.yaml")]
    return sorted(stems, key=lambda name: (name != "single", name != "ddp", name.startswith("fsdp"), name))


def find_strategy(name: str) -> Path:
    """Return the file of a shipped strategy, or of a path to a user's own. Raises Refusal for neither."""
    if name.endswith((".yaml", ".yml", ".json")):
        path = Path(name) if Path(name).exists() else CONFIGS.parent / name
    else:  # also of a folder there, as buckets/
        path = next((path for path in sorted(CONFIGS.rglob("*.yaml")) if path.stem == name), CONFIGS / "none")
    if not path.is_file():
        raise Refusal(f"strategy {name!r} is unknown; name a file or one of {', '.join(names())}")
    return path


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
    try:
        file = _AccelerateFile.model_validate(content)
    except ValidationError as error:
        wrong = "; ".join([f"{path}: {describe_all(error)[0]}", *describe_all(error)[1:]])
        raise Refusal(wrong + _errors_of_json(content, folder)) from None
    _check_sections(path, file)
    deepspeed = file.deepspeed_config or _DeepSpeedSection()
    written = beside = None
    if deepspeed.deepspeed_config_file is not None:
        ignored = {"zero_stage", "offload_optimizer_device", "offload_param_device", "zero3_save_16bit_model"}
        ignored |= {"gradient_clipping", "gradient_accumulation_steps"}
        extra = [key for key in content["deepspeed_config"] if key in ignored]
        extra += ["mixed_precision"] if content.get("mixed_precision") is not None else []
        if extra:
            words = f"{', '.join(extra)} {'are' if extra[1:] else 'is'} ignored beside deepspeed_config_file"
            remedy = "remove it, or write it in the JSON"
            raise Refusal(f"{path}: {words}; {remedy}{_errors_of_json(content, folder)}")
        written, beside = _read_json(path, folder / deepspeed.deepspeed_config_file)
    elif file.distributed_type == "DEEPSPEED" and deepspeed.zero_stage is None:
        raise Refusal(
            f"{path}: deepspeed_config.zero_stage is missing, and accelerate would take 2; write 0, 1, 2 or 3"
        )

    in_charge = beside or deepspeed
    ddp_json = _read_ddp_json(path) if file.distributed_type == "MULTI_GPU" else None
    zero = beside.zero_optimization if beside else None
    optimizer_device = zero.offload_optimizer.device if zero else deepspeed.offload_optimizer_device
    param_device = zero.offload_param.device if zero else deepspeed.offload_param_device
    if file.fsdp_config and file.fsdp_config.fsdp_offload_params:  # of both
        optimizer_device = param_device = "cpu"
    clipping, accumulation = in_charge.gradient_clipping, in_charge.gradient_accumulation_steps
    return Strategy(
        name=shipped.name_of(
            check_name(path.stem, f"{path}: the strategy's name"), {"yaml": content, "json": written or ddp_json}
        ),
        path=path,
        distributed_type=file.distributed_type,
        num_processes=file.num_processes,
        num_machines=file.num_machines,
        zero_stage=zero.stage if zero else deepspeed.zero_stage,
        offload_optimizer_device=optimizer_device,
        offload_param_device=param_device,
        zero3_init=deepspeed.zero3_init_flag,
        deepspeed_json=written,
        ddp_json=ddp_json,
        gradient_clipping=None if clipping == "auto" else clipping,
        gradient_accumulation_steps=None if accumulation == "auto" else accumulation,
        content=content,
        mixed_precision=beside.precision if beside else None if file.mixed_precision == "no" else file.mixed_precision,
    )


def _check_sections(path: Path, file: _AccelerateFile) -> None:
    """Raise Refusal where a section is there without its distributed_type, or without what it needs."""
    if (file.distributed_type == "DEEPSPEED") != (file.deepspeed_config is not None):
        raise Refusal(f"{path}: distributed_type: DEEPSPEED and a deepspeed_config section belong together")
    launcher = file.deepspeed_config and file.deepspeed_config.deepspeed_multinode_launcher
    if file.deepspeed_config and file.num_machines > 1 and launcher is None:  # accelerate's default is pdsh
        raise Refusal(f"{path}: num_machines: {file.num_machines} without a launcher {_WRITES_ENVIRONMENT}")
    if (file.distributed_type == "FSDP") != (file.fsdp_config is not None):
        raise Refusal(f"{path}: distributed_type: FSDP and an fsdp_config section belong together")
    if file.parallelism_config and file.fsdp_config is None:
        raise Refusal(f"{path}: parallelism_config shards by FSDP, the file's distributed_type is another; remove it")
    if file.parallelism_config and file.fsdp_config and file.fsdp_config.fsdp_offload_params:
        raise Refusal(f"{path}: fsdp_offload_params beside parallelism_config has never been tried; remove one of them")


def _read_json(yaml_path: Path, path: Path) -> tuple[dict[str, Any], _DeepSpeedFile]:
    """Read the DeepSpeed JSON that an accelerate file names, refusing keys that DeepSpeed would ignore."""
    _check_is_seen(yaml_path, path)
    content = _keys_of(path)
    try:
        return content, _DeepSpeedFile.model_validate(content)
    except ValidationError as error:
        raise Refusal(f"{path}: {'; '.join(describe_all(error))}{_known_keys(error)}") from None


def _errors_of_json(content: dict[str, Any], folder: Path) -> str:
    """What is wrong with the JSON that a refused file names, so that all errors are seen at once."""
    section = content.get("deepspeed_config")
    named = section.get("deepspeed_config_file") if isinstance(section, dict) else None
    if not isinstance(named, str) or not (folder / named).is_file():
        return ""
    try:
        _read_json(Path(), folder / named)
    except Refusal as refusal:
        return f"; {refusal}"
    return ""


def _read_ddp_json(file: Path) -> dict[str, Any] | None:
    """Read the JSON beside DDP's file, which cannot name it; None where there is none, and DDP has its defaults."""
    path = file.with_suffix(".json")
    if path == file or not path.exists():
        return None
    try:
        return _DDPFile.model_validate(_keys_of(path)).model_dump()
    except ValidationError as error:
        raise Refusal(f"{describe(error, str(path))}; known: {', '.join(_DDPFile.model_fields)}") from None


def _keys_of(path: Path) -> dict[str, Any]:
    content = load(path, "JSON")
    if not isinstance(content, dict):
        raise Refusal(f"{path}: holds no keys; copy one of {CONFIGS.name}/")
    return content


def _check_is_seen(yaml_path: Path, path: Path) -> None:
    if not path.is_file():
        raise Refusal(
            f"{yaml_path}: deepspeed_config_file {path} does not exist as seen from {Path.cwd()}; start in the folder "
            "that it is relative to"
        )


def _known_keys(error: ValidationError) -> str:
    """What may stand in the place of a DeepSpeed JSON's unknown key, where that is the error."""
    unknown = next((e["loc"] for e in error.errors() if e["type"] == "extra_forbidden"), None)
    if unknown is None:
        return ""
    section: Any = _DeepSpeedFile
    for key in unknown[:-1]:
        section = section.model_fields[key].annotation
    return f"; known: {', '.join(sorted(section.model_fields))}"
