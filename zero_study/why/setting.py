"""Collect the settings of a run, such as model and GPU, from the options of the command and from the run's log."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict

from zero_study.why.log import Line

# What a log can state of a setting beside its numbers. features.yaml has the signs.
Feature = Literal[
    "quantized", "vision", "experts", "stream", "engine", "checkpointing", "no checkpointing", "offload",
    "reinforcement", "eager", "fp16", "fsdp", "several machines", "large images", "adapter", "classes",
]  # fmt: skip
FILE = Path(__file__).with_name("features.yaml")


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
    num_examples: int | None = None
    clipping: float | None = None
    num_epochs: float | None = None
    is_resumed: bool = False
    total_steps: int | None = None
    vocabulary: int | None = None
    features: frozenset[Feature] = frozenset()
    versions: tuple[tuple[str, str], ...] = ()  # releases of packages


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
        r"(?:max_seq_length|max_length|cutoff_len|sequence_len|seq_length|model_max_length|seq_len)[\"']?[=: ]+(\d+)",
    ),
    "vocabulary": (r"(?:padded_)?vocab(?:ulary)?_?\s?size[\"']?\s*[=:]+\s*([\d,]+)",),
    "num_examples": (r"Num examples = ([\d,]+)",),
    "total_steps": (r"Total optimization steps = ([\d,]+)",),
    "num_gpus": (
        r"world_size[\"']?\s*[.=:]+\s*(\d+)", r"--num_processes[= ](\d+)", r"--nproc[_-]per[_-]node[= ](\d+)",
        r"--num_gpus[= ](\d+)",
    ),
}  # fmt: skip
_DECIMALS = {
    "clipping": (r"(?:max_grad_norm|gradient_clipping|clip_grad|max_norm)[\"']?[ .=:]+([\d.]+)",),
    "num_epochs": (r"Num Epochs = ([\d.]+)",),
}
_STAGE = re.compile(
    r"zero[_ -]?(?:optimization)?_?stage[\"']?[ .=:]+([0-3])|zero([123])(?:_|\.json|\b)|ds_z([123])", re.IGNORECASE
)
_VERSION = re.compile(
    r"(?i)\b(deepspeed|transformers|accelerate|torch|pytorch|trl|peft|bitsandbytes)`?"
    r"(?:_version| version| info: version)?[\"']?\s*(?:==|[:=])\s*[\"']?v?(\d+\.\d+(?:\.\d+)?)"
)
_RESUMED = re.compile(
    r"Continuing training from (?:checkpoint|epoch|global step)|resume_from_checkpoint[= ]|Resuming from|"
    r"Loading checkpoint at step|loaded checkpoint .* at (?:step|iteration)|Resumed from", re.IGNORECASE,
)  # fmt: skip
_VALUES = {
    "{on}": r"[\"']?(?:\s*[:=]\s*|\s+)[\"']?(?:true\b|1\b)",
    "{off}": r"[\"']?(?:\s*[:=]\s*|\s+)[\"']?(?:false\b|0\b)",
}


class _Signs(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    feature: Feature
    signs: tuple[str, ...]

    @property
    def pattern(self) -> re.Pattern[str]:
        text = "|".join(self.signs)
        for name, value in _VALUES.items():
            text = text.replace(name, value)
        return re.compile(text, re.IGNORECASE)


@cache
def _features() -> dict[Feature, re.Pattern[str]]:
    entries = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return {signs.feature: signs.pattern for signs in map(_Signs.model_validate, entries)}


MOST_FEATURE_LINES = 3000  # lines in which features are looked for; longer logs repeat what they state
# Words of which one stands in each line that states a setting, so that other lines need no pattern.
_STATES = re.compile(
    r"version|vocab|deepspeed|torch|transformers|accelerate|model|batch|accum|length|len\b|Num |steps|world|nproc|num_|"
    r"max_grad|max_norm|clip|zero|[Rr]esum|Continuing|checkpoint"
)


class SettingReader:
    """Reads the settings of a run from the lines of its log. The first statement of a value counts."""

    def __init__(self) -> None:
        self.stated: dict[str, object] = {}
        self.versions: dict[str, str] = {}
        self.features: set[Feature] = set()
        self._num_feature_lines = 0
        self._patterns = [
            (name, re.compile(pattern), kind)
            for kind, table in ((int, _NUMBERS), (float, _DECIMALS))
            for name, patterns in table.items()
            for pattern in patterns
        ]

    wants_all = False

    def concerns(self, text: str) -> bool:
        """Return whether a line may state a setting of the run. The result does not depend on the line's digits."""
        if self._num_feature_lines < MOST_FEATURE_LINES:  # this is asked once for lines that differ only in digits
            self._num_feature_lines += 1
            self.features.update(
                name for name, pattern in _features().items() if name not in self.features and pattern.search(text)
            )
        return _STATES.search(text) is not None

    def take(self, line: Line) -> None:
        """Read a setting of the run from a line that states it."""
        if line.number > FIRST_LINES and "esum" not in line.text and "ontinu" not in line.text:
            return
        for name, pattern, kind in self._patterns:
            if name not in self.stated and (match := pattern.search(line.text)):
                try:
                    self.stated[name] = kind(match[1].replace(",", "").rstrip("."))
                except ValueError:
                    continue
        if "model" not in self.stated and (match := _MODEL.search(line.text)) and not match[1].isdigit():
            self.stated["model"] = match[1].rstrip("/").rpartition("/")[2] if match[1].startswith("/") else match[1]
        if "strategy" not in self.stated and (match := _STAGE.search(line.text)):
            self.stated["strategy"] = f"zero{next(filter(None, match.groups()))}"
        for name, release in _VERSION.findall(line.text):
            self.versions.setdefault(name.lower().replace("pytorch", "torch"), release)
        if _RESUMED.search(line.text):
            self.stated["is_resumed"] = True

    def setting(self, requested: Setting) -> Setting:
        """Return the settings of the run. Values from the user replace those from the log."""
        stated: dict[str, Any] = {
            name: value for name, value in self.stated.items() if getattr(requested, name) in (None, False)
        }
        return replace(
            requested, **stated, features=frozenset(self.features), versions=tuple(sorted(self.versions.items()))
        )
