"""How did others' trainings scale, and what does theory predict of them? In a style of its own: none of it is ours."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullLocator

from study.compare.words import three_digits
from study.planner import published_rows
from study.planner.published_rows import PublishedRun
from study.report.figures.drawing import INK, Figure, below, finish, house_style, panels

# Of series: hollow marks for what others measured, dashed lines without marks for what is predicted.
COLOURS = ("#2E86D0", "#D55E00", "#009E73", "#C0609A", "#A87900", "#7A6FD0")
MARKERS = ("D", "s", "^", "v", "P", "X")


def scaling(name: str, what: str, series: dict[str, list[PublishedRun]]) -> Figure:
    """Draw tokens per second and GPU over the number of GPUs, as published and as predicted, one colour a series."""
    with house_style(name):
        canvas, (ax,) = panels([3.4])
        handles = []
        for (label, rows), colour, marker in zip(series.items(), COLOURS, MARKERS, strict=False):
            counts = [row.num_gpus for row in rows]
            ax.plot(counts, [row.published_speed for row in rows], color=colour, marker=marker,
                    linestyle="none", markersize=6, markerfacecolor="none", markeredgewidth=1.4)  # fmt: skip
            ax.plot(counts, [row.predicted_speed for row in rows], color=colour, linestyle=(0, (2, 2)), linewidth=1.2)
            handles.append(_mark(colour, marker, label))
        handles.append(Line2D([], [], color=INK, linestyle=(0, (2, 2)), label="predicted"))
        everything = [row for rows in series.values() for row in rows]
        _axes(ax, sorted({row.num_gpus for row in everything}))
        below(canvas, handles, [str(handle.get_label()) for handle in handles])
        alt = "; ".join(
            f"{label}: {three_digits(rows[0].published_speed)} tokens/s a GPU on {rows[0].num_gpus}, "
            f"{three_digits(rows[-1].published_speed)} on {rows[-1].num_gpus}"
            for label, rows in series.items()
        )
        caption = (
            f"{what} Hollow marks: measured by others. Dashed: predicted, as theory's constants stand. Nothing here "
            "was measured by this study."
        )
        return finish(canvas, name, f"Measured by others: {alt}.", caption)


def _mark(colour: str, marker: str, label: str) -> Line2D:
    return Line2D([], [], color=colour, marker=marker, linestyle="none", markerfacecolor="none", markeredgewidth=1.4,
                  label=label)  # fmt: skip


def _axes(ax: Axes, counts: list[int]) -> None:
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_locator(FixedLocator(counts))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:.0f}")
    ax.set_xlim(counts[0] / 2**0.5, counts[-1] * 2**0.5)
    ax.set_xlabel("GPUs")
    ax.set_ylim(bottom=0)
    ax.set_ylabel("tokens per second and GPU")
    ax.yaxis.set_major_formatter(lambda value, _: three_digits(value))


def memory(name: str, what: str, rows: Sequence[PublishedRun]) -> Figure:
    """Draw the peak of a GPU over the number of GPUs, as published and as predicted, one colour a model and class."""
    series: dict[str, list[PublishedRun]] = {}
    for row in rows:
        if row.peak_bytes is not None:
            label = f"{row.case.shape.name}, {published_rows.state_bytes(row.case):g} bytes"
            series.setdefault(label, []).append(row)
    with house_style(name):
        canvas, (ax,) = panels([3.2])
        handles = []
        for (label, own), colour, marker in zip(series.items(), COLOURS, MARKERS, strict=False):
            counts = [row.num_gpus for row in own]
            ax.plot(counts, [(row.peak_bytes or 0) / 1e9 for row in own], color=colour, marker=marker, linestyle="none",
                    markersize=7, markerfacecolor="none", markeredgewidth=1.4)  # fmt: skip
            ax.plot(counts, [row.predicted_peak_bytes / 1e9 for row in own], color=colour, marker="_", linestyle="none",
                    markersize=11, markeredgewidth=1.6)  # fmt: skip
            handles.append(_mark(colour, marker, label))
        handles.append(Line2D([], [], color=INK, marker="_", linestyle="none", markersize=9, label="predicted"))
        counts = sorted({row.num_gpus for own in series.values() for row in own})
        _axes(ax, counts)
        ax.set_ylabel("peak of a GPU, GB")
        below(canvas, handles, [str(handle.get_label()) for handle in handles])
        alt = "; ".join(
            f"{label}: {three_digits((own[0].peak_bytes or 0) / 1e9)} GB on {own[0].num_gpus}, "
            f"{three_digits((own[-1].peak_bytes or 0) / 1e9)} on {own[-1].num_gpus}"
            for label, own in series.items()
        )
        caption = (
            f"{what} Hollow marks: measured by others, as torch's allocator had it. Short bars: predicted. The number "
            "behind a model: bytes of states that one of its parameters takes where nothing is split."
        )
        return finish(canvas, name, f"Measured by others: {alt}.", caption)
