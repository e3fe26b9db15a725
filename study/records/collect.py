"""Which facts of finished runs are kept for good? Records, steps and outcomes, copied into one folder to commit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from study.errors import Refusal
from study.files import write_whole
from study.records import find as records
from study.records import schema
from study.records.schema import Record

WITH_RECORD = ("ok", "crashed_after_result")  # outcomes of runs that left a record


class Kept(NamedTuple):
    """What is kept of one run."""

    run_id: str
    record: Record | None  # None: the run left none that is a result
    files: dict[str, Path]  # name among collected files -> where it is; the record last

    @property
    def place(self) -> Path:
        """The file that says what became of the run."""
        return list(self.files.values())[-1]


def collect(runs: Path, folder: Path) -> int:
    """Copy what is kept of each run below `runs` into a folder; return how many runs there are.

    Files are named after the run id. A run that left no record is kept by its outcome. Raises Refusal as `find` and
    `put` do, before the first copy.
    """
    finished = find([runs])
    for line in put(finished, folder):
        print(line)
    return len({run.run_id for run in finished})


def find(folders: Iterable[Path]) -> list[Kept]:
    """Read what is kept of every run below the folders, in run directories and among collected files alike.

    An interrupted record is no result: it is left out, and a line says so. Raises Refusal where there is no run, where
    a file does not hold its schema, and where record, steps and outcome do not belong together.
    """
    folders = list(folders)
    runs = []
    for folder in folders:
        if not folder.is_dir():
            raise Refusal(f"{folder}: no such folder; pass a folder of run directories or of collected records")
        for files in _by_run(folder).values():
            kept = _read(files.get("record"), files.get("outcome"))
            if kept.files:
                runs.append(kept)
    if not runs:
        raise Refusal(f"{' '.join(map(str, folders))}: no finished run below; `zero-study run STUDY` makes some")
    return runs


def put(runs: Sequence[Kept], folder: Path) -> list[str]:
    """Write what is kept of runs into a folder, each file whole or not at all; say what became of each.

    While a run's record is not there, its other files there may be replaced: a run that was skipped, and now is not. A
    record is never replaced. Raises Refusal, before the first write, where what is there is of another run.
    """
    sources = distinct(runs)
    if folder.exists() and not folder.is_dir():
        raise Refusal(f"{folder}: not a folder; name another")
    for run in runs:
        record_there = folder / f"{run.run_id}.json"
        if not record_there.exists():
            continue
        if run.record is None:
            raise _differ(record_there, run.place)
        for name, source in run.files.items():
            if (folder / name).exists():
                _refuse_if_different(folder / name, source)
    folder.mkdir(parents=True, exist_ok=True)
    told = []
    for name, source in sources.items():
        target, content = folder / name, source.read_bytes()
        done = "copied"
        if target.exists():
            done = "kept" if target.read_bytes() == content else "replaced"
        if done != "kept":
            write_whole(target, content)
        told.append(f"{done} {target}")
    return told


def distinct(runs: Iterable[Kept]) -> dict[str, Path]:
    """The files of all runs by name. Raises Refusal where two runs of one name differ, or names only in their case."""
    files: dict[str, Path] = {}
    first: dict[str, Kept] = {}
    for run in runs:
        other = first.setdefault(run.run_id.lower(), run)
        if other.run_id != run.run_id:
            raise Refusal(
                f"{other.place} and {run.place}: two names on this disk, and one on others; rename a strategy"
            )
        if (other.record is None) != (run.record is None):
            raise _differ(other.place, run.place)
        for name, source in run.files.items():
            _refuse_if_different(files.setdefault(name, source), source)
    return files


def _by_run(folder: Path) -> dict[Path, dict[str, Path]]:
    """The records and outcomes below a folder, those of one run together."""
    by_run: dict[Path, dict[str, Path]] = {}
    for path in sorted(folder.rglob("*.json")):
        if path.name in ("record.json", "outcome.json"):
            by_run.setdefault(path.parent, {})[path.stem] = path
        elif path.name.endswith(".outcome.json"):
            by_run.setdefault(path.with_name(path.name.removesuffix(".outcome.json")), {})["outcome"] = path
        elif records.is_record(path):
            by_run.setdefault(path.with_suffix(""), {})["record"] = path
    return by_run


def _read(record_path: Path | None, outcome_path: Path | None) -> Kept:
    """Read one run's files and check that they belong together."""
    facts = None if record_path is None else schema.read(record_path)
    if facts is not None:
        schema.check_whole(record_path, facts)
    if facts is not None and facts.status in schema.CUT_OFF:
        print(f"left out {record_path}: {facts.status}, so no result")
        facts = None
    outcome = None if outcome_path is None else schema.read_outcome(outcome_path)
    run_id = next((read.run_id for read in (facts, outcome) if read is not None), "")
    files = {}
    if facts is not None:
        schema.check_config(record_path, facts)
    if facts is not None and facts.steps_sha256 is not None:
        files[f"{run_id}.steps.jsonl"] = schema.checked_steps(record_path, facts)
    if outcome is not None:
        if outcome.run_id != run_id:
            raise Refusal(f"{outcome_path}: run_id {outcome.run_id}, {record_path} has {run_id}; run it again")
        if outcome.status in WITH_RECORD and facts is None:
            raise Refusal(f"{outcome_path}: status {outcome.status}, but no record is beside it; run it again")
        files[f"{run_id}.outcome.json"] = outcome_path
    if facts is not None:
        files[f"{run_id}.json"] = record_path
    return Kept(run_id, facts, files)


def _refuse_if_different(first: Path, second: Path) -> None:
    if first.read_bytes() != second.read_bytes():
        raise _differ(first, second)


def _differ(first: Path, second: Path) -> Refusal:
    return Refusal(f"{first} and {second} differ; take another folder, or delete the one not wanted")
