"""How long does a step take? Every run, and each strategy's median."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from study.compare.words import Unit, in_order, three_digits
from study.report.figures.drawing import (
    INK,
    Figure,
    Style,
    at_edge,
    beside,
    finish,
    house_style,
    log_ticks,
    panels,
    rows,
    spread_out,
    style,
)
from study.report.figures.setting import crowded, runs_counted, setting, unmeasured, with_results, without_value
from study.report.words import seconds_unit

LOGARITHMIC_FROM = 6  # times the smallest value: beyond that a linear axis hides the differences of the small ones


def runtime(table: pd.DataFrame) -> Figure:
    """Draw every run's median seconds per step, the middle half of its steps, and each strategy's median over runs.

    Raises ValueError where nothing is measured or the runs are not of one setting.
    """
    about = setting(table)
    name = f"runtime-{about.slug}"
    table = with_results(table, "seconds_per_step")
    missing = unmeasured(table, "seconds_per_step")
    strategies = in_order(table["strategy"])
    measured = table.dropna(subset=["seconds_per_step"]).sort_values(["seed", "repeat"])
    medians = measured.groupby("strategy")["seconds_per_step"].median()
    unit = seconds_unit(medians.max())
    values = measured[["seconds_per_step", "seconds_lower", "seconds_upper"]]

    with house_style(name):
        canvas, (ax,) = panels([0.36 * len(strategies) + 0.7])
        rows(ax, [f"{s}\n({missing[s]})" if s in missing and s in medians else s for s in strategies])
        for row, strategy in enumerate(strategies):
            if strategy not in medians:
                at_edge(ax, row, missing[strategy])
                continue
            _draw_runs(ax, row, measured[measured["strategy"] == strategy], unit, style(strategy))
            median = medians[strategy] / unit.size
            ax.vlines(median, row - 0.44, row + 0.44, color=INK, linewidth=2.5, zorder=3)
            beside(ax, row, unit.text(medians[strategy]))
        how = _scale(ax, values / unit.size, unit)
        ax.set_xlabel(f"{unit.name} per step (axis {how})")

        fastest, slowest = medians.idxmin(), medians.idxmax()
        alt = f"Median time of a step under {len(medians)} strategies: from {unit.text(medians[fastest])} ({fastest}) "
        alt += f"to {unit.text(medians[slowest])} ({slowest})." + without_value(missing)
        caption = (
            f"Time of an optimizer step. Dot: one run's median over its steps, without warm-up "
            f"({runs_counted(measured, 'strategy')} per strategy); thin line: the middle half of its steps; bold tick "
            f"and figure: median over runs. The axis is {how}{', not from 0' if how != 'logarithmic' else ''}."
            f"{crowded(measured)}"
        )
        return finish(canvas, name, alt, caption + about.words + without_value(missing))


def _draw_runs(ax: Axes, row: int, runs: pd.DataFrame, unit: Unit, look: Style) -> None:
    """Draw each run of a strategy: its median as a dot, the middle half of its steps as a line."""
    places = row + (np.linspace(-0.28, 0.28, len(runs)) if len(runs) > 1 else np.zeros(1))
    lower, upper = runs["seconds_lower"] / unit.size, runs["seconds_upper"] / unit.size
    faint = max(0.15, min(0.6, 3 / len(runs)))  # many lines would hide the dots
    ax.hlines(places, lower, upper, color=look.color, linewidth=1, alpha=faint)
    size = 5 if len(runs) <= 5 else 3.5
    ax.plot(runs["seconds_per_step"] / unit.size, places, linestyle="none", marker=look.marker, markersize=size,
            color=look.color, alpha=0.8)  # fmt: skip


def _scale(ax: Axes, values: pd.DataFrame, unit: Unit) -> str:
    """Give the axis its range and ticks, and say which it has."""
    least, most = values.min().min(), values.max().max()
    if spread_out(values.to_numpy().ravel(), LOGARITHMIC_FROM):
        ax.set_xscale("log")
        ax.set_xlim(least / 1.15, most * 1.15)
        log_ticks(ax.xaxis)
        return "logarithmic"
    room = 0.04 * (most - least) or 0.04 * most
    ax.set_xlim(max(0, least - room), most + room)
    ax.xaxis.set_major_locator(MaxNLocator(6))
    return f"from {three_digits(ax.get_xlim()[0])} {unit.name}"
