"""Read the text that nanoGPT and its derivatives print, such as modded-nanogpt and llm.c.

A log of modded-nanogpt begins with the source code of the program. Nothing of it is kept.
"""

from __future__ import annotations

import re
from pathlib import Path

from zero_study.logs import reading
from zero_study.logs.columns import Meaning, Rows
from zero_study.logs.draft import Draft
from zero_study.logs.reading import MIB, number

# step:250/1390 val_loss:4.5 train_time:57000ms step_avg:228.00ms
_STEP = re.compile(r"step:([0-9]{1,15})/([0-9]{1,15}) (?=\S+:)")
_PAIR = re.compile(r"(\w+):(\S+)")
# iter 10: loss 3.2041, time 44.10ms, mfu 3.01%
_ITERATION = re.compile(r"iter ([0-9]{1,15}): loss ([^\s,]+), time ([^\s,]+)ms(?:, mfu ([^\s,%]+)%)?")
# step 250: train loss 2.0341, val loss 2.1041
_ESTIMATE = re.compile(r"step ([0-9]{1,15}): train loss ([^\s,]+), val loss ([^\s,]+)")
# s:250 tel:6.4761, or s:250 trl:6.4761 lr:0.0001 norm:2.1
_SHORT = re.compile(r"s:([0-9]{1,15}) (?=(?:tel|trl):)")
_PEAK = re.compile(r"peak memory (?:allocated|consumption): ([0-9]{1,15}) MiB(?: reserved: ([0-9]{1,15}) MiB)?")
_VERSION = re.compile(
    r"Running (?i:(python|pytorch|triton))(?: version)? ([0-9]\S*)(?:.* compiled for CUDA ([0-9.]+))?"
)
_CARD = re.compile(r"\| +([0-9]{1,4}) +(\S.{1,60}?) {1,60}(?:On|Off) +\|")  # a line of nvidia-smi
_HOST = re.compile(r"(?:[\w.-]{1,64}: |\[\w{1,40}\]:? ?)(?=\S)")  # pdsh and torchrun write it before each line
_FIRST_LETTERS = ("s", "i", "p", "R", "|")  # of all patterns

_KNOWN = {
    "train_time": Meaning("seconds", "position"),
    "estimated_train_loss": Meaning("estimated_training_loss", "evaluation"),  # of several batches of training data
    "tel": Meaning("evaluation_loss", "evaluation"),
    "trl": Meaning("loss"),
    "norm": Meaning("gradient_norm"),
    "time_ms": Meaning("seconds_per_step", "training", 1e-3),
    "mfu": Meaning("mfu_percent"),
}
_UNITS_AT_END = ("ms", "%", "MiB")  # a line that ends with a unit is not cut off
_UNITS = {"ms": 1e-3, "s": 1}
_TIME = re.compile(r"([-+.0-9e]+)(ms|s)")


def is_line(text: str) -> bool:
    return any(pattern.match(_without_host(text)) for pattern in (_STEP, _ITERATION, _ESTIMATE, _SHORT))


def _without_host(text: str) -> str:
    match = _HOST.match(text)
    return text[match.end() :] if match else text


def read(path: Path) -> list[Draft]:
    """Return the runs in a log of nanoGPT or a derivative."""
    rows = Rows(_KNOWN)
    for line in reading.parts(path):
        text = _without_host(line.text)
        if not text.startswith(_FIRST_LETTERS):
            continue
        if not line.is_whole and not text.endswith(_UNITS_AT_END):
            rows.runs.current.not_read.add("the last line is cut off", line.number)
        elif pairs := _row(text):
            # Most lines of modded-nanogpt have only the step and the time.
            draft = rows.add(pairs, line.number, is_trained=[name for name, _ in pairs] == ["step", "train_time"])
            if (match := _STEP.match(text)) and draft.setting.get("planned_steps") != (planned := int(match[2])):
                draft.last_planned = draft.last_planned or planned
                draft.state("planned_steps", planned)
        elif match := _PEAK.match(text):
            rows.runs.current.total("peak_allocated_bytes", int(match[1]) * MIB)
            rows.runs.current.total("peak_reserved_bytes", int(match[2]) * MIB if match[2] else None)
        elif match := _VERSION.match(text):
            rows.runs.draft_for_statements.version(
                {"pytorch": "torch"}.get(match[1].lower(), match[1].lower()), match[2]
            )
            if match[3]:
                rows.runs.draft_for_statements.version("cuda", match[3])
        elif match := _CARD.match(text):
            draft = rows.runs.draft_for_statements
            draft.state("gpu", match[2])
            draft.other["GPUs that nvidia-smi lists"] = int(match[1]) + 1
    return rows.finish()


def _row(text: str) -> list[tuple[str, object]] | None:
    """Return the names and values in a line. None if the line has none."""
    if match := _STEP.match(text):
        # Without step_avg, which is the time divided by the number of steps.
        pairs = _PAIR.findall(text, match.end())
        return [("step", match[1]), *((name, _in_seconds(value)) for name, value in pairs if name != "step_avg")]
    if match := _ITERATION.match(text):
        values = (("loss", match[2]), ("time_ms", match[3]), ("mfu", match[4]))
        return [("step", match[1]), *((name, value) for name, value in values if value)]
    if match := _ESTIMATE.match(text):
        return [("step", match[1]), ("estimated_train_loss", match[2]), ("val_loss", match[3])]
    if match := _SHORT.match(text):
        return [("step", match[1]), *_PAIR.findall(text, match.end())]
    return None


def _in_seconds(text: str) -> object:
    match = _TIME.fullmatch(text)
    value = number(match[1]) if match else None
    return text if match is None or value is None else round(value * _UNITS[match[2]], 6)
