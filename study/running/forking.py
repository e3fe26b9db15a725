"""Start launches as forks of a process that has imported PyTorch and the engines, so that a run starts in seconds.

This is only for runs without a GPU, because CUDA does not work in the forks of a process that has initialized it.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zero_study import processes
from zero_study.errors import RunFailed

PROGRAM = Path(__file__).with_name("fork_server.py")
IMPORT_SECONDS = 300.0  # far more than the imports take, so that only a hang reaches it
START_SECONDS = 120.0  # for forking a process, with the imports of a group of runs
END_SECONDS = 10.0


class ServerLost(RunFailed):
    """Raised if the server cannot start a process, because it refuses or has ended. The message is one line."""


class ForkServer:
    """A process from which programs are forked, one at a time.

    It imports in the background, and the first `start` waits for that. Use it as a context manager, so that it ends.
    """

    def __init__(self, environment: Mapping[str, str], program: Path = PROGRAM, python: str = sys.executable) -> None:
        self.environment = dict(environment)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (`close` closes it)
        self._is_ready = False
        self.lost: str | None = None  # why it can start no more processes
        self._received = b""
        self._process = subprocess.Popen(
            processes.with_parent_death_signal([python, str(program)]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=self.environment,
            bufsize=0,
            start_new_session=True,  # otherwise Ctrl-C in the terminal would end it before its runs have ended
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(
        self,
        program: str,
        arguments: Sequence[str],
        *,
        stdout: Path,
        stderr: Path,
        environment: Mapping[str, str],
        folder: Path | None = None,
        group: str | None = None,
    ) -> ForkedProcess:
        """Fork a process that runs a program of the server, and that leads a process group of its own.

        `stdout` and `stderr` are existing files. `group` names further modules that the program needs. Raises
        ServerLost if the server cannot do it.
        """
        self.wait_until_ready()
        request = {
            "program": program,
            "arguments": list(arguments),
            "group": group,
            "stdout": str(stdout.absolute()),
            "stderr": str(stderr.absolute()),
            "env": dict(environment),
            "cwd": str(folder or Path.cwd()),
        }
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
        except BrokenPipeError:
            raise self._lose() from None
        answer = self._receive(START_SECONDS)
        if answer is None:
            raise self._lose()
        return ForkedProcess(self, answer["process"])

    def status(self, seconds: float) -> int | None:
        """Return the exit status of the process that was started last, as subprocess does.

        None if it has not ended after this time. If the server has ended, the kernel has killed the process.
        """
        answer = self._receive(seconds)
        if answer is not None:
            status: int = answer["status"]
            return status
        return -signal.SIGKILL if self._process.poll() is not None else None

    def close(self) -> None:
        """End the server, and every process that it has started and that still runs."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            if self._is_ready:
                self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            pass
        finally:
            processes.end(self._process)
            self._process.stdout.close()
            self._log.close()

    def wait_until_ready(self) -> None:
        """Wait until the server has imported everything. Raises ServerLost if it cannot fork."""
        if self.lost:
            raise ServerLost(self.lost)
        if not self._is_ready:
            answer = self._receive(IMPORT_SECONDS)
            if answer is None or "refused" in answer:
                raise self._lose(answer["refused"] if answer else None)
            self._is_ready = True

    def _receive(self, seconds: float) -> dict[str, Any] | None:
        """Return the next answer. None if there is none in this time, or if the server has ended."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + seconds
        while b"\n" not in self._received:
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            part = os.read(self._process.stdout.fileno(), 1 << 16) if ready else b""
            if not part:
                if ready:  # the end of the file
                    self._process.wait(END_SECONDS)
                return None
            self._received += part
        line, _, self._received = self._received.partition(b"\n")
        answer: dict[str, Any] = json.loads(line or b"{}")
        return answer or None

    def _lose(self, reason: str | None = None) -> ServerLost:
        """Return the error that says why no more processes can be started, and remember it."""
        if reason is None and self._process.poll() is None:
            reason = "the process to fork from does not answer"
        elif reason is None:
            raised = processes.raised_in(processes.lines_of(os.pread(self._log.fileno(), 1 << 16, 0)))
            cause = raised[-1].text if raised else f"status {self._process.returncode}"
            reason = f"the process to fork from has ended: {cause}"
        self.lost = reason
        return ServerLost(reason)


class ForkedProcess:
    """A process that a ForkServer has started. It has the methods of subprocess.Popen that a launch needs."""

    returncode: Any = None  # an int when the process has ended, as in subprocess.Popen

    def __init__(self, server: ForkServer, pid: int) -> None:
        self._server = server
        self.pid = pid

    def poll(self) -> int | None:
        """Return the exit status, or None while the process runs."""
        if self.returncode is None:
            self.returncode = self._server.status(0.0)
        status: int | None = self.returncode
        return status

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end, and return the exit status. Raises subprocess.TimeoutExpired after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            left = 60.0 if deadline is None else max(0.0, deadline - time.monotonic())
            self.returncode = self._server.status(left)
            if self.returncode is None and deadline is not None and time.monotonic() >= deadline:
                assert timeout is not None
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        status: int = self.returncode
        return status
