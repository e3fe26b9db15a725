"""The runs of a page, setting by setting, a row for each strategy and number of processes, and the cells of a row."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from study.compare import pairs, table
from study.compare.expected import with_theory
from study.compare.facts import is_disturbed
from study.compare.words import Unit, bytes_unit, in_order, three_digits
from study.errors import Refusal
from study.files import ROOT
from study.report import markup
from study.report.markup import MEMORY_KINDS, Html, fixed, number, relative

# Runs that are equal in these do the same work; each such setting has its own rows and figures.
SETTING = tuple(name for name in pairs.SHOWN if name != "box")


class Block(NamedTuple):
    """The runs of one setting."""

    words: str
    key: tuple[Any, ...]  # the values of SETTING
    runs: pd.DataFrame


class PageRow(NamedTuple):
    """The runs of one strategy and number of processes, in one setting of one box."""

    strategy: str
    world_size: int
    key: tuple[Any, ...]
    runs: pd.DataFrame
    same: Sequence[str] = ()  # that ended with the same weights, bit by bit, this strategy first; empty: not asked


Cell = Callable[[PageRow], Any]


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


# ---------------------------------------------------------------- settings and rows


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


def _place(block: Block) -> tuple[Any, ...]:
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


def rows(runs: pd.DataFrame, key: tuple[Any, ...] = ()) -> Iterator[PageRow]:
    """Each strategy on each number of processes, in the order of every table."""
    for size, here in runs.groupby("world_size"):
        members = dict(list(here.groupby("strategy")))
        for strategy in in_order(members):
            yield PageRow(strategy, int(size), key, members[strategy])


def rows_once(runs: pd.DataFrame, key: tuple[Any, ...] = ()) -> Iterator[PageRow]:
    """As `rows`, but strategies that learned the same, bit by bit, are one."""
    for size, here in runs.groupby("world_size"):
        for same in bit_identical(here):
            yield PageRow(same[0], int(size), key, here[here["strategy"] == same[0]], same)


def bit_identical(runs: pd.DataFrame) -> list[list[str]]:
    """The strategies of one box, setting and number of processes, with those together that end with equal weights.

    Equal are the digests of the final weights for every seed. A strategy with a run that failed, left no digest, or
    ended otherwise when it was repeated stands alone.
    """
    together: dict[Any, list[str]] = {}
    for strategy in in_order(runs["strategy"]):
        mine = runs[runs["strategy"] == strategy]
        ended = frozenset(zip(mine["seed"], mine["final_sha256"], strict=True))
        sure = (mine["status"] == "ok").all() and mine["final_sha256"].notna().all()
        sure = sure and len(ended) == mine["seed"].nunique()
        together.setdefault(ended if sure else strategy, []).append(strategy)
    return list(together.values())


def boxes(runs: pd.DataFrame) -> list[str]:
    return sorted(runs["box"].unique())


def by_box(runs: pd.DataFrame, make: Callable[[pd.DataFrame], str]) -> Html:
    """What is said of each box, one section after the other; a box alone needs no heading."""
    names = boxes(runs)
    if len(names) == 1:
        return markup.lines(make(runs))
    section = Html("<section>\n<h3>{}</h3>\n{}\n</section>")
    return markup.lines(*(section.format(name, make(runs[runs["box"] == name])) for name in names))


def table_of(
    runs: pd.DataFrame,
    caption: str,
    columns: dict[str, Cell],
    note: str = "",
    words: Sequence[str] = (),
    split: Callable[[pd.DataFrame, tuple[Any, ...]], Iterator[PageRow]] = rows,
) -> Html:
    """A table of one box: a group for each setting, in it a row for each strategy and number of processes.

    A column is its heading and what makes a cell of a row; those named in `words` are not numbers. `split` makes the
    rows: `rows`, or `rows_once`.
    """
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
    return markup.table(caption, ["strategy", "processes", *columns], groups, note, words)


def _heading(row: PageRow) -> str:
    return row.strategy if len(row.same) < 2 else markup.below(", ".join(row.same), "bit-identical")


# ---------------------------------------------------------------- cells


def unit_of(runs: pd.DataFrame, *names: str) -> Unit:
    """The unit that suits the largest value in these columns of bytes."""
    largest = runs[list(names)].max().max()
    return bytes_unit(0.0 if pd.isna(largest) else largest)


def peak_column(runs: pd.DataFrame) -> str:
    """What says best how much memory a rank needed: allocated on a GPU, live tensors on a CPU."""
    return MEMORY_KINDS["cuda" not in set(runs["device"])]


def in_unit(column: str, unit: Unit) -> Cell:
    """A column of bytes: the largest value of the runs."""
    return lambda row: number(row.runs[column].max() / unit.size)


def outcomes(row: PageRow) -> Html:
    """How many runs there are, what came of those without a result, and how many have no times."""
    others = row.runs.loc[row.runs["status"] != "ok", "status"].value_counts()
    words = [f"{amount} {str(status).replace('_', ' ')}" for status, amount in others.items()]
    disturbed = sum(is_disturbed(share) for share in row.runs["share_of_others"])
    return markup.below(str(len(row.runs)), ", ".join(words), f"{disturbed} disturbed" if disturbed else "")


def learned(row: PageRow, name: str) -> float:
    """The mean over seeds of what the runs that are ok learned, however often a seed was repeated."""
    ok = row.runs[row.runs["status"] == "ok"]
    return float(ok.groupby("seed")[name].mean().mean())


def held_out(row: PageRow) -> str | None:
    """Perplexity; or accuracy, with the binomial 95 % interval of one run (Wilson's).

    Seeds are asked the same examples, so that their mean is taken to be no surer than one run.
    """
    accuracy = learned(row, "accuracy")
    if math.isnan(accuracy):
        return fixed(learned(row, "perplexity"), 1)
    examples = row.runs["settings"].iloc[0]["num_eval_examples"]
    z = 1.96
    middle = (accuracy + z**2 / (2 * examples)) / (1 + z**2 / examples)
    spread = math.sqrt(accuracy * (1 - accuracy) / examples + (z / (2 * examples)) ** 2)
    half = z / (1 + z**2 / examples) * spread
    return markup.below(f"{accuracy:.3f}", f"{middle - half:.3f} to {middle + half:.3f}, of {examples:,}")


def time(row: PageRow) -> str | None:
    """The median time of a step over runs; where it says nothing of the strategy, why."""
    crowded = next((why for run in row.runs.to_dict("records") if (why := pairs.crowding(run))), None)
    return markup.missing(crowded) if crowded else number(row.runs["seconds_per_step"].median())


def speed(make: Cell) -> Cell:
    """A column of speeds, which stays empty where `time` says why there is none."""
    return lambda row: "" if row.runs["oversubscribed"].any() else make(row)


def states(row: PageRow) -> str | None:
    """Bytes of model states per parameter, and in parentheses by the paper."""
    held, paper = (
        (row.runs[name] / row.runs["num_params"]).max() for name in ("model_state_bytes", "paper_state_bytes")
    )
    return None if pd.isna(held) else f"{held:.2f} ({three_digits(paper)})"


class Verdicts:
    """The comparisons with the control, by the row that each is about."""

    def __init__(self, compared: pd.DataFrame, control: str, metric: str) -> None:
        self.control = control
        self.words = {"higher": "slower", "lower": "faster"} if metric == "seconds_per_step" else {}
        self.found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        for comparison in compared[compared["metric"] == metric].to_dict("records"):
            key = tuple(comparison[name] for name in SETTING)
            self.found.setdefault(
                (comparison["box"], comparison["strategy"], comparison["world_size"], key), []
            ).append(comparison)

    def of(self, row: PageRow) -> list[dict[str, Any]]:
        """Usually one; more where libraries or data changed between runs of one setting."""
        return self.found.get((row.runs["box"].iloc[0], row.strategy, row.world_size, row.key), [])

    def cell(self, row: PageRow) -> Html:
        if comparisons := self.of(row):
            return Html("<br>").join(map(self._words, comparisons))
        return markup.missing("the control" if row.strategy == self.control else "not comparable")

    def margin(self, row: PageRow) -> str | None:
        margins = [
            comparison["relative_margin"] for comparison in self.of(row) if pd.notna(comparison["relative_margin"])
        ]
        if row.strategy == self.control:
            return ""
        return "; ".join(f"\N{PLUS-MINUS SIGN}{relative(margin).lstrip('+')}" for margin in margins) or None

    def _words(self, comparison: dict[str, Any]) -> Html:
        word = self.words.get(comparison["verdict"], comparison["verdict"])
        if pd.isna(comparison["relative_difference"]):
            return markup.below(word)
        interval = ""
        if pd.notna(comparison["relative_low"]):
            interval = f" [{relative(comparison['relative_low'])}, {relative(comparison['relative_high'])}]"
        return markup.below(word, f"{relative(comparison['relative_difference'])}{interval}")
