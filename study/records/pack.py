"""Collect records in a folder to commit, or pack them into one file, which is checked when it is merged."""

from __future__ import annotations

import hashlib
import io
import stat
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from study.records import find as records
from study.records import schema
from study.records.find import RecordedRun
from study.records.schema import Record
from study.records.simulation import is_simulated
from zero_study import files
from zero_study.errors import Refusal, describe
from zero_study.verdict import Checked, NotChecked, Verdict

MANIFEST = "manifest.json"
FORMAT_VERSION = 2

# The time of every member, so that equal records make equal bytes. Times in zip files begin in 1980.
TIME = (1980, 1, 1, 0, 0, 0)
REGULAR_FILE = 0o100644 << 16

MOST_MEMBERS = 10_000  # three files of runs, the manifest, and results of benchmarks
MOST_BYTES = files.LARGEST_FILE  # uncompressed, because all of it is kept in memory; a thousand runs have 24 MiB


# ---------------------------------------------------------------- what is kept of runs


class Kept(NamedTuple):
    """The record, steps and outcome of one run, as lines of the files that collect many runs."""

    run_id: str
    record: Record | None  # None: the run has no record that is a result
    lines: dict[str, bytes]  # name of the collected file -> the run's line in it
    place: str  # name in messages of the file that tells how the run ended
    is_simulated: bool  # whether its GPUs were simulated
    has_digest: bool  # whether the record has a digest of its own content; those before 2026-11-23 have none


def collect(folders: Iterable[Path], folder: Path) -> Verdict:
    """Copy the records of all runs below the folders into one folder to commit. Return what was checked.

    A run without a record is kept as its outcome. A run that is already in the folder is replaced. Raises Refusal as
    `find` and `copy_records` do, before anything is written.
    """
    finished = find(folders)
    for message in copy_records(finished, folder, replace=True):
        print(message)
    return _checked(finished)


def _checked(runs: Iterable[Kept]) -> Verdict:
    """Return how many runs were read, and how many of their files have digests, with which they were compared."""
    each = distinct(runs)
    with_record = [run for run in each if run.record is not None]
    without_digest = sum(not run.has_digest for run in with_record)
    num_steps = sum(run.record.steps_sha256 is not None for run in with_record if run.record)
    without_record = len(each) - len(with_record)
    missing = []
    if without_digest:
        missing.append(NotChecked("the content of old records", f"{without_digest} of them have no digest"))
    if without_record:
        missing.append(NotChecked("the outcomes of runs without a record", f"{without_record} of them have no digest"))
    return Verdict.of(
        0,
        [
            Checked(len(each), "run", "compared with the schema"),
            Checked(len(with_record) - without_digest, "record", "compared with its digest"),
            Checked(num_steps, "list of steps", "compared with its digest", "lists of steps"),
        ],
        missing,
    )


def find(folders: Iterable[Path]) -> list[Kept]:
    """Return the record, steps and outcome of every run below the folders, from run directories and collected files.

    The record of an interrupted run is not a result. It is left out, and a message says so. Raises Refusal as
    `records.find_runs` does, if there is no finished run, or if the record, steps and outcome do not belong together.
    """
    folders = list(folders)
    runs = [kept for run in records.find_runs(folders) if (kept := _keep(run)).lines]
    if not runs:
        raise Refusal(
            f"{' '.join(map(str, folders))}: there is no finished run in this folder or below it. `zero-study run "
            "STUDY` makes runs."
        )
    return runs


def copy_records(runs: Sequence[Kept], folder: Path, replace: bool) -> list[str]:
    """Write runs to a folder of collected records, and return a message for each run.

    The lines of a run replace those that are there. The lines of other runs do not change. Each file is written
    completely or not at all.

    Raises Refusal, before anything is written, if a run without a record would replace a record, or if the GPUs of a
    run were simulated. Also raises Refusal if a different record would be replaced and `replace` is False.
    """
    new_runs = distinct(runs)
    for run in new_runs:
        if run.is_simulated:
            raise _simulated(run.place)
    if folder.exists() and not folder.is_dir():
        raise Refusal(f"{folder}: this is not a folder. Name another one.")
    lines = {name: records.read_lines(folder / name) for name in records.NAMES}
    messages, changed_files = [], set()
    for run in new_runs:
        before = {name: lines[name][run.run_id] for name in records.NAMES if run.run_id in lines[name]}
        after = _lines_after(run, before, folder, replace)
        messages.append(f"{'kept' if after == before else 'replaced' if before else 'copied'} {run.run_id}")
        for name in records.NAMES:
            if before.get(name) != after.get(name):
                changed_files.add(name)
                lines[name].pop(run.run_id, None)
                if name in after:
                    lines[name][run.run_id] = after[name]
    folder.mkdir(parents=True, exist_ok=True)
    for name in records.NAMES:
        if name in changed_files:
            records.write_lines(folder / name, lines[name])
    return messages


def _lines_after(run: Kept, before: dict[str, bytes], folder: Path, replace: bool) -> dict[str, bytes]:
    """Return the lines of a run after the merge, by file.

    Raises Refusal if the run must not replace the lines that are there.
    """
    if records.RECORDS not in before:
        return run.lines
    differs = any(before.get(name, line) != line for name, line in run.lines.items())
    if run.record is None or (differs and not replace):
        raise _differ(f"{folder / records.RECORDS}, {run.run_id}", run.place)
    has_same_record = before[records.RECORDS] == run.lines[records.RECORDS]
    return {**before, **run.lines} if has_same_record else run.lines


def distinct(runs: Iterable[Kept]) -> list[Kept]:
    """Merge the copies of each run into one. Raises Refusal if two runs with the same id differ."""
    by_id: dict[str, Kept] = {}
    for run in runs:
        first = by_id.setdefault(run.run_id, run)
        differs = any(first.lines.get(name, line) != line for name, line in run.lines.items())
        if differs or (first.record is None) != (run.record is None):
            raise _differ(first.place, run.place)
        first.lines.update(run.lines)
        by_id[run.run_id] = first._replace(is_simulated=first.is_simulated or run.is_simulated)
    return list(by_id.values())


def _keep(run: RecordedRun) -> Kept:
    """Return the lines to keep of a run, after checking that its parts belong together."""
    file, outcome = run.record, run.outcome
    is_simulated = bool(file and file.record.is_simulated) or bool(outcome and outcome.simulated_gpus)
    if file and file.record.status in schema.CUT_OFF:
        print(f"{file.where} was left out, because the run has no result (its status is {file.record.status})")
        file = None
    lines = {}
    run_id = file.record.run_id if file else outcome.run_id if outcome else ""
    if file and file.steps is not None and file.record.steps_sha256 is not None:
        lines[records.STEPS] = records.line_of_steps(run_id, file.steps)
    if outcome:
        if outcome.status == "ok" and file is None:
            raise Refusal(f"{run.place}: the outcome is ok, but the record is missing. Run it again.")
        lines[records.OUTCOMES] = records.line_of(run.contents[records.OUTCOMES])
    if file:
        lines[records.RECORDS] = records.line_of(run.contents[records.RECORDS])
    has_digest = schema.DIGEST in run.contents.get(records.RECORDS, {})
    return Kept(run_id, file.record if file else None, lines, run.place, is_simulated, has_digest)


def _simulated(place: str | Path) -> Refusal:
    return Refusal(
        f"{place}: the GPUs of this run were simulated, so it measured nothing, and is not kept with "
        "measurements. Use the records of real GPUs."
    )


def _differ(first: str, second: str) -> Refusal:
    return Refusal(f"{first} and {second} are different records of one run. Use another folder, or remove one of them.")


# ---------------------------------------------------------------- one file


class Manifest(BaseModel):
    """The contents of a pack, and the origin of its records."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format_version: int
    schema_version: int  # of the records
    box: str
    num_runs: int
    git_commits: list[str]  # commits of the study's code that made the records; -dirty: with changes
    libraries: dict[str, list[str]]  # name -> versions
    sha256: dict[str, str]  # name of every other member -> digest


def pack(folders: Sequence[Path], file: Path, replace: bool = False) -> Verdict:
    """Write the records of all runs below the folders to one zip file. Return what was checked.

    Results of benchmarks in the folders are included. Equal records make equal bytes.

    Raises Refusal as `find` does. Also raises Refusal if two runs or results with the same name differ, if the records
    come from several machines, or if the file exists and `replace` is False.
    """
    if file.exists() and not replace:
        raise Refusal(f"{file}: the file already exists. Use another name, or delete the file.")
    runs = find(folders)
    origin = _origin(runs, folders)
    results = _results(folders)
    content = dict(sorted((_files_of(runs) | results).items()))
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        schema_version=schema.SCHEMA_VERSION,
        sha256={name: hashlib.sha256(member).hexdigest() for name, member in content.items()},
        **origin,
    )
    members = {MANIFEST: (manifest.model_dump_json(indent=1) + "\n").encode(), **content}
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, member in members.items():
            entry = zipfile.ZipInfo(name, TIME)
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, REGULAR_FILE
            archive.writestr(entry, member)
    file.parent.mkdir(parents=True, exist_ok=True)
    files.write_whole(file, packed.getvalue())
    print(f"Packed {manifest.num_runs} runs on {manifest.box} into {file}")
    return _checked(runs)


def merge(file: Path, folder: Path) -> Verdict:
    """Copy the runs of a pack to a folder of collected records, as `copy_records` does. Return what was checked.

    The result of a benchmark replaces an earlier one with the same name.

    Raises Refusal, before anything is written, in these cases:
    * The file is not a pack, is too large, or has another version.
    * The members do not agree with the manifest, or the records are damaged.
    * A run is already in the folder and differs.
    * The GPUs of a run or of a benchmark were simulated.
    """
    manifest, members = _read(file)
    with tempfile.TemporaryDirectory() as unpacked:
        for name, member in members.items():
            Path(unpacked, name).write_bytes(member)
        try:
            runs = find([Path(unpacked)])
            results = _results([Path(unpacked)])
            for name, text in results.items():
                machine = files.parse_json(text).get("machine") or {}
                if not isinstance(machine, dict) or not isinstance(machine.get("environment", {}), dict):
                    raise Refusal(
                        f"{file}, {name}: the description of a result's machine is not one that "
                        "`zero-study` writes. Pack the records again"
                    )
                if is_simulated(machine):
                    raise _simulated(f"{file}, {name}")
            merged = _files_of(runs)
            for name in sorted(set(members) - set(results)):
                if members[name] != merged.get(name):
                    raise Refusal(
                        f"{file}: {name} is not a file of finished runs as `zero-study pack` writes it. Pack the"
                        " records again"
                    )
            for key, value in _origin(runs, [Path(unpacked)]).items():
                if getattr(manifest, key) != value:
                    says = f"its manifest says {key} {getattr(manifest, key)}"
                    raise Refusal(f"{file}: {says}, but its records say {value}. Pack the records again")
            messages = copy_records(runs, folder, replace=False)
        except Refusal as refusal:
            raise Refusal(str(refusal).replace(unpacked, str(file))) from None
    for name in results:
        files.write_whole(folder / name, members[name])
    print("\n".join([*messages, f"Merged {manifest.num_runs} runs on {manifest.box} into {folder}"]))
    checked = _checked(runs)
    of_files = Checked(len(members), "file", "compared with the manifest")
    return Verdict.of(0, [of_files, *checked.checked], checked.not_checked)


def _files_of(runs: Sequence[Kept]) -> dict[str, bytes]:
    """Return the files of a folder that collects only these runs: name -> content."""
    distinct_runs = distinct(runs)
    lines = {
        name: {run.run_id: run.lines[name] for run in distinct_runs if name in run.lines} for name in records.NAMES
    }
    return {name: records.join_lines(of_runs) for name, of_runs in lines.items() if of_runs}


def _results(folders: Sequence[Path]) -> dict[str, bytes]:
    """Return the results of benchmarks below the folders: name -> content.

    Raises Refusal if two results with the same name differ.
    """
    results_by_name: dict[str, tuple[Path, bytes]] = {}
    for path in (path for folder in folders for path in sorted(folder.rglob("*.json")) if path.is_file()):
        with files.reading(path, "JSON"):
            text = files.read_whole(path)
        if b"benchmark" not in text:
            continue
        content = files.load(path, "JSON")
        if isinstance(content, dict) and "benchmark" in content:  # `machine.benchmark_header` writes this key
            files.check_name(path.stem, f"{path}: a result's name")
            first_path, first_text = results_by_name.setdefault(path.name, (path, text))
            if first_text != text:
                raise Refusal(
                    f"{first_path} and {path} are different results with the same name. Pack them separately."
                )
    return {name: text for name, (_, text) in results_by_name.items()}


def _origin(runs: Sequence[Kept], folders: Sequence[Path]) -> dict[str, Any]:
    """Return the fields of a manifest that describe the origin of the runs, from their records.

    Raises Refusal unless all records come from one machine.
    """
    run_records = [run.record for run in runs if run.record is not None]
    boxes = sorted({box for record in run_records for box in record.boxes})
    if len(boxes) != 1:
        problem = (
            f"there are records of {len(boxes)} machines ({'; '.join(boxes)})"
            if boxes
            else "there is no record, so the machine is unknown"
        )
        raise Refusal(f"{' '.join(map(str, folders))}: {problem}. Pack the folders of one machine at a time.")
    libraries: dict[str, set[str]] = {}
    for record in run_records:
        for name, version in record.machine.get("libraries", {}).items():
            if version is not None:
                libraries.setdefault(name, set()).add(version)
    return {
        "num_runs": len({run.run_id for run in runs}),
        "box": boxes[0],
        "git_commits": sorted({commit for record in run_records for commit in record.commits}),
        "libraries": {name: sorted(used) for name, used in sorted(libraries.items())},
    }


def _read(file: Path) -> tuple[Manifest, dict[str, bytes]]:
    """Return the manifest and the other members of a pack, after checking the members against the manifest."""
    try:
        with zipfile.ZipFile(io.BytesIO(files.read_whole(file))) as archive:
            entries = archive.infolist()
            if len(entries) > MOST_MEMBERS:
                raise Refusal(
                    f"{file}: the file has {len(entries):,} members, but a pack has at most "
                    f"{MOST_MEMBERS:,}. Name a file that `zero-study pack` wrote"
                )
            for entry in entries:
                _check_member(file, entry)
            num_bytes = sum(entry.file_size for entry in entries)
            if num_bytes > MOST_BYTES:
                raise Refusal(
                    f"{file}: the content has {num_bytes:,} bytes, but that of a pack has at most "
                    f"{MOST_BYTES:,}. Name a file that `zero-study pack` wrote"
                )
            # zipfile reads no more of a member than its entry declares.
            members = {entry.filename: archive.read(entry) for entry in entries}
            if len(members) != len(entries):
                raise Refusal(
                    f"{file}: two members have the same name. `zero-study pack` does not write such a file, so copy it"
                    " from its machine again"
                )
    except Refusal:
        raise
    except FileNotFoundError:
        raise Refusal(f"{file}: this file does not exist. Name a file that `zero-study pack` wrote.") from None
    # A damaged file can raise any of these errors, for instance for a wrong checksum, a broken stream, or flags that
    # mean encryption or another compression method.
    except (OSError, EOFError, RuntimeError, ValueError, struct.error, zipfile.BadZipFile, zlib.error) as error:
        raise Refusal(f"{file}: cannot be read as a pack ({error}). Copy the file from its machine again.") from None
    manifest = _manifest(file, members.pop(MANIFEST, b""))
    for name in sorted(set(members) ^ set(manifest.sha256)):
        state = "missing" if name in manifest.sha256 else "not in its manifest"
        raise Refusal(f"{file}: {name} is {state}. Copy the pack from its machine again.")
    for name, member in members.items():
        if hashlib.sha256(member).hexdigest() != manifest.sha256[name]:
            raise Refusal(
                f"{file}: {name} was changed, because its digest is not that in the manifest. Copy the "
                "pack from its machine again."
            )
    return manifest, members


def _check_member(file: Path, entry: zipfile.ZipInfo) -> None:
    """Raise Refusal unless a member of a pack is a regular file with a name that `zero-study pack` gives."""
    name = entry.filename
    if name not in (MANIFEST, *records.NAMES):
        files.check_name(name.removesuffix(".json"), f"{file}: member {name!r}: the name")
    kind = stat.S_IFMT(entry.external_attr >> 16)
    if kind not in (0, stat.S_IFREG):  # 0: written by a system without such attributes
        raise Refusal(f"{file}: {name} is not a regular file, which `zero-study pack` never writes. Name another pack")


def _manifest(file: Path, text: bytes) -> Manifest:
    try:
        content = files.parse_json(text)
    except ValueError:
        content = None
    if not isinstance(content, dict) or "format_version" not in content:
        raise Refusal(
            f"{file}: this file is not a pack, because its {MANIFEST} has no format_version. Name a file "
            "that `zero-study pack` wrote"
        )
    for key, fits in (("format_version", FORMAT_VERSION), ("schema_version", schema.SCHEMA_VERSION)):
        if content.get(key) != fits:
            raise Refusal(
                f"{file}: its {key} is {content.get(key)}, but this version of zero-study reads {fits}. "
                "Pack and merge with the same version."
            )
    try:
        return Manifest.model_validate(content, strict=True)
    except ValidationError as error:
        raise Refusal(describe(error, f"{file}: {MANIFEST}")) from None
