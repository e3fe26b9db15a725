"""Read TensorBoard's event files with TensorBoard's own reader, which is imported only when it is needed."""

from __future__ import annotations

import importlib.util
import math
import re
from pathlib import Path
from typing import Any

from zero_study.errors import Refusal
from zero_study.logs import megatron
from zero_study.logs.columns import Meaning, Rows
from zero_study.logs.draft import Draft
from zero_study.logs.reading import cleaned

BEGIN, LONGEST_BEGIN = b"brain.Event:", 64  # in the first bytes of every event file
_FRAME = 16  # bytes of a record beside its content
_KNOWN = megatron.KNOWN | {"wall_time": Meaning("wall_time", "date")}
# Megatron-LM logs "lm loss" by steps and "lm loss vs samples" by samples. DeepSpeed logs "Train/Samples/lr" by samples.
_BY = re.compile(r"(.+) vs (\w+)|Train/Samples/(.+)")
_POSITIONS = ("step", "samples", "tokens")


def read(path: Path) -> list[Draft]:
    """Return the runs in an event file of TensorBoard. Only scalars are read.

    Raises ModuleNotFoundError if TensorBoard is not installed.
    """
    if importlib.util.find_spec("tensorboard") is None:
        raise ModuleNotFoundError(name="tensorboard")
    from google.protobuf.message import DecodeError
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    rows = Rows(_KNOWN)
    row: dict[str, Any] = {}
    num_bytes = num_records = 0
    for record in RawEventFileLoader(str(path)).Load():
        num_bytes += len(record) + _FRAME
        num_records += 1
        try:
            event = Event.FromString(record)
        except DecodeError:
            rows.runs.current.not_read.add("a damaged record was left out", f"record {num_records:,}")
            continue
        for value in event.summary.value:
            scalar = _scalar(value)
            if scalar is None:
                continue
            match = _BY.fullmatch(value.tag)
            tag, by = (match[1] or match[3], match[2] or "samples") if match else (value.tag, "step")
            if match and match[1] and tag in row and row.get(by, event.step) == event.step:
                row |= {by: event.step} if by in _POSITIONS else {}  # a repetition of a value in this row
            elif by not in _POSITIONS:
                rows.runs.current.not_read.add(cleaned(f"values by {by} were left out"), f"record {num_records:,}")
            else:
                if row.get(by) != event.step or tag in row:  # each scalar is a record of its own
                    _add(rows, row, num_records)
                    row = {by: event.step, "wall_time": event.wall_time}
                row[tag] = scalar
    _add(rows, row, num_records)
    if num_bytes < path.stat().st_size:
        rows.runs.current.not_read.add("the file is damaged or cut off", f"record {num_records + 1:,}")
    if not rows.runs.current.has_rows:
        raise Refusal("it has no scalars")
    return rows.finish()


def _add(rows: Rows, row: dict[str, Any], num_records: int) -> None:
    if row:
        rows.add(row.items(), f"record {num_records:,}")


def _scalar(value: Any) -> float | None:
    """Return the number in a value of a summary. None for a picture, a histogram or a text."""
    from tensorboard.util import tensor_util

    kind = value.WhichOneof("value")
    if kind == "simple_value":
        return float(value.simple_value)
    if kind != "tensor" or math.prod(side.size for side in value.tensor.tensor_shape.dim) != 1:
        return None
    try:
        return float(tensor_util.make_ndarray(value.tensor).item())
    except (TypeError, ValueError):  # a text, or a damaged tensor
        return None
