"""Read what torchtitan logs, and the files of losses with which its tests compare."""

from __future__ import annotations

import re
from pathlib import Path

from zero_study.errors import Refusal
from zero_study.logs import reading
from zero_study.logs.columns import Meaning, Rows
from zero_study.logs.draft import Draft
from zero_study.logs.reading import GIB, number, seconds_since_1970

# [titan] 2025-05-30 12:00:00,123 - root - INFO - step:  1  loss:  8.0491  grad_norm: 1.42  memory:  0.51GiB(0.54%)
#   tps: 8,213  tflops: 0.59  mfu: 0.06%
_STEP = re.compile(r"\b(validate )?step: *([0-9]{1,15})  +(loss: .*)")
_PAIR = re.compile(r"(\w+): *([-+.,0-9a-zA-Z]+)")
_KNOWN = {
    "memory": Meaning("peak_reserved_bytes", "training", GIB),
    "tps": Meaning("tokens_per_second_per_gpu"),
    "wps": Meaning("tokens_per_second_per_gpu"),  # its name in 2024
    "mfu": Meaning("mfu_percent"),
    "validation_memory": Meaning("peak_reserved_bytes_of_evaluation", "evaluation", GIB),
    "validation_tps": Meaning("tokens_per_second_per_gpu_of_evaluation", "evaluation"),
}

_MODEL = re.compile(r"Model (.{1,100}?) size: ([0-9,]{1,25}) total parameters")
_CARD = re.compile(r"(?:CUDA|HIP|XPU|GPU) capacity: (.{1,100}?)(?: \([0-9]+\))? with [0-9.]+GiB memory")
_STARTS = re.compile(r"Training starts at step [0-9]+")
_SETUP = {
    "micro_batch_size": re.compile(r"local batch size ([0-9]{1,15})"),
    "global_batch_size": re.compile(r"global batch size ([0-9]{1,15})"),
    "accumulation_steps": re.compile(r"gradient accumulation steps ([0-9]{1,15})"),
    "sequence_length": re.compile(r"(?:sequence|maximum context) length ([0-9]{1,15})"),
    "planned_steps": re.compile(r"total steps ([0-9]{1,15})"),
    "warmup_steps": re.compile(r"\(warmup ([0-9]{1,15})\)"),
}
_ENGINES: dict[str, dict[str, object]] = {  # what a line says -> what it means
    "Applied FSDP to the model": {"engine": "FSDP2", "strategy": "fsdp2"},
    "Applied HSDP to the model": {"engine": "FSDP2", "strategy": "hsdp"},
    "Applied DDP to the model": {"engine": "DDP", "strategy": "ddp"},
    "Applied CPU Offloading to the model": {"offload": "CPU"},
    "activation checkpointing to the model": {"activation_checkpointing": True},
    "with torch.compile": {"compiled": True},
}

# A line that has none of these words has no setting. Looking for them is faster than trying all patterns.
_WORDS = ("total parameters", " capacity: ", "Training starts", "Training completed", "Trainer is", *_ENGINES)

_LOSS = re.compile(r"([0-9]{1,15}) ([0-9]+\.[0-9]{6,})")  # a line of a file of losses


def is_line(text: str) -> bool:
    return _STEP.search(text) is not None


def read(path: Path) -> list[Draft]:
    """Return the runs in a log of torchtitan."""
    rows = Rows(_KNOWN)
    for line in reading.parts(path):
        match = _STEP.search(line.text) if "step:" in line.text else None
        if match is None:
            _read_setting(line.text, rows)
        elif not line.is_whole:
            rows.runs.current.not_read.add("the last line is cut off", line.number)
        else:
            prefix = "validation_" if match[1] else ""
            pairs = [(prefix + name, value.replace(",", "")) for name, value in _PAIR.findall(match[3])]
            pairs = [(name, value.removesuffix("GiB")) for name, value in pairs if value != "N"]  # of N/A
            rows.add([("step", match[2]), *pairs, ("timestamp", _date(line.text))], line.number)
    return _of_torchtitan(rows.finish())


def _of_torchtitan(drafts: list[Draft]) -> list[Draft]:
    for draft in drafts:
        draft.state("program", "torchtitan")
    return drafts


def _date(text: str) -> float | str:
    match = re.search("[0-9]{4}-[0-9]{2}-[0-9]{2} ", text[:60])
    return (seconds_since_1970(text[match.start() :]) if match else None) or ""


def _read_setting(text: str, rows: Rows) -> None:
    if not any(word in text for word in _WORDS):
        return
    draft = rows.runs.draft_for_statements
    if match := _MODEL.search(text):
        draft.state("model", match[1])
        draft.state("parameters", number(match[2].replace(",", "")))
    elif match := _CARD.search(text):
        draft.state("gpu", match[1])
    elif _STARTS.search(text):
        if time := _date(text):
            draft.begin_clock(float(time))
    elif "Training completed" in text:
        rows.runs.current.ending = "finished"
    elif "Trainer is initialized" in text:
        for name, pattern in _SETUP.items():
            if match := pattern.search(text):
                draft.state(name, int(match[1]))
        draft.last_planned = draft.setting.get("planned_steps")
    else:
        for words, fields in _ENGINES.items():
            if words in text:
                for name, value in fields.items():
                    draft.state(name, value)


# ---------------------------------------------------------------- files of losses


def is_loss(text: str) -> bool:
    """Return whether a line is the first line of a file of losses: a step and a loss with many digits."""
    match = _LOSS.fullmatch(text)
    return match is not None and match[1] in ("0", "1")


def read_losses(path: Path) -> list[Draft]:
    """Return the run in a file of losses.

    Raises Refusal if the file has lines of another kind, or if a step is missing.
    """
    rows = Rows()
    step: int | None = None
    for line in reading.lines(path):
        if not line.is_whole:
            rows.runs.current.not_read.add("the last line is cut off", line.number)
            break
        match = _LOSS.fullmatch(line.text)
        if match is None or (step is not None and int(match[1]) != step + 1):
            raise Refusal(f"line {line.number} is not the loss of the next step")
        step = int(match[1])
        rows.add([("step", match[1]), ("loss", match[2])], line.number)
    return _of_torchtitan(rows.finish())
