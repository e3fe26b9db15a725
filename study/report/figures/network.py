"""How long does a step take on which network? Measured points on the curves that were predicted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby

import numpy as np

from study.compare import network
from study.compare.network import Cell
from study.compare.words import three_digits
from study.report.figures.drawing import Figure, below, finish, house_style, log_ticks, panels, style

PANEL_INCHES = 2.9
ASIDE = 1.05
BEYOND = 3.0  # an unlimited network stands so many times beyond the fastest that has a limit


def steps_by_rate(layouts: Mapping[str, Sequence[Cell]]) -> Figure:
    """One panel per layout: seconds of a step over the rate of each machine's interface, both logarithmic."""
    with house_style("network"):
        canvas, axes = panels([PANEL_INCHES] * len(layouts))
        handles, told = {}, []
        for ax, (title, cells) in zip(axes, layouts.items(), strict=True):
            ax.set_title(title)
            unlimited = BEYOND * max((cell.rate for cell in cells if math.isfinite(cell.rate)), default=1e9)
            lowest = min((cell.rate for cell in cells if math.isfinite(cell.rate)), default=1e9)
            by_strategy = [(name, list(of)) for name, of in groupby(cells, key=lambda cell: cell.strategy)]
            for nth, (strategy, of) in enumerate(by_strategy):
                color, marker, line = style(strategy)
                aside = ASIDE ** (nth - (len(by_strategy) - 1) / 2)  # what takes as long would hide one another
                places = [aside * min(cell.rate, unlimited) / 1e6 for cell in of]
                ax.plot(places, [cell.median_seconds for cell in of], marker, color=color, ms=5, zorder=3)
                for place, cell in zip(places, of, strict=True):
                    ax.plot([place, place], [min(cell.seconds), max(cell.seconds)], color=color, linewidth=1)
                free = next((cell for cell in of if math.isinf(cell.rate)), None)
                if free is not None:
                    rates = np.geomspace(lowest, unlimited / BEYOND, 40)
                    predicted = [network.predicted_seconds(free, rate) for rate in rates]
                    ax.plot(aside * rates / 1e6, predicted, linestyle=line, color=color, linewidth=1.1)
                handles[strategy] = ax.plot([], [], marker=marker, linestyle=line, color=color)[0]
                told.append(
                    f"{title}, {strategy}: "
                    + ", ".join(f"{network.shown_rate(c.rate)} {three_digits(c.median_seconds)} s" for c in of)
                )
            ax.set_xscale("log")
            ax.set_yscale("log")
            log_ticks(ax.yaxis)
            ticks = sorted({min(cell.rate, unlimited) / 1e6 for cell in cells})
            names = ["no limit" if tick * 1e6 == unlimited else f"{tick:,.0f}" for tick in ticks]
            ax.set_xticks(ticks, names)
            ax.minorticks_off()
            ax.set_ylabel("seconds a step")
        axes[-1].set_xlabel("Mbit/s of each machine's interface")
        below(canvas, list(handles.values()), list(handles))
        caption = (
            "Points: the median step, with the range of its repeats. Lines: predicted beforehand, from the step "
            "without a limit and the bytes that theory expects each machine to send by gloo's algorithms. The machines "
            "are namespaces of one box, and share its processors. Strategies are drawn a little beside one another."
        )
        return finish(canvas, "network", f"Seconds of a step by the rate of the network. {'; '.join(told)}.", caption)
