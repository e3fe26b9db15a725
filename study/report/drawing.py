"""The look of every figure: colours and marks of strategies, panels, axes, and SVG that takes the page's colours."""

from __future__ import annotations

import contextlib
import io
import math
import re
import textwrap
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import matplotlib as mpl
import pandas as pd
from markupsafe import escape
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.transforms import IdentityTransform

from study.compare.facts import is_disturbed
from study.compare.words import in_order, processes, three_digits
from study.report.markup import listed

WIDTH_INCHES = 6.0  # beyond the width of a phone, on which a drawing scrolls: its text would be 8 pixels high
POINTS_PER_INCH = 72  # also the dots per inch of a canvas, so that its pixels are points
WIDTH_POINTS = WIDTH_INCHES * POINTS_PER_INCH
PIXELS_PER_POINT = 4 / 3
LEFT = 5.0  # points, of what stands below the panels
NOTE_CHARACTERS = 70  # of a line below the panels

INK = "#010203"  # drawn in this, shown in the page's own text colour

# One colour per stage, all of which have a contrast of at least 3 with white and with near-black (after Okabe and Ito).
COLOURS = {
    "single": "#808080",
    "ddp": INK,
    "zero0": "#A87900",
    "zero1": "#2E86D0",
    "zero2": "#009E73",
    "zero3": "#D55E00",
    "fsdp2": "#C0609A",
}
# One marker and one line per kind of a stage: what follows the first underscore of its name.
MARKS: dict[str, tuple[str, Any]] = {
    "": ("o", "-"),
    "cpu_offload": ("s", (0, (5, 2))),
    "nvme_offload": ("^", (0, (1, 1.3))),
    "tuned": ("D", (0, (6, 1.5, 1.5, 1.5))),
}
# For strategies of a user's own; which one follows from the name, so that it is the same in every figure.
OTHER_COLOURS = ("#7A6FD0", "#6E8B3D", "#3C9AA8")
OTHER_MARKS: tuple[tuple[str, Any], ...] = (
    ("v", (0, (3, 1.5))),
    ("P", (0, (8, 2))),
    ("X", (0, (3, 1, 1, 1, 1, 1))),
    ("<", (0, (2, 2))),
    (">", (0, (10, 2, 2, 2))),
)

HOUSE: Any = {
    "svg.fonttype": "none",  # text stays text: it can be searched, and takes the page's font
    "font.family": "sans-serif",
    "font.size": 11,
    "axes.labelsize": 11,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "xtick.labelsize": 10.5,
    "ytick.labelsize": 10.5,
    "legend.fontsize": 10.5,
    "legend.frameon": False,
    "legend.handlelength": 2.6,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": INK,
    "grid.alpha": 0.15,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "lines.linewidth": 1.5,
}


@dataclass(frozen=True)
class Figure:
    """A drawing with its title, which is its alternative text too; a notebook shows it as the HTML of a <figure>."""

    name: str  # also the beginning of every id in the SVG, because several share a page
    title: str
    svg: str

    def _repr_html_(self) -> str:
        drawing = f'<div class="drawing" role="group" tabindex="0">{self.svg}</div>'  # which a phone scrolls
        return f'<figure class="plot">{drawing}<figcaption>{escape(self.title)}</figcaption></figure>'


# ---------------------------------------------------------------- strategies


class Style(NamedTuple):
    color: str
    marker: str
    line: Any  # matplotlib's linestyle


def style(strategy: str) -> Style:
    """The colour, marker and line that a strategy has in every figure."""
    stage, _, kind = strategy.partition("_")
    color = COLOURS.get(stage) or OTHER_COLOURS[zlib.crc32(stage.encode()) % len(OTHER_COLOURS)]
    marker, line = MARKS.get(kind) or OTHER_MARKS[zlib.crc32(kind.encode()) % len(OTHER_MARKS)]
    return Style(color, marker, line)


# ---------------------------------------------------------------- drawing


@contextlib.contextmanager
def house_style(name: str) -> Iterator[None]:
    """Matplotlib's settings for one figure, and no longer; ids in the SVG follow from the name."""
    with mpl.rc_context({**HOUSE, "svg.hashsalt": name}):
        yield


def panels(heights: Sequence[float], share_x: bool = False) -> tuple[Canvas, list[Axes]]:
    """Make panels of these heights in inches, one above the other, because a phone has no room beside."""
    canvas = Canvas(figsize=(WIDTH_INCHES, sum(heights)), dpi=POINTS_PER_INCH, layout="constrained")
    grid = canvas.subplots(len(heights), 1, squeeze=False, sharex=share_x, height_ratios=list(heights))
    return canvas, list(grid[:, 0])


def spread_out(values: Iterable[float], most: float) -> bool:
    """Whether the largest value is so many times the smallest that only a logarithmic axis shows both."""
    finite = [value for value in values if value and math.isfinite(value)]
    return min(finite) > 0 and max(finite) > most * min(finite)


def log_ticks(axis: Any) -> None:
    """Label a logarithmic axis with plain numbers."""
    axis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5), numticks=12))
    axis.set_major_formatter(lambda value, _: three_digits(value))
    axis.set_minor_locator(ticker.NullLocator())


def rows(ax: Axes, labels: Sequence[str]) -> None:
    """Give a panel one row per label, the first at the top."""
    ax.set_yticks(range(len(labels)), labels)
    ax.set_ylim(len(labels) - 0.4, -0.6)
    ax.tick_params(axis="y", length=0)
    ax.grid(False, axis="y")
    ax.spines["left"].set_visible(False)


def beside(ax: Axes, row: float, text: str, **style: Any) -> None:
    """Write to the right of a row."""
    ax.annotate(text, (1, row), xycoords=("axes fraction", "data"), xytext=(6, 0), textcoords="offset points",
                va="center", annotation_clip=False, **style)  # fmt: skip


def at_edge(ax: Axes, row: float, why: str) -> None:
    """Mark a row that has no value, and say why, at the edge of the panel."""
    ax.annotate(f"\N{MULTIPLICATION SIGN} {why}", (0, row), xycoords=("axes fraction", "data"), xytext=(4, 0),
                textcoords="offset points", va="center", style="italic")  # fmt: skip


def below(canvas: Canvas, handles: Sequence[Any], labels: Sequence[str], notes: Iterable[str] = ()) -> None:
    """Put the legend, and lines about what is not drawn, below the panels; the canvas grows by what they take."""
    lines = [line for note in notes for line in textwrap.wrap(f"\N{MULTIPLICATION SIGN} {note}", NOTE_CHARACTERS)]
    bottom = 2.0  # points
    if lines:
        canvas.text(LEFT / WIDTH_POINTS, 0, "\n".join(lines), va="bottom", style="italic").set_y(0)
        bottom += 1.2 * 11 * len(lines) + 6
    if handles:
        columns = next(n for n in (3, 2, 1) if n == 1 or max(map(len, labels)) <= {3: 14, 2: 26}[n])
        legend = canvas.legend(handles, labels, loc="lower left", bbox_to_anchor=(0, bottom, WIDTH_POINTS, 0),
                               bbox_transform=IdentityTransform(), ncols=min(columns, len(labels)),
                               columnspacing=1.5, borderaxespad=0)  # fmt: skip
        bottom += legend.get_window_extent().height + 2
    height = canvas.get_figheight() * POINTS_PER_INCH + bottom
    canvas.set_figheight(height / POINTS_PER_INCH)
    engine = canvas.get_layout_engine()
    assert isinstance(engine, ConstrainedLayoutEngine)
    engine.set(rect=(0, bottom / height, 1, 1 - bottom / height))


def finish(canvas: Canvas, name: str, title: str) -> Figure:
    """Turn a drawing into SVG for the inside of a page: no fixed ink, no fixed font, ids of its own."""
    buffer = io.StringIO()
    canvas.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    box = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', text)
    assert box is not None
    width, height = float(box[1]), float(box[2])
    body = text[text.index("</metadata>") + len("</metadata>") : text.rindex("</svg>")]
    body = re.sub(r"<!--.*?-->\n?", "", body, flags=re.DOTALL)
    body = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", body, count=1, flags=re.DOTALL)  # rules for a whole page
    body = re.sub(r"font-family: [^;\"]*; ?", "", body)
    # Coordinates to a hundredth of a point: half the bytes of a page of curves.
    body = re.sub(r' (?:d|x|y|transform)="[^"]*"', lambda match: re.sub(r"(\.\d\d)\d+", r"\1", match[0]), body)
    # Matplotlib hashes a clip path's corners, whose last bits the layout's solver leaves to chance.
    for number, clip in enumerate(dict.fromkeys(re.findall(r"url\(#(\w+)\)", body)), 1):
        body = re.sub(rf"\b{clip}\b", f"clip{number}", body)
    body = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", body)
    body = body.replace(INK, "currentColor")
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" id="{name}" '
        f'width="{width * PIXELS_PER_POINT:.0f}" height="{height * PIXELS_PER_POINT:.0f}" '
        f'viewBox="0 0 {width:g} {height:g}" role="img" aria-labelledby="{name}-title" font-family="sans-serif" '
        'style="max-width:100%;height:auto;stroke-linejoin:round;stroke-linecap:butt">\n'
        f'<title id="{name}-title">{escape(title)}</title>{body}</svg>'
    )
    return Figure(name, title, svg)


# ---------------------------------------------------------------- what a figure is of

# What all runs of a figure have in common.
IDENTITY = ("workload", "size", "precision", "global_batch_size", "world_size", "num_steps", "config_digest", "box")
ALIKE = ("data_digest", "libraries")  # these too, but they are in no figure's name
OF_TIME = ("seconds_per_step", "tokens_per_second_per_gpu", "both")  # columns that a disturbed run has no value in


class Setting(NamedTuple):
    words: str  # for the title
    slug: str  # for the name


def setting(table: pd.DataFrame, varying: str = "") -> Setting:
    """What all runs of a figure have in common.

    Raises ValueError where there is no run, or where they differ in more than strategy, seed and `varying`: a figure is
    of one box and one thing trained. `single` is one process beside any number.
    """
    if table.empty:
        raise ValueError("no run to draw; a filter before the figure has left none")
    facts: dict[str, Any] = {}
    for column in (*IDENTITY, *ALIKE):
        if column == varying:
            continue
        rows = table[table["strategy"] != "single"] if column == "world_size" else table
        values = sorted(rows[column].dropna().unique()) or [1]  # of the processes of `single` alone
        if len(values) > 1:
            differing = listed(str(value)[:60] for value in values)
            raise ValueError(f"{column} is {differing}; a figure is of one: filter the runs first")
        facts[column] = values[0]
    parts = [f"{facts['workload']} {facts['size']}", str(facts["precision"])]
    parts += [f"{facts['global_batch_size']:.0f} sequences per step"]
    parts += [processes(facts["world_size"])] if "world_size" in facts else []
    facts["config_digest"] = str(facts["config_digest"])[:8]
    named = [facts[name] for name in IDENTITY if name in facts]
    slug = re.sub(r"[^a-z0-9]+", "-", " ".join(v if isinstance(v, str) else f"{v:.0f}" for v in named).lower())
    return Setting(f"{', '.join(parts)}; {facts['box']}", slug.strip("-"))


def with_results(table: pd.DataFrame, column: str) -> pd.DataFrame:
    """Keep a column's values of runs that are ok: the peak of one that ran out of memory is where it broke off.

    Raises ValueError where none is left, because there is nothing to draw then.
    """
    table = table.assign(**{column: table[column].where(table["status"] == "ok")})
    if table[column].isna().all():
        reasons = ", ".join(f"{status} ({count})" for status, count in Counter(table["status"]).items())
        raise ValueError(f"no run that is ok has {column}; the runs are {reasons}")
    return table


def unmeasured(table: pd.DataFrame, column: str) -> dict[str, str]:
    """Say of each strategy how many of its runs have no value and why: they are named, and never drawn as 0."""
    words = {}
    for strategy, runs in table.groupby("strategy", sort=False):
        without = runs[runs[column].isna()]
        reasons = Counter(_why(run, column) for run in without.to_dict("records"))
        if len(reasons) == 1 and len(without) == len(runs):
            words[strategy] = next(iter(reasons))
        elif reasons:
            words[strategy] = ", ".join(f"{count} of {len(runs)} {reason}" for reason, count in reasons.items())
    return {strategy: words[strategy] for strategy in in_order(words)}


def _why(run: dict[str, Any], column: str) -> str:
    if run["status"] != "ok":
        return str(run["status"]).replace("_", " ")
    return "disturbed" if column in OF_TIME and is_disturbed(run.get("share_of_others")) else "not measured"
