"""Draw figures of models on machines with GPUs, from the tables of study/report/by_machine.py.

Every figure has three panels: memory per GPU, tokens per second, and the price of a billion tokens. Predictions,
measurements by others and measurements by this project have different marks, which the legend names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullLocator
from matplotlib.transforms import blended_transform_factory

from study.report import drawing, plots
from study.report.by_machine import MEASURED, PREDICTED, QUANTITIES
from study.report.captions import Head
from zero_study.engines.strategy_names import in_order

HEADS = {"memory": "Memory per\nGPU (GiB)", "speed": "Tokens per\nsecond", "cost": "10⁹ tokens\n(US dollars)"}
WORDS = {"single": "one process", "ddp": "DDP", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3",
         "fsdp2": "FSDP2"}  # fmt: skip
OFFLOAD_COLOR = "#A87900"  # one color for each strategy, because a picture with small marks cannot rely on their shape
BEYOND = 1.75  # the axis of memory ends at this multiple of the memory of a GPU; larger values are drawn at its end

ROW, LINE, SMALL = 0.36, 0.19, 10.0  # of the overview: heights in inches, and the size of text in points
OVERHANG = 4.0  # points by which the label of a tick may be longer than its axis
LEFT, GAP, NUMBER = 0.19, 0.012, 0.115  # shares of the width: labels of rows, between panels, numbers of a panel


class Style(NamedTuple):
    """The size of marks and letters of a figure."""

    mark: float
    font: float


def models_on_machines(
    rows: pd.DataFrame, others: pd.DataFrame, best: pd.DataFrame, models: Mapping[str, str], head: Head
) -> Figure:
    """Draw the overview: every model on every machine, with one thin line per strategy.

    `rows` is the table of `by_machine.shown`, `others` that of `published`, and `best` that of `by_machine.best`, whose
    values are printed at the right end of each panel. `models` has the heading of each model.
    """
    style, places, handles = Style(3.6, SMALL), _places(rows, models), _handles(rows, others)
    last = max(places.lines.values())
    notes = ["The numbers are those of the recommended strategy.", "Without a number, no strategy fits."]
    if others[list(QUANTITIES)].notna().any(axis=None):
        notes.insert(0, "Measurements by others have different settings.")
    top, middle, bottom = 0.5, (last + 1) * ROW, 0.55 + LINE * (math.ceil(len(handles) / 2) + len(notes))  # inches
    total, width = top + middle + bottom, (1 - LEFT - 3 * NUMBER - 2 * GAP) / 3
    figure, panels = plt.subplots(1, 3, sharey=True, figsize=(drawing.WIDTH, total))
    for number, (axes, quantity) in enumerate(zip(panels, QUANTITIES, strict=True)):
        axes.set_position((LEFT + number * (width + NUMBER + GAP), bottom / total, width, middle / total))
        _prepare(axes, quantity, rows, others, style)
        for (model, machine), place in places.lines.items():
            names = places.strategies[model, machine]
            offsets = {name: place + (at - (len(names) - 1) / 2) * 0.16 for at, name in enumerate(names)}
            _draw(axes, quantity, _of(rows, model, machine), _of(others, model, machine), offsets, style)
            _print_best(axes, quantity, _of(best, model, machine), place, style)
    panels[0].set_ylim(last + 0.55, -0.45)
    panels[0].tick_params(labelleft=False)
    text: dict[str, Any] = {"va": "center", "fontsize": SMALL, "path_effects": drawing.HALO}
    text["transform"] = blended_transform_factory(figure.transFigure, panels[0].transData)
    for (_, machine), place in places.lines.items():
        panels[0].text(0.012, place, _short(machine), **text)
    for model, place in places.headings.items():
        panels[0].text(0.012, place, models[model], fontweight="bold", **text)
    figure.text(0.012, 0.06 / total, "\n".join(notes), fontsize=SMALL, linespacing=1.4)
    _legend(figure, handles, style, at=(0, (0.1 + len(notes) * LINE) / total))
    return drawing.finish(figure, head, legend=False)


def of_model(rows: pd.DataFrame, others: pd.DataFrame, head: Head) -> Figure:
    """Draw the values of one model in `by_machine.shown` and `published`, with one row per machine and strategy."""
    lines, headings, place = dict[tuple[str, str], float](), dict[str, float](), 0.0
    for machine in dict.fromkeys(rows["machine"]):
        headings[machine] = place
        for strategy in dict.fromkeys(rows.loc[rows["machine"] == machine, "strategy"]):
            place += 1
            lines[machine, strategy] = place
        place += 1.3
    style = Style(5, 10.5)
    handles = _handles(rows, others, with_strategies=False)
    top, bottom = 0.62, 0.4 + 0.22 * math.ceil(len(handles) / 2)  # inches
    total = top + 0.25 * place + bottom
    figure, panels = plt.subplots(1, 3, sharey=True, figsize=(drawing.WIDTH, total))
    figure.subplots_adjust(left=0.35, right=0.98, top=1 - top / total, bottom=bottom / total, wspace=0.12)
    for axes, quantity in zip(panels, QUANTITIES, strict=True):
        _prepare(axes, quantity, rows, others, style)
        for machine in headings:
            offsets = {strategy: at for (of, strategy), at in lines.items() if of == machine}
            ours, theirs = (table[table["machine"] == machine] for table in (rows, others))
            _draw(axes, quantity, ours, theirs, offsets, style)
    _say_what_does_not_fit(panels[1], rows, others, lines, style)
    panels[0].set_yticks(list(lines.values()), [strategy for _, strategy in lines], fontsize=style.font)
    panels[0].set_ylim(place - 0.7, -0.6)
    beside = blended_transform_factory(figure.transFigure, panels[0].transData)
    for machine, at in headings.items():
        panels[0].text(0.012, at, machine, transform=beside, va="center", fontsize=style.font, fontweight="bold")
    _legend(figure, handles, style, at=(0, 0))
    return drawing.finish(figure, head, legend=False)


def _say_what_does_not_fit(
    axes: Axes, rows: pd.DataFrame, others: pd.DataFrame, lines: Mapping[tuple[str, str], float], style: Style
) -> None:
    """Write "does not fit" instead of a speed. A row with a published speed has no place for it."""
    timed = others[others["speed"].notna()]
    taken = set(zip(timed["machine"], timed["strategy"], strict=True))
    for row in rows[~rows["fits"].astype(bool)].to_dict("records"):
        key = row["machine"], row["strategy"]
        if key not in taken:
            place: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "va": "center", "ha": "right"}
            axes.text(1, lines[key], "does not fit ", fontsize=style.font, path_effects=drawing.HALO, **place)


class _Places(NamedTuple):
    """The vertical places of the overview, in rows: headings of models, and machines with their strategies."""

    headings: dict[str, float]
    lines: dict[tuple[str, str], float]
    strategies: dict[tuple[str, str], list[str]]


def _places(rows: pd.DataFrame, models: Mapping[str, str]) -> _Places:
    headings, lines, strategies = dict[str, float](), dict[tuple[str, str], float](), {}
    place = 0.0
    for model in models:
        headings[model] = place
        of_model = rows[rows["model"] == model]
        for machine in dict.fromkeys(of_model["machine"]):
            place += 1
            lines[model, machine] = place
            strategies[model, machine] = list(dict.fromkeys(of_model.loc[of_model["machine"] == machine, "strategy"]))
        place += 1.1
    return _Places(headings, lines, strategies)


def _of(table: pd.DataFrame, model: str, machine: str) -> pd.DataFrame:
    return table[(table["model"] == model) & (table["machine"] == machine)]


def _short(machine: str) -> str:
    """Return the name of a machine for the overview, without what follows the name of the chip.

    The times sign is that of typography.
    """
    count, _, gpu = machine.partition(" x ")
    return f"{count} \N{MULTIPLICATION SIGN} {gpu.split('-')[0].upper()}"


def color_of(strategy: str) -> str:
    return OFFLOAD_COLOR if strategy.endswith("_offload") else str(plots.style_of(strategy)["color"])


def _prepare(axes: Axes, quantity: str, rows: pd.DataFrame, others: pd.DataFrame, style: Style) -> None:
    """Set the scale, the ticks and the head of a panel. The axis of memory shows the memory of a GPU as a line."""
    axes.spines[:].set_visible(False)
    axes.set_axisbelow(True)
    axes.grid(axis="x", color=drawing.INK, alpha=0.2, linewidth=0.6)
    axes.grid(axis="y", visible=False)
    axes.set_title(HEADS[quantity], fontsize=style.font, loc="left")
    axes.tick_params(labelsize=style.font, length=0)
    if quantity == "memory":
        capacity = float(rows["capacity"].max())
        axes.set_xlim(0, BEYOND * capacity)
        axes.set_xticks([0, 40, 80] if capacity < 120 else [0, round(capacity, -1)])
        axes.axvline(capacity, color=drawing.INK, linestyle="--", linewidth=1)
        return
    columns = [quantity, f"{quantity}_low", f"{quantity}_high"]
    values = pd.concat([rows[columns], others[columns]]).stack()
    low, high = (values.min(), values.max()) if len(values) else (1, 10)
    axes.set_xscale("log")
    axes.set_xlim(low / 1.4, high * 1.4)
    axes.set_xticks(_ticks(axes, style.font), minor=False)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: thousands(value)))
    axes.xaxis.set_minor_locator(NullLocator())


def _ticks(axes: Axes, font: float) -> list[float]:
    """Return as many round numbers for a logarithmic axis as have room for labels of this size, which is in points."""
    low, high = np.log10(axes.get_xlim())
    decade = axes.bbox.width * 72 / axes.figure.dpi / (high - low)  # in points
    halves, thirds = (
        [factor * 10.0**power for power in range(math.floor(low), math.ceil(high)) for factor in factors]
        for factors in ((1, 3), (1, 2, 5))
    )
    fitting: list[list[float]] = []
    for ticks in (thirds, *(halves[first::step] for step in (1, 2, 4, 3) for first in range(step))):
        reach = np.array([0.325 * font * len(thousands(tick)) for tick in ticks])  # of a label to both sides
        places = (np.log10(ticks) - low) * decade
        inside = (places > reach - OVERHANG) & (places < (high - low) * decade - reach + OVERHANG)
        reach, places = reach[inside], places[inside]
        if (np.diff(places) > reach[1:] + reach[:-1] + 0.4 * font).all():
            fitting.append(np.array(ticks)[inside].tolist())
    return max(fitting, key=len, default=[])


def _draw(
    axes: Axes,
    quantity: str,
    rows: pd.DataFrame,
    others: pd.DataFrame,
    offsets: Mapping[str, float],
    style: Style,
) -> None:
    """Draw one quantity of the strategies of a machine, each at its vertical place."""
    right = axes.get_xlim()[1]
    for row in rows.to_dict("records"):
        if not math.isnan(row[quantity]):
            _draw_with_interval(axes, quantity, row, offsets[row["strategy"]], style)
    for row in others.to_dict("records"):
        if not math.isnan(row[quantity]) and row["strategy"] in offsets:
            mark: dict[str, Any] = {"color": drawing.INK, "markersize": style.mark * 0.95, "markeredgewidth": 0}
            axes.plot(min(row[quantity], 0.985 * right), offsets[row["strategy"]], "D", **mark)


def _draw_with_interval(axes: Axes, quantity: str, row: Mapping[str, Any], place: float, style: Style) -> None:
    """Draw one value and the line of its interval. An interval without an end is dotted up to the edge."""
    left, right = axes.get_xlim()
    value, ends = row[quantity], [row[f"{quantity}_low"], row[f"{quantity}_high"]]
    color, is_measured, is_beyond = color_of(row["strategy"]), row["source"] == MEASURED, value > right
    low, high = (limit if math.isnan(end) else end for end, limit in zip(ends, (left, right), strict=True))
    if not is_beyond:
        line = ":" if any(map(math.isnan, ends)) else "-"
        axes.plot([low, min(high, right)], [place] * 2, color=color, linewidth=1.3, alpha=0.75, linestyle=line)
    mark: dict[str, Any] = {"markersize": style.mark * (1.5 if is_measured else 1), "markeredgewidth": 1}
    mark |= {"color": color, "markerfacecolor": color if row["fits"] else "none", "clip_on": False}
    axes.plot(min(value, 0.985 * right), place, ">" if is_beyond else "s" if is_measured else "o", **mark)


def _print_best(axes: Axes, quantity: str, best: pd.DataFrame, place: float, style: Style) -> None:
    """Print the value of the recommended strategy at the right end of a panel, in bold if it was measured."""
    if not len(best):
        text, weight = "none", "normal"
    else:
        row = best.iloc[0]
        source = row["memory_source" if quantity == "memory" else "speed_source"]
        text, weight = (
            f"{row[quantity]:,.0f}" if quantity == "cost" else thousands(row[quantity]),
            "bold" if source == MEASURED else "normal",
        )
    axes.text(1.07, place, text, transform=axes.get_yaxis_transform(), va="center", fontsize=style.font,
              fontweight=weight)  # fmt: skip


def thousands(value: float) -> str:
    """Format a number in at most four characters, such as 14, 1.4k, 580k or 2.3M."""
    if math.isnan(value):
        return "none"
    for size, unit in ((1e6, "M"), (1e3, "k"), (1, "")):
        if value >= 0.9995 * size:
            scaled = value / size
            digits = 1 if unit and scaled < 9.95 and scaled % 1 > 0.01 else 0
            return f"{scaled:.{digits}f}{unit}"
    return f"{value:.2g}"


def _handles(rows: pd.DataFrame, others: pd.DataFrame, with_strategies: bool = True) -> list[Line2D]:
    """Return the entries of the legend: the colors of strategies, and one entry per kind of mark that is drawn."""
    strategies = in_order(rows["strategy"]) if with_strategies else []
    strategies.sort(key=lambda name: name.endswith("_offload"))
    words = {"offload" if name.endswith("_offload") else WORDS.get(name, name): color_of(name) for name in strategies}
    handles = [Line2D([], [], color=color, linewidth=3, label=label) for label, color in words.items()]
    mark: dict[str, Any] = {"color": drawing.INK, "markersize": 5}
    if (rows["source"] == PREDICTED).any():
        handles.append(Line2D([], [], marker="o", label="predicted, with interval", **mark))
    if not rows["fits"].all():
        hollow: dict[str, Any] = {"markerfacecolor": "none", "linestyle": ""}
        handles.append(Line2D([], [], marker="o", label="does not fit", **hollow, **mark))
        handles.append(Line2D([], [], marker=">", label="needs even more", **hollow, **mark))
    if (rows["source"] == MEASURED).any():
        handles.append(Line2D([], [], marker="s", label="measured by this project", **mark))
    if others[list(QUANTITIES)].notna().any(axis=None):
        handles.append(Line2D([], [], marker="D", linestyle="", label="measured by others", **mark))
    return [*handles, Line2D([], [], color=drawing.INK, linestyle="--", linewidth=1, label="memory of a GPU")]


def _legend(figure: Figure, handles: list[Line2D], style: Style, at: tuple[float, float]) -> None:
    """Add a legend in two columns at the left end of the figure, `at` the place of its lower left corner."""
    look: dict[str, Any] = {"handlelength": 1.4, "columnspacing": 1.2, "labelspacing": 0.3}
    place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": at, "borderaxespad": 0.2}
    figure.legend(handles=handles, ncols=2, fontsize=style.font, **look, **place)
