"""How do one box's records get to another machine? In one file that says what it holds, checked when it arrives."""

from __future__ import annotations

import hashlib
import io
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from study import files
from study.errors import Refusal, describe
from study.records import collect, lines, schema
from study.records import find as records

MANIFEST = "manifest.json"
FORMAT_VERSION = 2

# Of every member, so that equal records make equal bytes. 1980 is where zip's time begins.
TIME = (1980, 1, 1, 0, 0, 0)
REGULAR_FILE = 0o100644 << 16

# Of a file before it is read: three files of runs, and the results of benchmarks; all of it is held in memory.
MOST_MEMBERS = 1_000
MOST_BYTES = files.LARGEST_FILE  # uncompressed; a thousand runs have 24 MiB


class Manifest(BaseModel):
    """What a pack holds, and what its records say of where they come from."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format_version: int
    schema_version: int  # of the records
    box: str
    num_runs: int
    git_commits: list[str]  # of the study's code that made them; -dirty: with changes
    libraries: dict[str, list[str]]  # name -> versions
    sha256: dict[str, str]  # name of every other member -> digest


def pack(folders: Sequence[Path], file: Path, replace: bool = False) -> int:
    """Write what is kept of the runs below the folders into one zip file; return how many runs there are.

    Results of benchmarks that lie there go with them. Equal records make a file of equal bytes. Raises Refusal as
    `collect.find` does, where two runs or results of one name differ, where the records are of several boxes, where
    the file is there, unless it is to be replaced, and where `merge` would not give the same files back.
    """
    if file.exists() and not replace:
        raise Refusal(f"{file}: is there already; name another file, or delete it")
    runs = collect.find(folders)
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
    _check_merges(packed.getvalue(), content)
    file.parent.mkdir(parents=True, exist_ok=True)
    files.write_whole(file, packed.getvalue())
    print(f"packed {manifest.num_runs} runs on {manifest.box} into {file}")
    return manifest.num_runs


def merge(file: Path, folder: Path) -> int:
    """Take a pack's runs into a folder of collected records as `collect.put` does; return how many runs there are.

    A benchmark's result there is replaced by a later one of its name.
    Raises Refusal, before the first write, for a file that is no pack, one that is larger than any, a version that does
    not fit, members that are not those of the manifest, records that are not whole, and a run that is there already and
    differs.
    """
    manifest, told = _merge(file, folder)
    for line in told:
        print(line)
    print(f"merged {manifest.num_runs} runs on {manifest.box} into {folder}")
    return manifest.num_runs


def _merge(file: Path, folder: Path) -> tuple[Manifest, list[str]]:
    """Merge, and say what became of each run."""
    manifest, members = _read(file)
    with tempfile.TemporaryDirectory() as unpacked:
        for name, member in members.items():
            Path(unpacked, name).write_bytes(member)
        try:
            runs = collect.find([Path(unpacked)])
            results = _results([Path(unpacked)])
            held = _files_of(runs)
            for name in sorted(set(members) - set(results)):
                if members[name] != held.get(name):
                    raise Refusal(f"{file}: {name} is not of finished runs alone; pack the records again")
            for key, value in _origin(runs, [Path(unpacked)]).items():
                if getattr(manifest, key) != value:
                    says = f"its manifest says {key} {getattr(manifest, key)}"
                    raise Refusal(f"{file}: {says}, its records {value}; pack them again")
            told = collect.put(runs, folder, replace=False)
            for name in results:
                files.write_whole(folder / name, members[name])
        except Refusal as refusal:
            raise Refusal(str(refusal).replace(unpacked, str(file))) from None
    return manifest, told


def _check_merges(packed: bytes, content: dict[str, bytes]) -> None:
    """Raise Refusal unless a merge gives these files back: now it is noticed while the box is still there."""
    with tempfile.TemporaryDirectory() as scratch:
        file, folder = Path(scratch, "packed.zip"), Path(scratch, "merged")
        file.write_bytes(packed)
        try:
            _merge(file, folder)
        except Refusal as refusal:
            raise Refusal(f"these records would not merge elsewhere: {str(refusal).replace(scratch, '.')}") from None
        merged = {path.name: path.read_bytes() for path in folder.iterdir()}
        if merged != content:
            name = min(name for name in merged | content if merged.get(name) != content.get(name))
            raise Refusal(f"{name}: is not the same after a merge; take it away")


def _files_of(runs: Sequence[collect.Kept]) -> dict[str, bytes]:
    """What a folder holds into which these runs alone are collected, by name."""
    found = collect.distinct(runs)
    held = {name: {run.run_id: run.lines[name] for run in found if name in run.lines} for name in lines.NAMES}
    return {name: lines.join(of_runs) for name, of_runs in held.items() if of_runs}


def _results(folders: Sequence[Path]) -> dict[str, bytes]:
    """The results of benchmarks below the folders, by name. Raises Refusal where two of one name differ."""
    found: dict[str, tuple[Path, bytes]] = {}
    for path in (path for folder in folders for path in sorted(folder.rglob("*.json")) if path.is_file()):
        with files.reading(path, "JSON"):
            text = files.read_whole(path)
        if b"benchmark" not in text:
            continue
        content = files.load(path, "JSON")
        if isinstance(content, dict) and "benchmark" in content:  # as `records.results.header` begins it
            other, its_text = found.setdefault(path.name, (path, text))
            if its_text != text:
                raise Refusal(f"{other} and {path} differ; pack them apart")
    return {name: text for name, (_, text) in found.items()}


def _origin(runs: Sequence[collect.Kept], folders: Sequence[Path]) -> dict[str, Any]:
    """What a manifest says of where runs come from, by their records. Raises Refusal unless there is one box."""
    facts = [run.record for run in runs if run.record is not None]
    boxes = sorted({box for record in facts for box in records.boxes_of(record)})
    if len(boxes) != 1:
        held = f"records of {len(boxes)} boxes ({'; '.join(boxes)})" if boxes else "no record, so no box"
        raise Refusal(f"{' '.join(map(str, folders))}: {held}; pack one box's folders at a time")
    machines = [record.machine for record in facts]
    commits = {m["git_commit"] + "-dirty" * bool(m.get("git_dirty")) for m in machines if m.get("git_commit")}
    libraries: dict[str, set[str]] = {}
    for name, version in (each for m in machines for each in m.get("libraries", {}).items()):
        if version is not None:
            libraries.setdefault(name, set()).add(version)
    versions = {name: sorted(numbers) for name, numbers in sorted(libraries.items())}
    num_runs = len({run.run_id for run in runs})
    return {"num_runs": num_runs, "box": boxes[0], "git_commits": sorted(commits), "libraries": versions}


def _read(file: Path) -> tuple[Manifest, dict[str, bytes]]:
    """The manifest and the other members of a pack, each of which is what the manifest says."""
    try:
        with zipfile.ZipFile(io.BytesIO(files.read_whole(file))) as archive:
            found = archive.infolist()
            num_bytes = sum(entry.file_size for entry in found)
            if len(found) > MOST_MEMBERS or num_bytes > MOST_BYTES:
                most = f"a pack has at most {MOST_MEMBERS:,} of {MOST_BYTES:,}"
                raise Refusal(f"{file}: {len(found):,} members of {num_bytes:,} bytes together; {most}")
            # Not more is read of a member than its entry says.
            entries = [(entry.filename, archive.read(entry)) for entry in found]
    except Refusal:
        raise
    except FileNotFoundError:
        raise Refusal(f"{file}: no such file; name one that `zero-study pack` wrote") from None
    # Damage shows in many ways: a digest of zip's own, a broken stream, flags that say encryption or another method.
    except (OSError, EOFError, RuntimeError, ValueError, struct.error, zipfile.BadZipFile, zlib.error) as error:
        raise Refusal(f"{file}: cannot be read as a pack ({error}); take it from its box again") from None
    members = dict(entries)
    for name in members:
        if name not in (MANIFEST, *lines.NAMES):
            files.check_name(name.removesuffix(".json"), f"{file}: member {name!r}: the name")
    if len(members) != len(entries):
        raise Refusal(f"{file}: two members of one name; `zero-study pack` writes no such file")
    manifest = _manifest(file, members.pop(MANIFEST, b""))
    for name in sorted(set(members) ^ set(manifest.sha256)):
        state = "missing" if name in manifest.sha256 else "not in its manifest"
        raise Refusal(f"{file}: {name} is {state}; take it from its box again")
    for name, member in members.items():
        if hashlib.sha256(member).hexdigest() != manifest.sha256[name]:
            raise Refusal(f"{file}: {name} is not the file that its manifest names; take it from its box again")
    return manifest, members


def _manifest(file: Path, text: bytes) -> Manifest:
    try:
        content = files.parse_json(text)
    except ValueError:
        content = None
    if not isinstance(content, dict) or "format_version" not in content:
        raise Refusal(f"{file}: no pack, its {MANIFEST} says no format_version; `zero-study pack` makes one")
    for key, fits in (("format_version", FORMAT_VERSION), ("schema_version", schema.SCHEMA_VERSION)):
        if content.get(key) != fits:
            raise Refusal(
                f"{file}: {key} {content.get(key)}, this version reads {fits}; pack and merge with one version"
            )
    try:
        return Manifest.model_validate(content, strict=True)
    except ValidationError as error:
        raise Refusal(describe(error, f"{file}: {MANIFEST}")) from None
