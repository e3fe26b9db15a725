"""Does every strategy learn the same? Loss curves, and below them how far each is from the control's."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

from study.compare.words import in_order, powers, three_digits
from study.report.figures.drawing import INK, Figure, below, finish, house_style, panels, style
from study.report.figures.setting import setting, unmeasured
from study.report.words import counted, listed

SMOOTHED_STEPS = 5
DRAWN_POINTS = 300  # of one curve; more are not visible
ALIKE = 100  # times the smallest: differences further apart than this need a logarithmic axis
CROWDED = 4  # strategies beyond which the differences get one panel per stage


def loss_curves(steps: pd.DataFrame, control: str, table: pd.DataFrame | None = None) -> Figure:
    """Draw the training loss of each strategy, and below it the difference to the control with equal seed and step.

    `steps` is the long form of `compare.table.steps`; `table` has the same runs and those that never took a step, so
    that these are named. Raises ValueError where the control has no run, or where the runs are not of one setting.
    """
    about = setting(steps)
    if control not in set(steps["strategy"]):
        strategies_here = ", ".join(in_order(steps["strategy"]))
        raise ValueError(f"control {control!r} has no steps here; there are {strategies_here}")
    name = f"loss-curves-{about.slug}"
    runs = steps.pivot_table(index="step", columns=["strategy", "seed", "repeat"], values="loss")
    runs, notes = _whole(runs)
    by_seed = runs.T.groupby(level=["strategy", "seed"]).mean().T
    strategies = [control, *(s for s in in_order(steps["strategy"]) if s != control)]
    num_seeds = {s: by_seed[s].shape[1] for s in strategies}
    paired = {s: sorted(set(by_seed[s]) & set(by_seed[control])) for s in strategies[1:]}
    unpaired = [s for s in strategies[1:] if not paired[s]]
    differences = {s: by_seed[s][seeds] - by_seed[control][seeds] for s, seeds in paired.items() if seeds}
    farthest = {s: values.abs().max().max() for s, values in differences.items()}
    differences = {s: _smooth(values) for s, values in differences.items()}
    noise = _noise(runs[control])
    families = _families(list(differences))

    with house_style(name):
        canvas, axes = panels([2.6] + [1.9 if len(families) == 1 else 1.0] * len(families), share_x=True)
        top = axes[0]
        for strategy in strategies:
            _curve(top, _smooth(by_seed[strategy]), strategy, halo=strategy == control, crowd=len(strategies))
        top.set_ylabel("training loss")
        top.yaxis.set_major_locator(MaxNLocator(5))
        for ax, members in zip(axes[1:], families, strict=True):
            ax.axhline(0, color=INK, linewidth=0.8)
            if noise is not None:
                ax.fill_between(noise.index, noise["low"], noise["high"], color=INK, alpha=0.15, linewidth=0)
            for strategy in members:
                _curve(ax, differences[strategy], strategy, crowd=len(members))
        linear_within = _scale_differences(axes[1:], differences)
        if families:
            axes[1].set_title(f"difference to {control}, equal seed and step")
        axes[-1].set_xlabel("optimizer step")
        axes[-1].xaxis.set_major_locator(MaxNLocator(6, integer=True))
        handles = [_handle(strategy, strategy == control) for strategy in strategies]
        missing = {} if table is None else unmeasured(table.assign(steps=_num_steps(table, steps)), "steps")
        notes += [f"{strategy}: {why}, no curve" for strategy, why in missing.items()]
        below(canvas, handles, [handle.get_label() for handle in handles], notes)

        caption = _caption(control, num_seeds, families, linear_within, noise is not None)
        if unpaired:
            caption += f" No seed in common with {control}: {listed(unpaired)}."
        left = f" Not whole: {'; '.join(notes)}." if notes else ""
        return finish(canvas, name, _alt(runs, strategies, control, farthest) + left, caption + about.words + left)


def _smooth(losses: pd.DataFrame) -> pd.DataFrame:
    """Running means, as far as there are losses."""
    return losses.rolling(SMOOTHED_STEPS, center=True, min_periods=1).mean().where(losses.notna())


def _curve(ax: Axes, values: pd.DataFrame, strategy: str, halo: bool = False, crowd: int = 1) -> None:
    """The mean over seeds, as far as all of them went, and the band from the least to the largest."""
    look = style(strategy)
    values = values.dropna()
    points = values.iloc[_thinned(len(values))]
    width, alpha = (5.0, 0.35) if halo else (1.5, 1.0)  # the control lies below all others, which would hide it
    ax.plot(points.index, points.mean(axis=1), color=look.color, linestyle="-" if halo else look.line, linewidth=width,
            alpha=alpha, solid_capstyle="butt")  # fmt: skip
    if points.shape[1] > 1:
        band = ax.fill_between(points.index, points.min(axis=1), points.max(axis=1), color=look.color, linewidth=0,
                               alpha=max(0.04, 0.3 / crowd))  # fmt: skip
        band.set_gid(f"band-{strategy}-{ax.get_subplotspec().rowspan.start}")


def _thinned(length: int) -> np.ndarray:
    every = max(1, math.ceil(length / DRAWN_POINTS))
    return np.unique(np.append(np.arange(0, length, every), length - 1)) if length else np.array([], dtype=int)


def _handle(strategy: str, halo: bool) -> Line2D:
    look = style(strategy)
    line = Line2D([], [], color=look.color, linestyle=look.line, label=strategy)
    if halo:
        line.set(linestyle="-", linewidth=5, alpha=0.35, label=f"{strategy} (control)")
    return line


def _noise(control: pd.DataFrame) -> pd.DataFrame | None:
    """How far repeats of the control with equal seed are from their mean; None where there are no repeats."""
    deviations = control - control.T.groupby(level="seed").transform("mean").T
    several = [seed for seed, runs in control.T.groupby(level="seed") if len(runs) > 1]
    if not several:
        return None
    deviations = _smooth(deviations[several]).dropna()
    deviations = deviations.iloc[_thinned(len(deviations))]
    return pd.DataFrame({"low": deviations.min(axis=1), "high": deviations.max(axis=1)})


def _families(strategies: list[str]) -> list[list[str]]:
    """The strategies of each panel of differences: all in one, or, where they are many, stage by stage."""
    if len(strategies) <= CROWDED:
        return [strategies] if strategies else []
    families: dict[str, list[str]] = {}
    for strategy in strategies:
        stage = strategy.partition("_")[0]
        families.setdefault(stage if stage in ("zero1", "zero2", "zero3") else "others", []).append(strategy)
    return list(families.values())


def _scale_differences(axes: list[Axes], differences: dict[str, pd.DataFrame]) -> float | None:
    """Give the panels of differences one scale; return within what the logarithmic one is linear, None if it is not."""
    if not axes:
        return None
    sizes = np.concatenate([values.abs().to_numpy().ravel() for values in differences.values()])
    sizes = sizes[np.isfinite(sizes) & (sizes > 0)]
    if not sizes.size:
        for ax in axes:
            ax.set_ylim(-1, 1)
            ax.yaxis.set_major_locator(FixedLocator([0]))
            ax.annotate("identical at every step", (0.02, 0.9), xycoords="axes fraction", va="top", style="italic")
        return None
    largest = sizes.max()
    # The largest difference of each strategy in each tenth of the training: of noise these are all alike.
    heights = np.array([np.nanmax(part) for values in differences.values() for part in _tenths(values) if part.any()])
    for ax in axes:
        ax.set_ylim(-1.15 * largest, 1.15 * largest)
        ax.yaxis.set_major_locator(MaxNLocator(4, symmetric=True))
        ax.yaxis.set_major_formatter(lambda value, _: powers(value))
    if largest < ALIKE * heights.min():
        return None
    linear_within = 10.0 ** math.floor(math.log10(max(heights.min(), largest * 1e-4)))
    tick = 10.0 ** math.floor(math.log10(largest))
    for ax in axes:
        ax.set_yscale("symlog", linthresh=linear_within, linscale=0.5)
        ax.set_ylim(-2 * largest, 2 * largest)
        ax.yaxis.set_major_locator(FixedLocator([-tick, 0, tick]))
        ax.yaxis.set_minor_locator(NullLocator())
        ax.yaxis.set_major_formatter(lambda value, _: powers(value))
    return linear_within


def _tenths(values: pd.DataFrame) -> list[np.ndarray]:
    sizes = np.nan_to_num(values.abs().to_numpy())
    return [part for part in np.array_split(sizes, 10) if part.size]


def _num_steps(table: pd.DataFrame, steps: pd.DataFrame) -> pd.Series:
    """The steps with a loss of each run of the table; unknown where there are none."""
    return table["run_id"].map(steps.dropna(subset="loss").groupby("run_id").size())


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


def _alt(runs: pd.DataFrame, strategies: list[str], control: str, farthest: dict[str, float]) -> str:
    means = {s: runs[s].mean(axis=1).dropna() for s in strategies}
    first, last = means[control].iloc[0], means[control].iloc[-1]
    what = f"{len(strategies)} strategies" if len(strategies) > 1 else control
    words = f"Training loss of {what} over {len(runs)} steps; {control} goes from {three_digits(first)} to "
    words += f"{three_digits(last)}."
    if farthest:
        most, least = max(farthest, key=farthest.get), min(farthest, key=farthest.get)
        words += f" The largest difference to {control} at any step is {powers(farthest[most])}, by {most}"
        words += f"; the smallest is {powers(farthest[least])}, by {least}." if least != most else "."
    return words


def _caption(
    control: str, num_seeds: dict[str, int], families: list[list[str]], linear_within: float | None, noise: bool
) -> str:
    several = max(num_seeds.values()) > 1
    mean = "mean over seeds, repeats of a seed averaged" if several else "one seed, so that there is no band"
    caption = f"Training loss ({mean}; {counted(num_seeds.values(), 'seed')}), running mean over {SMOOTHED_STEPS} steps"
    caption += "; band: from the lowest to the highest seed" if several else ""
    caption += ", none for a strategy with one seed." if several and min(num_seeds.values()) == 1 else "."
    if families:
        caption += f" Below, the loss minus that of {control} with equal seed and step, smoothed alike"
        if linear_within:
            caption += f"; logarithmic, and linear within \N{PLUS-MINUS SIGN}{powers(linear_within)}"
        caption += f"; grey: repeats of {control} with equal seed against their mean." if noise else "."
    return caption
