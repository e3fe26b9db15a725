"""How busy were others while a run trained? Time of the processors that the run may use, without its own."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple

from study.engines import this_machine
from study.records.schema import Load

STAT = Path("/proc/stat")


class Moment(NamedTuple):
    """What these processors had done until a moment, in seconds."""

    at: float
    busy: float  # of all processes; waiting for a disk is not
    stolen: float  # in which a hypervisor ran something else


def moment() -> Moment:
    """Read the kernel's counters of the processors on which this process may run."""
    lines = (line.split() for line in STAT.read_text().splitlines())
    times = {name: [int(ticks) for ticks in rest] for name, *rest in lines if name[:3] == "cpu" and name != "cpu"}
    allowed = {f"cpu{number}" for number in this_machine.allowed_processors()}
    counted = allowed if allowed <= times.keys() else times.keys()  # a container may number its own anew
    user, nice, system, _, _, irq, softirq, stolen, *_ = map(sum, zip(*(times[name] for name in counted), strict=True))
    ticks = os.sysconf("SC_CLK_TCK")
    return Moment(time.perf_counter(), (user + nice + system + irq + softirq) / ticks, stolen / ticks)


def own_seconds() -> float:
    """Processor seconds of this process and its threads, and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def between(first: Moment, last: Moment, own: float) -> Load:
    """The load between two moments, in which the run's processes on this box took `own` seconds.

    Of processors of which a control group leaves the run a part, others may have the rest.
    """
    seconds, allowed = last.at - first.at, len(this_machine.allowed_processors())
    usable = min(allowed, this_machine.quota() or allowed)
    others = last.busy - first.busy - own - (allowed - usable) * seconds
    return Load(
        seconds=seconds,
        num_processors=max(1, int(usable)),
        own_seconds=own,
        other_seconds=max(0.0, others),
        stolen_seconds=max(0.0, last.stolen - first.stolen) * usable / allowed,
    )
