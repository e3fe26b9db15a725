"""Recognize the project's own strategy files by their content, wherever they are copied."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from ..errors import Refusal
from ..files import CONFIGS
from .named_files import read

# Keys that say where and in which precision a strategy runs, and that a copy may therefore change.
_OF_RUNS = {
    "num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port", "gpu_ids", "debug",
    "main_training_function", "rdzv_backend", "same_network", "enable_cpu_affinity", "bf16", "fp16",
}  # fmt: skip


def is_shipped(content: Mapping[str, Any]) -> bool:
    """Return whether a file equals one of this project's strategy files, apart from keys about a run."""
    return _settings(content) in _shipped()


@cache
def _shipped() -> list[dict[str, Any]]:
    paths = sorted(path for path in CONFIGS.rglob("*") if path.suffix in (".yaml", ".json"))
    contents = []
    for path in paths:
        try:
            contents.append(_settings(read(path)))
        except Refusal:  # somebody is editing it
            continue
    return contents


def _settings(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a file that define its strategy. The path of a JSON file is reduced to its name."""
    settings = {key: value for key, value in content.items() if key not in _OF_RUNS}
    section = settings.get("deepspeed_config")
    if isinstance(section, dict) and isinstance(section.get("deepspeed_config_file"), str):
        name = section["deepspeed_config_file"].rpartition("/")[2]
        settings["deepspeed_config"] = {**section, "deepspeed_config_file": name}
    return settings
