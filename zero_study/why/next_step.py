"""Say what to ask and what to record next time, if a log does not contain the cause of a failure."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from typing import NamedTuple

from zero_study.logs.printed_failures import TIME_OUT, Failure, Log
from zero_study.why import known_faults
from zero_study.why.fact import Fact
from zero_study.why.tracebacks import library_frames, package_of, user_frame

RECORDER = (
    "TORCH_NCCL_TRACE_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1 TORCH_NCCL_DEBUG_INFO_TEMP_FILE=/shared/fr/rank_",
    "py-spy dump --pid PID   (for each rank, while it waits)",
)
SNAPSHOT = (
    "torch.cuda.memory._record_memory_history()   (at the start)",
    'torch.cuda.memory._dump_snapshot("snapshot.pickle")   (in `except torch.OutOfMemoryError:` around the training)',
)
ALL_RANKS = ("torchrun --log-dir logs --redirects 3 --tee 3 ...   (one file per rank, with standard error)",)
ANOMALY = ("torch.autograd.set_detect_anomaly(True)   (names the operation whose gradient is NaN)",
           "TrainingArguments(logging_nan_inf_filter=False, logging_steps=1)")  # fmt: skip
EVERY_STEP = ("log each step: logging_steps=1 (Trainer), --log-interval 1 (Megatron)",)
PROFILE = ("torch.profiler.profile, then export_chrome_trace(FILE), and zero-study why --trace FILE", RECORDER[1])
OF_RAY = ("/tmp/ray/session_latest/logs/worker-*.err on each machine   (one file per worker)",)
CORE = ("ulimit -c unlimited   (before the run; then: gdb python CORE_FILE, and bt)",)
FAULTHANDLER = ("PYTHONFAULTHANDLER=1   (prints the stack of Python when a signal ends the process)",)
# A connection that was lost, because another process ended.
LOST = re.compile(
    r"[Cc]onnection (?:reset|closed|refused|was closed|lost)|Broken pipe|remote process (?:exited|has)|ncclRemoteError|"
    r"communicator was aborted|NCCL communicator .* abort|recvValue failed|sendBytes failed|[Ss]ocket closed|"
    r"wait timeout after|waitForInput|actor (?:died|is dead)|ActorDied|RayActorError|worker died|EngineDeadError"
)
_OTHERS = re.compile(r"out of memory.*Process \d+ has .*Process \d+ has ", re.DOTALL)
_ASYNCHRONOUS = re.compile(r"device-side assert|illegal memory access|CUDA error|misaligned address|unspecified launch")


class NextStep(NamedTuple):
    """The one question whose answer helps most, and lines to copy that record what the log lacks."""

    question: str
    record: tuple[str, ...]


def after(failure: Failure | None, log: Log, facts: Sequence[Fact], num_rows: int = 0) -> NextStep:
    """Return the next step after a failure whose cause the log does not contain. None: the log has no failure."""
    all_ranks = OF_RAY if any("pid=" in stream for stream in log.streams) else ALL_RANKS
    fault = next((fact for fact in facts if fact.id == known_faults.ID), None)
    if fault is not None:
        return NextStep("Is a release with the known fault installed?", (fault.check,))
    if failure is None:
        kind = next((fact.kind for fact in facts if not fact.is_note), None)
        if any(fact.id == "wrong/not-finite" for fact in facts):
            return NextStep("Which batch, and which operation, gave the first value that is wrong?", ANOMALY)
        if kind == "slow":
            return NextStep("What does each rank do during the time that is lost?", PROFILE)
        if num_rows:
            return NextStep("What looks wrong in this run: the loss, its time, or its memory?", EVERY_STEP)
        if log.open_frames:
            return NextStep(
                "Which line follows after the last line of the traceback? It names the exception.", ALL_RANKS
            )
        return NextStep("What is wrong with this run, and what did each rank write to standard error?", all_ranks)
    if failure.kind == TIME_OUT or "Watchdog" in failure.text:
        return NextStep("What did each of the other ranks do at that time?", RECORDER)
    if LOST.search(failure.text):
        return NextStep("Which process ended first, and what did it print?", all_ranks)
    if failure.kind == "Killed":
        return NextStep("Which processes filled the memory of the host?", ("ray memory", *all_ranks))
    if failure.signal == signal.SIGKILL:
        return NextStep(
            "Did the kernel end the process because the memory of the host ran out?",
            ('dmesg -T | grep -i "killed process"   (on that machine, as root)', *all_ranks),
        )
    if failure.signal:
        has_stack = "Fatal Python error" in failure.text or bool(failure.frames)
        if has_stack:
            return NextStep("Which native function was executed when the process ended?", CORE)
        return NextStep("Which line of Python was executed when the process ended?", (*FAULTHANDLER, *all_ranks))
    if _OTHERS.search(failure.text):
        return NextStep("Which processes use this GPU, and what for?", ("nvidia-smi   (while the training runs)",))
    if "out of memory" in failure.text:
        return NextStep("Which tensors filled the GPU when the request failed?", SNAPSHOT)
    if _ASYNCHRONOUS.search(failure.text):
        return NextStep(
            "Which operation failed? CUDA reports an error later than it occurs, so the traceback may show another "
            "operation.",
            ("CUDA_LAUNCH_BLOCKING=1", *all_ranks),
        )
    if failure.kind in ("ExitCode", "ChildFailedError", "CalledProcessError"):
        return NextStep("What did that process write to standard error?", all_ranks)
    if not failure.frames:
        return NextStep("Where was it raised? The log has no traceback of it.", all_ranks)
    user, frames = user_frame(failure), library_frames(failure)
    library = frames[-1] if frames else None
    if user is not None:
        what = f"Did {user.function} ({user.file}, line {user.line}) work before, and what has changed since then?"
    else:
        called = "" if library is None else f" {library.function} of {package_of(library)}"
        what = f"Which line of the program called{called or ' this code'}? The traceback does not show it."
    return NextStep(what, ())
