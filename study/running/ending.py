"""How did a run end? Typed from what it said of itself, from its stderr and from its exit status."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from study.files import shown_text
from study.records import schema
from study.records.schema import OutcomeStatus

# How train.py begins the one line that says why it refused, or why it failed.
REFUSED = "zero-study: "
FAILED = "zero-study failed: "
MESSAGE_LENGTH = 300


class OwnReport(NamedTuple):
    """What a run reported of its own end."""

    status: str  # as in a record
    step: int | None = None  # the last one begun; None: before the first
    text: str = ""  # final loss, or type and message of the error


class Raised(NamedTuple):
    """One exception of a traceback."""

    text: str  # type and message
    file: str  # in which it was raised; empty: not known

    @property
    def type(self) -> str:
        return self.text.partition(":")[0].rpartition(".")[2]


_EXCEPTION = re.compile(r"(?:\w+\.)*\w*(?:Error|Exception|Interrupt|Refusal)(?::|$)")
_RANK = re.compile(r"^(?:\[\w+\]:)+ ?")  # torch's [rank0]: and torchrun's [default0]: before a line
_FRAME = re.compile(r'\s+File "([^"]+)", line \d+')
# The launchers' own, which say only that a process ended.
_OF_LAUNCHERS = {"ChildFailedError", "CalledProcessError", "SignalException"}
# torchrun's report, and subprocess's in accelerate's launcher of one process.
_ENDED_BY = re.compile(r"Signal \d+ \((SIG\w+)\) received by PID|died with <Signals\.(SIG\w+)")

_OUT_OF_MEMORY = re.compile(r"out of memory|can't allocate memory|CUBLAS_STATUS_ALLOC_FAILED", re.IGNORECASE)
# torch.utils.cpp_extension's, and those of deepspeed/ops/op_builder/builder.py.
_BUILD_FAILED = re.compile(
    r"Error building extension|Unable to (?:JIT )?load (?:the )?\w+ op|Ninja is required to load|"
    r"MissingCUDAException|CUDAMismatchException|version mismatch! DeepSpeed ops|"
    r"\.so: (?:cannot open|undefined symbol)"
)
_OFFLOAD_FAILED = re.compile(r"No space left on device|Disk quota exceeded|nothing was swapped|\baio_|swap_(?:in|out)")
_OFFLOAD_FILES = "/deepspeed/runtime/swap_tensor/"
_CONFIG_ERRORS = {"DeepSpeedConfigError", "ValidationError"}
# Of a SIGKILL, by whether the kernel ended some process for want of host memory meanwhile.
_BLAME = {
    True: "and the kernel ended a process for want of host memory",
    False: "though the kernel ended none for want of host memory",
    None: "perhaps by the kernel for want of host memory",
}
_CHECKS = {"AssertionError", "ValueError", "NotImplementedError"}


def classify(
    errors: Sequence[str],
    report: OwnReport | None,
    returncode: int,
    time_limit_seconds: float | None = None,
    host_memory_was_short: bool | None = None,
) -> tuple[OutcomeStatus, str]:
    """Type how a run ended: a word, and one line for people. `errors` are the lines of its stderr.

    `time_limit_seconds`: after which it was ended; None: it ended by itself. `host_memory_was_short`: whether the
    kernel ended some process for want of memory meanwhile; None: it does not say.
    """
    died = _signal(errors, returncode)
    ended = f"a process was ended by {died}" if died else f"exit status {returncode}"
    if report and report.status == "ok":
        if time_limit_seconds is not None:
            ended = f"ended at its time limit of {time_limit_seconds:g} s"
        if time_limit_seconds is not None or returncode:
            return "crashed_after_result", f"{ended}, after its record was written"
        return "ok", report.text
    if time_limit_seconds is not None:
        return "timed_out", f"ended at its time limit of {time_limit_seconds:g} s"

    raised = raised_in(errors)
    if report and report.status != "interrupted":  # the rank that failed first has said why
        first = report.text.partition("\n")[0].rstrip(" :")
        file = next((error.file for error in raised if error.text.rstrip(" :").endswith(first)), "")
        raised.insert(0, Raised(" ".join(report.text.split())[:MESSAGE_LENGTH], file))
    elif report and not raised:
        raised.append(Raised(report.text, ""))
    if report and report.status == "out_of_memory":
        return "out_of_memory", raised[0].text
    for error in raised:
        if is_out_of_memory(error.text):
            return "out_of_memory", error.text
    if died == "SIGKILL":
        return "killed", f"{ended}, {_BLAME[host_memory_was_short]}"
    refused = _after(REFUSED, errors)
    if refused and (report is None or report.status == "interrupted"):  # which a rank is where only another one refuses
        return "misconfigured", refused
    for error in raised:
        if _BUILD_FAILED.search(error.text):
            return "build_failed", error.text
    for error in raised:
        if _OFFLOAD_FAILED.search(error.text) or _OFFLOAD_FILES in error.file:
            return "offload_failed", error.text.removeprefix("Failed: ")
    if not raised:
        return "crashed", ended if died or returncode else "exit status 0 and no record"
    cause = raised[0]
    if cause.type == "Failed":
        return "failed", cause.text.partition(": ")[2]
    in_engine = "/deepspeed/" in cause.file or "/accelerate/" in cause.file
    if (report is None or report.step is None) and (
        cause.type in _CONFIG_ERRORS or (in_engine and cause.type in _CHECKS)
    ):
        return "misconfigured", cause.text
    return "crashed", f"{ended}: {cause.text}" if died else cause.text


def is_out_of_memory(text: str) -> bool:
    """Say whether an error is that of an allocator, or of what allocates for itself."""
    return bool(_OUT_OF_MEMORY.search(text))


def read_report(run_dir: Path) -> OwnReport | None:
    """Read what a run said of its end: its record or, where rank 0 could write none, the report of another rank."""
    path = run_dir / "record.json"
    if path.exists():
        written = schema.read(path)
        if written.status == "ok":
            return OwnReport("ok", text=f"final loss {written.final_loss:.4f}")
        return OwnReport(written.status, written.failure.step, written.failure.error)
    reports = [json.loads(report.read_text()) for report in run_dir.glob("failure-rank*.json")]
    if not reports:
        return None
    first = min(reports, key=lambda report: report["at"])
    return OwnReport(first["status"], first["step"], first["error"])


def read_lines(path: Path) -> list[str]:
    """The lines of a log that are not empty, as a terminal shows them: of a progress bar, what was drawn last."""
    lines = []
    for line in path.read_bytes().decode(errors="replace").split("\n"):
        drawn = [part for part in line.split("\r") if part.strip()]
        lines += [drawn[-1].rstrip()] if drawn else []
    return lines


def raised_in(errors: Iterable[str]) -> list[Raised]:
    """The exceptions whose tracebacks are in a log, in its order, without the launchers' own."""
    raised, file = [], ""
    for line in errors:
        line = _RANK.sub("", line)
        if frame := _FRAME.match(line):
            file = frame[1]
        elif _EXCEPTION.match(line):
            one = Raised(line[:MESSAGE_LENGTH], file)
            raised += [one] if one.type not in _OF_LAUNCHERS else []
            file = ""
    return raised


def _signal(errors: Iterable[str], returncode: int) -> str | None:
    """The signal that ended the launcher or a rank; SIGKILL where there are several: no launcher sends that first."""
    signals = [next(filter(None, match.groups())) for line in errors if (match := _ENDED_BY.search(line))]
    if returncode < 0:
        signals.append(next((s.name for s in signal.Signals if s == -returncode), f"signal {-returncode}"))
    return "SIGKILL" if "SIGKILL" in signals else next(iter(signals), None)


def _after(start: str, lines: Iterable[str]) -> str | None:
    return next((line.removeprefix(start) for line in lines if line.startswith(start)), None)


def shown_command(arguments: Sequence[str]) -> list[str]:
    """The command of a launch as one would type it in the project's folder, and as records have it."""
    words = [shown_text(word).removeprefix("./") for word in arguments]
    return ["accelerate", "launch", *words[3:]] if arguments[2] == "accelerate.commands.launch" else words
