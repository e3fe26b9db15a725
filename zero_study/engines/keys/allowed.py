"""Decide which flags of accelerate's launcher and which environment variables a run accepts.

A run is defined by its strategy's file and its own flags. Any other flag of `accelerate launch` or variable of a
library is refused, unless it changes no result or the record proves its effect. The rules are in the table of keys,
from which the tables of `reports/refusals.md` are generated.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from functools import cache
from typing import Literal, NamedTuple

from ...errors import Refusal
from . import known_keys


class Allowed(NamedTuple):
    """The rule for a launcher's flag or an environment variable: whether a run accepts it, and why."""

    is_accepted: bool
    reason: str  # accepted: what proves its effect; refused: what it would do, and the remedy, as sentences


@cache
def rules(kind: Literal["flags", "variables"]) -> dict[str, Allowed]:
    """Return the rules for all flags of the launcher by name, or for all environment variables by pattern."""
    patterns_by_verdict = known_keys.read()[kind]
    return {
        pattern: Allowed(verdict == "accepted", reason)
        for verdict in ("accepted", "refused")
        for reason, patterns in patterns_by_verdict[verdict].items()
        for pattern in patterns
    }


# Other variables of these families are in the record, with their values (`records.machine`).
_RANK_NAMES = re.compile(
    r"(LOCAL_|GROUP_|ROLE_|NODE_)?RANK|ROLE_NAME|(LOCAL_|GROUP_|ROLE_)?WORLD_SIZE|MASTER_(ADDR|PORT)|TORCHELASTIC_\w+|"
    r"(OMPI_COMM_WORLD|PMI|MV2_COMM_WORLD)_(LOCAL_)?(RANK|SIZE)"
)


def says_which_rank(name: str) -> bool:
    """Return whether launchers set this variable to give a process its rank or the address of the other processes."""
    return _RANK_NAMES.fullmatch(name) is not None


def of_flag(name: str) -> Allowed:
    """Return the rule for a launcher's flag. An unknown flag is refused.

    `name` is the launcher's own name for it.
    """
    return _closest("flags", name) or Allowed(
        False, "this version of the project does not know this option. Remove the option."
    )


def of_variable(name: str) -> Allowed | None:
    """Return the rule for an environment variable. None if the variable cannot override a configuration."""
    return _closest("variables", name)


def check_flags(flags: Iterable[str]) -> None:
    """Raise Refusal for the first flag of the launcher that a run does not accept.

    `flags` are spelled as the launcher spells them.
    """
    for name in flags:
        if not (rule := of_flag(name)).is_accepted:
            raise Refusal(f"accelerate launch --{name} is not accepted: {rule.reason}")


def check_variables(environment: Mapping[str, str]) -> None:
    """Raise Refusal for the first environment variable that would override the configuration of a run."""
    for name in sorted(environment):
        if (rule := of_variable(name)) and not rule.is_accepted:
            raise Refusal(f"{name} is set in the environment: {rule.reason}")


def check_rank(environment: Mapping[str, str], world_size: int, is_distributed: bool) -> None:
    """Raise Refusal if the environment variables set a rank or world size that the run does not have.

    For a single process, accelerate's launcher passes inherited variables on. For several processes, torchrun sets them
    again.
    """
    if not is_distributed:
        for name in sorted(filter(says_which_rank, environment)):
            if not name.startswith("MASTER_"):
                raise Refusal(
                    f"{name}={environment[name]} is set in the environment, but this run is a single process without a "
                    "rank. Unset the variable, or start the run with `zero-study train`, which unsets it."
                )
        return
    rank, size = environment.get("RANK", ""), environment.get("WORLD_SIZE", "")
    if size != str(world_size) or not rank.isdigit() or int(rank) >= world_size:
        raise Refusal(
            f"RANK={rank} and WORLD_SIZE={size} are set in the environment, but the run requests {world_size} "
            "processes. Change num_processes in the strategy's file, or --num_processes."
        )


def _closest(kind: Literal["flags", "variables"], name: str) -> Allowed | None:
    """Return the rule of the longest pattern that matches a name."""
    matching = [pattern for pattern in rules(kind) if fnmatchcase(name, pattern)]
    return rules(kind)[max(matching, key=len)] if matching else None
