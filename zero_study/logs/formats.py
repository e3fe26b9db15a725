"""Recognize the format of a log by its first bytes, keys, column names or lines, and read it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from zero_study.errors import Refusal
from zero_study.files import open_regular
from zero_study.logs import (
    csv_tables,
    deepspeed,
    event_files,
    json_parts,
    json_tables,
    megatron,
    mllog,
    nanogpt,
    reading,
    torchtitan,
    trainer,
    wandb_exports,
)
from zero_study.logs.draft import Draft
from zero_study.public_runs import schema

HEAD = 1 << 16  # bytes that are enough to recognize a file, unless it is a log in lines
SEARCHED = 16 << 20  # characters of a log in which its first line of a known format must be


class Format(NamedTuple):
    """A format of logs: its name, how to recognize it, and how to read it."""

    name: str  # in a public run
    what: str  # in the help
    read: Callable[[Path], list[Draft]]
    is_line: Callable[[str], bool] | None = None  # whether a line of a log shows that it has this format


MLLOG = Format("mllog", "MLPerf's :::MLLOG lines", mllog.read, mllog.is_line)
TORCHTITAN = Format("torchtitan", "torchtitan's lines", torchtitan.read, torchtitan.is_line)
DEEPSPEED = Format("deepspeed", "DeepSpeed's lines", deepspeed.read, deepspeed.is_line)
NANOGPT = Format("nanogpt", "text of nanoGPT and modded-nanogpt", nanogpt.read, nanogpt.is_line)
PRINTED = Format("trainer output", "what the Trainer prints", trainer.read_printed, trainer.is_line)
LINES = (MLLOG, TORCHTITAN, DEEPSPEED, NANOGPT, PRINTED)

TRAINER = Format("trainer", "the Trainer's trainer_state.json", trainer.read)
MEGATRON = Format(schema.MEGATRON, "Megatron-LM's golden values", megatron.read)
LOSSES = Format("torchtitan losses", "torchtitan's files of losses", torchtitan.read_losses)
LIGHTNING = Format("lightning", "Lightning's metrics.csv", csv_tables.read)
EVENTS = Format("tensorboard", "TensorBoard's event files", event_files.read)
SCALAR = Format("tensorboard csv", "a scalar that TensorBoard exported", csv_tables.read_tensorboard)
CHART = Format("wandb chart", "a chart of Weights & Biases", wandb_exports.read_chart)
HISTORY_CSV = Format("wandb history", "a history of Weights & Biases", csv_tables.read)
HISTORY_JSON = Format("wandb history", "a history of Weights & Biases", json_tables.read_lines)
LIST_OF_RUNS = Format("wandb runs", "", wandb_exports.refuse_list_of_runs)
AUTOMODEL = Format("nemo automodel", "NeMo Automodel's JSON lines", json_tables.read_lines)
CSV = Format("csv", "CSV with named columns", csv_tables.read)
JSON = Format("json", "JSON with named columns", json_tables.read)
JSON_LINES = Format("json lines", "JSON lines with named columns", json_tables.read_lines)

ENTRIES = f'"{trainer.ENTRIES}"'
OWN_STEPS = {"step", "loss", "grad_norm", "learning_rate", "seconds", "tokens"}
_JSON = re.compile(r'\s*(?:\{\s*["}]|\[\s*[\[{\]])')


def read(path: Path) -> tuple[Format, list[Draft]]:
    """Return the format of a log and the runs in it.

    Raises Refusal if the file cannot be read, is damaged or has another format, or changes while it is read.
    """
    try:
        before = path.stat()
        form = recognize(path)
        drafts = form.read(path)
        after = path.stat()
    except Refusal as refusal:
        raise Refusal(f"{path}: {refusal}.") from None
    except (OSError, ValueError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise Refusal(f"{path}: cannot be read as the log of a training ({' '.join(reason.split())}).") from None
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise Refusal(
            f"{path}: a program is still writing to this file. Import the file again when the training has ended."
        )
    if not drafts:
        raise Refusal(f"{path}: the file has the format {form.name}, but contains no step of a training.")
    return form, drafts


def recognize(path: Path) -> Format:
    """Return the format of a log file. Raises Refusal if the format is unknown."""
    with open_regular(path) as file:
        head = file.read(HEAD)
    if event_files.BEGIN in head[: event_files.LONGEST_BEGIN]:
        return EVENTS
    if not head.strip():
        raise Refusal("the file is empty")
    if b"\0" in head:
        raise Refusal("it is neither text in UTF-8 nor an event file of TensorBoard")
    text = head.decode("utf-8", errors="replace").removeprefix("\ufeff")
    if _JSON.match(text):
        return _json(path, text)
    names = csv_tables.header(text.partition("\n")[0].rstrip("\r"))
    return _csv(path, names) or _lines(path)


def _json(path: Path, head: str) -> Format:
    if megatron.is_begin(head.lstrip()):
        return MEGATRON
    if ENTRIES in head.lstrip().partition("\n")[0]:
        return TRAINER
    first, second, *_ = (*itertools.islice(filter(str.strip, (line.text for line in reading.lines(path))), 2), "")
    row = _object(first)
    is_document = row is None or any(isinstance(each, list) or json_tables.is_column(each) for each in row.values())
    if is_document and not (first.startswith("{") and _object(second)):
        return TRAINER if ENTRIES in head else JSON
    row = row or {}
    if row.keys() >= OWN_STEPS and ("data_wait_seconds" in row or path.name == "steps.jsonl"):
        raise Refusal(
            "the file contains the steps of a run of zero-study. "
            f"Use `zero-study compare {path.parent}`, with the run's folder"
        )
    if wandb_exports.is_history(row):
        return HISTORY_JSON
    return AUTOMODEL if row.keys() >= json_tables.AUTOMODEL else JSON_LINES


def _object(text: str) -> dict[str, Any] | None:
    """Return the JSON object in a line. None if the line is something else."""
    try:
        value = json_parts.decoded(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _csv(path: Path, names: list[str]) -> Format | None:
    if wandb_exports.is_list_of_runs(names):
        return LIST_OF_RUNS
    if wandb_exports.is_chart(names):
        return CHART
    if csv_tables.is_tensorboard(names):
        return SCALAR
    if not csv_tables.is_known(names):
        return None
    if wandb_exports.is_history(names):
        return HISTORY_CSV
    return LIGHTNING if csv_tables.is_lightning(names, path) else CSV


def _lines(path: Path) -> Format:
    searched = 0
    forms: tuple[Format, ...] = LINES
    for line in reading.parts(path):
        if searched == 0 and torchtitan.is_loss(line.text):
            return LOSSES
        for form in forms:
            if form.is_line and form.is_line(line.text):
                if form is not DEEPSPEED:
                    return form
                forms = (PRINTED,)  # DeepSpeed logs no loss, and the Trainer may print some beside its lines
        searched += len(line.text) + 1
        if searched > SEARCHED:
            break
    if forms != LINES:
        return DEEPSPEED
    raise Refusal(
        "the import knows the format of none of its lines, and its first line does not name columns. "
        "`zero-study import --help` lists the known formats"
    )
