"""How are predictions drawn, so that nobody takes them for measurements? Hatched bars and hollow marks, none filled."""

from __future__ import annotations

import re
from typing import Any

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from study.compare.expected import SETTING, setting_in_words
from study.compare.words import Unit, bytes_text, bytes_unit, in_order, processes
from study.report.figures.drawing import (
    INK,
    Figure,
    at_edge,
    below,
    beside,
    finish,
    house_style,
    log_ticks,
    panels,
    rows,
    style,
)
from study.report.figures.memory import BAR, WITHIN_REACH
from study.report.figures.parts import NAMES, PREDICTED, hatched, sizes
from study.report.figures.setting import Setting, without_value
from study.report.words import listed, seconds_unit

NO_RUN = "Predicted by study/theory, no run."


def predicted_memory(table: pd.DataFrame) -> Figure:
    """Draw what theory expects to fill a rank's memory at its peak, per strategy, beside what GPUs have for it.

    Boxes of as many GPUs may share it. Raises ValueError where nothing is predicted, or the rows are not of one study,
    setting, batch and number of processes.
    """
    about = _about(table)
    usable = table.groupby("box")["usable_bytes"].min().sort_values()
    table = table.drop_duplicates("strategy").set_index("strategy")  # the peak is the same on every GPU
    strategies = in_order(table.index)
    peaks = table["peak_bytes_per_gpu"]
    unit = bytes_unit(peaks.max())
    name = f"predicted-memory-{about.slug}"
    with house_style(name), matplotlib.rc_context({"hatch.linewidth": 0.6}):
        canvas, (ax,) = panels([0.33 * len(strategies) + 0.75])
        rows(ax, _labels(table, strategies))
        for row, strategy in enumerate(strategies):
            prediction = table.loc[strategy]
            start = 0.0
            for part, size in sizes(prediction["parts"]).items():
                if not size:
                    continue
                ax.add_patch(hatched(Rectangle((start, row - BAR / 2), size / unit.size, BAR), part))
                start += size / unit.size
            host = f" + {bytes_text(prediction['host_bytes'])} host" if prediction["host_bytes"] else ""
            beside(ax, row, f"\N{ALMOST EQUAL TO} {unit.text(peaks[strategy])}{host}", style="italic")
        _draw_usable(ax, usable, peaks.max(), unit)
        ax.set_xlabel(f"predicted peak memory of a rank, {unit.name}")
        ax.xaxis.set_major_locator(MaxNLocator(6))
        parts_shown = [part for part in PREDICTED if any(sizes(parts).get(part) for parts in table["parts"])]
        below(canvas, [hatched(Patch(), part) for part in parts_shown], [NAMES[part] for part in parts_shown])

        least, most = peaks.idxmin(), peaks.idxmax()
        alt = f"Predicted peak memory of a rank under {len(strategies)} strategies: from {bytes_text(peaks[least])} "
        alt += f"({least}) to {bytes_text(peaks[most])} ({most})."
        caption = f"{NO_RUN} Tensors of a rank at the step's highest moment. A GPU has for them and for what the "
        caption += f"allocator wastes: {', '.join(f'{bytes_text(size)} ({box})' for box, size in usable.items())}."
        return finish(canvas, name, alt, caption + about.words)


def predicted_times(table: pd.DataFrame) -> Figure:
    """Draw how long theory expects a step to take, per strategy that fits, with its interval.

    Raises ValueError where nothing is predicted to fit, or the rows are not of one box, study, setting, batch and
    number of processes.
    """
    about = _about(table, "box")
    table = table.set_index("strategy")
    strategies = in_order(table.index)
    missing = {strategy: why for strategy in strategies if (why := shortfall(table.loc[strategy].to_dict()))}
    fitting = table[~table.index.isin(missing)]
    if fitting.empty:
        raise ValueError(f"nothing fits {table['box'].iloc[0]}")
    seconds = fitting["seconds_per_step"]
    unit = seconds_unit(seconds.max())
    name = f"predicted-times-{about.slug}"
    with house_style(name):
        canvas, (ax,) = panels([0.33 * len(strategies) + 0.65])
        rows(ax, _labels(table, strategies))
        for row, strategy in enumerate(strategies):
            if strategy in missing:
                at_edge(ax, row, missing[strategy])
                continue
            look, prediction = style(strategy), fitting.loc[strategy]
            ends = prediction["seconds_low"] / unit.size, prediction["seconds_high"] / unit.size
            ax.hlines(row, *ends, color=look.color, linewidth=1.2, linestyle=(0, (3, 2)))
            ax.plot(seconds[strategy] / unit.size, row, linestyle="none", marker=look.marker, markersize=7,
                    color=look.color, markerfacecolor="none", markeredgewidth=1.5)  # fmt: skip
            beside(ax, row, f"\N{ALMOST EQUAL TO} {unit.text(seconds[strategy])}", style="italic")
        ax.set_xscale("log")
        ax.set_xlim(fitting["seconds_low"].min() / unit.size / 1.1, fitting["seconds_high"].max() / unit.size * 1.1)
        log_ticks(ax.xaxis)
        ax.set_xlabel(f"predicted {unit.name} per step (axis logarithmic)")
        marks = [Line2D([], [], color=INK, linestyle="none", marker="o", markersize=7, markerfacecolor="none"),
                 Line2D([], [], color=INK, linewidth=1.2, linestyle=(0, (3, 2)))]  # fmt: skip
        below(canvas, marks, ["predicted", "interval of nine of ten published"])

        least, most = seconds.idxmin(), seconds.idxmax()
        alt = f"Predicted time of a step under {len(seconds)} strategies that fit: from {unit.text(seconds[least])} "
        alt += f"({least}) to {unit.text(seconds[most])} ({most})." + without_value(missing)
        caption = f"{NO_RUN} Time of an optimizer step; dashed: the interval that nine of ten published times gave. "
        caption += "Strategies whose lines overlap, theory does not rank."
        return finish(canvas, name, alt, caption + about.words + without_value(missing))


def shortfall(row: dict[str, Any]) -> str | None:
    """Say why a configuration does not fit; None: it does."""
    if row["fits"]:
        return None
    what = f"short of {bytes_text(-row['free_bytes'])}" if row["free_bytes"] < 0 else f"too little {row['lacking']}"
    return f"does not fit ({what})"


def _about(table: pd.DataFrame, *also: str) -> Setting:
    """What all rows of a figure have in common. `single` is one process beside any number."""
    if table.empty or table["why"].notna().any():
        raise ValueError("a configuration without a prediction, or none at all; filter the rows first")
    sharded = table[table["strategy"] != "single"]
    worlds = (table if sharded.empty else sharded)["world_size"]
    for column in (*also, "study", *SETTING, "global_batch_size"):
        if len(values := table[column].unique()) > 1:
            raise ValueError(f"{column} is {listed(values)}; a figure is of one: filter the rows first")
    if worlds.nunique() > 1:
        raise ValueError(f"world_size is {listed(worlds.unique())}; a figure is of one: filter the rows first")
    first = table.iloc[0]
    beside_others = " (single: 1)" if worlds.max() > 1 and "single" in set(table["strategy"]) else ""
    boxes = listed(list(table["box"].unique()))
    trained = f"{setting_in_words(first.to_dict())}, {first['global_batch_size']} sequences per step"
    words = f" Setting: {trained}, {processes(worlds.max())}{beside_others}; {boxes}; of the study {first['study']}."
    slug = re.sub(r"[^a-z0-9]+", "-", f"{boxes} {first['study']} {trained} {worlds.max()}x".lower())
    return Setting(words, slug)


def _labels(table: pd.DataFrame, strategies: list[str]) -> list[str]:
    several = table["world_size"].max() > 1
    return [f"{name} (1 process)" if several and name == "single" else name for name in strategies]


def _draw_usable(ax: Axes, usable: pd.Series, longest: float, unit: Unit) -> None:
    """Draw what GPUs have for tensors as lines, of those that are near."""
    near = {bytes_text(size): size for size in usable if size <= WITHIN_REACH * longest}
    for text, size in near.items():
        ax.axvline(size / unit.size, color=INK, linewidth=1.2, linestyle=(0, (5, 3)))
        ax.annotate(text, (size / unit.size, 1), xycoords=("data", "axes fraction"),
                    xytext=(0, 3), textcoords="offset points", ha="center", annotation_clip=False)  # fmt: skip
    ax.set_xlim(0, max([longest, *near.values()]) / unit.size * 1.03)
