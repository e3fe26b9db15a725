"""Watch and end the processes that ranks have started, compilers for example."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from study.engines import torch_locks


class ProcessTrees:
    """Ranks, with all processes that they have started; a process stays known when the one that started it ends."""

    def __init__(self) -> None:
        self._members: dict[int, dict[int, psutil.Process]] = {}  # rank -> process id -> process, the rank's own too
        self._counted: dict[int, float] = {}  # rank -> the seconds of its members, when they were looked at last
        self._seconds: dict[int, float] = {}
        self._locks: dict[Path, tuple[psutil.Process, tuple[int, int]]] = {}  # -> who holds it, and which file it is

    def look(self, running: Mapping[int, int]) -> dict[int, float]:
        """Return, for each rank that runs, the seconds for which it and what it has started have computed so far.

        `running`: rank -> process id.
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
            # What ends takes its seconds along, unless its parent counts them.
            self._seconds[rank] = self._seconds.get(rank, 0.0) + max(0.0, counted - self._counted.get(rank, 0.0))
            self._counted[rank] = counted
            self._locks |= {lock: (each, file) for each in members.values() for lock, file in _locks_of(each)}
        return {rank: self._seconds[rank] for rank in running}

    def end(self, running: Mapping[int, int]) -> None:
        """End the ranks that still run, and all that any rank has started; remove the locks of builds that this ends.

        Everything is stopped first, so that nothing starts another process in the meantime.
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
        """Return the processes that still run; for ranks that have ended, only the processes that they started."""
        return (child for members in self._members.values() for child in members.values() if _runs(child))


def _seconds(process: psutil.Process) -> float:
    """Return the CPU seconds of a process, including the processes that it has waited for."""
    with suppress(psutil.Error):
        used = process.cpu_times()
        return float(used.user + used.system + used.children_user + used.children_system)
    return 0.0


def _runs(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def _locks_of(process: psutil.Process) -> Iterable[tuple[Path, tuple[int, int]]]:
    """Return the locks of torch's builds that a process holds: a building process keeps the file open."""
    with suppress(psutil.Error, OSError):
        for file in process.open_files():
            path = Path(file.path)
            if path.name == torch_locks.NAME and torch_locks.is_of_build(path):
                yield path, _identity(path)


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_ino, status.st_ctime_ns
