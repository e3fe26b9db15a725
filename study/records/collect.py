"""Which facts of finished runs are kept for good? Records, steps and outcomes, a line each, in one folder to commit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from study.errors import Refusal
from study.files import write_whole
from study.records import find as records
from study.records import lines, schema
from study.records.find import RecordedRun
from study.records.schema import Record

WITH_RECORD = ("ok", "crashed_after_result")  # outcomes of runs that left a record


class Kept(NamedTuple):
    """What is kept of one run."""

    run_id: str
    record: Record | None  # None: the run left none that is a result
    lines: dict[str, bytes]  # name among collected files -> the run's line there
    place: str  # of the file that says what became of the run


def collect(runs: Path, folder: Path) -> int:
    """Take what is kept of each run below `runs` into a folder; return how many runs there are.

    A run that left no record is kept by its outcome, and one that was made again takes the place of what is there.
    Raises Refusal as `find` and `put` do, before the first write.
    """
    finished = find([runs])
    for told in put(finished, folder, replace=True):
        print(told)
    return len({run.run_id for run in finished})


def find(folders: Iterable[Path]) -> list[Kept]:
    """Read what is kept of every run below the folders, in run directories and among collected lines alike.

    An interrupted record is no result: it is left out, and a line says so. Raises Refusal as `records.find_runs` does,
    where there is no finished run, and where record, steps and outcome do not belong together.
    """
    folders = list(folders)
    runs = [kept for run in records.find_runs(folders) if (kept := _keep(run)).lines]
    if not runs:
        raise Refusal(f"{' '.join(map(str, folders))}: no finished run below; `zero-study run STUDY` makes some")
    return runs


def put(runs: Sequence[Kept], folder: Path, replace: bool) -> list[str]:
    """Write what is kept of runs into a folder, each file whole or not at all; say what became of each run.

    A run's lines replace those that are there, and the lines of other runs stay as they are. Raises Refusal, before the
    first write, where a record would give way to a run without one or, unless told to replace, to another record.
    """
    found = distinct(runs)
    if folder.exists() and not folder.is_dir():
        raise Refusal(f"{folder}: not a folder; name another")
    held = {name: lines.read(folder / name) for name in lines.NAMES}
    told, changed = [], set()
    for run in found:
        before = {name: held[name][run.run_id] for name in lines.NAMES if run.run_id in held[name]}
        if lines.RECORDS in before:
            differs = any(before.get(name, line) != line for name, line in run.lines.items())
            if run.record is None or (differs and not replace):
                raise _differ(f"{folder / lines.RECORDS}, {run.run_id}", run.place)
        is_same = lines.RECORDS in before and before[lines.RECORDS] == run.lines[lines.RECORDS]
        after = {**before, **run.lines} if is_same else run.lines
        told.append(f"{'kept' if after == before else 'replaced' if before else 'copied'} {run.run_id}")
        for name in lines.NAMES:
            if before.get(name) != after.get(name):
                changed.add(name)
                held[name].pop(run.run_id, None)
                held[name] |= {run.run_id: after[name]} if name in after else {}
    folder.mkdir(parents=True, exist_ok=True)
    for name in lines.NAMES:
        if name in changed:
            write_whole(folder / name, lines.join(held[name]))
    return told


def distinct(runs: Iterable[Kept]) -> list[Kept]:
    """What is kept of each run, copies taken together. Raises Refusal where two runs of one name differ."""
    by_id: dict[str, Kept] = {}
    for run in runs:
        other = by_id.setdefault(run.run_id, run)
        differs = any(other.lines.get(name, line) != line for name, line in run.lines.items())
        if differs or (other.record is None) != (run.record is None):
            raise _differ(other.place, run.place)
        other.lines.update(run.lines)
    return list(by_id.values())


def _keep(run: RecordedRun) -> Kept:
    """What is kept of a run, once its parts belong together."""
    file, outcome = run.record, run.outcome
    if file and file.record.status in schema.CUT_OFF:
        print(f"left out {file.where}: {file.record.status}, so no result")
        file = None
    kept = {}
    run_id = file.record.run_id if file else outcome.run_id if outcome else ""
    if file and file.steps is not None and file.record.steps_sha256 is not None:
        kept[lines.STEPS] = lines.line_of_steps(run_id, file.steps)
    if outcome:
        if outcome.status in WITH_RECORD and file is None:
            raise Refusal(f"{run.place}: outcome {outcome.status}, but no record is beside it; run it again")
        kept[lines.OUTCOMES] = lines.line_of(run.contents[lines.OUTCOMES])
    if file:
        kept[lines.RECORDS] = lines.line_of(run.contents[lines.RECORDS])
    return Kept(run_id, file.record if file else None, kept, run.place)


def _differ(first: str, second: str) -> Refusal:
    return Refusal(f"{first} and {second} differ; take another folder, or take away the one not wanted")
