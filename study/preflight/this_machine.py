"""What has this machine that a run needs: GPUs and memory? Asked without torch."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass

import psutil

from study.records import machine


@dataclass(frozen=True)
class Machine:
    """This machine, as far as a plan depends on it."""

    gpu_memory_bytes: tuple[int, ...]  # of each GPU that a run would see
    host_memory_bytes: int
    gpu_name: str | None = None  # as torch has it; None: no GPU, several kinds, or not known

    def __str__(self) -> str:
        host = f"{self.host_memory_bytes / 1e9:.1f} GB of host memory"
        if not self.gpu_memory_bytes:
            return f"no GPU, {host}"
        each = " and ".join(sorted({f"{size / 1e9:.1f} GB" for size in self.gpu_memory_bytes}))
        number = len(self.gpu_memory_bytes)
        return f"{number} {'GPU' if number == 1 else 'GPUs'} of {each}, {host}"


def find() -> Machine:
    """Look at this machine."""
    gpus = _gpus()
    names = {name for name, _ in gpus}
    return Machine(tuple(size for _, size in gpus), _host_memory_bytes(), names.pop() if len(names) == 1 else None)


def _gpus() -> list[tuple[str, int]]:
    """Name and memory of each GPU that CUDA_VISIBLE_DEVICES leaves, by NVML; none where that is not installed."""
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
    with suppress(pynvml.NVMLError):  # CUDA stops at the first bad one, too
        for place in (str(place).strip() for place in places):
            if place.isdigit():
                handle = pynvml.nvmlDeviceGetHandleByIndex(int(place))
            else:
                handle = pynvml.nvmlDeviceGetHandleByUUID(place)
            gpus.append((pynvml.nvmlDeviceGetName(handle), pynvml.nvmlDeviceGetMemoryInfo(handle).total))
    return gpus


def gpu_users() -> list[tuple[str, list[tuple[int, int]]]]:
    """Each GPU of this machine, with the processes that use it: id and bytes, as far as NVML may tell."""
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


def _host_memory_bytes() -> int:
    """The host's memory, or what a control group leaves of it."""
    limits = [psutil.virtual_memory().total]
    for folder in machine.control_groups("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):  # of version 2, and of 1
            with suppress(OSError, ValueError):  # not there, or "max"
                limits.append(int((folder / name).read_text()))
    return min(limits)
