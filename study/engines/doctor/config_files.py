"""The two kinds of files that people write: an accelerate file and a DeepSpeed JSON, and what each of their keys does.

What of a file decides over several keys at once stands here, as properties that the table's conditions name; what is
true of one key stands in the table.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from typing import Any

from ..keys import known_keys
from .findings import REMOVE, Finding, Settings, examine, misspelt

STAGES = (0, 1, 2, 3)
PREFIXES = {"fsdp_config": "fsdp_", "dynamo_config": "dynamo_"}  # which the launcher adds where a key lacks it


class AccelerateFile(Settings):
    """An accelerate file, with what decides the way of its keys."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        changed = dict(content)
        for section, prefix in PREFIXES.items():
            if isinstance(inner := content.get(section), dict):
                changed[section] = {k if str(k).startswith(prefix) else f"{prefix}{k}": v for k, v in inner.items()}
        super().__init__(changed)

    @property
    def kind(self) -> str:
        """Its distributed_type; an unquoted NO is YAML for false, and does as 'NO' does."""
        written = self.get("distributed_type", "")
        return "NO" if written is False else str(written)

    @property
    def machines(self) -> int:
        written = self.get("num_machines", 1)
        return written if isinstance(written, int) else 1

    @property
    def json_named(self) -> str | None:
        """The DeepSpeed JSON that the file names."""
        written = self.get("deepspeed_config.deepspeed_config_file", None)
        return str(written) if self.kind == "DEEPSPEED" and written not in (None, "none") else None

    @property
    def stage(self) -> int | None:
        """The ZeRO stage that the file itself says; None: not DeepSpeed, or the JSON says it."""
        if self.kind != "DEEPSPEED" or self.json_named is not None:
            return None
        written = str(self.get("deepspeed_config.zero_stage", 2))
        return int(written) if written in map(str, STAGES) else 2

    @property
    def fsdp_version(self) -> int:
        return 2 if str(self.get("fsdp_config.fsdp_version", 1)) == "2" else 1

    @property
    def has_pdsh(self) -> bool:
        """Whether DeepSpeed's own launcher starts the machines."""
        chosen = self.get("deepspeed_config.deepspeed_multinode_launcher", None)
        return self.kind == "DEEPSPEED" and self.machines > 1 and chosen in (None, "pdsh")

    @property
    def is_uneven(self) -> bool:
        """Whether the machines cannot have the same number of processes."""
        written = self.get("num_processes")
        return self.machines > 1 and isinstance(written, (int, float)) and written % self.machines != 0

    @property
    def mesh_fits(self) -> bool:
        """Whether the sizes of parallelism_config, where there are any, make up the number of processes."""
        names = (
            f"parallelism_config.parallelism_config_{way}_size" for way in ("dp_replicate", "dp_shard", "tp", "cp")
        )
        sizes = math.prod(size for name in names if isinstance(size := self.get(name, 1), int))
        return sizes in (1, self.get("num_processes"))

    @property
    def is_contradicted(self) -> bool:
        """Whether keys stand in the file of which accelerate wants none beside a JSON."""
        section = self.get("deepspeed_config", {})
        beside = set(known_keys.installed("accelerate", "not_beside_a_json"))
        return bool(beside & set(section if isinstance(section, dict) else ())) or (
            self.get("mixed_precision", None) is not None
        )


class DeepSpeedFile(Settings):
    """A DeepSpeed JSON, with what decides what its keys do."""

    @property
    def stage(self) -> int:
        """The ZeRO stage, also where it is written as text; "auto" is 2, silence is 0."""
        written = self.get("zero_optimization.stage", 0)
        return 2 if written == "auto" else next((stage for stage in STAGES if written in (stage, str(stage))), 0)

    @property
    def precision(self) -> str:
        """The 16 bits that the file itself asks for; an empty text where it asks for none, or leaves it open."""
        return next((name for name in ("bf16", "fp16") if self.get(f"{name}.enabled") is True), "")

    @property
    def optimizer_name(self) -> str:
        return str(self.get("optimizer.type", "")).lower()

    @property
    def is_fused(self) -> bool:
        """Whether the optimizer is DeepSpeed's FusedAdam unless torch's is asked for."""
        offloads = self.get("zero_optimization.offload_optimizer.device") in ("cpu", "nvme")
        offloads = offloads or bool(self.get("zero_optimization.cpu_offload", False))
        return not offloads and self.optimizer_name in ("adam", "adamw")


def of_accelerate(name: str, content: Mapping[str, Any]) -> list[Finding]:
    """What accelerate's launcher does with each key of an accelerate file.

    What is on none of its ways to the program (a flag, a variable, a plugin) is lost without a word.
    """
    sections, fields = known_keys.accelerate_sections(), known_keys.installed("accelerate", "fields")

    def unknown(key: str, value: Any) -> Finding | None:
        if key in sections and not isinstance(value, dict) and value is not None:
            return _no_section(name, key, value, "write keys under it, or remove it")
        section, _, inner = key.partition(".")
        if not inner:
            if key in fields or key in known_keys.read()["named"]["converted"]:
                return None
            return misspelt(
                name, key, value, fields, effect="crashes", error="unknown keys",
                message="accelerate refuses a file with an unknown key at its top",
            )  # fmt: skip
        if section not in sections or inner in sections[section] or value is None:
            return None
        message = f"accelerate reads no such key of {section}, and says nothing"
        return misspelt(name, key, value, sections[section], effect="ignored", message=message)

    found = examine(name, AccelerateFile(content), "accelerate", unknown)
    return [finding for finding in found if finding.value is not None or finding.matters]


def of_json(name: str, content: Mapping[str, Any]) -> list[Finding]:
    """What accelerate and DeepSpeed do with each key of a DeepSpeed JSON."""
    named, sections = known_keys.read()["named"], known_keys.json_sections()

    def unknown(key: str, value: Any) -> Finding | None:
        if key in sections and not isinstance(value, dict) and value is not None:
            return _no_section(name, key, value, 'write {"...": ...}, or remove it')
        if value == "auto" and key in named["filled"]:
            return Finding(
                file=name, key=key, value=value, effect="honoured", engine_has=value,
                message="the program's is filled in, by accelerate or by Trainer",
            )  # fmt: skip
        if value == "auto" and key not in named["filled_by_trainer"]:
            return Finding(
                file=name, key=key, value=value, effect="crashes", matters=True, error="not found in kwargs",
                message="nothing fills it in, neither accelerate nor Trainer", remedy="write a value, or remove it",
                mend=REMOVE,
            )  # fmt: skip
        section, _, inner = key.rpartition(".")
        known: Collection[str] = ()
        if not section:
            known = {*named["top"], *sections}
        elif section in sections:
            known = sections[section].keys
        stops = section in sections and sections[section].is_strict
        if stops and inner in known and (wanted := _not_coerced(section, inner, value)):
            return Finding(
                file=name, key=key, value=value, effect="crashes", matters=True, error=NOT_COERCED,
                message=f"DeepSpeed wants {wanted} there, and cannot read this as one", remedy=f"write {wanted}",
            )  # fmt: skip
        if not known or inner in known:
            return None
        return misspelt(
            name, key, value, known, effect="crashes" if stops else "ignored",
            message=f"DeepSpeed refuses an unknown key of {section}" if stops else "DeepSpeed reads no such key, and "
            "says nothing", error="Extra inputs are not permitted" if stops else "",
        )  # fmt: skip

    return examine(name, DeepSpeedFile(content), "json", unknown)


NOT_COERCED = "Input should be a valid"  # what pydantic then says
# What pydantic, which reads DeepSpeed's strict sections, takes as true or false in a string.
_BOOLEANS = {"0", "off", "f", "false", "n", "no", "1", "on", "t", "true", "y", "yes"}


def _not_coerced(section: str, key: str, value: Any) -> str | None:
    """Say what DeepSpeed wants of a key, if it cannot make that of a string or of a number; None if it can.

    A whole number may be written 1e9 or "1000000000", and not "1e9" or 5.5.
    """
    kind = str(known_keys.installed("deepspeed", "strict").get(section, {}).get(key, {}).get("type", ""))
    if kind.startswith("<count"):
        is_whole = isinstance(value, float) and value.is_integer()
        is_written = isinstance(value, str) and re.fullmatch(r"\s*[+-]?\d+(\.0+)?\s*", value)
        return "a whole number" if isinstance(value, (str, float)) and not (is_whole or is_written) else None
    if kind == "<bool>" and isinstance(value, str):
        return None if value.strip().lower() in _BOOLEANS else "true or false"
    return None


def _no_section(name: str, key: str, value: Any, remedy: str) -> Finding:
    return Finding(
        file=name, key=key, value=value, effect="crashes", matters=True, mend=REMOVE, message="is no section",
        remedy=remedy,
    )  # fmt: skip
