"""How long does a step take on which network? Measured points on the curves that were predicted."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from study.compare import network
from study.compare.network import Cell
from study.compare.words import three_digits
from study.report.figures.drawing import Figure, below, finish, house_style, log_ticks, panels, style

PANEL_INCHES = 2.9
ASIDE = 1.015
BEYOND = 3.0  # an unlimited network stands so many times beyond the fastest that has a limit
MARGIN = 1.25  # the curves go so much beyond the slowest network, and end so much before the unlimited one

Layouts = Sequence[tuple[str, Mapping[str, Sequence[Cell]]]]  # a title, and cells by strategy
Measured = Callable[[Sequence[Cell], Sequence[Cell], float], float | None]  # of a strategy and the control, at a rate
Predicted = Callable[[Sequence[Cell], Sequence[Cell], float], float]
RULE = (
    "predicted by a rule fixed beforehand, from the step without a limit and the bytes that theory expects each "
    "machine to send by gloo's algorithms. The machines are namespaces of one box, and share its processors."
)


def steps_by_rate(layouts: Layouts, control: str) -> Figure:
    """One panel per layout: seconds of a step over the rate of each machine's interface, both logarithmic."""
    caption = f"Points: the median step, with the range of its repeats. Lines: {RULE}"
    return _by_rate("network", layouts, control, "seconds a step", "s", caption, _measured, _predicted, spread=True)


def ratios_by_rate(layouts: Layouts, control: str) -> Figure:
    """One panel per layout: a step over the control's at the same rate. Where two lines cross, two change places."""
    caption = (
        f"Points, joined by thin lines: the median step over {control}'s at the same rate. Thick lines: the same, "
        f"{RULE} Where two cross, one strategy is faster on one side and the other on the other. Dotted: "
        f"{network.PAYS:g}."
    )

    def measured(each: Sequence[Cell], of_control: Sequence[Cell], rate: float) -> float | None:
        over, under = _measured(each, of_control, rate), _measured(of_control, each, rate)
        return over / under if over and under else None

    def predicted(each: Sequence[Cell], of_control: Sequence[Cell], rate: float) -> float:
        return _predicted(each, of_control, rate) / _predicted(of_control, each, rate)

    return _by_rate(
        "network-ratios", layouts, control, f"times {control}'s step", "times", caption, measured, predicted
    )


def _measured(each: Sequence[Cell], of_control: Sequence[Cell], rate: float) -> float | None:
    return next((cell.median_seconds for cell in each if cell.rate == rate), None)


def _predicted(each: Sequence[Cell], of_control: Sequence[Cell], rate: float) -> float:
    return network.predicted_seconds(network.unlimited(each), rate)


def _by_rate(
    name: str,
    layouts: Layouts,
    control: str,
    label: str,
    unit: str,
    caption: str,
    measured: Measured,
    predicted: Predicted,
    spread: bool = False,
) -> Figure:
    """Draw a value of each strategy over the rate; `spread`: with the range of the repeats, not joined."""
    with house_style(name):
        canvas, axes = panels([PANEL_INCHES] * len(layouts))
        handles, told = {}, []
        for ax, (title, of) in zip(axes, layouts, strict=True):
            ax.set_title(title)
            limited = sorted({cell.rate for each in of.values() for cell in each if math.isfinite(cell.rate)})
            beyond = BEYOND * limited[-1]
            curve = np.geomspace(limited[0] / MARGIN, beyond / MARGIN, 40)
            for nth, (strategy, each) in enumerate(of.items()):
                color, marker, line = style(strategy)
                found = ((cell, measured(each, of[control], cell.rate)) for cell in each)
                values = [(cell, value) for cell, value in found if value is not None]
                aside = ASIDE ** (nth - (len(of) - 1) / 2)  # what is as long would hide one another
                places = [aside * min(cell.rate, beyond) / 1e6 for cell, _ in values]
                ax.plot(places, [value for _, value in values], marker, color=color, ms=5, zorder=3,
                        linestyle="none" if spread else "-", linewidth=0.6)  # fmt: skip
                for place, (cell, _) in zip(places, values, strict=True):
                    if spread:
                        ax.plot([place, place], [cell.seconds[0], cell.seconds[-1]], color=color, linewidth=1)
                expected = [predicted(each, of[control], rate) for rate in curve]
                ax.plot(curve / 1e6, expected, linestyle=line, color=color, linewidth=1.3)
                handles[strategy] = ax.plot([], [], marker=marker, linestyle=line, color=color)[0]
                shown = (f"{network.shown_rate(cell.rate)} {three_digits(value)} {unit}" for cell, value in values)
                told.append(f"{title}, {strategy}: {', '.join(shown)}")
            if not spread:
                ax.axhline(network.PAYS, color="0.5", linewidth=1, linestyle=":")
            ax.set_xscale("log")
            ax.set_yscale("log")
            log_ticks(ax.yaxis)
            ax.set_xticks([*(rate / 1e6 for rate in limited), beyond / 1e6],
                          [*(f"{rate / 1e6:,.0f}" for rate in limited), "no limit"])  # fmt: skip
            ax.minorticks_off()
            ax.set_ylabel(label)
        axes[-1].set_xlabel("Mbit/s of each machine's interface")
        below(canvas, list(handles.values()), list(handles))
        return finish(canvas, name, f"{label.capitalize()} by the rate of the network. {'; '.join(told)}.", caption)
