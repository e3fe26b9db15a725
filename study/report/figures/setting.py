"""What is a figure of? What its runs have in common, and which of them have no value to draw."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any, NamedTuple

import pandas as pd

from study.compare.facts import is_disturbed
from study.compare.words import in_order, processes
from study.report.words import counted, listed

# What all runs of a figure have in common.
IDENTITY = ("workload", "size", "precision", "global_batch_size", "world_size", "num_steps", "config_digest", "box")
ALIKE = ("data_digest", "libraries")  # these too, but they are in no figure's name
OF_TIME = ("seconds_per_step", "tokens_per_second_per_gpu", "both")  # columns that a disturbed run has no value in


class Setting(NamedTuple):
    words: str  # for the caption
    slug: str  # for the name


def setting(table: pd.DataFrame, varying: str | None = None) -> Setting:
    """What all runs of a figure have in common.

    Raises ValueError where there is no run, or where they differ in more than strategy, seed and `varying`: a figure is
    of one box and one thing trained. `single` is one process beside any number.
    """
    if table.empty:
        raise ValueError("no run to draw; a filter before the figure has left none")
    facts: dict[str, Any] = {}
    for column in (*IDENTITY, *ALIKE):
        if column not in table or column == varying:  # comparisons have not all of them
            continue
        rows = table[table["strategy"] != "single"] if column == "world_size" else table
        values = sorted(rows[column].dropna().unique())
        if len(values) > 1:
            differing = listed([str(value)[:60] for value in values])
            raise ValueError(f"{column} is {differing}; a figure is of one: filter the runs first")
        if column in IDENTITY:
            facts[column] = values[0] if values else None
    if facts.get("world_size") is None and varying != "world_size":
        facts["world_size"] = table["world_size"].max()
    parts = [f"{facts['workload']} {facts['size']}"]
    parts += [facts["precision"]] if facts.get("precision") else []
    parts += [f"{facts['global_batch_size']:.0f} sequences per step"] if facts.get("global_batch_size") else []
    if facts.get("world_size"):
        beside = " (single: 1)" if facts["world_size"] != 1 and "single" in set(table["strategy"]) else ""
        parts.append(processes(facts["world_size"]) + beside)
    words = f" Setting: {', '.join(parts)}; {facts['box']}."
    if facts.get("config_digest"):
        facts["config_digest"] = facts["config_digest"][:8]
    named = [value if isinstance(value, str) else f"{value:.0f}" for value in facts.values() if value]
    slug = re.sub(r"[^a-z0-9]+", "-", " ".join(named).lower())
    return Setting(words, slug.strip("-"))


def with_results(table: pd.DataFrame, column: str) -> pd.DataFrame:
    """Keep a column's values of runs that are ok: the peak of one that ran out of memory is where it broke off.

    Raises ValueError where none is left, because there is nothing to draw then.
    """
    table = table.assign(**{column: table[column].where(table["status"] == "ok")})
    if table[column].isna().all():
        reasons = ", ".join(f"{status} ({count})" for status, count in Counter(table["status"]).items())
        raise ValueError(f"no run that is ok has {column}; the runs are {reasons}")
    return table


def unmeasured(table: pd.DataFrame, column: str) -> dict[str, str]:
    """Say of each strategy how many of its runs have no value and why: they are named, and never drawn as 0."""
    words = {}
    for strategy, runs in table.groupby("strategy", sort=False):
        without = runs[runs[column].isna()]
        reasons = Counter(_why(run, column) for run in without.to_dict("records"))
        if len(reasons) == 1 and len(without) == len(runs):
            words[strategy] = next(iter(reasons))
        elif reasons:
            words[strategy] = ", ".join(f"{count} of {len(runs)} {reason}" for reason, count in reasons.items())
    return {strategy: words[strategy] for strategy in in_order(words)}


def _why(run: dict[str, Any], column: str) -> str:
    if run["status"] != "ok":
        return str(run["status"]).replace("_", " ")
    return "disturbed" if column in OF_TIME and is_disturbed(run.get("share_of_others")) else "not measured"


def without_value(missing: dict[str, str]) -> str:
    """The sentence about them in a caption or alternative text; empty where there are none."""
    return f" Without a value: {'; '.join(f'{name}: {why}' for name, why in missing.items())}." if missing else ""


def crowded(measured: pd.DataFrame) -> str:
    """A warning where processes had to share a core or a GPU; empty otherwise."""
    world_sizes = sorted(measured.loc[measured["oversubscribed"].astype(bool), "world_size"].unique())
    where = f"The {listed(world_sizes)} processes shared" if world_sizes else ""
    return f" {where} cores or GPUs: these times say nothing of the strategies." if world_sizes else ""


def runs_counted(measured: pd.DataFrame, *columns: str) -> str:
    """How many runs there are of each value of these columns: `n = 3 runs`."""
    return counted(measured.groupby(list(columns)).size(), "run")
