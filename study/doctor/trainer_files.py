"""Examine files for programs that use transformers' Trainer: TrainingArguments, TRL, LLaMA-Factory and ms-swift.

Only the keys that accelerate, DeepSpeed or FSDP read are examined. The rules are those of transformers'
`training_args.py`, `trainer.py` and `integrations/deepspeed.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..engines.keys.patterns import ABSENT
from .findings import Effect, Finding, Settings
from .fsdp_sections import STRATEGIES
from .kinds import Kind

# What a Trainer's file may say in words instead of a path, for ms-swift.
NAMES_OF_MS_SWIFT = ("zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload", "fsdp2")
_OPTIONS = {*(name.lower() for name in STRATEGIES), "offload", "auto_wrap"}

# The keys of a DeepSpeed JSON that Trainer compares with an argument, unless they are "auto".
COMPARED = {
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.eps": "adam_epsilon",
    "optimizer.params.weight_decay": "weight_decay",
    "scheduler.params.warmup_max_lr": "learning_rate",
    "scheduler.params.warmup_num_steps": "warmup_steps",
    "fp16.enabled": "fp16",
    "bf16.enabled": "bf16",
}
MISMATCH = "Please correct the following DeepSpeed config values that mismatch TrainingArguments"
# What Trainer puts in the place of "auto" where a program with accelerate alone would do something else.
FILLED_BY_TRAINER = {
    "gradient_clipping": "max_grad_norm",
    "optimizer.params.betas": "adam_beta1 and adam_beta2",
    "optimizer.params.eps": "adam_epsilon",
}


@dataclass(frozen=True)
class Arguments:
    """The Trainer's arguments that a configuration file contains."""

    file: str
    kind: Kind
    content: Mapping[str, Any]

    def is_true(self, *names: str) -> bool:
        return any(str(self.content.get(name)).lower() == "true" for name in names)

    @property
    def uses_fsdp(self) -> bool:
        return self.content.get("fsdp") not in (None, False, "", [], "false", "False")

    @property
    def uses_deepspeed(self) -> bool:
        return bool(self.content.get("deepspeed"))

    def finding(self, key: str, effect: Effect, message: str = "", remedy: str = "", **more: Any) -> Finding:
        """Return a finding about a key of the file. It needs attention unless the key is honored or not examined."""
        matters = more.pop("matters", effect not in ("honoured", "not examined"))
        return Finding(
            file=self.file, key=key, value=self.content.get(key, ABSENT), effect=effect, message=message, remedy=remedy,
            matters=matters, **more,
        )  # fmt: skip


def of_arguments(arguments: Arguments) -> list[Finding]:
    """Return a finding for each argument that accelerate, DeepSpeed or FSDP read. Named files are not examined."""
    return [
        finding for key, rule in _RULES.items() if arguments.content.get(key) is not None
        if (finding := rule(arguments, key)) is not None
    ]  # fmt: skip


def _precision(arguments: Arguments, key: str) -> Finding:
    if arguments.is_true("bf16") and arguments.is_true("fp16"):
        message = "Trainer stops if bf16 and fp16 are both true."
        return arguments.finding(
            key, "crashes", message, "Write true for only one of them.", error="At most one of fp16"
        )
    return arguments.finding(key, "honoured")


def _accumulation(arguments: Arguments, key: str) -> Finding:
    value = arguments.content[key]
    if isinstance(value, (int, str)) and str(value).isdigit() and int(value) > 0 and not isinstance(value, bool):
        return arguments.finding(key, "honoured")
    return arguments.finding(key, "not examined", "Doctor expected a whole number.")


def _deepspeed(arguments: Arguments, key: str) -> Finding | None:
    if not arguments.uses_deepspeed:
        return None
    if arguments.uses_fsdp:
        message = "Trainer stops if both fsdp and deepspeed are set."
        return arguments.finding(
            key, "crashes", message, "Remove one of them.", error="is not possible, deactivate one"
        )
    if arguments.is_true("use_cpu", "no_cuda"):
        return _dropped(arguments, key)
    return arguments.finding(key, "honoured") if not isinstance(arguments.content[key], dict) else None


def _dropped(arguments: Arguments, key: str) -> Finding:
    message = "Trainer does not use DeepSpeed or FSDP if use_cpu is true."
    return arguments.finding(key, "ignored", message, "Remove use_cpu to train with this section.")


def _fsdp(arguments: Arguments, key: str) -> Finding | None:
    value = arguments.content[key]
    if not arguments.uses_fsdp or value is True or str(value).lower() == "true":
        return arguments.finding(key, "honoured") if value is True else None
    if arguments.is_true("use_cpu", "no_cuda"):
        return _dropped(arguments, key)
    if arguments.kind == "ms_swift":
        return arguments.finding(key, "honoured")
    options = value if isinstance(value, list) else str(value).split()
    if unknown := [option for option in options if str(option).lower() not in _OPTIONS]:
        message = f"Trainer stops at {unknown[0]}: it is no option of fsdp."
        return arguments.finding(key, "crashes", message, "Write true.", error="Unknown `fsdp` option")
    section = arguments.content.get("fsdp_config")
    version = _version_in(section)
    only_1 = [option for option in options if str(option).lower() in ("no_shard", "hybrid_shard", "hybrid_shard_zero2")]
    if only_1 and version == "2":
        message = f"Trainer stops, because {only_1[0]} exists only with FSDP1 and this section requests FSDP2."
        return arguments.finding(key, "crashes", message, "Write full_shard.", error="is only available with FSDP1")
    return arguments.finding(key, "honoured")


def _version_in(section: Any) -> str | None:
    if not isinstance(section, dict):
        return None
    version = section.get("version", section.get("fsdp_version"))
    return None if version is None else str(version)


def _fsdp_config(arguments: Arguments, key: str) -> Finding | None:
    """Return the finding for the argument `fsdp_config` as a whole. None if its keys get separate findings."""
    section = arguments.content[key]
    is_default = isinstance(section, dict) and not any(section.values())  # as Trainer writes it into its own files
    if is_default or section in ("", "{}"):
        return None
    if not arguments.uses_fsdp and arguments.kind != "ms_swift":
        message = "Trainer reads this section only if fsdp is set."
        return arguments.finding(key, "ignored", message, "Add fsdp: true, or pass --fsdp on the command line.")
    if not isinstance(section, dict):
        return arguments.finding(key, "honoured")
    values = {str(name).removeprefix("fsdp_"): str(value).lower() for name, value in section.items()}
    is_argument = arguments.is_true("gradient_checkpointing", "activation_checkpointing")
    if is_argument and values.get("activation_checkpointing") == "true" and arguments.kind != "ms_swift":
        message = (
            "Trainer stops if activation checkpointing is set both in this section and as its own "
            "argument gradient_checkpointing."
        )
        remedy = "Remove gradient_checkpointing (activation_checkpointing) from the arguments."
        return arguments.finding(key, "crashes", message, remedy, error="can't both be set to True")
    return None


_RULES: dict[str, Callable[[Arguments, str], Finding | None]] = {
    "bf16": _precision,
    "fp16": _precision,
    "gradient_accumulation_steps": _accumulation,
    "use_cpu": lambda arguments, key: arguments.finding(key, "honoured"),
    "deepspeed": _deepspeed,
    "fsdp": _fsdp,
    "fsdp_config": _fsdp_config,
}


# ---------------------------------------------------------------- the DeepSpeed file under a Trainer


def under_trainer(findings: list[Finding], arguments: Mapping[str, Any]) -> list[Finding]:
    """Return the findings for a DeepSpeed file, adapted to a Trainer that reads it with these arguments.

    Trainer replaces "auto" in more keys than accelerate alone.
    """
    return [_under_trainer(finding, arguments) for finding in findings]


def _under_trainer(finding: Finding, arguments: Mapping[str, Any]) -> Finding:
    if finding.value == "auto" and finding.key in FILLED_BY_TRAINER:
        message = f"Trainer replaces auto by its {FILLED_BY_TRAINER[finding.key]}."
        return replace(finding, effect="honoured", message=message, remedy="", matters=False, error="")
    if (
        finding.value is ABSENT
        and finding.key == "gradient_clipping"
        and _number(arguments.get("max_grad_norm", 1)) == 1
    ):
        return replace(finding, matters=False)
    if finding.value is ABSENT and finding.key == "gradient_accumulation_steps":
        return replace(finding, matters=_number(arguments.get(finding.key, 1)) != 1)
    return finding


def mismatches(file: str, json_file: Settings, arguments: Arguments, above: str = "") -> Iterator[Finding]:
    """Yield a finding for each value of a DeepSpeed file that contradicts an argument of the Trainer.

    Trainer refuses such a pair. Arguments that the file does not contain are not compared, because they may be on the
    command line. `above` is the dotted name of the section that holds the DeepSpeed file, with a dot at its end.
    """
    for key, name in COMPARED.items():
        value, argument = json_file.get(key, None), arguments.content.get(name)
        if value in (None, "auto") or argument is None or _number(value) == _number(argument):
            continue
        if _number(value) is None or _number(argument) is None:
            continue
        message = f"Trainer stops, because {name} is {argument} in {arguments.file}."
        yield Finding(
            file=file, key=f"{above}{key}", value=value, effect="crashes", matters=True, error=MISMATCH,
            message=message, remedy='Write "auto". Trainer then fills in its own value.', mend="auto",
        )  # fmt: skip


def _number(value: Any) -> float | None:
    """Return a value as a number. True counts as 1. None if it is not a number."""
    if str(value).lower() in ("true", "false"):
        return float(str(value).lower() == "true")
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
