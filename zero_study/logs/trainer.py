"""Read what transformers' Trainer (and TRL) logs: the file trainer_state.json, and printed lines."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from zero_study.errors import Refusal
from zero_study.logs import deepspeed, json_parts, reading
from zero_study.logs.columns import Meaning, Rows, as_number
from zero_study.logs.draft import Draft, Place
from zero_study.logs.reading import GIB, Number

_KNOWN = {
    "train_runtime": Meaning("seconds", "position"),
    "num_tokens": Meaning("tokens", "position"),  # TRL counts those of all GPUs
}
# What LLaMA-Factory and ms-swift add to the Trainer's logs. Both memory peaks are bytes / 2^30.
PROGRESS = {
    "elapsed_time": Meaning("seconds", "position"),
    "total_tokens": Meaning("tokens", "position"),
    "total_steps": Meaning("planned_steps", "planned"),
    "vram_allocated": Meaning("peak_allocated_bytes", "training", GIB),
    "vram_reserved": Meaning("peak_reserved_bytes", "training", GIB),
    "memory(GiB)": Meaning("peak_reserved_bytes", "training", GIB),
    "remaining_time": Meaning("remaining_time", "internal"),
    "percentage": Meaning("percentage", "internal"),
}
OF_PROGRESS = {"elapsed_time", "remaining_time"}  # both programs log them
ENTRIES = "log_history"
_NOTED = ("num_train_epochs", "train_batch_size", "logging_steps", "eval_steps", "save_steps", "total_flos")
# Of the whole run. Trainer computes both with the samples of all GPUs.
_TOTALS = {"train_runtime": "seconds", "train_samples_per_second": "samples_per_second"}
_EPOCH_FALLS = "the epoch goes back: the training was resumed, or another training began"
_PROGRAM = "transformers Trainer"

# {'loss': 1.2034, 'grad_norm': 3.1, 'learning_rate': 1e-05, 'epoch': 0.1}
_PRINTED = re.compile(r"\{'(?:loss|eval_\w+|train_runtime)': [^{}]*\}")
_PAIR = re.compile(r"'([^']{1,200})': (?:'([^']{0,200})'|([-+.\w]+))")


def read(path: Path) -> list[Draft]:
    """Return the run in a trainer_state.json."""
    rows = Rows(_KNOWN)
    state: dict[str, Any] = {}
    number = 0
    for part in json_parts.parts(path):
        if part.key == ENTRIES and part.is_element:
            number += 1
            if isinstance(part.value, dict):
                add(rows, part.value.items(), f"entry {number:,}")
            else:
                rows.runs.current.not_read.add("an entry that is not a JSON object was left out", f"entry {number:,}")
        elif not part.is_element and part.key is not None:
            state[part.key] = part.value
    if not rows.runs.current.has_rows:
        raise Refusal("its log_history has no step of a training")
    drafts = rows.finish()
    _read_state(drafts[-1], state)
    return drafts


def add(rows: Rows, entry: Iterable[tuple[str, Any]], where: Place) -> None:
    """Add an entry of a Trainer's log: a training step, an evaluation, or the summary at the end."""
    values = dict(entry)
    if "train_runtime" in values and "loss" not in values:  # some trainings log the time with each loss, too
        draft = rows.runs.current
        for name, column in _TOTALS.items():
            draft.total(column, as_number(values.get(name)))
        draft.total("mean_training_loss", as_number(values.get("train_loss")))
        draft.ending = "finished"
    elif values.keys() >= OF_PROGRESS:
        _add_progress(rows, values, where)
    else:
        rows.add(values.items(), where)


def _add_progress(rows: Rows, values: dict[str, Any], where: Place) -> None:
    """Add an entry of LLaMA-Factory or ms-swift, whose evaluations and last entry also have values of the training."""
    if values.get("total_tokens") == 0:  # they were not counted
        del values["total_tokens"]
    roles = {name: known.role for name, value in values.items() if value is not None and (known := rows.meaning(name))}
    own = {role for name, role in roles.items() if name not in PROGRESS and name != "throughput"}
    if not {"training", "evaluation"} & own:
        rows.runs.current.ending = "finished"
        return
    prefix = "eval_" if "evaluation" in roles.values() and values.get("loss") is None else ""
    rows.add(((prefix + name if roles.get(name) == "training" else name, values[name]) for name in values), where)


def _read_state(draft: Draft, state: dict[str, Any]) -> None:
    draft.state("program", _PROGRAM)
    for name in _NOTED:
        draft.note(name, state.get(name))
    made, planned = as_number(state.get("global_step")), as_number(state.get("max_steps"))
    if planned is None or planned < 1:
        return
    draft.state("planned_steps", planned)
    if made is None:
        return
    if made >= planned:
        draft.ending = "finished"
    elif draft.ending == "finished":
        draft.marks.add(f"the Trainer stopped at step {made:,} of {planned:,}, and wrote its summary")
    else:
        draft.ending = "ended early"


# ---------------------------------------------------------------- what it prints


def is_line(text: str) -> bool:
    return _PRINTED.search(text) is not None


def read_printed(path: Path) -> list[Draft]:
    """Return the runs in the lines that a Trainer printed, which have no step numbers.

    If the epoch falls to that of the first line or below, another run begins. DeepSpeed's lines between them state
    settings and peaks of memory.
    """
    rows = Rows(_KNOWN | PROGRESS)
    engine = deepspeed.Log(rows)
    first: Number | None = None  # epoch of this run
    last: Number = -math.inf
    for line in reading.parts(path):
        match = _PRINTED.search(line.text) if "{'" in line.text else None
        if match is None:
            engine.take_statement(line)
            continue
        pairs = [(name, text or value) for name, text, value in _PAIR.findall(match[0])]
        epoch = as_number(dict(pairs).get("epoch", ""))
        if rows.runs.current.ending == "finished" or (
            epoch is not None and first is not None and epoch <= first < last
        ):
            rows.runs.begin()
            first, last = None, -math.inf
        if epoch is not None and math.isfinite(epoch):
            if epoch < last:
                rows.runs.current.marks.add(_EPOCH_FALLS, line.number)
            first, last = epoch if first is None else first, epoch
        add(rows, pairs, line.number)
    drafts = engine.finish()
    for draft in drafts:
        draft.state("program", _PROGRAM)
    return drafts
