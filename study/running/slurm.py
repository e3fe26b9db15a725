"""What is a run as a job of Slurm, and what has become of it? Asked of sbatch, squeue and sacct.

A job's script lies in its run directory, and Slurm keeps its path: by that the jobs of an earlier call are known again,
whatever ended that call.
"""

from __future__ import annotations

import datetime
import math
import shlex
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from study.errors import Refusal
from study.files import missing_folders, remove_empty, write_whole
from study.records.schema import OutcomeStatus
from study.run import Run
from study.running import ending
from study.running.duration import counted, duration

SCRIPT = "job.sh"
OUTPUT = "slurm-{}.out"  # of a job, by its number

# Beyond --timeout, which ends a run with an outcome of its own: to import, and to let the ranks end.
SPARE_MINUTES = 5

# Where the machines of a job meet: two jobs on one node at two ports, below those that Linux hands out.
PORT = "$((20000 + SLURM_JOB_ID % 10000))"
# One process a machine, with all of its cores. Where one machine fails the others go on: the first is to say why.
EVERYWHERE = "srun --ntasks={machines} --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=0"

# The states of a job that does not go on, and what that is of a run: None where somebody took the job back, and for
# one that ended by itself what its output says.
ENDED_BY_SLURM: dict[str, tuple[OutcomeStatus, str] | None] = {
    "TIMEOUT": ("timed_out", "the job reached its time limit"),
    "DEADLINE": ("timed_out", "the job reached its deadline"),
    "OUT_OF_MEMORY": ("killed", "the job needed more host memory than it had; ask for more, as --slurm '--mem=64G'"),
    "NODE_FAIL": ("node_failed", "a node failed"),
    "BOOT_FAIL": ("node_failed", "a node did not boot"),
    "PREEMPTED": ("preempted", "another job took its place"),
    "CANCELLED": None,
    "REVOKED": None,
}
ENDED_BY_ITSELF = ("COMPLETED", "FAILED")


class Job(NamedTuple):
    """What Slurm says of a job."""

    number: int
    state: str
    reason: str  # why it waits, or why it ended
    nodes: str
    started: str  # as Slurm writes a time; no time before it has started
    elapsed: str  # likewise

    @property
    def is_over(self) -> bool:
        return self.state in ENDED_BY_SLURM or self.state in ENDED_BY_ITSELF

    @property
    def started_at(self) -> str | None:
        """When it was started last, in UTC; None: never."""
        try:
            started = datetime.datetime.fromisoformat(self.started)
        except ValueError:
            return None
        return started.astimezone(datetime.UTC).isoformat(timespec="seconds")

    @property
    def seconds(self) -> float:
        """How long it has run since; Slurm writes 1-02:03:04, or less of it. Raises ValueError where it is no time."""
        days, _, clock = self.elapsed.rpartition("-")
        parts = [float(part) for part in clock.split(":")]
        return 86400 * float(days or 0) + sum(part * 60.0**place for place, part in enumerate(reversed(parts)))

    def __str__(self) -> str:
        why = f" ({self.reason})" if self.state == "PENDING" and self.reason != "None" else ""
        where = f" on {self.nodes}" if self.nodes else ""
        return f"job {self.number}, {self.state.lower()}{why}{where}"


# ---------------------------------------------------------------- what a job is


def limit_minutes(timeout_seconds: float) -> int:
    return math.ceil(timeout_seconds / 60) + SPARE_MINUTES


def num_nodes(run: Run) -> int:
    return 1 if run.laboratory else run.num_machines


def num_gpus(run: Run) -> int:
    """GPUs that a run takes on each of its nodes, where it takes any."""
    return 1 if run.config.share_device else run.world_size // num_nodes(run)


def asked(run: Run, needs_gpus: bool, timeout_seconds: float) -> str:
    """Say what a job asks for."""
    nodes = num_nodes(run)
    parts = (num_gpus(run), "GPU") if needs_gpus else (run.world_size // nodes, "core")
    each = " each" if nodes > 1 else ""
    limit = duration(60 * limit_minutes(timeout_seconds))
    return f"{counted(nodes, 'node')} with {counted(*parts)}{each}, at most {limit}"


def script(run: Run, command: Sequence[str], needs_gpus: bool, timeout_seconds: float, words: Sequence[str]) -> str:
    """Write the script of a job: what it asks for, the user's words last, since the last of two holds; and its command.

    `command` runs one run on one machine; of several, each is told which it is.
    """
    # Slurm gives a task one core where nobody says more: so a machine has one a rank, though one task starts them all.
    nodes = num_nodes(run)
    own = [f"--job-name={run.run_id}", f"--nodes={nodes}"]
    own += [f"--ntasks-per-node={run.world_size // nodes}", f"--time={limit_minutes(timeout_seconds)}"]
    own += [f"--gpus-per-node={num_gpus(run)}"] if needs_gpus else []
    output = str(run.folder.absolute()).replace("%", "%%") + "/" + OUTPUT.format("%j")
    own += ["--requeue", "--open-mode=append", f"--output={output}"]
    line = shlex.join(command)
    if nodes > 1:
        line += f" --num-machines {nodes} --machine-rank $SLURM_NODEID"
        line += f' --main-process-ip "$SLURM_LAUNCH_NODE_IPADDR" --main-process-port {PORT}'
        line = f"{EVERYWHERE.format(machines=nodes)} sh -c {shlex.quote('exec ' + line)}"
    lines = ["#!/bin/sh", *(f"#SBATCH {shlex.quote(word)}" for word in own)]
    lines += [f"#SBATCH {shlex.join(words)}"] if words else []
    return "\n".join([*lines, f"exec {line}", ""])


def split(words: str) -> list[str]:
    """Split options for sbatch as a shell would. Raises Refusal."""
    try:
        found = shlex.split(words)
    except ValueError as error:
        raise Refusal(f"--slurm {words}: cannot be split into words ({error})") from None
    if not words.isprintable() or (found and not found[0].startswith("-")):
        raise Refusal(f"--slurm {words!r}: write options of sbatch on one line, as '--partition=gpu --account=mine'")
    return found


def script_path(run: Run) -> Path:
    """Where a job's script lies, by the one name that it has from wherever it is asked."""
    return (run.folder / SCRIPT).resolve()


# ---------------------------------------------------------------- asking Slurm


def submit(run: Run, text: str) -> int:
    """Submit a job; return its number. Raises Refusal where sbatch does, which leaves the run's folder as it was."""
    created = missing_folders(run.folder)
    run.folder.mkdir(parents=True, exist_ok=True)
    path, outcome = script_path(run), run.folder / "outcome.json"
    before = {file: file.read_bytes() for file in (path, outcome) if file.exists()}
    write_whole(path, text.encode())
    # That of an earlier attempt would be taken for this one's, and this job may write its own before sbatch returns.
    outcome.unlink(missing_ok=True)
    try:
        number = int(_ask("sbatch", "--parsable", str(path)).partition(";")[0])  # the cluster's name may follow
    except Refusal:
        path.unlink()
        for file, content in before.items():
            write_whole(file, content)
        remove_empty(created)
        raise
    with suppress(FileNotFoundError):  # the folder was deleted meanwhile
        (run.folder / OUTPUT.format(number)).touch()  # for `ended_long_ago`: a job may end before it writes
    return number


def jobs() -> dict[Path, Job]:
    """The newest job of each script among this user's, with those that ended in the last minutes. Raises Refusal."""
    lines = _ask("squeue", "--me", "--noheader", "--states=all", "--format=%A|%T|%r|%N|%S|%M|%o").splitlines()
    found: dict[Path, Job] = {}
    for line in lines:
        number, *fields, command = line.split("|", 6)
        job = Job(int(number), *fields)
        path = Path(command)
        if path not in found or found[path].number < job.number:
            found[path] = job
    return found


def ended_long_ago(folder: Path) -> Job | None:
    """The last job that was submitted for a run, of one that squeue has forgotten; None: nobody knows it.

    Without accounting sacct fails, and nobody knows any more.
    """
    first, last = OUTPUT.split("{}")
    numbers = [path.name.removeprefix(first).removesuffix(last) for path in folder.glob(OUTPUT.format("*"))]
    number = max((int(number) for number in numbers if number.isdigit()), default=None)
    if number is None:
        return None
    try:
        said = _ask(
            "sacct", f"--jobs={number}", "--allocations", "--noheader", "--parsable2",
            "--format=State,Reason,NodeList,Start,Elapsed",
        )  # fmt: skip
    except Refusal:
        return None
    for line in said.splitlines():
        state, *fields = line.split("|")
        return Job(number, state.split()[0], *fields)  # CANCELLED by 1000
    return None


def how_it_ended(job: Job, folder: Path) -> tuple[OutcomeStatus, str] | None:
    """Type the end of a job whose run could not say its own; None: somebody took it back, or it is not over."""
    output = folder / OUTPUT.format(job.number)
    where = f"Slurm's job {job.number}: {job.state}" + (f" on {job.nodes}" if job.nodes else "")
    if job.state in ENDED_BY_ITSELF:
        lines = ending.read_lines(output) if output.exists() else []
        status, message = ending.classify(lines, None, returncode=0 if job.state == "COMPLETED" else 1)
    else:
        ended = ENDED_BY_SLURM.get(job.state)
        if ended is None:
            return None
        status, message = ended
    return status, f"{message} ({where})"


def _ask(program: str, *words: str) -> str:
    try:
        done = subprocess.run([program, *words], capture_output=True, text=True)
    except FileNotFoundError:
        raise Refusal(f"{program} is not installed here; --on slurm is for a login node of a cluster") from None
    if done.returncode:
        said = [line.removeprefix(f"{program}: ").removeprefix("error: ") for line in done.stderr.splitlines()]
        raise Refusal(f"{program}: {'; '.join(said)}")
    return done.stdout
