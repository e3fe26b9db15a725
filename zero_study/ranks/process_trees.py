"""Watch and end the processes that ranks have started, for example compilers."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from ..engines import torch_locks


class ProcessTrees:
    """The running ranks, with all processes that they have started.

    A process remains known after the process that started it has ended.
    """

    def __init__(self) -> None:
        # Rank -> process id -> process, including the rank's own.
        self._members: dict[int, dict[int, psutil.Process]] = {}
        self._counted: dict[int, float] = {}  # rank -> the CPU seconds of its processes at the last look
        self._seconds: dict[int, float] = {}
        # Lock -> the process that holds it, and the identity of the file.
        self._locks: dict[Path, tuple[psutil.Process, tuple[int, int]]] = {}

    def look(self, running: Mapping[int, int]) -> dict[int, float]:
        """Return the CPU seconds that each running rank and the processes started by it have used so far.

        `running` maps a rank to its process id.
        """
        children: dict[int, list[psutil.Process]] = {}
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                children.setdefault(process.ppid(), []).append(process)
        for rank, process_id in running.items():
            members = {key: each for key, each in self._members.get(rank, {}).items() if each.is_running()}
            self._members[rank] = members
            if process_id not in members:
                with suppress(psutil.Error):
                    members[process_id] = psutil.Process(process_id)
            waiting = [*members]
            while waiting:
                descendants = {
                    child.pid: child for child in children.get(waiting.pop(), ()) if child.pid not in members
                }
                members |= descendants
                waiting += descendants
            counted = sum(map(_seconds, members.values()))
            # The seconds of a process that ends are lost, unless its parent counts them.
            self._seconds[rank] = self._seconds.get(rank, 0.0) + max(0.0, counted - self._counted.get(rank, 0.0))
            self._counted[rank] = counted
            self._locks |= {lock: (each, file) for each in members.values() for lock, file in _locks_of(each)}
        return {rank: self._seconds[rank] for rank in running}

    def end(self, running: Mapping[int, int]) -> None:
        """End the ranks that are still running, and all processes that any rank has started.

        All processes are suspended first, so that none of them can start another one. Locks of builds that this
        interrupts are removed. `running` maps a rank to its process id.
        """
        self.look(running)
        stopped: set[psutil.Process] = set()
        while unstopped := [each for each in self._started() if each not in stopped]:
            for process in unstopped:
                with suppress(psutil.Error):
                    process.suspend()
            stopped.update(unstopped)
            self.look(running)
        for process in stopped:
            with suppress(psutil.Error):
                process.kill()
        for process_id in running.values():
            os.waitpid(process_id, 0)
        psutil.wait_procs([each for each in stopped if each.pid not in running.values()], timeout=5)
        for lock, (holder, file) in self._locks.items():
            with suppress(OSError):
                if not _runs(holder) and _identity(lock) == file:
                    lock.unlink()

    def _started(self) -> Iterator[psutil.Process]:
        """Return all known processes that still run. Some of them were started by ranks that have ended."""
        return (child for members in self._members.values() for child in members.values() if _runs(child))


def _seconds(process: psutil.Process) -> float:
    """Return the CPU seconds of a process, including ended child processes for which it has waited."""
    with suppress(psutil.Error):
        used = process.cpu_times()
        return float(used.user + used.system + used.children_user + used.children_system)
    return 0.0


def _runs(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def _locks_of(process: psutil.Process) -> Iterable[tuple[Path, tuple[int, int]]]:
    """Return the locks of PyTorch's builds that a process holds, with the identity of each file.

    A process that builds keeps its lock file open.
    """
    with suppress(psutil.Error, OSError):
        for file in process.open_files():
            path = Path(file.path)
            if path.name == torch_locks.NAME and torch_locks.is_of_build(path):
                yield path, _identity(path)


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_ino, status.st_ctime_ns
