"""A stand-in for NVIDIA's module of this name, which answers from the table of the simulated GPUs."""

from __future__ import annotations

import os
import sys
import time
from types import SimpleNamespace
from typing import Any

import simulated_gpus


class NVMLError(Exception):
    """An error of the driver."""


class NVMLError_LibraryNotFound(NVMLError):
    """There is no driver."""


def nvmlInit() -> None:
    """Start NVML."""
    if not os.environ.get(simulated_gpus.VARIABLE):
        raise NVMLError_LibraryNotFound("NVML Shared Library Not Found")


def nvmlShutdown() -> None:
    """End NVML."""


def nvmlDeviceGetCount() -> int:
    return len(simulated_gpus.table())


def nvmlDeviceGetHandleByIndex(index: int) -> Any:
    if index >= nvmlDeviceGetCount():
        raise NVMLError("Invalid Argument")
    return simulated_gpus.table()[index]


def nvmlDeviceGetHandleByUUID(uuid: str | bytes) -> Any:
    text = uuid.decode() if isinstance(uuid, bytes) else uuid
    for gpu in simulated_gpus.table():
        if text == f"GPU-{gpu.uuid}":
            return gpu
    raise NVMLError("Not Found")


def nvmlDeviceGetName(handle: Any) -> str:
    return str(handle.name)


def nvmlDeviceGetUUID(handle: Any) -> str:
    return f"GPU-{handle.uuid}"


def nvmlDeviceGetMemoryInfo(handle: Any) -> Any:
    used = _used(handle)
    return SimpleNamespace(total=handle.total_memory, used=used, free=handle.total_memory - used)


def nvmlDeviceGetComputeRunningProcesses(handle: Any) -> list[Any]:
    """Return this process, if it uses the GPU: the stand-in knows no other."""
    used = _used(handle)
    return [SimpleNamespace(pid=os.getpid(), usedGpuMemory=used)] if used else []


def nvmlDeviceGetTotalEnergyConsumption(handle: Any) -> int:
    """Return millijoules: a GPU that always draws the same power."""
    return int(1000 * simulated_gpus.WATTS * time.monotonic())


def _used(handle: Any) -> int:
    memory = sys.modules.get("simulated_memory")
    if memory is None:
        return 0
    places = [index for index, gpu in enumerate(simulated_gpus.visible()) if gpu.uuid == handle.uuid]
    return sum(memory.used_bytes(place) for place in places)
