"""Limit the memory of a process, and fix the thresholds of glibc's allocator."""

from __future__ import annotations

import ctypes
import hashlib
import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from study.run import Run
from zero_study.engines import this_machine
from zero_study.errors import Refusal
from zero_study.terminal import GIB

THRESHOLD = 128 * 1024  # bytes: glibc's initial threshold, which it raises up to 32 MiB when blocks are freed
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_LIMITS = {"memory.max": "control group, version 2", "memory.limit_in_bytes": "control group, version 1"}

# The limits that were set for this process, for its record.
described: dict[str, str] = {}


def apply(run: Run, rank: int) -> None:
    """Limit this rank's memory if requested, and fix the allocator's thresholds if a run measures or limits memory.

    In other runs the thresholds stay as they are, because fixed ones make steps of small tensors slower: each tensor
    gets a memory mapping of its own, with new pages. A GPU's memory is not capped here, but by torch's allocator when
    the accelerator is built.
    """
    if run.config.measure or run.config.memory_cap is not None:
        fix_malloc_thresholds()
    if run.config.memory_cap is not None and not this_machine.find().gpu_memory_bytes:
        cap(int(run.config.memory_cap * GIB), run.own_folder, rank)


def fix_malloc_thresholds() -> None:
    """Make glibc return freed tensors to the system, no matter which tensors were freed before.

    By default, glibc raises its threshold to the size of each freed block that had a mapping of its own. Later blocks
    below the threshold stay in the heap, so that the resident memory of a process depends more on the order of its
    frees than on its tensors. Nothing is changed if a MALLOC_ variable or LD_PRELOAD is set. Allocators other than
    glibc's do not have these thresholds.
    """
    if any(name.startswith("MALLOC_") or name == "LD_PRELOAD" for name in os.environ):
        return
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        if mallopt(_M_MMAP_THRESHOLD, THRESHOLD) and mallopt(_M_TRIM_THRESHOLD, THRESHOLD):
            described["malloc_thresholds"] = str(THRESHOLD)


def cap(num_bytes: int, run_folder: Path, rank: int) -> None:
    """Limit the host memory of this process to `num_bytes`, from now on.

    If a memory control group can be made for the process, the kernel kills the process when it exceeds the limit.
    Otherwise the limit is RLIMIT_DATA, which counts private writable memory, and an allocation beyond it fails. Memory
    that the process already uses (about 50 MB of Python) counts only under RLIMIT_DATA.

    Raises Refusal if neither limit can be set.
    """
    for own in list(this_machine.control_groups("memory"))[:1]:
        group = own / _group(run_folder, rank)
        with suppress(OSError):
            group.rmdir()  # left over from an earlier run whose launcher was killed
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
    """Count the ranks that the kernel killed because they exceeded their limits, and remove their control groups."""
    count = 0
    for group in _groups(run_folder):
        for name in ("memory.events", "memory.oom_control"):  # of control groups version 2 and version 1
            with suppress(OSError):
                count += this_machine.out_of_memory_kills((group / name).read_text())
        with suppress(OSError):
            group.rmdir()
    return count


def _groups(run_folder: Path) -> Iterator[Path]:
    """Yield the control groups that the ranks of a run have made for themselves."""
    for own in list(this_machine.control_groups("memory"))[:1]:
        yield from own.glob(_group(run_folder, "*"))


def _group(run_folder: Path, rank: int | str) -> str:
    name = hashlib.sha256(str(run_folder.resolve()).encode()).hexdigest()[:16]
    return f"zero-study-{name}-rank{rank}"
