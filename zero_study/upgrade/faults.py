"""Read the known faults and crashes of releases, for `upgrade`, `doctor`, `prove` and `conformance`.

faults.json is the only list. Conformance runs of this project found some of the faults of DeepSpeed, and a test
compares these entries with the committed matrices. The other entries are known from public threads. `prove` may run
where only the packages that DeepSpeed itself requires are installed, and PyYAML is none of them. This module therefore
imports only `packaging`, and the list is written in JSON.

The release with the fix is the first tag of the repository that contains it. Unless a thread says it, the first release
with the fault is that of the newest commit whose lines the fix changed.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from ..engines.strategy_names import OffloadDevice, StrategyName

FILE = Path(__file__).with_name("faults.json")

Kind = Literal[
    "fault",  # training is wrong without an error
    "crash",  # it stops with an error
    "change",  # it does something else than before, by design; `introduced` is then the first release that does
    # These are not in the list. `upgrade` finds them.
    "default", "gone", "new", "pair", "unknown",
]  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """A property of releases of a package that makes a training wrong, stops it or changes it."""

    package: str
    kind: Kind
    id: str
    summary: str = ""  # empty for a fault that conformance found; see `summary_of`
    introduced: str | None = None  # the first release that has it; None: older than all that were examined, or unknown
    fixed: str | None = None  # the first release without it again; None: no release of the index is known to be
    threads: Sequence[str] = ()  # public reports and fixes; without one, this project found the fault itself
    date: str = ""  # of the first thread, of the post in it that reports this, or of the fix
    beside: Mapping[str, str] = field(default_factory=dict)  # releases of other packages that must also be installed
    with_feature: bool = False  # it came with the feature that has it, so an upgrade breaks nothing that worked
    # For DeepSpeed: the affected values of keys of its JSON (None: the key is missing), for `doctor --for`.
    file: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    # What a training that it concerns has: values of keys of DeepSpeed's JSON (None: the key is missing), and of
    # "engine" (deepspeed, fsdp1, fsdp2, fsdp for either, ddp). `upgrade` leaves a fault out if the files or the
    # options say otherwise.
    needs: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    uses: Sequence[str] = ()  # words of which one must be in a script that it concerns, at least at the end of a name
    # Keywords of which each call must have one to avoid it, by the end of the function's name with its owner.
    unless: Mapping[str, Sequence[str]] = field(default_factory=dict)
    remedy: str = ""  # a sentence with what to write to avoid it, besides another release; empty: nothing is known
    # What goes wrong: gradients, weights or the loss; other data; what is saved or resumed; only memory, time or text.
    effect: Literal["training", "data", "checkpoint", "cost"] = "training"
    factor: str = ""  # a sentence with a measured factor, which is true with and without the fault
    # How a log shows it, for `why`: the exception (its name without module; empty: none), patterns for the message and
    # for a frame of the traceback ("FILE:LINE in FUNCTION"; empty: any), and an example of the message.
    signature: Mapping[str, str] = field(default_factory=dict)
    program: str = ""  # a program of this repository that shows it
    evidence: Literal["", "read"] = ""  # read: known from the thread and the source code, not measured here
    # Only of a fault that conformance found. Engines, precisions and variation are named as in the matrix.
    engines: Sequence[str] = ()
    precisions: Sequence[str] = ()
    last: str | None = None  # the last release that is wrong; if it is not fixed, the newest one that was examined
    several_micro_batches: bool = False  # only steps of more than one micro batch are affected
    models: str | None = None  # the only models that are affected; None: all
    variation: str | None = None  # what an affected script does; None: every script is affected
    what: str = ""  # what goes wrong in the training

    def is_in(self, version: str | None) -> bool:
        """Return whether a release of the package has this fault or change, regardless of other packages."""
        first, end = base_release(self.introduced or "0.0.1"), base_release(self.fixed or "9999")
        return version is not None and first <= base_release(version) < end

    def is_among(self, pins: Mapping[str, str]) -> bool:
        """Return whether a set of releases has this fault or change, including its conditions on other packages."""
        return self.is_in(pins.get(self.package)) and all(
            package in pins and base_release(pins[package]) in SpecifierSet(required)
            for package, required in self.beside.items()
        )

    def set_of_packages(self) -> tuple[str, ...]:
        """Return the packages that have a fault only together. Empty for a fault of one package."""
        return (self.package, *self.beside) if self.beside else ()


class MatchingFault(NamedTuple):
    """A known fault that affects a given training."""

    fault: Fault
    cell: str  # the cell of the conformance matrix that shows it

    @property
    def models(self) -> str | None:
        return self.fault.models


@cache
def read() -> list[Fault]:
    """Return every known fault in faults.json."""
    return [Fault(**entry) for entry in json.loads(FILE.read_text(encoding="utf-8"))]


@cache
def measured() -> list[Fault]:
    """Return the faults of DeepSpeed that this project's conformance runs found."""
    return [fault for fault in read() if fault.engines]


def summary_of(fault: Fault, engines: Sequence[str]) -> str:
    """Return a text that says which trainings of these engines a fault affects, and what goes wrong."""
    several = " with several micro batches" if fault.several_micro_batches else ""
    only = f", only for {fault.models}" if fault.models else ""
    return f"{', '.join(engines)} in {', '.join(fault.precisions)}{several}{only}: {fault.what}"


def base_release(version: str) -> Version:
    """Return the release that a version belongs to, without suffixes such as +cpu, .dev0, rc1 or .post1.

    If the text is not a version, return release 0, which comes before all others.
    """
    try:
        return Version(Version(version).base_version)
    except InvalidVersion:
        return Version("0")


def first_release(fault: Fault) -> Version:
    """Return the first release that has a fault. Release 0 if it is not known."""
    return base_release(fault.introduced or "0")


def affects(fault: Fault, version: str) -> bool:
    """Return whether a release of DeepSpeed has a fault that conformance found."""
    return first_release(fault) <= base_release(version) <= base_release(fault.last or "0")


def faults_of(
    version: str, engine: str, precisions: Collection[str] = (), variations: Collection[str] = ()
) -> Iterator[Fault]:
    """Yield the faults that conformance found in a release of DeepSpeed in an engine.

    Faults that affect all models come first. `engine`, `precisions` and `variations` are named as in the conformance
    matrix. If `precisions` is empty, the faults of all precisions are included. `variations` are those of the script.
    """
    for fault in sorted(measured(), key=lambda fault: fault.models is not None):
        has_precision = not precisions or bool({*precisions} & {*fault.precisions})
        if (
            engine in fault.engines
            and has_precision
            and affects(fault, version)
            and fault.variation in (None, *variations)
        ):
            yield fault


def find(
    *,
    deepspeed: str,
    zero_stage: int,
    offload: OffloadDevice,
    precision: str,
    sums_in_fp32: bool,
    micro_batches: int | None,
    variations: Collection[str] = (),
) -> MatchingFault | None:
    """Return the first known fault that a release of DeepSpeed has in a training; None if no fault is known.

    `offload` is the device that optimizer states are offloaded to. `precision` is the class as records name it.
    `sums_in_fp32` says whether gradients of 16-bit parameters are added up in fp32. `micro_batches` is the number of
    micro batches per step; None if it is unknown and may be more than one. `variations` are those of the script, as
    the matrix names them.
    """
    engine = str(StrategyName.of_zero(zero_stage, offload))
    matrix_class = _class_of(precision, sums_in_fp32)
    for fault in faults_of(deepspeed, engine, [matrix_class], variations):
        if micro_batches != 1 or not fault.several_micro_batches:
            return MatchingFault(fault, cell(fault, engine, matrix_class))
    return None


def cell(fault: Fault, engine: str, precision: str) -> str:
    """Return the name of the conformance case that shows a fault of an engine and a precision class."""
    several = fault.several_micro_batches or fault.variation is not None
    return f"{engine}/{precision}/2-ranks/accumulation-{1 + several}{f'/{fault.variation}' if fault.variation else ''}"


def sentence(known_fault: MatchingFault, deepspeed: str) -> str:
    """Return one sentence, without its full stop, on what a release of DeepSpeed trains wrongly."""
    models = f" for {known_fault.models}" if known_fault.models else ""
    return f"DeepSpeed {deepspeed} trains {known_fault.cell} wrongly{models}: {known_fault.fault.what}"


def _class_of(precision: str, sums_in_fp32: bool) -> str:
    """Return the matrix's name of a precision class; fp16, which has none, is treated as bf16, as DeepSpeed does."""
    if precision == "fp32":
        return precision
    if precision.endswith("-autocast"):
        return "autocast"
    return "bf16_fp32_sum" if sums_in_fp32 else "bf16"
