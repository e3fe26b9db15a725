"""The figures of all pages, from the tidy table of runs, from predictions and from committed results."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

from study.compare import verdict
from study.compare.verdict import SAME, Judged
from study.compare.verdict_text import Decided
from study.compare.words import Unit, bytes_text, bytes_unit, in_order, powers, processes, three_digits
from study.planner import choose
from study.planner.choose import Advice
from study.planner.published_rows import PublishedRun
from study.report.drawing import (
    INK,
    Figure,
    at_edge,
    below,
    beside,
    finish,
    house_style,
    log_ticks,
    panels,
    rows,
    setting,
    spread_out,
    style,
    unmeasured,
    with_results,
)
from study.report.markup import GIB, MEMORY_KINDS, batch, seconds_unit
from study.theory.peaks import PARTS

SMOOTHED_STEPS = 5
DRAWN_POINTS = 300  # of one curve; more are not visible
LOGARITHMIC_FROM = 6  # times the smallest value: beyond that a linear axis hides the differences of the small ones
BAR = 0.66  # of a row
SPREAD = 0.7  # of the room of one number of processes, over which its strategies stand, so that none covers another

# Of a rank's memory, measured: model states, the engine's buffers, and what comes on top during the step.
MEASURED_PARTS = {
    "parameters": "#5558C8",
    "gradients": "#8C90E8",
    "optimizer_states": "#B9BCF5",
    "on_gpu": "#7073D8",
    "communication_buffers": "#C79A2B",
    "rest": "#9A9A9A",
}
STATES = ("parameters", "gradients", "optimizer_states")
# Of a GPU's, predicted: model states, what is communicated, residual states.
PREDICTED_PARTS = dict(
    zip(
        PARTS,
        ("#5558C8", "#8C90E8", "#B9BCF5", "#A87900", "#DDB95A", "#2F8F83", "#6DB8AD", "#A9D6CF"),
        strict=True,
    )
)
SERIES = (("#2E86D0", "D"), ("#D55E00", "s"), ("#009E73", "^"), ("#C0609A", "v"), ("#A87900", "P"), ("#7A6FD0", "X"))
VERDICTS: dict[str, dict[str, Any]] = {
    "same": {"marker": ".", "color": "#009E73", "s": 22},
    "wrong": {"marker": "X", "color": "#D55E00", "s": 60, "linewidth": 0},
    "refused": {"marker": "_", "color": INK, "s": 36},
    "crashed": {"marker": "s", "facecolor": "none", "edgecolor": INK, "s": 28},
}


# ---------------------------------------------------------------- what was learned


def loss_curves(steps: pd.DataFrame, control: str, table: pd.DataFrame | None = None) -> Figure:
    """Draw the training loss of each strategy, and below it the difference to the control with equal seed and step.

    `steps` is the long form of `compare.table.steps`; `table` has the same runs and those that never took a step, so
    that these are named. Raises ValueError where the control has no run, or where the runs are not of one setting.
    """
    about = setting(steps)
    strategies = in_order(steps["strategy"])
    if control not in strategies:
        raise ValueError(f"control {control!r} has no steps here; there are {', '.join(strategies)}")
    name = f"loss-curves-{about.slug}"
    runs, notes = _whole(steps.pivot_table(index="step", columns=["strategy", "seed", "repeat"], values="loss"))
    by_seed = runs.T.groupby(level=["strategy", "seed"]).mean().T
    seeds = {s: by_seed[s].columns.intersection(by_seed[control].columns) for s in strategies if s != control}
    differences = {s: _smooth(by_seed[s][both] - by_seed[control][both]) for s, both in seeds.items() if len(both)}
    if table is not None:
        num_steps = table["run_id"].map(steps.dropna(subset="loss").groupby("run_id").size())
        notes += [f"{s}: {why}, no curve" for s, why in unmeasured(table.assign(steps=num_steps), "steps").items()]

    with house_style(name):
        canvas, axes = panels([2.6, 1.9] if differences else [2.6], share_x=True)
        for strategy in strategies:
            _curve(axes[0], _smooth(by_seed[strategy]), strategy, is_control=strategy == control)
        axes[0].set_ylabel("training loss")
        axes[0].yaxis.set_major_locator(MaxNLocator(5))
        for strategy, values in differences.items():
            _curve(axes[1], values, strategy)
        if differences:
            _scale_differences(axes[1], pd.concat(differences.values()).abs().max().max())
        axes[-1].set_xlabel("optimizer step")
        axes[-1].xaxis.set_major_locator(MaxNLocator(6, integer=True))
        below(canvas, [_line(s, is_control=s == control) for s in strategies], strategies, notes)
        title = f"Training loss, and its difference to {control} with equal seed, {SMOOTHED_STEPS} steps smoothed"
        return finish(canvas, name, f"{title}: {about.words}")


def _whole(runs: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """Leave out a strategy's runs that end before the last step, unless all of its do; and say which."""
    last = runs.apply(lambda losses: losses.last_valid_index())
    whole, notes = [], []
    for strategy in in_order(last.index.get_level_values("strategy")):
        ends = last[[strategy]]
        early = ends[ends < runs.index.max()]
        whole += list(early.index if len(early) == len(ends) else ends.index.difference(early.index))
        if len(early):
            at = f"step {early.min():.0f}" if early.nunique() == 1 else f"steps {early.min():.0f} to {early.max():.0f}"
            out = "" if len(early) == len(ends) else ", left out"
            notes.append(f"{strategy}: {len(early)} of {len(ends)} runs ended at {at}{out}")
    return runs[whole], notes


def _smooth(losses: pd.DataFrame) -> pd.DataFrame:
    """Running means, as far as there are losses."""
    return losses.rolling(SMOOTHED_STEPS, center=True, min_periods=1).mean().where(losses.notna())


def _curve(ax: Axes, values: pd.DataFrame, strategy: str, is_control: bool = False) -> None:
    """The mean over seeds, as far as all of them went, and the band from the least to the largest."""
    values = values.dropna()
    points = values.iloc[:: max(1, math.ceil(len(values) / DRAWN_POINTS))]
    line = _line(strategy, is_control)
    line.set_data(points.index, points.mean(axis=1))
    ax.add_line(line)
    if points.shape[1] > 1:
        ax.fill_between(points.index, points.min(axis=1), points.max(axis=1), color=line.get_color(), linewidth=0,
                        alpha=0.08)  # fmt: skip
    ax.autoscale_view()


def _line(strategy: str, is_control: bool = False) -> Line2D:
    """The control lies below all others, which would hide it, and so is broad."""
    look = style(strategy)
    if is_control:
        return Line2D([], [], color=look.color, linewidth=5, alpha=0.35, solid_capstyle="butt")
    return Line2D([], [], color=look.color, linestyle=look.line, linewidth=1.5)


def _scale_differences(ax: Axes, largest: float) -> None:
    ax.axhline(0, color=INK, linewidth=0.8)
    ax.set_ylabel("difference")
    if not largest > 0:
        ax.set_ylim(-1, 1)
        ax.yaxis.set_major_locator(FixedLocator([0]))
        ax.annotate("identical at every step", (0.02, 0.9), xycoords="axes fraction", va="top", style="italic")
        return
    ax.set_ylim(-1.15 * largest, 1.15 * largest)
    ax.yaxis.set_major_locator(MaxNLocator(4, symmetric=True))
    ax.yaxis.set_major_formatter(lambda value, _: powers(value))


def decided(study: Decided) -> Figure:
    """Draw the primary endpoint: each arm's runs, their mean with its interval, the margin; the neighbours on top."""
    endpoint, judged, control = study.primary, study.on(study.primary), study.study.control
    apart = verdict.neighbours_apart(study.runs, study.protocol, endpoint, control).ravel()
    labels = [f"{control} from weights one digit apart", *(f"{arm.strategy} on {arm.world_size}" for arm in judged)]
    unit = "points" if endpoint.metric == "accuracy" else "%"
    name = f"decided-{study.study.name}"
    with house_style(name):
        canvas, (ax,) = panels([0.36 * len(labels) + 0.7])
        rows(ax, [textwrap.fill(label, 28) for label in labels])
        ax.axvspan(-100 * endpoint.margin, 100 * endpoint.margin, facecolor=INK, alpha=0.1, linewidth=0)
        ax.axvline(0, color=INK, linewidth=0.8)
        _rings(ax, 0, apart, INK)
        for row, arm in enumerate(judged, start=1):
            look = style(arm.strategy)
            _rings(ax, row, arm.differences, look.color)
            ax.hlines(row, 100 * arm.low, 100 * arm.high, color=look.color, linewidth=2.5)
            ax.plot(100 * arm.mean, row, marker=look.marker, color=look.color, markersize=7, linestyle="none")
            beside(ax, row, _word(arm))
        reach = 108 * max(endpoint.margin, np.abs(apart).max(), *(np.abs(arm.differences).max() for arm in judged))
        ax.set_xlim(-reach, reach)
        ax.xaxis.set_major_locator(MaxNLocator(5, symmetric=True))
        ax.xaxis.set_major_formatter(lambda value, _: three_digits(value))
        what = f"held-out {endpoint.metric} after {endpoint.step} steps, difference to {control}"
        ax.set_xlabel(f"{what} in {unit}")
        margin = f"margin fixed before the runs: {100 * endpoint.margin:g} {unit}"
        handles = [Patch(facecolor=INK, alpha=0.1), *_marks(INK, "o", "none"), Line2D([], [], color=INK, linewidth=2.5)]
        confidence = f"mean and {100 * (1 - 2 * study.protocol.significance):g} % interval"
        below(canvas, handles, [margin, "single runs", confidence])
        return finish(canvas, name, f"{study.model}: {what}")


def _rings(ax: Axes, row: int, values: np.ndarray, color: str) -> None:
    """Single runs, a little above and below their row in turn, so that equal ones are told apart."""
    heights = row + 0.2 * (np.arange(len(values)) % 3 - 1)
    ax.plot(100 * values, heights, marker="o", markersize=5, color=color, markerfacecolor="none", markeredgewidth=1.1,
            linestyle="none", clip_on=False)  # fmt: skip


def _word(arm: Judged) -> str:
    """What both tests say."""
    return f"{'within' if arm.equivalence == SAME else arm.equivalence}{', further' if arm.further else ''}"


# ---------------------------------------------------------------- what a rank holds


def peak_memory(table: pd.DataFrame) -> Figure:
    """Draw a rank's peak per strategy, and below it its model states beside the paper's.

    Of the peak is measured what rests between two steps, and so is there too; the rest comes on top during the step.
    Of several runs the one with the highest peak, and of it the rank with the most. Raises ValueError where nothing is
    measured or the runs are not of one setting.
    """
    about = setting(table)
    name = f"peak-memory-{about.slug}"
    on_gpu = "cuda" in set(table["device"])
    peak = table[MEMORY_KINDS[not on_gpu]].where(table["rank_parts"].notna())
    table = with_results(table.assign(peak=peak), "peak")
    missing, strategies = unmeasured(table, "peak"), in_order(table["strategy"])
    measured = table.dropna(subset=["peak"])
    highest = measured.loc[measured.groupby("strategy")["peak"].idxmax()].set_index("strategy")
    ranks = {s: max(highest["rank_parts"][s], key=lambda rank: rank["peak"]) for s in highest.index}
    at_peak = {strategy: parts_at_peak(rank, on_gpu) for strategy, rank in ranks.items()}
    most = {
        s: max(highest["rank_parts"][s], key=lambda rank: sum(rank[part] for part in STATES)) for s in highest.index
    }
    states = {strategy: {part: rank[part] for part in STATES} for strategy, rank in most.items()}

    with house_style(name):
        canvas, axes = panels([0.44 * len(strategies) + 0.65] * 2)
        unit = _stacked(axes[0], strategies, at_peak, missing)
        axes[0].set_xlabel(f"peak memory of a rank, {unit.name}")
        unit = _stacked(axes[1], strategies, states, missing)
        for row, strategy in enumerate(strategies):
            paper = highest["paper_state_bytes"].get(strategy, math.nan)
            if not math.isnan(paper):
                outline = Rectangle((0, row - 0.45), paper / unit.size, 0.9, fill=False, edgecolor=INK, linewidth=0.9)
                axes[1].add_patch(outline)
        axes[1].set_xlabel(f"model states of a rank, {unit.name}")
        axes[1].autoscale_view(scaley=False)
        shown = [part for part in MEASURED_PARTS if any(part in of for of in at_peak.values())]
        handles = [Patch(facecolor=MEASURED_PARTS[part]) for part in shown] + [Patch(fill=False, edgecolor=INK)]
        names = {"rest": "more during the step", "on_gpu": "states left on the GPU"}
        below(canvas, handles, [*(names.get(part, part.replace("_", " ")) for part in shown), "by the paper"])
        kind = "allocated by torch" if on_gpu else "live tensors"
        return finish(canvas, name, f"Peak memory of a rank ({kind}), and its model states: {about.words}")


def parts_at_peak(rank: Mapping[str, Any], on_gpu: bool) -> dict[str, float]:
    """What the peak of a rank is made of: what rests between two steps, and the rest."""
    resting = rank["resting"]
    parts = {part: resting[part] for part in STATES}
    if on_gpu and resting["host"]:
        parts = {"on_gpu": sum(parts.values()) - resting["host"]}
    parts["communication_buffers"] = resting["communication_buffers"]
    return {**parts, "rest": max(0, rank["peak"] - sum(parts.values()))}


def _stacked(
    ax: Axes, strategies: Sequence[str], bars: Mapping[str, Mapping[str, float]], missing: Mapping[str, str]
) -> Unit:
    """One bar of parts for each strategy, with its length beside it; the unit of the axis."""
    unit = bytes_unit(max(sum(parts.values()) for parts in bars.values()))
    rows(ax, [f"{s}\n({missing[s]})" if s in missing and s in bars else s for s in strategies])
    for row, strategy in enumerate(strategies):
        if strategy not in bars:
            at_edge(ax, row, missing[strategy])
            continue
        start = 0.0
        for part, num_bytes in bars[strategy].items():
            ax.barh(row, num_bytes / unit.size, BAR, left=start, color=MEASURED_PARTS[part], linewidth=0)
            start += num_bytes / unit.size
        beside(ax, row, unit.text(sum(bars[strategy].values())))
    ax.xaxis.set_major_locator(MaxNLocator(6))
    return unit


# ---------------------------------------------------------------- how long a step takes


def runtime(table: pd.DataFrame) -> Figure:
    """Draw every run's median seconds per step, the middle half of its steps, and each strategy's median over runs.

    Raises ValueError where nothing is measured or the runs are not of one setting.
    """
    about = setting(table)
    name = f"runtime-{about.slug}"
    table = with_results(table, "seconds_per_step")
    missing, strategies = unmeasured(table, "seconds_per_step"), in_order(table["strategy"])
    measured = table.dropna(subset=["seconds_per_step"]).sort_values(["seed", "repeat"])
    medians = measured.groupby("strategy")["seconds_per_step"].median()
    unit = seconds_unit(medians.max())
    with house_style(name):
        canvas, (ax,) = panels([0.36 * len(strategies) + 0.7])
        rows(ax, [f"{s}\n({missing[s]})" if s in missing and s in medians else s for s in strategies])
        for row, strategy in enumerate(strategies):
            if strategy not in medians:
                at_edge(ax, row, missing[strategy])
                continue
            runs, look = measured[measured["strategy"] == strategy], style(strategy)
            places = row + (np.linspace(-0.28, 0.28, len(runs)) if len(runs) > 1 else np.zeros(1))
            ax.hlines(places, runs["seconds_lower"] / unit.size, runs["seconds_upper"] / unit.size, color=look.color,
                      linewidth=1, alpha=0.4)  # fmt: skip
            ax.plot(runs["seconds_per_step"] / unit.size, places, linestyle="none", marker=look.marker, markersize=4,
                    color=look.color, alpha=0.8)  # fmt: skip
            ax.vlines(medians[strategy] / unit.size, row - 0.44, row + 0.44, color=INK, linewidth=2.5, zorder=3)
            beside(ax, row, unit.text(medians[strategy]))
        is_logarithmic = spread_out(measured["seconds_per_step"], LOGARITHMIC_FROM)
        if is_logarithmic:
            ax.set_xscale("log")
            log_ticks(ax.xaxis)
        ax.set_xlabel(f"{unit.name} per step{' (axis logarithmic)' if is_logarithmic else ''}")
        return finish(canvas, name, f"Time of a step, run by run, and the median over runs: {about.words}")


def pareto(table: pd.DataFrame) -> Figure:
    """Draw peak memory against the time of a step, and which strategies no other beats in both.

    Raises ValueError where no strategy has both, or the runs are not of one setting.
    """
    about = setting(table)
    name = f"pareto-{about.slug}"
    column = MEMORY_KINDS["cuda" not in set(table["device"])]
    table = with_results(table.assign(both=table["seconds_per_step"].where(table[column].notna())), "both")
    medians = table.dropna(subset=["both"]).groupby("strategy")[["seconds_per_step", column]].median()
    medians = medians.loc[in_order(medians.index)]
    time, size = seconds_unit(medians["seconds_per_step"].max()), bytes_unit(medians[column].max())
    x, y = medians["seconds_per_step"] / time.size, medians[column] / size.size
    best = front(medians["seconds_per_step"], medians[column])
    with house_style(name):
        canvas, (ax,) = panels([4.4])
        ax.plot(x[best], y[best], color=INK, linewidth=1.2, linestyle=(0, (4, 2)), drawstyle="steps-post", alpha=0.8)
        handles: list[Line2D] = []
        for strategy in medians.index:
            face = (style(strategy).color, 1.0 if strategy in best else 0.35)
            handles += ax.plot(x[strategy], y[strategy], marker=style(strategy).marker, color=style(strategy).color,
                               markersize=8, markerfacecolor=face, linestyle="none")  # fmt: skip
        for axis, scale, values in ((ax.xaxis, ax.set_xscale, x), (ax.yaxis, ax.set_yscale, y)):
            if spread_out(values, LOGARITHMIC_FROM):
                scale("log")
                log_ticks(axis)
        ax.margins(0.14)
        ax.set_xlabel(f"{time.name} per step")
        ax.set_ylabel(f"peak memory of a rank, {size.name}")
        notes = [f"{strategy}: {why}" for strategy, why in unmeasured(table, "both").items()]
        below(canvas, handles, list(medians.index), notes)
        return finish(canvas, name, f"Peak memory against the time of a step, medians over runs: {about.words}")


def front(seconds: pd.Series, memory: pd.Series) -> list[str]:
    """The strategies that no other beats, or equals in one and beats in the other; from the fastest to the smallest."""
    found: list[str] = []
    for strategy in pd.DataFrame({"seconds": seconds, "memory": memory}).sort_values(["seconds", "memory"]).index:
        if not found or memory[strategy] < memory[found[-1]]:
            found.append(strategy)
    return found


def world_sizes(table: pd.DataFrame, with_speed: bool = True) -> Figure:
    """Draw each strategy's speed per process and model states per rank against the number of processes.

    `with_speed` is False where times decide nothing; then states alone are drawn, if they are known. All runs have one
    global batch: strong scaling. Raises ValueError where no speed is measured, or the runs are not of one setting.
    """
    about = setting(table, varying="world_size")
    name = f"world-sizes-{about.slug}"
    table = with_results(table, "tokens_per_second_per_gpu")
    summary = table.groupby(["strategy", "world_size"]).agg(
        speed=("tokens_per_second_per_gpu", "median"),
        held=("model_state_bytes", "max"),
        paper=("paper_state_bytes", "max"),
    )
    unit = None if summary["held"].isna().all() else bytes_unit(summary["held"].max())
    with_speed = with_speed or unit is None
    strategies, worlds = in_order(table["strategy"]), sorted(map(int, table["world_size"].unique()))
    with house_style(name):
        canvas, axes = panels([2.9] * with_speed + [2.7] * (unit is not None), share_x=True)
        for nth, strategy in enumerate(strategies):
            look, of = style(strategy), summary.loc[strategy]
            aside = SPREAD * (nth / (len(strategies) - 1) - 0.5) if len(strategies) > 1 else 0.0
            x = pd.Series({size: worlds.index(size) + aside for size in of.index})
            marks = {"color": look.color, "linestyle": look.line, "marker": look.marker, "markersize": 4}
            if with_speed:
                axes[0].plot(x, of["speed"], **marks)
            if unit is not None:
                axes[-1].plot(x, of["held"] / unit.size, **marks)
                axes[-1].plot(x, of["paper"] / unit.size, color=look.color, linestyle="none", marker="_", markersize=6)
        if with_speed:
            axes[0].set_ylim(bottom=0)
            axes[0].set_ylabel("tokens per second per process")
            axes[0].yaxis.set_major_formatter(lambda value, _: three_digits(value))
        if unit is not None:
            if spread_out(summary["held"], LOGARITHMIC_FROM):
                axes[-1].set_yscale("log")
                log_ticks(axes[-1].yaxis)
            axes[-1].set_ylabel(f"model states of a rank, {unit.name}")
        axes[-1].set_xticks(range(len(worlds)), [processes(size) for size in worlds])
        shared = sorted(map(int, table.loc[table["oversubscribed"].astype(bool), "world_size"].unique()))
        notes = [f"{processes(size)}: cores or GPUs were shared" for size in shared if with_speed]
        notes += [
            f"{strategy} on {size}: {why}"
            for size, runs in table.groupby("world_size")
            for strategy, why in unmeasured(runs, "tokens_per_second_per_gpu").items()
        ]
        handles = [_line(strategy) for strategy in strategies] + _marks(INK, "_", INK)
        below(canvas, handles, [*strategies, "by the paper"], notes)
        return finish(canvas, name, f"One global batch on several numbers of processes: {about.words}")


def _marks(color: str, marker: str, face: Any, size: float = 6) -> list[Line2D]:
    """A mark without a line, for a legend."""
    return [Line2D([], [], color=color, marker=marker, linestyle="none", markersize=size, markerfacecolor=face)]


# ---------------------------------------------------------------- predictions


def memory_by_part(advice: Advice) -> Figure:
    """Draw what fills a GPU at its highest moment under each strategy, and what a GPU has to give."""
    options = {option.strategy.name: option.prediction for option in advice.options}
    order = in_order(options)
    usable = advice.options[0].prediction.usable_bytes / GIB
    name = _planned("planner-parts", advice)
    with house_style(name):
        canvas, (ax,) = panels([0.44 * len(order) + 0.65])
        rows(ax, [f"{strategy}\n{batch(options[strategy].job)}" for strategy in order])
        for row, strategy in enumerate(order):
            prediction, start = options[strategy], 0.0
            needed = float(prediction.needed_bytes) / GIB
            for part in PARTS:
                size = float(prediction.peak.parts[part]) / GIB
                ax.barh(row, size, BAR, left=start, color=PREDICTED_PARTS[part], linewidth=0)
                start += size
            ax.barh(row, needed - start, BAR, left=start, fill=False, edgecolor="#808080", linewidth=1)
            elsewhere = float(prediction.host_bytes_per_node + prediction.disk_bytes_per_node)
            also = f"\n+ {bytes_text(elsewhere)} host, disk" if elsewhere else ""
            beside(ax, row, f"{three_digits(needed)} GiB{also}", fontsize="small" if also else "medium")
        ax.axvline(usable, color=INK, linewidth=1.5)
        ax.set_xlabel(f"predicted memory of a GPU, GiB; the line: it has {three_digits(usable)} to give")
        ax.xaxis.set_major_locator(MaxNLocator(6))
        handles = [Patch(facecolor=PREDICTED_PARTS[part]) for part in PARTS] + [Patch(fill=False, edgecolor="#808080")]
        below(canvas, handles, [*(part.replace("_", " ") for part in PARTS), "allocator's slack"])
        title = f"Predicted memory of a GPU by part: {advice.shape.name}, {advice.box.num_gpus} x {advice.box.gpu.name}"
        return finish(canvas, name, title)


def memory_by_gpus(advice: Advice) -> Figure:
    """Draw what each strategy needs of a GPU as there are more of them, for one sequence at a time."""
    needed = choose.needed_by_gpus(advice)
    usable = advice.options[0].prediction.usable_bytes / GIB
    name = _planned("planner-gpus", advice)
    with house_style(name):
        canvas, (ax,) = panels([4.2])
        for strategy in in_order(needed):
            look = style(strategy)
            values = [num_bytes / GIB for num_bytes in needed[strategy].values()]
            ax.plot(list(needed[strategy]), values, color=look.color, linestyle=look.line, marker=look.marker,
                    markersize=5, label=strategy)  # fmt: skip
        ax.axhline(usable, color=INK, linewidth=1.5)
        _gpu_axis(ax, choose.SWEPT_COUNTS)
        ax.set_yscale("log")
        log_ticks(ax.yaxis)
        ax.set_ylabel("predicted memory of a GPU, GiB (axis logarithmic)")
        below(canvas, *ax.get_legend_handles_labels())
        title = f"Predicted memory of a GPU for one sequence: {advice.shape.name}; the line: what a GPU has to give"
        return finish(canvas, name, title)


def _planned(kind: str, advice: Advice) -> str:
    """The name of a figure of an advice."""
    words = f"{kind} {advice.shape.name} {advice.box.num_gpus} {advice.box.gpu.name} {advice.asked.sequence_length}"
    words += f" {advice.asked.batch()[0] * advice.asked.num_gpus}"
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")


def _gpu_axis(ax: Axes, counts: Sequence[int]) -> None:
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_locator(FixedLocator(list(counts)))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:.0f}")
    ax.set_xlabel("GPUs (axis logarithmic)")


def published_scaling(name: str, title: str, series: Mapping[str, Sequence[PublishedRun]]) -> Figure:
    """Draw tokens per second and GPU over the number of GPUs, as others published (marks) and as predicted (dashed)."""
    with house_style(name):
        canvas, (ax,) = panels([3.4])
        handles = []
        for published, (colour, marker) in zip(series.values(), SERIES, strict=False):
            counts = [row.num_gpus for row in published]
            ax.plot(counts, [row.published_speed for row in published], color=colour, marker=marker,
                    linestyle="none", markersize=6, markerfacecolor="none")  # fmt: skip
            ax.plot(counts, [row.predicted_speed for row in published], color=colour, linestyle=(0, (2, 2)))
            handles += _marks(colour, marker, "none")
        _gpu_axis(ax, sorted({row.num_gpus for published in series.values() for row in published}))
        ax.set_ylim(bottom=0)
        ax.set_ylabel("tokens per second and GPU")
        ax.yaxis.set_major_formatter(lambda value, _: three_digits(value))
        below(canvas, [*handles, Line2D([], [], color=INK, linestyle=(0, (2, 2)))], [*series, "predicted"])
        return finish(canvas, name, title)


# ---------------------------------------------------------------- releases of the engines


def verdict_grid(
    name: str, title: str, down: Sequence[str], across: Sequence[str], at: Mapping[tuple[str, str], str]
) -> Figure:
    """Draw the verdict of each row and column as a mark."""
    with house_style(name):
        canvas, (ax,) = panels([0.24 * len(down) + 1.3])
        rows(ax, [row.replace("_", " ") for row in down])
        used = [verdict for verdict in VERDICTS if verdict in at.values()]
        handles = []
        for verdict in used:
            places = [
                (across.index(column), down.index(row)) for (row, column), found in at.items() if found == verdict
            ]
            x, y = zip(*places, strict=True)
            handles.append(ax.scatter(x, y, **VERDICTS[verdict]))
        heads = [column.replace("_", " ") for column in across]
        ax.set_xticks(range(len(across)), heads, rotation=75, ha="left", rotation_mode="anchor")
        ax.xaxis.tick_top()
        ax.set_xlim(-0.6, len(across) - 0.4)
        below(canvas, handles, used)
        return finish(canvas, name, title)
