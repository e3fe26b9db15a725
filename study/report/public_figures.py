"""Figures and tables of public runs: curves of losses, and differences with their intervals. Measured by others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from study.compare.public_comparisons import Result
from study.compare.public_pairs import Pair, PairedComparison, spread
from study.formatting import bytes_text, percent, three_digits
from study.public_runs.quantities import BYTES, points
from study.public_runs.schema import PublicRun
from study.report import plots

BY_OTHERS = "measured by others"
# One color per kind of card, as far as a figure has one; distinguishable for color-blind readers (after Okabe and Ito).
COLORS = ("#D55E00", "#2E86D0", "#009E73", "#C0609A", "#A87900", "#888888")
HOURS = 3600.0
LABELS = {
    "samples": "sequences trained on",
    "step": "optimizer step",
    "hours": "hours since the start",
    "loss": "training loss",
    "evaluation_loss": "loss on held-out text",
    "accuracy": "held-out accuracy",
}


def curves(
    groups: Mapping[str, Sequence[PublicRun]],
    column: str,
    axes_by: Sequence[str],
    ink: str = plots.INK,
    title: str = "",
) -> Figure:
    """Draw every run as a thin line, in the color of its group, once for each quantity of the horizontal axis.

    `column` is a column of the evaluations or, if there is none of this name, of the training steps. `axes_by` has
    "samples", "step" or "hours".
    """
    figure, panels = plt.subplots(1, len(axes_by), sharey=True, figsize=(plots.WIDTH, 3.4), layout="constrained")
    panels = [panels] if len(axes_by) == 1 else list(panels)
    for axes, by in zip(panels, axes_by, strict=True):
        for color, runs in zip(COLORS, groups.values(), strict=False):
            for run in runs:
                _curve(axes, run, column, by, color)
        _dress(axes, LABELS.get(by, by), ink)
    panels[0].set_ylabel(LABELS.get(column, column), color=ink)
    handles = [Line2D([], [], color=color, label=f"{name} ({len(runs)} runs)")
               for color, (name, runs) in zip(COLORS, groups.items(), strict=False)]  # fmt: skip
    legend = figure.legend(handles=handles, loc="outside lower center", ncols=min(3, len(handles)), fontsize=10)
    plt.setp(legend.get_texts(), color=ink)
    if title:
        figure.suptitle(title, fontsize=11, color=ink)
    plt.close(figure)
    return figure


def _curve(axes: Axes, run: PublicRun, column: str, by: str, color: str) -> None:
    series = run.evaluation if run.evaluation is not None and column in run.evaluation.columns else run.training
    known = points(series, "seconds" if by == "hours" else by, column)
    scale = HOURS if by == "hours" else 1.0
    axes.plot(
        [place / scale for place, _ in known], [value for _, value in known], color=color, linewidth=0.9, alpha=0.7
    )


def _dress(axes: Axes, label: str, ink: str) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.2)
    axes.set_xlabel(label, color=ink)
    axes.tick_params(colors=ink)
    axes.spines[["left", "bottom"]].set_color(ink)
    axes.locator_params(axis="x", nbins=4)


def table(result: Result) -> pd.DataFrame:
    """Return the differences of a comparison as text, one row per quantity and arm."""
    comparison = result.comparison
    control = comparison.control.name
    rows = []
    for each in result.differences:
        show = bytes_text if each.quantity in BYTES else three_digits
        interval = "" if each.low is None or each.high is None else f"{_signed(each.low)} to {_signed(each.high)}"
        rows.append(
            {
                "quantity": each.quantity,
                f"{control} (mean of {len(each.control)})": show(sum(each.control) / len(each.control)),
                "compared with it": f"{each.arm_name}: {show(sum(each.arm) / len(each.arm))} ({len(each.arm)})",
                "difference": _signed(each.relative),
                "95 % interval": interval,
                "margin": "" if each.margin is None else percent(each.margin),
                "verdict": each.verdict,
            }
        )
    return pd.DataFrame(rows)


def table_of_pairs(
    results: Mapping[PairedComparison, Sequence[Pair]] | Sequence[tuple[PairedComparison, Sequence[Pair]]],
) -> pd.DataFrame:
    """Return one row per paired comparison: medians over its cases, with the range of eight in ten cases."""
    rows = []
    for comparison, pairs in results.items() if isinstance(results, Mapping) else results:
        rows.append(
            {
                "comparison": comparison.question,
                "cases": len(pairs),
                "time per step": _spread([pair.time for pair in pairs]),
                "peak of tensors": _spread([pair.peak for pair in pairs]),
                "loss at the first step": _sizes([pair.first for pair in pairs]),
                "largest difference of the loss": _sizes([pair.largest for pair in pairs]),
            }
        )
    return pd.DataFrame(rows)


def _spread(values: Sequence[float | None]) -> str:
    known = spread(values)
    if known is None:
        return "not logged"
    if known.num < 5:
        return ", ".join(f"{value:.3g}x" for value in values if value is not None)
    return f"{known.median:.3g}x ({known.tenth:.3g} to {known.ninetieth:.3g})"


def _sizes(values: Sequence[float | None]) -> str:
    known = spread(values)
    if known is None:
        return "not logged"
    if known.num < 5:
        return ", ".join(percent(value) for value in values if value is not None)
    return f"{percent(known.median)} ({percent(known.tenth)} to {percent(known.ninetieth)})"


def _signed(relative: float) -> str:
    return f"{100 * relative:+.3g} %".replace("-", "\N{MINUS SIGN}")


def other_differences(result: Result) -> list[str]:
    """Return sentences on what else differs in a comparison, and on runs that were left out."""
    lines: list[Any] = [f"Also different: {fact}." for fact in result.also_differs]
    lines += list(result.comparison.caveats)
    lines += [f"Left out: {reason}." for reason in result.left_out]
    return lines
