"""Which records lie below these folders? Run directories and folders of collected records alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from study import files
from study.errors import Refusal
from study.records import schema
from study.records.schema import Outcome, Record

UNKNOWN_BOX = "unknown box"
IN_RUN = ("record.json", "outcome.json", "steps.jsonl")  # that a run directory has, and no other folder


class RecordFile(NamedTuple):
    path: Path
    record: Record


class RecordedRun(NamedTuple):
    """What is known of one run: its record, what the runner saw of it, or both."""

    record: RecordFile | None
    outcome: Outcome | None
    folder: Path  # the one that holds the study's runs, or its collected records

    @property
    def identity(self) -> tuple:
        """Equal for copies of one run."""
        return identity(self.record.record) if self.record else (self.outcome.run_id, self.outcome.started_at)


def find(folders: Iterable[Path]) -> list[RecordFile]:
    """Read every record below the folders, in the order of their paths; a run that is found twice counts once.

    A record is a record.json, and any other JSON file that says it is one by a schema_version or a run_id; an outcome
    is none. Raises Refusal for one that does not hold the schema, naming file and key, and where there is none.
    """
    folders = list(folders)
    records: dict[tuple[str, str, float], RecordFile] = {}
    for path in _json_files(folders):
        if not _is_outcome(path) and (read := _record_at(path)):
            records.setdefault(identity(read), RecordFile(path, read))
    if not records:
        raise Refusal(f"{' '.join(map(str, folders))}: no record below; `zero-study run STUDY` makes some")
    return list(records.values())


def find_runs(folders: Iterable[Path]) -> Iterator[RecordedRun]:
    """Read every record and every outcome below the folders; what lies together is one run. Copies are not told apart.

    Raises Refusal as `find` does, for outcomes too, and where an outcome lies beside the record of another run.
    """
    folders = list(folders)
    empty = True
    for path in _json_files(folders):
        folder = path.parent.parent if path.name in ("record.json", "outcome.json") else path.parent
        if _is_outcome(path):
            if not _record_beside(path).exists():
                empty = False
                yield RecordedRun(None, schema.read_outcome(path), folder)
        elif read := _record_at(path):
            empty = False
            yield RecordedRun(RecordFile(path, read), _outcome_beside(path, read), folder)
    if empty:
        raise Refusal(f"{' '.join(map(str, folders))}: no record below; `zero-study run STUDY` makes some")


def _json_files(folders: Iterable[Path]) -> Iterator[Path]:
    for folder in folders:
        if not folder.is_dir():
            raise Refusal(f"{folder}: no such folder; pass a folder of run directories or of collected records")
        yield from sorted(folder.rglob("*.json"))


def identity(read: Record) -> tuple[str, str, float]:
    """Two boxes may start runs of one name in the same second; they do not take the same time."""
    return read.run_id, read.started_at, read.wall_seconds


def _is_outcome(path: Path) -> bool:
    return path.name == "outcome.json" or path.name.endswith(".outcome.json")


def _record_beside(outcome: Path) -> Path:
    named = outcome.name.removesuffix(".outcome.json") + ".json"
    return outcome.with_name("record.json" if outcome.name == "outcome.json" else named)


def _outcome_beside(path: Path, read: Record) -> Outcome | None:
    """The outcome beside a record; None where there is none."""
    beside = path.with_name("outcome.json" if path.name == "record.json" else f"{path.stem}.outcome.json")
    if not beside.exists():
        return None
    outcome = schema.read_outcome(beside)
    if outcome.run_id != read.run_id:
        raise Refusal(f"{beside}: run_id {outcome.run_id!r}, the record beside it is {read.run_id!r}; take one away")
    return outcome


def device_of(read: Record) -> str:
    """Return "cuda" or "cpu": what the run trained on, or would have."""
    return read.proof.device if read.proof else "cuda" if read.machine.get("gpus") else "cpu"


def box_of(read: Record) -> str:
    """Name the hardware of a run: "8 x NVIDIA H200", or the processor and its cores."""
    machine = read.machine
    if device_of(read) == "cpu":
        cores = machine.get("num_cores")
        return f"{machine.get('cpu') or 'unknown CPU'}, {'unknown' if cores is None else cores} cores"
    names = Counter(gpu["name"] for gpu in machine.get("gpus", []))
    return " + ".join(f"{count} x {name}" for name, count in sorted(names.items())) or UNKNOWN_BOX


def is_record(path: Path) -> bool:
    """Say whether a JSON file is a record: a record.json, or one that says so by a schema_version or a run_id."""
    return _content(path) is not None


def _record_at(path: Path) -> Record | None:
    """The record in a JSON file, None where that is another file."""
    content = _content(path)
    if content is None:
        return None
    read = schema.parse(path, content, Record)
    schema.check_whole(path, read)
    schema.check_config(path, read)
    return read


def _content(path: Path) -> dict[str, Any] | None:
    """What a record's file holds, before it is checked; None for another file."""
    if path.name == "record.json":
        return files.load(path, "a record")
    # Another file of a run: a checkpoint's manifest, which names the run, or a tokenizer's, some folders below it.
    if any((folder / name).exists() for folder in path.parents[:4] for name in IN_RUN):
        return None
    content = files.load(path, "JSON")
    says_so = isinstance(content, dict) and not {"schema_version", "run_id"}.isdisjoint(content)
    return content if says_so and content.get("status") != "predicted" else None  # no run stands behind a prediction
