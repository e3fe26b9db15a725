"""Choose the ranks of a large world that run a script, so that they include each kind of rank.

Most ranks of a training execute the same code. Those that do not are the first and the last rank, the first and the
last rank of a machine, and ranks that the script compares with a number.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from zero_study import terminal

MOST_NAMED = 12  # the ranks that a script's numbers name and that are run
MOST_SHOWN = 6  # ranges that a text lists


def of_script(script: Path, arguments: Sequence[str], world_size: int, per_machine: int) -> tuple[list[int], list[int]]:
    """Return the ranks on which to run a script, and further ranks to run if there is time.

    The first list has the first rank, the last rank, and ranks that the script names. A number in a comparison names
    this rank and its neighbors, because a script may write `rank < 4`.
    """
    numbers = [*_numbers_compared(script), *(int(word) for word in arguments if word.isdecimal())]
    mentioned = [rank for rank in dict.fromkeys(numbers) if rank < world_size][:MOST_NAMED]
    needed = dict.fromkeys([0, world_size - 1, *mentioned])
    machines = [1, per_machine, per_machine - 1, world_size // 2, world_size - 2, world_size - per_machine]
    around = [rank + step for rank in mentioned for step in (-1, 1)]
    further = [rank for rank in dict.fromkeys([*machines, *around]) if 0 <= rank < world_size and rank not in needed]
    return list(needed), further


def _numbers_compared(script: Path) -> list[int]:
    """Return the integers with which a script compares something, also by name or as keys."""
    try:
        tree = ast.parse(script.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return []
    comparisons = [node for node in ast.walk(tree) if isinstance(node, (ast.Compare, ast.Match))]
    inside = [part for comparison in comparisons for part in ast.walk(comparison)]
    names = {part.id for part in inside if isinstance(part, ast.Name)}
    assigned = [
        part
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and names & {target.id for target in node.targets if isinstance(target, ast.Name)}
        for part in ast.walk(node.value)
    ]
    keys = [key for node in ast.walk(tree) if isinstance(node, ast.Dict) for key in node.keys if key is not None]
    return [*_integers(inside), *_integers(assigned), *_integers(keys)]


def _integers(nodes: Iterable[ast.AST]) -> Iterator[int]:
    for node in nodes:
        if isinstance(node, ast.Constant) and type(node.value) is int and node.value >= 0:
            yield node.value


def in_words(ranks: Sequence[int], conjunction: str = "and") -> str:
    """Return a text that names ranks, such as "ranks 0, 3 and 5 to 7"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    ranges: list[list[int]] = []
    for rank in ranks:
        if ranges and rank == ranges[-1][-1] + 1:
            ranges[-1].append(rank)
        else:
            ranges.append([rank])
    parts = [part for group in ranges for part in _parts(group)]
    if len(parts) > MOST_SHOWN:
        return f"{terminal.count(len(ranks), 'rank')} from {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(parts[:-1])} {conjunction} {parts[-1]}" if len(parts) > 1 else f"ranks {parts[0]}"


def _parts(group: Sequence[int]) -> list[str]:
    return [f"{group[0]} to {group[-1]}"] if len(group) > 2 else list(map(str, group))
