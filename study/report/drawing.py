"""Draw the frame of every figure: `finish` adds the title, the settings, and whether numbers are measured.

A finished figure can be shared without the page around it. `finish` refuses a figure without a title, with an axis
without a unit, or with text that is too small on a phone.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterator
from itertools import chain
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.category import StrCategoryFormatter
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.text import Text
from matplotlib.ticker import FixedFormatter, FixedLocator, FuncFormatter, NullFormatter

from study.report.captions import Head

WIDTH = 5.0  # inches
PHONE = 343  # pixels of a figure on a page that is 390 pixels wide
SMALLEST = 9.5  # pixels of the smallest text there
INK = "#1f2328"  # color of text and axes
PAPER = "#ffffff"
HALO = [withStroke(linewidth=3, foreground=PAPER)]  # around text that a line may cross
LOOK: dict[Any, Any] = dict.fromkeys(
    ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK
)
LOOK |= {"figure.facecolor": PAPER, "savefig.facecolor": PAPER, "axes.facecolor": "none"}
plt.rcParams.update(LOOK | {"font.size": 11, "figure.dpi": 130, "legend.frameon": False})

# The label of an axis has its unit in parentheses, or says what it counts.
UNIT = re.compile(r"\(.+\)|^number of |\bsteps?\b|\bhours\b|\bsequences\b|\brelative\b|\bper\b", re.DOTALL)
TITLE_POINTS, TEXT_POINTS = 12.0, 10.5
TITLE_LETTERS, TEXT_LETTERS = 44, 56  # per line of a figure that is WIDTH inches wide
LEGEND_LETTERS, LEGEND_INCHES = 27, 0.22  # longest label in two columns, height of a row
LINE = 1.32  # height of a line of text, relative to its size


def panel(height: float) -> tuple[Figure, Axes]:
    """Return an empty figure and its axes, with the width and the style of all figures. `height` is in inches."""
    figure, axes = plt.subplots(figsize=(WIDTH, height), layout="constrained")
    dress(axes)
    return figure, axes


def dress(axes: Axes) -> None:
    """Apply the style of all figures to axes."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    axes.grid(alpha=0.2)


def finish(figure: Figure, head: Head, legend: bool = True) -> Figure:
    """Return the figure with its texts above it, and with a legend below it if anything in it has a label.

    The figure becomes higher by the height of both. Raises ValueError if an axis has no unit, or if a text is too small
    to be read on a phone.
    """
    legends = [axes.get_legend_handles_labels() for axes in figure.axes]
    handles, labels = ([*chain(*of_all)] for of_all in zip(*legends, strict=True))
    if legend and labels:
        columns = 1 if len(labels) == 1 or max(map(len, labels)) > LEGEND_LETTERS else 2
        width, height = figure.get_size_inches()
        figure.set_size_inches(width, height + math.ceil(len(labels) / columns) * LEGEND_INCHES)
        look: dict[str, Any] = {"fontsize": TEXT_POINTS, "handlelength": 1.5, "columnspacing": 1.2}
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, **look)
    _add_head(figure, head)
    for axes in figure.axes:
        for axis, others in ((axes.xaxis, axes.get_title() + axes.get_title("left")), (axes.yaxis, "")):
            if _shows_numbers(axis) and not UNIT.search(axis.get_label_text() or others):
                raise ValueError(f"{head.title}: an axis without a unit: {axis.get_label_text()!r}")
    for text in _texts(figure):
        if (pixels := float(text.get_fontsize()) * PHONE / (72 * figure.get_figwidth())) < SMALLEST:
            raise ValueError(f"{head.title}: {text.get_text()!r} is {pixels:.1f} pixels high on a phone")
    plt.close(figure)  # otherwise a notebook would show the figure twice
    return figure


def _add_head(figure: Figure, head: Head) -> None:
    """Add the title, and below it the kind of the numbers and the setting."""
    width, height = figure.get_size_inches()
    title = textwrap.fill(head.title, int(TITLE_LETTERS * width / WIDTH))
    letters = int(TEXT_LETTERS * width / WIDTH)
    text = "\n".join(textwrap.fill(part, letters) for part in (head.kind, head.setting) if part)
    title_inches, text_inches = (
        (string.count("\n") + 1) * LINE * points / 72 for string, points in ((title, TITLE_POINTS), (text, TEXT_POINTS))
    )
    total = height + title_inches + text_inches + 0.16
    figure.set_size_inches(width, total)
    share = height / total
    if engine := figure.get_layout_engine():
        engine.set(rect=(0, 0, 1, share))  # type: ignore[call-arg]
    else:
        for axes in figure.axes:
            place = axes.get_position()
            axes.set_position((place.x0, place.y0 * share, place.width, place.height * share))
    look: dict[str, Any] = {"va": "top", "linespacing": LINE - 0.14}
    figure.text(0.012, 1 - 0.05 / total, title, fontsize=TITLE_POINTS, fontweight="bold", **look)
    figure.text(0.012, 1 - (0.08 + title_inches) / total, text, fontsize=TEXT_POINTS, **look)


def _shows_numbers(axis: Axis) -> bool:
    """Return whether an axis has labels, and these are numbers and not names."""
    formatter = axis.get_major_formatter()
    if isinstance(formatter, (FixedFormatter, StrCategoryFormatter, NullFormatter)):
        return False
    if isinstance(formatter, FuncFormatter) and isinstance(axis.get_major_locator(), FixedLocator):
        return False  # the axis has names, which `set_yticks` sets this way
    return any(tick.label1.get_visible() for tick in axis.get_major_ticks()[:1])


def _texts(figure: Figure) -> Iterator[Text]:
    for artist in figure.findobj(Text):
        if isinstance(artist, Text) and artist.get_visible() and artist.get_text():
            yield artist
