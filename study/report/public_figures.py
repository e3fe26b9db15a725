"""Draw figures and make tables of public runs, which others trained: loss curves, and differences with intervals."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from study.compare.public_cards import Row
from study.compare.public_comparisons import Difference, Result, earlier_verdict, is_learned
from study.compare.public_pairs import Pair, PairedComparison, also_differs, in_nats, spread
from study.public_runs import archive
from study.report import drawing
from study.report.captions import Head, joined
from zero_study.public_runs.quantities import BYTES, points
from zero_study.public_runs.schema import PublicRun, Setting
from zero_study.terminal import bytes_text, count, percent, significant

# One color per kind of card, as far as a figure has one; distinguishable for color-blind readers (after Okabe and Ito).
COLORS = ("#D55E00", "#2E86D0", "#009E73", "#C0609A", "#A87900", "#888888")
HOURS = 3600.0
OTHERS = "Measured by others. Each line is one run."
LABELS = {
    "samples": "sequences trained on",
    "step": "optimizer step",
    "hours": "hours since the start",
    "loss": "training loss (nats)",
    "evaluation_loss": "loss on held-out text (nats)",
    "accuracy": "held-out accuracy (share)",
}


def curves(
    groups: Mapping[str, Sequence[PublicRun]],
    column: str,
    axes_by: Sequence[str],
    model: str,
    kind: str = OTHERS,
    start: float = 0.0,
) -> Figure:
    """Draw every run as a thin line in the color of its group, with one panel per quantity of the horizontal axis.

    `column` is a column of the evaluations or, if there is none of this name, of the training steps. `axes_by` has
    "samples", "step" or "hours", and the lines begin at `start`. `model` is what was trained.
    """
    figure, panels = plt.subplots(1, len(axes_by), sharey=True, figsize=(drawing.WIDTH, 2.5), layout="constrained")
    panels = [panels] if len(axes_by) == 1 else list(panels)
    for axes, by in zip(panels, axes_by, strict=True):
        for color, runs in zip(COLORS, groups.values(), strict=False):
            for run in runs:
                _curve(axes, run, column, by, color, start)
        drawing.dress(axes)
        axes.set_xlabel(LABELS.get(by, by))
        axes.locator_params(axis="x", nbins=3)
        axes.xaxis.set_major_formatter(FuncFormatter(_in_millions))
    panels[0].set_ylabel(LABELS.get(column, column))
    for color, (name, runs) in zip(COLORS, groups.items(), strict=False):
        panels[0].plot([], [], color=color, label=f"{name} ({len(runs)} runs)")
    noun = LABELS.get(column, column).partition(" (")[0].capitalize()
    return drawing.finish(figure, Head(f"{noun}: {model}", kind))


def _in_millions(value: float, _: int | None) -> str:
    return f"{value / 1e6:g}M" if value >= 1e6 else f"{value:g}"


def _curve(axes: Axes, run: PublicRun, column: str, by: str, color: str, start: float) -> None:
    series = run.evaluation if run.evaluation is not None and column in run.evaluation.columns else run.training
    scale = HOURS if by == "hours" else 1.0
    known = [
        (place / scale, value)
        for place, value in points(series, "seconds" if by == "hours" else by, column)
        if place / scale >= start
    ]
    axes.plot([place for place, _ in known], [value for _, value in known], color=color, linewidth=0.9, alpha=0.7)


MLPERF_FOOTNOTE = (
    "MLPerf® Training, closed division. Retrieved from the repositories of MLCommons that the archive names, on the "
    "date in the archive; the entry is the folder of the log. Only the time to the target is an MLPerf result. Losses, "
    "seconds per sample and ratios are derived from the logs: unverified. Result not verified by MLCommons "
    "Association. The MLPerf name and logo are registered and unregistered trademarks of MLCommons Association in the "
    "United States and other countries. All rights reserved. Unauthorized use strictly prohibited. See "
    "www.mlcommons.org for more information."
)


def _interval(each: Difference, form: str, show: Callable[[float], str]) -> str:
    """Return the bounds of a difference in a form with two places. Empty if there is no interval."""
    return "" if each.low is None or each.high is None else form.format(show(each.low), show(each.high))


def table(result: Result) -> pd.DataFrame:
    """Return a comparison's differences as text, with a row per quantity and group of runs besides the baseline."""
    control, arms = result.comparison.control.name, result.comparison.arms
    compared = "compared with it" if len(arms) > 1 else f"compared with it: {arms[0].name}"
    rows = []
    for each in result.differences:
        show = bytes_text if each.quantity in BYTES else "{:.4f}".format if is_learned(each.quantity) else significant
        baseline, mean = (f"{show(sum(values) / len(values))} ({len(values)})" for values in (each.control, each.arm))
        rows.append(
            {
                "quantity": each.quantity,
                f"baseline: {control}": baseline,
                compared: f"{each.arm_name}: {mean}" if len(arms) > 1 else mean,
                "difference": signed(each.relative),
                "95 % interval of repeats": _interval(each, "{} to {}", signed),
                "margin": "" if each.margin is None else f"{result.comparison.margin:g} ({percent(each.margin)})",
                "verdict": each.verdict,
                "verdict until 30 November 2026": earlier_verdict(each),
            }
        )
    return pd.DataFrame(rows)


def table_of_pairs(results: Iterable[tuple[PairedComparison, Sequence[Pair]]]) -> pd.DataFrame:
    """Return a table of paired comparisons: the median over the pairs, and the range that contains 80 % of them.

    Columns without any value are left out.
    """
    rows = []
    for comparison, pairs in results:
        num_early = sum(not pair.is_whole for pair in pairs)
        rows.append(
            {
                "comparison": comparison.label,
                "pairs": f"{len(pairs)}{f' ({num_early} with a log that ended early)' if num_early else ''}",
                "time per step": _spread([pair.time for pair in pairs]),
                "peak of tensors": _spread([pair.peak for pair in pairs]),
                "loss at the first step": _sizes([pair.first for pair in pairs]),
                "largest difference of the loss": _sizes([pair.largest for pair in pairs]),
                "difference of the mean loss": _sizes(
                    [None if pair.mean is None else abs(pair.mean) for pair in pairs]
                ),
                NATS: _nats(comparison, pairs),
            }
        )
    table = pd.DataFrame(rows)
    return table[[name for name in table if any(table[name])]]


NATS = "the same in nats: mean over models, 95 % interval, pairs within the margin"
# Of axes with ratios.
TICKS = {"pairs": (0.2, 0.5, 1, 2, 5), "cards": (0.7, 1, 1.5, 2, 3)}
LABEL_LETTERS, LABEL_POINTS = 68, 10  # of the names of rows


def ratios(results: Iterable[tuple[PairedComparison, Sequence[Pair]]]) -> Figure:
    """Draw the step time and the peak memory of every pair as strokes relative to the baseline, one row per comparison.

    Comparisons without a time and without memory are left out.
    """
    quantities = {"time": "time per step", "peak": "peak of tensors"}
    rows = [
        (comparison, [[value for pair in pairs if (value := getattr(pair, name)) is not None] for name in quantities])
        for comparison, pairs in results
    ]
    rows = sorted((row for row in rows if any(row[1])), key=lambda row: row[0].is_null)
    names = [f"{comparison.label} ({count(max(map(len, values)), 'pair')})" for comparison, values in rows]
    figure, panels, places = _rows(names, len(quantities))
    for number, (axes, label) in enumerate(zip(panels, quantities.values(), strict=True)):
        strokes = zip(places, (values[number] for _, values in rows), (row.is_null for row, _ in rows), strict=True)
        _strokes(axes, strokes, TICKS["pairs"])
        axes.set_xlabel(f"{label}\n(times the baseline)")
    kind = "Measured by others. Each stroke is one pair of runs. Gray: no difference is expected."
    return drawing.finish(figure, Head("Time per step and peak memory", kind))


def _rows(names: Sequence[str], num_panels: int) -> tuple[Figure, Sequence[Axes], list[float]]:
    """Return a figure with panels that have one row below each name, and the vertical places of the rows.

    The unit of the places is a line of text.
    """
    wrapped = [textwrap.wrap(name, LABEL_LETTERS, break_on_hyphens=False) for name in names]
    ends = np.cumsum([len(lines) + 1.2 for lines in wrapped])
    height = 1.25 * LABEL_POINTS / 72 * float(ends[-1]) + 0.7
    figure, panels = plt.subplots(
        1, num_panels, sharey=True, squeeze=False, figsize=(drawing.WIDTH, height), layout="constrained"
    )
    first = panels[0][0]
    for end, lines in zip(ends, wrapped, strict=True):
        place: dict[str, Any] = {"transform": first.get_yaxis_transform(), "va": "bottom", "linespacing": 1.1}
        first.text(0, end - 1.1, "\n".join(lines), fontsize=LABEL_POINTS, **place).set_in_layout(False)
    first.set_yticks([])
    first.set_ylim(float(ends[-1]), 0)
    return figure, list(panels[0]), [float(end) - 0.6 for end in ends]


def _strokes(axes: Axes, rows: Iterable[tuple[float, Sequence[float], bool]], ticks: Sequence[float]) -> None:
    """Draw one row of strokes for each list of ratios, on a logarithmic axis with few labels.

    `rows` has the vertical place, the ratios, and whether they are gray. A black stroke is the baseline.
    """
    for place, values, is_gray in rows:
        color = COLORS[5] if is_gray else COLORS[1]
        axes.plot(values, [place] * len(values), "|", color=color, markersize=9, alpha=0.6)
        axes.plot([1.0, 1.0], [place - 0.45, place + 0.45], color=drawing.INK, linewidth=1.2)
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    axes.set_xticks([tick for tick in ticks if low <= tick <= high])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    drawing.dress(axes)
    axes.spines["left"].set_visible(False)
    axes.grid(visible=False)
    axes.minorticks_off()


def table_of_cards(rows: Iterable[Row]) -> pd.DataFrame:
    """Return a table of the speeds of H100 relative to A100: a row per source, pair of machines and kind of time."""
    return pd.DataFrame([_of_cards(row) for row in rows])


def _of_cards(row: Row) -> dict[str, Any]:
    found, has_range = row.spread, row.spread.num > 1
    repeats = " and ".join(str(number) for number in row.repeats.values())
    return {
        "trainings and machines": row.name,
        "time": row.quantity,
        "runs": f"{repeats} runs" if repeats else "one run each",
        "speed of H100 relative to A100 (median)": f"{found.median:.2f}x",
        "eight of ten pairs": f"{found.tenth:.2f} to {found.ninetieth:.2f}" if has_range else "",
        "all pairs": f"{found.least:.2f} to {found.most:.2f}" if has_range else "",
        "these settings also differ": joined(row.also_differs) if row.also_differs else "none that is stated",
    }


def cards(rows: Sequence[Row]) -> Figure:
    """Draw the speed of an H100 relative to an A100: one row per source and pair of machines, one stroke per pair."""
    names = list(dict.fromkeys(row.name for row in rows))
    figure, (axes,), places = _rows(names, 1)
    of = dict(zip(names, places, strict=True))
    strokes = [(of[row.name], row.ratios, row.is_registered) for row in rows]
    _strokes(axes, sorted(strokes, key=lambda stroke: not stroke[2]), TICKS["cards"])
    axes.set_xlabel("speed of an H100, relative to an A100")
    kind = "Measured by others. Each stroke is one pair of runs, or of machines with ten runs each."
    kind += " Gray: with intervals that contain an evaluation." if any(row.is_registered for row in rows) else ""
    return drawing.finish(figure, Head("A100 and H100", kind))


LATE = "This comparison was added when values of its source were known."


def caveats_of_pairs(comparisons: Sequence[PairedComparison]) -> list[str]:
    """Return the caveats of paired comparisons, and the other settings in which their runs differ.

    Caveats that several comparisons share are listed once.
    """
    names_of: dict[str, list[str]] = {}
    for comparison in comparisons:
        differing = also_differs(comparison, archive.source(comparison.source))
        further = f"These settings also differ: {', '.join(differing)}." if differing else ""
        left_out = [f"The pair {entry} is left out. {reason}" for entry, reason in comparison.left_out.items()]
        for text in (" ".join(comparison.caveats), further, *left_out, LATE if comparison.is_late else ""):
            if text:
                names_of.setdefault(text, []).append(comparison.label)
    return [f"{_comparisons(names, comparisons)}: {text}" for text, names in names_of.items()]


def _comparisons(names: Sequence[str], comparisons: Sequence[PairedComparison]) -> str:
    """Return the labels of comparisons, or the name of their source if these are all of its comparisons."""
    of_sources: dict[str, list[str]] = {}
    for comparison in comparisons:
        of_sources.setdefault(comparison.source, []).append(comparison.label)
    whole = [source for source, every in of_sources.items() if every == names and len(every) > 1]
    return f"All comparisons of {whole[0]}" if whole else "; ".join(f"*{name}*" for name in names)


def strategies(runs: Sequence[PublicRun]) -> pd.DataFrame:
    """Return a table of peak memory per GPU and step time, with a row per strategy and a column per model size."""
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for run in sorted(runs, key=lambda run: (run.setting.parameters or 0, run.source.lines or [0])):
        setting, totals = run.setting, run.totals
        peak, seconds = totals.get("peak_allocated_bytes"), totals.get("seconds_per_step")
        checkpointing = {None: "unknown", True: "yes", False: "no"}[setting.activation_checkpointing]
        memory = "unknown" if peak is None else bytes_text(peak)
        time = "unknown" if seconds is None else f"{seconds:g} s"
        row = cells.setdefault((_in_words(setting), checkpointing), {})
        row[f"{(setting.parameters or 0) / 1e9:g} billion parameters"] = f"{memory}, {time}"
    names = ["strategy", "activation checkpointing"]
    return pd.DataFrame([dict(zip(names, place, strict=True)) | row for place, row in cells.items()]).fillna("")


def _in_words(setting: Setting) -> str:
    """Return the strategy of a training, such as "ZeRO-3, optimizer states offloaded to the host"."""
    strategy = (setting.strategy or "unknown").replace("zero", "ZeRO-").replace("ddp", "DDP")
    where = f"{setting.engine}: " if setting.engine and setting.engine not in ("DDP", "DeepSpeed") else ""
    offload = "" if setting.offload == "nothing" else f", {setting.offload or 'unknown'} offloaded to the host"
    return f"{where}{strategy}{offload}"


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


def _nats(comparison: PairedComparison, pairs: Sequence[Pair]) -> str:
    """Return the mean difference of the losses over pairs, its interval, and how many pairs are within the margin."""
    found = in_nats(pairs)
    if comparison.margin is None or found is None:
        return ""
    num_inside = sum(pair.nats is not None and abs(pair.nats) <= comparison.margin for pair in pairs)
    interval = f" ({found.interval})" if found.interval else ""
    inside = f"{num_inside} of {found.num_pairs} within {comparison.margin:g}"
    return f"{found.shown}{interval}, {inside}"


def signed(relative: float) -> str:
    return f"{100 * relative:+.3g} %".replace("-", "\N{MINUS SIGN}")


def other_differences(result: Result) -> list[str]:
    """Return sentences on what else differs in a comparison, and on what was left out or not compared."""
    lines: list[Any] = [f"The {fact.replace(':', ' also differs:', 1)}." for fact in result.also_differs]
    lines += [*result.comparison.caveats, *([LATE] if result.comparison.is_late else [])]
    names_of: dict[str, list[str]] = {}
    for name, _, reason in (each.partition(": ") for each in result.left_out):
        names_of.setdefault(reason, []).append(name)
    for reason, names in names_of.items():
        each = "each " if len(names) > 1 else ""
        lines.append(f"{count(len(names), 'run is', 'runs are')} left out, {each}because {reason}: {joined(names)}.")
    lines += [f"At least one of the two groups does not log this quantity: {what}." for what in result.not_compared]
    return lines


PEAKS = ("peak_allocated_bytes", "peak_reserved_bytes", "peak_gpu_memory_bytes")


def by_strategy(runs: Sequence[PublicRun]) -> pd.DataFrame:
    """Return a table with one row per training: its model, batch, strategy, time and peak memory.

    It is for publishers that state one value per training, such as its peak memory, instead of values per step. The
    rows are sorted by model and batch. Missing values are empty.
    """
    rows = []
    for run in sorted(runs, key=lambda run: (run.setting.model or "", run.setting.micro_batch_size or 0, run.name)):
        setting, totals = run.setting, run.totals
        peaks = [totals[name] for name in PEAKS if name in totals]
        stated = f"{totals['peak_reserved_gb']:g} GB" if "peak_reserved_gb" in totals else ""  # GiB or 10**9 bytes
        rows.append(
            {
                "model": setting.model,
                "GPUs": f"{setting.num_gpus} {setting.gpu}",
                "strategy": setting.strategy,
                "sequences per GPU": setting.micro_batch_size,
                "s/step": _or_empty(totals.get("seconds_per_step")),
                "samples/s": _or_empty(totals.get("samples_per_second")),
                "peak per GPU": bytes_text(peaks[0]) if peaks else stated,
                "note": "; ".join(f"{value}" for value in setting.other.values() if value is not None),
            }
        )
    return pd.DataFrame(rows)


def _or_empty(value: float | None) -> str:
    return "" if value is None else f"{value:g}"
