"""Write zero_study/engines/keys/table.json from keys.yaml and from what the installed engines say about each key.

    python tools/derive/keys.py            # reads keys.yaml and the installed engines
    python tools/derive/keys.py --rules    # reads keys.yaml only, and keeps the rest of the committed table
    python tools/derive/keys.py --check    # writes nothing; exit status 1 if the committed table is not up to date

`--rules` needs neither accelerate nor DeepSpeed.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import inspect
import json
import os
import re
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

KEYS = Path(__file__).resolve().parents[2] / "zero_study" / "engines" / "keys"
TABLE = KEYS / "table.json"


def of_accelerate() -> dict[str, Any]:
    """Return the keys of an accelerate file and the launcher's flags of the installed release."""
    import accelerate
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.commands.launch import launch_command_parser
    from accelerate.utils import DeepSpeedPlugin, DistributedType, DynamoBackend

    parser = launch_command_parser()
    flags = {action.dest: action for action in parser._actions if action.option_strings}
    (of_deepspeed,) = (group for group in parser._action_groups if group.title == "DeepSpeed Arguments")
    ignored = re.findall(
        r'"ACCELERATE_(?:DEEPSPEED_)?(\w+)"', inspect.getsource(DeepSpeedPlugin._deepspeed_config_checks)
    )
    return {
        "release": accelerate.__version__,
        "fields": {
            field.name: {"type": _type(field.type), "default": _default(field.default)}
            for field in dataclasses.fields(ClusterConfig)
        },
        "flags": {name: _flag(action) for name, action in flags.items()},
        "sections": {
            "deepspeed_config": [action.dest for action in of_deepspeed._group_actions],
            # The launcher reads this one, though it is no flag.
            "fsdp_config": [*(name for name in flags if name.startswith("fsdp_")), "fsdp_ignored_modules"],
            "dynamo_config": [name for name in flags if name.startswith("dynamo_")],
            "parallelism_config": [name for name in flags if name.startswith("parallelism_config_")],
            "mpirun_config": ["mpirun_hostfile"],
        },
        "not_beside_a_json": sorted({name.lower() for name in ignored} & ({*flags})),
        "distributed_types": sorted(kind.value for kind in DistributedType),
        "dynamo_backends": sorted(kind.value.lower() for kind in DynamoBackend),
    }


def of_deepspeed() -> dict[str, Any]:
    """Return the keys of a DeepSpeed JSON of the installed release, with type and default if it defines them."""
    import deepspeed
    import torch
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.monitor import config as monitors
    from deepspeed.profiling.config import DeepSpeedFlopsProfilerConfig
    from deepspeed.runtime import config, lr_schedules, precision_config
    from deepspeed.runtime.swap_tensor.aio_config import AIO_DEFAULT_DICT
    from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
    from deepspeed.runtime.zenflow.zenflow_config import ZenFlowConfig
    from deepspeed.runtime.zero import config as zero
    from deepspeed.runtime.zero import offload_config as offload

    models = {
        "zero_optimization": zero.DeepSpeedZeroConfig,
        "zero_optimization.offload_optimizer": offload.DeepSpeedZeroOffloadOptimizerConfig,
        "zero_optimization.offload_param": offload.DeepSpeedZeroOffloadParamConfig,
        "zero_optimization.leaf_module": zero.DeepSpeedZeroLeafModuleConfig,
        "zero_optimization.zenflow": ZenFlowConfig, "tensor_parallel": TPTrainingConfig,
        "fp16": precision_config.DeepSpeedFP16Config, "bf16": precision_config.DeepSpeedBF16Config,
        "compile": config.CompileConfig, "comms_logger": CommsLoggerConfig,
        "tensorboard": monitors.TensorBoardConfig, "csv_monitor": monitors.CSVConfig,
        "wandb": monitors.WandbConfig, "comet": monitors.CometConfig,
    }  # fmt: skip
    loose = {"aio": AIO_DEFAULT_DICT, "flops_profiler": vars(DeepSpeedFlopsProfilerConfig({}))}
    torchs = (name for name, kind in vars(torch.optim).items() if isinstance(kind, type) and name != "Optimizer")
    return {
        "release": deepspeed.__version__,
        "strict": {name: _fields(model) for name, model in models.items()},
        "loose": {
            name: {key: {"default": _default(value)} for key, value in keys.items()} for name, keys in loose.items()
        },
        "removed": sorted(config._REMOVED_TOP_LEVEL_CONFIG_KEYS),
        "removed_zero": sorted(config._REMOVED_ZERO_CONFIG_KEYS),
        "optimizers": sorted(config.DEEPSPEED_OPTIMIZERS),
        "torch_optimizers": sorted(torchs),
        "schedulers": sorted(lr_schedules.VALID_LR_SCHEDULES),
    }


def _flag(action: argparse.Action) -> dict[str, Any]:
    kind = "flag" if action.nargs == 0 else getattr(action.type, "__name__", "str")
    description = {"type": kind, "default": _default(action.default)}
    return description | ({"choices": list(action.choices)} if action.choices else {})


def _fields(model: Any) -> dict[str, Any]:
    """Yield every key of a section under both of its names, with a pattern of its type and its default."""
    return {
        name: {"type": _type(field.annotation, field.metadata), "default": _default(field.default)}
        for key, field in model.model_fields.items()
        for name in dict.fromkeys((key, field.alias or key))
    }


def _type(kind: Any, metadata: Sequence[Any] = ()) -> Any:
    """Return the pattern of values that a field of this type with these bounds accepts."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        kind = next(part for part in typing.get_args(kind) if part is not type(None))
    if not isinstance(kind, type):
        return "<any>"
    if issubclass(kind, enum.Enum):
        return [member.value for member in kind]
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    bounds = [
        f" {sign} {getattr(constraint, word)}"
        for constraint in metadata
        for word, sign in signs.items()
        if hasattr(constraint, word)
    ]
    bound = bounds[0] if bounds else ""
    word = {bool: "bool", int: f"count{bound}", float: f"number{bound}", str: "text", Path: "text"}.get(kind, "any")
    return f"<{word}>"


def _default(value: Any) -> Any:
    """Return a default as a JSON value, or null if there is none or it is not a plain value."""
    value = getattr(value, "value", value)
    if isinstance(value, bool):
        return value
    plain = next((kind for kind in (int, float, str) if isinstance(value, kind)), None)  # DeepSpeed prints 500,000,000
    return None if plain is None else plain(value)


def made(rules_only: bool) -> dict[str, Any]:
    """Build the table from keys.yaml and the engines."""
    if rules_only:
        installed = json.loads(TABLE.read_text())["installed"]
    else:
        os.environ["DS_ACCELERATOR"] = "cpu"  # DeepSpeed looks for none
        installed = {"accelerate": of_accelerate(), "deepspeed": of_deepspeed()}
    return {"installed": installed, **yaml.safe_load((KEYS / "keys.yaml").read_text())}


def written(content: Any, depth: int = 3) -> str:
    """Format the table as JSON with one line for each key."""
    if not isinstance(content, dict) or not depth or not content:
        return json.dumps(content)
    inner = ",\n".join(f"{json.dumps(key)}: {written(value, depth - 1)}" for key, value in content.items())
    return f"{{\n{inner}\n}}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rules", action="store_true")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    text = written(made(options.rules)) + "\n"
    if options.check:
        return int(text != TABLE.read_text())
    TABLE.write_text(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
