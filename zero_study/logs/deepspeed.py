"""Read what DeepSpeed logs: its settings, its throughput timer, its steps and its memory reports.

DeepSpeed logs no loss, except in its engine for pipelines. Losses are read from the lines that a program prints with
the number of a step.
"""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path

from zero_study.logs import reading
from zero_study.logs.columns import Meaning, Rows, meaning
from zero_study.logs.draft import Draft
from zero_study.logs.reading import GIB, date_in, number

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

# Of the program: step 10 loss 2.31, or iteration 10/ 300 | lm loss: 2.31E+00, or Step: 10, eval_loss = tensor(2.31)
_PRINTED_STEP = re.compile(r"\b(?:global_|train_)?(?:step|iter|iteration)\b\W{1,12}([0-9]{1,15})\b", re.IGNORECASE)
_PRINTED_LOSS = re.compile(
    r"\b(?:([a-z]\w{0,40}?)[ _])?loss(?: value)?[ :='\"]{1,4}(?:tensor\()?"
    r"([-+]?(?:[0-9]+\.?[0-9]*(?:e[-+]?[0-9]+)?|nan|inf))\b",
    re.IGNORECASE,
)
_EVALUATED = re.compile(r"\b(?:val|valid|validation|eval|evaluation|test)(?:\b|_)", re.IGNORECASE)
_COUNTS_OTHERWISE = "losses were left out, because the program that printed them counts its steps differently"
_COUNTS_FROM_0 = "1 was added to the steps of printed losses, because the program counts from 0"
_NOT_COMPARED = "the printed losses may have other steps than the optimizer, because DeepSpeed logged no steps"
MOST_LOSSES = 20  # in one printed line

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
_WORDS = ("step=", "steps: ", "Max_MA ", "CPU Virtual", "config.py:", "launch.py", "DeepSpeed info", "loss", "Loss")


def is_line(text: str) -> bool:
    return any(pattern.search(text) for pattern in (_STEP, _TIMER, _PIPELINE))


def read(path: Path) -> list[Draft]:
    """Return the runs in a log of DeepSpeed."""
    for offset in (0, 1, None):
        log = Log(Rows(_KNOWN), offset)
        for line in reading.parts(path):
            log.take(line)
            if log.counts_otherwise and offset is not None:
                break
        else:
            break
    return log.finish()


class Log:
    """The state of reading a log, in which several lines belong to one step."""

    def __init__(self, rows: Rows, offset: int | None = None) -> None:
        self.rows = rows
        self._offset = offset  # of the printed steps; None if no printed losses are read
        self.counts_otherwise = False  # whether a program printed losses with other numbers of steps than DeepSpeed
        self._is_used = False
        self._printed: int | None = None  # the last step with a printed loss
        self._logged = 0  # the last step that DeepSpeed logged
        self._before: int | None = None  # the last step with a loss that was printed before it
        self._interval = 0  # the longest one between two printed steps
        self._is_compared = False  # whether a printed step was compared with one that DeepSpeed logged
        self._step: dict[str, object] = {}
        self._line = 0  # where the step begins

    def take(self, line: reading.Line) -> None:
        text = line.text
        if not any(word in text for word in _WORDS):
            return
        if match := _STEP.search(text):
            if match[1] != "0":  # the engine logs step 0 when it is made
                self._compare_steps(int(match[1]))
                self._add(line, {"step": match[1], "skipped": match[2], "lr": match[3]})
        elif match := _TIMER.search(text):
            values = {"step": match[2], "CurrSamplesPerSec": match[3]}
            memory = {"MemAllocated": match[4], "MaxMemAllocated": match[5]} if match[4] else {}
            self._add(line, {"epoch": match[1], **values, **memory})
        elif match := _PIPELINE.search(text):
            names = ("step", "loss", "seconds_per_step", "samples_per_second")
            self._add(line, dict(zip(names, match.groups(), strict=True)))
        elif matches := list(itertools.islice(_PRINTED_LOSS.finditer(text), MOST_LOSSES)):
            self._add_printed(line, matches)
        else:
            self._read_other(text)

    def _add(self, line: reading.Line, values: dict[str, object]) -> None:
        self._is_used = True
        if not line.is_whole:
            self.rows.runs.current.not_read.add("the last line is cut off", line.number)
            return
        # Two engines in one program log the same steps.
        if values["step"] != self._step.get("step") or values.keys() & self._step.keys() - {"step"}:
            self.end_step()
            self._line = line.number
        if not self._step.get("timestamp"):
            self._step["timestamp"] = date_in(line.text) or ""
        self._step.update(values)

    def _add_printed(self, line: reading.Line, matches: list[re.Match[str]]) -> None:
        """Add the losses in a line that the program printed."""
        step = _PRINTED_STEP.search(line.text)
        if step is None or self._offset is None:
            kind = "printed losses without the number of a step were left out" if step is None else _COUNTS_OTHERWISE
            self.rows.runs.current.not_read.add(kind, line.number)
            return
        if self._offset:
            self.rows.runs.current.marks.add(_COUNTS_FROM_0, line.number)
        place = int(step[1]) + self._offset
        values: dict[str, object] = {}
        for match in matches:
            name = f"{match[1]}_loss" if match[1] else "loss"
            is_evaluated = meaning(name).column == "loss" and _EVALUATED.search(line.text, 0, match.start())
            values.setdefault("evaluation_loss" if is_evaluated and "train" not in name.lower() else name, match[2])
        if any(meaning(name).role == "training" for name in values):
            # Counted from 0, the next step after the one before DeepSpeed's line is printed after the line.
            is_next = self._before is not None and 0 < place - self._before <= self._interval
            self.counts_otherwise |= is_next and place == self._logged - 1
            self._interval = max(self._interval, place - (self._printed or 0))
            self._printed = place
        self._add(line, {"step": str(place), **values})

    def _compare_steps(self, step: int) -> None:
        """Note whether the program has printed other numbers of steps than DeepSpeed, which logs this step."""
        if step < self._logged:  # another run, or a resumed one
            self._printed = None
        elif self._printed is not None:
            self._is_compared = True
            longest = max(self._interval, step - self._logged)
            self.counts_otherwise |= not step - longest - 1 <= self._printed <= step + 1
        self._logged, self._before = step, self._printed

    def end_step(self) -> None:
        """Add the step to which the lines read so far belong."""
        if self._step:
            self.rows.add(self._step.items(), self._line)
        self._step = {}

    def take_statement(self, line: reading.Line) -> None:
        """Take a line of a log whose steps are read from other lines."""
        if (match := _STEP.search(line.text)) or _TIMER.search(line.text):
            self._is_used = True
            if match is None or match[1] != "0":
                kind = "DeepSpeed's lines about steps were left out, because the Trainer's lines have no steps"
                self.rows.runs.current.not_read.add(kind, line.number)
        elif any(word in line.text for word in _WORDS):
            self._read_other(line.text)

    def finish(self) -> list[Draft]:
        """Return the runs in the log."""
        self.end_step()
        if self._printed is not None and not self._is_compared:
            self.rows.runs.current.not_read.add(_NOT_COMPARED)
        drafts = self.rows.finish()
        for draft in drafts if self._is_used else ():
            draft.state("engine", "DeepSpeed")
        return drafts

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
            if "exits successfully" in text and runs.current.ending != "ended early":  # one of several machines
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
