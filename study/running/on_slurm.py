"""How is a study run by Slurm? Each run is a job, which leaves what a run leaves; this submits, waits and sums up.

Each job runs its run with the runner's own code (`zero-study job`), on its node, so outcomes are written there. Only
of a job that Slurm ended, and whose run could say nothing, the outcome is written here.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from study.errors import Refusal
from study.files import shown_text
from study.records.schema import Outcome
from study.run import Run
from study.running import ending, launch, one_writer, plan, runner, slurm
from study.running.duration import counted, duration
from study.running.plan import Planned
from study.running.slurm import Job
from study.running.studies import Study

# A cluster's administrators want few questions, and a job takes minutes.
POLL_SECONDS = 15.0


@dataclass(frozen=True)
class Order:
    """What one call asks: of which study, and what each job is given."""

    study: Study
    folder: Path
    timeout_seconds: float
    words: Sequence[str]  # options of sbatch, the user's own
    program: Sequence[str]  # and its words, which a run's id ends: the command of a job

    def script(self, run: Run) -> str:
        return slurm.script(run, [*self.program, run.run_id], self.needs_gpus, self.timeout_seconds, self.words)

    def asked(self, run: Run) -> str:
        return slurm.asked(run, self.needs_gpus, self.timeout_seconds)

    @property
    def needs_gpus(self) -> bool:
        return self.study.device == "gpu"


# ---------------------------------------------------------------- before


def look(order: Order, runs: Iterable[Run]) -> list[Planned]:
    """Say of each run whether it is kept, or why it is skipped; what its machine lacks, the job finds.

    Raises Refusal where a run directory holds the record of a run with other flags.
    """
    planned = [Planned(run, plan.finished(run, order.timeout_seconds)) for run in runs]
    exhausted = [each.run for each in planned if each.kept == "out_of_memory"]
    return [
        each if each.kept else Planned(each.run, skipped=plan.too_large_batch(each.run, exhausted)) for each in planned
    ]


def show(order: Order, runs: Sequence[Run]) -> str:
    """Say what `run` would submit, what is queued already, and what is kept; nothing is written or submitted."""
    jobs, unknown = {}, ""
    try:
        jobs = slurm.jobs()
    except Refusal as refusal:  # a plan may be made before one is on the cluster
        unknown = f"\nnot known: which runs are queued ({refusal})"
    planned = look(order, runs)
    digits, width = len(str(len(runs))), max(len(run.run_id) for run in runs)
    lines, counts = [], dict.fromkeys(("submit", "queued", "keep", "skip"), 0)
    for number, each in enumerate(planned, 1):
        job = jobs.get(slurm.script_path(each.run))
        if each.kept or each.skipped:
            what, why = ("keep", each.kept) if each.kept else ("skip", each.skipped)
        elif job and not job.is_over:
            what, why = "queued", str(job)
        else:
            what, why = "submit", order.asked(each.run)
        counts[what] += 1
        lines.append(f"{number:{digits}}  {what:6}  {each.run.run_id:{width}}  {why}")
    summary = (
        f"{counts['submit']} to submit, {counts['queued']} queued, {counts['keep']} kept, {counts['skip']} skipped; "
        "what a node lacks for a run, its job says"
    )
    return "\n".join([_heading(order, len(runs)), "", *lines, "", summary + unknown])


def _heading(order: Order, num_runs: int) -> str:
    given = f", each with {' '.join(order.words)}" if order.words else ""
    return f"{order.study.name}: {order.study.question}\n{num_runs} runs in {order.folder}, as jobs of Slurm{given}"


# ---------------------------------------------------------------- running


@dataclass
class _Call:
    """What one call has done so far."""

    order: Order
    heads: dict[str, str]  # of a line on a run, by its id
    left: list[Run] = field(default_factory=list)  # to be submitted
    queued: dict[str, tuple[Run, Job]] = field(default_factory=dict)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    refused: str = ""  # what sbatch said of the job that it did not take last

    def say(self, run: Run, text: str) -> None:
        print(f"{self.heads[run.run_id]}: {text}", flush=True)


def run(order: Order, runs: Sequence[Run]) -> int:
    """Submit what is neither finished nor queued, wait until all jobs are over, and return the runner's exit status.

    Interrupted, it leaves the jobs in the queue, and the next call waits for them. Raises Refusal where Slurm takes no
    job, and where another runner has the folder.
    """
    with one_writer.locked_study(order.folder):
        heads = {run.run_id: f"[{number}/{len(runs)}] {run.run_id}" for number, run in enumerate(runs, 1)}
        call = _Call(order, heads)
        print(_heading(order, len(runs)), flush=True)
        _begin(call, runs)
        try:
            while call.left or call.queued:
                _submit(call)
                time.sleep(POLL_SECONDS)
                _poll(call)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        if call.queued:
            numbers = " ".join(str(job.number) for _, job in call.queued.values())
            print(f"{counted(len(call.queued), 'job')} in the queue; to take back: scancel {numbers}")
        ended = [run for run in runs if run.run_id in call.outcomes]
        others = [run for run in runs if run.run_id not in call.outcomes]
        outcomes = [call.outcomes[run.run_id] for run in ended]
        return runner.conclude([Planned(run) for run in (*ended, *others)], outcomes, len(others))


def _begin(call: _Call, runs: Sequence[Run]) -> None:
    """Sort the runs: those with an outcome, those with a job of an earlier call, and those to be submitted."""
    jobs = slurm.jobs()
    for run in runs:
        job = jobs.get(slurm.script_path(run))
        if job and not job.is_over:
            call.queued[run.run_id] = run, job
            call.say(run, str(job))
        elif not (run.folder / "outcome.json").exists() and (job := job or slurm.ended_long_ago(run.folder)):
            _settle(call, run, job)
    for planned in look(call.order, [run for run in runs if run.run_id not in call.queued]):
        position = runner.next_position(call.order.folder)
        if planned.kept:
            outcome = runner.kept_outcome(call.order.study, planned, position)
        elif planned.skipped:
            outcome = runner.skipped_outcome(call.order.study, planned.run, position, planned.skipped)
        else:
            call.outcomes.pop(planned.run.run_id, None)
            call.left.append(planned.run)
            continue
        call.outcomes[planned.run.run_id] = outcome
        call.say(planned.run, f"{'kept, ' if planned.kept else ''}{outcome.status}, {outcome.message}")


def _submit(call: _Call) -> None:
    """Submit as many as Slurm takes: clusters limit how many a user may have. Raises Refusal where it takes none."""
    while call.left:
        run = call.left[0]
        try:
            number = slurm.submit(run, call.order.script(run))
        except Refusal as refusal:
            if not call.queued:
                raise Refusal(f"{refusal}; change --slurm or --per-machine") from None
            if call.refused != str(refusal):
                print(f"{refusal}: {counted(len(call.left), 'run')} to be submitted as others end", flush=True)
            call.refused = str(refusal)
            return
        call.left.pop(0)
        call.queued[run.run_id] = run, Job(number, "PENDING", "None", "", "", "")
        call.say(run, f"submitted, job {number}: {call.order.asked(run)}")


def _poll(call: _Call) -> None:
    """Look at the jobs once, say what has changed, and settle those that are over."""
    try:
        jobs = slurm.jobs()
    except Refusal as refusal:  # a controller that is restarted
        print(f"{refusal}; asked again", flush=True)
        return
    for run, before in list(call.queued.values()):
        job = jobs.get(slurm.script_path(run)) or slurm.ended_long_ago(run.folder)
        if job and not job.is_over:
            call.queued[run.run_id] = run, job
            if str(job) != str(before):
                call.say(run, str(job))
            continue
        del call.queued[run.run_id]
        _settle(call, run, job or before._replace(state="UNKNOWN"))


def _settle(call: _Call, run: Run, job: Job) -> None:
    """Keep the outcome of a run whose job is over, and say it: the run's own, else what Slurm says of the job."""
    outcome = _outcome(call.order, run, job)
    if outcome is None:
        call.say(run, f"no outcome; {job}")
        return
    call.outcomes[run.run_id] = outcome
    seconds = "" if outcome.wall_seconds is None else f" ({duration(outcome.wall_seconds)})"
    call.say(run, f"{outcome.status}, {outcome.message}{seconds}")


def _outcome(order: Order, run: Run, job: Job) -> Outcome | None:
    # A network's file system looks for new files when their folder is listed, and not when one is asked for.
    try:
        names = {path.name for path in run.folder.iterdir()}
    except FileNotFoundError:  # somebody has deleted it, to begin anew
        return None
    if "outcome.json" in names:
        return plan.read_outcome(run.folder)
    position = runner.next_position(order.folder)
    if kept := plan.finished(run, order.timeout_seconds):  # ended between its record and its outcome
        return runner.kept_outcome(order.study, Planned(run, kept), position)
    ended = slurm.how_it_ended(job, run.folder)
    if ended is None:
        return None
    status, message = ended
    output = run.folder / slurm.OUTPUT.format(job.number)
    tail = ending.read_lines(output)[-launch.STDERR_LINES :] if output.exists() else []
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return runner.write_outcome(
        order.study,
        run,
        position,
        status,
        shown_text(message),
        started_at=job.started_at or now,
        wall_seconds=job.seconds if job.started_at else None,
        stderr_tail=[shown_text(line) for line in tail],
    )
