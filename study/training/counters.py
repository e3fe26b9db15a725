"""Counters of the kernel and of NVML: processor time of others, bytes of a machine's interfaces, a GPU's energy."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Container
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from study.engines import this_machine
from study.records import machine
from study.records.schema import Load, Network
from study.training.memory import nvml_handle

STAT = Path("/proc/stat")


class CounterReading(NamedTuple):
    """What these processors had done until a moment, in seconds."""

    at: float
    busy: float  # of all processes; waiting for a disk is not
    stolen: float  # in which a hypervisor ran something else


def moment() -> CounterReading:
    """Read the kernel's counters of the processors on which this process may run."""
    lines = (line.split() for line in STAT.read_text().splitlines())
    times = {
        name: [int(ticks) for ticks in other_times]
        for name, *other_times in lines
        if name[:3] == "cpu" and name != "cpu"
    }
    allowed = {f"cpu{number}" for number in this_machine.allowed_processors()}
    counted = allowed if allowed <= times.keys() else times.keys()  # a container may number its own anew
    user, nice, system, _, _, irq, softirq, stolen, *_ = map(sum, zip(*(times[name] for name in counted), strict=True))
    ticks = os.sysconf("SC_CLK_TCK")
    return CounterReading(time.perf_counter(), (user + nice + system + irq + softirq) / ticks, stolen / ticks)


def own_seconds() -> float:
    """Processor seconds of this process and its threads, and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def between(first: CounterReading, last: CounterReading, own: float) -> Load:
    """The load between two moments, in which the run's processes on this box took `own` seconds.

    Of processors of which a control group leaves the run a part, others may have the rest.
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


Counters = dict[str, tuple[int, int]]  # of an interface -> bytes sent and received


class Traffic:
    """Counts from the start of the first steady step to the start of the last: whole steps, with what is between them.

    An edge of a step would not do: a rank may have received all that it needs while its own bytes are still queued.
    """

    def __init__(self, first_step: int) -> None:
        self._from = first_step  # of this process
        self._first: tuple[int, Counters] | None = None
        self._last: tuple[int, Counters] | None = None

    def begin_step(self, number: int, nth: int) -> None:
        """Note that a step begins, the nth of this process."""
        if nth >= self._from:
            self._last = (number, _counters())
            self._first = self._first or self._last

    def network(self) -> Network | None:
        """What was carried; None: there was no whole step."""
        if self._first is None or self._last is None or self._first[0] == self._last[0]:
            return None
        (first_step, before), (last_step, after) = self._first, self._last
        there = [name for name in before if name in after]  # of containers they come and go
        carried = {name: [now - then for now, then in zip(after[name], before[name], strict=True)] for name in there}
        used = {name: counters for name, counters in carried.items() if any(counters)}
        return Network(
            interfaces=sorted(used),
            rate_bits_per_second=_rate(used),
            num_steps=last_step - first_step,
            sent_bytes=sum(sent for sent, _ in used.values()),
            received_bytes=sum(received for _, received in used.values()),
        )


def _counters() -> Counters:
    """Bytes sent and received by each interface since the machine has it; the loopback is left out."""
    each = psutil.net_io_counters(pernic=True, nowrap=False)
    return {name: (count.bytes_sent, count.bytes_recv) for name, count in each.items() if name != "lo"}


def _rate(interfaces: Container[str]) -> int | None:
    """The least to which a bucket of tokens holds one of them, bits per second; None: to none, or it is not known."""
    try:
        shown = json.loads(machine.said("tc", "-j", "qdisc", "show") or "[]")
    except ValueError:
        return None
    rates = [each["options"]["rate"] for each in shown if each.get("kind") == "tbf" and each.get("dev") in interfaces]
    return 8 * min(rates) if rates else None


def energy_joules(device: torch.device) -> float | None:
    """Joules that the whole GPU has used since its driver was loaded (NVML); None where there is no such counter.

    To be read before and after what is measured. Other processes on the same GPU count too.
    """
    if device.type != "cuda":
        return None
    import pynvml

    try:
        millijoules: int = pynvml.nvmlDeviceGetTotalEnergyConsumption(nvml_handle(device))
        return millijoules / 1000
    except pynvml.NVMLError:  # not on this GPU, or not permitted: unknown
        return None
