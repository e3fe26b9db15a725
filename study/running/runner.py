"""Run a study: one run after another, each with an outcome. Continue a study that was interrupted.

Only one runner at a time works in a study's folder. If it is killed, finished runs stay, and the next call continues.
"""

from __future__ import annotations

import datetime
import math
import shutil
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from study.records import schema
from study.records.schema import Outcome
from study.records.simulation import simulates_gpus
from study.run import Run
from study.running import checks, launch, lock, plan
from study.running.estimate import duration
from study.running.forking import ForkServer
from study.running.outcome import Exit, classify_exit, read_report, shown_command
from study.running.plan import Plan, Planned
from study.running.studies import Study
from zero_study import terminal
from zero_study.engines import this_machine
from zero_study.errors import Refusal
from zero_study.files import redact_paths, why_not_writable, write_json
from zero_study.progress import after_two_seconds

# The exit statuses of `run`, as its help describes them.
ALL_OK, SOME_NOT_OK, SOME_WITHOUT_OUTCOME = 0, 1, 3

ROW = ["workload", "strategy", "ranks", "outcome", "loss", "states", "sent", "s/step"]
OUTCOME_WIDTH = 9  # so that the table fits 80 columns
LEGEND = """\
states: MiB of model states per rank when the optimizer steps.
sent: MiB of collectives per rank and step, where an all-reduce counts twice."""


@dataclass
class Slot:
    """The time limit of one call of the command. It begins when the object is made.

    A run is not started if it is expected to take longer than the time that is left.
    """

    seconds: float = math.inf
    # The first run is started even if it is expected to exceed the slot, and it has the whole slot. If it does not end
    # within the slot, that counts as its result.
    first_runs_regardless: bool = True
    interrupted: bool = False  # by the user, so that nothing more is started
    _began: float = field(default_factory=lambda: time.monotonic())

    @property
    def seconds_left(self) -> float:
        return max(0.0, self._began + self.seconds - time.monotonic())


def run(
    study: Study,
    runs: list[Run],
    folder: Path,
    timeout_seconds: float,
    fail_fast: bool,
    slot: Slot | None = None,
    fork: bool = False,
) -> int:
    """Run all runs of a study that are not finished, print progress and a table, and return the exit status.

    An interrupted run has no outcome, and the next call runs it again. With `fail_fast`, no further run is started
    after a run of this call whose status is neither ok nor out of memory. With a limited slot, runs that failed are not
    run again, because they would be the first of every slot. With `fork`, runs are forked from a process that has
    imported everything, if this machine has no GPU.

    Raises Refusal if another runner works in the folder, or if a run directory holds a finished run with other flags.
    """
    slot = slot or Slot()
    with lock.locked_study(folder):
        launch.end_left_over(folder)
        limit = min(timeout_seconds, slot.seconds)
        obstacle = why_not_forked() if fork else None
        with after_two_seconds("Reading earlier runs and checking this machine"):
            retry, forked = math.isinf(slot.seconds), fork and obstacle is None
            study_plan = plan.make_plan(study, runs, folder, limit, retry, forked)
        print(plan.heading(study_plan), flush=True)
        if obstacle:
            print(f"Each run starts in a new process, because {obstacle}.", flush=True)
        outcomes: list[Outcome] = []
        try:
            with _fork_server(study_plan) if forked else nullcontext() as server:
                # There are fewer outcomes than runs if the slot ends early.
                for planned, outcome in zip(study_plan.runs, _outcomes(study_plan, slot, server), strict=False):
                    outcomes.append(outcome)
                    if fail_fast and not planned.kept and outcome.status not in ("ok", "out_of_memory", "skipped"):
                        break
        except KeyboardInterrupt:
            slot.interrupted = True
            print("Interrupted. Finished runs are kept.", flush=True)
        missing = sum(not planned.kept for planned in study_plan.runs[len(outcomes) :])
        return _conclude(study_plan.runs, outcomes, missing)


def why_not_forked() -> str | None:
    """Return why runs cannot be forked from one process on this machine. None if they can."""
    if sys.platform != "linux":
        return "forked runs end with this command only on Linux"
    if simulates_gpus() or this_machine.find().gpu_memory_bytes:
        return "this machine has a GPU, and CUDA does not work in forks"
    return None


def _fork_server(study_plan: Plan) -> AbstractContextManager[ForkServer | None]:
    """Start the process that runs are forked from. There is none for one run, which would have to wait for it."""
    runs = [planned.run for planned in study_plan.runs if planned.to_run]
    return launch.fork_server(runs) if len(runs) > 1 else nullcontext()


def _conclude(runs: Sequence[Planned], outcomes: Sequence[Outcome], num_missing: int) -> int:
    """Print the results, the table and how many runs have no outcome, and return the exit status."""
    print(f"\n{_result(runs, outcomes, num_missing)}\n\n{table(runs, outcomes)}\n{LEGEND}")
    pairs = zip(runs, outcomes, strict=False)
    lines = [f"{planned.run.run_id}: {o.status}, {o.message}" for planned, o in pairs if o.status != "ok"]
    if lines:
        print("\nRuns without a result:")
        print("\n".join(terminal.wrap(line, later_indent="  ") for line in lines))
    if num_missing:
        return SOME_WITHOUT_OUTCOME
    return ALL_OK if all(outcome.status in ("ok", "skipped") for outcome in outcomes) else SOME_NOT_OK


def run_one(study: Study, run: Run, folder: Path, timeout_seconds: float, is_first_machine: bool = True) -> int:
    """Run one run of a study, and return the exit status.

    Other runs of the study may run elsewhere at the same time. If the run uses several machines, the first machine
    writes the outcome.
    """
    study_plan = plan.make_plan(study, [run], folder, timeout_seconds)
    if not is_first_machine and not study_plan.runs[0].to_run:
        print(f"{run.run_id}: {study_plan.runs[0].skipped or study_plan.runs[0].kept}", flush=True)
        return SOME_NOT_OK if study_plan.runs[0].skipped else ALL_OK
    if not is_first_machine:
        _clear(run.own_folder)
        ended = launch.launch(run, timeout_seconds)
        print(terminal.wrap(f"{run.run_id}: {ended.status}, {ended.message}", later_indent="  "), flush=True)
        return ALL_OK if ended.status == "ok" else SOME_NOT_OK
    (outcome,) = _outcomes(study_plan, Slot())
    return ALL_OK if outcome.status == "ok" else SOME_NOT_OK


def _outcomes(study_plan: Plan, slot: Slot, server: ForkServer | None = None) -> Iterator[Outcome]:
    """Yield an outcome for every run in the plan's order, and print it.

    A run that is kept or skipped takes no time. The iteration ends when the next run is not expected to end within the
    slot, or when a run did not.
    """
    position = 1 + max(
        (schema.read_outcome(path).position for path in study_plan.folder.glob("*/outcome.json")), default=0
    )
    ended = [(planned.run, planned.kept) for planned in study_plan.runs if planned.kept]
    for index, planned in enumerate(study_plan.runs):
        head = f"[{index + 1}/{len(study_plan.runs)}] {planned.run.run_id}"
        skip_reason = planned.skipped or (plan.implied_outcome(planned.run, ended) if planned.to_run else None)
        if planned.kept:
            outcome = _kept_outcome(study_plan.study, planned, position)
        elif skip_reason:
            outcome = _skipped_outcome(study_plan.study, planned.run, position, skip_reason)
        else:
            started = _start(study_plan, index, position, head, slot, server)
            if started is None:
                return
            outcome = started
            ended.append((planned.run, outcome.status))
        position = max(position, outcome.position + 1)
        print(
            f"{head}: {_summary(study_plan, index, outcome, is_started=not (planned.kept or skip_reason))}", flush=True
        )
        yield outcome


def _start(
    study_plan: Plan, index: int, position: int, head: str, slot: Slot, server: ForkServer | None
) -> Outcome | None:
    """Run one run if the slot has time for it, and return its outcome.

    If an extension of DeepSpeed cannot be built, the outcome is "skipped". None if the run was not started, or was
    ended, because the slot is over.
    """
    planned = study_plan.runs[index]
    seconds_left = slot.seconds_left
    if not slot.first_runs_regardless and study_plan.estimate(planned).seconds > seconds_left:
        expected = duration(study_plan.history.estimate(planned.run).seconds)
        print(
            f"{head}: the run was not started, because it takes about {expected}, and only "
            f"{duration(seconds_left)} of --minutes are left",
            flush=True,
        )
        return None
    try:
        checks.provide_extensions(planned.run, lambda line: print(f"{head}: {line}", flush=True))
    except Refusal as refusal:
        first_line, _, details = str(refusal).partition("\n")
        if details:
            print(details, flush=True)
        return _skipped_outcome(study_plan.study, planned.run, position, first_line)
    # The first run has the whole slot, no matter how much time this call has already used.
    limit = math.inf if slot.first_runs_regardless else seconds_left
    outcome = _launch(study_plan, index, position, head, limit, server)
    if outcome is None:
        print(
            f"{head}: the run was ended, because the time of --minutes is over. The next call starts this run again.",
            flush=True,
        )
        return None
    slot.first_runs_regardless = False
    if outcome.status == "ok":
        study_plan.history.add(schema.read(planned.run.folder), outcome)
    return outcome


def _summary(study_plan: Plan, index: int, outcome: Outcome, is_started: bool) -> str:
    """Describe how a run ended, how long it took, and how long the remaining runs will take."""
    kept = "kept, " if study_plan.runs[index].kept else ""
    took = f" ({duration(outcome.wall_seconds or 0.0)})" if is_started else ""
    seconds_left = _seconds_left(study_plan, index + 1)
    left = f"; about {duration(seconds_left)} left" if seconds_left else ""
    return f"{kept}{outcome.status}, {outcome.message}{took}{left}"


def _seconds_left(study_plan: Plan, start: int) -> float:
    """Estimate the total seconds of the runs from index `start` on."""
    return sum(study_plan.estimate(planned).seconds for planned in study_plan.runs[start:] if planned.to_run)


def _launch(
    study_plan: Plan, index: int, position: int, head: str, seconds_left: float, server: ForkServer | None
) -> Outcome | None:
    """Launch one run, and write and return its outcome.

    None if the run was ended because the slot was over. Then it has no outcome.
    """
    planned = study_plan.runs[index]
    run = planned.run
    expected, later = study_plan.estimate(planned).seconds, _seconds_left(study_plan, index + 1)
    started = time.monotonic()

    def progress(line: str) -> None:
        remaining = max(0.0, expected - (time.monotonic() - started)) + later
        print(f"{head}: {line}; about {duration(remaining)} left", flush=True)

    if reason := why_not_writable(study_plan.folder):  # there may be no space even for an empty log
        end = Exit("killed", redact_paths(f"{run.folder}: {reason}"))
        return _write_outcome(study_plan.study, run, position, end, wall_seconds=0.0)
    _clear(run.folder)
    limit = min(study_plan.timeout_seconds, seconds_left)
    ended = launch.launch(run, limit, progress, server)
    if ended.at_time_limit and limit < study_plan.timeout_seconds:
        return None  # if the record was written, the next call keeps the run
    return _write_outcome(
        study_plan.study,
        run,
        position,
        Exit(ended.status, ended.message, ended.memory),
        started_at=ended.started_at,
        wall_seconds=ended.wall_seconds,
        returncode=ended.returncode,
        stderr_tail=ended.stderr_tail,
    )


def _clear(folder: Path) -> None:
    """Remove the files of an earlier attempt without a result, so that they are not mistaken for those of this run."""
    for name in ("outcome.json", "record.json", "config.json", "steps.jsonl", "failure-rank*.json", "*.part"):
        for stale in folder.glob(name):
            shutil.rmtree(stale) if stale.is_dir() else stale.unlink()  # a model's folder, or a file


def _kept_outcome(study: Study, planned: Planned, position: int) -> Outcome:
    """Return the outcome that an earlier call wrote for a run.

    If that call was killed after the record was written and before the outcome was, the outcome is written now.
    """
    run = planned.run
    outcome = plan.read_outcome(run.folder)
    if outcome and outcome.status == planned.kept:
        return outcome
    record = schema.read(run.folder)
    end = classify_exit([], read_report(run.folder), returncode=0)
    end = end._replace(message=redact_paths(end.message))
    # The run may have started with an older version of the study's file.
    unknown = study.model_copy(update={"sha256": None})
    return _write_outcome(unknown, run, position, end, started_at=record.started_at)


def _skipped_outcome(study: Study, run: Run, position: int, reason: str) -> Outcome:
    outcome = plan.read_outcome(run.folder)
    if outcome and (outcome.status, outcome.message) == ("skipped", redact_paths(reason)):
        return outcome
    return _write_outcome(study, run, position, Exit("skipped", redact_paths(reason)))


def _write_outcome(
    study: Study,
    run: Run,
    position: int,
    end: Exit,
    *,
    started_at: str | None = None,  # None: now
    wall_seconds: float | None = None,
    returncode: int | None = None,
    stderr_tail: Sequence[str] = (),
) -> Outcome:
    outcome = Outcome(
        study=study.name,
        study_sha256=study.sha256,
        run_id=run.run_id,
        status=end.status,
        message=end.message,
        memory=end.memory,
        workload=run.config.workload,
        size=run.config.size,
        strategy=run.strategy.name,
        world_size=run.world_size,
        seed=run.config.seed,
        global_batch_size=run.config.global_batch_size,
        config=run.config.model_dump(mode="json"),
        round=run.round,
        position=position,
        started_at=started_at or datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        wall_seconds=wall_seconds,
        returncode=returncode,
        command=shown_command(launch.command(run)),
        stderr_tail=list(stderr_tail),
        simulated_gpus=simulates_gpus(),
    )
    try:
        run.folder.mkdir(parents=True, exist_ok=True)
        write_json(run.folder / "outcome.json", outcome.model_dump(mode="json"))
    except OSError as error:  # the table reports it, and the next call repeats the run
        print(f"{run.folder / 'outcome.json'}: not written ({error.strerror})", flush=True)
    return outcome


# ---------------------------------------------------------------- the table


def table(runs: Iterable[Planned], outcomes: Iterable[Outcome]) -> str:
    """Return a table with one row per run that has an outcome."""
    rows = [_row(planned.run, outcome) for planned, outcome in zip(runs, outcomes, strict=False)]
    return "\n".join(terminal.table(ROW, rows, sides="<" * len(ROW)))


def _result(runs: Sequence[Planned], outcomes: Sequence[Outcome], num_missing: int) -> str:
    """Describe how the runs ended, where their records are, and what to do next."""
    counts = Counter(outcome.status for outcome in outcomes)
    statuses = sorted(counts, key=lambda status: (status != "ok", status))
    ends = ", ".join(f"{counts[status]} {status.replace('_', ' ')}" for status in statuses)
    text = f"{len(outcomes)} of {len(runs)} runs have an outcome: {ends}." if outcomes else "No run has an outcome."
    if num_missing:
        text += f" {num_missing} of {len(runs)} runs have no outcome yet. To continue, run the same command again."
    folder = runs[0].run.folder.parent
    text += f" Records: {folder}/RUN/record.json."
    lines = [terminal.wrap(text)]
    if counts["ok"]:
        lines += ["To compare the runs:", terminal.command(["zero-study", "compare", str(folder)], "  ")]
    return "\n".join(lines)


def _row(run: Run, outcome: Outcome) -> list[str]:
    status = "\n".join(textwrap.wrap(outcome.status.replace("_", " "), OUTCOME_WIDTH))
    row = [run.config.workload, run.strategy.name, str(run.world_size), status]
    without_result = [*row, "", "", "", ""]
    if outcome.status not in ("ok", "crashed"):
        return without_result
    try:
        record = schema.read(run.folder)
    except Refusal:  # for instance because it was deleted after the run
        return without_result if outcome.status == "crashed" else [*row[:-1], "no record", "", "", "", ""]
    if record.status != "ok":
        return without_result
    states = [rank.model_states for rank in record.model_state_bytes or []]
    collectives = [collective.moved_bytes for collective in record.collectives_per_step or []]
    seconds = record.timing.median_seconds if record.timing else None
    return [
        *row,
        f"{record.final_loss:.4f}",
        f"{max(states) / 2**20:.2f}" if record.model_state_bytes else "",
        f"{sum(collectives) / 2**20:.2f}" if record.collectives_per_step is not None else "",
        "" if seconds is None else f"{seconds:.3f}",
    ]
