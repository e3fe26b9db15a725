"""The releases of DeepSpeed known to train wrongly without a word: what `zero-study conformance` found, in a table.

A test holds known_bad.json against the committed matrices. A script that is proven may have no package but DeepSpeed's
own, so it takes Python's alone to look something up.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from .strategy_names import OffloadDevice, StrategyName

TABLE = Path(__file__).with_name("known_bad.json")


@dataclass(frozen=True)
class Fault:
    """Something that a range of releases trains wrongly."""

    id: str
    engines: list[str]  # as the matrix names them
    precisions: list[str]
    first: str | None  # the first release that is wrong; None: the oldest that was examined, 0.15.4, and maybe before
    last: str  # the last one; the newest that was examined where it still is
    several_micro_batches: bool  # only where a step has more than one
    models: str | None  # the only ones that are hit; None: all
    what: str  # what comes out
    threads: list[str]  # where its developers write about it
    twist: str | None = None  # what a script does that is hit, as the matrix names it; None: every script is hit


class Known(NamedTuple):
    """A fault that hits what is asked for."""

    fault: Fault
    cell: str  # of the matrix, which shows it

    @property
    def models(self) -> str | None:
        return self.fault.models


@cache
def read() -> list[Fault]:
    return [Fault(**entry) for entry in json.loads(TABLE.read_text())]


def release(version: str) -> tuple[int, ...]:
    """A version as numbers, which are ordered as releases are; what follows the numbers (+cpu, .dev0) is left out."""
    numbers: list[int] = []
    for part in version.partition("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def begins(fault: Fault) -> tuple[int, ...]:
    """The first release of a fault as numbers; where it is not known, before all."""
    return release(fault.first or "0")


def covers(fault: Fault, version: str) -> bool:
    return begins(fault) <= release(version) <= release(fault.last)


def hitting(
    engine: str, deepspeed: str, precisions: Collection[str] = (), twists: Collection[str] = ()
) -> Iterator[Fault]:
    """The faults of a release, by engine and class as the matrix names them (none: any class), and twists of a script.

    What hits every model comes before what hits some.
    """
    for fault in sorted(read(), key=lambda fault: fault.models is not None):
        is_asked = engine in fault.engines and (not precisions or {*precisions} & {*fault.precisions})
        if is_asked and covers(fault, deepspeed) and fault.twist in (None, *twists):
            yield fault


def find(
    *,
    deepspeed: str,
    zero_stage: int,
    offload: OffloadDevice,
    precision: str,
    sums_in_fp32: bool,
    micro_batches: int | None,
    twists: Collection[str] = (),
) -> Known | None:
    """What this release of DeepSpeed trains wrongly of what is asked; None: nothing that is known.

    `offload`: the device that optimizer states are offloaded to. `precision`: as records name the classes.
    `sums_in_fp32`: gradients of 16-bit parameters are added up in fp32. `micro_batches` of a step; None: it is not
    known, and may be several. `twists`: what the script does beside the plain step.
    """
    engine = str(StrategyName.of_zero(zero_stage, offload))
    asked = _class_of(precision, sums_in_fp32)
    for fault in hitting(engine, deepspeed, [asked], twists):
        if micro_batches != 1 or not fault.several_micro_batches:
            return Known(fault, cell(fault, engine, asked))
    return None


def cell(fault: Fault, engine: str, precision: str) -> str:
    """The name of the cell that shows a fault of an engine and a class."""
    several = fault.several_micro_batches or fault.twist is not None
    return f"{engine}/{precision}/2-ranks/accumulation-{1 + several}{f'/{fault.twist}' if fault.twist else ''}"


def sentence(known: Known, deepspeed: str) -> str:
    """Say what is wrong, in one line without an end."""
    only = f", of {known.models}" if known.models else ""
    return f"DeepSpeed {deepspeed} trains {known.cell} wrongly{only} ({known.fault.what})"


def _class_of(precision: str, sums_in_fp32: bool) -> str:
    """The matrix's name of a class; it has none in fp16, which takes DeepSpeed the way of bf16."""
    if precision == "fp32":
        return precision
    if precision.endswith("-autocast"):
        return "autocast"
    return "bf16_fp32_sum" if sums_in_fp32 else "bf16"
