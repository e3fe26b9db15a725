"""Read strategies. A strategy is an accelerate file and the DeepSpeed JSON that it names.

`zero_study.doctor` checks both files. Unknown keys are errors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from zero_study.doctor import config_files, strict
from zero_study.doctor.examine import CONFIGS, OF_DDP, with_keys
from zero_study.engines.keys import known_keys
from zero_study.engines.strategy_names import OffloadDevice
from zero_study.errors import Refusal, unknown_name_message
from zero_study.files import check_name, load, read_yaml, relative_to_cwd
from zero_study.strategy import shipped

# Sections of an accelerate file that `accelerate config` writes, most of them empty.
_SECTIONS = (
    *("deepspeed_config", "fsdp_config", "parallelism_config"),
    *("megatron_lm_config", "dynamo_config", "fp8_config", "mpirun_config"),
)
_EMPTY: tuple[Any, ...] = (None, {}, {"dynamo_backend": "NO"})


@dataclass(frozen=True)
class Strategy:
    """The checked settings of one accelerate file."""

    name: str
    path: Path
    distributed_type: Literal["NO", "MULTI_GPU", "DEEPSPEED", "FSDP"]
    num_processes: int  # from the file; the launcher's --num_processes overrides it
    num_machines: int  # from the file; the launcher's --num_machines overrides it
    zero_stage: int | None  # None if the engine is not DeepSpeed
    offload_optimizer_device: OffloadDevice
    offload_param_device: OffloadDevice
    zero3_init: bool  # whether the model is partitioned while it is built
    deepspeed_json: dict[str, Any] | None  # the JSON that the file names; None if it names none
    ddp_json: dict[str, Any] | None  # DDP's settings from the JSON with the same name; None without it
    gradient_clipping: float | None  # None if the run decides
    gradient_accumulation_steps: int | None  # None if the run decides
    content: dict[str, Any]  # the content of the accelerate file
    mixed_precision: str | None  # bf16 or fp16, which the run must request too; None if the run decides

    @property
    def written(self) -> dict[str, Any]:
        """The content of the file and of its DeepSpeed JSON, as records store it."""
        json_content = self.deepspeed_json or self.ddp_json
        return {"file": relative_to_cwd(self.path), "yaml": _shown(self.content), "json": json_content}

    @property
    def file_name(self) -> str:
        """The name of a new file with this strategy, without its ending."""
        return self.name if self.path.absolute().is_relative_to(CONFIGS) else f"{self.name}-advised"

    @property
    def mesh(self) -> list[int] | None:
        """FSDP's device mesh as [replicas, shards]. None if the file has no mesh.

        FSDP1's hybrid sharding has one copy of the model states per node.
        """
        if "HYBRID" in (self.fsdp1_sharding or ""):
            return [1, self.num_processes]
        section = self.content.get("parallelism_config") or {}
        names = ("parallelism_config_dp_replicate_size", "parallelism_config_dp_shard_size")
        return [section[name] for name in names] if names[0] in section else None

    @property
    def fixed_processes(self) -> int | None:
        """The only number of processes for which the file works. None if it works for several numbers."""
        return 1 if self.distributed_type == "NO" else math.prod(self.mesh) if self.mesh else None

    def could_run(self, num_processes: int) -> bool:
        """Return whether the strategy works with this number of processes.

        A strategy without distribution needs one process. A strategy with groups of ranks needs a multiple of the group
        size.
        """
        if self.mesh is None:
            divides = num_processes % self.secondary_partition_size == 0
            return divides and (num_processes == 1 or self.distributed_type != "NO")
        replicas = self.mesh[0]  # each replica needs at least two shards
        return num_processes % replicas == 0 and num_processes > replicas

    @property
    def fsdp1_sharding(self) -> str | None:
        """The sharding strategy of FSDP1. None for FSDP2 and other engines."""
        section = self.content.get("fsdp_config") or {}
        return section.get("fsdp_sharding_strategy") if section.get("fsdp_version") == 1 else None

    @property
    def reshard_after_forward(self) -> bool:
        """Whether FSDP's units free their gathered parameters after the forward pass."""
        if self.fsdp1_sharding is not None:
            return self.fsdp1_sharding in ("FULL_SHARD", "HYBRID_SHARD")
        return bool((self.content.get("fsdp_config") or {}).get("fsdp_reshard_after_forward"))

    @property
    def gradient_as_bucket_view(self) -> bool | None:
        """Whether DDP's gradients are views of its buckets. None if the strategy is not DDP."""
        if self.distributed_type != "MULTI_GPU":
            return None
        return self.ddp_json is not None and bool(self.ddp_json.get("gradient_as_bucket_view"))

    @property
    def offloads(self) -> bool:
        return (self.offload_optimizer_device, self.offload_param_device) != ("none", "none")

    @property
    def offloads_to_nvme(self) -> bool:
        return "nvme" in (self.offload_optimizer_device, self.offload_param_device)

    @property
    def secondary_partition_size(self) -> int:
        """Number of ranks that share a second copy of the parameters at stage 3 (ZeRO++'s hpZ). 1 without a copy."""
        zero = (self.deepspeed_json or {}).get("zero_optimization", {})
        return int(zero.get("zero_hpz_partition_size", 1))

    def check_json_is_seen(self, folder: Path = Path()) -> None:
        """Raise Refusal if the launcher, started in this folder, would not find the JSON that the file names."""
        if self.deepspeed_json is not None:
            name = self.content["deepspeed_config"]["deepspeed_config_file"]
            _check_is_seen(self.path, _base_of_json(self.path, folder) / name)

    @property
    def needed_extensions(self) -> set[str]:
        """The compiled DeepSpeed extensions that a run of this strategy loads."""
        offloads = self.distributed_type == "DEEPSPEED" and self.offload_optimizer_device != "none"
        needs = {"cpu_adam"} if offloads else set()
        return needs | ({"async_io"} if self.offloads_to_nvme else set())


def _shown(content: Any) -> Any:
    """Return the content of a file as records store it.

    Absolute paths are reduced to the part that is not specific to this machine.
    """
    if isinstance(content, dict):
        return {key: _shown(value) for key, value in content.items()}
    return relative_to_cwd(Path(content)) if isinstance(content, str) and content.startswith("/") else content


def names() -> list[str]:
    """Return the names of the strategies that the project ships, in the order of its tables."""
    stems = [path.stem for path in CONFIGS.glob("*.yaml")]
    return sorted(stems, key=lambda name: (name != "single", name != "ddp", name.startswith("fsdp"), name))


def find_strategy(name: str) -> Path:
    """Return the path of a strategy's file, from the name of a shipped strategy or from a path.

    Raises Refusal if there is no such file.
    """
    if name.endswith((".yaml", ".yml", ".json")):
        path = Path(name) if Path(name).exists() else CONFIGS.parent / name
    else:  # also in subfolders, such as buckets/
        path = next((path for path in sorted(CONFIGS.rglob("*.yaml")) if path.stem == name), CONFIGS / "none")
    if not path.is_file():
        raise Refusal(unknown_name_message("strategy", name, names(), "name a file or one of"))
    return path


@lru_cache(maxsize=64)
def read_by_name(name: str) -> Strategy:
    """Return the strategy with this name or path. Raises Refusal if it does not exist or has errors."""
    path = find_strategy(name)
    return read_strategy(path)


def _base_of_json(path: Path, folder: Path) -> Path:
    """Return the folder that the path of a JSON file starts from.

    Accelerate starts from the folder of the launch. The paths in the project's own files are relative to the clone. The
    trainer reads these JSON files itself, so that they work from every folder.
    """
    return CONFIGS.parent if path.absolute().is_relative_to(CONFIGS) else folder


def read_strategy(path: Path, folder: Path = Path()) -> Strategy:
    """Return the strategy of an accelerate file.

    The path of the JSON that the file names is relative to `folder`, which is the current folder by default. The
    project's own files do not depend on it. Raises Refusal with the file, the key and the remedy if a file has errors.
    """
    folder = _base_of_json(path, folder)
    content = read_yaml(path, CONFIGS)
    settings = {key: value for key, value in content.items() if key not in _SECTIONS or value not in _EMPTY}
    json_name = _json_named(settings)
    wrong = strict.validation_errors("accelerate", settings, config_files.of_accelerate(str(path), settings))
    wrong = wrong or _wrong_sections(settings)
    if wrong:
        raise Refusal(f"{path}: {_sentences([*wrong, *_wrong_in_json(json_name, folder)])}")
    deepspeed, fsdp = settings.get("deepspeed_config", {}), settings.get("fsdp_config", {})
    json_content = _read_json(path, folder / json_name) if json_name is not None else None
    ddp_json = _read_ddp_json(path) if settings["distributed_type"] == "MULTI_GPU" else None
    devices = {target: deepspeed.get(f"offload_{target}_device", "none") for target in ("optimizer", "param")}
    stage = deepspeed.get("zero_stage")
    if json_content is not None:
        zero = json_content["zero_optimization"]
        stage, devices = (
            zero["stage"],
            {target: zero.get(f"offload_{target}", {}).get("device", "none") for target in devices},
        )
    elif fsdp.get("fsdp_offload_params"):  # FSDP2 offloads parameters and optimizer together
        devices = dict.fromkeys(devices, "cpu")
    in_charge = deepspeed if json_content is None else json_content
    clipping, accumulation = (
        None if (value := in_charge.get(key, "auto")) == "auto" else value
        for key in ("gradient_clipping", "gradient_accumulation_steps")
    )
    name = check_name(path.stem, f"{path}: the strategy's name")
    return Strategy(
        name=shipped.name_of(name, {"yaml": content, "json": json_content or ddp_json}),
        path=path,
        distributed_type=settings["distributed_type"],
        num_processes=settings["num_processes"],
        num_machines=settings.get("num_machines", 1),
        zero_stage=stage,
        offload_optimizer_device=devices["optimizer"],
        offload_param_device=devices["param"],
        zero3_init=deepspeed.get("zero3_init_flag", False),
        deepspeed_json=json_content,
        ddp_json=ddp_json,
        gradient_clipping=clipping,
        gradient_accumulation_steps=accumulation,
        content=content,
        mixed_precision=_precision_asked(settings, json_content),
    )


def _precision_asked(content: dict[str, Any], json_content: dict[str, Any] | None) -> str | None:
    """Return the 16-bit precision that the files request. None if the run decides."""
    if json_content is not None:
        return config_files.DeepSpeedFile(json_content).precision or None
    precision: str | None = content.get("mixed_precision")
    return None if precision == "no" else precision


def _json_named(content: dict[str, Any]) -> str | None:
    section = content.get("deepspeed_config")
    json_name = section.get("deepspeed_config_file") if isinstance(section, dict) else None
    return json_name if isinstance(json_name, str) else None


def _sentences(errors: Iterable[str]) -> str:
    """Join the errors of a file as sentences."""
    return " ".join(error if error.endswith(".") else f"{error}." for error in errors)


def _wrong_sections(content: dict[str, Any]) -> list[str]:
    """Return the errors of sections that lack a setting or do not match the distributed_type."""
    kind, fsdp = content["distributed_type"], content.get("fsdp_config")
    deepspeed = content.get("deepspeed_config")
    if (kind == "DEEPSPEED") != (deepspeed is not None):
        return [
            "distributed_type: DEEPSPEED needs a deepspeed_config section, and the section needs "
            "this type. Add what is missing"
        ]
    if deepspeed is not None and deepspeed.get("deepspeed_config_file") is None and deepspeed.get("zero_stage") is None:
        return ["deepspeed_config.zero_stage is missing, so accelerate would use 2. Write 0, 1, 2 or 3"]
    machines = content.get("num_machines", 1)
    if deepspeed is not None and machines > 1 and deepspeed.get("deepspeed_multinode_launcher") is None:
        reason = known_keys.read()["study"]["accelerate"]["why"]["deepspeed_config.deepspeed_multinode_launcher"]
        # accelerate's default is pdsh
        return [f"num_machines is {machines}, and deepspeed_multinode_launcher is not set. {reason}"]
    if (kind == "FSDP") != (fsdp is not None):
        return [
            "distributed_type: FSDP needs an fsdp_config section, and the section needs this type. Add what is missing"
        ]
    if "parallelism_config" not in content:
        return []
    if fsdp is None:
        return [
            "parallelism_config needs distributed_type: FSDP, but the file has a different one. Remove "
            "parallelism_config"
        ]
    if fsdp["fsdp_offload_params"]:
        return [
            "this project has never tested fsdp_offload_params together with parallelism_config. Remove one of them"
        ]
    return []


def _read_json(yaml_path: Path, path: Path) -> dict[str, Any]:
    """Return the content of the DeepSpeed JSON that an accelerate file names.

    Raises Refusal for keys that DeepSpeed would ignore and for other errors.
    """
    _check_is_seen(yaml_path, path)
    content = with_keys(path, load(path, "JSON"))
    if wrong := strict.validation_errors("json", content, config_files.of_json(str(path), content)):
        raise Refusal(f"{path}: {_sentences(wrong)}")
    return content


def _wrong_in_json(json_name: str | None, folder: Path) -> list[str]:
    """Return the errors in the JSON of a file that has errors itself, so that one message lists all of them."""
    if json_name is None or not (folder / json_name).is_file():
        return []
    try:
        _read_json(Path(), folder / json_name)
    except Refusal as refusal:
        return [str(refusal)]
    return []


def _read_ddp_json(file: Path) -> dict[str, Any] | None:
    """Return the settings of DDP from the JSON next to an accelerate file.

    The JSON has the same name, because an accelerate file cannot name it. Returns None if there is no JSON, so that DDP
    has its defaults. Raises Refusal for a key or a value that is not allowed.
    """
    path = file.with_suffix(".json")
    if path == file or not path.exists():
        return None
    content = with_keys(path, load(path, "JSON"))
    wrong = [key for key, value in content.items() if json.dumps(value) not in map(json.dumps, OF_DDP.get(key, ()))]
    if wrong or not content:
        allowed = "; ".join(
            f"{key}: {', '.join(json.dumps(allowed_value) for allowed_value in values)}"
            for key, values in OF_DDP.items()
        )
        problem = f"unknown keys or values: {', '.join(map(repr, wrong))}" if wrong else "the file has no keys"
        raise Refusal(f"{path}: {problem}. Allowed: {allowed}.")
    return content


def _check_is_seen(yaml_path: Path, path: Path) -> None:
    if not path.is_file():
        raise Refusal(
            f"{yaml_path}: deepspeed_config_file {path} does not exist in {Path.cwd()}. Start the command in the "
            "folder to which this path is relative."
        )
