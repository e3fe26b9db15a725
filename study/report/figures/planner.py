"""What do predictions look like? What fills a GPU, what more of them save, what is fast and small, and what was so."""

from __future__ import annotations

import itertools
import re

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

from study.compare.words import bytes_text, in_order, three_digits
from study.planner import sweeps, trees
from study.planner.accuracy import Validation
from study.planner.choose import Advice
from study.planner.trees import JUDGED, Grid
from study.report.figures.drawing import (
    INK,
    POINTS_PER_INCH,
    WIDTH_INCHES,
    Figure,
    below,
    beside,
    finish,
    house_style,
    log_ticks,
    panels,
    rows,
    spread_out,
    style,
)
from study.report.words import GIB, batch, listed, percent
from study.theory.decision_trees import Kind
from study.theory.on_box import ALLOCATOR_SLACK
from study.theory.peaks import PARTS, Part

# Model states, what is communicated, residual states: one colour each, in shades.
COLOURS: dict[Part, str] = {
    "parameters": "#5558C8",
    "gradients": "#8C90E8",
    "optimizer_states": "#B9BCF5",
    "communication_buffers": "#A87900",
    "gathered_parameters": "#DDB95A",
    "activations": "#2F8F83",
    "logits": "#6DB8AD",
    "temporary_buffers": "#A9D6CF",
}
SLACK = {"fill": False, "edgecolor": "#808080", "linewidth": 1.0}
BAR = 0.66  # of a row
LOGARITHMIC_FROM = 10.0  # largest over smallest
LARGE, SMALL = 7.0, 4.0  # markers: without and with activation checkpointing
BANDS = (0.12, 0.25)  # of the published value; what the median and the 90th percentile are to stay within
DEVICES = (("#2E86D0", "o"), ("#009E73", "s"), ("#D55E00", "^"))
PREDICTED = "Predicted, nothing measured."
OUTCOMES: dict[Kind, str] = {
    "agrees": "#009E73",
    "slower": "#DDB95A",
    "out of memory": "#D55E00",
    "no answer": "#B0B0B0",
}
ACROSS = 3  # maps in a row


def _name(kind: str, advice: Advice) -> str:
    asked = advice.asked
    words = f"{kind} {advice.shape.name} {advice.box.num_gpus} {advice.box.gpu.name} {asked.sequence_length}"
    words += f" {asked.batch()[0] * asked.num_gpus}"
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")


def _setting(advice: Advice) -> str:
    return f" Setting: {advice.shape.name}, {advice.box.num_gpus} x {advice.box.gpu.name}. {PREDICTED}"


def memory_by_part(advice: Advice) -> Figure:
    """Draw what fills a GPU at its highest moment under each strategy, and what a GPU has to give."""
    options = {option.strategy.name: option.prediction for option in advice.options}
    order = in_order(options)
    usable = advice.options[0].prediction.usable_bytes
    longest = max(prediction.needed_bytes for prediction in options.values())
    name = _name("planner-parts", advice)
    with house_style(name):
        canvas, (ax,) = panels([0.44 * len(order) + 0.65])
        rows(ax, [f"{strategy}\n{batch(options[strategy].job)}" for strategy in order])
        for row, strategy in enumerate(order):
            prediction, start = options[strategy], 0.0
            for part in PARTS:
                size = prediction.peak.parts[part] / GIB
                ax.add_patch(Rectangle((start, row - BAR / 2), size, BAR, facecolor=COLOURS[part], linewidth=0))
                start += size
            ax.add_patch(Rectangle((start, row - BAR / 2), prediction.needed_bytes / GIB - start, BAR, **SLACK))
            elsewhere = prediction.host_bytes_per_node + prediction.disk_bytes_per_node
            also = f"\n+ {bytes_text(elsewhere)} host, disk" if elsewhere else ""
            beside(
                ax, row, f"{three_digits(prediction.needed_bytes / GIB)} GiB{also}", fontsize="small" if also else None
            )
        ax.axvline(usable / GIB, color=INK, linewidth=1.5)
        ax.annotate(f"usable: {three_digits(usable / GIB)} GiB", (usable / GIB, 1), xycoords=("data", "axes fraction"),
                    xytext=(0, 3), textcoords="offset points", ha="right", annotation_clip=False)  # fmt: skip
        ax.set_xlim(0, max(longest, usable) / GIB * 1.03)
        ax.xaxis.set_major_locator(MaxNLocator(6))
        ax.set_xlabel("predicted memory of a GPU, GiB")
        handles = [Patch(facecolor=COLOURS[part], linewidth=0) for part in PARTS] + [Patch(**SLACK)]
        below(canvas, handles, [*(part.replace("_", " ") for part in PARTS), "allocator's slack"])

        needed = {strategy: options[strategy].needed_bytes for strategy in order}
        least, most = min(order, key=needed.__getitem__), max(order, key=needed.__getitem__)
        alt = (
            f"Predicted memory of a GPU under {len(order)} strategies: from {bytes_text(needed[least])} ({least}) to "
            f"{bytes_text(needed[most])} ({most}); a GPU has {bytes_text(usable)} to give."
        )
        caption = (
            "What fills a GPU at its highest moment: model states (violet), what is communicated (ochre), residual "
            f"states (green), and {percent(ALLOCATOR_SLACK)} that the allocator is assumed to add (framed). Below a "
            "strategy its micro batch x accumulation, the fastest that fits; c: with activation checkpointing. Beside "
            "a bar what is needed of a GPU, and what a node's host and disk hold. The line: what a GPU has to "
            f"give.{_setting(advice)}"
        )
        return finish(canvas, name, alt, caption)


def memory_by_gpus(advice: Advice) -> Figure:
    """Draw what each strategy needs of a GPU as there are more of them."""
    needed = sweeps.needed_by_gpus(advice)
    order = in_order(needed)
    usable = advice.options[0].prediction.usable_bytes / GIB
    name = _name("planner-gpus", advice)
    with house_style(name):
        canvas, (ax,) = panels([4.2])
        for strategy in order:
            look = style(strategy)
            ax.plot(
                list(needed[strategy]), [num_bytes / GIB for num_bytes in needed[strategy].values()],
                color=look.color, linestyle=look.line, marker=look.marker, markersize=5,
                markerfacecolor=(look.color, 0.4), label=strategy,
            )  # fmt: skip
        ax.axhline(usable, color=INK, linewidth=1.5)
        ax.annotate(f"usable: {three_digits(usable)} GiB", (1, usable), xycoords=("axes fraction", "data"),
                    xytext=(0, 3), textcoords="offset points", ha="right")  # fmt: skip
        ax.set_xscale("log", base=2)
        _gpu_ticks(ax)
        values = [num_bytes / GIB for by_gpus in needed.values() for num_bytes in by_gpus.values()]
        if spread_out([*values, usable], LOGARITHMIC_FROM):
            ax.set_yscale("log")
            log_ticks(ax.yaxis)
        else:
            ax.set_ylim(0, 1.08 * max(*values, usable))
        ax.set_xlabel("number of GPUs (axis logarithmic)")
        ax.set_ylabel("predicted memory of a GPU, GiB")
        below(canvas, *ax.get_legend_handles_labels())

        last = {strategy: needed[strategy][sweeps.GPU_COUNTS[-1]] for strategy in order if strategy != "single"}
        least, most = min(last, key=last.__getitem__), max(last, key=last.__getitem__)
        alt = (
            f"Predicted memory of a GPU under {len(order)} strategies on {sweeps.GPU_COUNTS[0]} to "
            f"{sweeps.GPU_COUNTS[-1]} GPUs: on {sweeps.GPU_COUNTS[-1]} from {bytes_text(last[least])} ({least}) to "
            f"{bytes_text(last[most])} ({most})."
        )
        caption = (
            "What a GPU must hold for one sequence at a time, without activation checkpointing: what the allocator "
            "is assumed to add is in it. The line: what a GPU of the box has to give; what else a node needs for "
            f"offload is not in the picture. Setting: {advice.shape.name}, {advice.asked.sequence_length:,} tokens. "
            f"{PREDICTED}"
        )
        return finish(canvas, name, alt, caption)


def _gpu_ticks(ax: Axes) -> None:
    ax.xaxis.set_major_locator(FixedLocator(sweeps.GPU_COUNTS))
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:.0f}")
    ax.xaxis.set_minor_locator(NullLocator())


def speed_against_memory(advice: Advice) -> Figure:
    """Draw throughput against memory: every strategy at every split of the batch, and the front of what fits."""
    choices = sweeps.choices(advice)
    front = sweeps.pareto(choices)
    order = in_order(choice.strategy for choice in choices)
    usable = choices[0].prediction.usable_bytes / GIB
    name = _name("planner-front", advice)
    with house_style(name):
        canvas, (ax,) = panels([4.6])
        if front:
            x, y = zip(
                *((c.prediction.needed_bytes / GIB, c.prediction.tokens_per_second_per_gpu) for c in front), strict=True
            )
            ax.plot(x, y, color=INK, linewidth=1.2, linestyle=(0, (4, 2)), drawstyle="steps-post", alpha=0.8)
        for choice in choices:
            prediction, look = choice.prediction, style(choice.strategy)
            ax.plot(
                prediction.needed_bytes / GIB, prediction.tokens_per_second_per_gpu, color=look.color,
                marker=look.marker, linestyle="none", alpha=1.0 if prediction.fits else 0.6,
                markersize=SMALL if prediction.job.activation_checkpointing else LARGE,
                markerfacecolor=(look.color, 0.7) if prediction.fits else "none",
            )  # fmt: skip
        ax.axvline(usable, color=INK, linewidth=1.5)
        ax.annotate(f"usable: {three_digits(usable)} GiB", (usable, 1), xycoords=("data", "axes fraction"),
                    xytext=(0, 3), textcoords="offset points", ha="right", annotation_clip=False)  # fmt: skip
        if spread_out([choice.prediction.needed_bytes for choice in choices], LOGARITHMIC_FROM):
            ax.set_xscale("log")
            log_ticks(ax.xaxis)
        ax.set_ylim(bottom=0)
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        ax.set_xlabel("predicted memory of a GPU, GiB")
        ax.set_ylabel("predicted tokens/s per GPU")
        handles = [_dot(style(s).color, style(s).marker, filled=True) for s in order]
        handles += [_dot(INK, "o", filled=False), _dot(INK, "o", filled=True, size=SMALL)]
        below(canvas, handles, [*order, "does not fit", "checkpointed"])

        fitting = sum(bool(choice.prediction.fits) for choice in choices)
        alt = (
            f"Throughput against memory of {len(choices)} ways to run {len(order)} strategies, of which {fitting} fit."
        )
        if front:
            alt += (
                f" Fastest: {front[-1].strategy}, {front[-1].prediction.tokens_per_second_per_gpu:,.0f} tokens/s per "
                f"GPU in {bytes_text(front[-1].prediction.needed_bytes)}. On the front: "
                f"{listed(in_order(choice.strategy for choice in front))}."
            )
        caption = (
            "Every strategy at every split of the batch into micro batches, without and with activation "
            "checkpointing (small). Filled: fits; the line joins what nothing that fits beats in both memory and "
            f"speed. A strategy that offloads may lack host memory or disk left of the line, too.{_setting(advice)}"
        )
        return finish(canvas, name, alt, caption)


def _dot(colour: str, marker: str, filled: bool, size: float = LARGE) -> Line2D:
    face = (colour, 0.7) if filled else "none"
    return Line2D([], [], color=colour, marker=marker, linestyle="none", markersize=size, markerfacecolor=face)


def published_speed(validation: Validation) -> Figure:
    """Draw predicted over published throughput of the MPT rows, with the bands that errors are to stay within."""
    name = "planner-published"
    speeds = np.array([row.tokens_per_second_per_gpu for row in validation.rows])
    ratios = np.array([entry["predicted"] / entry["published"] for entry in validation.content["rows"]])
    devices = sorted({row.box.gpu.name for row in validation.rows})
    with house_style(name):
        canvas, (ax,) = panels([3.8])
        ends = [speeds.min() / 1.2, speeds.max() * 1.2]
        for band, alpha in zip(BANDS, (0.12, 0.08), strict=True):
            drawn = ax.fill_between(ends, 1 - band, 1 + band, color=INK, alpha=alpha, linewidth=0)
            drawn.set_gid(f"band-{band:.2f}".replace(".", ""))
        ax.axhline(1, color=INK, linewidth=1)
        handles = []
        for device, (colour, marker) in zip(devices, DEVICES, strict=True):
            for row, speed, ratio in zip(validation.rows, speeds, ratios, strict=True):
                if row.box.gpu.name == device:
                    face = "none" if row.fp8 else (colour, 0.6)
                    ax.plot(
                        speed, ratio, color=colour, marker=marker, markersize=5, markerfacecolor=face, linestyle="none"
                    )
            handles.append(_dot(colour, marker, filled=True, size=5))
        handles.append(_dot(INK, "o", filled=False, size=5))
        ax.set_xscale("log")
        log_ticks(ax.xaxis)
        ax.set_xlim(*ends)
        ax.set_xlabel("published tokens/s per GPU (axis logarithmic)")
        ax.set_ylabel("predicted over published")
        below(canvas, handles, [*devices, "fp8"])

        summary = validation.content["as_they_stand"]
        within = [np.mean(abs(ratios - 1) <= band) for band in BANDS]
        alt = (
            f"Predicted over published throughput of {len(validation.rows)} rows on {listed(devices)}: "
            f"{percent(within[0])} lie within {percent(BANDS[0])}, {percent(within[1])} within {percent(BANDS[1])}; "
            f"the median error of a step's time is {percent(summary['median'], 1)}."
        )
        caption = (
            "Each published row of MPT training (LLM Foundry) by its throughput and what the models of theory "
            f"predict of it. Bands: {percent(BANDS[0])} and {percent(BANDS[1])} off. The models' constants were "
            "fitted to these rows, but for those in fp8, which they predict as if they were in bf16; errors on rows "
            "that a fit has not seen are in the table. The horizontal axis is measured, by others; the vertical one "
            "divides a prediction by it."
        )
        return finish(canvas, name, alt, caption)


def tree_outcomes(grid: Grid) -> Figure:
    """Draw, for each tree, what came of its advice by model and number of GPUs."""
    name = "planner-trees"
    num_rows = -(-len(grid.judged) // ACROSS)
    with house_style(name):
        canvas = Canvas(figsize=(WIDTH_INCHES, 1.25 * num_rows + 0.4), dpi=POINTS_PER_INCH, layout="constrained")
        axes = canvas.subplots(num_rows, ACROSS, sharex=True, sharey=True, squeeze=False)
        for ax in axes.flat[len(grid.judged) :]:
            ax.set_visible(False)
        for ax, (tree, judged) in zip(axes.flat, grid.judged.items(), strict=False):
            kinds = trees.usual(judged)
            for row, model in enumerate(trees.MODELS):
                _strip(ax, row, [kinds.get((model, count)) for count in trees.GPU_COUNTS])
            ax.set_title(tree.replace("-analysis", "").replace("zero3-", ""), fontsize=9.5)
            ax.set_xticks(range(0, len(trees.GPU_COUNTS), 2), trees.GPU_COUNTS[::2], fontsize=9)
            ax.set_yticks(
                range(0, len(trees.MODELS), 4), [m.removeprefix("mpt-") for m in trees.MODELS[::4]], fontsize=9
            )
            ax.set_xlim(-0.5, len(trees.GPU_COUNTS) - 0.5)
            ax.set_ylim(-0.5, len(trees.MODELS) - 0.5)
            ax.grid(False)
        axes[-1, ACROSS // 2].set_xlabel("number of GPUs", fontsize=10.5)
        axes[num_rows // 2, 0].set_ylabel("parameters", fontsize=10.5)
        below(canvas, [Patch(facecolor=colour, linewidth=0) for colour in OUTCOMES.values()], list(OUTCOMES))

        shares = {
            kind: [sum(case.outcome.kind == kind for case in judged) / len(judged) for judged in grid.judged.values()]
            for kind in JUDGED
        }
        ranges = [f"{kind} {percent(min(each))} to {percent(max(each))}" for kind, each in shares.items()]
        alt = (
            f"Outcomes of {len(grid.judged)} published decision trees by model and number of GPUs: {', '.join(ranges)}."
        )
        caption = (
            "What comes of each tree's advice: the commonest outcome over GPUs, links, batches, purposes and "
            f"priorities of each model on each number of GPUs. Blank: nothing fits. {PREDICTED}"
        )
        return finish(canvas, name, alt, caption)


def _strip(ax: Axes, row: int, kinds: list[Kind | None]) -> None:
    """One model's outcomes; equal neighbours are one rectangle."""
    start = 0
    for kind, group in itertools.groupby(kinds):
        width = len(list(group))
        if kind is not None:
            ax.add_patch(Rectangle((start - 0.5, row - 0.5), width, 1, facecolor=OUTCOMES[kind], linewidth=0))
        start += width
