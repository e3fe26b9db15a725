"""Draw the figures of the notebooks with matplotlib, from the tables of study/report/tables.py."""

from __future__ import annotations

import math
import string
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from study.compare.bits import ROUNDINGS, Cell
from study.compare.predicted import step_peak
from study.compare.verdict import Verdict
from study.report.captions import Head
from study.report.drawing import HALO, INK, PAPER, TEXT_POINTS, WIDTH, dress, finish, panel
from study.report.tables import centers, steps_of
from zero_study.engines.strategy_names import StrategyName, in_order

ROW = 0.34  # inches per bar
GRAY = "#7f7f7f"  # color of ranges, and of variations of the control
# One color per stage, distinguishable for color-blind readers too (after Okabe and Ito). One marker per variation.
COLORS = {"single": "#7A6FD0", "ddp": "#888888", "zero0": "#A87900", "zero1": "#2E86D0", "zero2": "#009E73",
           "zero3": "#D55E00", "fsdp2": "#C0609A"}  # fmt: skip
MARKS = {"": ("o", "-"), "cpu_offload": ("s", "--"), "nvme_offload": ("^", ":"), "tuned": ("D", "-."),
         "no_reshard": ("v", "-."), "hpz": ("P", ":")}  # fmt: skip
PART_COLORS = {"parameters": "#5558C8", "gradients": "#8C90E8", "optimizer states": "#B9BCF5",
                "offloaded": "#4FA8A0", "communication buffers": "#C79A2B", "gathered parameters": "#009E73",
                "activations and logits": "#9A9A9A", "temporary buffers": "#D98C6A"}  # fmt: skip

FAILURES = {"wrong": ("#D55E00", "trains wrongly"), "crashed": ("#C79A2B", "crashes")}
WRONG = "#C0392B"  # color of trainings with a planted fault
LEAST_DIFFERENCE = 1e-10  # relative; smaller differences are drawn here, because a logarithmic axis cannot show 0


def style_of(strategy: str) -> dict[str, Any]:
    """Return the color, marker and line style that a strategy has in every figure."""
    name = StrategyName.parse(strategy)
    mark, line = MARKS.get(name.variation, ("X", "--"))
    return {"color": COLORS.get(name.engine, "#B0703C"), "marker": mark, "linestyle": line}


def loss_curves(steps: pd.DataFrame, head: Head, control: str = "ddp", window: int = 5) -> Figure:
    """Draw the loss of the baseline, and below it how much the loss of each strategy differs from it.

    Both are means over seeds; repeats of a seed are averaged first. The band shows the range over the control's seeds.
    The losses are means over `window` steps, and the differences are the largest of `window` steps. A strategy is drawn
    if it ran with all seeds of the control. If the control has no run here, as `single` on several processes, the
    losses of all strategies are drawn, each over all of its seeds.
    """
    by_seed = steps.groupby(["strategy", "seed", "step"])["loss"].mean().unstack(["strategy", "seed"])
    smooth = by_seed.rolling(window, min_periods=1).mean()
    names = in_order(smooth.columns.get_level_values("strategy"))
    if control not in names:
        figure, axes = panel(3.4)
        for name in names:
            axes.plot(smooth[name].mean(axis=1), label=name, linewidth=1.4, **{**style_of(name), "marker": None})
        axes.set(xlabel="optimizer step", ylabel=f"training loss (nats,\nmean of {window} steps)")
        return finish(figure, head)
    figure, (upper, lower) = plt.subplots(2, 1, sharex=True, figsize=(WIDTH, 4.4), layout="constrained")
    band = smooth[control]
    seeds = list(band.columns)
    upper.fill_between(band.index, band.min(axis=1), band.max(axis=1), color=GRAY, alpha=0.3, linewidth=0)
    upper.plot(band.mean(axis=1), label=f"{control}: mean, range of seeds", color=INK, linewidth=1.6)
    largest = 0.0
    for name in names:
        if name != control and set(seeds) <= set(smooth[name].columns):
            mean, own = by_seed[control].mean(axis=1), by_seed[name][seeds].mean(axis=1)
            distance = ((own - mean) / mean).abs().rolling(window, min_periods=1).max()
            largest = max(largest, float(distance.max()))
            style = {**style_of(name), "marker": None, "linewidth": 1.4}
            distance = distance.clip(lower=LEAST_DIFFERENCE)
            upper.plot([], [], label=name, **style)  # for the legend
            lower.plot(distance.index, distance, **style)
    for axes in (upper, lower):
        dress(axes)
    upper.set(ylabel=f"loss of {control} (nats,\nmean of {window} steps)")
    lower.set(
        xlabel="optimizer step", ylabel=f"largest relative difference\nof {window} steps, logarithmic", yscale="log"
    )
    lower.set_ylim(LEAST_DIFFERENCE / 2, max(largest * 3, 1e-6))
    lower.axhline(0.001, color=INK, linewidth=1, linestyle=":")
    lower.annotate(" 0.1 %", (0, 0.001), xycoords=("axes fraction", "data"), va="bottom")
    return finish(figure, head)


def peak_by_part(runs: pd.DataFrame, head: Head, control: str = "ddp") -> Figure:
    """Draw the predicted peak memory by part (bars) and the measured peak (short line and number)."""
    figure, axes = panel(ROW * runs["strategy"].nunique() + 0.9)
    peaks, ends = _peaks(axes, runs)
    for place, (name, peak) in enumerate(peaks.items()):
        relative = "" if name == control or control not in peaks else f" ({100 * (peak / peaks[control] - 1):+.0f} %)"
        axes.text(ends[name], place, f"  {peak:.2f}{relative}", va="center")
    axes.margins(x=0.3)
    axes.set(xlabel="peak memory of tensors (GiB)")
    return finish(figure, head)


def _peaks(axes: Axes, runs: pd.DataFrame, units: float = 1.0) -> tuple[pd.Series, pd.Series]:
    """Draw predicted parts and measured peaks, with `units` per GiB. Return the peaks and the ends of the rows."""
    of = runs.drop_duplicates("strategy").set_index("strategy")
    predictions = {name: step_peak(record) for name, record in of["record"].items() if record}
    theory = {name: predicted.parts for name, predicted in predictions.items() if predicted}
    peaks = runs.groupby("strategy")["peak_gib"].mean().mul(units).loc[in_order(of.index)]
    parts = gib_by_part(theory).reindex(peaks.index).reindex(columns=[*PART_COLORS]).fillna(0) * units
    start = stacked(axes, parts, 0.01 * peaks.max())
    axes.plot(peaks, peaks.index, "|", color=INK, markersize=15, markeredgewidth=2.5, label="measured peak")
    return peaks, np.fmax(peaks, start)


def losses_peaks_and_times(runs: pd.DataFrame, head: Head, control: str = "ddp") -> Figure:
    """Draw the losses of the strategies, their peak memory by part, and their step times if there are any.

    Lines of losses become thinner from strategy to strategy, so that equal losses are visible behind each other.
    """
    names = in_order(runs["strategy"])
    seconds = runs.groupby("strategy")["step_seconds"].median().reindex(names).dropna()
    heights = [1.9, *(ROW * len(rows) + 0.7 for rows in (names, seconds) if len(rows))]
    shape: dict[str, Any] = {"figsize": (WIDTH, sum(heights)), "height_ratios": heights, "layout": "constrained"}
    figure, panels = plt.subplots(len(heights), 1, **shape)
    losses = steps_of(runs).groupby(["strategy", "step"])["loss"].mean().unstack("strategy")
    for place, name in enumerate(names):
        style = {**style_of(name), "marker": None, "linestyle": "-"}
        panels[0].plot(losses[name], label=name, linewidth=1.5 + 6 * (1 - place / len(names)), **style)
    panels[0].xaxis.set_major_locator(MaxNLocator(integer=True))
    panels[0].set(xlabel="optimizer step", ylabel="training loss (nats)")
    unit, units = ("GiB", 1.0) if runs["peak_gib"].max() >= 1 else ("MiB", 1024.0)
    peaks, ends = _peaks(panels[1], runs, units)
    panels[1].set(xlabel=f"peak memory of tensors ({unit})")
    _add_ratios(panels[1], peaks, ends, control)
    if len(seconds):
        panels[2].barh(seconds.index, seconds, color=[style_of(name)["color"] for name in seconds.index], height=0.68)
        panels[2].invert_yaxis()
        panels[2].set(xlabel="median time of a step (seconds)")
        _add_ratios(panels[2], seconds, seconds, control)
    for axes in panels:
        dress(axes)
    return finish(figure, head)


def _add_ratios(axes: Axes, values: pd.Series, ends: pd.Series, control: str) -> None:
    """Write each value, and in parentheses its ratio to the baseline's, at the end of its row."""
    for place, (name, value) in enumerate(values.items()):
        ratio = f" ({value / values[control]:.2f}x)" if control in values and name != control else ""
        axes.text(ends[name], place, f"  {value:.3g}{ratio}", va="center")
    axes.margins(x=0.35)


def predicted_parts(parts: pd.DataFrame, usable_gib: float, head: Head) -> Figure:
    """Draw the predicted peak memory of a GPU by part (GiB), its sum, and the memory that a program can use.

    `parts` has a row per strategy and a column per part, as `gib_by_part` returns them.
    """
    parts = parts.reindex(columns=[*PART_COLORS]).fillna(0)
    figure, axes = panel(ROW * len(parts) + 0.9)
    ends = stacked(axes, parts, 0.05)
    right = max(usable_gib, ends.max())
    for place, end in enumerate(ends):
        axes.text(end, place, f" {end:.1f}", va="center")
    axes.axvline(usable_gib, color=INK, linestyle="--", label=f"usable memory: {usable_gib:.1f} GiB")
    axes.set_xlim(0, right * 1.15)
    axes.set(xlabel="peak memory of a GPU (GiB)")
    return finish(figure, head)


def gib_by_part(parts: Mapping[str, Mapping[Any, Any]]) -> pd.DataFrame:
    """Return the sizes of the parts of memory in GiB, with a row per strategy and a readable name for each part."""
    table = pd.DataFrame(parts, dtype=float).T.div(2**30)
    table.columns = [str(part).replace("_", " ") for part in table.columns]
    table = table.reindex(columns=[*PART_COLORS, "activations", "logits"]).fillna(0)
    table["activations and logits"] = table.pop("activations") + table.pop("logits")
    return table


def stacked(axes: Axes, parts: pd.DataFrame, least: float) -> pd.Series:
    """Draw a stacked bar per row, and return the ends of the bars. Parts that never exceed `least` have no label."""
    start = pd.Series(0.0, index=parts.index)
    for part, color in PART_COLORS.items():
        if parts[part].max() > least:
            axes.barh(parts.index, parts[part], left=start, color=color, label=part, height=0.68)
        start += parts[part]
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    return start


def _bars(values: pd.Series, label: str, reach: pd.Series | None = None, digits: int = 2) -> tuple[Figure, Axes]:
    """Draw one bar per row of `values`, with the number at the end of the bar, in the color of the row's strategy.

    If `reach` is given and larger than the value, the number is at `reach`.
    """
    figure, axes = panel(ROW * len(values) + 0.9)
    names = [str(name) for name in values.index]
    axes.barh(names, values, color=[style_of(name)["color"] for name in names], height=0.66)
    ends = values if reach is None else np.fmax(values, reach)
    for place, (value, end) in enumerate(zip(values, ends, strict=True)):
        gap = "  " if reach is None else "    "  # a mark is at the end
        axes.text(end, place, f"{gap}{value:.{digits}f}", va="center", path_effects=HALO)
    axes.invert_yaxis()
    axes.margins(x=0.16)
    if not digits:
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.set(xlabel=label)
    axes.grid(axis="y", visible=False)
    return figure, axes


def relative_time(ratios: pd.DataFrame, head: Head, control: str = "ddp") -> Figure:
    """Draw step times relative to the baseline: `tables.centers` of the column `ratio` (bar) and its range (line)."""
    statistics = ratios.groupby("strategy")["ratio"].agg(["min", "max"]).loc[in_order(ratios["strategy"])]
    values = centers(ratios).reindex(statistics.index)
    values.loc[values.index == control] = 1.0
    figure, axes = _bars(values, f"step time, relative to {control}", statistics["max"])
    axes.hlines(statistics.index, statistics["min"], statistics["max"], color=INK, linewidth=2.5, label="range of runs")
    axes.axvline(1, color=INK, linewidth=0.8)
    return finish(figure, head)


def largest_models(trained: pd.Series, predicted: pd.Series, control: str, head: Head) -> Figure:
    """Draw the millions of parameters of the largest model that trained (bar) and that was predicted to fit (mark)."""
    figure, axes = _bars(trained, "largest model (millions of parameters)", predicted, digits=0)
    axes.plot([], [], "s", color=GRAY, markersize=9, label="measured: trained")
    mark: dict[str, Any] = {"color": PAPER, "markeredgecolor": INK, "markeredgewidth": 1.6, "markersize": 9}
    axes.plot(predicted, predicted.index, "D", label="predicted to fit", **mark)
    axes.axvline(trained[control], color=INK, linewidth=1.2, linestyle="--", zorder=0, label=f"measured, {control}")
    return finish(figure, head)


def time_against_memory(ratios: pd.DataFrame, head: Head, control: str = "ddp") -> Figure:
    """Draw each strategy at its time and its memory, both relative to the baseline: columns `time` and `memory`."""
    figure, axes = panel(4.2)
    for name, (time, memory) in ratios[["time", "memory"]].iterrows():
        axes.plot(time, memory, **{**style_of(str(name)), "linestyle": ""}, markersize=9)
        place: dict[str, Any] = {"textcoords": "offset points", "fontsize": TEXT_POINTS}
        axes.annotate(str(name), (time, memory), (8, 5), color=style_of(str(name))["color"], **place)
    axes.axhline(1, color=INK, linewidth=0.8, linestyle=":")
    axes.margins(x=0.32, y=0.12)
    axes.set(xlabel=f"time per step, relative to {control}", ylabel=f"peak memory, relative to {control}")
    axes.set_ylim(bottom=0)
    return finish(figure, head)


def failing_cases(counts: pd.DataFrame, cases: int, package: str, head: Head) -> Figure:
    """Draw the number of cases that train wrongly or crash, with one bar per release or group of equal releases."""
    figure, axes = panel(ROW * len(counts) + 0.9)
    start = pd.Series(0, index=counts.index)
    for verdict, (color, label) in FAILURES.items():
        values = counts[verdict]
        drawn = axes.barh(counts.index, values, left=start, color=color, label=label)
        axes.bar_label(drawn, [str(value) if value else "" for value in values], label_type="center", color="black")
        start += values
    axes.invert_yaxis()
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.set(xlabel=f"number of cases that fail, of {cases}", ylabel=f"release of {package}")
    axes.grid(axis="y", visible=False)
    return finish(figure, head)


def first_screen(peaks: pd.Series, times: pd.Series, ink: str, title: str) -> Figure:
    """Draw peak memory per process (GiB) and step time relative to DDP, by strategy, for reports/memory-and-time.md.

    The figure is narrow and its letters are large, so that the letters are more than 10 pixels high on a phone.
    """
    order = in_order(peaks.index)
    figure, panels = plt.subplots(1, 2, figsize=(5, 0.46 * len(order) + 1.5), sharey=True, layout="constrained")
    heads = "Peak memory per\nprocess (GiB)", "Time per step\n(relative to DDP)"
    for axes, values, head in zip(panels, (peaks[order], times[order]), heads, strict=True):
        bars = axes.barh(order, values, color=[style_of(name)["color"] for name in order], height=0.66)
        axes.bar_label(bars, [f"{value:.2f}" for value in values], padding=4, color=ink, fontsize=11)
        axes.set_title(head, color=ink, fontsize=11, loc="left")
        axes.tick_params(colors=ink, labelsize=11, bottom=False, labelbottom=False, left=False)
        axes.spines[:].set_visible(False)
        axes.margins(x=0.2)
    panels[0].set_yticks(range(len(order)), [_readable(name) for name in order])
    panels[0].invert_yaxis()
    figure.suptitle(title, color=ink, fontsize=11.5, fontweight="bold", x=0.01, ha="left")
    legend = "Less is better. Memory of tensors, without libraries."
    figure.supxlabel(legend, color=ink, fontsize=10.5, x=0.01, ha="left")
    plt.close(figure)
    return figure


def _readable(strategy: str) -> str:
    """Return the name of a strategy for the figure, in two lines, such as "ZeRO-3" and "smaller buffers"."""
    name = StrategyName.parse(strategy)
    engine = name.engine.replace("ddp", "DDP").replace("fsdp", "FSDP").replace("zero", "ZeRO-")
    buffers = {"": "default buffers", "tuned": "smaller buffers"}
    return f"{engine}\n{buffers[name.variation]}" if name.engine.startswith("zero") else engine


def final_losses(verdict: Verdict, head: Head, control: str = "ddp") -> Figure:
    """Draw how much the final held-out loss of each run differs from the baseline's, in percent.

    There is a row per strategy or variation, and a stroke per seed. Variations of the control are gray, and trainings
    with a planted fault are red.
    """
    rows = [(f"variation: {name}", differences, GRAY) for name, differences in verdict.null.items()]
    rows += [(arm.name, arm.differences, style_of(arm.name)["color"]) for arm in verdict.arms if not arm.is_broken]
    rows += [(f"fault: {arm.name}", arm.differences, WRONG) for arm in verdict.arms if arm.is_broken]
    figure, axes = panel(0.4 * len(rows) + 0.9)
    for place, (_, differences, color) in enumerate(rows):
        distances = [max(abs(value), LEAST_DIFFERENCE) * 100 for value in differences.values()]
        axes.plot(distances, [place] * len(distances), "|", markersize=14, markeredgewidth=1.6, color=color)
    axes.set_yticks(range(len(rows)), [name for name, *_ in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set(xscale="log", xlabel=f"difference of held-out loss from {control} (%)")
    axes.xaxis.set_major_locator(LogLocator(numticks=6))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.plot([], [], "|", markersize=14, markeredgewidth=1.6, color=GRAY, label=f"{control}, only rounding varied")
    axes.plot([], [], "|", markersize=14, markeredgewidth=1.6, color=WRONG, label="fault put in on purpose")
    return finish(figure, head)


def lines(table: pd.DataFrame, x: tuple[str, str], y: tuple[str, str], head: Head, control: str = "ddp") -> Figure:
    """Draw the median of one column at each value of another, with one line per strategy, on logarithmic axes.

    `x` and `y` are a column and the label of its axis. The name of each strategy is at the end of its line.
    """
    (x_column, x_label), (y_column, y_label) = x, y
    figure, axes = panel(4.6)
    by_name = {
        name: table[table["strategy"] == name].groupby(x_column)[y_column].median()
        for name in in_order(table["strategy"])
    }
    by_name = {name: line for name, line in by_name.items() if len(line) > 1 or table[x_column].nunique() == 1}
    for name, line in by_name.items():
        axes.plot(line, linewidth=2.6 if name == control else 1.4, **style_of(name))
    axes.set(xscale="log", yscale="log", xlabel=f"{x_label}, logarithmic", ylabel=f"{y_label}, logarithmic")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_locator(NullLocator())
    if (values := sorted(table[x_column].unique()))[-1] <= 16:  # numbers of processes
        axes.set_xticks(values)
    ends = sorted((math.log(line.iloc[-1]), name) for name, line in by_name.items())
    at, gap = np.array([end for end, _ in ends]), np.diff(np.log(axes.get_ylim()))[0] / 17
    for _ in range(99):  # move the names until they do not overlap
        push = np.clip(gap - np.diff(at), 0, None) / 2
        at[:-1] -= push
        at[1:] += push
    placement: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "va": "center", "annotation_clip": False}
    placement["fontsize"] = TEXT_POINTS
    for place, (_, name) in zip(np.exp(at), ends, strict=True):
        axes.annotate(f" {name}", (1, place), color=style_of(name)["color"], **placement)
    return finish(figure, head)


def bits(
    rows: Mapping[str, Sequence[Cell | None]], columns: Sequence[str], head: Head, reference: str = "ddp"
) -> Figure:
    """Draw which trainings equal the reference in every bit, with a row per strategy and a column per setting.

    A green square means that all bits equal those of the reference. Any other square contains the numbers of the
    roundings that differ, which the legend names. If there are many columns, they have letters, which it names too.
    """
    cells = [cell for row in rows.values() for cell in row if cell is not None]
    used = [name for name in ROUNDINGS if any(name in cell.roundings for cell in cells)]
    letters = dict(zip(string.ascii_uppercase, columns, strict=False)) if len(columns) > 4 else {}
    figure, axes = panel(0.32 * len(rows) + 0.22 * (len(used) + len(letters)) + 1.2)
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    for y, row in enumerate(rows.values()):
        for x, cell in enumerate(row):
            if cell is not None:
                is_equal = cell.step is None
                color = COLORS["zero2"] if is_equal else "none"
                axes.add_patch(Rectangle((x - 0.46, y - 0.4), 0.92, 0.8, facecolor=color, edgecolor=INK))
                text = "=" if is_equal else _numbers(cell, used)
                axes.text(x, y, text, ha="center", va="center", fontsize=10, color="white" if is_equal else INK)
    axes.set_xlim(-0.5, len(columns) - 0.5)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks(range(len(rows)), list(rows), fontsize=10)
    axes.set_xticks(range(len(columns)), [*letters] or [textwrap.fill(text, 14) for text in columns], fontsize=10)
    axes.tick_params(length=0)
    axes.xaxis.tick_top()
    legend = [
        *(f"{letter}  {name}" for letter, name in letters.items()),
        f"=  identical to {reference} in every bit",
        *(f"{number}  {name}" for number, name in enumerate(used, 1)),
    ]
    if any("?" in text.get_text() for text in axes.texts):
        legend.append("?  the cause of the difference is unknown")
    figure.supxlabel("\n".join(legend), fontsize=10, x=0.02, ha="left")
    return finish(figure, head)


def _numbers(cell: Cell, used: Sequence[str]) -> str:
    """Return the numbers of the roundings of a cell, separated by commas.

    The text is "fault" for a planted fault, and "?" for a difference without a known cause.
    """
    if any(name not in used for name in cell.roundings):
        return "fault"
    return ",".join(str(used.index(name) + 1) for name in cell.roundings) or "?"


def filter_runs(table: pd.DataFrame, **conditions: Any) -> pd.DataFrame:
    """Return the rows of a table that have these values in these columns. A list of values selects any of them."""
    for column, value in conditions.items():
        values = list(value) if isinstance(value, Iterable) and not isinstance(value, str) else [value]
        table = table[table[column].isin(values)]
    return table
