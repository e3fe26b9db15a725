"""How did a run end? Typed from what it said of itself, from its stderr and from its exit status."""

from __future__ import annotations

import json
import re
import resource
import signal
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from study.files import redact_paths
from study.processes import MESSAGE_LENGTH, Raised, raised_in
from study.records import schema
from study.records.schema import Memory, OutcomeStatus, RecordStatus

# How train.py begins the one line that says why it refused, or why it failed.
REFUSED = "zero-study: "
FAILED = "zero-study failed: "

# How a sentence on a run's folder ends that is not there any more.
REMOVED = "was removed while the run wrote there"


class OwnReport(NamedTuple):
    """What a run reported of its own end."""

    status: str  # as in a record
    step: int | None = None  # the last one begun; None: before the first
    text: str = ""  # final loss, or type and message of the error


class End(NamedTuple):
    """How a run ended."""

    status: OutcomeStatus
    message: str  # for people: one line
    memory: Memory | None = None  # that was out


# torchrun's report, and subprocess's in accelerate's launcher of one process.
_ENDED_BY = re.compile(r"Signal \d+ \((SIG\w+)\) received by PID|died with <Signals\.(SIG\w+)")
_RANK_OF_REPORT = re.compile(r"\s*rank\s*: (\d+) \(local_rank: \d+\)")
# NCCL's watchdog, which ends its own process; by torch's sources, for no two GPUs have stalled here.
_WAITED = re.compile(r"Rank (\d+)\] Watchdog caught collective operation timeout.*?Timeout\(ms\)=(\d+)\d{3}\b")

# torchrun's agents, which wait for one another before there is a rank.
_CAME = re.compile(r"Timed out after (\d+) seconds waiting for clients\. (\d+)/(\d+) clients joined")
_RANK_TWICE = re.compile(r"wait timeout after (\d+)000ms, keys: .*torchelastic/(?:role_info|assigned_ranks)")
_NO_ANSWER = re.compile(
    r"client socket has (?:timed out after \d+ms while trying|failed) to connect to (?:any network address of )?"
    r"\(([^,]+), (\d+)\)"
)

_OUT_OF_MEMORY = re.compile(r"out of memory|can't allocate memory|CUBLAS_STATUS_ALLOC_FAILED", re.IGNORECASE)
_OF_DEVICE = re.compile(r"CUDA|HIP|CUBLAS|NCCL")
# torch.utils.cpp_extension's, and those of deepspeed/ops/op_builder/builder.py.
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
# What the program itself has found behind an error.
_FOUND: dict[str, OutcomeStatus] = {
    "Stalled": "stalled",
    "MachineLost": "killed",
    "OutputFailed": "killed",
    "OffloadFailed": "crashed",
}
# A rank's words for the end of another one, which is the cause.
_CONSEQUENCES = {"PeerLost", "Interrupted"}
_CHECKS = {"AssertionError", "ValueError", "NotImplementedError"}


def classify(
    errors: Sequence[str],
    report: OwnReport | None,
    returncode: int,
    time_limit_seconds: float | None = None,
    kernel_ended: Memory | Literal["none"] | None = None,
    folder_says: str | None = None,
    swap_says: str | None = None,
    world_size: int = 1,
) -> End:
    """Type how a run ended. `errors` are the lines of its stderr.

    `time_limit_seconds`: after which it was ended; None: it ended by itself. `kernel_ended`: for want of which memory
    the kernel ended some process meanwhile; None: it does not say. `folder_says`: what has become of the run's folder,
    where that is nothing good; `swap_says`: what the one that is swapped to may lack.
    """
    who, died = _signal(errors, returncode)
    ended = f"{who} was ended by {died}" if died else f"exit status {returncode}"
    at_limit = None if time_limit_seconds is None else f"ended at its time limit of {time_limit_seconds:g} s"
    if report and report.status == "ok":
        if at_limit or returncode:
            return End("crashed", f"{at_limit or ended}, after its record was written")
        return End("ok", report.text)
    if at_limit:
        return End("timed_out", at_limit)

    raised = _causes(errors, report)
    if report is None and (alone := _alone(raised)):
        return End("misconfigured", alone)
    if report and report.status == "out_of_memory":
        return End("out_of_memory", raised[0].text, memory_of(raised[0].text))
    if folder_says and folder_says.endswith(REMOVED) and died != "SIGKILL":  # and with it the one that was swapped to
        return End("killed", folder_says)
    if report and raised[0].type in _FOUND:
        return End(_FOUND[raised[0].type], raised[0].text.partition(": ")[2])
    if missing := _missing(errors, world_size):
        return End("stalled", missing)
    for error in raised:
        if is_out_of_memory(error.text):
            return End("out_of_memory", error.text, memory_of(error.text))
    if died == "SIGKILL":
        return _by_sigkill(ended, kernel_ended)
    refused = next((line.removeprefix(REFUSED) for line in errors if line.startswith(REFUSED)), None)
    if refused and (report is None or report.status == "interrupted"):  # which a rank is where only another one refuses
        return End("misconfigured", refused)
    if of_extension := _of_extensions(raised):
        return End("crashed", of_extension)
    if swap_says and died and any(_AIO in line for line in errors):
        return End("crashed", f"{swap_says}; {ended} in DeepSpeed's reading")
    if report is None and folder_says:
        return End("killed", folder_says)
    for error in raised:
        if _NO_ROOM.search(error.text):
            return End("killed", error.text)
    raised = [error for error in raised if not died or error.type not in _CONSEQUENCES]
    if not raised:
        return End("crashed", ended if died or returncode else "exit status 0 and no record")
    return _by_cause(raised[0], report is None or report.step is None, f"{ended}: " if died else "")


def _by_sigkill(ended: str, kernel_ended: Memory | Literal["none"] | None) -> End:
    if kernel_ended == "none":
        return End("killed", f"{ended}, though the kernel ended none for want of memory")
    if kernel_ended is None:
        return End("killed", f"{ended}, perhaps by the kernel for want of memory")
    whose = "the memory that its control group may have" if kernel_ended == "cap" else "host memory"
    return End("out_of_memory", f"{ended}, and the kernel ended a process for want of {whose}", kernel_ended)


def _causes(errors: Iterable[str], report: OwnReport | None) -> list[Raised]:
    """What was raised, the cause first where the run says which."""
    raised = raised_in(errors)
    if report and report.status != "interrupted":  # the rank that failed first has said why
        first = report.text.partition("\n")[0].rstrip(" :")
        file = next((error.file for error in raised if error.text.rstrip(" :").endswith(first)), "")
        raised.insert(0, Raised(" ".join(report.text.split())[:MESSAGE_LENGTH], file))
    elif report and not raised:
        raised.append(Raised(report.text, ""))
    return raised


def _of_extensions(raised: Sequence[Raised]) -> str | None:
    """What DeepSpeed's extensions met: as they were built, or else as they swapped to a disk."""
    for error in raised:
        if _BUILD_FAILED.search(error.text):
            return error.text
    for error in raised:
        if _OFFLOAD_FAILED.search(error.text) or _OFFLOAD_FILES in error.file:
            return error.text.removeprefix("Failed: ")
    return None


def _by_cause(cause: Raised, before_the_first_step: bool, ended: str) -> End:
    """Type a run by the one thing that was raised. `ended`: what to say before it; empty: nothing."""
    if cause.type == "Failed":
        return End("failed", cause.text.partition(": ")[2])
    in_engine = "/deepspeed/" in cause.file or "/accelerate/" in cause.file
    if before_the_first_step and (cause.type in _CONFIG_ERRORS or (in_engine and cause.type in _CHECKS)):
        return End("misconfigured", cause.text)
    return End("crashed", f"{ended}{cause.text}")


def of_record(end: End) -> RecordStatus:
    """The status of the record of a run that ended like this and is not ok."""
    if end.status in ("out_of_memory", "killed", "stalled", "timed_out"):
        return end.status
    return "interrupted" if end.message.startswith("Interrupted: ") else "failed"


def _alone(raised: Iterable[Raised]) -> str | None:
    """Say that the machines of a run have not found each other."""
    for error in raised:
        if match := _CAME.search(error.text):
            return (
                f"{match[2]} of {match[3]} machines came within {match[1]} s (--collective-timeout); start the same "
                "command on each with its own --machine-rank, and see that it reaches --main-process-ip"
            )
        if match := _RANK_TWICE.search(error.text):
            return (
                f"as many machines came as were asked, and in {match[1]} s (--collective-timeout) one of their ranks "
                "did not; give each its own --machine-rank, from 0"
            )
        if match := _NO_ANSWER.search(error.text):
            return (
                f"machine 0 did not answer at {match[1]}:{match[2]} within --collective-timeout; start the command "
                "there, change --main-process-ip, or open its ports"
            )
    return None


def _missing(errors: Iterable[str], world_size: int) -> str | None:
    """Say which ranks did not come to a collective, by what NCCL's watchdogs of the others wrote."""
    waited = {int(match[1]): match[2] for line in errors if (match := _WAITED.search(line))}
    if not waited:
        return None
    missing = [str(rank) for rank in range(world_size) if rank not in waited]
    who = f"rank{'s' if len(missing) > 1 else ''} {', '.join(missing)}" if missing else "some rank"
    return f"{who} did not come to a collective within {next(iter(waited.values()))} s (--collective-timeout)"


def is_out_of_memory(text: str) -> bool:
    """Say whether an error is that of an allocator, or of what allocates for itself."""
    return bool(_OUT_OF_MEMORY.search(text))


def memory_of(text: str) -> Memory:
    """Say of which memory an allocator's error is: a GPU's, the host's, or what a limit leaves a process of that."""
    if _OF_DEVICE.search(text):
        return "device"
    limits = (resource.getrlimit(each)[0] for each in (resource.RLIMIT_AS, resource.RLIMIT_DATA))
    return "host" if all(limit == resource.RLIM_INFINITY for limit in limits) else "cap"


def read_report(run_dir: Path) -> OwnReport | None:
    """Read what a run said of its end: its record or, where rank 0 could write none, the report of another rank."""
    path = run_dir / "record.json"
    if path.exists():
        written = schema.read(path)
        if written.failure is None:
            return OwnReport("ok", text=f"final loss {written.final_loss:.4f}")
        return OwnReport(written.status, written.failure.step, written.failure.error)
    reports = [json.loads(report.read_text()) for report in run_dir.glob("failure-rank*.json")]
    if not reports:
        return None
    first = min(reports, key=lambda report: report["at"])
    return OwnReport(first["status"], first["step"], first["error"])


def _signal(errors: Iterable[str], returncode: int) -> tuple[str, str | None]:
    """Who was ended, and by which signal; SIGKILL where there are several: no launcher sends that first."""
    found: list[tuple[str, str]] = []
    who = "a process"
    for line in errors:
        if match := _RANK_OF_REPORT.match(line):
            who = f"rank {match[1]}"
        elif match := _ENDED_BY.search(line):
            found.append((who, next(filter(None, match.groups()))))
    if returncode < 0:
        name = next((s.name for s in signal.Signals if s == -returncode), f"signal {-returncode}")
        found.append(("the launcher", name))
    found.reverse()  # torchrun's root cause is its last
    return next((one for one in found if one[1] == "SIGKILL"), found[0] if found else ("a process", None))


def shown_command(arguments: Sequence[str]) -> list[str]:
    """The command of a launch as one would type it in the project's folder, and as records have it."""
    words = [redact_paths(word).removeprefix("./") for word in arguments]
    return ["accelerate", "launch", *words[3:]] if arguments[2] == "accelerate.commands.launch" else words
