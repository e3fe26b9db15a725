"""The schema of a public run: the facts that the log of somebody else's training states, and where the log is.

A public run holds facts and figures of one training. What the log and the files beside it do not state is null, never
guessed. Series are stored by columns, because that is several times smaller than one object per step.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

PUBLIC_SCHEMA_VERSION: Literal[1] = 1

# The columns of a series that have a meaning for comparisons, with their units. All other columns keep the log's name.
COLUMNS = {
    "step": "the log's number of an optimizer step: mostly the steps made so far, but some programs count from 0",
    "samples": "number of sequences trained on so far, over all GPUs",
    "tokens": "number of tokens trained on so far, over all GPUs",
    "seconds": "seconds since the training began",
    "seconds_per_step": "seconds",
    "loss": "training loss",
    "evaluation_loss": "loss on held-out data",
    "accuracy": "held-out metric between 0 and 1",
    "learning_rate": "",
    "gradient_norm": "norm before clipping",
    "tokens_per_second": "tokens per second, over all GPUs",
    "tokens_per_second_per_gpu": "tokens per second of one GPU",
    "samples_per_second": "sequences per second, over all GPUs",
    "allocated_bytes": "bytes of tensors on one GPU",
    "peak_allocated_bytes": "largest bytes of tensors on one GPU since the training or the last step began",
    "reserved_bytes": "bytes that PyTorch's allocator has reserved on one GPU",
    "peak_reserved_bytes": "largest bytes that PyTorch's allocator has reserved on one GPU",
    "used_bytes": "bytes that are used on the whole card",
    "host_bytes": "bytes of memory of the host",
}

MEGATRON = "megatron"  # the format of golden values

Ending = Literal["finished", "ended early", "missed its target", "unknown"]


class PublicFacts(BaseModel):
    """The base class of all parts of a public run. Unknown keys, NaN and infinity are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Source(PublicFacts):
    """The location of a log, with which anybody can read it again."""

    path: str  # inside the repository, or the name of the file that was imported
    sha256: str  # of the file
    lines: list[int] | None = None  # first and last line, if the file has several runs
    repository: str | None = None  # owner/name on GitHub
    commit: str | None = None
    license: str | None = None  # SPDX name, or what the repository says
    retrieved: str | None = None  # date, YYYY-MM-DD


Count = Annotated[int, Field(gt=0)]


class Setting(PublicFacts):
    """The model, the training and the machine, as the log or the files next to it state them. None means unknown."""

    benchmark: str | None = None  # such as "MLPerf Training 4.0, llama2_70b_lora, closed division"
    submitter: str | None = None
    entry: str | None = None  # identifier of a submission or of a test case
    model: str | None = None
    parameters: Count | None = None
    data: str | None = None
    system: str | None = None  # the machine's name
    gpu: str | None = None  # as `zero_study.theory.gpus` names it, or as the source does
    num_gpus: Count | None = None
    num_nodes: Count | None = None
    network: str | None = None  # between nodes
    program: str | None = None  # what trained, such as "transformers Trainer" or "Megatron-LM"
    engine: str | None = None  # DDP, DeepSpeed, FSDP1, FSDP2, ... or a program's own
    strategy: str | None = None  # ddp, zero1, zero2, zero3, fsdp2, ..., or the source's own word
    offload: str | None = None  # what is on the host or a disk
    precision: str | None = None
    optimizer: str | None = None
    adapter: str | None = None  # such as "LoRA, rank 16"
    activation_checkpointing: bool | None = None
    compiled: bool | None = None
    micro_batch_size: Count | None = None  # sequences per GPU in one forward pass
    accumulation_steps: Count | None = None
    global_batch_size: Count | None = None  # sequences per optimizer step
    sequence_length: Count | None = None  # tokens
    learning_rate: float | None = None  # the highest
    warmup_steps: float | None = None
    planned_steps: Count | None = None
    seed: int | None = None
    versions: dict[str, str] = Field(default_factory=dict)  # package -> version
    other: dict[str, str | int | float | bool | None] = Field(default_factory=dict)  # in the source's own words


Column = Annotated[list[float | int | None], Field(min_length=1)]


class Series(PublicFacts):
    """Values that were logged together: columns of equal length, named as in `COLUMNS` or as in the log.

    None is a value that was not logged at that moment. A value that was logged and is not a finite number is None, too,
    and its position is in `not_finite`.
    """

    columns: dict[str, Column]
    not_finite: dict[str, list[int]] = Field(default_factory=dict)  # column -> positions

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        lengths = {len(column) for column in self.columns.values()}
        if len(lengths) != 1:
            raise ValueError(
                f"the columns of a series have different lengths, or a series has no columns: {sorted(lengths)}"
            )
        for name, places in self.not_finite.items():
            column = self.columns.get(name, [])
            if not all(0 <= place < len(column) and column[place] is None for place in places):
                raise ValueError(f"not_finite lists positions in {name!r} that have a number, or do not exist")
        return self

    def __len__(self) -> int:
        return max(map(len, self.columns.values()), default=0)

    def not_finite_since(self, name: str) -> str | None:
        """Return where the values of a column stop being finite for good, such as "step 50". None if they do not."""
        places = set(self.not_finite.get(name, ()))
        since: int | None = None
        for place in reversed(range(len(self) if places else 0)):
            if place in places:
                since = place
            elif self.columns[name][place] is not None:
                break
        if since is None:
            return None
        for by in ("step", "samples", "tokens"):
            position = self.columns[by][since] if by in self.columns else None
            if position is not None:
                return f"{by} {position:,.0f}"
        return f"logged entry {since + 1:,}"


class PublicRun(PublicFacts):
    """One training whose log was imported."""

    kind: Literal["public run"] = "public run"
    schema_version: Literal[1] = PUBLIC_SCHEMA_VERSION
    made_by: str  # the program and its version that imported it
    name: str  # unique in the archive or the folder
    log_format: str  # how the log was read, such as "mllog"
    source: Source
    setting: Setting
    ending: Ending = "unknown"
    marks: list[str] = Field(default_factory=list)  # what is odd, such as "the clock jumps back at line 7"
    training: Series | None = None  # one entry per logged training step
    evaluation: Series | None = None  # one entry per evaluation
    totals: dict[str, float | int] = Field(default_factory=dict)  # of the whole run, by the names of `COLUMNS`

    @property
    def not_finite_since(self) -> str | None:
        """Where the training loss stops being finite for good, such as "step 50". None if it does not."""
        # Megatron-LM's golden values are NaN at the steps that a training did not make.
        return None if self.training is None or self.log_format == MEGATRON else self.training.not_finite_since("loss")

    @property
    def why_not_counted(self) -> str | None:
        """Why the run may not be averaged with others. None if it may."""
        if self.ending == "ended early":
            return "its log ended early"
        return f"its loss is not finite from {self.not_finite_since} on" if self.not_finite_since else None

    @property
    def counts(self) -> bool:
        """Whether the run may be averaged with others."""
        return self.why_not_counted is None

    def content(self) -> dict[str, Any]:
        """Return the content of the run's file, without unknown values and empty sections."""
        dumped = self.model_dump(exclude_defaults=True)
        return {"kind": self.kind, "schema_version": self.schema_version, **dumped}
