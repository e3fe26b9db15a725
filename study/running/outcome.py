"""Classify how a run ended, from its own report, its stderr and its exit status."""

from __future__ import annotations

import json
import re
import resource
import signal
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple

from study.records import schema
from study.records.schema import Memory, OutcomeStatus, RecordStatus
from zero_study.files import redact_paths
from zero_study.processes import MESSAGE_LENGTH, Raised, raised_in

# The first words of the line in which train.py says why it refused a run, or why it failed.
REFUSED = "zero-study: "
FAILED = "zero-study failed: "

# The end of a message about a run's folder that does not exist any more.
REMOVED = "was removed while the run wrote there"


class RankReport(NamedTuple):
    """The report of a run, or of one of its ranks, on how it ended."""

    status: str  # as in a record
    step: int | None = None  # the last step that began; None: no step began
    text: str = ""  # the final loss, or the type and the message of the error


class Exit(NamedTuple):
    """The status and the message of a run that has ended."""

    status: OutcomeStatus
    message: str  # for people: one line
    memory: Memory | None = None  # the memory that ran out; None: none did


# From torchrun's report, or from subprocess in accelerate's launcher of one process.
_ENDED_BY = re.compile(r"Signal \d+ \((SIG\w+)\) received by PID|died with <Signals\.(SIG\w+)")
_RANK_OF_REPORT = re.compile(r"\s*rank\s*: (\d+) \(local_rank: \d+\)")
# From NCCL's watchdog, which ends its own process. The pattern was written from PyTorch's sources, because no
# collective has stalled between two GPUs here.
_WAITED = re.compile(r"Rank (\d+)\] Watchdog caught collective operation timeout.*?Timeout\(ms\)=(\d+)\d{3}\b")

# From torchrun's agents, which wait for each other before they start ranks.
_CAME = re.compile(r"Timed out after (\d+) seconds waiting for clients\. (\d+)/(\d+) clients joined")
_RANK_TWICE = re.compile(r"wait timeout after (\d+)000ms, keys: .*torchelastic/(?:role_info|assigned_ranks)")
_NO_ANSWER = re.compile(
    r"client socket has (?:timed out after \d+ms while trying|failed) to connect to (?:any network address of )?"
    r"\(([^,]+), (\d+)\)"
)

_OUT_OF_MEMORY = re.compile(r"out of memory|can't allocate memory|CUBLAS_STATUS_ALLOC_FAILED", re.IGNORECASE)
_OF_DEVICE = re.compile(r"CUDA|HIP|CUBLAS|NCCL")
# From c10/cuda/CUDACachingAllocator.cpp, if a process may use only a part of the GPU's memory (--memory-cap).
_OF_CAPPED_DEVICE = re.compile(r"[\d.]+ [KMG]iB allowed;")
# From torch.utils.cpp_extension and deepspeed/ops/op_builder/builder.py.
_BUILD_FAILED = re.compile(
    r"Error building extension|Unable to (?:JIT )?load (?:the )?\w+ op|Ninja is required to load|"
    r"MissingCUDAException|CUDAMismatchException|version mismatch! DeepSpeed ops|"
    r"\.so: (?:cannot open|undefined symbol)"
)
_NO_ROOM = re.compile(r"No space left on device|Disk quota exceeded")
_OFFLOAD_FAILED = re.compile(r"nothing was swapped|\baio_|swap_(?:in|out)|(?:No space|Disk quota).*\bzero_stage_3/")
_OFFLOAD_FILES = "/deepspeed/runtime/swap_tensor/"
_AIO = "/deepspeed/ops/csrc/aio/"
_CONFIG_ERRORS = {"DeepSpeedConfigError", "ValidationError"}
# Exceptions that the program itself raises when it knows the cause.
_NAMED_CAUSES: dict[str, OutcomeStatus] = {
    "Stalled": "stalled",
    "MachineLost": "killed",
    "OutputFailed": "killed",
    "OffloadFailed": "crashed",
}
# Exceptions that a rank raises because another rank ended. The end of the other rank is the cause.
_CONSEQUENCES = {"PeerLost", "Interrupted"}
_CHECKS = {"AssertionError", "ValueError", "NotImplementedError"}


@dataclass(frozen=True)
class Evidence:
    """Everything that is known about a run after all its processes have ended."""

    errors: Sequence[str]  # the lines of its stderr
    report: RankReport | None  # its own report; None: it reported nothing
    returncode: int  # of the launcher
    time_limit_seconds: float | None = None  # the time limit at which it was ended; None: it ended by itself
    # The kind of memory that ran out when the kernel killed a process during the run. "none": the kernel killed no
    # process. None: unknown.
    kernel_kill: Memory | Literal["none"] | None = None
    folder_problem: str | None = None  # what is wrong with the run's folder
    swap_problem: str | None = None  # what is wrong with the folder that states are swapped to
    world_size: int = 1

    @cached_property
    def _process_and_signal(self) -> tuple[str, str | None]:
        return _process_and_signal(self.errors, self.returncode)

    @property
    def signal(self) -> str | None:
        """The signal that ended a process. None if no process was ended by a signal."""
        return self._process_and_signal[1]

    @property
    def description(self) -> str:
        """The end of the run according to the operating system: a process and its signal, or the exit status."""
        process, signal_name = self._process_and_signal
        return f"{process} was ended by {signal_name}" if signal_name else f"exit status {self.returncode}"

    @cached_property
    def raised(self) -> list[Raised]:
        """The exceptions of the run. If the run reported the cause, it comes first."""
        raised = raised_in(self.errors)
        if self.report and self.report.status != "interrupted":  # the rank that failed first reported the cause
            first_line = self.report.text.partition("\n")[0].rstrip(" :")
            file = next((error.file for error in raised if error.text.rstrip(" :").endswith(first_line)), "")
            raised.insert(0, Raised(" ".join(self.report.text.split())[:MESSAGE_LENGTH], file))
        elif self.report and not raised:
            raised.append(Raised(self.report.text, ""))
        return raised

    @property
    def before_first_step(self) -> bool:
        return self.report is None or self.report.step is None


def classify_exit(
    errors: Sequence[str],
    report: RankReport | None,
    returncode: int,
    time_limit_seconds: float | None = None,
    kernel_kill: Memory | Literal["none"] | None = None,
    folder_problem: str | None = None,
    swap_problem: str | None = None,
    world_size: int = 1,
) -> Exit:
    """Return the status and the message of a run that has ended. `Evidence` explains the arguments.

    The rules in `_RULES` are tried in order, and the first one that applies decides.
    """
    evidence = Evidence(
        errors, report, returncode, time_limit_seconds, kernel_kill, folder_problem, swap_problem, world_size
    )
    return next(end for rule in _RULES if (end := rule(evidence)))


def _record_is_ok(run: Evidence) -> Exit | None:
    if run.report is None or run.report.status != "ok":
        return None
    if run.time_limit_seconds is None and not run.returncode:
        return Exit("ok", run.report.text)
    return Exit("crashed", f"{_at_time_limit(run) or run.description}, after its record was written")


def _was_at_time_limit(run: Evidence) -> Exit | None:
    message = _at_time_limit(run)
    return Exit("timed_out", message) if message else None


def _at_time_limit(run: Evidence) -> str | None:
    return None if run.time_limit_seconds is None else f"ended at its time limit of {run.time_limit_seconds:g} s"


def _machines_did_not_meet(run: Evidence) -> Exit | None:
    if run.report is not None:
        return None
    message = next((text for error in run.raised if (text := _rendezvous_problem(error.text))), None)
    return Exit("misconfigured", message) if message else None


def _reported_out_of_memory(run: Evidence) -> Exit | None:
    if run.report is None or run.report.status != "out_of_memory":
        return None
    return Exit("out_of_memory", run.raised[0].text, memory_of(run.raised[0].text))


def _folder_was_removed(run: Evidence) -> Exit | None:
    """Name the removed folder as the cause.

    This comes before errors of swapping, because the folder with swapped states is removed together with it.
    """
    if run.folder_problem and run.folder_problem.endswith(REMOVED) and run.signal != "SIGKILL":
        return Exit("killed", run.folder_problem)
    return None


def _program_named_the_cause(run: Evidence) -> Exit | None:
    if run.report is None or run.raised[0].type not in _NAMED_CAUSES:
        return None
    return Exit(_NAMED_CAUSES[run.raised[0].type], run.raised[0].text.partition(": ")[2])


def _ranks_did_not_come(run: Evidence) -> Exit | None:
    """Find the ranks that did not join a collective, from the messages of NCCL's watchdogs on the other ranks."""
    waited = {int(match[1]): match[2] for line in run.errors if (match := _WAITED.search(line))}
    if not waited:
        return None
    missing = [str(rank) for rank in range(run.world_size) if rank not in waited]
    ranks = f"rank{'s' if len(missing) > 1 else ''} {', '.join(missing)}" if missing else "some rank"
    seconds = next(iter(waited.values()))
    return Exit("stalled", f"{ranks} did not call a collective within {seconds} s (--collective-timeout)")


def _allocator_failed(run: Evidence) -> Exit | None:
    text = next((error.text for error in run.raised if is_out_of_memory(error.text)), None)
    return None if text is None else Exit("out_of_memory", text, memory_of(text))


def _sigkill(run: Evidence) -> Exit | None:
    if run.signal != "SIGKILL":
        return None
    if run.kernel_kill == "none":
        return Exit(
            "killed", f"{run.description}, although the kernel did not end a process because of too little memory"
        )
    if run.kernel_kill is None:
        return Exit("killed", f"{run.description}, perhaps by the kernel because of too little memory")
    memory = "more memory than its control group may use" if run.kernel_kill == "cap" else "too much host memory"
    return Exit(
        "out_of_memory",
        f"{run.description}, because the kernel ended a process that needed {memory}",
        run.kernel_kill,
    )


def _program_refused(run: Evidence) -> Exit | None:
    """Return the refusal of any rank. The ranks that did not refuse only report that they were interrupted."""
    refusal = next((line.removeprefix(REFUSED) for line in run.errors if line.startswith(REFUSED)), None)
    if refusal and (run.report is None or run.report.status == "interrupted"):
        return Exit("misconfigured", refusal)
    return None


def _extension_failed(run: Evidence) -> Exit | None:
    """Return the error of a DeepSpeed extension: first that of a failed build, else that of swapping to a disk."""
    for error in run.raised:
        if _BUILD_FAILED.search(error.text):
            return Exit("crashed", error.text)
    for error in run.raised:
        if error.text and (_OFFLOAD_FAILED.search(error.text) or _OFFLOAD_FILES in error.file):
            return Exit("crashed", error.text.removeprefix("Failed: "))
    if run.swap_problem and run.signal and any(_AIO in line for line in run.errors):
        return Exit("crashed", f"{run.swap_problem}; {run.description} while DeepSpeed read from the disk")
    return None


def _folder_is_unusable(run: Evidence) -> Exit | None:
    return Exit("killed", run.folder_problem) if run.report is None and run.folder_problem else None


def _disk_is_full(run: Evidence) -> Exit | None:
    text = next((error.text for error in run.raised if _NO_ROOM.search(error.text)), None)
    return None if text is None else Exit("killed", text)


def _first_error(run: Evidence) -> Exit:
    """Classify by the first exception that is a cause, or by the exit status if there is none."""
    causes = [error for error in run.raised if not run.signal or error.type not in _CONSEQUENCES]
    if not causes:
        is_silent = not run.signal and not run.returncode
        return Exit("crashed", "the exit status is 0, but there is no record" if is_silent else run.description)
    cause = causes[0]
    if cause.type == "Failed":
        return Exit("failed", cause.text.partition(": ")[2])
    in_engine = "/deepspeed/" in cause.file or "/accelerate/" in cause.file
    if run.before_first_step and (cause.type in _CONFIG_ERRORS or (in_engine and cause.type in _CHECKS)):
        return Exit("misconfigured", cause.text)
    return Exit("crashed", f"{run.description}: {cause.text}" if run.signal else cause.text)


# The order of priority: the run's own report, then a named cause, then a signal, then everything else.
_RULES: tuple[Callable[[Evidence], Exit | None], ...] = (
    _record_is_ok,
    _was_at_time_limit,
    _machines_did_not_meet,
    _reported_out_of_memory,
    _folder_was_removed,
    _program_named_the_cause,
    _ranks_did_not_come,
    _allocator_failed,
    _sigkill,
    _program_refused,
    _extension_failed,
    _folder_is_unusable,
    _disk_is_full,
    _first_error,
)


def of_record(end: Exit) -> RecordStatus:
    """Return the status that the record of a failed run has. The run must have failed."""
    if end.status in ("out_of_memory", "killed", "stalled", "timed_out"):
        return end.status
    return "interrupted" if end.message.startswith("Interrupted: ") else "failed"


def _rendezvous_problem(text: str) -> str | None:
    """Explain an error of torchrun's agents that means that the machines of a run did not find each other.

    None if the text is another error.
    """
    if match := _CAME.search(text):
        return (
            f"only {match[2]} of {match[3]} machines connected within {match[1]} s (--collective-timeout). Start the "
            "same command on each machine, with its own --machine-rank, and check that it can reach --main-process-ip."
        )
    if match := _RANK_TWICE.search(text):
        return (
            f"all machines connected, but one of their ranks did not connect within {match[1]} s "
            "(--collective-timeout). Give each machine its own --machine-rank, counted from 0."
        )
    if match := _NO_ANSWER.search(text):
        return (
            f"machine 0 did not answer at {match[1]}:{match[2]} within --collective-timeout. Start the "
            "command on machine 0, correct --main-process-ip, or open its ports."
        )
    return None


def is_out_of_memory(text: str) -> bool:
    """Return whether an error message says that memory ran out."""
    return bool(_OUT_OF_MEMORY.search(text))


def memory_of(text: str) -> Memory:
    """Return which memory ran out according to an allocator's error message.

    "device": a GPU's memory. "cap": the memory that a limit leaves to this process. "host": the machine's memory.
    """
    if _OF_DEVICE.search(text):
        return "cap" if _OF_CAPPED_DEVICE.search(text) else "device"
    limits = (resource.getrlimit(resource_limit)[0] for resource_limit in (resource.RLIMIT_AS, resource.RLIMIT_DATA))
    return "host" if all(limit == resource.RLIM_INFINITY for limit in limits) else "cap"


def read_report(run_dir: Path) -> RankReport | None:
    """Read the report of a run about its end. None if it left none.

    The report is the run's record. If rank 0 could not write a record, it is the earliest report of another rank.
    """
    path = run_dir / "record.json"
    if path.exists():
        record = schema.read(path)
        if record.failure is None:
            return RankReport("ok", text=f"final loss {record.final_loss:.4f}")
        return RankReport(record.status, record.failure.step, record.failure.error)
    reports = [json.loads(report.read_text()) for report in run_dir.glob("failure-rank*.json")]
    if not reports:
        return None
    first = min(reports, key=lambda report: report["at"])
    return RankReport(first["status"], first["step"], first["error"])


def _process_and_signal(errors: Iterable[str], returncode: int) -> tuple[str, str | None]:
    """Return the process that a signal ended, and the name of the signal.

    The name is None if no signal ended a process. SIGKILL counts before other signals, because no launcher sends it
    first.
    """
    endings: list[tuple[str, str]] = []
    process = "a process"
    for line in errors:
        if match := _RANK_OF_REPORT.match(line):
            process = f"rank {match[1]}"
        elif match := _ENDED_BY.search(line):
            endings.append((process, next(filter(None, match.groups()))))
    if returncode < 0:
        name = next((s.name for s in signal.Signals if s == -returncode), f"signal {-returncode}")
        endings.append(("the launcher", name))
    endings.reverse()  # torchrun reports the root cause last
    killed = next((ending for ending in endings if ending[1] == "SIGKILL"), None)
    return killed or (endings[0] if endings else ("a process", None))


def shown_command(arguments: Sequence[str]) -> list[str]:
    """Return the command of a launch as a user would type it in the project's folder, and as records show it."""
    words = [redact_paths(word).removeprefix("./") for word in arguments]
    return ["accelerate", "launch", *words[3:]] if arguments[2] == "accelerate.commands.launch" else words
