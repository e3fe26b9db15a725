"""What does somebody's table of training results say? Each cell as a number with the digits it is printed to.

A row is numbered as a spreadsheet does: the head is row 1.
"""

from __future__ import annotations

import csv
import difflib
import io
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from study import files
from study.errors import Refusal

NUMBERS = (
    "params", "layers", "hidden", "num_gpus", "seq_len", "micro_batch", "gradient_accumulation_steps", "global_batch",
)  # fmt: skip
WORDS = ("source", "model", "gpu", "strategy", "precision", "optimizer", "act_ckpt", "notes")
COLUMNS = (*WORDS, *NUMBERS, "metric", "value", "unit")
ALSO = {  # other names of columns
    "num_params": "params", "gpus": "num_gpus", "sharding_strategy": "strategy", "sequence_length": "seq_len",
    "micro_batch_size": "micro_batch", "global_batch_size": "global_batch", "activation_checkpointing": "act_ckpt",
}  # fmt: skip
COLUMNS_IN_WORDS = "model, params, gpu, num_gpus, strategy, metric, value, unit ... (docs/check.md)"
ALIKE = 0.8  # of difflib: a head that is so near to a column's is a slip
MOST = 1e18  # of anything that a table counts

Quantity = Literal["peak memory", "resting memory", "tokens", "sequences", "step", "flops", "mfu"]


@dataclass(frozen=True)
class Printed:
    """A number, and half a unit of its last printed digit."""

    value: float
    half: float

    @property
    def low(self) -> float:
        return self.value - self.half

    @property
    def high(self) -> float:
        return self.value + self.half


@dataclass(frozen=True)
class Result:
    """What a row has measured, in bytes, seconds, FLOP/s, a share, or a second's tokens or sequences."""

    quantity: Quantity
    printed: Printed
    per_gpu: bool  # of rates
    loose: float  # GB is read as GiB by many: the other reading over this one
    text: str  # as printed

    @property
    def most(self) -> float:
        """The largest number that is printed so."""
        return self.printed.high * self.loose


@dataclass(frozen=True)
class Row:
    """One row; what is empty or not understood is None."""

    number: int
    cells: Mapping[str, str]
    result: Result | None

    @cached_property
    def said(self) -> str:
        """All that the row says in words, in small letters."""
        return " ".join(self.cells[name] for name in WORDS if name != "source").casefold()

    def whole(self, column: str) -> int | None:
        """The whole number of a cell."""
        found = read_number(self.cells[column])
        return int(found.value) if found and found.value.is_integer() and found.value >= 1 else None

    @property
    def out_of_memory(self) -> bool:
        return self.cells["value"].casefold() in OUT_OF_MEMORY

    @property
    def params(self) -> Printed | None:
        return read_number(self.cells["params"], _SCALES)

    @property
    def key(self) -> tuple[str, ...]:
        """What the rows of one run have in common."""
        return tuple(self.cells[name] for name in (*WORDS, *NUMBERS))


@dataclass(frozen=True)
class Table:
    """The rows, and the cells that are not understood with the rows where they are."""

    rows: tuple[Row, ...]
    unread: Mapping[str, list[int]]


def read(path: Path) -> Table:
    """Read a table; raises Refusal with one line where it is none, or where a whole column is not understood."""
    head, lines = _lines(path)
    rows, unread = [], dict[str, list[int]]()
    for number, line in lines:
        if len(line) > len(head):
            raise Refusal(f"{path}: row {number} has {len(line)} cells, the head {len(head)}; quote cells with a comma")
        cells = dict.fromkeys(COLUMNS, "") | {
            name: " ".join(cell.split()) for name, cell in zip(head, line, strict=False) if name in COLUMNS
        }
        cells = {name: "" if cell.casefold() in _EMPTY else cell for name, cell in cells.items()}
        if not any(cells.values()):
            continue
        result = _result(cells)
        for slip in _unread(cells, result):
            unread.setdefault(slip, []).append(number)
        rows.append(Row(number, cells, result))
    if not rows:
        raise Refusal(f"{path}: has no row under its head; give a row for each result")
    _check_columns(path, rows)
    return Table(tuple(rows), unread)


def _lines(path: Path) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """The head, checked, and the lines under it that are not empty, with their numbers."""
    give = f"give a CSV with the columns {COLUMNS_IN_WORDS}"
    try:
        text = files.read_whole(path).decode("utf-8-sig")
    except OSError as error:
        raise Refusal(f"{path}: {(error.strerror or 'cannot be read').lower()}; {give}") from None
    except UnicodeDecodeError:
        raise Refusal(f"{path}: is no text in UTF-8; save the table as CSV in UTF-8") from None
    except ValueError as error:
        raise Refusal(f"{path}: {error}; {give}") from None
    if "\0" in text:
        raise Refusal(f"{path}: is no text; save the table as CSV in UTF-8")
    try:
        numbered = enumerate(csv.reader(io.StringIO(text, newline=""), strict=True), 1)
        lines = [(number, line) for number, line in numbered if line]
    except csv.Error as error:
        raise Refusal(f"{path}: is no CSV ({error}); quote cells with a comma, a quote or a line break") from None
    if not lines:
        raise Refusal(f"{path}: is empty; {give}")
    head = [name.strip().casefold() for name in lines[0][1]]
    head = [ALSO.get(name, name) for name in head]
    _check_head(path, head)
    return head, lines[1:]


def _check_head(path: Path, head: list[str]) -> None:
    known = [name for name in head if name in COLUMNS]
    if twice := [name for name in known if head.count(name) > 1]:
        raise Refusal(f"{path}: column {twice[0]} is there twice; take one out")
    for name in head:
        near = difflib.get_close_matches(name, COLUMNS, n=1, cutoff=ALIKE)
        if name not in COLUMNS and near and near[0] not in head:
            raise Refusal(f"{path}: column {short(name)} is not known; write {near[0]}, or take it out")
    if not {"model", "params"} & {*known} and not {"metric", "value"} <= {*known}:
        first = short(",".join(head))
        raise Refusal(f"{path}: its head {first} has none of the columns {COLUMNS_IN_WORDS}; name them, with commas")


def _check_columns(path: Path, rows: list[Row]) -> None:
    """Refuse a column of which nothing is understood: what is checked would silently be less."""
    for name in NUMBERS:
        cells = [row.cells[name] for row in rows if row.cells[name]]
        if cells and not any(_is_understood(name, cell) for cell in cells):
            raise Refusal(f"{path}: column {name} has no number, such as {short(cells[0])}; give digits, or empty it")
    results = [row for row in rows if row.cells["value"] and not row.out_of_memory]
    if results and not any(row.result for row in results):
        first = results[0].cells
        raise Refusal(
            f"{path}: no value is understood, such as {short(first['value'])} {short(first['unit'])} of the metric "
            f"{short(first['metric'])}; docs/check.md has the metrics and units"
        )


def _unread(cells: Mapping[str, str], result: Result | None) -> Iterator[str]:
    """Name the cells that are not understood."""
    for name in NUMBERS:
        if cells[name] and not _is_understood(name, cells[name]):
            yield f"{name} {short(cells[name])}"
    if cells["value"] and result is None and cells["value"].casefold() not in OUT_OF_MEMORY:
        is_number = read_number(cells["value"]) is not None
        in_unit = f"{cells['metric'] or 'a value'} in {short(cells['unit'])}"
        yield in_unit if is_number else f"value {short(cells['value'])}"


def _is_understood(name: str, cell: str) -> bool:
    found = read_number(cell, _SCALES if name == "params" else {})
    return found is not None and (name == "params" or (found.value.is_integer() and found.value >= 1))


def short(text: str) -> str:
    """Quote a cell, and not more of it than a line takes."""
    return repr(text if len(text) <= 40 else text[:40] + "...")


# ---------------------------------------------------------------- cells

_EMPTY = {"", "-", "--", "\u2013", "\u2014", "?", "n/a", "na", "nan", "none given", "unknown"}
OUT_OF_MEMORY = {"oom", "out of memory", "out_of_memory", "cuda oom"}
_SCALES = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_NUMBER = re.compile(
    r"[~\u2248]?\s*(?P<digits>\d{1,3}(?:,\d{3})+|\d+)(?:\.(?P<part>\d+))?(?:e(?P<power>[+-]?\d{1,2}))?"
    r"\s*(?P<scale>[kmbt])?",
    re.ASCII | re.IGNORECASE,
)


def read_number(text: str, scales: Mapping[str, float] = {}) -> Printed | None:
    """Read a number above 0, with commas between thousands, a power of ten and, where allowed, k, M, B or T."""
    found = _NUMBER.fullmatch(text)
    if found is None or (found["scale"] and found["scale"].lower() not in scales):
        return None
    factor = 10.0 ** int(found["power"] or 0) * scales.get((found["scale"] or "").lower(), 1.0)
    value = float(f"{found['digits'].replace(',', '')}.{found['part'] or 0}") * factor
    if not 0 < value <= MOST:
        return None
    # 7e9 has one digit, 32000 may have five.
    return Printed(value, factor * 10.0 ** -len(found["part"] or "") / 2)


_BYTES = {"b": 1, "byte": 1, "bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_DECIMAL_BYTES = {"mb": (1e6, 2**20), "gb": (1e9, 2**30), "tb": (1e12, 2**40)}
_SECONDS = {"s": 1.0, "sec": 1.0, "second": 1.0, "seconds": 1.0, "ms": 1e-3}
_FLOPS = {"tflop": 1e12, "tflops": 1e12, "pflop": 1e15, "pflops": 1e15}
_COUNTED: dict[str, Quantity] = {
    **dict.fromkeys(("tok", "token", "tokens"), "tokens"),
    **dict.fromkeys(("sample", "samples", "seq", "seqs", "sequence", "sequences"), "sequences"),
}  # fmt: skip
_ONE_GPU = {"gpu", "device", "card", "rank"}

# Not a GPU's memory, or only a part of it, or a difference; not training.
_OTHER_MEMORY = re.compile(
    "host|cpu|disk|nvme|sav|reduc|delta|diff|state|optimizer|activation|param|gradient|per_token|buffer|estimat|predict"
)
_RESTING = re.compile("after_step|between_steps|resting|idle|steady")
_HIGHEST = re.compile("peak|max|reserved|nvml|nvidia|vram|gpu_mem|used")
_STEP = re.compile(r"(?:seconds|time)_per_(?:(?P<many>\d+)_)?(?:optimizer_)?(?:steps?|iterations?|iters?)")
_STEP_NAMES = ("step_time", "step_seconds", "iteration_time", "iter_time", "seconds_per_it")
_NOT_TRAINING = re.compile("generat|inference|decod|prefill|prompt|eval")


def _result(cells: Mapping[str, str]) -> Result | None:
    """Read metric, value and unit together; None where they are not understood."""
    printed = read_number(cells["value"].rstrip("% "))
    metric = "_".join(cells["metric"].casefold().split())
    unit = re.sub(r"\(.*?\)", "", cells["unit"].casefold()).replace(" per ", "/").replace(" ", "")
    if printed is None or _NOT_TRAINING.search(metric):
        return None
    first, *rest = unit.split("/")
    each = bool({*rest} & _ONE_GPU) or metric.endswith("per_gpu")
    is_rate = bool({*rest} & _SECONDS.keys() - {"ms"})
    found: tuple[Quantity, float, float] | None = None
    if first in _BYTES or first in _DECIMAL_BYTES:
        found = _memory(metric, first)
    elif first in _COUNTED and is_rate:
        found = _COUNTED[first], 1.0, 1.0
    elif first in _SECONDS and not rest and (factor := _steps(metric)):
        found = "step", _SECONDS[first] / factor, 1.0
    elif first in _FLOPS and (is_rate or first.endswith("s")):
        found = "flops", _FLOPS[first], 1.0
    elif metric in ("mfu", "mfu_percent", "model_flops_utilization") and unit in ("", "%", "percent"):
        is_percent = unit or metric.endswith("percent") or cells["value"].endswith("%") or printed.value > 1.5
        found = "mfu", 0.01 if is_percent else 1.0, 1.0
    if found is None:
        return None
    quantity, scale, loose = found
    text = f"{cells['value']} {cells['unit']}".strip()
    return Result(quantity, Printed(printed.value * scale, printed.half * scale), each, loose, text)


def _memory(metric: str, unit: str) -> tuple[Quantity, float, float] | None:
    if _OTHER_MEMORY.search(metric) or not re.search("mem|alloc|reserved|vram", metric):
        return None
    scale, other = _DECIMAL_BYTES.get(unit) or (_BYTES[unit], _BYTES[unit])
    # Which moment is not said: the less that must be there.
    is_peak = _HIGHEST.search(metric) and not _RESTING.search(metric)
    return "peak memory" if is_peak else "resting memory", scale, other / scale


def _steps(metric: str) -> int:
    """Of how many optimizer steps a time is; 0: of none."""
    if metric in _STEP_NAMES:
        return 1
    found = _STEP.fullmatch(metric)
    return int(found["many"] or 1) if found and len(found["many"] or "") < 7 else 0
