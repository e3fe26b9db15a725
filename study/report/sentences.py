"""Make the sentences that begin the notebooks and answer their questions. They are computed from the records."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from study.report import captions, tables
from study.report.captions import joined
from zero_study import terminal
from zero_study.terminal import whole_percent as whole_percent

DEFAULT_BUCKET = 500_000_000  # elements: DeepSpeed's default for `reduce_bucket_size`


def scientific(value: float) -> str:
    """Format a small relative difference with one digit and a power of ten, such as 1e-7. Zero is "0"."""
    return terminal.scientific(value, 1)


def bullets(lines: Iterable[str]) -> str:
    """Format lines as a Markdown list."""
    return "\n".join(f"- {line}" for line in lines)


def least_and_most(ratios: pd.Series) -> str:
    """Describe the smallest and the largest ratio: "between 0.56 times (fsdp2) and 1.57 times (zero3)"."""
    ordered = ratios.dropna().sort_values()
    ends = list(dict.fromkeys(f"{ordered.iloc[at]:.2f} times ({ordered.index[at]})" for at in (0, -1)))
    return f"between {ends[0]} and {ends[1]}" if len(ends) == 2 else ends[0]


def comparison(rows: pd.DataFrame, control: str) -> str:
    """Return sentences that compare the strategies of a setting with the baseline: peak memory, step time and loss."""
    ratios = tables.relative(rows, control)
    others = ratios.drop(control)
    if others.empty:
        return f"Only {control} was run with these options."
    lines = []
    if "peak memory" in others and others["peak memory"].notna().any():
        times = least_and_most(others["peak memory"])
        lines.append(f"The peak tensor memory of the other strategies is {times} that of {control}.")
    if "step time" in others and others["step time"].notna().any():
        lines.append(step_time(others["step time"], control))
    return " ".join([*lines, losses(others["loss difference"], rows["steps"].max(), control)])


def step_time(ratios: pd.Series, control: str) -> str:
    """Return a sentence about the step times of the strategies relative to the baseline."""
    return f"A step takes {least_and_most(ratios)} as long as a step under {control}."


def losses(differences: pd.Series, steps: float, control: str) -> str:
    """Return a sentence about the largest relative difference from the baseline's training loss after the last step.

    `differences` has a value per strategy. `steps` is the number of steps. The sentence is empty without values.
    """
    differences = differences.dropna()
    if differences.empty:
        return ""
    after = f"After {'only ' if steps <= 10 else ''}{steps:.0f} steps"
    if differences.max() == 0:
        return f"{after}, the training losses of all strategies are equal to {control}'s."
    furthest = f"{scientific(differences.max())} ({differences.idxmax()})"
    return f"{after}, the largest relative difference from {control}'s training loss is {furthest}."


def losses_by_seed(name: str, differences: pd.DataFrame, steps: float, control: str) -> str:
    """Return a sentence about the largest relative difference from the baseline's training loss for each seed.

    `differences` has a row per seed and a column per strategy. `name` is the bold beginning of the sentence.
    """
    by_seed = {seed: scientific(row.max()) for seed, row in differences.iterrows()}
    worst = joined(f"{value} with seed {seed}" for seed, value in by_seed.items())
    if len(by_seed) > 1 and len(set(by_seed.values())) == 1:
        worst = f"{next(iter(by_seed.values()))} with each of {len(by_seed)} seeds"
    return (
        f"**{name}.** After {steps:.0f} steps, the largest relative difference of a strategy's training loss from "
        f"{control}'s is {worst}."
    )


def memory(peaks: pd.DataFrame, control: str) -> str:
    """Return sentences that compare the peak memory of the strategies with the baseline's.

    `peaks` has a row per strategy, and columns in GiB for tensors (`peak_gib`) and whole processes
    (`peak_process_gib`).
    """
    own = peaks.loc[control]
    ratios = (peaks["peak_gib"] / own["peak_gib"]).drop(control).dropna()
    text = f"Under {control}, a process uses at most {own['peak_gib']:.2f} GiB for tensors during a step."
    if ratios.empty:
        return text
    text += (
        f" Of the {len(ratios)} other strategies, {(ratios < 1).sum()} use less tensor memory than {control}. These "
        f"{len(ratios)} strategies use {least_and_most(ratios)} as much as {control}."
    )
    whole = (peaks["peak_process_gib"] / own["peak_process_gib"]).drop(control).dropna()
    if len(whole):
        text += (
            f" The memory of a whole process, with Python and its libraries, is {least_and_most(whole)} that of a "
            f"process under {control}."
        )
    return text


def crossings(rows: pd.DataFrame, control: str) -> str:
    """Return sentences about the model size from which on each strategy uses less memory than the baseline.

    `rows` are the rows of `tables.crossings` for one setting.
    """
    by_size = rows.groupby("measured", sort=False)["strategy"].agg(joined)
    places = {"from the smallest": 0, "not up to the largest": 2}  # in between: with larger models
    by_size = by_size.loc[sorted(by_size.index, key=lambda size: places.get(size, 1))]
    lines = []
    for size, names in by_size.items():
        if size == "not up to the largest":
            lines.append(
                f"With the largest tested model, these strategies use at least as much memory as {control}: {names}."
            )
        elif size == "from the smallest":
            lines.append(f"With every tested model, these strategies use less memory than {control}: {names}.")
        else:
            lines.append(
                f"With the {size} model and all larger ones, these also use less memory than {control}: {names}."
            )
    return " ".join(lines)


def more_processes(peaks: pd.DataFrame) -> str:
    """Return a sentence about how much the peak memory falls if more processes share the same batch.

    `peaks` has a row per strategy and a column per number of processes.
    """
    fewest, most = peaks.columns.min(), peaks.columns.max()
    falls = (1 - peaks[most] / peaks[fewest]).dropna().sort_values()
    if fewest == most or falls.empty:
        return "No strategy was run on two different numbers of processes."
    least, best = (f"{whole_percent(falls.iloc[at])} under {falls.index[at]}" for at in (0, -1))
    return (
        f"If {most} processes instead of {fewest} share the same batch, the peak memory of a process falls by {best}, "
        f"which is the largest reduction, and by {least}, which is the smallest."
    )


def outcomes(runs: pd.DataFrame) -> str:
    """Return a sentence about how many runs finished."""
    finished = int((runs["status"] == "ok").sum())
    if finished == len(runs):
        return f"All {len(runs)} runs finished."
    return f"{finished} of {len(runs)} runs finished. These runs did not:"


def result(every: pd.DataFrame, rows: pd.DataFrame, control: str) -> str:
    """Return the result of a study: how many strategies trained, and the losses and peaks of one setting.

    `every` are all runs of the study. `rows` are the finished runs of the setting, with any number of processes.
    """
    statuses = every.groupby("strategy")["status"].agg(list)
    failed = every[every["status"] != "ok"].drop_duplicates("strategy")
    reasons = [_failure(run, statuses[run["strategy"]]) for run in failed.to_dict("records")]
    why = f" ({'; '.join(reasons)})" if reasons else ""
    text = f"{sum('ok' in of_one for of_one in statuses)} of {len(statuses)} strategies trained{why}."
    same = rows[rows["processes"].isin(rows.loc[rows["strategy"] == control, "processes"])]
    return " ".join([text, *_equal_losses(rows), *_least_memory(same, control), *_times(same, control)])


def _failure(run: Mapping[Any, Any], statuses: Sequence[str]) -> str:
    """Return why a strategy was skipped, or how many of its runs have the same status as this one."""
    reason = re.split(r"[:,.] ", run["message"] or "")[0]
    if reason.startswith(f"{run['strategy']} "):
        return reason
    status = run["status"]
    num_runs = terminal.count(len(statuses), "run")
    return f"{run['strategy']}: {status.replace('_', ' ')} in {statuses.count(status)} of {num_runs}"


def _equal_losses(rows: pd.DataFrame) -> list[str]:
    """Return a sentence that says whether the losses after the last step agree to the four digits that tables show."""
    losses = rows.groupby(["seed", "strategy"])["loss"].mean().unstack().dropna()
    if losses.empty:
        return []
    counts = joined(sorted(rows["processes"].unique()))
    steps = f"after {rows['steps'].max():.0f} steps on {counts} {'process' if counts == '1' else 'processes'}"
    if (losses.max(axis=1) - losses.min(axis=1)).max() < 5e-5:
        values = joined(f"{loss:.4f}" for loss in losses.mean(axis=1))
        return [f"{captions.model(rows)} has the same loss {steps} under {losses.shape[1]} strategies: {values}."]
    ordered = losses.mean().sort_values()
    ends = joined(f"{ordered.iloc[at]:.4f} ({ordered.index[at]})" for at in (0, -1))
    return [f"The losses of {captions.model(rows)} {steps} differ: they are between {ends}."]


def _least_memory(rows: pd.DataFrame, control: str) -> list[str]:
    """Return sentences about the lowest peak, and about the peaks of ZeRO with default and with smaller buckets."""
    peaks = tables.mean(rows, "peak_gib")["peak_gib"].dropna()
    if control not in peaks or len(peaks) == 1:
        return []
    ratios = peaks / peaks[control]
    least = "" if peaks.idxmin() == control else f", {ratios.min():.2f} times that of {control}"
    lines = [f"{peaks.idxmin()} needs the least memory{least}."]
    buckets = {run.strategy: run.record.proof.reduce_bucket_size for run in rows.itertuples() if run.record.proof}
    default = [name for name in peaks.index if buckets.get(name) == DEFAULT_BUCKET]
    smaller = [name for name in peaks.index if 0 < (buckets.get(name) or 0) < DEFAULT_BUCKET]
    if default and smaller:
        lines.append(
            f"DeepSpeed's default bucket has {DEFAULT_BUCKET / 1e6:.0f} million elements for a model of any size, so "
            f"that ZeRO needs {peaks[default].min():.2f} to {peaks[default].max():.2f} GiB here. With smaller buckets, "
            f"it needs {least_and_most(ratios[smaller])} as much as {control}."
        )
    return lines


def _times(rows: pd.DataFrame, control: str) -> list[str]:
    """Return a sentence about the time of a step relative to the control's, if other programs did not disturb both."""
    seconds = tables.mean(rows, "step_seconds")["step_seconds"].dropna()
    if control not in seconds or len(seconds) == 1:
        return []
    ratios = (seconds / seconds[control]).drop(control)
    return [f"A step of {captions.model(rows)} takes {least_and_most(ratios)} as long as under {control}."]


def releases(package: str, counts: pd.DataFrame, cells: int) -> str:
    """Return sentences about the releases of a package that train wrongly or crash in some cases.

    `counts` has a row per release, oldest first, with the number of cases that are "wrong" or "crashed". `cells` is the
    number of cases.
    """
    bad = counts["wrong"] + counts["crashed"]
    wrong, crashed = ((counts[result] > 0).sum() for result in ("wrong", "crashed"))

    def all_or(number: int) -> str:
        return f"all {number}" if number == len(bad) else str(number)

    newest, worst = (_failures(counts.loc[name]) for name in (bad.index[-1], bad.idxmax()))
    return (
        f"**This project examined {len(bad)} releases of {package}. In {all_or(wrong)} of them, at least one case "
        f"trains wrongly without an error message. In {all_or(crashed)} of them, at least one case crashes.** "
        f"Every release was tested with the same {cells} cases. In the newest release, {bad.index[-1]}, {newest}. "
        f"The release with the most failures is {bad.idxmax()}: there, {worst}."
    )


def _failures(counts: pd.Series) -> str:
    words = {
        "wrong": "case trains wrongly" if counts["wrong"] == 1 else "cases train wrongly",
        "crashed": "case crashes" if counts["crashed"] == 1 else "cases crash",
    }
    failures = [f"{counts[result]} {word}" for result, word in words.items() if counts[result]]
    return " and ".join(failures) or "no case fails"


def engines_of(names: Collection[str]) -> str:
    """Return a sentence about the engines and precisions of the cases that fail in the newest release.

    `names` are names of conformance cases. The sentence is empty if there are none.
    """
    used = sorted({" in ".join(name.split("/")[:2]) for name in names})
    return f"All cases that fail in the newest release use {joined(used)}." if used else ""


def crashes(versions: Mapping[str, Collection[str]]) -> str:
    """Return a list of error messages with the number of crashes and the releases.

    `versions` has, for each message, the release of each crash.
    """
    lines = []
    for message, of in versions.items():
        names = " to ".join(dict.fromkeys([next(iter(of)), [*of][-1]]))
        lines.append(f"{len(of)} crashes in releases {names}: `{message}`")
    return f"The crashes in the figure have these error messages:\n\n{bullets(lines)}" if lines else "No case crashed."


def untimed(reasons: pd.Series) -> str:
    """List why combinations of model and strategy have no value, with the most frequent reason first."""
    lines = [f"{count} combinations, reason: {reason}" for reason, count in reasons.value_counts().items()]
    return f"These combinations of a model and a strategy have no value:\n\n{bullets(lines)}" if lines else ""


def by_strategy(names: Iterable[str], text: str) -> str:
    """Put the strategies that a text concerns in front of it, such as "`zero2` and `zero3`: text"."""
    return f"{joined(f'`{name}`' for name in names)}: {text}"


def page_body(page: str) -> str:
    """Adapt a page of `compare --view` to a notebook: without its title, and with headings one level deeper."""
    lines = [line for line in page.splitlines() if not line.startswith("# ")]
    return "\n".join(f"#{line}" if line.startswith("##") else line for line in lines).strip()


# ---------------------------------------------------------------- models on machines, from study/report/by_machine.py


def cost(row: Mapping[str, Any]) -> str:
    """Return the US dollars per billion tokens with their interval, such as "13 (8.3 to 20)"."""
    value, low, high = (
        f"{row[name]:.2g}" if row[name] < 99.5 else f"{row[name]:,.0f}" for name in ("cost", "cost_low", "cost_high")
    )
    return f"{value} (at least {low})" if math.isnan(row["cost_high"]) else f"{value} ({low} to {high})"


def fitting(best: pd.DataFrame, models: Iterable[str], machine: str) -> str:
    """Return sentences about which models a machine can train, and with which recommended strategy.

    `best` is the table of `by_machine.best`, in which a model that does not fit on a machine has no row.
    """
    rows = best[best["machine"] == machine].set_index("model")
    names = [f"{model} with {_strategy(rows.loc[model])}" for model in models if model in rows.index]
    others = [model for model in models if model not in rows.index]
    text = f"{machine} can train {joined(names)}." if names else ""
    return f"{text} No strategy shown fits {joined(others)} on this machine." if others else text


def _strategy(row: pd.Series) -> str:
    change = f" (recommended change: `{row['change']}`)" if row["change"] else ""
    return f"`{row['strategy']}`{change}"


def faster_and_cheaper(best: pd.DataFrame, machine: str, other: str) -> str:
    """Return sentences that compare the speed and the cost of two machines for the models that fit on both.

    Two costs differ only if their intervals do not overlap.
    """
    columns = ["speed", "cost", "cost_low", "cost_high"]
    first, second = (best[best["machine"] == name].set_index("model")[columns] for name in (machine, other))
    both = first.add_suffix("_first").join(second.add_suffix("_second"), how="inner")
    both = both.dropna(subset=["cost_first", "cost_second"])
    if both.empty:
        return f"No model fits on both {machine} and {other}, so their costs cannot be compared."
    speeds = (both["speed_second"] / both["speed_first"]).sort_values()
    costs = both["cost_second"] / both["cost_first"]
    ends = list(dict.fromkeys(f"{speeds.iloc[at]:.3g} times ({speeds.index[at]})" for at in (0, -1)))
    parts = [f"{cost:.2f} times ({model})" for model, cost in costs.items()]
    text = (
        f"{other} {'processes' if other.startswith('1 x') else 'process'} {'between ' * (len(ends) > 1)}{joined(ends)} "
        f"as many tokens per second as {machine}. On {other}, a billion tokens cost {joined(parts)} as much as on "
        f"{machine}."
    )
    overlapping = [model for model, row in both.iterrows() if _overlap(row)]
    decided = both.drop(index=overlapping)
    for name, condition in ((machine, "cost_first < cost_second"), (other, "cost_first > cost_second")):
        if len(models := decided.query(condition).index):
            text += f" The cost on {name} is lower for {joined(models)}, because the intervals do not overlap."
    if overlapping:
        text += (
            f" For {joined(overlapping)}, the intervals of the two costs overlap, so these numbers do not show which "
            "machine is cheaper."
        )
    return text


def _overlap(row: pd.Series) -> bool:
    """Return whether the intervals of two costs overlap. An interval without an upper end overlaps all above it."""
    ends = {side: (row[f"cost_low_{side}"], row[f"cost_high_{side}"]) for side in ("first", "second")}
    (low, high), (other_low, other_high) = ends["first"], ends["second"]
    return not (high < other_low or other_high < low)


def cheapest(best: pd.DataFrame, model: str) -> str:
    """Return a sentence that names the machine with the lowest cost for a model, and those that may cost as little."""
    rows = best[best["model"] == model].dropna(subset=["cost"]).sort_values("cost")
    if rows.empty:
        return f"**{model}**: none of the strategies shown fits on any of the machines."
    lowest = rows.iloc[0]
    text = (
        f"**{model}**: the lowest {lowest['speed_source']} cost is {cost(lowest)} US dollars per billion tokens, on "
        f"{lowest['machine']} with `{lowest['strategy']}`."
    )
    limit = lowest["cost_high"]
    near = [row["machine"] for _, row in rows.iloc[1:].iterrows() if not row["cost_low"] > limit]
    higher = [row["machine"] for _, row in rows.iloc[1:].iterrows() if row["cost_low"] > limit]
    text += f" The cost intervals of {joined(near)} overlap with the interval of the lowest cost." if near else ""
    return text + (
        f" The cost intervals of {joined(higher)} are above the interval of the lowest cost." if higher else ""
    )


def unpublished(others: pd.DataFrame, advices: Iterable[tuple[str, str]]) -> str:
    """Return a sentence that names the models and machines for which the page shows no published measurement."""
    known = set(zip(others["model"], others["machine"], strict=True))
    missing: dict[str, list[str]] = {}
    for model, machine in advices:
        if (model, machine) not in known:
            missing.setdefault(model, []).append(machine)
    parts = [f"{model} on {joined(machines)}" for model, machines in missing.items()]
    return f"No measurement is known for {'; '.join(parts)}." if parts else "Measurements are known for every machine."
