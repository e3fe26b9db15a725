"""Read what DeepSpeed logs: its settings, its throughput timer, its steps and its memory reports.

DeepSpeed logs no loss, except in its engine for pipelines.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

from study.logs import reading
from study.logs.columns import Meaning, Rows
from study.logs.draft import Draft
from study.logs.reading import GIB, number, seconds_since_1970

# step=10, skipped=6, lr=[9.6e-06, 9.6e-06], mom=[(0.9, 0.95)]
_STEP = re.compile(r"\bstep=([0-9]{1,15}), skipped=([0-9]{1,15}), lr=\[([^\],]*)")
# epoch=0/micro_step=10/global_step=10, RunningAvgSamplesPerSec=173.4, CurrSamplesPerSec=171.9, MemAllocated=3.96GB,
#   MaxMemAllocated=22.95GB
_TIMER = re.compile(
    r"\bepoch=([0-9]{1,15})/micro_step=[0-9]+/global_step=([0-9]{1,15}), RunningAvgSamplesPerSec=[^\s,]+, "
    r"CurrSamplesPerSec=([^\s,]+)(?:, MemAllocated=([0-9.]+)GB, MaxMemAllocated=([0-9.]+)GB)?"
)
# steps: 10 loss: 8.2041 iter time (s): 1.204 samples/sec: 8.104
_PIPELINE = re.compile(
    r"\bsteps: ([0-9]{1,15}) loss: (\S{1,40}) .{0,300}?iter time \(s\): (\S{1,40}) samples/sec: (\S{1,40})"
)
# MA 3.96 GB         Max_MA 22.95 GB         CA 23.4 GB         Max_CA 24 GB
_MEMORY = re.compile(r"\bMA [0-9.]+ GB\s+Max_MA ([0-9.]+) GB\s+CA [0-9.]+ GB\s+Max_CA ([0-9.]+) GB")
_HOST = re.compile(r"CPU Virtual Memory: +used = ([0-9.]+) GB")
_SETTING = re.compile(r"\[config\.py:[0-9]+:print\] +(\w+) [ .]*(\S.*)")
_LAUNCHED = re.compile(r"\b(dist_world_size|nnodes)=([0-9]+)")
_RELEASE = re.compile(r"DeepSpeed info: version=([^\s,]+)")
_OFFLOAD = re.compile(
    r"offload_(param|optimizer)\W{1,4}(?:\w{1,60}\()?[^,()]{0,60}device\W{1,3}[^,]{0,60}?\b(cpu|nvme)\b"
)

LONGEST_VALUE = 10_000  # characters of a setting that are searched

_FIELDS = {
    "train_batch_size": "global_batch_size",
    "train_micro_batch_size_per_gpu": "micro_batch_size",
    "gradient_accumulation_steps": "accumulation_steps",
    "world_size": "num_gpus",
    "dist_world_size": "num_gpus",
    "nnodes": "num_nodes",
}
_NOTED = ("gradient_clipping", "optimizer_name", "scheduler_name")
_KNOWN = {
    "skipped": Meaning("skipped_steps"),
    "CurrSamplesPerSec": Meaning("samples_per_second"),
    # What DeepSpeed calls GB is 2^30 bytes, rounded to two digits.
    "MemAllocated": Meaning("allocated_bytes", "training", GIB),
    "MaxMemAllocated": Meaning("peak_allocated_bytes", "training", GIB),
}


# A line that has none of these words has nothing to read. Looking for them is faster than trying all patterns.
_WORDS = ("step=", "steps: ", "Max_MA ", "CPU Virtual", "config.py:", "launch.py", "DeepSpeed info")


def is_line(text: str) -> bool:
    return any(pattern.search(text) for pattern in (_STEP, _TIMER, _PIPELINE))


def read(path: Path) -> list[Draft]:
    """Return the runs in a log of DeepSpeed."""
    log = _Log()
    for line in reading.parts(path):
        log.take(line)
    log.end_step()
    drafts = log.rows.finish()
    for draft in drafts:
        draft.state("engine", "DeepSpeed")
    return drafts


class _Log:
    """The state of reading a log, in which several lines belong to one step."""

    def __init__(self) -> None:
        self.rows = Rows(_KNOWN)
        self._step: dict[str, object] = {}
        self._line = 0  # where the step begins

    def take(self, line: reading.Line) -> None:
        text = line.text
        if not any(word in text for word in _WORDS):
            return
        if match := _STEP.search(text):
            if match[1] != "0":  # the engine logs step 0 when it is made
                self._add(line, {"step": match[1], "skipped": match[2], "lr": match[3]})
        elif match := _TIMER.search(text):
            values = {"step": match[2], "CurrSamplesPerSec": match[3]}
            memory = {"MemAllocated": match[4], "MaxMemAllocated": match[5]} if match[4] else {}
            self._add(line, {"epoch": match[1], **values, **memory})
        elif match := _PIPELINE.search(text):
            names = ("step", "loss", "seconds_per_step", "samples_per_second")
            self._add(line, dict(zip(names, match.groups(), strict=True)))
        else:
            self._read_other(text)

    def _add(self, line: reading.Line, values: dict[str, object]) -> None:
        if not line.is_whole:
            self.rows.runs.current.not_read.add("the last line is cut off", line.number)
            return
        # Two engines in one program log the same steps.
        if values["step"] != self._step.get("step") or values.keys() & self._step.keys() - {"step"}:
            self.end_step()
            self._line = line.number
            self._step["timestamp"] = seconds_since_1970(line.text.lstrip("[")) or ""
        self._step.update(values)

    def end_step(self) -> None:
        """Add the step to which the lines read so far belong."""
        if self._step:
            self.rows.add(self._step.items(), self._line)
        self._step = {}

    def _read_other(self, text: str) -> None:
        runs = self.rows.runs
        if match := _MEMORY.search(text):
            runs.latest.largest("peak_allocated_bytes", _in_bytes(match[1]))
            runs.latest.largest("peak_reserved_bytes", _in_bytes(match[2]))
        elif match := _HOST.search(text):
            runs.latest.largest("host_bytes", _in_bytes(match[1]))
        elif match := _RELEASE.search(text):
            self.end_step()
            runs.draft_for_statements.version("deepspeed", match[1])
        elif match := _SETTING.search(text):
            self.end_step()
            _read_setting(runs.draft_for_statements, match[1], match[2])
        elif "launch.py" in text:
            self.end_step()
            for name, value in _LAUNCHED.findall(text):
                runs.draft_for_statements.state(_FIELDS[name], number(value))
            if "exits successfully" in text:
                runs.current.ending = "finished"
            elif "exits with return code" in text:
                runs.current.ending = "ended early"


def _read_setting(draft: Draft, name: str, value: str) -> None:
    if name in _FIELDS:
        draft.state(_FIELDS[name], number(value))
    elif name == "zero_optimization_stage":
        draft.state("strategy", f"zero{value}" if value in ("0", "1", "2", "3") else value)
    elif name in ("fp16_enabled", "bfloat16_enabled", "bf16_enabled") and value == "True":
        draft.state("precision", "fp16" if name == "fp16_enabled" else "bf16")
    elif name == "zero_config":
        offloaded = {"param": "parameters", "optimizer": "optimizer states"}
        found = [f"{offloaded[part]} on {device}" for part, device in _OFFLOAD.findall(value[:LONGEST_VALUE])]
        draft.state("offload", ", ".join(sorted(set(found))))
    elif name in _NOTED and value != "None":
        draft.note(name, number(value) if number(value) is not None else value)


def _in_bytes(gib: str) -> int | None:
    value = number(gib)
    return round(value * GIB) if value is not None and math.isfinite(value) else None
