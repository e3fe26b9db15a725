"""Figures of the notebooks, drawn with matplotlib from the tables of study/report/tables.py."""

from __future__ import annotations

import math
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
from study.engines.strategy_names import StrategyName, in_order

WIDTH = 6.0  # inches; text of 12 points is then readable on a phone
ROW = 0.36  # inches per bar
INK = "#7f7f7f"  # color of text and axes; readable on white and on black, because the background is transparent
LOOK: dict[Any, Any] = dict.fromkeys(
    ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK
)
LOOK |= dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), "none")
plt.rcParams.update(LOOK | {"font.size": 12, "figure.dpi": 110, "legend.frameon": False})
# One color per stage, distinguishable for color-blind readers too (after Okabe and Ito). One marker per variation.
COLORS = {"single": "#7A6FD0", "ddp": "#888888", "zero0": "#A87900", "zero1": "#2E86D0", "zero2": "#009E73",
           "zero3": "#D55E00", "fsdp2": "#C0609A"}  # fmt: skip
MARKS = {"": ("o", "-"), "cpu_offload": ("s", "--"), "nvme_offload": ("^", ":"), "tuned": ("D", "-."),
         "no_reshard": ("v", "-."), "hpz": ("P", ":")}  # fmt: skip
PART_COLORS = {"parameters": "#5558C8", "gradients": "#8C90E8", "optimizer states": "#B9BCF5",
                "offloaded": "#4FA8A0", "communication buffers": "#C79A2B", "gathered parameters": "#009E73",
                "activations and logits": "#9A9A9A", "temporary buffers": "#D98C6A"}  # fmt: skip

WRONG = "#C0392B"  # color of trainings with a planted fault
LEAST_DIFFERENCE = 1e-10  # relative; smaller differences are drawn here, because a logarithmic axis cannot show 0


def style_of(strategy: str) -> dict[str, Any]:
    """Return the color, marker and line style that a strategy has in every figure."""
    name = StrategyName.parse(strategy)
    mark, line = MARKS.get(name.variation, ("X", "--"))
    return {"color": COLORS.get(name.engine, "#B0703C"), "marker": mark, "linestyle": line}


def loss_curves(steps: pd.DataFrame, control: str = "ddp", window: int = 5) -> Figure:
    """Draw the loss curves of all strategies that ran with all seeds of the control, averaged over seeds.

    Repeats of a seed are averaged first. The band shows the range over the control's seeds. Losses are smoothed over
    `window` steps. If the control has no run here, as `single` on several processes, there is no band, and a strategy
    is drawn over all of its seeds.
    """
    figure, axes = panel(4.6)
    by_seed = steps.groupby(["strategy", "seed", "step"])["loss"].mean().unstack(["strategy", "seed"])
    smooth = by_seed.rolling(window, min_periods=1).mean()
    seeds: list[Any] = []
    if control in smooth:
        band, seeds = smooth[control], list(smooth[control].columns)
        axes.fill_between(band.index, band.min(axis=1), band.max(axis=1), color=INK, alpha=0.2, linewidth=0)
    for name in in_order(smooth.columns.get_level_values("strategy")):
        own_seeds = list(smooth[name].columns)
        if set(seeds) <= set(own_seeds):
            wide: dict[str, Any] = {"linewidth": 6, "alpha": 0.5} if name == control else {"linewidth": 1.4}
            mean = smooth[name][seeds or own_seeds].mean(axis=1)
            axes.plot(mean, label=name, **{**style_of(name), "marker": None}, **wide)
    axes.set(xlabel="optimizer step", ylabel=f"training loss (nats, mean of {window} steps)")
    return finished(figure, axes)


def peak_by_part(runs: pd.DataFrame, control: str = "ddp") -> Figure:
    """Draw the predicted peak memory by part (bars) and the measured peak (short line and number)."""
    peaks, of = runs.groupby("strategy")["peak_gib"].mean(), runs.drop_duplicates("strategy").set_index("strategy")
    predictions = {name: step_peak(record) for name, record in of["record"].items() if record}
    theory = {name: predicted.parts for name, predicted in predictions.items() if predicted}
    parts = pd.DataFrame(theory, dtype=float).T.reindex(in_order(peaks.index)).div(2**30)
    parts.columns = [part.replace("_", " ") for part in parts.columns]
    parts = parts.reindex(columns=[*PART_COLORS, "activations", "logits"]).fillna(0)
    parts["activations and logits"] = parts.pop("activations") + parts.pop("logits")
    figure, axes = panel(ROW * len(parts) + 2.2)
    start = pd.Series(0.0, index=parts.index)
    for part, color in PART_COLORS.items():
        if parts[part].max() > 0.01 * peaks.max():
            axes.barh(parts.index, parts[part], left=start, color=color, label=part, height=0.68)
        start += parts[part]
    axes.plot(peaks[parts.index], parts.index, "|", color=INK, markersize=16, markeredgewidth=2, label="measured peak")
    for place, name in enumerate(parts.index):
        relative = (
            "" if name == control or control not in peaks else f" ({100 * (peaks[name] / peaks[control] - 1):+.0f} %)"
        )
        axes.text(max(peaks[name], start[name]), place, f"  {peaks[name]:.2f}{relative}", va="center")
    axes.invert_yaxis()
    axes.margins(x=0.22)
    axes.set(xlabel="peak tensor memory of the process that uses the most (GiB)")
    return finished(figure, axes)


def bars(values: pd.Series, label: str, reach: pd.Series | None = None, digits: int = 2) -> tuple[Figure, Axes]:
    """Draw one bar per row of `values`, with the number at the end of the bar, in the color of the row's strategy.

    If `reach` is given and larger than the value, the number is at `reach`.
    """
    figure, axes = panel(ROW * len(values) + 0.9)
    names = [str(name) for name in values.index]
    axes.barh(names, values, color=[style_of(name)["color"] for name in names], height=0.66)
    ends = values if reach is None else np.fmax(values, reach)
    for place, (value, end) in enumerate(zip(values, ends, strict=True)):
        axes.text(end, place, f"  {value:.{digits}f}", va="center")
    axes.invert_yaxis()
    axes.margins(x=0.14)
    if not digits:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel=label)
    axes.grid(axis="y", visible=False)
    plt.close(figure)
    return figure, axes


def relative_time(ratios: pd.DataFrame, control: str = "ddp") -> Figure:
    """Draw step times relative to the control: the median of the column `ratio` (bar) and its range (line)."""
    statistics = ratios.groupby("strategy")["ratio"].agg(["median", "min", "max"]).loc[in_order(ratios["strategy"])]
    figure, axes = bars(statistics["median"], f"step time relative to {control} (ratio)", statistics["max"])
    axes.hlines(statistics.index, statistics["min"], statistics["max"], color=INK, linewidth=3)
    axes.axvline(1, color=INK, linewidth=0.8)
    return figure


def first_screen(peaks: pd.Series, times: pd.Series, ink: str, title: str) -> Figure:
    """Draw peak memory per process (GiB) and step time relative to DDP, by strategy, for reports/equal-memory.md.

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


def final_losses(verdict: Verdict, control: str = "ddp") -> Figure:
    """Draw how much the final held-out loss of each run differs from the control's, in percent.

    There is a row per arm and a stroke per seed. Variations of the control are gray, and trainings with a planted fault
    are red.
    """
    rows = [(f"{control}, variation: {name}", differences, INK) for name, differences in verdict.null.items()]
    rows += [(arm.name, arm.differences, style_of(arm.name)["color"]) for arm in verdict.arms if not arm.is_broken]
    rows += [(f"planted fault: {arm.name}", arm.differences, WRONG) for arm in verdict.arms if arm.is_broken]
    figure, axes = panel(0.4 * len(rows) + 0.9)
    for place, (_, differences, color) in enumerate(rows):
        distances = [max(abs(value), LEAST_DIFFERENCE) * 100 for value in differences.values()]
        axes.plot(distances, [place] * len(distances), "|", markersize=14, markeredgewidth=1.6, color=color)
    axes.set_yticks(range(len(rows)), [name for name, *_ in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set(xscale="log", xlabel=f"difference of held-out loss from {control} (%)")
    return finished(figure, axes)


def lines(table: pd.DataFrame, x: str, y: str, control: str = "ddp") -> tuple[Figure, Axes]:
    """Draw the median of column `y` at each value of column `x`, with one line per strategy, on logarithmic axes.

    The name of each strategy is at the end of its line.
    """
    figure, axes = panel(4.6)
    by_name = {name: table[table["strategy"] == name].groupby(x)[y].median() for name in in_order(table["strategy"])}
    by_name = {name: line for name, line in by_name.items() if len(line) > 1 or table[x].nunique() == 1}
    for name, line in by_name.items():
        axes.plot(line, linewidth=2.6 if name == control else 1.4, **style_of(name))
    axes.set(xscale="log", yscale="log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_locator(NullLocator())
    ends = sorted((math.log(line.iloc[-1]), name) for name, line in by_name.items())
    at, gap = np.array([end for end, _ in ends]), np.diff(np.log(axes.get_ylim()))[0] / 17
    for _ in range(99):  # move the names until they do not overlap
        push = np.clip(gap - np.diff(at), 0, None) / 2
        at[:-1] -= push
        at[1:] += push
    placement: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "va": "center", "annotation_clip": False}
    for place, (_, name) in zip(np.exp(at), ends, strict=True):
        axes.annotate(f" {name}", (1, place), color=style_of(name)["color"], **placement)
    plt.close(figure)
    return figure, axes


def bits(rows: Mapping[str, Sequence[Cell | None]], heads: Sequence[str]) -> Figure:
    """Draw in which settings trainings are identical in every bit, with a row per strategy and a column per setting.

    A green square means that all bits equal those of the reference. Any other square contains the numbers of the
    roundings that differ, which the legend names.
    """
    cells = [cell for row in rows.values() for cell in row if cell is not None]
    used = [name for name in ROUNDINGS if any(name in cell.roundings for cell in cells)]
    figure, axes = panel(0.32 * len(rows) + 0.22 * len(used) + 2.2)
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
    axes.set_xlim(-0.5, len(heads) - 0.5)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks(range(len(rows)), list(rows), fontsize=10)
    axes.set_xticks(range(len(heads)), [textwrap.fill(head, 11) for head in heads], fontsize=8)
    axes.tick_params(length=0)
    axes.xaxis.tick_top()
    legend = ["=  identical to DDP in every bit", *(f"{number}  {name}" for number, name in enumerate(used, 1))]
    figure.supxlabel("\n".join(legend), fontsize=10, x=0.02, ha="left")
    return finished(figure, axes)


def _numbers(cell: Cell, used: Sequence[str]) -> str:
    """Return the numbers of the roundings of a cell, separated by commas.

    The text is "fault" for a planted fault, and "?" for a difference without a known cause.
    """
    if any(name not in used for name in cell.roundings):
        return "fault"
    return ",".join(str(used.index(name) + 1) for name in cell.roundings) or "?"


def panel(height: float) -> tuple[Figure, Axes]:
    """Return an empty figure and its axes, with the width and the style of all figures. `height` is in inches."""
    figure, axes = plt.subplots(figsize=(WIDTH, height), layout="constrained")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    axes.grid(alpha=0.2)
    return figure, axes


def finished(figure: Figure, axes: Axes) -> Figure:
    """Return the figure after adding a legend below it, if anything in it has a label."""
    handles, labels = axes.get_legend_handles_labels()
    if labels:
        figure.legend(handles, labels, loc="outside lower center", ncols=3 if len(labels) > 8 else 2, fontsize=11)
    plt.close(figure)  # otherwise a notebook would show the figure twice
    return figure


def filter_runs(table: pd.DataFrame, **conditions: Any) -> pd.DataFrame:
    """Return the rows of a table that have these values in these columns. A list of values selects any of them."""
    for column, value in conditions.items():
        values = list(value) if isinstance(value, Iterable) and not isinstance(value, str) else [value]
        table = table[table[column].isin(values)]
    return table
