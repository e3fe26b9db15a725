"""Is a strategy further from the control than a margin fixed beforehand? Means and single runs, beside neighbours."""

from __future__ import annotations

import textwrap

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from study.compare import verdict
from study.compare.verdict import SAME, Judged
from study.compare.verdict_text import Decided
from study.compare.words import processes, three_digits
from study.report.figures.drawing import INK, Figure, below, beside, finish, house_style, panels, rows, style
from study.report.words import count

LABEL_CHARACTERS = 28


def decided(study: Decided) -> Figure:
    """Draw the primary endpoint: each arm's runs, their mean with its interval, the margin; the neighbours on top."""
    endpoint, judged, control = study.primary, study.on(study.primary), study.study.control
    apart = verdict.neighbours_apart(study.runs, study.protocol, endpoint, control).ravel()
    labels = [f"{control} from weights one digit apart", *(_label(study, row) for row in judged)]
    labels = [textwrap.fill(label, LABEL_CHARACTERS, break_long_words=False) for label in labels]
    words = f"held-out {endpoint.metric} after {endpoint.step} steps"
    unit = "points" if endpoint.metric == "accuracy" else "%"
    name = f"decided-{study.study.name}"
    with house_style(name):
        canvas, (ax,) = panels([0.36 * len(labels) + 0.7])
        rows(ax, labels)
        ax.add_patch(Rectangle((-100 * endpoint.margin, -0.6), 200 * endpoint.margin, len(labels) + 0.2, facecolor=INK,
                               alpha=0.1, linewidth=0))  # fmt: skip
        ax.axvline(0, color=INK, linewidth=0.8)
        _rings(ax, 0, apart, INK)
        for row, arm in enumerate(judged, start=1):
            look = style(arm.strategy)
            _rings(ax, row, arm.differences, look.color)
            ax.hlines(row, 100 * arm.low, 100 * arm.high, color=look.color, linewidth=2.5)
            ax.plot(100 * arm.mean, row, marker=look.marker, color=look.color, markersize=7, linestyle="none")
            beside(ax, row, _word(arm))
        reach = 1.08 * 100 * max(endpoint.margin, np.abs(apart).max(), *(np.abs(a.differences).max() for a in judged))
        ax.set_xlim(-reach, reach)
        ax.xaxis.set_major_locator(MaxNLocator(5, symmetric=True))
        ax.xaxis.set_major_formatter(lambda value, _: three_digits(value))
        ax.set_xlabel(f"{words}, difference to {control} in {unit}")
        below(canvas, [Patch(facecolor=INK, alpha=0.1, linewidth=0)], [f"margin: {100 * endpoint.margin:g} {unit}"])
        return finish(canvas, name, _alt(study, words, unit), _caption(study, words, unit))


def _rings(ax: Axes, row: int, values: np.ndarray, color: str) -> None:
    """Single runs, a little above and below their row in turn, so that equal ones are told apart."""
    heights = row + 0.2 * (np.arange(len(values)) % 3 - 1)
    ax.plot(100 * values, heights, marker="o", markersize=5, color=color, markerfacecolor="none", markeredgewidth=1.1,
            linestyle="none", clip_on=False)  # fmt: skip


def _label(study: Decided, arm: Judged) -> str:
    several = len({row.world_size for row in study.judged if row.strategy != "single"}) > 1
    return f"{arm.strategy} on {arm.world_size}" if several else arm.strategy


def _word(arm: Judged) -> str:
    """What both tests say."""
    return f"{'within' if arm.equivalence == SAME else arm.equivalence}{', further' if arm.further else ''}"


def _alt(study: Decided, words: str, unit: str) -> str:
    said = [
        f"{row.strategy} on {processes(row.world_size)} {three_digits(100 * row.mean)} {unit} ({_word(row)})"
        for row in study.on(study.primary)
    ]
    return f"Mean difference to {study.study.control} in {words}: {'; '.join(said)}."


def _caption(study: Decided, words: str, unit: str) -> str:
    endpoint, seeds = study.primary, {len(row.seeds) for row in study.on(study.primary)}
    apart_of = len(study.protocol.neighbours)
    confidence = f"{100 * (1 - 2 * study.protocol.significance):g} %"
    return (
        f"{study.model}, {words}: difference to the mean of {study.study.control} and its neighbours, runs of "
        f"{study.study.control} whose first weights differ by one unit in the last place, of the same seed; in the "
        f"first row, of each neighbour to the mean of its seed's {count(apart_of - 1, 'other')}. Rings: single runs. "
        f"Filled: their mean, with its {confidence} interval, over {min(seeds)} seeds. Grey: the margin of "
        f"{100 * endpoint.margin:g} {unit}, fixed before the runs; within: the mean is, as a test shows. Further: than "
        "neighbours are from one another, as another test shows, which is no question of the margin."
    )
