"""The commands that pack finished runs on one machine and merge them on another."""

from __future__ import annotations

from pathlib import Path

import click

from study.cli.options import PATH, RECORDS, command


@command("pack")
@click.argument("records", type=PATH, nargs=-1, required=True, help=RECORDS)
@click.argument("target", type=PATH, help="A file (my-machine.zip), or a folder to commit (reports/cpu/records/cpu).")
def _pack(records: tuple[Path, ...], target: Path) -> None:
    """Collect finished runs in one file or folder.

    A file has digests of all records, which `zero-study merge` checks on another machine. A folder is meant to be
    committed: its files have one line per run.
    """
    from study.records import pack

    if target.suffix == ".zip":
        pack.pack(records, target)
    else:
        num_runs = pack.collect(records, target)
        print(f"Wrote the records of {num_runs} runs to {target}")


@command("merge")
@click.argument("packed", type=PATH, metavar="FILE", help="A file that `zero-study pack` wrote.")
@click.argument("records", type=PATH, help="Folder to write to, for instance reports/STUDY/records/my-machine.")
def _merge(packed: Path, records: Path) -> None:
    """Copy the records of a packed file to a folder."""
    from study.records import pack

    pack.merge(packed, records)


COMMANDS = (_pack, _merge)
