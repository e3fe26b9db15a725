"""Launch one run with `accelerate launch`, wait for it, and classify how it ended.

The run has a process group of its own, which does not outlive the process that started it. Every launch returns a
LaunchResult, no matter how the run ended.
"""

from __future__ import annotations

import datetime
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

import psutil

from study.records import schema
from study.records.machine import FORKED
from study.records.schema import Failure, Memory, OutcomeStatus
from study.run import Run
from study.running import caches, lock, memory_limits
from study.running.forking import ForkedProcess, ForkServer, ServerLost
from study.running.outcome import REMOVED, Exit, RankReport, classify_exit, of_record, read_report, shown_command
from zero_study import processes
from zero_study.engines import this_machine
from zero_study.engines.keys import allowed
from zero_study.errors import Refusal
from zero_study.files import is_removed, open_new, redact_paths, why_not_writable

TRAIN = Path(__file__).resolve().parents[1] / "train.py"
LAUNCHER = [sys.executable, "-m", "accelerate.commands.launch"]

# Variables that silence messages of PyTorch's C++ code and of the tokenizers. Values that the user has set have
# priority.
QUIET_ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "KINETO_LOG_LEVEL": "6", "TORCH_CPP_LOG_LEVEL": "ERROR"}

# The environment variable that holds the run directory, for all processes that a run starts.
RUN_FOLDER = "ZERO_STUDY_RUN_FOLDER"

TORCHRUN = "torchrun"  # a folder in the run directory for torchrun's files; it is removed after the run

HEARTBEAT_SECONDS = 5.0
STDERR_LINES = 30  # how many of the last lines are recorded for a run that is not ok
LEFT_OVER_SECONDS = 30

ANSWER_SECONDS = 2.0  # how long to wait for an answer of machine 0
# Extra time for the ranks on this machine to end by themselves, because they know more about the cause.
FIRST_WORD_SECONDS = 60.0


@dataclass(frozen=True)
class LaunchResult:
    """The result of one launch. `redact_paths` has been applied to its texts."""

    status: OutcomeStatus
    message: str  # for people: one line
    memory: Memory | None  # the memory that ran out; None: none did
    record_path: Path | None
    started_at: str
    wall_seconds: float
    returncode: int
    command: list[str]
    stderr_tail: list[str]
    at_time_limit: bool  # the run was ended at its time limit; its record may be complete nevertheless


def command(run: Run) -> list[str]:
    """Return the command that launches a run on this machine.

    With port 0, the rendezvous picks a free port.
    """
    launcher = [*LAUNCHER, "--config_file", str(run.strategy.path)]
    processes = ["--num_processes", str(run.world_size), "--main_process_port", str(run.main_process_port)]
    if run.num_machines > 1:
        processes += ["--num_machines", str(run.num_machines), "--machine_rank", str(run.machine_rank)]
        processes += [] if run.main_process_ip is None else ["--main_process_ip", run.main_process_ip]
        processes += ["--rdzv_conf", f"timeout={run.config.collective_timeout}"]  # torch's own is 10 min
    return [*launcher, *processes, str(TRAIN), *run.arguments()]


def _started(run: Run) -> list[str]:
    """Return the command that is really started: it also tells torchrun to keep its files in the run directory.

    By default, torchrun would leave them in /tmp.
    """
    words = command(run)
    at = words.index(str(TRAIN)) if str(TRAIN) in words else len(words)  # in tests, the program may be another one
    return [*words[:at], "--log_dir", str(run.own_folder / TORCHRUN), *words[at:]] if words[at:] else words


def launch(
    run: Run,
    timeout_seconds: float | None = None,
    progress: Callable[[str], None] = lambda line: None,
    server: ForkServer | None = None,
) -> LaunchResult:
    """Start one run, wait for it, and classify how it ended.

    The output of the run goes to stdout.log and stderr.log. `progress` receives one line every few seconds. If the time
    limit is reached or the user presses Ctrl-C, the whole process group is ended. If this process is killed, Linux
    kills the run too. A run that is refused leaves no files behind. With a `server`, the run is forked from it if that
    is possible.

    Raises Refusal if another launch is writing to the run's folder, or if an environment variable is set that a run
    must not have.
    """
    allowed.check_variables(os.environ)
    server = _usable(server, run, progress)
    with lock.locked_run(run.own_folder) as token:
        return _launch(run, _environment(run) | {lock.TOKEN: token}, timeout_seconds, progress, server)


def _launch(
    run: Run,
    environment: dict[str, str],
    timeout_seconds: float | None,
    progress: Callable[[str], None],
    server: ForkServer | None,
) -> LaunchResult:
    machine_0 = _MainMachine(run)
    started_at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    started = time.monotonic()
    kills_before = _out_of_memory_kills()
    for stale in run.own_folder.glob("failure-rank*.json"):  # of an earlier attempt
        stale.unlink()
    logs = [run.own_folder / name for name in ("stdout.log", "stderr.log")]
    with open_new(logs[0], "w") as stdout, open_new(logs[1], "w+") as stderr:
        process = _start(run, server, environment, logs, (stdout, stderr), progress)
        try:
            time_limit = _wait(process, run, machine_0, timeout_seconds, progress)
        finally:
            if process.poll() is None:
                _end_group(process)
            if process.returncode < 0:  # a signal ended the launcher, so its ranks may still be running
                end_left_over(run.own_folder)
            swap_problem = _what_became_of_swap(run)
            run.remove_scratch()
            shutil.rmtree(run.own_folder / TORCHRUN, ignore_errors=True)
        wall_seconds = time.monotonic() - started
        errors = processes.lines_of(os.pread(stderr.fileno(), os.fstat(stderr.fileno()).st_size, 0))
        folder_problem = _what_became_of(run.own_folder, stderr.fileno())

    report = read_report(run.own_folder)
    if run.machine_rank and report is None and process.returncode == 0:
        report = RankReport("ok", text="the record is on machine 0")
    kernel_kill = _short_memory(kills_before, _out_of_memory_kills(memory_limits.kills(run.own_folder)))
    end = classify_exit(
        errors, report, process.returncode, time_limit, kernel_kill, folder_problem, swap_problem, run.world_size
    )
    if machine_0.says is not None:
        end = Exit("stalled", machine_0.says)
    end = end._replace(message=redact_paths(end.message))
    if end.status == "misconfigured" and report is None:
        for log in logs:
            log.unlink(missing_ok=True)
    path = run.own_folder / "record.json"
    if report and path.exists():
        _let_agree(path, end)
    return LaunchResult(
        status=end.status,
        message=end.message,
        memory=end.memory,
        record_path=path if path.exists() else None,
        started_at=started_at,
        wall_seconds=wall_seconds,
        returncode=process.returncode,
        command=shown_command(command(run)),
        stderr_tail=[] if end.status == "ok" else [redact_paths(line) for line in errors[-STDERR_LINES:]],
        at_time_limit=time_limit is not None,
    )


def _what_became_of(folder: Path, log: int) -> str | None:
    """Return what is wrong with a run's folder after the run: it was removed, or it cannot be written any more.

    `log` is the file descriptor of a log in the folder. None if nothing is wrong.
    """
    if is_removed(log):
        return f"{folder} {REMOVED}"
    reason = why_not_writable(folder)
    return reason and f"{folder}: {reason}"


def _what_became_of_swap(run: Run) -> str | None:
    """Return the most likely problem with the folder of swapped states, before the folder is removed.

    The caller uses the text only if the run crashed while it swapped. None if the run does not offload to NVMe.
    """
    folder = run.swap_folder
    if not run.strategy.offloads_to_nvme:
        return None
    if not folder.is_dir():
        return f"{folder} {REMOVED}"
    return f"{folder}: {why_not_writable(folder, 1 << 20) or 'a file is shorter than the data that was swapped out'}"


def _let_agree(path: Path, end: Exit) -> None:
    """Correct the status in a failed run's record if the launcher knows better than the ranks how the run ended."""
    record = schema.read(path)
    right = of_record(end)
    if record.status in ("ok", right):
        return
    step = record.failure.step if record.failure else None
    failure = Failure(step=step, error=end.message, memory=end.memory)
    updated = record.model_copy(update={"status": right, "failure": failure})
    with suppress(OSError):
        schema.write(path.parent, updated)


def _environment(run: Run) -> dict[str, str]:
    """Return the environment for a run: that of this process, with the run's thread count and run folder added.

    `end_left_over` recognizes the processes of the run by the run folder. Variables that name a rank are removed,
    because accelerate's launcher of one process would pass on those of another launch.
    """
    num_ranks = run.world_size if run.laboratory else run.num_local_ranks  # the laboratory's machines share processors
    threads = os.environ.get("OMP_NUM_THREADS") or str(this_machine.threads_of_each(num_ranks))
    inherited = {
        name: value for name, value in os.environ.items() if not allowed.says_which_rank(name) and name != FORKED
    }
    own = {"OMP_NUM_THREADS": threads, RUN_FOLDER: str(run.own_folder.resolve()), "PYTHONSAFEPATH": "1"}
    # PYTHONSAFEPATH: modules in the current folder do not shadow Python's own.
    return inherited | caches.outside_home() | own


# ---------------------------------------------------------------- runs that are forked

OF_ONE_RUN = (RUN_FOLDER, lock.TOKEN)  # environment variables


def fork_server(runs: Sequence[Run]) -> ForkServer:
    """Start a process to fork runs from. It has the environment variables that most of these runs need."""
    environments = Counter(tuple(sorted(_of_every_run(_environment(run)).items())) for run in runs)
    return ForkServer(dict(environments.most_common(1)[0][0]))


def _usable(server: ForkServer | None, run: Run, progress: Callable[[str], None]) -> ForkServer | None:
    """Return the server when it is ready, or None if a run has to be started as usual.

    A line of progress reports a lost server once.
    """
    if server is None or server.lost or not can_be_forked(run, server):
        return None
    try:
        server.wait_until_ready()
        return server
    except ServerLost as lost:
        progress(f"starts in a new process: {lost}")
    return None


def can_be_forked(run: Run, server: ForkServer) -> bool:
    """Return whether a run can be forked from this server. Otherwise it has to be started as usual.

    A run with a memory limit cannot, because a fork shares memory with the process that it is forked from.
    """
    is_usual = _started(run)[:3] == LAUNCHER and run.num_machines == 1 and not run.laboratory
    return is_usual and run.config.memory_cap is None and _of_every_run(_environment(run)) == server.environment


def _of_every_run(environment: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in OF_ONE_RUN}


def _start(
    run: Run,
    server: ForkServer | None,
    environment: dict[str, str],
    logs: Sequence[Path],
    outputs: Sequence[IO[str]],
    progress: Callable[[str], None],
) -> subprocess.Popen[bytes] | ForkedProcess:
    """Start the launcher of a run, as a fork of the server if there is one. `outputs` are the opened `logs`."""
    if server is not None:
        try:
            return server.start(
                "accelerate-launch",
                _started(run)[len(LAUNCHER) :],
                stdout=logs[0],
                stderr=logs[1],
                environment=environment | {FORKED: "1"},
                group="deepspeed" if run.strategy.distributed_type in ("DEEPSPEED", "FSDP") else None,
            )
        except ServerLost as lost:
            progress(f"starts in a new process: {lost}")
    return subprocess.Popen(
        processes.with_parent_death_signal(_started(run)),
        stdout=outputs[0],
        stderr=outputs[1],
        env=environment,
        start_new_session=True,
    )


def _wait(
    process: subprocess.Popen[bytes] | ForkedProcess,
    run: Run,
    machine_0: _MainMachine,
    timeout_seconds: float | None,
    progress: Callable[[str], None],
) -> float | None:
    """Wait until a run ends, reaches its time limit, or has lost machine 0.

    Returns the time limit if it was reached, else None.
    """
    started = time.monotonic()
    while process.poll() is None:
        seconds = HEARTBEAT_SECONDS
        if timeout_seconds is not None:
            seconds = min(seconds, started + timeout_seconds - time.monotonic())
        if seconds <= 0:
            return timeout_seconds
        try:
            process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            if machine_0.has_gone():
                return None
            progress(_progress(run.own_folder, time.monotonic() - started))
    return None


def end_left_over(folder: Path) -> None:
    """End the processes that an earlier call left running for run directories in or below a folder.

    Only processes of this user are ended. Call this only while no other launch can be using the folder. Raises Refusal
    if a process does not end.
    """
    deadline = time.monotonic() + LEFT_OVER_SECONDS
    # Repeat this, because a process may have started another one just before it was killed.
    while left_over := [process for process in psutil.process_iter() if _works_below(folder.resolve(), process)]:
        if time.monotonic() > deadline:
            raise Refusal(
                f"{folder}: process {left_over[0].pid} of an earlier call does not end. End this "
                "process, and try again."
            )
        for process in left_over:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(0.1)


def _works_below(folder: Path, process: psutil.Process) -> bool:
    """Return whether a process of this user belongs to a run in or below a folder."""
    try:
        # This is empty for a zombie, which is a process that has ended and was not waited for.
        run_folder = process.environ().get(RUN_FOLDER)
        is_own = process.uids().real == os.getuid() and process.pid != os.getpid()
        return run_folder is not None and is_own and folder in (Path(run_folder), *Path(run_folder).parents)
    except (psutil.Error, OSError):
        return False


def _progress(run_dir: Path, seconds: float) -> str:
    try:
        last = json.loads((run_dir / "steps.jsonl").read_text().splitlines()[-1])
    except (OSError, IndexError, json.JSONDecodeError):
        return f"{seconds:.0f} s, starting"
    loss = "NaN" if last["loss"] is None else f"{last['loss']:.4f}"
    return f"{seconds:.0f} s, step {last['step']}, loss {loss}"


def _end_group(process: subprocess.Popen[bytes] | ForkedProcess) -> None:
    """End the run and every process that it started: first by SIGTERM, then by SIGKILL.

    SIGTERM lets the ranks of torchrun record their end. torchrun starts its ranks in sessions of their own, so they are
    not in the launcher's process group. After SIGTERM, torchrun gives its ranks 30 s, so it is given 45 s here.
    Accelerate's launcher of one process ends at once, together with its process.
    """
    started: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):  # a forked one ended just now
        started = psutil.Process(process.pid).children(recursive=True)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=45)
    for survivor in started:
        with suppress(psutil.NoSuchProcess):
            survivor.kill()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _out_of_memory_kills(of_capped_ranks: int = 0) -> dict[Memory, int]:
    """Count the processes that the kernel has killed so far because memory ran out.

    "host" counts the kills on the whole machine. "cap" counts the kills in this process's control groups, which limit
    its memory, and in the control groups that ranks made for themselves (`of_capped_ranks`). A count is left out if the
    kernel does not report it.
    """
    counts: dict[Memory, int] = {"cap": of_capped_ranks} if of_capped_ranks else {}
    with suppress(OSError):
        counts["host"] = this_machine.out_of_memory_kills(Path("/proc/vmstat").read_text())
    for folder in this_machine.control_groups("memory"):
        for name in ("memory.events", "memory.oom_control"):  # of control groups version 2 and version 1
            with suppress(OSError):
                counts["cap"] = counts.get("cap", 0) + this_machine.out_of_memory_kills((folder / name).read_text())
    return counts


def _short_memory(before: dict[Memory, int], after: dict[Memory, int]) -> Memory | Literal["none"] | None:
    """Return which memory ran out if the kernel killed a process between two counts.

    "none" if it killed no process. None if the kernel does not report kills.
    """
    for memory in ("cap", "host"):
        if after.get(memory, 0) > before.get(memory, 0):
            return memory
    return "none" if "host" in before else None


# ---------------------------------------------------------------- of several machines


class _MainMachine:
    """Machine 0, as another machine of the run sees it.

    The launcher on another machine would wait for machine 0 forever: torchrun's agent ends only when all of its ranks
    do. A rank that is stopped, or that is blocked in a call, does not end, and nobody tells the agent of machine 0 that
    the other machines have given up.
    """

    def __init__(self, run: Run) -> None:
        self._address = (run.main_process_ip, run.main_process_port) if run.machine_rank else None
        self._patience = run.config.collective_timeout + FIRST_WORD_SECONDS
        self._seen: float | None = None
        self.says: str | None = None  # why the run has to end; None: it goes on

    def has_gone(self) -> bool:
        """Return whether machine 0 has not answered for longer than ranks wait for each other."""
        if self._address is None:
            return False
        with suppress(OSError), socket.create_connection(self._address, timeout=ANSWER_SECONDS):
            self._seen = time.monotonic()
        if self._seen is None or time.monotonic() - self._seen < self._patience:
            return False
        self.says = f"machine 0 has not answered for {self._patience:.0f} s, and a rank of this machine does not end"
        return True
