"""Find the GPUs, memory and processors that a run may use on this machine, without importing torch.

The limits set by the CPU affinity of the process and by its control groups are taken into account.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

GROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")
_CORE_OF = "/sys/devices/system/cpu/cpu{}/topology/core_cpus_list"


@dataclass(frozen=True)
class Machine:
    """The GPUs, memory and processors of this machine, as far as a plan depends on them."""

    gpu_memory_bytes: tuple[int, ...]  # one per GPU that a run would see
    host_memory_bytes: int
    gpu_name: str | None = None  # as torch names it; None if there is no GPU, several kinds, or it is not known

    def __str__(self) -> str:
        host = f"{self.host_memory_bytes / 1e9:.1f} GB of host memory"
        if not self.gpu_memory_bytes:
            return f"no GPU, {host}"
        sizes = " and ".join(sorted({f"{size / 1e9:.1f} GB" for size in self.gpu_memory_bytes}))
        number = len(self.gpu_memory_bytes)
        return f"{number} {'GPU' if number == 1 else 'GPUs'} of {sizes}, {host}"


def find() -> Machine:
    """Return the GPUs, memory and processors that a run may use on this machine."""
    gpus = _gpus()
    names = {name for name, _ in gpus}
    limits: list[int] = [psutil.virtual_memory().total]
    for folder in control_groups("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):  # of version 2, and of 1
            with suppress(OSError, ValueError):  # not there, or "max"
                limits.append(int((folder / name).read_text()))
    host_memory_bytes = min(limits)
    return Machine(tuple(size for _, size in gpus), host_memory_bytes, names.pop() if len(names) == 1 else None)


def _gpus() -> list[tuple[str, int]]:
    """Return the name and the memory in bytes of each GPU that CUDA_VISIBLE_DEVICES allows.

    Empty without NVML or a driver.
    """
    try:
        import pynvml
    except ModuleNotFoundError:
        return []
    try:
        pynvml.nvmlInit()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        places = range(pynvml.nvmlDeviceGetCount()) if visible is None else visible.split(",")
    except pynvml.NVMLError:  # no driver
        return []
    gpus = []
    with suppress(pynvml.NVMLError):  # CUDA also stops at the first invalid one
        for place in (str(place).strip() for place in places):
            if place.isdigit():
                handle = pynvml.nvmlDeviceGetHandleByIndex(int(place))
            else:
                handle = pynvml.nvmlDeviceGetHandleByUUID(place)
            gpus.append((pynvml.nvmlDeviceGetName(handle), pynvml.nvmlDeviceGetMemoryInfo(handle).total))
    return gpus


def gpu_users() -> list[tuple[str, list[tuple[int, int]]]]:
    """Return the ids and the memory of the processes on each GPU of this machine, as NVML reports them."""
    try:
        import pynvml

        pynvml.nvmlInit()
        users = []
        for place in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(place)
            processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
            name = f"GPU {place}, {pynvml.nvmlDeviceGetName(handle)}"
            users.append((name, [(process.pid, process.usedGpuMemory or 0) for process in processes]))
    except ModuleNotFoundError:
        return []
    except pynvml.NVMLError:  # no driver, or not permitted
        return []
    return users


def allowed_processors() -> list[int]:
    """Return the ids of the logical processors on which this process may run, taking cpusets into account."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def quota() -> float | None:
    """Return the limit of control groups on CPU time, as a number of processors. None if there is no limit."""
    shares = []
    for folder in control_groups("cpu"):
        for names in (["cpu.max"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"]):
            with suppress(OSError, ValueError):  # not there, or "max"
                time, period = (float(word) for name in names for word in (folder / name).read_text().split())
                shares += [time / period] if time > 0 else []
    return min(shares, default=None)


def usable_cores() -> float | None:
    """Return how many physical cores this process may use, or its CPU quota if that is lower. None if unknown."""
    cores: int | None = psutil.cpu_count(logical=False)
    numbers, limit = allowed_processors(), quota()
    if cores is None:
        return None
    if len(numbers) < (os.cpu_count() or 1):  # two processors of one core count once
        cores = min(cores, len({_core_of(number) for number in numbers}))
    return cores if limit is None else min(cores, limit)


def threads_of_each(num_processes: int) -> int:
    """Return how many threads each process should have so that all processes together use the usable cores."""
    return max(1, int((usable_cores() or 1) // num_processes))


def control_groups(controller: str) -> Iterator[Path]:
    """Yield the folders of the control groups that limit this process by a controller, such as memory or cpu.

    These are the process's own group and all groups above it, in version 1 or 2.
    """
    with suppress(OSError):
        for line in OWN_GROUPS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            root = GROUPS / controller if controllers else GROUPS
            own = root / path.lstrip("/")
            yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(root))


def out_of_memory_kills(counters: str) -> int:
    """Return how many processes the kernel killed for lack of memory, from the text of a counter file."""
    return sum(int(line.split()[1]) for line in counters.splitlines() if line.startswith("oom_kill "))


def _core_of(number: int) -> str:
    with suppress(OSError):
        return Path(_CORE_OF.format(number)).read_text()
    return str(number)
