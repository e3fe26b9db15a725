"""What became of the sentences of each source? Bars of those that hold, that fail and that stay open."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.patches import Patch

from study.report.figures.drawing import INK, Figure, below, beside, finish, house_style, panels, rows

# By what a verdict comes to: the words, and the look of its part of a bar.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "yes": ("hold", {"facecolor": "#009E73"}),
    "no": ("do not", {"facecolor": "#D55E00", "hatch": "////", "edgecolor": INK}),
    "open": ("open", {"facecolor": INK, "alpha": 0.15}),
}


def verdicts(of_source: Mapping[str, Mapping[str, int]]) -> Figure:
    """Draw by source how many of its sentences hold, do not, and are open."""
    with house_style("verdicts"):
        canvas, (ax,) = panels([0.36 * len(of_source) + 0.7])
        rows(ax, list(of_source))
        for row, counts in enumerate(of_source.values()):
            start = 0
            for kind, (_, look) in KINDS.items():
                ax.barh(row, counts.get(kind, 0), left=start, height=0.62, linewidth=0, **look)
                start += counts.get(kind, 0)
            beside(ax, row, " + ".join(str(counts.get(kind, 0)) for kind in KINDS))
        ax.set_xlabel("sentences")
        below(
            canvas, [Patch(linewidth=0, **look) for _, look in KINDS.values()], [words for words, _ in KINDS.values()]
        )
        told = [
            f"{name}: {', '.join(f'{counts.get(kind, 0)} {words}' for kind, (words, _) in KINDS.items())}"
            for name, counts in of_source.items()
        ]
        caption = "Sentences of each source, by what became of them: those that hold, that do not, and that are open. "
        caption += "A sentence has several readings at times; that of its headline is counted."
        return finish(canvas, "verdicts", f"Sentences by source. {'; '.join(told)}.", caption)
