"""What does speed cost in memory? Every strategy by both, and those that no other beats in both."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.text import Annotation
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import Bbox

from study.compare.words import Unit, bytes_text, bytes_unit, in_order
from study.report.figures.drawing import INK, Figure, below, finish, house_style, log_ticks, panels, spread_out, style
from study.report.figures.setting import crowded, runs_counted, setting, unmeasured, with_results, without_value
from study.report.figures.speed import LOGARITHMIC_FROM
from study.report.words import listed, seconds_unit

MARKER = 8  # points

Point = tuple[float, float]


def pareto(table: pd.DataFrame) -> Figure:
    """Draw peak memory against the time of a step, and which strategies no other beats in both.

    Raises ValueError where no strategy has both, or the runs are not of one setting.
    """
    about = setting(table)
    name = f"pareto-{about.slug}"
    on_gpu = "cuda" in set(table["device"])
    column = "peak_allocated_bytes" if on_gpu else "peak_tensor_bytes"
    table = with_results(table.assign(both=table["seconds_per_step"].where(table[column].notna())), "both")
    missing = unmeasured(table, "both")
    measured = table.dropna(subset=["both"])
    summary = measured.groupby("strategy")[["seconds_per_step", column]].agg(["min", "median", "max"])
    summary = summary.loc[in_order(summary.index)]
    seconds, memory = summary["seconds_per_step"], summary[column]
    time, size = seconds_unit(seconds["median"].max()), bytes_unit(memory["median"].max())
    front = _front(seconds["median"], memory["median"])

    with house_style(name):
        canvas, (ax,) = panels([4.4])
        x, y = seconds / time.size, memory / size.size
        _scale(ax, x, y)
        ax.plot(x["median"][front], y["median"][front], color=INK, linewidth=1.2, linestyle=(0, (4, 2)),
                drawstyle="steps-post", alpha=0.8)  # fmt: skip
        whiskers = [_draw_strategy(ax, s, x.loc[s], y.loc[s], s in front) for s in summary.index]
        ax.set_xlabel(f"{time.name} per step")
        ax.set_ylabel(f"peak memory of a rank, {size.name}")
        below(canvas, [], [], [f"{strategy}: {why}" for strategy, why in missing.items()])
        canvas.draw_without_rendering()  # the layout decides where points are
        canvas.set_layout_engine("none")
        for line in itertools.chain(*whiskers):
            # A shorter one would only cross its marker out.
            line.set_visible(max(line.get_window_extent().size) > MARKER)
        points = {s: (x["median"][s], y["median"][s]) for s in summary.index}
        _label(ax, points, _lines(x, y, front), set(front))

        alt = _alt(seconds["median"], memory["median"], time, front) + without_value(missing)
        kind = "allocated by torch" if on_gpu else "live tensors of the probed step"
        caption = (
            f"Peak memory ({kind}, the rank with the most) against the time of a step: medians over runs "
            f"({runs_counted(measured, 'strategy')} per strategy), whiskers from the lowest to the highest run. In "
            "full colour, and joined by the line: no other strategy is both faster and smaller, by the medians. "
            f"Neither axis starts at 0.{crowded(measured)}"
        )
        return finish(canvas, name, alt, caption + about.words + without_value(missing))


def _front(seconds: pd.Series, memory: pd.Series) -> list[str]:
    """The strategies that no other beats, or equals in one and beats in the other; from the fastest to the smallest."""
    front: list[str] = []
    for strategy in pd.DataFrame({"seconds": seconds, "memory": memory}).sort_values(["seconds", "memory"]).index:
        if not front or memory[strategy] < memory[front[-1]]:
            front.append(strategy)
    return front


def _scale(ax: Axes, x: pd.DataFrame, y: pd.DataFrame) -> None:
    for axis, scale, values in ((ax.xaxis, ax.set_xscale, x), (ax.yaxis, ax.set_yscale, y)):
        if spread_out(values.to_numpy().ravel(), LOGARITHMIC_FROM):
            scale("log")
            log_ticks(axis)
        else:
            axis.set_major_locator(MaxNLocator(6))
    ax.margins(0.14)


def _draw_strategy(ax: Axes, strategy: str, x: pd.Series, y: pd.Series, best: bool) -> tuple[LineCollection, ...]:
    """Draw a strategy's medians, and whiskers over its runs, which are returned."""
    look, alpha = style(strategy), 1.0 if best else 0.75
    whiskers = (
        ax.hlines(y["median"], x["min"], x["max"], color=look.color, linewidth=1, alpha=alpha, zorder=1.5),
        ax.vlines(x["median"], y["min"], y["max"], color=look.color, linewidth=1, alpha=alpha, zorder=1.5),
    )
    ax.plot(x["median"], y["median"], marker=look.marker, color=look.color, markersize=MARKER, alpha=alpha,
            markerfacecolor=(look.color, 1.0 if best else 0.35), linestyle="none")  # fmt: skip
    return whiskers


def _lines(x: pd.DataFrame, y: pd.DataFrame, front: Sequence[str]) -> list[tuple[Point, Point]]:
    """The lines that no name may cover: the steps of the front, and the horizontal whiskers."""
    across, up = x["median"], y["median"]
    steps: list[Point] = [(across[front[0]], up[front[0]])]
    for faster, smaller in itertools.pairwise(front):
        steps += [(across[smaller], up[faster]), (across[smaller], up[smaller])]
    whiskers = [((x["min"][strategy], up[strategy]), (x["max"][strategy], up[strategy])) for strategy in x.index]
    return [*itertools.pairwise(steps), *whiskers]


def _alt(seconds: pd.Series, memory: pd.Series, time: Unit, front: Sequence[str]) -> str:
    fast, small = front[0], front[-1]
    return (
        f"Peak memory against time per step of {len(seconds)} strategies. Fastest: {fast}, {time.text(seconds[fast])} "
        f"with {bytes_text(memory[fast])}; smallest: {small}, {bytes_text(memory[small])} with "
        f"{time.text(seconds[small])}. No other is better in both than {listed(front)}."
    )


# ---------------------------------------------------------------- names beside points


class _Place(NamedTuple):
    """Where a name may go: offset from its point, in points, and which end of it is there."""

    x: float
    y: float
    align: str


def _places() -> list[_Place]:
    """Near ones first; right and left before above and below."""
    places = []
    for distance in (9, 18, 30, 44, 60, 78):
        for degrees in (0, 180, 45, 315, 135, 225, 90, 270):
            across, up = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
            align = "left" if across > 0.1 else "right" if across < -0.1 else "center"
            places.append(_Place(distance * across, distance * up, align))
    return places


def _label(ax: Axes, points: dict[str, Point], lines: Sequence[tuple[Point, Point]], strong: set[str]) -> None:
    """Write each point's name beside it, where it covers neither another name nor a point nor a line."""
    at = {name: ax.transData.transform(point) for name, point in points.items()}
    taken = [Bbox.from_bounds(x - 6, y - 6, 12, 12) for x, y in at.values()]
    taken += [Bbox(np.sort(ax.transData.transform(line), axis=0)).padded(1) for line in lines]
    inside = ax.get_window_extent()
    for name in sorted(at, key=lambda n: (n not in strong, at[n][0])):
        text = ax.annotate(name, points[name], xytext=(0, 0), textcoords="offset points", va="center",
                           alpha=1.0 if name in strong else 0.75, annotation_clip=False)  # fmt: skip
        boxes = {place: _box_at(text, place) for place in _places()}
        place = min(boxes, key=lambda p: round(_hidden(boxes[p], taken, inside), 6))
        taken.append(_box_at(text, place))
        if math.hypot(place.x, place.y) > 12:
            ax.annotate("", points[name], xytext=(place.x, place.y), textcoords="offset points", annotation_clip=False,
                        arrowprops={"arrowstyle": "-", "linewidth": 0.7, "color": INK, "alpha": 0.5,
                                    "shrinkA": 0, "shrinkB": 4})  # fmt: skip


def _box_at(text: Annotation, place: _Place) -> Bbox:
    """Move a text to a place; return what it takes there."""
    text.set(position=(place.x, place.y), horizontalalignment=place.align)
    return text.get_window_extent().padded(1.5)


def _hidden(box: Bbox, taken: Sequence[Bbox], inside: Bbox) -> float:
    """How much a text covers of what is there already, and how much of it is outside."""
    return sum(_overlap(box, other) for other in taken) + box.width * box.height - _overlap(box, inside)


def _overlap(one: Bbox, other: Bbox) -> float:
    both = Bbox.intersection(one, other)
    return both.width * both.height if both is not None else 0.0
