"""How busy were others while a run trained? Processor time of the box, without the run's own."""

from __future__ import annotations

import os
import time
from typing import NamedTuple

import psutil

from study.records.schema import Load


class Moment(NamedTuple):
    """What the box's processors had done until a moment, in seconds."""

    at: float
    busy: float  # of all processors and processes; waiting for a disk is not
    stolen: float  # in which a hypervisor ran something else


def moment() -> Moment:
    """Read the box's counters; in a container they are the whole machine's."""
    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    stolen = getattr(times, "steal", 0.0)
    inside = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)  # which `user` and `nice` have as well
    return Moment(time.perf_counter(), sum(times) - inside - idle - stolen, stolen)


def own_seconds() -> float:
    """Processor seconds of this process and its threads, and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def between(first: Moment, last: Moment, own: float) -> Load:
    """The load between two moments, in which the run's processes on this box took `own` seconds."""
    return Load(
        seconds=last.at - first.at,
        num_processors=os.cpu_count() or 1,
        own_seconds=own,
        other_seconds=max(0.0, last.busy - first.busy - own),
        stolen_seconds=max(0.0, last.stolen - first.stolen),
    )
