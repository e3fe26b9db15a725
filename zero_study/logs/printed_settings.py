"""Collect the settings of a run, such as model and GPU, from the options of the command and from the run's log."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from zero_study.logs.printed_steps import Line


@dataclass(frozen=True)
class Setting:
    """The settings of a run, such as its model and GPU. None means that a value is unknown."""

    model: str | None = None
    gpu: str | None = None
    num_gpus: int | None = None
    strategy: str | None = None
    micro_batch_size: int | None = None
    sequence_length: int | None = None
    gradient_accumulation_steps: int | None = None
    total_steps: int | None = None
    vocabulary: int | None = None
    versions: tuple[tuple[str, str], ...] = ()  # releases of packages


MOST_DIGITS = 16  # of a number that a setting may have
FIRST_LINES = 20_000  # after which a log states no more settings
_MODEL = re.compile(
    r"(?:--model_name_or_path|--model-name-or-path|--model|base_model:|model_name_or_path[\"']?[:=]|_name_or_path[\"']?:)\s*[\"']?"
    r"([\w.\-]+/[\w.\-/]+|[\w.\-]+)"
)  # fmt: skip
_NUMBERS = {
    "micro_batch_size": (
        r"per_device_train_batch_size[\"']?[=: ]+(\d+)", r"Instantaneous batch size per device = ([\d,]+)",
        r"train_micro_batch_size_per_gpu[\"']?[ .=:]+(\d+)", r"micro_batch_size:? ?(\d+)",
        r"--micro-batch-size[= ](\d+)",
    ),
    "gradient_accumulation_steps": (
        r"gradient_accumulation_steps[\"']?[ .=:]+(\d+)", r"Gradient Accumulation steps = ([\d,]+)",
    ),
    "sequence_length": (
        # Not a column such as "completions/max_length", which is a length that occurred.
        r"(?<![\w/])(?:max_seq_length|max_length|cutoff_len|sequence_len|seq_length|model_max_length|(?:max_)?seq_len)"
        r"[\"']?[=: ]+(\d+)",
    ),
    "vocabulary": (r"(?:padded_)?vocab(?:ulary)?_?\s?size[\"']?\s*[=:]+\s*([\d,]+)",),
    "total_steps": (r"Total optimization steps = ([\d,]+)",),
    "num_gpus": (
        r"world_size[\"']?\s*[.=:]+\s*(\d+)", r"--num_processes[= ](\d+)", r"--nproc[_-]per[_-]node[= ](\d+)",
        r"--num_gpus[= ](\d+)",
    ),
}  # fmt: skip
_PATTERNS = [(name, re.compile(pattern)) for name, patterns in _NUMBERS.items() for pattern in patterns]
_STAGE = re.compile(
    r"zero[_ -]?(?:optimization)?_?stage[\"']?[ .=:]+([0-3])|zero([123])(?:_|\.json|\b)|ds_z([123])", re.IGNORECASE
)
_PACKAGES = "deepspeed|transformers|accelerate|torch|pytorch|trl|peft|bitsandbytes|datasets|vllm"
_VERSION = re.compile(
    rf"(?i)\b({_PACKAGES})`?(?:_version| version| info: version)?[\"']?\s*(?:==|[:=])\s*[\"']?v?(\d+\.\d+(?:\.\d+)?)"
)
# Words of which one stands in each line that states a setting, so that other lines need no pattern.
_STATES = re.compile(
    r"version|vocab|deepspeed|torch|transformers|accelerate|model|batch|accum|length|len\b|Num |steps|world|nproc|num_|"
    r"zero"
)


class SettingReader:
    """Reads the settings of a run from the lines of its log. The first statement of a value counts."""

    wants_all = False

    def __init__(self) -> None:
        self.stated: dict[str, Any] = {}
        self.versions: dict[str, str] = {}

    @staticmethod
    def concerns(text: str) -> bool:
        """Return whether a line may state a setting of the run. The result does not depend on the line's digits."""
        return _STATES.search(text) is not None

    def take(self, line: Line) -> None:
        """Read a setting of the run from a line that states it."""
        if line.number > FIRST_LINES:
            return
        for name, pattern in _PATTERNS:
            if name not in self.stated and (match := pattern.search(line.text)):
                text = match[1].replace(",", "").rstrip(".")
                if text.isdigit() and len(text) < MOST_DIGITS and int(text):
                    self.stated[name] = int(text)
        if "model" not in self.stated and (match := _MODEL.search(line.text)) and not match[1].isdigit():
            self.stated["model"] = match[1].rstrip("/").rpartition("/")[2] if match[1].startswith("/") else match[1]
        if "strategy" not in self.stated and (match := _STAGE.search(line.text)):
            self.stated["strategy"] = f"zero{next(filter(None, match.groups()))}"
        for name, release in _VERSION.findall(line.text):
            self.versions.setdefault(name.lower().replace("pytorch", "torch"), release)

    def setting(self, requested: Setting) -> Setting:
        """Return the settings of the run. Values from the user replace those from the log."""
        stated = {name: value for name, value in self.stated.items() if getattr(requested, name) is None}
        return replace(requested, **stated, versions=tuple(sorted(self.versions.items())))
