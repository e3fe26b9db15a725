"""Define the commands that pack finished runs on one machine and merge them on another."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from zero_study import terminal
from zero_study.cli.options import PATH, RECORDS, Statuses, command
from zero_study.command_line import argument

if TYPE_CHECKING:
    from zero_study.verdict import Verdict


@command(
    "pack",
    "How do I take finished runs to another machine?",
    "pack runs/smoke my-machine.zip",
    statuses=Statuses(
        "the runs were checked and written",
        None,
        "nothing was written, because there is no finished run, or a file is damaged",
    ),
)
@argument("records", type=PATH, nargs=-1, required=True, help=RECORDS)
@argument(
    "target",
    type=PATH,
    help="File to write (for example my-machine.zip), or folder to write to (for example reports/cpu/records/cpu).",
)
def _pack(records: tuple[Path, ...], target: Path) -> Verdict:
    """Collect finished runs in one file or folder.

    A zip file also contains digests of all records, which `zero-study merge` checks on another machine. In a folder,
    the records are text files with one line per run, so that you can commit them.
    """
    from study.records import pack

    if target.suffix == ".zip":
        verdict = pack.pack(records, target)
    else:
        verdict = pack.collect(records, target)
        print(f"Wrote the records to {target}")
    return _with_coverage(verdict)


@command(
    "merge",
    "How do I add packed runs to the records of a study?",
    "merge my-machine.zip reports/smoke/records/my-machine",
    statuses=Statuses(
        "the runs were checked and are in the folder",
        None,
        "nothing was written, because the file is not a pack or is damaged, or the folder has a different record",
    ),
)
@argument("packed", type=PATH, metavar="FILE", help="A file that `zero-study pack` wrote.")
@argument("records", type=PATH, help="Folder to write to, for instance reports/STUDY/records/my-machine.")
def _merge(packed: Path, records: Path) -> Verdict:
    """Copy the records of a packed file to a folder."""
    from study.records import pack

    return _with_coverage(pack.merge(packed, records))


def _with_coverage(verdict: Verdict) -> Verdict:
    """Print what was compared, and return the verdict."""
    print(terminal.wrap(f"Checked: {verdict.coverage()}.", later_indent="  "))
    return verdict


COMMANDS = (_pack, _merge)
