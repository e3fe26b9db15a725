"""How is a whole study run, interrupted and taken up again? One run after another, each with an outcome.

One runner at a time has a study's folder; whatever kills it, what is finished stays, and the next call goes on.
"""

from __future__ import annotations

import datetime
import fcntl
import math
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from study import files
from study.errors import Refusal
from study.records import schema
from study.records.schema import Outcome, OutcomeStatus
from study.running import ending, launch, plan
from study.running.duration import duration
from study.running.plan import Plan, Planned
from study.running.studies import Run, Study
from study.strategy import file

# The exit status of `run`, as its help says it.
ALL_OK, SOME_NOT_OK, SOME_WITHOUT_OUTCOME = 0, 1, 3

ROW = ["workload", "strategy", "processes", "final loss", "model states", "collectives", "s/step", "record"]
LEGEND = "model states: MiB per rank as the optimizer steps; collectives: MiB per rank and step, all-reduces twice"


def run(
    study: Study,
    runs: list[Run],
    folder: Path,
    timeout_seconds: float,
    fail_fast: bool,
    slot_seconds: float = math.inf,
) -> int:
    """Run what is not finished, print progress and a table, and return the exit status.

    An interrupted run has no outcome, and the next call does it again. With `fail_fast` nothing more is started after
    one of this call that is neither ok nor out of memory. Within a slot nothing is started that is not expected to end
    in it, but the first, which has the whole slot: what does not end in that is a result. What failed is not run again
    there: it would be the first of every slot. Raises Refusal where another runner has the folder, or where a finished
    run is there that has another's name.
    """
    with locked(folder):
        launch.end_left_over(folder)
        planned = plan.make(study, runs, folder, min(timeout_seconds, slot_seconds), retry=math.isinf(slot_seconds))
        print(f"{plan.heading(planned)}\n{plan.summary(planned)}", flush=True)
        outcomes: list[Outcome] = []
        try:
            # Shorter, where the slot ends before them.
            for one, outcome in zip(planned.runs, _outcomes(planned, slot_seconds), strict=False):
                outcomes.append(outcome)
                if fail_fast and not one.kept and outcome.status not in ("ok", "out_of_memory", "skipped"):
                    break
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        print(f"\n{table(planned.runs, outcomes)}\n{LEGEND}")
        missing = sum(not one.kept for one in planned.runs[len(outcomes) :])
        if missing:
            print(f"{missing} of {len(planned.runs)} runs have no outcome yet; the same command goes on with them")
            return SOME_WITHOUT_OUTCOME
        return ALL_OK if all(one.status in ("ok", "skipped") for one in outcomes) else SOME_NOT_OK


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other runners out of a study's folder; the kernel lets them in again when this process ends, however."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / ".lock", "a+")  # noqa: SIM115 - closed below
    except OSError as error:
        raise Refusal(f"{folder}: cannot be written ({error.strerror}); pass another --runs-dir") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise Refusal(
                f"{folder}: process {lock.read().strip()} is running this study there; wait for it, end it, or pass "
                "another --runs-dir"
            ) from None
        except OSError as error:
            raise Refusal(f"{folder}: cannot be locked ({error.strerror}); pass a --runs-dir on a local disk") from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


def _outcomes(planned: Plan, slot_seconds: float) -> Iterator[Outcome]:
    """Bring every run to an outcome, in the plan's order, and say so; what is kept or skipped takes no time.

    Ends where the next run is not expected to end within the slot, and where one did not.
    """
    slot_end = time.monotonic() + slot_seconds
    started = False
    position = 1 + max((seen.position for seen in map(plan.read_outcome, _run_dirs(planned.folder)) if seen), default=0)
    exhausted = [one for one in planned.runs if one.kept == "out_of_memory"]
    for index, one in enumerate(planned.runs):
        head = f"[{index + 1}/{len(planned.runs)}] {one.run.run_id}"
        reason = one.skipped or (plan.too_large_batch(one, exhausted) if one.to_run else None)
        seconds = ""
        if one.kept:
            outcome = _kept(planned.study, one, position)
        elif reason:
            outcome = _skipped(planned.study, one, position, reason)
        else:
            left = slot_end - time.monotonic()
            if started and planned.estimate(one).seconds > left:
                print(f"{head}: not started; the slot has {duration(max(0.0, left))} left", flush=True)
                return
            # The first has the whole slot, whatever this call has needed until here.
            outcome = _launch(planned, index, position, head, left if started else math.inf)
            if outcome is None:
                print(f"{head}: ended with the slot", flush=True)
                return
            started = True
            seconds = f" ({duration(outcome.wall_seconds)})"
            if outcome.status == "ok":
                planned.history.add(schema.read(one.run_dir), outcome)
            if outcome.status == "out_of_memory":
                exhausted.append(one)
        position = max(position, outcome.position + 1)
        left = _seconds_left(planned, index + 1)
        rest = f"; about {duration(left)} left" if left else ""
        kept = "kept, " if one.kept else ""
        print(f"{head}: {kept}{outcome.status}, {outcome.message}{seconds}{rest}", flush=True)
        yield outcome


def _run_dirs(folder: Path) -> Iterable[Path]:
    return (path.parent for path in folder.glob("*/outcome.json"))


def _seconds_left(planned: Plan, start: int) -> float:
    """Estimate the runs from this index on."""
    return sum(planned.estimate(one).seconds for one in planned.runs[start:] if one.to_run)


def _launch(planned: Plan, index: int, position: int, head: str, seconds_left: float) -> Outcome | None:
    """Run one, and write what came of it; None where it was ended because the slot did, and so has no outcome."""
    one = planned.runs[index]
    expected, later = planned.estimate(one).seconds, _seconds_left(planned, index + 1)
    started = time.monotonic()

    def progress(line: str) -> None:
        left = max(0.0, expected - (time.monotonic() - started)) + later
        print(f"{head}: {line}; about {duration(left)} left", flush=True)

    # What an attempt without a result left would be taken for this one's.
    for name in ("outcome.json", "record.json", "steps.jsonl", "failure-rank*.json", "*.part"):
        for stale in one.run_dir.glob(name):
            stale.unlink()
    path = file.find_strategy(one.run.strategy)
    limit = min(planned.timeout_seconds, seconds_left)
    ended = launch.launch(path, one.run.num_processes, one.run.arguments(), one.run_dir, limit, progress)
    if ended.status == "timed_out" and limit < planned.timeout_seconds:
        return None
    return _write(
        planned.study,
        one,
        position,
        ended.status,
        ended.message,
        started_at=ended.started_at,
        wall_seconds=ended.wall_seconds,
        returncode=ended.returncode,
        command=ended.command,
        stderr_tail=ended.stderr_tail,
    )


def _kept(study: Study, one: Planned, position: int) -> Outcome:
    """Return what an earlier call wrote; write it where that was killed after the record and before."""
    seen = plan.read_outcome(one.run_dir)
    if seen and seen.status == one.kept:
        return seen
    written, told = schema.read(one.run_dir), ending.read_told(one.run_dir)
    status, message = ending.classify([], told, returncode=0)
    command = [*plan.planned_command(one.run), "--output-dir", files.shown_text(str(one.run_dir))]
    return _write(
        study, one, position, status, files.shown_text(message), started_at=written.started_at, command=command
    )


def _skipped(study: Study, one: Planned, position: int, reason: str) -> Outcome:
    seen = plan.read_outcome(one.run_dir)
    if seen and (seen.status, seen.message) == ("skipped", files.shown_text(reason)):
        return seen
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    # Not started; but its command says which run it would have been.
    command = plan.planned_command(one.run)
    return _write(study, one, position, "skipped", files.shown_text(reason), started_at=now, command=command)


def _write(
    study: Study,
    one: Planned,
    position: int,
    status: OutcomeStatus,
    message: str,
    *,
    started_at: str,
    wall_seconds: float | None = None,
    returncode: int | None = None,
    command: Sequence[str] = (),
    stderr_tail: Sequence[str] = (),
) -> Outcome:
    outcome = Outcome(
        study=study.name,
        run_id=one.run.run_id,
        status=status,
        message=message,
        workload=one.config.workload,
        size=one.config.size,
        strategy=one.strategy,
        world_size=one.run.num_processes,
        seed=one.config.seed,
        global_batch_size=one.config.global_batch_size,
        round=one.run.round,
        position=position,
        started_at=started_at,
        wall_seconds=wall_seconds,
        returncode=returncode,
        command=list(command),
        stderr_tail=list(stderr_tail),
    )
    one.run_dir.mkdir(parents=True, exist_ok=True)
    files.write_json(one.run_dir / "outcome.json", outcome.model_dump(mode="json"))
    return outcome


# ---------------------------------------------------------------- the table


def table(runs: Iterable[Planned], outcomes: Iterable[Outcome]) -> str:
    """One row per run that has an outcome; what has no result says so where others have their loss."""
    rows = [ROW, *(_row(one, outcome) for one, outcome in zip(runs, outcomes, strict=False))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * width for width in widths])
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines)


def _row(one: Planned, outcome: Outcome) -> list[str]:
    start = [one.config.workload, one.strategy, str(one.run.num_processes)]
    if outcome.status not in ("ok", "crashed_after_result"):
        return [*start, outcome.status, "", "", "", outcome.message]
    facts = schema.read(one.run_dir)
    states = [rank.model_states for rank in facts.model_state_bytes or []]
    collectives = [collective.moved_bytes for collective in facts.collectives_per_step or []]
    seconds = facts.timing.median_seconds if facts.timing else None
    return [
        *start,
        f"{facts.final_loss:.4f}",
        f"{max(states) / 2**20:.2f}" if facts.model_state_bytes else "",
        f"{sum(collectives) / 2**20:.2f}" if facts.collectives_per_step is not None else "",
        "" if seconds is None else f"{seconds:.3f}",
        str(one.run_dir / "record.json") + ("" if outcome.status == "ok" else f" ({outcome.status})"),
    ]
