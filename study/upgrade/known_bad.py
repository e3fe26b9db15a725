"""Look up the faults of DeepSpeed releases that train wrongly without an error, as `zero-study conformance` found them.

A test compares known_bad.json with the committed matrices. `prove` may run where only the packages that DeepSpeed
itself requires are installed, so this module imports only those (`packaging` is one of them).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from packaging.version import InvalidVersion, Version

from ..engines.strategy_names import OffloadDevice, StrategyName

TABLE = Path(__file__).with_name("known_bad.json")


@dataclass(frozen=True)
class Fault:
    """A fault that makes a range of releases train wrongly."""

    id: str
    engines: list[str]  # as the matrix names them
    precisions: list[str]
    first: str | None  # the first release that is wrong; None: the oldest that was examined, 0.15.4, and maybe before
    last: str  # the last release that is wrong; if the fault is not fixed, the newest one that was examined
    several_micro_batches: bool  # only steps of more than one micro batch are affected
    models: str | None  # the only models that are affected; None: all
    what: str  # what goes wrong in the training
    threads: list[str]  # public reports and fixes
    factor: str | None = None  # a sentence with a measured factor, which is true with and without the fault
    twist: str | None = None  # what an affected script does, as the matrix names it; None: every script is affected


class KnownFault(NamedTuple):
    """A fault that affects a training."""

    fault: Fault
    cell: str  # the cell of the conformance matrix that shows it

    @property
    def models(self) -> str | None:
        return self.fault.models


@cache
def read() -> list[Fault]:
    """Return every fault of the table."""
    return [Fault(**entry) for entry in json.loads(TABLE.read_text())]


def base_release(version: str) -> Version:
    """Return the release that a version belongs to, without suffixes such as +cpu, .dev0, rc1 or .post1.

    If the text is not a version, return release 0, which comes before all others.
    """
    try:
        return Version(Version(version).base_version)
    except InvalidVersion:
        return Version("0")


def first_release(fault: Fault) -> Version:
    """Return the first release that has a fault; release 0 if that is not known."""
    return base_release(fault.first or "0")


def affects(fault: Fault, version: str) -> bool:
    """Return whether a release of DeepSpeed has a fault."""
    return first_release(fault) <= base_release(version) <= base_release(fault.last)


def faults_of(
    version: str, engine: str, precisions: Collection[str] = (), twists: Collection[str] = ()
) -> Iterator[Fault]:
    """Yield the faults of a release of DeepSpeed in an engine. Faults that affect all models come first.

    `engine`, `precisions` and `twists` are named as in the conformance matrix. If `precisions` is empty, the faults of
    all precisions are included. `twists` are the variations of the script.
    """
    for fault in sorted(read(), key=lambda fault: fault.models is not None):
        has_precision = not precisions or bool({*precisions} & {*fault.precisions})
        if engine in fault.engines and has_precision and affects(fault, version) and fault.twist in (None, *twists):
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
) -> KnownFault | None:
    """Return the first known fault that a release of DeepSpeed has in a training; None if no fault is known.

    `offload` is the device that optimizer states are offloaded to. `precision` is the class as records name it.
    `sums_in_fp32` says whether gradients of 16-bit parameters are added up in fp32. `micro_batches` is the number of
    micro batches per step; None if it is unknown and may be more than one. `twists` are the variations of the script,
    as the matrix names them.
    """
    engine = str(StrategyName.of_zero(zero_stage, offload))
    matrix_class = _class_of(precision, sums_in_fp32)
    for fault in faults_of(deepspeed, engine, [matrix_class], twists):
        if micro_batches != 1 or not fault.several_micro_batches:
            return KnownFault(fault, cell(fault, engine, matrix_class))
    return None


def cell(fault: Fault, engine: str, precision: str) -> str:
    """Return the name of the matrix cell that shows a fault of an engine and a precision class."""
    several = fault.several_micro_batches or fault.twist is not None
    return f"{engine}/{precision}/2-ranks/accumulation-{1 + several}{f'/{fault.twist}' if fault.twist else ''}"


def sentence(known_fault: KnownFault, deepspeed: str) -> str:
    """Return one sentence, without its full stop, on what a release trains wrongly."""
    models = f" for {known_fault.models}" if known_fault.models else ""
    return f"DeepSpeed {deepspeed} trains {known_fault.cell} wrongly{models}: {known_fault.fault.what}"


def _class_of(precision: str, sums_in_fp32: bool) -> str:
    """Return the matrix's name of a precision class; fp16, which has none, is treated as bf16, as DeepSpeed does."""
    if precision == "fp32":
        return precision
    if precision.endswith("-autocast"):
        return "autocast"
    return "bf16_fp32_sum" if sums_in_fp32 else "bf16"
