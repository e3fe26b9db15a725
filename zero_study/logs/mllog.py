"""Read the `:::MLLOG` lines of MLPerf's logging library."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from zero_study.errors import Refusal
from zero_study.logs import json_parts, reading
from zero_study.logs.columns import Meaning, Rows, as_number
from zero_study.logs.draft import Draft
from zero_study.logs.reading import Number
from zero_study.public_runs.schema import Ending

BEGIN = ":::MLLOG "

_SETTING = {
    "submission_org": "submitter",
    "submission_platform": "system",
    "seed": "seed",
    "global_batch_size": "global_batch_size",
    "gradient_accumulation_steps": "accumulation_steps",
    "max_sequence_length": "sequence_length",
    "opt_base_learning_rate": "learning_rate",
    "opt_learning_rate_warmup_steps": "warmup_steps",
    "opt_learning_rate_training_steps": "planned_steps",
    "opt_name": "optimizer",
}
_BENCHMARK = ("submission_benchmark", "submission_division")
_NOT_NOTED = {"weights_initialization", "cache_clear", *_BENCHMARK}
_TRAINED = ("train_loss", "tracked_stats")
_EVALUATED = ("eval_accuracy", "eval_loss")

# What the rules of MLPerf Training call eval_accuracy is the loss on held-out data in some benchmarks, and a share of
# correct answers or a similar metric between 0 and 1 in others.
_LOSS = {"gpt3", "llama2_70b_lora", "llama31_405b", "llama31_8b"}
_SHARE = {"bert", "dlrm", "dlrm_dcnv2", "resnet", "ssd", "unet3d"}
_METRIC = "metric"  # any other
_EPOCH = "epoch_num"
# Where an event is in the training. What `step` counts differs from program to program, so it keeps a name of its own.
_POSITIONS = {"samples_count": "samples", _EPOCH: _EPOCH, "step": "metadata_step", "step_num": "metadata_step"}
LEAST_SAMPLES = 1_000  # a larger number cannot be an epoch of BERT
_KNOWN = {
    _METRIC: Meaning("eval_accuracy", "evaluation"),
    _EPOCH: Meaning(_EPOCH, "position"),
    "metadata_step": Meaning("metadata_step", "position"),
    "throughput": Meaning("samples_per_second"),
}
_ENDINGS: dict[str, Ending] = {"success": "finished", "aborted": "missed its target"}


class _Event(NamedTuple):
    line: int
    seconds: float  # since 1970
    key: str
    value: Any
    metadata: dict[str, Any]


def is_line(text: str) -> bool:
    return BEGIN + "{" in text


def read(path: Path) -> list[Draft]:
    """Return the runs in a log of MLPerf."""
    log = _Log()
    for event in _events(path, log):
        log.take(event)
    return log.finish()


def _events(path: Path, log: _Log) -> Iterator[_Event]:
    for line in reading.lines(path):
        _, begin, text = line.text.partition(BEGIN)
        if not begin:
            continue
        try:
            content = json_parts.decoded(text)
            event = _Event(
                line.number,
                float(content["time_ms"]) / 1000,
                str(content["key"]),
                content.get("value"),
                content.get("metadata") or {},
            )
            if not isinstance(event.metadata, dict) or not math.isfinite(event.seconds):
                raise ValueError("no event of MLPerf")
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            kind = "a damaged line of MLLOG was left out" if line.is_whole else "the last line is cut off"
            log.draft.not_read.add(kind, line.number)
            continue
        yield event


class _Log:
    """The state of reading a log."""

    def __init__(self) -> None:
        self._rows = Rows(_KNOWN)
        self._benchmark: dict[str, str] = {}
        self._has_started = self._has_stopped = False
        self._ending: Ending = "unknown"

    @property
    def draft(self) -> Draft:
        return self._rows.runs.current

    def take(self, event: _Event) -> None:
        key, draft = event.key, self.draft
        # Every rank may log these events, so a second one begins another run only after the first run was under way.
        is_over = self._has_stopped or (self._has_started and draft.has_rows)
        if is_over and key in ("run_start", "init_start", "submission_benchmark"):
            draft = self._begin()
        if key == "run_start" and not self._has_started:
            self._has_started = True
            draft.begin_clock(event.seconds)
        elif key == "run_stop" and not self._has_stopped:
            self._stop(event)
        elif key in _BENCHMARK:
            self._benchmark[key] = str(event.value)
        elif key in _SETTING:
            self._rows.runs.draft_for_statements.state(_SETTING[key], event.value)
        elif key in _EVALUATED:
            is_several = isinstance(event.value, dict)  # boxes and masks in one benchmark
            values = {f"{key}/{name}": value for name, value in event.value.items()} if is_several else {}
            self._add(values or {self._evaluated(key): event.value}, event)
        elif key in _TRAINED:
            self._add(event.value if isinstance(event.value, dict) else {key: event.value}, event)
        elif key not in _NOT_NOTED and event.metadata.get("tensor") is None:
            self._rows.runs.draft_for_statements.note(key, event.value)

    def _begin(self) -> Draft:
        self._conclude()
        self._has_started = self._has_stopped = False
        self._benchmark = {}
        return self._rows.runs.begin()

    def _stop(self, event: _Event) -> None:
        self._has_stopped = True
        self._ending = _ENDINGS.get(str(event.metadata.get("status")), "unknown")
        began = self.draft.began
        if began is not None and event.seconds >= began:
            self.draft.total("seconds", round(event.seconds - began, 3))
        self.draft.total("samples", self._position(event.metadata).get("samples"))

    def _evaluated(self, key: str) -> str:
        benchmark = self._benchmark.get("submission_benchmark")
        if key == "eval_accuracy" and benchmark in _LOSS:
            return "evaluation_loss"
        return key if key == "eval_loss" or benchmark in _SHARE else _METRIC

    def _add(self, values: dict[str, object], event: _Event) -> None:
        position = self._position({**event.metadata, **values})
        pairs = [(name, value) for name, value in values.items() if name not in _POSITIONS]
        numbers = [(name, value) for name, value in pairs if as_number(value) is not None]
        if len(numbers) < len(pairs):
            self.draft.not_read.add(f"values of {event.key} that are not numbers were left out", event.line)
        if numbers:
            self._rows.add([*position.items(), *numbers, ("timestamp", event.seconds)], event.line)

    def _position(self, metadata: dict[str, Any]) -> dict[str, Number]:
        """Return the number of samples at an event, or the other numbers that say when it happened.

        Programs that train BERT write the number of samples as `epoch_num`. They train for less than an epoch.
        """
        position = {
            to: value for name, to in _POSITIONS.items() if (value := as_number(metadata.get(name))) is not None
        }
        is_bert = self._benchmark.get("submission_benchmark") == "bert"
        if is_bert and position.get(_EPOCH, 0) >= LEAST_SAMPLES:
            samples = position.pop(_EPOCH)
            position.setdefault("samples", samples)
        return position

    def _conclude(self) -> None:
        """Note settings of a run that follow from several events."""
        name, division = (self._benchmark.get(key) for key in _BENCHMARK)
        if name:
            self.draft.state("benchmark", f"MLPerf Training, {name}" + (f", {division} division" if division else ""))
        rank, alpha = (self.draft.other.get(key) for key in ("lora_rank", "lora_alpha"))
        if rank:
            self.draft.state("adapter", f"LoRA, rank {rank}" + (f", alpha {alpha}" if alpha else ""))
        self.draft.ending = "ended early" if self._has_started and not self._has_stopped else self._ending
        self._ending = "unknown"

    def finish(self) -> list[Draft]:
        self._conclude()
        drafts = self._rows.runs.finished()
        if not drafts:
            raise Refusal("it has lines of MLLOG, but neither a loss nor an evaluation")
        return drafts
