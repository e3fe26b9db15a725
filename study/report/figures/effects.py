"""Which defect of a protocol makes an effect? Intervals, defect by defect, as published and mended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.ticker import MaxNLocator

from study.claims.published.defects import Effect
from study.compare.words import three_digits
from study.report.figures.drawing import INK, Figure, at_edge, beside, finish, house_style, panels, rows

COLOURS = {"better": "#009E73", "worse": "#D55E00"}  # of ZeRO; everything else is ink
MARKERS = {"better": "<", "worse": ">"}


def effects(metric: str, groups: Sequence[tuple[str, Mapping[str, Effect | None]]], caption: str) -> Figure:
    """Draw effects in per cent with their intervals, group under group; None is a comparison without a value."""
    labelled = [(label, effect) for _, group in groups for label, effect in group.items()]
    name = f"effects-{metric.replace(' ', '-')}"
    with house_style(name):
        canvas, axes = panels([0.3 * len(group) + 0.65 for _, group in groups], share_x=True)
        for ax, (title, group) in zip(axes, groups, strict=True):
            rows(ax, list(group))
            ax.set_title(title)
            for row, effect in enumerate(group.values()):
                if effect is None:
                    at_edge(ax, row, "no value")
                    continue
                colour = COLOURS.get(effect.word, INK)
                if effect.low is not None:
                    ax.hlines(row, 100 * effect.low, 100 * effect.high, color=colour, linewidth=2)
                ax.plot(100 * effect.mean, row, marker=MARKERS.get(effect.word, "o"), color=colour, markersize=7,
                        linestyle="none")  # fmt: skip
                beside(ax, row, effect.word)
            ax.axvline(0, color=INK, linewidth=0.8)
        axes[-1].set_xlabel(f"{metric}, ZeRO against plain, in %")
        axes[-1].xaxis.set_major_locator(MaxNLocator(6))
        axes[-1].xaxis.set_major_formatter(lambda value, _: three_digits(value))
        described = [f"{label} {_told(effect)}" for label, effect in labelled if effect is not None]
        return finish(canvas, name, f"Effects on {metric}: {'; '.join(described)}.", caption)


def _told(effect: Effect) -> str:
    return f"{three_digits(100 * effect.mean)} % ({effect.word})"
