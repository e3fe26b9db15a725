"""Limit the memory of a process, and fix the thresholds of glibc's allocator."""

from __future__ import annotations

import ctypes
import hashlib
import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from study.engines import this_machine
from study.errors import Refusal
from study.formatting import GIB
from study.run import Run

THRESHOLD = 128 * 1024  # bytes: glibc's own at the start, which it raises up to 32 MiB as blocks are freed
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_LIMITS = {"memory.max": "control group, version 2", "memory.limit_in_bytes": "control group, version 1"}

# What was done to this process, for its record.
described: dict[str, str] = {}


def apply(run: Run, rank: int) -> None:
    """Where a run measures or caps what is held, fix what this rank's allocator keeps, and cap what it may hold.

    Else a step of small tensors would be slower for nothing: each has a mapping of its own, whose pages are new.
    A GPU's memory is capped as the accelerator is built: by torch's allocator.
    """
    if run.config.measure or run.config.memory_cap is not None:
        fix_malloc_thresholds()
    if run.config.memory_cap is not None and not this_machine.find().gpu_memory_bytes:
        cap(int(run.config.memory_cap * GIB), run.own_folder, rank)


def fix_malloc_thresholds() -> None:
    """Let glibc give freed tensors back to the system, whatever was freed before.

    It raises its threshold to the size of a freed block that had a mapping of its own, and later blocks below it stay
    in the heap: what a process holds then says more of the order of its frees than of its tensors. A variable of the
    user's wins, and another allocator has no such thing.
    """
    if any(name.startswith("MALLOC_") or name == "LD_PRELOAD" for name in os.environ):
        return
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        if mallopt(_M_MMAP_THRESHOLD, THRESHOLD) and mallopt(_M_TRIM_THRESHOLD, THRESHOLD):
            described["malloc_thresholds"] = str(THRESHOLD)


def cap(num_bytes: int, run_folder: Path, rank: int) -> None:
    """Let this process have so many bytes of host memory at most, from now on.

    In a memory control group of its own, where one can be made: beyond it the kernel kills the process. Else by
    RLIMIT_DATA, which counts private writable memory: an allocation fails. What the process holds already, some 50 MB
    of Python, counts in the second case alone.
    """
    for own in list(this_machine.control_groups("memory"))[:1]:
        group = own / _group(run_folder, rank)
        with suppress(OSError):
            group.rmdir()  # an earlier run's, whose launcher was killed
        with suppress(OSError):
            group.mkdir()
            for name, kind in _LIMITS.items():
                if (group / name).exists():
                    (group / name).write_text(str(num_bytes))
                    (group / "cgroup.procs").write_text(str(os.getpid()))
                    described["memory_cap"] = kind
                    return
        with suppress(OSError):
            group.rmdir()
    try:
        resource.setrlimit(resource.RLIMIT_DATA, (num_bytes, num_bytes))
    except (OSError, ValueError) as error:
        raise Refusal(
            f"--memory-cap {num_bytes / GIB:g}: the limit cannot be set, neither by a control group nor by "
            f"RLIMIT_DATA ({error}). Leave --memory-cap out."
        ) from None
    described["memory_cap"] = "RLIMIT_DATA"


def kills(run_folder: Path) -> int:
    """How many ranks of a run the kernel has ended because they were over their caps; their groups are removed."""
    count = 0
    for group in _groups(run_folder):
        for name in ("memory.events", "memory.oom_control"):  # of version 2, and of 1
            with suppress(OSError):
                count += this_machine.out_of_memory_kills((group / name).read_text())
        with suppress(OSError):
            group.rmdir()
    return count


def _groups(run_folder: Path) -> Iterator[Path]:
    """The control groups that the ranks of a run have made for themselves."""
    for own in list(this_machine.control_groups("memory"))[:1]:
        yield from own.glob(_group(run_folder, "*"))


def _group(run_folder: Path, rank: int | str) -> str:
    name = hashlib.sha256(str(run_folder.resolve()).encode()).hexdigest()[:16]
    return f"zero-study-{name}-rank{rank}"
