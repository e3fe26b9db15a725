"""Define the commands of the replication study. `zero-study` finds them through the entry point of this package."""

from __future__ import annotations

import click

from study.cli import claims, compare, exact, maintain, public, train

# The commands by the group in which the help lists them.
COMMANDS: dict[str, tuple[click.Command, ...]] = {
    "Train": train.COMMANDS,
    "Compare": (*compare.COMMANDS, *public.COMMANDS),
    "Check": (*exact.COMMANDS, *claims.COMMANDS),
    "Maintain": maintain.COMMANDS,
}
