"""Tables of what theory expects on boxes that nobody here has, in a look of their own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pandas as pd

from study.compare import expected
from study.compare.words import bytes_text, bytes_unit, in_order, processes
from study.report import markup
from study.report.markup import Html, number, seconds_unit
from study.report.run_rows import in_project

NO_RUN = "Predicted by study/theory, no run."
MEMORY_NOTE = "Whether it fits also counts what the allocator reserves, and what offload needs of host and disk."
TIMES_NOTE = "Small: the interval that nine of ten published times of that kind gave."

MakeCell = Callable[[dict[str, Any]], str]


def predictions(folders: Sequence[str], workload: str = "") -> pd.DataFrame:
    """Read the predicted records of a page, of one workload or of all; of folders that are not there, none.

    A folder that is not there is looked for in the project. Raises Refusal for records that cannot be read.
    """
    rows = expected.read_predicted([in_project(name) for name in folders])
    return rows[rows["workload"] == workload] if workload else rows


def predicted_memory(rows: pd.DataFrame) -> Html:
    """What a rank would hold at its peak, and what does not fit: for each box and study a table of each setting."""
    unit = bytes_unit(rows["peak_bytes_per_gpu"].max())

    def cell(row: dict[str, Any]) -> str:
        return f"\N{ALMOST EQUAL TO} {number(row['peak_bytes_per_gpu'] / unit.size)}"

    return _tables(rows, cell, f"peak memory of a rank, {unit.name}", MEMORY_NOTE)


def predicted_times(rows: pd.DataFrame) -> Html:
    """How long a step would take where it fits: for each box and study a table of each setting."""
    unit = seconds_unit(rows["seconds_per_step"].max())

    def cell(row: dict[str, Any]) -> str:
        seconds, low, high = (number(row[f"seconds_{end}"] / unit.size) for end in ("per_step", "low", "high"))
        return markup.below(f"\N{ALMOST EQUAL TO} {seconds}", f"{low} to {high}")

    return _tables(rows, cell, f"time of a step, {unit.name}", TIMES_NOTE)


def _tables(rows: pd.DataFrame, cell: MakeCell, what: str, note: str) -> Html:
    """A section for each box; its tables are folded, study by study, because they are many."""
    if rows.empty:
        return markup.note("There are no predicted records here; `zero-study predict` makes some.")
    section = Html('<section class="predicted">\n<h3>Predicted: {}</h3>\n{}\n</section>')
    sections = [markup.note(f"{NO_RUN} {note}")]
    for (box,), here in _grouped(rows, ["box"]):
        folded = [_unpredicted(here)]
        for (study,), of_study in _grouped(here, ["study"]):
            tables = [
                _table(block, expected.setting_in_words(block.iloc[0].to_dict()), cell, what)
                for _, block in _grouped(of_study, list(expected.SETTING))
            ]
            folded.append(markup.details(study, markup.lines(*tables)))
        sections.append(section.format(box, markup.lines(*folded)))
    return markup.lines(*sections)


def _unpredicted(rows: pd.DataFrame) -> Html:
    """What is not predicted, for which reason."""
    return markup.lines(
        *(
            markup.note(f"Not predicted: {times} of {len(rows)} ({why})")
            for why, times in Counter(rows["why"].dropna()).items()
        )
    )


def _table(block: pd.DataFrame, words: str, cell: MakeCell, what: str) -> Html:
    """One setting: a row for each strategy and number of processes, a column for each batch."""
    batches, worlds = (sorted(map(int, block[name].unique())) for name in ("global_batch_size", "world_size"))
    cells = {
        (row["strategy"], row["world_size"], row["global_batch_size"]): _cell(row, cell)
        for row in block.to_dict("records")
    }
    groups = []
    for world in worlds:
        names = in_order(block.loc[block["world_size"] == world, "strategy"])
        lines = [[name, *(cells.get((name, world, batch), "") for batch in batches)] for name in names]
        groups.append((processes(world), lines))
    head = ["strategy", *(f"batch {batch:,}" for batch in batches)]
    return markup.table(f"Predicted {what}: {words}", head, groups, NO_RUN)


def _cell(row: dict[str, Any], make: MakeCell) -> str:
    if not pd.isna(row["why"]):
        return markup.missing("not predicted")
    if row["fits"]:
        return make(row)
    short = f"short of {bytes_text(-row['free_bytes'])}" if row["free_bytes"] < 0 else f"too little {row['lacking']}"
    return markup.missing(f"does not fit ({short})")


def _grouped(rows: pd.DataFrame, names: list[str]) -> Iterator[tuple[Any, pd.DataFrame]]:
    yield from rows.groupby(names, sort=False)
