"""Explain the exit codes and signals that launchers print. Often they show only that a process failed."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator

from zero_study.why.cause import Cause
from zero_study.why.known import conclude
from zero_study.why.log import Line, Log

_EXIT = re.compile(r"(?:exitcode\s*:\s*|exits with return code = |exit code:? |returned non-zero exit status )(-?\d+)")
_HANGUP = re.compile(r"Received Signals\.SIGHUP|got signal: 1\b|Received 1 death signal")
_ORDINAL = re.compile(r"invalid device ordinal|exceeds available GPUs")
_VISIBLE = re.compile(r"(?:CUDA|HIP|ROCR)_VISIBLE_DEVICES[\"']?\s?[=:]\s?[\"']?(\d+(?:, ?\d+)*)(?![\w-])")
_KNOWN = (signal.SIGHUP, signal.SIGILL, signal.SIGABRT, signal.SIGBUS, signal.SIGSEGV, signal.SIGTERM)


def causes(log: Log) -> Iterator[Cause]:
    """Yield the causes for exit codes and signals. Signal 9 has separate rules."""
    lines: dict[int, Line] = {}
    for line, match in log.search(_EXIT):
        code = int(match[1])
        number = -code if -65 < code < 0 else code - 128 if 128 < code < 193 else 0
        if number:
            lines.setdefault(number, line)
    for line, _ in log.search(_HANGUP):
        lines.setdefault(signal.SIGHUP, line)
    yield from _hidden_gpus(log)
    for number, line in lines.items():
        if number in _KNOWN:
            yield conclude(f"launch/signal-{int(number)}", (line,))


def _hidden_gpus(log: Log) -> Iterator[Cause]:
    """Yield the cause that more processes were started than GPUs are visible, if the log states the visible GPUs."""
    raised = next(
        (
            Line(failure.number, failure.rank, failure.first_line)
            for failure in log.failures
            if _ORDINAL.search(failure.text)
        ),
        None,
    )
    stated = [(line, match[1]) for line, match in log.search(_VISIBLE)]
    if raised is None or len({devices for _, devices in stated}) != 1:  # a launcher may give each process its own
        return
    line, devices = stated[0]
    number = devices.count(",") + 1
    yield conclude(
        "launch/hidden-gpus", (raised, line), devices=devices.replace(" ", ""), number=str(number),
        gpus="one GPU" if number == 1 else f"{number} GPUs", last=str(number - 1),
    )  # fmt: skip
