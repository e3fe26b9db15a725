"""The commands that bring finished runs from one machine to another."""

from __future__ import annotations

from pathlib import Path

import click

from study.cli.options import PATH, RECORDS, command


@command("pack")
@click.argument("records", type=PATH, nargs=-1, required=True, help=RECORDS)
@click.argument("target", type=PATH, help="a file, my-box.zip, or a folder to commit, reports/cpu/records/cpu")
def _pack(records: tuple[Path, ...], target: Path) -> None:
    """Put finished runs into one file, or a folder.

    A file has their digests; a folder, to commit, has a line each.
    """
    from study.records import pack

    if target.suffix == ".zip":
        pack.pack(records, target)
    else:
        pack.collect(records, target)


@command("merge")
@click.argument("packed", type=PATH, metavar="FILE", help="what `zero-study pack` wrote")
@click.argument("records", type=PATH, help="folder to write to, for instance reports/STUDY/records/my-box")
def _merge(packed: Path, records: Path) -> None:
    """Take a packed file's records into a folder."""
    from study.records import pack

    pack.merge(packed, records)


COMMANDS = (_pack, _merge)
