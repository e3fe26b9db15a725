"""Read the settings of `accelerate launch` from a job script: its configuration file, changed by the flags."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..engines.keys import known_keys
from ..errors import Refusal
from ..files import read_whole, reading

ENDINGS = (".sh", ".bash", ".sbatch", ".slurm")
_COMMAND = re.compile(r"accelerate\s+launch\s([^\n;|&]*)")
# What stands for a value that only the running job knows, of flags for which any value of its kind will do.
_OF_JOB: dict[str, Any] = {"num_machines": 2, "num_processes": 2, "machine_rank": 0, "main_process_ip": "first-machine",
                           "main_process_port": 29500}  # fmt: skip


def launches(path: Path) -> list[dict[str, str]]:
    """Return the flags of each `accelerate launch` in a job script that names a configuration file."""
    if path.suffix not in ENDINGS:
        return []
    with reading(path, "text"):
        text = re.sub(r"\\\r?\n", " ", read_whole(path).decode())
    commands = [dict(_flags(match[1].split())) for match in _COMMAND.finditer(re.sub(r"(?m)^\s*#.*", "", text))]
    named = [flags for flags in commands if "$" not in flags.get("config_file", "$")]
    return sorted(named, key=lambda flags: "num_machines" not in flags)


def _flags(words: list[str]) -> Iterator[tuple[str, str]]:
    """Yield the flags of the launcher with their values, up to the script that it starts."""
    known = known_keys.engine_schema("accelerate", "flags")
    while words and words[0].startswith("--"):
        name, equals, value = words.pop(0)[2:].partition("=")
        name = name.replace("-", "_")
        if name not in known:
            return
        if not equals and known[name]["type"] != "flag" and words:
            value = words.pop(0)
        yield name, value.strip("\"'")


def with_flags(content: dict[str, Any], flags: dict[str, str]) -> dict[str, Any]:
    """Return the content of an accelerate file, changed as the flags of the launcher change it."""
    places = {key: section for section, keys in known_keys.accelerate_sections().items() for key in keys}
    fields = known_keys.engine_schema("accelerate", "fields")
    changed = {key: dict(value) if isinstance(value, dict) else value for key, value in content.items()}
    for name, text in flags.items():
        is_of_job = "$" in text
        if is_of_job and name not in _OF_JOB:
            continue
        value: Any = _OF_JOB[name] if is_of_job else int(text) if text.isdecimal() else text
        if name in places:
            changed.setdefault(places[name], {})[name] = value
        elif name in fields:
            changed[name] = value
    return changed


def first_launch(path: Path) -> dict[str, str]:
    """Return the flags of the launch that is examined. Raises Refusal if there is none."""
    commands = launches(path)
    if not commands:
        raise Refusal(
            f"{path}: this script has no `accelerate launch` with a --config_file that can be read. Name the "
            "configuration file itself."
        )
    return commands[0]
