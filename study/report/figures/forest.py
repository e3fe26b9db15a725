"""Is the difference to the control beyond what repeats of the control show? Intervals beside the margin."""

from __future__ import annotations

import math
import textwrap

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

from study.compare.differences import CEILING, METRICS
from study.compare.words import in_order, powers, processes, three_digits
from study.report.figures.drawing import INK, Figure, at_edge, below, beside, finish, house_style, panels, rows, style
from study.report.figures.setting import setting
from study.report.words import counted, listed, verdict_word

WORDS = {
    "loss_area": "mean loss over all steps",
    "eval_loss": "evaluation loss",
    "mean_grad_norm": "mean gradient norm",
    "tokens_per_second_per_gpu": "tokens per second per process",
    "mfu": "MFU",
}
LABEL_CHARACTERS = 26
EDGE_CHARACTERS = 44  # of the reason in a row without a value
APART_POINTS = 30  # between the labels of a logarithmic axis
FAR = 15  # times the typical difference: from there on an outlier would squeeze all others into a line


def differences(comparisons: pd.DataFrame) -> Figure:
    """Draw one metric's relative differences to the control, their intervals, the margin, and each verdict.

    `comparisons` is what `compare.differences.compare` makes, with one metric. Raises ValueError for several metrics,
    controls or settings; several world sizes have rows of their own.
    """
    for column in ("metric", "control"):
        if comparisons[column].nunique() > 1:
            values = listed(sorted(comparisons[column].unique()))
            raise ValueError(f"{column} is {values}; a figure is of one: filter the comparisons first")
    sizes = comparisons.loc[comparisons["strategy"] != "single", "world_size"]
    several = sizes.nunique() > 1
    about = setting(comparisons, varying="world_size" if several else None)
    metric, control = comparisons[["metric", "control"]].iloc[0]
    words = WORDS.get(metric, metric.replace("_", " "))
    name = f"differences-{metric.replace('_', '-')}-{about.slug}"
    ordered = _in_rows(comparisons, several)
    labels = _labels(ordered, control, several)
    bounds = ordered[["relative_difference", "relative_low", "relative_high"]].stack().dropna()
    percent = bounds.empty or bounds.abs().max() >= 1e-3  # smaller ones as they are: 2e-6 reads better than 0.0002 %
    scale = 100.0 if percent else 1.0
    margin = ordered["relative_margin"].max()

    with house_style(name):
        canvas, (ax,) = panels([0.34 * len(ordered) + 0.7])
        rows(ax, labels)
        for row, comparison in ordered.iterrows():
            _draw(ax, row, comparison, scale)
        ax.axvline(0, color=INK, linewidth=0.8)
        linear_within = _scale(ax, bounds * scale, margin * scale)
        how = "; logarithmic" if linear_within else ""
        ax.set_xlabel(f"{words}, difference to {control}{' in %' if percent else ', relative'}{how}")
        if margin > 0:
            patch = Patch(facecolor=INK, alpha=0.13, linewidth=0)
            below(canvas, [patch], [f"margin: {_text(margin, percent)} either way"])
        if linear_within:
            canvas.draw_without_rendering()  # the layout decides how much room the axis has
            ax.xaxis.set_major_locator(FixedLocator(_ticks(ax, linear_within)))
        alt = f"Difference in {words} to {control}{_alt(ordered, labels, percent)}"
        return finish(canvas, name, alt, _caption(ordered, labels, words, control, several) + about.words)


def _in_rows(comparisons: pd.DataFrame, several: bool) -> pd.DataFrame:
    """The comparisons in the order of their rows, from the top."""
    place = comparisons["strategy"].map(in_order(comparisons["strategy"]).index)
    columns = ["world_size", "place"] if several else ["place"]
    return comparisons.assign(place=place).sort_values(columns, ignore_index=True)


def _draw(ax: Axes, row: int, comparison: pd.Series, scale: float) -> None:
    """Draw the margin, the interval and the difference of one comparison; or why there is none."""
    if pd.isna(comparison["relative_difference"]):
        at_edge(ax, row, textwrap.shorten(comparison["why"], EDGE_CHARACTERS, placeholder=" ..."))
        return
    look = style(comparison["strategy"])
    reach = comparison["relative_margin"] * scale
    if reach > 0:  # unknown, or none, as of bytes
        ax.add_patch(Rectangle((-reach, row - 0.5), 2 * reach, 1, facecolor=INK, alpha=0.13, linewidth=0))
    has_interval = pd.notna(comparison["relative_low"])
    if has_interval:
        ends = comparison["relative_low"] * scale, comparison["relative_high"] * scale
        ax.hlines(row, *ends, color=look.color, linewidth=2)
    ax.plot(comparison["relative_difference"] * scale, row, marker=look.marker, color=look.color, markersize=7,
            markerfacecolor=look.color if has_interval else "none", linestyle="none")  # fmt: skip
    beside(ax, row, verdict_word(comparison["metric"], comparison["verdict"]))


def _alt(ordered: pd.DataFrame, labels: list[str], percent: bool) -> str:
    """What the rows show, in words, behind what they are differences in."""
    relative, margin = ordered["relative_difference"], ordered["relative_margin"].max()
    alt = ""
    if relative.notna().any():
        low, high = relative.idxmin(), relative.idxmax()
        alt += f" of {relative.notna().sum()} strategies: from {_text(relative[low], percent)} ({labels[low]}) to "
        alt += f"{_text(relative[high], percent)} ({labels[high]})"
    alt += f"; margin {_text(margin, percent)} either way." if margin > 0 else "; no margin."
    for verdict, members in ordered.groupby("verdict", sort=False):
        word = verdict_word(members["metric"].iloc[0], verdict)
        alt += f" {word.capitalize()}: {', '.join(labels[row] for row in members.index)}."
    return alt


def _labels(ordered: pd.DataFrame, control: str, several: bool) -> list[str]:
    """The strategies, with what tells rows of one strategy apart, and the control's processes where they differ."""
    names = ordered["same"] if "same" in ordered else ordered["strategy"]  # bit-identical ones are one row
    names = names.map(lambda words: textwrap.fill(words, LABEL_CHARACTERS, break_long_words=False))
    labels = names + (" on " + ordered["world_size"].astype(str) if several else "")
    against = labels + f" ({control} on " + ordered["control_world_size"].astype(str) + ")"
    others = (ordered["strategy"] != "single") & (ordered["world_size"] != ordered["control_world_size"])
    return list(labels.where(~labels.duplicated(keep=False) & ~others, against))


def _text(relative: float, percent: bool) -> str:
    return f"{three_digits(100 * relative)} %" if percent else powers(relative)


def _scale(ax: Axes, bounds: pd.Series, margin: float) -> float | None:
    """Give the axis its range; where one difference is far beyond the others, a logarithmic one.

    Returns within what that one is linear, or None.
    """
    reach = 0.0 if pd.isna(margin) else margin
    low, high = (min(bounds.min(), -reach), max(bounds.max(), reach)) if len(bounds) else (-1.0, 1.0)
    sizes = bounds[bounds != 0].abs()
    if len(sizes) and max(-low, high) > FAR * sizes.median():
        linear_within = 10.0 ** math.floor(math.log10(sizes.median()))
        ax.set_xscale("symlog", linthresh=linear_within)
        ax.set_xlim(1.8 * min(low, -linear_within), 1.8 * max(high, linear_within))
        ax.xaxis.set_minor_locator(NullLocator())
        ax.xaxis.set_major_formatter(lambda value, _: three_digits(value))
        return linear_within
    largest = max(-low, high) or 1.0
    ax.set_xlim(-1.1 * largest, 1.1 * largest)
    ax.xaxis.set_major_locator(MaxNLocator(5, symmetric=True))
    ax.xaxis.set_major_formatter(lambda value, _: three_digits(value))
    return None


def _ticks(ax: Axes, linear_within: float) -> list[float]:
    """Powers of ten on both sides of 0, as many as have room for their labels, from the ends inwards."""
    ticks = [0.0]
    for sign, end in zip((-1, 1), ax.get_xlim(), strict=True):
        zero, last = ax.transData.transform((0, 0))[0], math.inf
        for decade in range(math.floor(math.log10(abs(end))), round(math.log10(linear_within)) - 1, -1):
            away = abs(ax.transData.transform((sign * 10.0**decade, 0))[0] - zero)
            if min(away, last - away) > APART_POINTS:
                ticks.append(sign * 10.0**decade)
                last = away
    return sorted(ticks)


def _caption(ordered: pd.DataFrame, labels: list[str], words: str, control: str, several: bool) -> str:
    caption = f"Difference in {words} to {control}, relative to its value"
    with_interval = ordered[ordered["relative_low"].notna()]
    if with_interval.empty:
        caption += "; no strategy has an interval."
    else:
        pairs = counted(with_interval["n_pairs"].astype(int), "pair")
        caption += f". Line: 95 % interval of one comparison ({pairs}); hollow: no interval."
    if ordered["relative_margin"].max() > 0:
        caption += f" Grey: the margin, below which 95 of 100 pairs of equal runs of {control} differ"
        ceiling = CEILING[METRICS[ordered["metric"].iloc[0]]]
        wide = ordered["relative_margin"].max() > ceiling
        caption += f"; above {100 * ceiling:g} % it says nothing." if wide else ", within which there is no difference."
    if several:
        where = ", ".join(processes(size) for size in sorted(ordered["world_size"].unique()))
        caption += f" Rows are on {where}."
    nothing = [f"{labels[row]} ({ordered['why'][row]})" for row in ordered.index[ordered["relative_difference"].isna()]]
    return caption + (f" Without a value: {'; '.join(nothing)}." if nothing else "")
