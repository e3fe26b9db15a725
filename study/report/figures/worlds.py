"""What do more processes bring? Speed per process, and model states of a rank, at one global batch."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from study.compare import pairs
from study.compare.words import Unit, bytes_text, bytes_unit, in_order, processes, three_digits
from study.report.figures.drawing import (
    INK,
    Figure,
    Style,
    below,
    finish,
    house_style,
    log_ticks,
    panels,
    spread_out,
    style,
)
from study.report.figures.setting import crowded, runs_counted, setting, unmeasured, with_results, without_value
from study.report.figures.speed import LOGARITHMIC_FROM
from study.report.words import listed

SPREAD = 0.7  # of the room of one number of processes, over which its strategies stand, so that none covers another


def world_sizes(table: pd.DataFrame, with_speed: bool = True) -> Figure:
    """Draw each strategy's speed per process and model states per rank against the number of processes.

    `with_speed` is False where times decide nothing; then states alone are drawn, if they are known. All runs have one
    global batch: strong scaling. Raises ValueError where no speed is measured, or the runs are not of one setting.
    """
    about = setting(table, varying="world_size")
    name = f"world-sizes-{about.slug}"
    column = "tokens_per_second_per_gpu"
    table = with_results(table, column)
    missing = {
        f"{strategy} on {world_size}": why
        for world_size, runs in table.groupby("world_size")
        for strategy, why in unmeasured(runs, column).items()
    }
    strategies = in_order(table["strategy"])
    worlds = sorted(int(size) for size in table["world_size"].unique())
    measured = table.dropna(subset=[column])
    speed = measured.groupby(["strategy", "world_size"])[column].agg(["min", "median", "max"])
    held = table.groupby(["strategy", "world_size"])[["model_state_bytes", "paper_state_bytes"]].max()
    bytes_held = held.stack().dropna()
    unit = None if bytes_held.empty else bytes_unit(bytes_held.max())

    with house_style(name):
        with_speed = with_speed or unit is None
        canvas, axes = panels([2.9] * with_speed + [2.7] * (unit is not None), share_x=True)
        for strategy in strategies:
            if with_speed and strategy in speed.index:
                _draw_speed(axes[0], speed.loc[strategy], _places(table, strategy), style(strategy))
            if unit and strategy in held.index:
                _draw_states(axes[-1], held.loc[strategy] / unit.size, _places(table, strategy), style(strategy))
        if with_speed:
            _mark_shared(axes[0], table, worlds)
            _scale_speed(axes[0], speed["max"].max())
        if unit:
            _scale_states(axes[-1], bytes_held, unit)
        _scale_worlds(axes, worlds)
        drawn = [s for s in strategies if s in speed.index or s in bytes_held.index]
        handles = [_handle(strategy) for strategy in drawn] + ([_handle_of_paper()] if unit else [])
        notes = [f"{where}: {why}" for where, why in missing.items()]
        below(canvas, handles, [handle.get_label() for handle in handles], notes)

        slow, fast = speed["median"].idxmin(), speed["median"].idxmax()
        alt = f"{len(strategies)} strategies on {listed(worlds)} processes."
        if with_speed:
            alt += f" Speed per process: from {three_digits(speed['median'][slow])} tokens per second ({slow[0]} on "
            alt += f"{slow[1]}) to {three_digits(speed['median'][fast])} ({fast[0]} on {fast[1]})."
        if unit:
            alt += f" Model states of a rank: {bytes_text(bytes_held.min())} to {bytes_text(bytes_held.max())}."
        caption = _caption(table, measured, with_speed, states=unit is not None)
        return finish(canvas, name, alt + without_value(missing), caption + about.words + without_value(missing))


def _places(table: pd.DataFrame, strategy: str) -> pd.Series:
    """Where a strategy's points stand, by its numbers of processes: each of these has a room, the first around 0."""
    places = {}
    for room, (size, runs) in enumerate(table.groupby("world_size")):
        there = in_order(runs["strategy"])
        if strategy in there:
            aside = there.index(strategy) / (len(there) - 1) - 0.5 if len(there) > 1 else 0.0
            places[int(size)] = room + SPREAD * aside
    return pd.Series(places, dtype=float)


def _draw_speed(ax: Axes, rates: pd.DataFrame, places: pd.Series, look: Style) -> None:
    ax.vlines(places[rates.index], rates["min"], rates["max"], color=look.color, linewidth=1)
    ax.plot(places[rates.index], rates["median"], color=look.color, linestyle=look.line, marker=look.marker,
            markersize=4)  # fmt: skip


def _draw_states(ax: Axes, held: pd.DataFrame, places: pd.Series, look: Style) -> None:
    measured, paper = held["model_state_bytes"].dropna(), held["paper_state_bytes"].dropna()
    ax.plot(places[measured.index], measured, color=look.color, linestyle=look.line, marker=look.marker,
            markersize=4)  # fmt: skip
    ax.plot(places[paper.index], paper, color=look.color, linestyle="none", marker="_", markersize=6,
            markeredgewidth=1.5)  # fmt: skip


def _mark_shared(ax: Axes, table: pd.DataFrame, worlds: list[int]) -> None:
    """Shade the numbers of processes that shared cores or GPUs."""
    shared = table.loc[table["oversubscribed"].astype(bool), "world_size"]
    if shared.empty:
        return
    at = worlds.index(int(shared.min())) - 0.5
    ax.axvspan(at, len(worlds) - 0.5, color=INK, alpha=0.06, linewidth=0)
    ax.annotate("cores or GPUs shared", (at, 1), xytext=(4, -3), va="top", style="italic",
                xycoords=("data", "axes fraction"), textcoords="offset points")  # fmt: skip


def _scale_speed(ax: Axes, largest: float) -> None:
    ax.set_ylim(0, largest * 1.06)
    ax.set_ylabel("tokens per second per process")
    ax.yaxis.set_major_locator(MaxNLocator(5))
    ax.yaxis.set_major_formatter(lambda value, _: three_digits(value))


def _scale_states(ax: Axes, bytes_held: pd.Series, unit: Unit) -> None:
    if spread_out(bytes_held, LOGARITHMIC_FROM):
        ax.set_yscale("log")
        log_ticks(ax.yaxis)
    else:
        ax.set_ylim(0, bytes_held.max() / unit.size * 1.08)
        ax.yaxis.set_major_locator(MaxNLocator(5))
    ax.set_ylabel(f"model states of a rank, {unit.name}")


def _scale_worlds(axes: list[Axes], worlds: list[int]) -> None:
    """A room for each number of processes, with a wall between two."""
    for ax in axes:
        ax.grid(False, axis="x")
        ax.tick_params(axis="x", length=0)
        for wall in range(len(worlds) - 1):
            ax.axvline(wall + 0.5, color=INK, linewidth=0.8, alpha=0.3)
    axes[-1].set_xlim(-0.5, len(worlds) - 0.5)
    axes[-1].set_xticks(range(len(worlds)), [processes(size) for size in worlds])
    axes[-1].set_xlabel("one global batch")


def _handle(strategy: str) -> Line2D:
    look = style(strategy)
    return Line2D([], [], color=look.color, linestyle=look.line, marker=look.marker, label=strategy)


def _handle_of_paper() -> Line2D:
    return Line2D([], [], color=INK, linestyle="none", marker="_", markersize=8, label="by the paper",
                  markeredgewidth=1.5)  # fmt: skip


def _caption(table: pd.DataFrame, measured: pd.DataFrame, with_speed: bool, states: bool) -> str:
    parts = []
    if with_speed:
        parts.append(
            "Above: trained tokens per second and process, median over runs "
            f"({runs_counted(measured, 'strategy', 'world_size')}), bars from the slowest to the fastest run. The "
            f"global batch is the same everywhere: strong scaling. {_efficiency(pairs.scaling(table))}".rstrip()
        )
    if states:
        where = "Below: parameters" if with_speed else "Parameters"
        parts.append(
            f"{where}, gradients and optimizer states of the rank with the most; short bar: by the paper's formula "
            "(arXiv:1910.02054, sec. 3.1 and 5)."
        )
    parts.append("Strategies on equally many processes are drawn side by side.")
    return " ".join(parts) + (crowded(measured) if with_speed else "")


def _efficiency(scaling: pd.DataFrame) -> str:
    """The sentence about scaling efficiency on the most processes; empty where there is none."""
    known = scaling[scaling["scaling_efficiency"].notna() & (scaling["world_size"] > scaling["base_world_size"])]
    known = known[known["world_size"] == known["world_size"].max()].set_index("strategy")
    if known.empty:
        return ""
    shares = [f"{strategy} {known.loc[strategy, 'scaling_efficiency']:.0%}" for strategy in in_order(known.index)]
    most, base = known["world_size"].iloc[0], listed(sorted(set(known["base"])))
    return f"Scaling efficiency on {most}, speed per process over that of {base}: {', '.join(shares)}. "
