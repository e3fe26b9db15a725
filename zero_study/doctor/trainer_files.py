"""Examine files for programs that use transformers' Trainer: TrainingArguments, TRL, LLaMA-Factory and ms-swift.

Only the keys that accelerate, DeepSpeed or FSDP read are examined. The rules are those of transformers'
`training_args.py`, `trainer.py` and `integrations/deepspeed.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..engines.keys.patterns import ABSENT, in_words, is_above, matches
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
    "scheduler.params.total_num_steps": "max_steps",
    "fp16.enabled": "fp16",
    "bf16.enabled": "bf16",
}
OF_STEPS = ("scheduler.params.warmup_num_steps", "scheduler.params.total_num_steps")
OPPOSITE = {"bf16": "fp16", "fp16": "bf16"}
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
    """Return a finding for each argument that accelerate, DeepSpeed or FSDP read. Named files are not examined.

    Of the other arguments, only those whose value stops a training, or contradicts another one, have a finding.
    """
    findings = [
        finding for key, rule in _RULES.items() if arguments.content.get(key) is not None
        if (finding := rule(arguments, key)) is not None
    ]  # fmt: skip
    wrong = {finding.key: finding for finding in [*_wrong_values(arguments), *_contradictions(arguments)]}
    return [finding for finding in findings if finding.key not in wrong] + list(wrong.values())


# What Trainer, DataLoaders and torch's optimizers accept, by argument. With another value, they stop or train nothing.
_WHOLE, _NOT_NEGATIVE = ("<int >= 1>", "<number >= 0>")
_ACCEPTED: dict[str, Any] = {
    **dict.fromkeys(("per_device_train_batch_size", "gradient_accumulation_steps"), _WHOLE),
    **dict.fromkeys(("learning_rate", "adam_epsilon", "warmup_steps", "dataloader_num_workers"), _NOT_NEGATIVE),
    **dict.fromkeys(("weight_decay", "max_grad_norm", "max_steps", "save_steps", "eval_steps"), "<number>"),
    **dict.fromkeys(("adam_beta1", "adam_beta2"), "<number between 0 and 1>"),
    "num_train_epochs": "<number > 0>",
    "warmup_ratio": "<number between 0 and 1>",
    "ddp_backend": "<a backend>",
}
_BACKENDS = {"nccl", "gloo", "mpi", "xccl", "ccl", "hccl", "cncl", "mccl", "ucc", "hpu_backend", "neuron"}


def _wrong_values(arguments: Arguments) -> Iterator[Finding]:
    """Yield findings about values with which a training stops, or trains nothing."""
    has_steps = is_above(arguments.content.get("max_steps"), 0)
    for key, pattern in _ACCEPTED.items():
        value = arguments.content.get(key)
        if value is None or _is_accepted(pattern, value) or (key == "num_train_epochs" and has_steps):
            continue
        number = _number(value) if isinstance(value, str) else None
        words = "a name of a backend of torch.distributed" if key == "ddp_backend" else in_words(pattern)
        if number is None or not _is_accepted(pattern, number):
            yield arguments.finding(key, "crashes", f"The training needs {words} here.", f"Write {words}.")
        elif arguments.kind == "training_arguments":  # the parsers of other tools convert text
            message = (
                "This value is text. HfArgumentParser does not convert it, and the training stops. Other parsers do "
                "convert it, and YAML reads a number such as 2e-5 without a point as text."
            )
            is_quoted = arguments.file.endswith(".json") or number == number // 1
            yield arguments.finding(
                key, "crashes", message, f"Write {number!r}.", matters=is_quoted, is_note=not is_quoted
            )


def _is_accepted(pattern: str, value: Any) -> bool:
    if pattern == "<a backend>":
        return all(part.rpartition(":")[2].lower() in _BACKENDS for part in str(value).split(","))
    if pattern == "<number between 0 and 1>":
        return matches("<number >= 0>", value) and value <= 1
    return matches(pattern, value)


def _contradictions(arguments: Arguments) -> Iterator[Finding]:
    """Yield findings about numbers that contradict each other."""
    content = arguments.content
    if is_above(content.get("max_steps"), 0) and is_above(content.get("warmup_steps"), content["max_steps"]):
        message = (
            f"The warm-up is longer than the training of {content['max_steps']} steps, so the learning rate never "
        )
        yield arguments.finding("warmup_steps", "means something else", f"{message}reaches its maximum.", "Write less.")
    schedule = content.get("lr_scheduler_kwargs")
    least = schedule.get("min_lr") if isinstance(schedule, dict) else None
    if is_above(least, content.get("learning_rate")):
        message = f"min_lr {least} is above the learning_rate {content['learning_rate']}, so the rate rises to it."
        yield arguments.finding("lr_scheduler_kwargs", "means something else", message, "Write a smaller min_lr.")


def _precision(arguments: Arguments, key: str) -> Finding:
    if arguments.is_true("bf16") and arguments.is_true("fp16"):
        message = "Trainer stops if bf16 and fp16 are both true."
        return arguments.finding(
            key, "crashes", message, "Write true for only one of them.", error="At most one of fp16"
        )
    return arguments.finding(key, "honoured")


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
    "gradient_accumulation_steps": lambda arguments, key: arguments.finding(key, "honoured"),
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
        message = f'Trainer replaces "auto" by its {FILLED_BY_TRAINER[finding.key]}.'
        return replace(finding, effect="honoured", message=message, remedy="", matters=False, is_note=False, error="")
    if finding.value is ABSENT and finding.key == "gradient_clipping" and not finding.matters:
        return _without_clipping(finding, arguments)
    if finding.value is ABSENT and finding.key == "gradient_accumulation_steps":
        return replace(finding, matters=_number(arguments.get(finding.key, 1)) != 1)
    return finding


def _without_clipping(finding: Finding, arguments: Mapping[str, Any]) -> Finding:
    """Return the finding about a missing gradient_clipping. It matters if a written max_grad_norm has no effect."""
    norm, clips_at = _number(arguments.get("max_grad_norm")), _number(finding.engine_has)
    if norm is None or clips_at is None or norm == clips_at:
        return replace(finding, effect="honoured", is_note=False)
    message = f"Without this key, DeepSpeed's default of {clips_at} counts, and max_grad_norm: {norm} has no effect."
    return replace(
        finding, effect="means something else", message=message, remedy='Write "auto".', matters=True, mend="auto"
    )


def mismatches(file: str, json_file: Settings, arguments: Arguments, above: str = "") -> Iterator[Finding]:
    """Yield a finding for each value of a DeepSpeed file that contradicts an argument of the Trainer.

    Trainer refuses such a pair. Arguments that the file does not contain are not compared, because they may be on the
    command line. `above` is the dotted name of the section that holds the DeepSpeed file, with a dot at its end.
    """
    content = _with_other_precision(arguments)
    for key, name in COMPARED.items():
        value, argument = json_file.get(key, None), content.get(name)
        if value in (None, "auto") or argument is None or _number(value) == _number(argument):
            continue
        number = _number(argument)
        if _number(value) is None or number is None:
            continue
        if key in OF_STEPS and number < 1:  # a share of the steps, or all steps
            continue
        precision = OPPOSITE.get(name) if arguments.content.get(name) is None else None
        stated = f"{name} is {argument}" if precision is None else f"{precision} is true, and {name} therefore false,"
        message = f"Trainer stops, because {stated} in {arguments.file}."
        yield Finding(
            file=file, key=f"{above}{key}", value=value, effect="crashes", matters=True, error=MISMATCH,
            message=message, remedy='Write "auto". Trainer then fills in its own value.', mend="auto",
        )  # fmt: skip


def _with_other_precision(arguments: Arguments) -> dict[str, Any]:
    """Return the arguments with bf16 and fp16. If one of them is true, the other one is false, or Trainer stops."""
    implied = {name: False for name, precision in OPPOSITE.items() if arguments.is_true(precision)}
    return {**implied, **{name: value for name, value in arguments.content.items() if value is not None}}


def _number(value: Any) -> float | None:
    """Return a value as a number. True counts as 1. None if it is not a number."""
    if str(value).lower() in ("true", "false"):
        return float(str(value).lower() == "true")
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
