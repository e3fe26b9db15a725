"""Sentences of the notebooks: the answer at the top of each, computed from the records."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import SupportsFloat

import pandas as pd

from study.formatting import gib
from study.report import tables
from study.report.captions import joined


def bullets(lines: Iterable[str]) -> str:
    """Write lines as a Markdown list."""
    return "\n".join(f"- {line}" for line in lines)


def small(value: float) -> str:
    """Write a small relative difference in one digit and a power of ten: 1e-7; zero as 0."""
    return "0" if value == 0 else f"{value:.0e}".replace("e-0", "e-")


def percent(share: float) -> str:
    """Write a share in whole per cent."""
    return f"{100 * share:.0f} %"


def least_and_most(ratios: pd.Series) -> str:
    """Name the smallest and the largest ratio and their strategies: "0.56 (fsdp2) to 1.57 (zero3) times"."""
    ordered = ratios.dropna().sort_values()
    ends = [f"{ordered.iloc[at]:.2f} ({ordered.index[at]})" for at in (0, -1)]
    return f"{' to '.join(dict.fromkeys(ends))} times"


def comparison(rows: pd.DataFrame, control: str) -> str:
    """Compare the strategies of one setting with the control: peak memory, step time and loss."""
    ratios = tables.relative(rows, control)
    others = ratios.drop(control)
    if others.empty:
        return f"Only {control} was run in this setting."
    lines = []
    if "peak memory" in others and others["peak memory"].notna().any():
        times = least_and_most(others["peak memory"])
        lines.append(f"The other strategies use {times} the peak tensor memory of {control}.")
    if "step time" in others and others["step time"].notna().any():
        lines.append(f"A step takes {least_and_most(others['step time'])} as long as under {control}.")
    return " ".join([*lines, losses(others["loss difference"], rows["steps"].max(), control)])


def losses(differences: pd.Series, steps: float, control: str) -> str:
    """Say how far training losses are from the control's after the last step, and after how many steps that is."""
    differences = differences.dropna()
    if differences.empty:
        return ""
    after = f"After {steps:.0f} steps"
    if differences.max() == 0:
        return f"{after}, the training losses of all strategies are equal to {control}'s."
    furthest = f"{small(differences.max())} ({differences.idxmax()})"
    return f"{after}, the training losses differ from {control}'s by at most {furthest}, in relative terms."


def losses_by_seed(name: str, differences: pd.DataFrame, steps: float, control: str) -> str:
    """Say how far losses are from the control's, seed by seed. `differences`: a row per seed, a column per strategy."""
    worst = joined(f"{small(row.max())} with seed {seed}" for seed, row in differences.iterrows())
    return (
        f"**{name}.** After {steps:.0f} steps, the largest relative difference of a strategy's training loss from "
        f"{control}'s is {worst}."
    )


def memory(peaks: pd.DataFrame, control: str) -> str:
    """Compare peaks with the control's. `peaks`: a row per strategy, GiB of tensors and of whole processes."""
    own = peaks.loc[control]
    ratios = (peaks["peak_gib"] / own["peak_gib"]).drop(control).dropna()
    text = f"At the peak of a step, a process under {control} uses {own['peak_gib']:.2f} GiB for tensors."
    if ratios.empty:
        return text
    text += f" {(ratios < 1).sum()} of the {len(ratios)} other strategies use less: {least_and_most(ratios)} as much."
    whole = (peaks["peak_process_gib"] / own["peak_process_gib"]).drop(control).dropna()
    if len(whole):
        text += f" A whole process, with Python and its libraries, uses {least_and_most(whole)} as much."
    return text


def more_processes(peaks: pd.DataFrame) -> str:
    """Say by how much peaks fall. `peaks`: a row per strategy, a column per number of processes."""
    fewest, most = peaks.columns.min(), peaks.columns.max()
    falls = (1 - peaks[most] / peaks[fewest]).dropna().sort_values()
    if fewest == most or falls.empty:
        return "No strategy was run on two different numbers of processes."
    least, best = (f"{percent(falls.iloc[at])} under {falls.index[at]}" for at in (0, -1))
    return (
        f"From {fewest} to {most} processes, with the same batch, the peak memory of a process falls by {best} (the "
        f"largest reduction) and by {least} (the smallest)."
    )


def outcomes(runs: pd.DataFrame) -> str:
    """Say how many runs finished."""
    finished = int((runs["status"] == "ok").sum())
    if finished == len(runs):
        return f"All {len(runs)} runs finished."
    return f"{finished} of {len(runs)} runs finished. These did not:"


def headroom(usable_bytes: SupportsFloat) -> str:
    """Label the line at the usable memory of a GPU."""
    return f"usable: {gib(usable_bytes, 0)} GiB"


def releases(package: str, counts: pd.DataFrame, cells: int) -> str:
    """Say how many releases have a case that trains wrongly or crashes. `counts`: a row per release, oldest first."""
    bad = counts["wrong"] + counts["crashed"]
    return (
        f"**In {(bad > 0).sum()} of {len(bad)} examined releases of {package}, at least one case trains wrongly "
        "without an error, or crashes.** "
        f"Of the {cells} cases that every release was tested with, {bad.iloc[-1]} fail in the newest release, "
        f"{bad.index[-1]}. The worst release is {bad.idxmax()}, in which {bad.max()} fail."
    )


def crashes(versions: Mapping[str, Collection[str]]) -> str:
    """List error messages with the number of crashes and the releases. `versions`: by message, one per crash."""
    lines = []
    for message, of in versions.items():
        names = " to ".join(dict.fromkeys([next(iter(of)), [*of][-1]]))
        lines.append(f"{names}, {len(of)} crashes: `{message}`")
    return f"Error messages of the crashes:\n\n{bullets(lines)}" if lines else "No case crashed."


def untimed(reasons: pd.Series) -> str:
    """List why runs have no value, most frequent reason first."""
    lines = [f"{count} rows: {reason}" for reason, count in reasons.value_counts().items()]
    return f"Rows without a value, and why:\n\n{bullets(lines)}" if lines else ""


def by_strategy(names: Iterable[str], text: str) -> str:
    """Put strategies in front of a text: "`zero2` and `zero3`: text"."""
    return f"{joined(f'`{name}`' for name in names)}: {text}"


def page_body(page: str) -> str:
    """Take a page of `compare --view` into a notebook: without its title, its headings one level deeper."""
    lines = [line for line in page.splitlines() if not line.startswith("# ")]
    return "\n".join(f"#{line}" if line.startswith("##") else line for line in lines).strip()
