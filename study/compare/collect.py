"""Which facts of finished runs are kept for good? Records and steps, copied into one folder to commit."""

from __future__ import annotations

from pathlib import Path

from study import record
from study.config import Refusal


def collect(runs: Path, records: Path) -> int:
    """Copy the record and the steps of each finished run below `runs`; return how many runs there are.

    Files are named after the run id. Checks every run before the first copy. Raises Refusal where there is none, where
    steps are not those of their record, and where another record of the same name is there already.
    """
    found = sorted(runs.rglob("record.json")) if runs.is_dir() else []
    if not found:
        raise Refusal(f"{runs}: no finished run below; `zero-study run STUDY` makes some")
    copies: dict[Path, Path] = {}
    for path in found:
        read = record.read(path)
        wanted = {records / f"{read.run_id}.json": path}
        if read.steps_sha256 is not None:
            wanted[records / f"{read.run_id}.steps.jsonl"] = record.checked_steps(path, read)
        for target, source in wanted.items():
            there = copies.get(target, target if target.exists() else source)
            if there.read_bytes() != source.read_bytes():
                raise Refusal(
                    f"{target}: {there} and {source} differ; take another folder, or delete the one not wanted"
                )
        copies |= wanted
    records.mkdir(parents=True, exist_ok=True)
    for target, source in copies.items():
        kept = target.exists()
        if not kept:
            target.write_bytes(source.read_bytes())
        print(f"{'kept' if kept else 'copied'} {target}")
    return len(found)
