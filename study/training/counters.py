"""Read counters of the kernel and of NVML: processor time, bytes of the network interfaces, and the energy of a GPU."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Container
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from study.records import machine
from study.records.schema import Load, Network
from study.training.memory import nvml_handle
from zero_study.engines import this_machine

STAT = Path("/proc/stat")


class CounterReading(NamedTuple):
    """A reading of the kernel's counters: the seconds that the processors of this process have worked so far."""

    at: float
    busy: float  # processor time of all processes, without waiting for disks
    stolen: float  # time in which a hypervisor ran another machine


def read_processors() -> CounterReading:
    """Read the kernel's counters of the processors on which this process may run."""
    lines = (line.split() for line in STAT.read_text().splitlines())
    times = {
        name: [int(ticks) for ticks in other_times]
        for name, *other_times in lines
        if name[:3] == "cpu" and name != "cpu"
    }
    allowed = {f"cpu{number}" for number in this_machine.allowed_processors()}
    counted = allowed if allowed <= times.keys() else times.keys()  # a container may use other numbers
    user, nice, system, _, _, irq, softirq, stolen, *_ = map(sum, zip(*(times[name] for name in counted), strict=True))
    ticks = os.sysconf("SC_CLK_TCK")
    return CounterReading(time.perf_counter(), (user + nice + system + irq + softirq) / ticks, stolen / ticks)


def own_seconds() -> float:
    """Return the processor seconds of this process with all its threads, and of its child processes that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def load_between(first: CounterReading, last: CounterReading, own: float) -> Load:
    """Return the processor load between two readings of the kernel's counters.

    `own` is the processor time in seconds that the run's processes on this machine used. If a control group limits the
    run to a part of its processors' time, other processes may use the rest without slowing the run. This rest is not
    counted as their load.
    """
    seconds, allowed = last.at - first.at, len(this_machine.allowed_processors())
    usable = min(allowed, this_machine.quota() or allowed)
    other_processes_seconds = last.busy - first.busy - own - (allowed - usable) * seconds
    return Load(
        seconds=seconds,
        num_processors=max(1, int(usable)),
        own_seconds=own,
        other_seconds=max(0.0, other_processes_seconds),
        stolen_seconds=max(0.0, last.stolen - first.stolen) * usable / allowed,
    )


Counters = dict[str, tuple[int, int]]  # name of an interface -> bytes sent and received


class Traffic:
    """The network traffic from the start of the first step after the warm-up to the start of the last step.

    The count covers whole steps and the time between them. Counting at the end of a step would be wrong: a rank may
    have received all that it needs while its own bytes are still queued.
    """

    def __init__(self, first_step: int) -> None:
        self._from = first_step  # counted from the first step of this process
        self._first: tuple[int, Counters] | None = None
        self._last: tuple[int, Counters] | None = None

    def begin_step(self, number: int, nth: int) -> None:
        """Read the counters at the start of a step. `nth` counts the steps of this process from 1."""
        if nth >= self._from:
            counts = psutil.net_io_counters(pernic=True, nowrap=False)
            counters = {name: (count.bytes_sent, count.bytes_recv) for name, count in counts.items() if name != "lo"}
            self._last = (number, counters)
            self._first = self._first or self._last

    def network(self) -> Network | None:
        """Return the counted traffic. None if there was no complete step."""
        if self._first is None or self._last is None or self._first[0] == self._last[0]:
            return None
        (first_step, before), (last_step, after) = self._first, self._last
        there = [name for name in before if name in after]  # interfaces of containers appear and disappear
        carried = {name: [now - then for now, then in zip(after[name], before[name], strict=True)] for name in there}
        used = {name: counters for name, counters in carried.items() if any(counters)}
        return Network(
            interfaces=sorted(used),
            rate_bits_per_second=_rate(used),
            num_steps=last_step - first_step,
            sent_bytes=sum(sent for sent, _ in used.values()),
            received_bytes=sum(received for _, received in used.values()),
        )


def _rate(interfaces: Container[str]) -> int | None:
    """Return the lowest rate limit of these interfaces in bits per second, as set by a token bucket filter (tc).

    None if there is no limit, or if it is unknown.
    """
    try:
        shown = json.loads(machine.command_output("tc", "-j", "qdisc", "show") or "[]")
    except ValueError:
        return None
    rates = [each["options"]["rate"] for each in shown if each.get("kind") == "tbf" and each.get("dev") in interfaces]
    return 8 * min(rates) if rates else None


def energy_joules(device: torch.device) -> float | None:
    """Return the energy in joules that the whole GPU has used since its driver was loaded.

    None if NVML has no such counter.

    Read it before and after the measured work, and subtract. Other processes on the same GPU are included.
    """
    if device.type != "cuda":
        return None
    import pynvml

    try:
        millijoules: int = pynvml.nvmlDeviceGetTotalEnergyConsumption(nvml_handle(device))
        return millijoules / 1000
    except pynvml.NVMLError:  # this GPU has no such counter, or reading it is not permitted
        return None
