"""Define the commands of the replication study. `zero-study` finds them through the entry point of this package."""

from __future__ import annotations

from study.cli import claims, compare, exact, maintain, public, train

COMMANDS = (
    *train.COMMANDS,
    *compare.COMMANDS,
    *public.COMMANDS,
    *claims.COMMANDS,
    *exact.COMMANDS,
    *maintain.COMMANDS,
)
