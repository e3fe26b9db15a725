"""Find the records of runs below folders, and check them while they are read.

A run directory has separate files for the record, the steps and the outcome of one run. A folder that is committed
collects many runs in three files: records.jsonl, steps.jsonl and outcomes.jsonl. Each run has one line in each of them,
which begins with the run's id. These files may be compressed (records.jsonl.gz).
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from study.records import schema
from study.records.schema import Outcome, Record
from zero_study import files
from zero_study.errors import Refusal
from zero_study.strategy import shipped

RECORDS, STEPS, OUTCOMES = "records.jsonl", "steps.jsonl", "outcomes.jsonl"
NAMES = (STEPS, OUTCOMES, RECORDS)  # the order in which they are written: records last, as a run itself does

# The reader of the line checks whether the name is valid.
_START = re.compile(rb'\{"run_id": "([ !#-\[\]-~]{1,256})", ')

_CALLED = {RECORDS: "a record", OUTCOMES: "an outcome"}
COMPRESSED = ".gz"
# The files that `find_runs` searches for.
_OF_RUNS = {"record.json", "outcome.json", *_CALLED, *(name + COMPRESSED for name in _CALLED)}


class RecordFile(NamedTuple):
    """The record of a run, together with its steps."""

    path: Path  # record.json, or the records.jsonl with the line of the record
    record: Record
    steps: bytes | None  # content of steps.jsonl as the run wrote it; None: there is no such file

    @property
    def where(self) -> str:
        """The name of the record for messages: its path, and the run's id if the file holds several runs."""
        return self._shown(self.path)

    @property
    def steps_where(self) -> str:
        return self._shown(self.path.with_name("steps.jsonl"))

    def _shown(self, path: Path) -> str:
        return _where(path, self.record.run_id) if self.path.name == RECORDS else str(path)


class RecordedRun(NamedTuple):
    """Everything that is recorded about one run: its record, the outcome that the runner wrote, or both."""

    record: RecordFile | None
    outcome: Outcome | None
    folder: Path  # the folder with the study's run directories or collected records
    place: str  # name in messages of the file that tells how the run ended
    contents: dict[str, dict[str, Any]]  # name of the collected file -> content of the record or the outcome

    @property
    def identity(self) -> tuple[Any, ...]:
        """A key by which copies of one run are recognized."""
        if self.record:
            return identity(self.record.record)
        assert self.outcome is not None
        return self.outcome.run_id, self.outcome.started_at


def find(folders: Iterable[Path]) -> list[RecordFile]:
    """Read every record below the folders, in the order of their paths. Copies of one run count once.

    Raises Refusal as `find_runs` does, and if there is no record.
    """
    folders = list(folders)
    records: dict[tuple[str, str, float], RecordFile] = {}
    for run in find_runs(folders):
        if run.record:
            records.setdefault(identity(run.record.record), run.record)
    if not records:
        raise _none_below(folders)
    return list(records.values())


def find_runs(folders: Iterable[Path]) -> Iterator[RecordedRun]:
    """Yield every run below the folders, with its record and its outcome. Copies of one run are yielded separately.

    The runs of a folder always come in the same order, whether they are in run directories or collected. So a reader
    who takes the first of several equal runs always takes the same one.

    Raises Refusal in these cases:
    * A record or an outcome does not follow the schema. The message names the file and the key.
    * An outcome lies next to the record of another run.
    * A file that belongs to a record is missing, or was changed.
    * A folder does not exist, or there is no run.
    """
    folders = list(folders)
    empty = True
    for folder in folders:
        if not folder.is_dir():
            raise Refusal(
                f"{folder}: this folder does not exist. Name a folder of run directories or of collected records."
            )
        places = sorted({path.parent for path in folder.rglob("*.json*") if path.name in _OF_RUNS})
        runs = [run for place in places for run in (read_run(place), *_collected(place)) if run]
        empty = empty and not runs
        yield from sorted(runs, key=lambda run: (run.folder, order_of(run.identity[0])))
    if empty:
        raise _none_below(folders)


def has_runs(folders: Iterable[Path]) -> bool:
    """Return whether there is a record or an outcome below these folders."""
    return any(path.name in _OF_RUNS for folder in folders for path in folder.rglob("*"))


def identity(record: Record) -> tuple[str, str, float]:
    """Return a key that identifies a run: its id, its start and its duration.

    The duration is needed because two machines may start runs with the same id in the same second.
    """
    return record.run_id, record.started_at, record.wall_seconds


def read_run(run_dir: Path) -> RecordedRun | None:
    """Read the run in a run directory, as `find_runs` does. None if the folder has no record and no outcome."""
    at = {RECORDS: run_dir / "record.json", OUTCOMES: run_dir / "outcome.json"}
    contents = {name: files.load(path, _CALLED[name]) for name, path in at.items() if path.exists()}
    if not contents:
        return None
    steps, config = (_content(run_dir / name) for name in ("steps.jsonl", "config.json"))
    run = _checked(contents, {name: str(path) for name, path in at.items()}, at[RECORDS], steps)
    if run.record:
        _check_tied(run_dir / "config.json", config, "config_sha256", run.record.record, run.record.where)
    return run._replace(folder=run_dir.parent)


def _check_tied(place: Path | str, content: bytes | None, key: str, record: Record, its_place: str) -> None:
    """Raise Refusal if a file that belongs to a record is missing, or was changed.

    `key` is the field of the record that holds the file's digest. A record with status ok must have the file even if it
    is too old to hold the digest.
    """
    digest = getattr(record, key)
    if content is None and (digest is not None or record.status == "ok"):
        reason = (
            f"{its_place} says that the run is ok" if record.status == "ok" else f"{its_place} has its digest ({key})"
        )
        raise Refusal(f"{place}: the file is missing, although {reason}. Restore the file, or repeat the run.")
    if content is not None and digest not in (None, hashlib.sha256(content).hexdigest()):
        raise Refusal(
            f"{place}: the file was changed: its digest differs from {key} in {its_place}. Restore the "
            "file, or repeat the run."
        )


def _content(path: Path) -> bytes | None:
    with files.reading(path, "what a run wrote"):
        return files.read_whole(path) if path.exists() else None


def _collected(folder: Path) -> Iterator[RecordedRun]:
    """Yield the runs that have a line in a folder's collected files, in the order of their ids."""
    lines = {name: read_lines(folder / name) for name in _CALLED}
    if not any(lines.values()):
        return
    all_steps = read_lines(folder / STEPS)
    for run_id in sorted(lines[RECORDS].keys() | lines[OUTCOMES].keys(), key=order_of):
        places = {name: _where(folder / name, run_id) for name in _CALLED}
        contents = {}
        for name, description in _CALLED.items():
            if run_id in lines[name]:
                with files.reading(places[name], description):
                    contents[name] = files.parse_json(lines[name][run_id])
        steps = steps_in(run_id, all_steps[run_id]) if run_id in all_steps else None
        yield _checked(contents, places, folder / RECORDS, steps)


def _checked(
    contents: dict[str, dict[str, Any]], places: dict[str, str], path: Path, steps: bytes | None
) -> RecordedRun:
    """Return a run from the content of its files, after checking their schemas and that they belong to one run."""
    record = outcome = None
    if RECORDS in contents:
        record = RecordFile(path, _named(schema.parse(places[RECORDS], contents[RECORDS], Record)), steps)
        _check_tied(record.steps_where, steps, "steps_sha256", record.record, record.where)
    if OUTCOMES in contents:
        outcome = schema.parse(places[OUTCOMES], contents[OUTCOMES], Outcome)
        if record and outcome.run_id != record.record.run_id:
            neighbor = f"the record in the same folder is {record.record.run_id!r}"
            raise Refusal(
                f"{places[OUTCOMES]}: this is the outcome of {outcome.run_id!r}, but {neighbor}. Remove one of them"
            )
    place = places[RECORDS if record else OUTCOMES]
    return RecordedRun(record, outcome, path.parent, place, contents)


def _named(record: Record) -> Record:
    """Return the record with the name that its strategy file has today.

    The name is found by the content of the file. Older records do not hold the file, and keep their name.
    """
    name = shipped.name_of(record.strategy, record.strategy_file) if record.strategy_file else record.strategy
    return record.model_copy(update={"strategy": name})


def _where(path: Path, run_id: str) -> str:
    return f"{path}, {run_id}"


def _none_below(folders: Iterable[Path]) -> Refusal:
    return Refusal(
        f"{' '.join(map(str, folders))}: there is no record in this folder or below it. Name another "
        "folder, or make records with `zero-study run STUDY`."
    )


# ---------------------------------------------------------------- lines


def read_lines(path: Path) -> dict[str, bytes]:
    """Read a file that has one run per line, and return its lines by run id. Empty if the file does not exist.

    Only the id of a line is parsed. Raises Refusal if a line has no id, or if two lines have the same id.
    """
    packed = path.with_name(path.name + COMPRESSED)
    if packed.exists() and path.exists():
        raise Refusal(f"{path}: {packed.name} is in the same folder and contains the same runs. Remove one of them.")
    if not packed.exists() and not path.exists():
        return {}
    with files.reading(packed if packed.exists() else path, "lines of runs"):
        content = files.decompressed(files.read_whole(packed)) if packed.exists() else files.read_whole(path)
    text = content.removesuffix(b"\n")
    lines: dict[str, bytes] = {}
    for number, line in enumerate(text.split(b"\n") if text else (), 1):
        start = _START.match(line)
        if start is None:
            raise Refusal(
                f"{path}: line {number} does not begin with a run_id. Restore the line, or collect its run again."
            )
        run_id = start[1].decode()
        if run_id in lines:
            raise Refusal(
                f"{path}: line {number} is a duplicate, because an earlier line has the same run_id {run_id}. Remove "
                "one of them."
            )
        lines[run_id] = line
    return lines


def write_lines(path: Path, lines: Mapping[str, bytes]) -> None:
    """Replace a compressed file by one with these lines. Equal lines make equal bytes."""
    packed = gzip.compress(join_lines(lines), mtime=0)
    files.write_whole(path.with_name(path.name + COMPRESSED), packed)
    path.unlink(missing_ok=True)  # the uncompressed file of an earlier version


def join_lines(lines: Mapping[str, bytes]) -> bytes:
    """Return the content of a file with these lines."""
    return b"".join(lines[run_id] + b"\n" for run_id in sorted(lines, key=order_of))


def order_of(run_id: str) -> str:
    """Return the sort key of a run id: repeats and variations (NAME-repeat1) come before the run itself (NAME).

    This is the order in which the files of single runs were listed. It is kept so that `compare`, which takes the first
    of several equal runs, still takes the same one.
    """
    return f"{run_id}."


def line_of(content: dict[str, Any]) -> bytes:
    """Return a record or an outcome as one line of a file of many runs. It keeps every key."""
    return json.dumps({"run_id": content["run_id"], **content}).encode()


def line_of_steps(run_id: str, steps: bytes) -> bytes:
    """Return the steps of a run as one line of a file of many runs.

    Raises Refusal if the original bytes could not be restored from the line.
    """
    line = b"%s%s]}" % (_start_of_steps(run_id), b", ".join(steps.split(b"\n")[:-1]))
    if steps_in(run_id, line) != steps:
        raise Refusal(f"{run_id}: its steps.jsonl does not have one step per line. Run it again.")
    return line


def steps_in(run_id: str, line: bytes) -> bytes:
    """Return the exact bytes of a run's steps.jsonl from its line in a file of many runs.

    This works because steps have no nested objects, so that the boundary between two steps is unambiguous.
    """
    steps = line.removeprefix(_start_of_steps(run_id)).removesuffix(b"]}")
    return steps.replace(b"}, {", b"}\n{") + b"\n" if steps else b""


def _start_of_steps(run_id: str) -> bytes:
    return f'{{"run_id": "{run_id}", "steps": ['.encode()
