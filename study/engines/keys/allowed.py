"""Decide which flags of the launcher and which environment variables a run accepts.

A run is its strategy's file and its own flags. All other flags of `accelerate launch` and variables of the libraries
are refused by name, unless they change no result, or the record proves their effect. The table of keys says which;
`reports/launcher.md` is generated from it.
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
    """Whether a run accepts a flag or a variable."""

    is_accepted: bool
    reason: str  # accepted: what proves its effect; refused: what it would do, and the remedy, as sentences


@cache
def rules(kind: Literal["flags", "variables"]) -> dict[str, Allowed]:
    """Return the rule of each flag, by the launcher's own names, or of each family of variables, by a pattern."""
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
    """Say whether a launcher sets this variable to tell a process its rank and the address of the others."""
    return _RANK_NAMES.fullmatch(name) is not None


def of_flag(name: str) -> Allowed:
    """Return the rule of a flag, by the launcher's own name for it. An unknown flag is refused."""
    return _closest("flags", name) or Allowed(False, "this version of the project does not know it. Remove it.")


def of_variable(name: str) -> Allowed | None:
    """Return the rule of a variable; None if no variable of its kind changes a run behind its configuration."""
    return _closest("variables", name)


def check_flags(flags: Iterable[str]) -> None:
    """Refuse the first flag, by the launcher's own name for it, that a run may not have."""
    for name in flags:
        if not (rule := of_flag(name)).is_accepted:
            raise Refusal(f"accelerate launch --{name} is not accepted: {rule.reason}")


def check_variables(environment: Mapping[str, str]) -> None:
    """Refuse the first variable of the launcher's environment that would change a run behind its configuration."""
    for name in sorted(environment):
        if (rule := of_variable(name)) and not rule.is_accepted:
            raise Refusal(f"{name} is set in the environment: {rule.reason}")


def check_rank(environment: Mapping[str, str], world_size: int, is_distributed: bool) -> None:
    """Refuse a process whose environment names a rank that the run does not have.

    Accelerate's launcher of one process passes inherited variables on. For several processes, torchrun sets them anew.
    """
    if not is_distributed:
        for name in sorted(filter(says_which_rank, environment)):
            if not name.startswith("MASTER_"):
                raise Refusal(
                    f"{name}={environment[name]} is set in the environment, but this run is a single process without a "
                    "rank. Unset the variable, or start the run with `zero-study train`, which does so."
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
