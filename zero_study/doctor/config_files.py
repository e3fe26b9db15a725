"""Examine two kinds of configuration files: accelerate files and DeepSpeed JSON files.

The table of keys has the rules for single keys. A condition that depends on several keys of a file is a property in
this module, and the table refers to it by its name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

from ..engines.keys import known_keys
from ..engines.keys.patterns import in_words, is_above, matches
from .findings import REMOVE, Finding, Settings, examine, misspelt

STAGES = (0, 1, 2, 3)
# The launcher adds these prefixes to keys that lack them.
PREFIXES = {"fsdp_config": "fsdp_", "dynamo_config": "dynamo_"}


class AccelerateFile(Settings):
    """An accelerate file. The rules in the table of keys can use its properties as conditions."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        prefixed = dict(content)
        for section, prefix in PREFIXES.items():
            if isinstance(inner := content.get(section), dict):
                prefixed[section] = {k if str(k).startswith(prefix) else f"{prefix}{k}": v for k, v in inner.items()}
        super().__init__(prefixed)

    @property
    def kind(self) -> str:
        """The value of distributed_type. An unquoted NO, which YAML reads as false, counts as 'NO'."""
        value = self.get("distributed_type", "")
        return "NO" if value is False else str(value)

    @property
    def machines(self) -> int:
        number = self.get("num_machines", 1)
        return number if isinstance(number, int) else 1

    @property
    def json_named(self) -> str | None:
        """The path of the DeepSpeed JSON that the file names. None if it names none."""
        path = self.get("deepspeed_config.deepspeed_config_file", None)
        return str(path) if self.kind == "DEEPSPEED" and path not in (None, "none") else None

    @property
    def stage(self) -> int | None:
        """The ZeRO stage that the accelerate file itself sets.

        None if the file is not for DeepSpeed, or if it names a DeepSpeed JSON, which then sets the stage.
        """
        if self.kind != "DEEPSPEED" or self.json_named is not None:
            return None
        stage = str(self.get("deepspeed_config.zero_stage", 2))
        return int(stage) if stage in map(str, STAGES) else 2

    @property
    def fsdp_version(self) -> int:
        return 2 if str(self.get("fsdp_config.fsdp_version", 1)) == "2" else 1

    @property
    def has_pdsh(self) -> bool:
        """Whether DeepSpeed's own launcher starts the processes of several machines."""
        launcher = self.get("deepspeed_config.deepspeed_multinode_launcher", None)
        return self.kind == "DEEPSPEED" and self.machines > 1 and launcher in (None, "pdsh")

    @property
    def rank_fits(self) -> bool:
        """Whether machine_rank is the number of one of several machines. True for one machine, which ignores it."""
        rank = self.get("machine_rank", 0)
        return self.machines <= 1 or (isinstance(rank, int) and 0 <= rank < self.machines)

    @property
    def has_placeholder_ip(self) -> bool:
        """Whether main_process_ip cannot be the address by which other machines reach the first one."""
        address = self.get("main_process_ip", None)
        if address is None:
            return False
        is_name = re.fullmatch(r"[\w.:-]+", str(address)) is not None and not re.fullmatch(r"[A-Z_]+", str(address))
        is_own = str(address) in ("localhost", "0.0.0.0", "127.0.0.1", "::1")
        return not is_name or is_own or re.search(r"(?i)x\.x|your_|_ip$", str(address)) is not None

    @property
    def is_uneven(self) -> bool:
        """Whether the number of processes is not a multiple of the number of machines."""
        number = self.get("num_processes")
        return self.machines > 1 and isinstance(number, (int, float)) and number % self.machines != 0

    @property
    def mesh_fits(self) -> bool:
        """Whether the product of the sizes in parallelism_config equals the number of processes.

        True also if the product is 1, as it is without any sizes, and with sequence parallelism. In that case,
        accelerate does not compare the two.
        """
        ways = ("dp_replicate", "dp_shard", "tp", "cp")
        names = (f"parallelism_config.parallelism_config_{way}_size" for way in ways)
        sequence = self.get("parallelism_config.parallelism_config_sp_size", 1)
        if isinstance(sequence, int) and sequence > 1:
            return True
        sizes = math.prod(size for name in names if isinstance(size := self.get(name, 1), int))
        return sizes in (1, self.get("num_processes", sizes))

    @property
    def is_contradicted(self) -> bool:
        """Whether the file has keys that accelerate refuses if the file also names a DeepSpeed JSON."""
        section = self.get("deepspeed_config", {})
        refused = known_keys.engine_schema("accelerate", "not_beside_a_json")
        has_refused = isinstance(section, dict) and not section.keys().isdisjoint(refused)
        return has_refused or self.get("mixed_precision", None) is not None


class DeepSpeedFile(Settings):
    """A DeepSpeed JSON file. The rules in the table of keys can use its properties as conditions."""

    @property
    def stage(self) -> int:
        """The ZeRO stage, which may be written as text. It is 2 for "auto", and 0 if the file sets none."""
        value = self.get("zero_optimization.stage", 0)
        return 2 if value == "auto" else next((stage for stage in STAGES if value in (stage, str(stage))), 0)

    @property
    def precision(self) -> str:
        """The 16-bit precision that the file itself requests: bf16 or fp16.

        Empty if the file requests none, or if the value is "auto".
        """
        return next((name for name in ("bf16", "fp16") if self.get(f"{name}.enabled") is True), "")

    @property
    def optimizer_name(self) -> str:
        return str(self.get("optimizer.type", "")).lower()

    @property
    def is_fused(self) -> bool:
        """Whether the optimizer is DeepSpeed's FusedAdam, which it is unless torch_adam is set."""
        offloads = self.get("zero_optimization.offload_optimizer.device") in ("cpu", "nvme")
        offloads = offloads or bool(self.get("zero_optimization.cpu_offload", False))
        return not offloads and self.optimizer_name in ("adam", "adamw")

    @property
    def clips_update(self) -> bool:
        """Whether DeepSpeed would clip the update of Muon instead of the gradient."""
        return self.optimizer_name == "muon" and self.stage > 0

    @property
    def warms_up_too_long(self) -> bool:
        most = self.get("scheduler.params.total_num_steps")
        return is_above(self.get("scheduler.params.warmup_num_steps"), most)

    @property
    def warm_up_falls(self) -> bool:
        return is_above(self.get("scheduler.params.warmup_min_lr"), self.get("scheduler.params.warmup_max_lr"))


def of_accelerate(name: str, content: Mapping[str, Any]) -> list[Finding]:
    """Return findings about what accelerate's launcher does with each key of an accelerate file.

    `name` is the name of the file in the findings. The launcher passes a key to the program as a flag, a variable or a
    plugin. It silently drops all other keys.
    """
    findings = examine(name, AccelerateFile(content), "accelerate", partial(_unknown_to_accelerate, name))
    return [finding for finding in findings if finding.value is not None or finding.matters]


def _unknown_to_accelerate(file: str, key: str, value: Any) -> Finding | None:
    """Return the finding for a key of an accelerate file that has no rule. None if the key is fine."""
    sections, fields = known_keys.accelerate_sections(), known_keys.engine_schema("accelerate", "fields")
    if key in sections and not isinstance(value, dict) and value is not None:
        return _no_section(file, key, value, "accelerate", "Write keys below this key, or remove it.")
    section, _, inner = key.partition(".")
    if not inner:
        if key in fields or key in known_keys.read()["named"]["converted"]:
            return None
        return misspelt(
            file, key, value, fields, effect="crashes", error="unknown keys",
            message="accelerate refuses a file with an unknown key at its top level.",
        )  # fmt: skip
    if section not in sections or inner in sections[section] or value is None:
        return None
    message = f"accelerate does not know this key of {section}, and ignores it without a warning."
    return misspelt(file, key, value, sections[section], effect="ignored", message=message)


def of_json(name: str, content: Mapping[str, Any]) -> list[Finding]:
    """Return findings about what accelerate and DeepSpeed do with each key of a DeepSpeed JSON.

    `name` is the name of the file in the findings.
    """
    findings = examine(name, DeepSpeedFile(content), "json", partial(_unknown_in_json, name))
    # DeepSpeed also converts the values of keys that it then ignores.
    harmless = ("ignored", False)
    return [
        (_wrong_value(name, finding.key, finding.value) if (finding.effect, finding.matters) == harmless else None)
        or finding
        for finding in findings
    ]


def _wrong_value(file: str, key: str, value: Any) -> Finding | None:
    """Return the finding for a value that DeepSpeed cannot convert to the type of its key. None if it can."""
    above, _, name = key.rpartition(".")
    expected = _not_coerced(above, name, value)
    if expected is None or value == "auto":
        return None
    return Finding(
        file=file, key=key, value=value, effect="crashes", matters=True, error=NOT_COERCED,
        message=f"DeepSpeed expects {expected} here, and cannot convert this value.", remedy=f"Write {expected}.",
    )  # fmt: skip


def _unknown_in_json(file: str, key: str, value: Any) -> Finding | None:
    """Return the finding for a key of a DeepSpeed JSON that has no rule. None if it works as written."""
    if key.startswith(("_", "$", "//")) or key == "comment":
        message = "DeepSpeed treats this key as a comment."
        return Finding(file=file, key=key, value=value, effect="ignored", message=message)
    if key in known_keys.json_sections() and not isinstance(value, dict) and value is not None:
        return _no_section(file, key, value, "DeepSpeed", _SECTION_REMEDIES.get(key, "Remove the key."))
    if value == "auto" and (finding := _of_auto(file, key)):
        return finding
    return _misread_by_deepspeed(file, key, value)


def _of_auto(file: str, key: str) -> Finding | None:
    """Return the finding for a key whose value is "auto". None if Trainer replaces the value.

    Whether DeepSpeed knows the key is then still to be checked.
    """
    added = known_keys.read()["named"]
    if key in added["filled"]:
        return Finding(
            file=file, key=key, value="auto", effect="honoured", engine_has="auto",
            message='accelerate or Trainer replaces "auto" by the program\'s value.',
        )  # fmt: skip
    if key not in added["filled_by_trainer"]:
        return Finding(
            file=file, key=key, value="auto", effect="crashes", matters=True, error="not found in kwargs",
            message='Neither accelerate nor Trainer replaces "auto" here.', remedy="Write a value, or remove the key.",
            mend=REMOVE,
        )  # fmt: skip
    return None


def _misread_by_deepspeed(file: str, key: str, value: Any) -> Finding | None:
    """Return the finding for a key that DeepSpeed ignores or fails at.

    None if DeepSpeed knows the key and can read the value.
    """
    sections = known_keys.json_sections()
    above, _, name = key.rpartition(".")
    section = sections.get(above)
    is_strict = section is not None and section.is_strict
    top: Collection[str] = {*known_keys.read()["named"]["top"], *sections}
    valid_names = section.keys if section else () if above else top
    if is_strict and name in valid_names and (finding := _wrong_value(file, key, value)):
        return finding
    if not valid_names or name in valid_names:
        return None
    if is_strict:
        message, error = f"DeepSpeed refuses unknown keys in {above}.", "Extra inputs are not permitted"
        return misspelt(file, key, value, valid_names, effect="crashes", message=message, error=error)
    message = "DeepSpeed does not know this key, and ignores it without a warning."
    return misspelt(file, key, value, valid_names, effect="ignored", message=message)


NOT_COERCED = "Input should be"  # pydantic's message if it cannot convert a value
# The strings that pydantic, which reads DeepSpeed's strict sections, converts to true or false.
_BOOLEANS = {"0", "off", "f", "false", "n", "no", "1", "on", "t", "true", "y", "yes"}


def _not_coerced(section: str, key: str, value: Any) -> str | None:
    """Return the type that DeepSpeed expects for a key, if it cannot convert a string or a number to it.

    None if it can. For example, a whole number may be written as 1e9 or "1000000000", but not as "1e9" or 5.5. A number
    outside the bounds of the key is not converted either.
    """
    kind = known_keys.engine_schema("deepspeed", "strict").get(section, {}).get(key, {}).get("type", "")
    word = str(kind)
    if word.startswith(("<count", "<number")):
        is_text = isinstance(value, str)
        is_digits = is_text and re.fullmatch(r"\s*[+-]?\d+(\.0+)?\s*", value)
        number = float(value) if is_digits else value
        is_of_type = number is None or isinstance(number, bool) or matches(kind, number)
        return None if is_of_type else in_words(kind)
    if word == "<bool>" and isinstance(value, str):
        return None if value.strip().lower() in _BOOLEANS else "true or false"
    return None


# What to write for a section of a DeepSpeed JSON that is not a section.
_SECTION_REMEDIES = {
    **dict.fromkeys(
        ("zero_optimization.offload_param", "zero_optimization.offload_optimizer"),
        'Write {"device": "cpu"} to offload, or remove the key.',
    ),
    **dict.fromkeys(("fp16", "bf16"), 'Write {"enabled": true} or {"enabled": false}.'),
}


def _no_section(file: str, key: str, value: Any, engine: str, remedy: str) -> Finding:
    return Finding(
        file=file, key=key, value=value, effect="crashes", matters=True, mend=REMOVE, remedy=remedy,
        message=f"{engine} expects a section here, not a single value.",
    )  # fmt: skip
