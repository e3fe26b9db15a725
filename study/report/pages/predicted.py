"""What does theory expect of boxes that nobody here has? Tables and figures that look like no measured one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from study.compare import expected
from study.compare.words import bytes_unit, in_order, processes
from study.report import figures, markup
from study.report.figures import Figure
from study.report.figures.predicted import NO_RUN, shortfall
from study.report.markup import Html
from study.report.pages.cells import number
from study.report.pages.runs import ROOT
from study.report.words import count, listed, seconds_unit

Cell = Callable[[dict[str, Any]], str]

MEMORY_NOTE = """\
A rank's peak is that of its tensors. Whether it fits also counts what the allocator reserves beyond them, and what
offload needs of host and disk."""

TIMES_NOTE = """\
Small: the interval that nine of ten published times of that kind gave. Strategies whose intervals overlap, theory does
not rank."""


def predictions(folders: Sequence[str], workload: str = "") -> pd.DataFrame:
    """Read the predicted records of a page, of one workload or of all; of folders that are not there, none.

    A relative folder that is not there is looked for in the project. Raises Refusal for records that cannot be read.
    """
    paths = [Path(name) if Path(name).is_dir() else ROOT / name for name in folders]
    rows = expected.read_predicted(paths)
    return rows[rows["workload"] == workload] if workload else rows


def predicted_memory(rows: pd.DataFrame) -> Html:
    """What a rank would hold, and what does not fit: for each box and study a table of each thing trained."""
    unit = bytes_unit(rows["peak_bytes_per_gpu"].max())

    def cell(row: dict[str, Any]) -> str:
        return f"\N{ALMOST EQUAL TO} {number(row['peak_bytes_per_gpu'] / unit.size)}"

    return _tables(rows, cell, f"peak memory of a rank, {unit.name}", MEMORY_NOTE)


def predicted_times(rows: pd.DataFrame) -> Html:
    """How long a step would take where it fits: for each box and study a table of each thing trained."""
    unit = seconds_unit(rows["seconds_per_step"].max())

    def cell(row: dict[str, Any]) -> Html:
        seconds, low, high = (number(row[f"seconds_{end}"] / unit.size) for end in ("per_step", "low", "high"))
        return Html(f"\N{ALMOST EQUAL TO} {seconds}<small>{low} to {high}</small>")

    return _tables(rows, cell, f"time of a step, {unit.name}", TIMES_NOTE)


def predicted_memory_drawn(rows: pd.DataFrame, studies: Sequence[str]) -> Html:
    """A figure of what fills a rank's memory; boxes of as many GPUs share it, because only their limits differ."""
    return _drawn(rows, studies, ["num_gpus", "study"], figures.predicted_memory)


def predicted_times_drawn(rows: pd.DataFrame, studies: Sequence[str]) -> Html:
    """A figure of how long a step takes, for each box."""
    return _drawn(rows, studies, ["num_gpus", "study", "box"], figures.predicted_times)


def _drawn(
    rows: pd.DataFrame, studies: Sequence[str], names: list[str], draw: Callable[[pd.DataFrame], Figure]
) -> Html:
    """Figures side by side, of each thing that these studies train on all GPUs of a box, with the smallest batch."""
    sections = []
    rows = rows[rows["why"].isna() & rows["study"].isin(studies)]
    for (num_gpus, *_), here in _grouped(rows, names):
        for words, block in _blocks(here):
            block = block[(block["world_size"] == num_gpus) | (block["strategy"] == "single")]
            block = block[block["global_batch_size"] == block["global_batch_size"].min()]
            if block["strategy"].nunique() < 2:
                continue
            where = f"{listed(list(block['box'].unique()))}, {words}"
            try:
                figure = draw(block)._repr_html_()
            except ValueError as nothing:  # the figures' word for: there is nothing to draw
                figure = markup.paragraphs(f"No figure: {nothing}.", kind="note")
            sections.append(f"<section>\n<h3>Predicted: {markup.escape(where)}</h3>\n{figure}\n</section>")
    return Html(f'<div class="predicted beside">\n{"".join(sections)}\n</div>' if sections else "")


# ---------------------------------------------------------------- tables


def _tables(rows: pd.DataFrame, cell: Cell, what: str, note: str) -> Html:
    """A section for each box; its tables are folded, study by study, because they are many."""
    if rows.empty:
        return Html(
            markup.paragraphs("There are no predicted records here; `zero-study predict` makes some.", kind="note")
        )
    sections = [markup.paragraphs(f"{NO_RUN} {note}", kind="note")]
    for (box,), here in _grouped(rows, ["box"]):
        folded = [
            markup.details(study, "\n".join(_table(block, words, cell, what) for words, block in _blocks(of_study)))
            for (study,), of_study in _grouped(here, ["study"])
        ]
        head = f"<h3>Predicted: {markup.escape(box)}</h3>"
        summary = markup.paragraphs(_in_words(here))
        sections.append("\n".join(['<section class="predicted">', head, summary, *folded, "</section>"]))
    return Html("\n".join(sections))


def _table(block: pd.DataFrame, words: str, cell: Cell, what: str) -> str:
    """One setting: a row for each strategy, a column for each batch or, of one batch, for each number of processes."""
    batches, worlds = (sorted(map(int, block[name].unique())) for name in ("global_batch_size", "world_size"))
    cells = {
        (row["strategy"], row["world_size"], row["global_batch_size"]): _cell(row, cell)
        for row in block.to_dict("records")
    }

    def rows_of(keys: Callable[[str], list[tuple]]) -> list[list[Any]]:
        names = in_order(block["strategy"])
        lines = [[name, *(cells.get(key, "") for key in keys(name))] for name in names]
        return [row for row in lines if any(row[1:])]

    if len(batches) > 1:
        head = [f"batch {batch:,}" for batch in batches]
        groups = [
            (
                processes(world) if len(worlds) > 1 else "",
                rows_of(lambda name, world=world: [(name, world, batch) for batch in batches]),
            )
            for world in worlds
        ]
        words += "" if len(worlds) > 1 else f", {processes(worlds[0])}"
    else:
        head = [processes(world) for world in worlds]
        groups = [("", rows_of(lambda name: [(name, world, batches[0]) for world in worlds]))]
        words += f", {batches[0]} sequences per step"
    return markup.table(f"Predicted {what}: {words}", ["strategy", *head], groups, NO_RUN)


def _cell(row: dict[str, Any], make: Cell) -> str | Html:
    if not pd.isna(row["why"]):
        return markup.missing("not predicted")
    lacks = shortfall(row)
    return markup.missing(lacks) if lacks else make(row)


def _in_words(rows: pd.DataFrame) -> str:
    """How many configurations of a box fit, and what is not predicted for which reason."""
    predicted_rows = rows[rows["why"].isna()]
    fitting = int(predicted_rows["fits"].astype(bool).sum())
    studies = listed(list(dict.fromkeys(rows["study"])))
    sentences = f"{fitting:,} of {count(len(predicted_rows), 'configuration')} would fit ({studies})."
    for why, times in Counter(rows["why"].dropna()).items():
        sentences += f" Not predicted: {count(times, 'configuration')} ({why})."
    return sentences


def _grouped(rows: pd.DataFrame, names: list[str]) -> Iterator[tuple[tuple, pd.DataFrame]]:
    yield from rows.groupby(names, sort=False)


def _blocks(rows: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """Each setting of a study with its words."""
    for _, block in _grouped(rows, list(expected.SETTING)):
        yield expected.setting_in_words(block.iloc[0].to_dict()), block
