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
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from study.compare.differences import t_interval
from study.compare.public_comparisons import Difference, Result, earlier_verdict, is_learned
from study.compare.public_pairs import Pair, PairedComparison, also_differs, spread
from study.public_runs import archive
from study.public_runs.quantities import BYTES, TIMES, points
from study.public_runs.schema import PublicRun
from study.report import drawing
from study.report.captions import Head, joined
from study.terminal import bytes_text, count, percent, significant

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
    groups: Mapping[str, Sequence[PublicRun]], column: str, axes_by: Sequence[str], model: str, kind: str = OTHERS
) -> Figure:
    """Draw every run as a thin line in the color of its group, with one panel per quantity of the horizontal axis.

    `column` is a column of the evaluations or, if there is none of this name, of the training steps. `axes_by` has
    "samples", "step" or "hours". `model` is what was trained.
    """
    figure, panels = plt.subplots(1, len(axes_by), sharey=True, figsize=(drawing.WIDTH, 3.0), layout="constrained")
    panels = [panels] if len(axes_by) == 1 else list(panels)
    for axes, by in zip(panels, axes_by, strict=True):
        for color, runs in zip(COLORS, groups.values(), strict=False):
            for run in runs:
                _curve(axes, run, column, by, color)
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


def _curve(axes: Axes, run: PublicRun, column: str, by: str, color: str) -> None:
    series = run.evaluation if run.evaluation is not None and column in run.evaluation.columns else run.training
    known = points(series, "seconds" if by == "hours" else by, column)
    scale = HOURS if by == "hours" else 1.0
    axes.plot(
        [place / scale for place, _ in known], [value for _, value in known], color=color, linewidth=0.9, alpha=0.7
    )


MLPERF_FOOTNOTE = (
    "MLPerf® Training, closed division. Retrieved from the repositories of MLCommons that the archive names, on the "
    "date in the archive; the entry is the folder of the log. Only the time to the target is an MLPerf result. Losses, "
    "seconds per sample and ratios are derived from the logs: unverified. Result not verified by MLCommons "
    "Association. The MLPerf name and logo are registered and unregistered trademarks of MLCommons Association in the "
    "United States and other countries. All rights reserved. Unauthorized use strictly prohibited. See "
    "www.mlcommons.org for more information."
)


# The answers that come first, by comparison. `{time}` is the first time of the first group, relative to the control's.
IN_SHORT = {
    "zero3-a100-h100": "Under ZeRO-3, an A100 needs {time} as long per sample as an H100 (Llama 2 70B with LoRA, "
    "MLPerf® Training 4.0, unverified).",
    "bert-a100-h100": "For BERT-large, an H100 needs {time} as long per sample as an A100 (MLPerf® Training 3.0, "
    "unverified).",
    "one-and-eight-h100": "With sharded gradients and optimizer states, 8 H100 need {time} the GPU time of 1 H100 "
    "(modded-nanogpt, same batch).",
}


# Names of quantities as subjects of a sentence. The other names are clear without a table.
SUBJECTS = {
    "seconds in all": "seconds of the whole training",
    "peak of tensors": "peak memory of the tensors",
    "peak reserved": "peak of the reserved memory",
}


def summary(results: Iterable[Result]) -> str:
    """Return a list with the main differences of each comparison: in step time, in memory, and in loss or accuracy.

    The answers that most readers look for come first, as sentences.
    """
    results = list(results)
    short = [
        f"- {IN_SHORT[result.comparison.name].format(time=_change(_main(result.differences)[0]))}"
        for result in results
        if result.comparison.name in IN_SHORT
    ]
    lines = []
    for result in results:
        control = result.comparison.control.name
        benchmark = f" ({result.benchmark.replace('MLPerf', 'MLPerf®')}, unverified)." if result.benchmark else ""
        lines.append(
            f"- **{result.comparison.question}**{benchmark} Baseline: {control} "
            f"({count(result.num_runs[control], 'run')})."
        )
        for arm in result.comparison.arms:
            own = [each for each in result.differences if each.arm_name == arm.name]
            parts = [_answer(each) for each in _main(own)]
            lines.append(f"    - {arm.name} ({count(result.num_runs[arm.name], 'run')}). {' '.join(parts)}")
    first = ["**In short** (measured by others, with 95 % intervals in parentheses):", "", *short, ""] if short else []
    return "\n".join([*first, "**Differences from the baseline of each comparison:**", "", *lines])


def _main(differences: Sequence[Difference]) -> list[Difference]:
    """Return the first time, the first amount of memory and the last learned quantity."""
    times = [each for each in differences if each.quantity in TIMES]
    memory = [each for each in differences if each.quantity in BYTES]
    learned = [each for each in differences if is_learned(each.quantity)]
    return [*times[:1], *memory[:1], *learned[-1:]]


def _change(each: Difference) -> str:
    """Return a difference with its interval: times as ratios, other quantities in percent."""
    if each.quantity in TIMES:
        return f"{1 + each.relative:.3g} times{_interval(each, ' ({} to {})', lambda bound: f'{1 + bound:.3g}')}"
    return f"{_signed(each.relative)}{_interval(each, ' ({} to {})', _signed)}"


def _answer(each: Difference) -> str:
    """Return a quantity with its difference from the baseline and the verdict, as a sentence."""
    name = SUBJECTS.get(each.quantity, each.quantity)
    size = f"{1 + each.relative:.3g} times the baseline"
    if each.quantity not in TIMES:
        size = f"{100 * abs(each.relative):.3g} % {'above' if each.relative > 0 else 'below'} the baseline"
    interval = _change(each).partition(" (")[1:]
    change = "" if each.relative == 0 else f"{size}{''.join(interval)}, "
    return f"{name[:1].upper()}{name[1:]}: {change}{each.verdict}."


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
                "difference": _signed(each.relative),
                "95 % interval": _interval(each, "{} to {}", _signed),
                "margin": "" if each.margin is None else f"{result.comparison.margin:g} ({percent(each.margin)})",
                "verdict": each.verdict,
                "verdict until 30 November 2026": earlier_verdict(each),
            }
        )
    return pd.DataFrame(rows)


def table_of_pairs(results: Iterable[tuple[PairedComparison, Sequence[Pair]]]) -> pd.DataFrame:
    """Return a table of paired comparisons: the median over the pairs, and the range that contains 80 % of them."""
    rows = []
    for comparison, pairs in results:
        num_early = sum(not pair.is_whole for pair in pairs)
        rows.append(
            {
                "comparison": comparison.question,
                "baseline": comparison.baseline,
                "cases": f"{len(pairs)}{f' ({num_early} with a log that ended early)' if num_early else ''}",
                "time per step, relative to the baseline": _spread([pair.time for pair in pairs]),
                "peak of tensors, relative to the baseline": _spread([pair.peak for pair in pairs]),
                "loss at the first step": _sizes([pair.first for pair in pairs]),
                "largest difference of the loss": _sizes([pair.largest for pair in pairs]),
                "difference of the mean loss": _sizes(
                    [None if pair.mean is None else abs(pair.mean) for pair in pairs]
                ),
                "the same in nats: mean, 95 % interval, within the margin": _nats(comparison, pairs),
            }
        )
    return pd.DataFrame(rows)


def ratios(results: Iterable[tuple[PairedComparison, Sequence[Pair]]]) -> Figure:
    """Draw the step time and the peak memory of every pair as dots relative to the baseline, one row per comparison."""
    shown = [(comparison, pairs) for comparison, pairs in results if pairs]
    figure, panels = plt.subplots(
        1, 2, sharey=True, figsize=(drawing.WIDTH, 0.5 * len(shown) + 1.4), layout="constrained"
    )
    for axes, name, label in zip(panels, ("time", "peak"), ("time per step", "peak of tensors"), strict=True):
        for place, (comparison, pairs) in enumerate(shown):
            values = [value for pair in pairs if (value := getattr(pair, name)) is not None]
            color = COLORS[5] if comparison.is_null else COLORS[1]
            axes.plot(values, [place] * len(values), "|", color=color, markersize=9, alpha=0.6)
        axes.axvline(1.0, color=drawing.INK, linewidth=0.8)
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if name == "time" else (1, 1.5, 2, 3, 5, 7)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        drawing.dress(axes)
        axes.set_xlabel(f"{label},\nrelative to the baseline")
    names = [textwrap.fill(comparison.name.replace("-", " "), 20) for comparison, _ in shown]
    panels[0].set_yticks(range(len(shown)), names, fontsize=10)
    panels[0].set_ylim(len(shown) - 0.5, -0.5)
    kind = (
        "Measured by others. Each stroke is one pair of runs. Gray: null comparisons, where no difference is expected."
    )
    return drawing.finish(figure, Head("Time per step and peak memory of pairs of runs", kind))


def caveats_of_pairs(comparisons: Sequence[PairedComparison]) -> list[str]:
    """Return the caveats of paired comparisons, and the other settings in which their runs differ.

    Caveats that several comparisons share are listed once.
    """
    names_of: dict[str, list[str]] = {}
    for comparison in comparisons:
        differing = also_differs(comparison, archive.source(comparison.source))
        further = f"These settings also differ: {', '.join(differing)}." if differing else ""
        for text in (" ".join(comparison.caveats), further):
            if text:
                names_of.setdefault(text, []).append(comparison.name.replace("-", " "))
    return [f"{_comparisons(names, comparisons)}: {text}" for text, names in names_of.items()]


def _comparisons(names: Sequence[str], comparisons: Sequence[PairedComparison]) -> str:
    """Return the names of comparisons, or the name of their source if these are all of its comparisons."""
    if len(names) == 1:
        return f"Comparison *{names[0]}*"
    of_sources: dict[str, list[str]] = {}
    for comparison in comparisons:
        of_sources.setdefault(comparison.source, []).append(comparison.name.replace("-", " "))
    whole = [source for source, every in of_sources.items() if every == names]
    return f"All comparisons of {whole[0]}" if whole else f"Comparisons *{', '.join(names)}*"


def strategies(runs: Sequence[PublicRun]) -> pd.DataFrame:
    """Return a table of peak memory per GPU and step time, with a row per strategy and a column per model size."""
    cells: dict[tuple[str, str, str], dict[str, str]] = {}
    for run in sorted(runs, key=lambda run: (run.setting.parameters or 0, run.source.lines or [0])):
        setting, totals = run.setting, run.totals
        peak, seconds = totals.get("peak_allocated_bytes"), totals.get("seconds_per_step")
        checkpointing = {None: "unknown", True: "yes", False: "no"}[setting.activation_checkpointing]
        place = (setting.strategy or "unknown", setting.offload or "unknown", checkpointing)
        memory = "unknown" if peak is None else bytes_text(peak)
        time = "unknown" if seconds is None else f"{seconds:g} s"
        cells.setdefault(place, {})[f"{(setting.parameters or 0) / 1e9:g} billion"] = f"{memory}, {time}"
    names = ["strategy", "offloaded to the host", "activation checkpointing"]
    return pd.DataFrame([dict(zip(names, place, strict=True)) | row for place, row in cells.items()]).fillna("")


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
    known = np.array([pair.nats for pair in pairs if pair.nats is not None])
    if comparison.margin is None or not len(known):
        return ""
    mean, low, high = t_interval(known)
    interval = "" if low is None else f" ({low:+.4f} to {high:+.4f})"
    inside = f"{np.sum(np.abs(known) <= comparison.margin)} of {len(known)} within {comparison.margin:g}"
    return f"{mean:+.4f}{interval}, {inside}".replace("-", "\N{MINUS SIGN}")


def _signed(relative: float) -> str:
    return f"{100 * relative:+.3g} %".replace("-", "\N{MINUS SIGN}")


def other_differences(result: Result) -> list[str]:
    """Return sentences on what else differs in a comparison, and on what was left out or not compared."""
    lines: list[Any] = [f"The {fact.replace(':', ' also differs:', 1)}." for fact in result.also_differs]
    lines += list(result.comparison.caveats)
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
