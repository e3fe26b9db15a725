"""Which of the launcher's flags and of the environment's variables a run may have, and what proves what they did.

A run is its strategy's file and its own flags. What else `accelerate launch` and the libraries would take from a
command line or from the environment is refused by name, unless it changes no result, or the record proves what came of
it. The table says which; `docs/launcher.md` is made of it.
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
    """What becomes of a flag or a variable."""

    is_accepted: bool
    why: str  # accepted: what proves it; refused: what it would do, and the remedy


@cache
def rules(what: Literal["flags", "variables"]) -> dict[str, Allowed]:
    """What becomes of each flag, by the launcher's own names, or of each family of variables."""
    said = known_keys.read()[what]
    return {
        pattern: Allowed(verdict == "accepted", why)
        for verdict in ("accepted", "refused")
        for why, patterns in said[verdict].items()
        for pattern in patterns
    }


# Whatever else of these families is set stands in a record: names and values, by `records.machine`.
_RANK_NAMES = re.compile(
    r"(LOCAL_|GROUP_|ROLE_|NODE_)?RANK|ROLE_NAME|(LOCAL_|GROUP_|ROLE_)?WORLD_SIZE|MASTER_(ADDR|PORT)|TORCHELASTIC_\w+|"
    r"(OMPI_COMM_WORLD|PMI|MV2_COMM_WORLD)_(LOCAL_)?(RANK|SIZE)"
)


def says_which_rank(name: str) -> bool:
    """Say whether a launcher tells a process by this variable which rank it is, and where the others are."""
    return _RANK_NAMES.fullmatch(name) is not None


def of_flag(name: str) -> Allowed:
    """What becomes of a flag, by the launcher's own name for it. One that is not known is refused."""
    return _closest("flags", name) or Allowed(False, "this version of the study does not know it; remove it")


def of_variable(name: str) -> Allowed | None:
    """What becomes of a variable; None where it is of no family that changes a run behind its configuration."""
    return _closest("variables", name)


def check_flags(flags: Iterable[str]) -> None:
    """Refuse the first flag, by the launcher's own name for it, that a run may not have."""
    for name in flags:
        if not (rule := of_flag(name)).is_accepted:
            raise Refusal(f"accelerate launch --{name} {rule.why}")


def check_variables(environment: Mapping[str, str]) -> None:
    """Refuse the first variable of the launcher's environment that would change a run behind its configuration."""
    for name in sorted(environment):
        if (rule := of_variable(name)) and not rule.is_accepted:
            raise Refusal(f"{name} is set in the environment, and {rule.why}")


def check_rank(environment: Mapping[str, str], world_size: int, is_distributed: bool) -> None:
    """Refuse a process that is told to be a rank which the run has not.

    Accelerate's launcher of one process passes on what it finds; torchrun, for the others, says it anew.
    """
    if not is_distributed:
        for name in sorted(filter(says_which_rank, environment)):
            if not name.startswith("MASTER_"):
                raise Refusal(
                    f"{name}={environment[name]} in the environment: the run is one process, without ranks; unset it, "
                    "or start it as `zero-study train`, which does"
                )
        return
    told = {name: environment.get(name, "") for name in ("RANK", "WORLD_SIZE")}
    if told["WORLD_SIZE"] != str(world_size) or not told["RANK"].isdigit() or int(told["RANK"]) >= world_size:
        raise Refusal(
            f"RANK={told['RANK']} and WORLD_SIZE={told['WORLD_SIZE']} in the environment: the run asks for "
            f"{world_size} processes; change num_processes in the strategy's file, or --num_processes"
        )


def _closest(what: Literal["flags", "variables"], name: str) -> Allowed | None:
    """The rule of the longest pattern that fits."""
    fitting = [pattern for pattern in rules(what) if fnmatchcase(name, pattern)]
    return rules(what)[max(fitting, key=len)] if fitting else None
