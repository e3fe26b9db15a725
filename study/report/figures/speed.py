"""How long does a step take, what does speed cost in memory, and what do more processes bring?"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator
from matplotlib.transforms import Bbox

from study.compare import pairs
from study.compare.order import in_order
from study.compare.words import bytes_text, bytes_unit, three_digits
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
    spread_out,
    style,
)
from study.report.figures.setting import setting, unmeasured, with_results, without_value
from study.report.words import counted, listed, seconds_unit

LOGARITHMIC_FROM = 6  # times the smallest value: beyond that a linear axis hides the differences of the small ones
MARKER = 8  # points
DODGE = 0.22  # octaves over which the strategies of one world size are spread, so that equal values are visible


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
    logarithmic = spread_out(values.to_numpy().ravel(), LOGARITHMIC_FROM)

    with house_style(name):
        canvas, (ax,) = panels([0.36 * len(strategies) + 0.7])
        rows(ax, [f"{s}\n({missing[s]})" if s in missing and s in medians else s for s in strategies])
        for row, strategy in enumerate(strategies):
            if strategy not in medians:
                at_edge(ax, row, missing[strategy])
                continue
            runs = measured[measured["strategy"] == strategy]
            places = row + (np.linspace(-0.28, 0.28, len(runs)) if len(runs) > 1 else np.zeros(1))
            look = style(strategy)
            lower, upper = runs["seconds_lower"] / unit.size, runs["seconds_upper"] / unit.size
            faint = max(0.15, min(0.6, 3 / len(runs)))  # many lines would hide the dots
            ax.hlines(places, lower, upper, color=look.color, linewidth=1, alpha=faint)
            dots = runs["seconds_per_step"] / unit.size
            size = 5 if len(runs) <= 5 else 3.5
            ax.plot(dots, places, linestyle="none", marker=look.marker, markersize=size, color=look.color, alpha=0.8)
            median = medians[strategy] / unit.size
            ax.vlines(median, row - 0.44, row + 0.44, color=INK, linewidth=2.5, zorder=3)
            beside(ax, row, unit.text(medians[strategy]))
        ends = values.min().min() / unit.size, values.max().max() / unit.size
        if logarithmic:
            ax.set_xscale("log")
            ax.set_xlim(ends[0] / 1.15, ends[1] * 1.15)
            log_ticks(ax.xaxis)
            how = "logarithmic"
        else:
            room = 0.04 * (ends[1] - ends[0]) or 0.04 * ends[1]
            ax.set_xlim(max(0, ends[0] - room), ends[1] + room)
            ax.xaxis.set_major_locator(MaxNLocator(6))
            how = f"from {three_digits(ax.get_xlim()[0])} {unit.name}"
        ax.set_xlabel(f"{unit.name} per step (axis {how})")

        fastest, slowest = medians.idxmin(), medians.idxmax()
        alt = f"Median time of a step under {len(medians)} strategies: from {unit.text(medians[fastest])} ({fastest}) "
        alt += f"to {unit.text(medians[slowest])} ({slowest})." + without_value(missing)
        caption = (
            f"Time of an optimizer step. Dot: one run's median over its steps, without warm-up "
            f"({_counts(measured)}); thin line: the middle half of its steps; bold tick and figure: median over runs."
            f" The axis is {how}{'' if logarithmic else ', not from 0'}.{_crowded(measured)}"
        )
        return finish(canvas, name, alt, caption + about.words + without_value(missing))


def _crowded(measured: pd.DataFrame) -> str:
    """A warning where processes had to share a core or a GPU; empty otherwise."""
    crowded = sorted(measured.loc[measured["oversubscribed"].astype(bool), "world_size"].unique())
    where = f"The {listed(crowded)} processes shared" if crowded else ""
    return f" {where} cores or GPUs: these times say nothing of the strategies." if crowded else ""


def _counts(measured: pd.DataFrame) -> str:
    return counted(measured.groupby("strategy").size(), "run") + " per strategy"


# ---------------------------------------------------------------- memory against speed


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
        for axis, scale, values in ((ax.xaxis, ax.set_xscale, x), (ax.yaxis, ax.set_yscale, y)):
            if spread_out(values.to_numpy().ravel(), LOGARITHMIC_FROM):
                scale("log")
                log_ticks(axis)
            else:
                axis.set_major_locator(MaxNLocator(6))
        ax.margins(0.14)
        ax.plot(x["median"][front], y["median"][front], color=INK, linewidth=1.2, linestyle=(0, (4, 2)),
                drawstyle="steps-post", alpha=0.8)  # fmt: skip
        whiskers = {}
        for strategy in summary.index:
            look, best = style(strategy), strategy in front
            sx, sy = x.loc[strategy], y.loc[strategy]
            alpha = 1.0 if best else 0.75
            whiskers[strategy] = (
                ax.hlines(sy["median"], sx["min"], sx["max"], color=look.color, linewidth=1, alpha=alpha, zorder=1.5),
                ax.vlines(sx["median"], sy["min"], sy["max"], color=look.color, linewidth=1, alpha=alpha, zorder=1.5),
            )
            ax.plot(sx["median"], sy["median"], marker=look.marker, color=look.color, markersize=MARKER, alpha=alpha,
                    markerfacecolor=(look.color, 1.0 if best else 0.35), linestyle="none")  # fmt: skip
        ax.set_xlabel(f"{time.name} per step")
        ax.set_ylabel(f"peak memory of a rank, {size.name}")
        below(canvas, [], [], [f"{strategy}: {why}" for strategy, why in missing.items()])
        canvas.draw_without_rendering()  # the layout decides where points are
        canvas.set_layout_engine("none")
        for line in itertools.chain(*whiskers.values()):
            # A shorter one would only cross its marker out.
            line.set_visible(max(line.get_window_extent().size) > MARKER)
        points = {s: (x["median"][s], y["median"][s]) for s in summary.index}
        corners = [(x["median"][b], y["median"][a]) for a, b in itertools.pairwise(front)]
        bends = [p for pair in zip((points[s] for s in front), [*corners, None], strict=True) for p in pair if p]
        lines = list(itertools.pairwise(bends))
        lines += [((x["min"][s], y["median"][s]), (x["max"][s], y["median"][s])) for s in summary.index]
        _label(ax, points, lines, set(front))

        fast, small = front[0], front[-1]
        alt = f"Peak memory against time per step of {len(summary)} strategies. Fastest: {fast}, "
        alt += f"{time.text(seconds['median'][fast])} with {bytes_text(memory['median'][fast])}; smallest: {small}, "
        alt += f"{bytes_text(memory['median'][small])} with {time.text(seconds['median'][small])}. "
        alt += f"No other is better in both than {listed(front)}." + without_value(missing)
        kind = "allocated by torch" if on_gpu else "live tensors of the probed step"
        caption = (
            f"Peak memory ({kind}, the rank with the most) against the time of a step: medians over runs "
            f"({_counts(measured)}), whiskers from the lowest to the highest run. In full colour, and joined by the "
            "line: no other strategy is both faster and smaller, by the medians. Neither axis starts at 0."
            f"{_crowded(measured)}"
        )
        return finish(canvas, name, alt, caption + about.words + without_value(missing))


def _front(seconds: pd.Series, memory: pd.Series) -> list[str]:
    """The strategies that no other beats, or equals in one and beats in the other; from the fastest to the smallest."""
    front: list[str] = []
    for strategy in pd.DataFrame({"seconds": seconds, "memory": memory}).sort_values(["seconds", "memory"]).index:
        if not front or memory[strategy] < memory[front[-1]]:
            front.append(strategy)
    return front


class _Place(NamedTuple):
    """Where a label may go: offset from its point, in points, and which end of it is there."""

    x: float
    y: float
    align: str


def _places() -> list[_Place]:
    """Near ones first; right and left before above and below."""
    found = []
    for distance in (9, 18, 30, 44, 60):
        for degrees in (0, 180, 45, 315, 135, 225, 90, 270):
            across, up = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
            align = "left" if across > 0.1 else "right" if across < -0.1 else "center"
            found.append(_Place(distance * across, distance * up, align))
    return found


def _label(
    ax: Axes,
    points: dict[str, tuple[float, float]],
    lines: list[tuple[tuple[float, float], tuple[float, float]]],
    strong: set[str],
) -> None:
    """Write each point's name beside it, where it covers neither another name nor a point nor a line."""
    at = {name: ax.transData.transform(point) for name, point in points.items()}
    taken = [Bbox.from_bounds(x - 6, y - 6, 12, 12) for x, y in at.values()]
    taken += [Bbox(np.sort(ax.transData.transform(line), axis=0)).padded(1) for line in lines]
    inside = ax.get_window_extent()
    for name in sorted(at, key=lambda n: (n not in strong, at[n][0])):
        text = ax.annotate(name, points[name], xytext=(0, 0), textcoords="offset points", va="center",
                           alpha=1.0 if name in strong else 0.75, annotation_clip=False)  # fmt: skip
        best: tuple[float, _Place, Bbox] | None = None
        for place in _places():
            text.set(position=(place.x, place.y), horizontalalignment=place.align)
            box = text.get_window_extent().padded(1.5)
            covered = sum(_overlap(box, other) for other in taken)
            outside = box.width * box.height - _overlap(box, inside)
            if best is None or covered + outside < best[0]:
                best = covered + outside, place, box
            if not covered and outside < 1e-6:
                break
        _, place, box = best
        text.set(position=(place.x, place.y), horizontalalignment=place.align)
        taken.append(box)
        if math.hypot(place.x, place.y) > 12:
            ax.annotate("", points[name], xytext=(place.x, place.y), textcoords="offset points", annotation_clip=False,
                        arrowprops={"arrowstyle": "-", "linewidth": 0.7, "color": INK, "alpha": 0.5,
                                    "shrinkA": 0, "shrinkB": 4})  # fmt: skip


def _overlap(one: Bbox, other: Bbox) -> float:
    both = Bbox.intersection(one, other)
    return both.width * both.height if both is not None else 0.0


# ---------------------------------------------------------------- more processes


def world_sizes(table: pd.DataFrame) -> Figure:
    """Draw each strategy's speed per process and model states per rank against the number of processes.

    All runs have one global batch: strong scaling. Raises ValueError where no speed is measured, or the runs are not of
    one setting.
    """
    about = setting(table, varying="world_size")
    name = f"world-sizes-{about.slug}"
    column = "tokens_per_second_per_gpu"
    table = with_results(table, column)
    missing = {
        f"{strategy} on {processes}": why
        for processes, runs in table.groupby("world_size")
        for strategy, why in unmeasured(runs, column).items()
    }
    strategies = in_order(table["strategy"])
    worlds = sorted(int(size) for size in table["world_size"].unique())
    speed = table.dropna(subset=[column]).groupby(["strategy", "world_size"])[column].agg(["min", "median", "max"])
    measured = table.dropna(subset=[column])
    held = table.groupby(["strategy", "world_size"])[["model_state_bytes", "paper_state_bytes"]].max()
    known = held.stack().dropna()
    crowded = sorted(int(n) for n in table.loc[table["oversubscribed"].astype(bool), "world_size"].unique())
    efficiency = _efficiency(pairs.scaling(table))

    with house_style(name):
        both = not known.empty
        canvas, axes = panels([2.9, 2.7] if both else [2.9], share_x=True)
        unit = bytes_unit(known.max()) if both else None
        handles = []
        for i, strategy in enumerate(strategies):
            look = style(strategy)
            shift = 2.0 ** (DODGE * (i / max(1, len(strategies) - 1) - 0.5)) if len(strategies) > 1 else 1.0
            if strategy in speed.index:
                rates = speed.loc[strategy]
                axes[0].vlines(rates.index * shift, rates["min"], rates["max"], color=look.color, linewidth=1)
                axes[0].plot(rates.index * shift, rates["median"], color=look.color, linestyle=look.line,
                             marker=look.marker, markersize=5.5)  # fmt: skip
            if both and strategy in held.index:
                bytes_held = held.loc[strategy] / unit.size
                mine, paper = bytes_held["model_state_bytes"].dropna(), bytes_held["paper_state_bytes"].dropna()
                axes[1].plot(mine.index * shift, mine, color=look.color, linestyle=look.line, marker=look.marker,
                             markersize=5)  # fmt: skip
                axes[1].plot(paper.index * shift, paper, color=look.color, linestyle="none", marker=look.marker,
                             markersize=10, markerfacecolor="none", markeredgewidth=1)  # fmt: skip
            if strategy in speed.index or strategy in known.index:
                line = Line2D([], [], color=look.color, linestyle=look.line, marker=look.marker, label=strategy)
                handles.append(line)
        if crowded:
            at = crowded[0] / 2**0.5
            axes[0].axvspan(at, worlds[-1] * 2**0.5, color=INK, alpha=0.06, linewidth=0)
            axes[0].annotate("cores or GPUs shared", (at, 1), xytext=(4, -3), va="top", style="italic",
                             xycoords=("data", "axes fraction"), textcoords="offset points")  # fmt: skip
        axes[0].set_ylim(0, speed["max"].max() * 1.06)
        axes[0].set_ylabel("tokens per second per process")
        axes[0].yaxis.set_major_locator(MaxNLocator(5))
        axes[0].yaxis.set_major_formatter(lambda value, _: three_digits(value))
        if both:
            if spread_out(known, LOGARITHMIC_FROM):
                axes[1].set_yscale("log")
                log_ticks(axes[1].yaxis)
            else:
                axes[1].set_ylim(0, known.max() / unit.size * 1.08)
                axes[1].yaxis.set_major_locator(MaxNLocator(5))
            axes[1].set_ylabel(f"model states of a rank, {unit.name}")
            handles.append(Line2D([], [], color=INK, linestyle="none", marker="o", markersize=10, label="by the paper",
                                  markerfacecolor="none"))  # fmt: skip
        last = axes[-1]
        last.set_xscale("log", base=2)
        last.set_xlim(worlds[0] / 2**0.4, worlds[-1] * 2**0.4)
        last.xaxis.set_major_locator(FixedLocator(worlds))
        last.xaxis.set_minor_locator(NullLocator())
        last.xaxis.set_major_formatter(lambda value, _: f"{value:.0f}")
        last.set_xlabel("processes, one global batch")
        notes = [f"{where}: {why}" for where, why in missing.items()]
        below(canvas, handles, [handle.get_label() for handle in handles], notes)

        slow, fast = speed["median"].idxmin(), speed["median"].idxmax()
        alt = f"Speed per process of {len(strategies)} strategies on {listed(worlds)} processes: from "
        alt += f"{three_digits(speed['median'][slow])} tokens per second ({slow[0]} on {slow[1]}) to "
        alt += f"{three_digits(speed['median'][fast])} ({fast[0]} on {fast[1]})."
        if both:
            alt += f" Model states of a rank: {bytes_text(known.min())} to {bytes_text(known.max())}."
        caption = (
            f"Above: trained tokens per second and process, median over runs ({_per_cell(measured)}), bars from the "
            "slowest to the fastest run. The global batch is the same everywhere: strong scaling. "
        )
        caption += efficiency
        caption += (
            "Below: parameters, gradients and optimizer states of the rank with the most; hollow: by the paper's "
            "formula (arXiv:1910.02054, sec. 3.1 and 5). "
            if both
            else ""
        )
        caption += f"Strategies on equally many processes are drawn side by side.{_crowded(measured)}"
        return finish(canvas, name, alt + without_value(missing), caption + about.words + without_value(missing))


def _per_cell(measured: pd.DataFrame) -> str:
    return counted(measured.groupby(["strategy", "world_size"]).size(), "run")


def _efficiency(scaling: pd.DataFrame) -> str:
    """The sentence about scaling efficiency on the most processes; empty where there is none."""
    known = scaling[scaling["scaling_efficiency"].notna() & (scaling["world_size"] > 1)]
    known = known[known["world_size"] == known["world_size"].max()].set_index("strategy")
    if known.empty:
        return ""
    shares = [f"{strategy} {known.loc[strategy, 'scaling_efficiency']:.0%}" for strategy in in_order(known.index)]
    most, base = known["world_size"].iloc[0], listed(sorted(set(known["base"])))
    return f"Scaling efficiency on {most}, speed per process over that of {base}: {', '.join(shares)}. "
