"""Can this be what a run left? Tables divide by its numbers, so what no run leaves is refused as a record is read."""

from __future__ import annotations

import datetime
import json
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from study.config import RunConfig
from study.errors import describe, refusing

LARGEST_WHOLE = 10**16  # more bytes, steps or operations than a run has
LARGEST = 1e100  # its square is a float, too
_MAY_BE_NEGATIVE = {"returncode", "free_bytes", "loss", "final_loss"}
_NOT_MEASURED = {"settings", "strategy_file"}  # DeepSpeed writes 2^63 - 1 for "no limit"
_MAY_BE_LARGER = {"perplexity", "square_sum"}  # the exponential of a loss, and squares already

_NEVER_NEW = (
    "workload",
    "size",
    "seed",
    "global_batch_size",
    "sequence_length",
)  # knobs that every record's config has
_PER_RANK = ("model_state_bytes", "resting_state_bytes", "peak_memory", "energy_joules")
_PROVEN = ("micro_batch_size", "gradient_accumulation_steps", "precision", "world_size")
_OF_PROOF = ("swap_bytes_written", "swap_bytes_read")


class _Read(BaseModel):
    """What tables read of a part of a record that is otherwise free."""

    model_config = ConfigDict(strict=True)


# Of hardware and versions, which head pages: on one line, no HTML, no cell of a table, nothing that turns the text.
_Shown = Annotated[str, Field(pattern=r"^[^<>|\p{C}\p{Zl}\p{Zp}]*$")]


class _Gpu(_Read):
    name: _Shown
    memory_bytes: int = Field(ge=1)


class _Library(_Read):
    sha256: str
    changed: list[str]


class _Imports(_Read):
    libraries: dict[str, _Library] = Field(default_factory=dict)


class _Machine(_Read):
    cpu: _Shown | None = None
    num_cores: int | None = None
    usable_cores: float | None = None
    num_threads_per_process: int | None = None
    host_memory_bytes: int | None = None
    gpus: list[_Gpu] = Field(default_factory=list)
    libraries: dict[str, _Shown | None] = Field(default_factory=dict)
    environment: dict[str, Any] = Field(default_factory=dict)
    imports: _Imports = Field(default_factory=_Imports)
    tf32: bool | None = None
    git_commit: str | None = None
    git_dirty: bool | None = None


class _Data(_Read):
    digest: str | None = None
    num_train_examples: int = 0
    num_eval_examples: int = 0


class _Free(BaseModel):
    """The free parts together, so that an error names the part."""

    machine: _Machine
    other_machines: list[_Machine] | None
    data: _Data | None


def check_numbers(content: Any) -> None:
    """Raise ValueError for a number in a file that nothing has: a negative size, 10^18 steps."""
    left: list[tuple[str, Any]] = [("", content)]
    while left:
        key, value = left.pop()
        if isinstance(value, dict):
            left += ((name, each) for name, each in value.items() if name not in _NOT_MEASURED)
        elif isinstance(value, list):
            left += [(key, each) for each in value]
        elif isinstance(value, (int, float)):
            largest = LARGEST_WHOLE if isinstance(value, int) else LARGEST
            if abs(value) > largest and key not in _MAY_BE_LARGER:
                raise ValueError(f"{key}={value:g} is more than any run has")
            if value < 0 and key not in _MAY_BE_NEGATIVE:
                raise ValueError(f"{key}={value:g} is negative")


def moment(text: str) -> str:
    """A time as ISO 8601 writes it, with its zone."""
    if datetime.datetime.fromisoformat(text).tzinfo is None:
        raise ValueError(f"started_at={text!r} has no zone, so that it cannot be held against another")
    return text


def whole_config(config: dict[str, Any]) -> dict[str, Any]:
    """A run's configuration, with the default of each knob that it is from before. Raises ValueError."""
    if lacking := next((name for name in _NEVER_NEW if name not in config), None):
        raise ValueError(f"config.{lacking} is missing")
    try:
        known = RunConfig.model_validate_json(json.dumps(config), strict=True)
    except ValidationError as error:
        raise ValueError(describe(error, "config")) from None
    return known.model_dump(mode="json") | config


def check(record: Any) -> None:
    """Raise ValueError, ValidationError included, where the parts of a schema.Record do not make one run."""
    _Free.model_validate({name: getattr(record, name) for name in _Free.model_fields})
    lists = {name: getattr(record, name) for name in _PER_RANK}
    if record.proof:
        lists |= {f"proof.{name}": getattr(record.proof, name) for name in _OF_PROOF}
    for name, ranks in lists.items():
        if ranks is not None and len(ranks) != record.world_size:
            raise ValueError(f"{name} is of {len(ranks)} ranks, world_size is {record.world_size}")
    with refusing("config"):
        batches = RunConfig.model_validate(record.config).batches(record.world_size)
    known = {name: (getattr(record, name), record.config[name]) for name in ("workload", "size", "seed")}
    if record.proof:
        asked = (*batches, record.config["precision"], record.world_size)
        known |= {f"proof.{n}": (getattr(record.proof, n), value) for n, value in zip(_PROVEN, asked, strict=True)}
    for name, (seen, value) in known.items():
        if seen != value:
            raise ValueError(f"{name}={seen!r}, its config has {value!r}")
    if record.timing and record.timing.median_seconds is not None:
        for name in ("samples_per_second", "tokens_per_second", "data_wait_median_seconds"):
            if getattr(record.timing, name) is None:
                raise ValueError(f"timing.{name} is missing, though there is a median step")
    for entry in record.evaluation:
        if not {"step", "loss"} <= entry.keys():
            raise ValueError(f"evaluation: {', '.join(entry) or 'nothing'} without step and loss")
    if record.status == "ok":
        needed = ("proof", "final_loss", "steps_sha256", "initial_parameters", "final_parameters")
        if lacking := next((name for name in needed if getattr(record, name) is None), None):
            raise ValueError(f"status ok, but {lacking} is missing: no run that ended well leaves that")
        if not record.steps_done or not record.evaluation:
            raise ValueError("status ok, but no step or no evaluation is recorded")
    elif record.failure is None:
        raise ValueError(f"status {record.status}, but failure is missing")
