"""Read the settings requested of an engine from a file, TrainingArguments, or the launcher's environment."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..engines.keys import engine_settings, known_keys
from ..engines.readback.demands import Demand

Request = str | Path | dict[str, Any]  # an accelerate file, a DeepSpeed JSON, or a dict like a DeepSpeed JSON


_OPEN = (None, "auto")  # values that request nothing


def by_launcher(environment: Mapping[str, str] = os.environ) -> list[Demand]:
    """Return the settings that `accelerate launch` or `torchrun` passed on in environment variables.

    The list is empty if neither of them started this process.
    """
    has = {name: environment.get(f"ACCELERATE_USE_{name}", "").lower() == "true" for name in ("DEEPSPEED", "FSDP")}
    table = known_keys.read()
    handed_on = table["handed_on"]["written"] | table["handed_on"]["filled"]
    demands = [
        Demand(fact, _read(environment[name]), f"the launcher ({name})")
        for name, fact in ((handed_on[key], fact) for key, fact in table["facts"]["accelerate"].items())
        if name in environment and (has["FSDP"] or not name.startswith("FSDP_"))
    ]
    engine = None
    if has["DEEPSPEED"]:
        engine = "DeepSpeed"
        path = environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
        if path != "none":
            demands += by_json(json.loads(Path(path).read_text()), path)
    elif has["FSDP"]:
        engine = f"FSDP{environment.get('FSDP_VERSION', '1')}"
    elif "ACCELERATE_DYNAMO_BACKEND" in environment and int(environment.get("WORLD_SIZE", "1")) > 1:
        engine = "DDP"  # accelerate's launcher sets no variable for it
    if engine is not None:
        demands.append(Demand("engine", engine, "the launcher"))
    return [demand for demand in demands if demand.value not in _OPEN]


def requested_processes(environment: Mapping[str, str] = os.environ) -> int | None:
    """Return the number of processes that the `accelerate launch` command requests, if it started only this process.

    Its launcher for single processes is also used for `distributed_type: MULTI_CPU`, and passes no number on. So the
    number is read from the command line of the launcher. None if it is not known, or if another launcher is used.
    """
    if "ACCELERATE_MIXED_PRECISION" not in environment or "WORLD_SIZE" in environment:
        return None
    try:
        words = Path(f"/proc/{os.getppid()}/cmdline").read_text().split("\0")
        return processes_of(words)
    except (OSError, ValueError, ImportError):  # another system, or a file that accelerate has read otherwise
        return None


def processes_of(words: Sequence[str]) -> int | None:
    """Return the number of processes that an `accelerate launch` command or its configuration file requests."""
    if "launch" not in words:
        return None
    options: dict[str, str] = {}
    for word, following in itertools.pairwise(words[words.index("launch") + 1 :]):
        if word in ("-m", "--module") or word.endswith(".py"):  # the words of the script follow
            break
        name, has_value, value = word.partition("=")
        options[name.replace("-", "_").lstrip("_")] = value if has_value else following
    if "num_processes" in options:
        return int(options["num_processes"])
    if "config_file" not in options:
        return None
    number = content_of(options["config_file"]).get("num_processes")
    return None if number is None else int(number)


def by_arguments(arguments: Any) -> list[Demand]:
    """Return the settings in the script's TrainingArguments, including defaults.

    For example, Trainer clips gradients at 1.0 by default.
    """
    source = "TrainingArguments"
    demands = [
        Demand("gradient_accumulation_steps", arguments.gradient_accumulation_steps, source),
        Demand("gradient_clipping", arguments.max_grad_norm, source),
        Demand("precision", "bf16" if arguments.bf16 else "fp16" if arguments.fp16 else "no", source),
    ]
    written = getattr(arguments, "deepspeed", None)
    if written:
        content = written if isinstance(written, dict) else json.loads(Path(written).read_text())
        demands += by_json(content, source if isinstance(written, dict) else str(written))
    return demands


def by_file(request: Request) -> list[Demand]:
    """Return the settings that an accelerate file, a DeepSpeed JSON or a dict like a DeepSpeed JSON requests.

    Raises ValueError if the file is neither .yaml, .yml nor .json, or does not contain a mapping.
    """
    content = content_of(request)
    if isinstance(request, dict):
        return by_json(content, "config=")
    if Path(request).suffix == ".json":
        return by_json(content, str(request))
    return list(_by_accelerate(content, str(request)))


def content_of(request: Request) -> dict[str, Any]:
    """Return the content of a file. A dict is returned unchanged.

    Raises ValueError if the file is neither .yaml, .yml nor .json, or does not contain a mapping.
    """
    if isinstance(request, dict):
        return request
    path = Path(request)
    if path.suffix == ".json":
        content = json.loads(path.read_text())
    elif path.suffix in (".yaml", ".yml"):
        import yaml  # accelerate needs it, too

        content = yaml.safe_load(path.read_text())
    else:
        raise ValueError(f"{path}: config= accepts an accelerate file (.yaml), a DeepSpeed JSON or a dict.")
    if not isinstance(content, dict):
        raise ValueError(f"{path}: the file has no keys and values.")
    return content


def by_json(content: dict[str, Any], source: str) -> list[Demand]:
    """Return the settings that a DeepSpeed JSON requests, one per key. The value "auto" requests nothing."""
    engine = [Demand("engine", "DeepSpeed", source)] if "zero_optimization" in content else []
    for kind in ("fp16", "bf16"):
        section = content.get(kind)
        if isinstance(section, dict) and section.get("enabled") is True:
            engine.append(Demand("precision", kind, source))
    return [*engine, *(Demand(key, value, source) for key, value in engine_settings.requested(content))]


def _by_accelerate(content: dict[str, Any], source: str) -> Iterator[Demand]:
    for key, fact in known_keys.read()["facts"]["accelerate"].items():
        section, _, name = key.rpartition(".")
        value = (content.get(section) or {} if section else content).get(name)
        if value not in _OPEN:
            yield Demand(fact, value, source)
    kind = content.get("distributed_type")
    if kind == "DEEPSPEED":
        yield Demand("engine", "DeepSpeed", source)
        path = (content.get("deepspeed_config") or {}).get("deepspeed_config_file")
        if path:
            yield from by_json(json.loads(Path(path).read_text()), str(path))
    elif kind == "FSDP":
        yield Demand("engine", f"FSDP{(content.get('fsdp_config') or {}).get('fsdp_version', 1)}", source)
    elif str(kind).startswith("MULTI_") and content.get("num_processes", 1) > 1:
        yield Demand("engine", "DDP", source)


def _read(text: str) -> Any:
    """Convert the value of an environment variable to a number or a truth value if it is one."""
    try:
        return json.loads(text.lower())
    except ValueError:
        return text
