"""What fills a rank's memory? What was measured of its peak, theory's parts of it, and model states by kind."""

from __future__ import annotations

from typing import Any

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from study.compare.words import Unit, bytes_text, bytes_unit, computed_note, in_order
from study.report.figures.drawing import INK, Figure, at_edge, below, beside, finish, house_style, panels, rows
from study.report.figures.parts import COLOURS, HATCHES, NAMES, PREDICTED, STATES, hatched, sizes
from study.report.figures.setting import setting, unmeasured, with_results, without_value
from study.report.words import counted

RESERVED = {"fill": False, "edgecolor": COLOURS["rest"], "linewidth": 1.0}
BAR = 0.66  # of a row
WITHIN_REACH = 1.6  # times the longest bar: how far away the card's limit may be for the axis to go there


def peak_memory(table: pd.DataFrame) -> Figure:
    """Draw a rank's peak per strategy: what was there before the step, and more; and theory's parts of it, hatched.

    Model states are measured as the optimizer is about to step, which is seldom when memory is highest: they stand
    beside the paper's. Of the peak itself is measured what rests between two steps, and so is there too.
    Of several runs the one with the highest peak. Up to two ranks have a bar each; of more, the rank with the most and
    the one with the least. Raises ValueError where nothing is measured or the runs are not of one setting.
    """
    about = setting(table)
    name = f"peak-memory-{about.slug}"
    on_gpu = "cuda" in set(table["device"])
    column = "peak_allocated_bytes" if on_gpu else "peak_tensor_bytes"
    table = with_results(table.assign(peak=table[column].where(table["rank_parts"].notna())), "peak")
    strategies = in_order(table["strategy"])
    missing = unmeasured(table, "peak")
    measured = table.dropna(subset=["peak"])
    highest = measured.loc[measured.groupby("strategy")["peak"].idxmax()].set_index("strategy")
    bars = {strategy: _bars(highest.loc[strategy, "rank_parts"], on_gpu) for strategy in highest.index}
    paper = highest["paper_state_bytes"].dropna().to_dict()
    predicted = {s: highest.loc[s, "predicted_parts"] for s in highest.index if highest.loc[s, "predicted_parts"]}

    tops = {s: max(bar["peak"] for bar in drawn) for s, drawn in bars.items()}
    reserved = {s: max((bar["reserved"] or 0) - bar["peak"] for bar in drawn) for s, drawn in bars.items()}
    longest = max(max(tops[s] + max(0, reserved[s]), sum(predicted.get(s, {}).values())) for s in bars)
    states = {s: max(sum(bar[part] for part in STATES) for bar in drawn) for s, drawn in bars.items()}
    host = {s: max(bar["host"] or 0 for bar in drawn) for s, drawn in bars.items()}
    largest_states = max([*states.values(), *paper.values()])
    limit = highest["device_memory_bytes"].max() if on_gpu else None

    with house_style(name), matplotlib.rc_context({"hatch.linewidth": 0.6}):
        height = 0.44 * len(strategies) + 0.65
        canvas, axes = panels([height, height])
        labels = [f"{s}\n({why})" if (why := missing.get(s)) and s in bars else s for s in strategies]
        unit = bytes_unit(longest)
        top = axes[0]
        rows(top, labels)
        for row, strategy in enumerate(strategies):
            if strategy not in bars:
                at_edge(top, row, missing[strategy])
                continue
            drawn = [*bars[strategy], *([predicted[strategy]] if strategy in predicted else [])]
            for low, thickness, bar in _places(row, drawn):
                if bar is predicted.get(strategy):
                    _predicted(top, low, thickness, bar, unit)
                else:
                    _stack(top, low, thickness, bar, unit)
            also = f"\n+ {bytes_text(host[strategy])} host" if host[strategy] else ""
            beside(top, row, unit.text(tops[strategy]) + also, fontsize="small" if also else None)
        top.set_xlim(0, longest / unit.size * 1.03)
        far = _draw_limit(top, limit, longest, unit)
        top.set_xlabel(f"peak memory of a rank, {unit.name}{far}")
        top.xaxis.set_major_locator(MaxNLocator(6))
        _states_panel(axes[1], strategies, bars, paper, missing, largest_states)
        below(canvas, *_legend(bars, paper, predicted))

        alt = _alt(tops, states, paper, limit) + without_value(missing)
        caption = _caption(on_gpu, bars, host, measured, highest, far)
        return finish(canvas, name, alt, caption + about.words + without_value(missing))


def _bars(ranks: list[dict[str, Any]], on_gpu: bool) -> list[dict[str, Any]]:
    """The ranks to draw, each with what its peak is made of."""
    bars = []
    for rank in ranks:
        bar = {"host": None, "reserved": None, **rank}
        resting = bar["resting"]
        if on_gpu and resting["host"]:
            resting = {"on_gpu": sum(resting[part] for part in STATES) - resting["host"], **_buffers(resting)}
        else:
            resting = {part: resting[part] for part in STATES} | _buffers(resting)
        bar["at_peak"] = {**resting, "rest": max(0, bar["peak"] - sum(resting.values()))}
        bars.append(bar)
    if len(bars) <= 2:
        return bars
    ordered = sorted(bars, key=lambda bar: bar["peak"])
    return [ordered[-1], ordered[0]]


def _buffers(resting: dict[str, int]) -> dict[str, int]:
    return {"communication_buffers": resting["communication_buffers"]}


def _places(row: int, bars: list[dict[str, Any]]) -> list[tuple[float, float, dict[str, Any]]]:
    """Where each of a strategy's bars goes: lower edge and thickness."""
    thickness = BAR / len(bars)
    gap = 0.1 * thickness if len(bars) > 1 else 0.0
    return [(row - BAR / 2 + i * thickness, thickness - gap, bar) for i, bar in enumerate(bars)]


def _stack(ax: Axes, low: float, thickness: float, bar: dict[str, Any], unit: Unit) -> None:
    """One measured peak: what rests between steps, and what comes on top."""
    start = _filled(ax, low, thickness, bar["at_peak"], unit)
    if bar["reserved"]:
        more = (bar["reserved"] - bar["peak"]) / unit.size
        ax.add_patch(Rectangle((start, low), more, thickness, **RESERVED))


def _filled(ax: Axes, low: float, thickness: float, parts: dict[str, int], unit: Unit) -> float:
    """One bar of segments; where it ends."""
    start = 0.0
    for part, num_bytes in parts.items():
        size = num_bytes / unit.size
        ax.add_patch(Rectangle((start, low), size, thickness, facecolor=COLOURS[part], linewidth=0))
        start += size
    return start


def _predicted(ax: Axes, low: float, thickness: float, parts: dict[str, float], unit: Unit) -> None:
    """One predicted peak, by its parts at the moment that is highest by theory."""
    start = 0.0
    for part, num_bytes in sizes(parts).items():
        if num_bytes:
            ax.add_patch(hatched(Rectangle((start, low), num_bytes / unit.size, thickness), part))
            start += num_bytes / unit.size


def _outline(ax: Axes, row: int, size: float) -> None:
    ax.add_patch(Rectangle((0, row - 0.45), size, 0.9, fill=False, edgecolor=INK, linewidth=0.9))


def _draw_limit(ax: Axes, limit: float | None, longest: float, unit: Unit) -> str:
    """Draw the card's memory as a line if it is near; otherwise return the words that say where it is."""
    if limit is None or pd.isna(limit):
        return ""
    if limit > WITHIN_REACH * longest:
        return f"; the card has {bytes_text(limit)}"
    ax.axvline(limit / unit.size, color=INK, linewidth=1.5)
    ax.annotate(f"card: {bytes_text(limit)}", (limit / unit.size, 1), xycoords=("data", "axes fraction"),
                xytext=(0, 3), textcoords="offset points", ha="right", annotation_clip=False)  # fmt: skip
    ax.set_xlim(0, max(limit, longest) / unit.size * 1.03)
    return ""


def _states_panel(
    ax: Axes,
    strategies: list[str],
    bars: dict[str, list[dict[str, Any]]],
    paper: dict[str, float],
    missing: dict[str, str],
    largest: float,
) -> None:
    unit = bytes_unit(largest)
    rows(ax, strategies)
    for row, strategy in enumerate(strategies):
        if strategy not in bars:
            at_edge(ax, row, missing[strategy])
            continue
        for low, thickness, bar in _places(row, bars[strategy]):
            _filled(ax, low, thickness, {part: bar[part] for part in STATES}, unit)
        if strategy in paper:
            _outline(ax, row, paper[strategy] / unit.size)
        held = max(sum(bar[part] for part in STATES) for bar in bars[strategy])
        beside(ax, row, unit.text(held))
    ax.set_xlim(0, largest / unit.size * 1.03)
    ax.set_xlabel(f"model states of a rank, {unit.name}")
    ax.xaxis.set_major_locator(MaxNLocator(6))


def _legend(
    bars: dict[str, list[dict[str, Any]]], paper: dict[str, float], predicted: dict[str, dict[str, float]]
) -> tuple[list[Patch], list[str]]:
    drawn = [bar for several in bars.values() for bar in several]
    shown = [*STATES, *(["on_gpu"] if any("on_gpu" in bar["at_peak"] for bar in drawn) else [])]
    shown += ["communication_buffers", "rest"]
    handles = [Patch(facecolor=COLOURS[part], linewidth=0) for part in shown]
    names = [NAMES["during" if part == "rest" else part] for part in shown]
    if predicted:  # in the colours of what is measured; what only theory tells apart has names of its own
        handles.append(Patch(facecolor="none", edgecolor=INK, linewidth=0.9, hatch=HATCHES["parameters"]))
        names.append("hatched: by theory")
    for part in PREDICTED:
        if (part == "rest" or part not in shown) and any(sizes(parts)[part] for parts in predicted.values()):
            handles.append(hatched(Patch(), part))
            names.append(f"{NAMES[part]}, by theory")
    if any(bar["reserved"] for bar in drawn):
        handles.append(Patch(**RESERVED))
        names.append(NAMES["reserved"])
    if paper:
        handles.append(Patch(fill=False, edgecolor=INK, linewidth=0.9))
        names.append(NAMES["paper"])
    return handles, names


def _alt(tops: dict[str, float], states: dict[str, float], paper: dict[str, float], limit: float | None) -> str:
    least, most = min(tops, key=tops.get), max(tops, key=tops.get)
    alt = f"Peak memory of a rank under {len(tops)} strategies: from {bytes_text(tops[least])} ({least}) to "
    alt += f"{bytes_text(tops[most])} ({most})." if len(tops) > 1 else f"{bytes_text(tops[most])}."
    alt += f" Model states take {bytes_text(min(states.values()))} to {bytes_text(max(states.values()))}"
    if paper:
        alt += f", by the paper {bytes_text(min(paper.values()))} to {bytes_text(max(paper.values()))}"
    card = "" if limit is None or pd.isna(limit) else f" The card has {bytes_text(limit)}."
    return f"{alt}.{card}"


def _caption(
    on_gpu: bool,
    bars: dict[str, list[dict[str, Any]]],
    host: dict[str, float],
    measured: pd.DataFrame,
    highest: pd.DataFrame,
    far: str,
) -> str:
    kind = "allocated by torch" if on_gpu else "live tensors of the probed step"
    num_ranks = max(len(drawn) for drawn in bars.values())
    ranks = "one bar per rank, rank 0 above"
    if (highest["world_size"] > 2).any():
        ranks = "the rank with the most, and below it the one with the least"
    counts = counted(measured.groupby("strategy").size(), "run")
    caption = f"Peak memory ({kind})" + (f", {ranks}" if num_ranks > 1 else "")
    caption += f"; of several runs the one with the highest peak ({counts})."
    caption += (
        " Filled: measured. Of the peak that is what rests between two steps, and so is there too, and what comes on "
    )
    caption += (
        "top of it. Hatched: all of it by theory (study/theory/peaks.py), at the moment that it says is highest, "
    )
    caption += (
        "no measurement. The lower panel: model states as the optimizer is about to step, which is another moment; "
    )
    caption += "framed: by the paper's formula (arXiv:1910.02054, sec. 3.1 and 5), which counts neither buffers nor "
    caption += "activations."
    if not on_gpu and num_ranks > 1:
        caption += " A CPU's count of a peak may be too high where small tensors are sent often (docs/planner.md)."
    if any(host.values()):
        caption += " The lower panel counts them wherever they are, on the GPU or, offloaded, on the host."
    caption += f" Not in the picture: {far.removeprefix('; ')}." if far else ""
    return caption + computed_note(highest.reset_index())
