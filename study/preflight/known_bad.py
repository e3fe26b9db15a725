"""Which releases are known to train wrongly and to say nothing? What `zero-study conformance` found, in a short table.

A test holds known_bad.yaml against the committed matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from study.files import Written, parse_yaml

TABLE = Path(__file__).with_name("known_bad.yaml")


class Fault(Written):
    """Something that a range of releases trains wrongly."""

    id: str
    engines: list[str]  # as the matrix names them
    precisions: list[str]
    first: str  # the first and the last release that is wrong; the last that was examined where it still is
    last: str
    cell: str  # one that shows it
    what: str  # what comes out
    threads: list[str]  # where its developers write about it


@cache
def read() -> list[Fault]:
    return [Fault.model_validate(entry) for entry in parse_yaml(TABLE.read_text())]


def release(version: str) -> tuple[int, ...]:
    """A version as numbers, which are ordered as releases are; what follows the numbers (+cpu, .dev0) is left out."""
    numbers: list[int] = []
    for part in version.partition("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def covers(fault: Fault, version: str) -> bool:
    return release(fault.first) <= release(version) <= release(fault.last)


def wrong(
    *, deepspeed: str, zero_stage: int, offloads: Sequence[str], precision: str, sums_in_fp32: bool
) -> str | None:
    """Say what this release of DeepSpeed trains wrongly of what is asked; None: nothing that is known.

    `offloads`: the devices that optimizer states go to (cpu, nvme). `precision`: as records name the classes.
    `sums_in_fp32`: gradients of 16-bit parameters are added up in fp32.
    """
    engine = f"zero{zero_stage}{''.join(f'_{device}_offload' for device in offloads)}"
    asked = _class_of(precision, sums_in_fp32)
    for fault in read():
        if covers(fault, deepspeed) and engine in fault.engines and asked in fault.precisions:
            return f"DeepSpeed {deepspeed} trains {fault.cell} wrongly ({fault.what})"
    return None


def _class_of(precision: str, sums_in_fp32: bool) -> str:
    """The matrix's name of a class; it has none in fp16, which takes DeepSpeed the way of bf16."""
    if precision == "fp32":
        return precision
    if precision.endswith("-autocast"):
        return "autocast"
    return "bf16_fp32_sum" if sums_in_fp32 else "bf16"
