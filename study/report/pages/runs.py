"""Which runs is a page about, and what are its sections? Boxes, settings, and rows of strategy and processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from study.compare import pairs, table
from study.compare.expected import with_theory
from study.compare.words import in_order
from study.errors import Refusal
from study.files import ROOT
from study.report import markup
from study.report.markup import Html

# Runs that are equal in these do the same work; each such setting has its own rows and figures.
SETTING = tuple(name for name in pairs.SHOWN if name != "box")


class Block(NamedTuple):
    """The runs of one setting."""

    words: str
    key: tuple  # the values of SETTING
    runs: pd.DataFrame


class PageRow(NamedTuple):
    """The runs of one strategy and number of processes, in one setting of one box."""

    strategy: str
    world_size: int
    key: tuple
    runs: pd.DataFrame
    same: Sequence[str] = ()  # that ended with the same weights, bit by bit, this strategy first; empty: not asked


def load(records: Sequence[str], box: str = "", workload: str = "") -> pd.DataFrame:
    """Read the runs of a page: the tidy table, of one box and workload or of all.

    A folder that is not there is looked for in the project, so that a notebook opens in its own folder too. Raises
    Refusal for records that cannot be read, and for a box or workload of which there is no run.
    """
    runs = with_theory(table.read([in_project(name) for name in records], [box] if box else None))
    workloads = sorted(runs["workload"].unique())
    if workload and workload not in workloads:
        raise Refusal(f"workload {workload!r} has no run here; the workloads are {', '.join(map(repr, workloads))}")
    return runs[runs["workload"] == workload] if workload else runs


def in_project(name: str) -> Path:
    """A file or folder where it is named, or in the project, so that a notebook opens in its own folder too."""
    return ROOT / name if not Path(name).exists() and (ROOT / name).exists() else Path(name)


def blocks(runs: pd.DataFrame) -> list[Block]:
    """The settings of these runs. A run of which only an outcome is known joins every setting that it may be of."""
    whole = runs[list(SETTING)].notna().all(axis=1)
    by_setting = []
    for key, members in runs[whole].groupby(list(SETTING)):
        joins = ~whole
        for name, value in zip(SETTING, key, strict=True):
            joins &= runs[name].isna() | (runs[name] == value)
        values = dict(zip(SETTING, key, strict=True))
        words = "{workload} {size}, {precision}, {global_batch_size} sequences per step".format(**values)
        by_setting.append(Block(words, key, pd.concat([members, runs[joins]])))
    held = [settings(block.runs) for block in by_setting]
    named = [
        block._replace(words=", ".join([block.words, *_apart(held, by_setting, i)]))
        for i, block in enumerate(by_setting)
    ]
    return sorted(named, key=_place)


def _place(block: Block) -> tuple:
    workload, _, precision, _, _, batch, _ = block.key
    return workload, block.runs["num_params"].max(), precision, batch, block.words


def settings(runs: pd.DataFrame) -> dict[str, Any]:
    """What all runs of a setting were asked."""
    first = runs.iloc[0]
    return {**first["settings"], "num_steps": int(first["num_steps"])}


def _apart(held: list[dict[str, Any]], by_setting: list[Block], index: int) -> list[str]:
    """What tells a setting apart from the others of the same words."""
    twins = [other for other, block in zip(held, by_setting, strict=True) if block.words == by_setting[index].words]
    return [f"{name} {plain(value)}" for name, value in held[index].items() if any(t.get(name) != value for t in twins)]


def plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return {"True": "yes", "False": "no", "None": "unset"}.get(str(value), str(value))


def worlds(runs: pd.DataFrame) -> Iterator[tuple[int, pd.DataFrame]]:
    """Each number of processes with its runs; `single` stands beside all of them."""
    alone = runs["strategy"] == "single"
    for size in sorted(runs.loc[~alone, "world_size"].unique()) or [1]:
        yield int(size), runs[alone | (runs["world_size"] == size)]


def rows(runs: pd.DataFrame, key: tuple = ()) -> Iterator[PageRow]:
    """Each strategy on each number of processes, in the order of every table."""
    for size, here in runs.groupby("world_size"):
        members = dict(list(here.groupby("strategy")))
        for strategy in in_order(members):
            yield PageRow(strategy, int(size), key, members[strategy])


def bit_identical(runs: pd.DataFrame) -> list[list[str]]:
    """The strategies of one box, setting and number of processes, with those together that end with equal weights.

    Equal are the digests of the final weights for every seed. A strategy with a run that failed, left no digest, or
    ended otherwise when it was repeated stands alone.
    """
    together: dict[frozenset | str, list[str]] = {}
    for strategy in in_order(runs["strategy"]):
        mine = runs[runs["strategy"] == strategy]
        ended = frozenset(zip(mine["seed"], mine["final_sha256"], strict=True))
        sure = (mine["status"] == "ok").all() and mine["final_sha256"].notna().all()
        sure = sure and len(ended) == mine["seed"].nunique()
        together.setdefault(ended if sure else strategy, []).append(strategy)
    return list(together.values())


def rows_once(runs: pd.DataFrame, key: tuple = ()) -> Iterator[PageRow]:
    """As `rows`, but strategies that learned the same, bit by bit, are one."""
    for size, here in runs.groupby("world_size"):
        for same in bit_identical(here):
            yield PageRow(same[0], int(size), key, here[here["strategy"] == same[0]], same)


def once(compared: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """The comparisons, one for all strategies that ended bit-identical; the column `same` names them.

    Those that equal the control differ by nothing, and are one row too.
    """
    kept = []
    for (*key, box, size), rows in compared.groupby([*SETTING, "box", "world_size"], sort=False):
        here = runs[(runs["box"] == box) & (runs["world_size"] == size)]
        here = here[(here[list(SETTING)] == pd.Series(key, index=list(SETTING))).all(axis=1)]
        for same in bit_identical(here):
            names = [name for name in same if name in set(rows["strategy"])]
            if names:
                kept.append(rows[rows["strategy"] == names[0]].assign(same=", ".join(names)))
    return pd.concat(kept) if kept else compared.assign(same=compared["strategy"])


def boxes(runs: pd.DataFrame) -> list[str]:
    return sorted(runs["box"].unique())


def by_box(runs: pd.DataFrame, make: Callable[[pd.DataFrame], str]) -> Html:
    """What is said of each box, one section after the other; a box alone needs no heading."""
    names = boxes(runs)
    if len(names) == 1:
        return Html(make(runs))
    parts = [f"<section>\n<h3>{markup.escape(b)}</h3>\n{make(runs[runs['box'] == b])}\n</section>" for b in names]
    return Html("\n".join(parts))


def table_of(
    runs: pd.DataFrame,
    caption: str,
    columns: dict[str, Callable[[PageRow], Any]],
    note: str = "",
    words: Sequence[str] = (),
    split: Callable[[pd.DataFrame, tuple], Iterator[PageRow]] = rows,
) -> str:
    """A table of one box: a group for each setting, in it a row for each strategy and number of processes.

    A column is its heading and what makes a cell of a row; those named in `words` are not numbers. `split` makes the
    rows: `rows`, or `rows_once`.
    """
    head = ["strategy", "processes", *columns]
    groups = [
        (
            block.words,
            [
                [_heading(row), row.world_size, *(make(row) for make in columns.values())]
                for row in split(block.runs, block.key)
            ],
        )
        for block in blocks(runs)
    ]
    return markup.table(caption, head, groups, note, words)


def _heading(row: PageRow) -> str | Html:
    if len(row.same) < 2:
        return row.strategy
    return Html(f"{markup.escape(', '.join(row.same))}<small>bit-identical</small>")
