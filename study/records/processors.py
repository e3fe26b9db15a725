"""How much of a machine's processors a process may use: by its affinity, and by the control groups that it is in."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

GROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")
_CORE_OF = "/sys/devices/system/cpu/cpu{}/topology/core_cpus_list"


def allowed() -> list[int]:
    """The numbers of the logical processors on which this process may run, cpusets counted in."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def quota() -> float | None:
    """The processors' worth of time that control groups leave this process; None: they limit none."""
    shares = []
    for folder in control_groups("cpu"):
        for names in (["cpu.max"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"]):
            with suppress(OSError, ValueError):  # not there, or "max"
                time, period = (float(word) for name in names for word in (folder / name).read_text().split())
                shares += [time / period] if time > 0 else []
    return min(shares, default=None)


def usable_cores() -> float | None:
    """The physical cores on which this process may run, or what a quota leaves of them; None: not known."""
    cores: int | None = psutil.cpu_count(logical=False)
    numbers, limit = allowed(), quota()
    if cores is None:
        return None
    if len(numbers) < (os.cpu_count() or 1):  # two of one core are one
        cores = min(cores, len({_core_of(number) for number in numbers}))
    return cores if limit is None else min(cores, limit)


def threads_of_each(num_processes: int) -> int:
    """Threads of each process, so that all of them share the cores that this one may use."""
    return max(1, int((usable_cores() or 1) // num_processes))


def control_groups(controller: str) -> Iterator[Path]:
    """The folders of this process's control groups that have a controller, of version 1 or 2, and of those above."""
    with suppress(OSError):
        for line in OWN_GROUPS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            root = GROUPS / controller if controllers else GROUPS
            own = root / path.lstrip("/")
            yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(root))


def _core_of(number: int) -> str:
    with suppress(OSError):
        return Path(_CORE_OF.format(number)).read_text()
    return str(number)
