"""The figures that several notebooks draw, each from a tidy table of `tables`: plain matplotlib, to be changed."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from study.compare.facts import PARTS
from study.compare.words import in_order

WIDTH = 9.0  # inches
ROW = 0.36  # of a bar
# One colour per stage, apart also for eyes that see few colours (after Okabe and Ito); one mark per kind of a stage.
COLOURS = {"single": "#808080", "ddp": "#222222", "zero0": "#A87900", "zero1": "#2E86D0", "zero2": "#009E73",
           "zero3": "#D55E00", "fsdp2": "#C0609A"}  # fmt: skip
MARKS = {"": ("o", "-"), "cpu_offload": ("s", "--"), "nvme_offload": ("^", ":"), "tuned": ("D", "-."),
         "no_reshard": ("v", "-."), "hpz": ("P", ":")}  # fmt: skip
PART_COLOURS = {"parameters": "#5558C8", "gradients": "#8C90E8", "optimizer_states": "#B9BCF5",
                "communication_buffers": "#C79A2B", "more in the step": "#9A9A9A"}  # fmt: skip


def look(strategy: str) -> dict[str, Any]:
    """The colour, mark and line that a strategy has in every figure."""
    stage, _, kind = strategy.partition("_")
    mark, line = MARKS.get(kind, ("X", "--"))
    return {"color": COLOURS.get(stage, "#7A6FD0"), "marker": mark, "linestyle": line}


def loss_curves(steps: pd.DataFrame, control: str = "ddp", window: int = 5) -> Figure:
    """The training loss of the strategies that have all of the control's seeds, whose range is the band."""
    figure, axes = _panel(4.2)
    seeds = steps.groupby("strategy")["seed"].agg(set)
    wanted = seeds.get(control, set())
    smooth = steps[steps["strategy"].map(seeds) >= wanted].sort_values("step").copy()
    by_run = smooth.groupby(["study", "run"], dropna=False)["loss"]
    smooth["smooth"] = by_run.transform(lambda loss: loss.rolling(window, min_periods=1).mean())
    band = smooth[smooth["strategy"] == control].groupby("step")["smooth"].agg(["min", "max"])
    axes.fill_between(band.index, band["min"], band["max"], color=look(control)["color"], alpha=0.15, linewidth=0)
    for name in in_order(smooth["strategy"]):
        curve = smooth[smooth["strategy"] == name].groupby("step")["smooth"].mean()
        style = look(name)
        width, alpha = (5, 0.4) if name == control else (1.4, 1.0)  # so that what lies on it is seen
        axes.plot(curve.index, curve, color=style["color"], linestyle=style["linestyle"], label=name, linewidth=width,
                  alpha=alpha)  # fmt: skip
    axes.set(xlabel="optimizer step", ylabel=f"training loss, mean of {window} steps")
    return _finished(figure, axes)


def peak_by_part(runs: pd.DataFrame, states: pd.DataFrame, control: str = "ddp") -> Figure:
    """A process's highest moment by part: what rests between two steps, and what comes on top in the step."""
    resting = states[states["moment"] == "resting"]
    resting = resting[resting["rank"] == 0].pivot_table(index="strategy", columns="part", values="gib", aggfunc="mean")
    peaks = runs.groupby("strategy")["peak_gib"].mean()
    table = resting[list(PARTS)].assign(**{"more in the step": peaks - resting[list(PARTS)].sum(axis=1)})
    order = in_order(table.index)
    figure, axes = _panel(ROW * len(order) + 1.4)
    left = pd.Series(0.0, index=order)
    for part, color in PART_COLOURS.items():
        axes.barh(order, table.loc[order, part], left=left, color=color, label=part.replace("_", " "), height=0.68)
        left += table.loc[order, part]
    for place, name in enumerate(order):
        relative = "" if name == control or control not in peaks else f" ({peaks[name] / peaks[control] - 1:+.0%})"
        axes.text(peaks[name], place, f" {peaks[name]:.2f}{relative}", va="center", fontsize=9)
    axes.invert_yaxis()
    axes.margins(x=0.14)
    axes.set(xlabel="GiB of tensors, of the fullest process")
    axes.grid(axis="y", visible=False)
    return _finished(figure, axes)


def relative_time(runs: pd.DataFrame, control: str = "ddp") -> Figure:
    """The step time of each strategy over the control's: the median, and the range of its runs."""
    times = runs.dropna(subset=["step_seconds"]).groupby("strategy")["step_seconds"].agg(["median", "min", "max"])
    ratios = times / times.loc[control, "median"]
    order = in_order(ratios.index)
    figure, axes = _panel(ROW * len(order) + 1.2)
    shown = ratios.loc[order]
    reach = [shown["median"] - shown["min"], shown["max"] - shown["median"]]
    axes.barh(
        order, shown["median"], xerr=reach, color=[look(name)["color"] for name in order], height=0.6, ecolor="#999"
    )
    for place, name in enumerate(order):
        axes.text(shown.loc[name, "max"], place, f" {shown.loc[name, 'median']:.2f}", va="center", fontsize=9)
    axes.axvline(1, color="#222", linewidth=0.8)
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set(xlabel=f"step time over that of {control}")
    axes.grid(axis="y", visible=False)
    return _finished(figure, axes, legend=False)


def memory_against_time(runs: pd.DataFrame, control: str = "ddp") -> Figure:
    """Peak memory over step time: below and to the left is better."""
    means = runs.dropna(subset=["step_seconds", "peak_gib"]).groupby("strategy")[["step_seconds", "peak_gib"]].median()
    figure, axes = _panel(4.6)
    for name in in_order(means.index):
        style = look(name)
        axes.plot(
            *means.loc[name], color=style["color"], marker=style["marker"], linestyle="", markersize=8, label=name
        )
    if control in means.index:
        axes.axvline(means.loc[control, "step_seconds"], color="#222", linewidth=0.6, linestyle=":")
        axes.axhline(means.loc[control, "peak_gib"], color="#222", linewidth=0.6, linestyle=":")
    axes.set(xlabel="seconds a step", ylabel="peak of tensors, GiB")
    axes.set_ylim(bottom=0)
    return _finished(figure, axes)


def largest_trained(largest: pd.DataFrame, control: str = "ddp") -> Figure:
    """The largest model that each strategy trained under a cap (bar), and the largest that theory says (mark)."""
    millions = largest.set_index("strategy")[["trained", "predicted"]].map(_millions)
    order = in_order(millions.index)
    millions = millions.loc[order]
    figure, axes = _panel(ROW * len(order) + 1.2)
    bars = axes.barh(order, millions["trained"], color=[look(name)["color"] for name in order], height=0.6)
    axes.bar_label(bars, [f"{each:.0f}" for each in millions["trained"]], padding=8, fontsize=9)
    axes.plot(millions["predicted"], order, "D", color="white", markeredgecolor="#222", markersize=5, label="predicted")
    axes.axvline(millions.loc[control, "trained"], color="#222", linewidth=0.8)
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set(xlabel="millions of parameters of the largest model that trained")
    axes.grid(axis="y", visible=False)
    return _finished(figure, axes)


def _millions(size: Any) -> float:
    return math.nan if not isinstance(size, str) else float(size[:-1]) * {"m": 1, "b": 1000}[size[-1]]


def first_screen(peaks: pd.Series, times: pd.Series, ink: str) -> Figure:
    """The picture of README: GiB at a process's highest moment and a step's time over the control's, by strategy.

    `ink` is the colour of what is written, on a ground that is left open.
    """
    order = in_order(peaks.index)
    figure, panels = plt.subplots(1, 2, figsize=(WIDTH, ROW * len(order) + 1), sharey=True, layout="constrained")
    titles = "peak memory of a process, GiB of tensors", "time of a step, times DDP's"
    for axes, values, title in zip(panels, (peaks[order], times[order]), titles, strict=True):
        bars = axes.barh(order, values, color=[look(name)["color"] for name in order], height=0.62)
        bars[order.index("ddp")].set_color("#888888")  # seen on a dark ground, too
        axes.bar_label(bars, [f"{each:.2f}" for each in values], padding=4, color=ink, fontsize=10)
        axes.axvline(values["ddp"], color=ink, linewidth=0.8, linestyle=":")
        axes.set_title(title, color=ink, fontsize=11, loc="left")
        axes.tick_params(colors=ink, labelsize=10, bottom=False, labelbottom=False, left=False)
        axes.spines[:].set_visible(False)
        axes.margins(x=0.14)
    said = {"ddp": "DDP", "zero": "ZeRO-", "fsdp": "FSDP", "_tuned": ", small buckets"}
    names = [re.sub("|".join(said), lambda found: said[found[0]], name) for name in order]
    panels[0].set_yticks(range(len(order)), names)
    panels[0].invert_yaxis()
    plt.close(figure)
    return figure


def memory_against_size(runs: pd.DataFrame, control: str = "ddp") -> Figure:
    """Bytes a parameter at the highest moment, by the model's size: what sharding saves appears as models grow."""
    figure, axes = _panel(4.2)
    table = runs.dropna(subset=["peak_gib"]).assign(per=lambda each: each["peak_gib"] * 2**30 / each["parameters"])
    for name in in_order(table["strategy"]):
        line = table[table["strategy"] == name].groupby("parameters")["per"].median()
        if len(line) == 1 < table["parameters"].nunique():
            continue
        axes.plot(line.index / 1e6, line, label=name, linewidth=2.2 if name == control else 1.3, **look(name))
    axes.set(xscale="log", yscale="log", xlabel="millions of parameters (logarithmic)")
    axes.set_ylabel("bytes a parameter at the highest moment (logarithmic)")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_locator(NullLocator())
    return _finished(figure, axes)


def _panel(height: float) -> tuple[Figure, Axes]:
    figure, axes = plt.subplots(figsize=(WIDTH, height), dpi=110, layout="constrained")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.2)
    axes.set_axisbelow(True)
    return figure, axes


def _finished(figure: Figure, axes: Axes, legend: bool = True) -> Figure:
    handles, labels = axes.get_legend_handles_labels()
    if legend and labels:
        columns = min(4, math.ceil(len(labels) / 2))
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
    plt.close(figure)  # a notebook shows what a cell returns, once
    return figure


def only(table: pd.DataFrame, **wanted: Any) -> pd.DataFrame:
    """The rows of a table that have these values; a value may be a list of several."""
    for column, value in wanted.items():
        values = list(value) if isinstance(value, Iterable) and not isinstance(value, str) else [value]
        table = table[table[column].isin(values)]
    return table
