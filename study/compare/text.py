"""What do the comparisons say, as Markdown for a terminal or a page of a repository?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from study.compare import differences as statistics
from study.compare import markdown, pairs
from study.compare import table as tidy
from study.compare.words import bytes_text

PLACE = ("box", "workload", "size", "precision")
WORK = (*PLACE, "global_batch_size")
APART = {"sequence_length": "length {:.0f}", "num_steps": "{:.0f} steps", "config_digest": "settings {:.8}"}
SHOWN_REASONS = 12  # of those that leave runs out; the rest is counted

DIFFERENCES = """\
Each strategy beside the control's runs of equal work and seed. n: the differences that an interval rests on.
Difference: relative to the control, with its 95 % interval. Margin: below it 95 of 100 pairs of equal runs of the
control differ, by a rule that was written when the first results were known; *no difference* is within it by two
one-sided tests, *higher* and *lower* have an interval that leaves out 0. Each interval is of one comparison: of twenty
without any effect, one is expected to leave out 0. Bytes are counted, and compared exactly."""
LARGEST = """\
For each strategy the largest global batch that fits. The work differs from row to row, so losses do not compare, and
nothing here compares with a table of equal work."""
SCALING = """\
Strong scaling: one global batch, and the tokens per second of each process over those of the base."""


def differences(folders: Sequence[Path], control: str) -> str:
    """Make the table of verdicts, metric by metric, and the list of what was left out."""
    runs = tidy.read(folders)
    tidy.check_control(runs, control)
    compared = statistics.compare(runs, control)
    lines = [f"# Differences from {control}", "", DIFFERENCES, ""]
    head = ["strategy", "processes", "n", control, "value", "difference", "margin", "verdict", "why"]
    for heading, metrics in _sections(compared, WORK):
        lines += [f"## {heading}", ""]
        for metric, rows in metrics.groupby("metric", sort=False):
            lines += [f"### {metric}", "", *markdown.markdown(head, map(_difference, rows.to_dict("records"))), ""]
    lines += _untimed(runs)
    left_out = pairs.pair(runs, control).refused.to_dict("records")
    if left_out:
        counted = Counter(run["reason"] + _message(run) for run in left_out).most_common()
        lines += [
            "## Not compared",
            "",
            *(f"- {n} run(s): {markdown.shown(why)}" for why, n in counted[:SHOWN_REASONS]),
        ]
        others = sum(n for _, n in counted[SHOWN_REASONS:])
        lines += [f"- and {others} for other reasons", ""] if others else [""]
    return "\n".join([*lines, f"Made by `{markdown.command('compare', folders)}`."])


def largest_batch(folders: Sequence[Path]) -> str:
    """Make the table of the largest batches that fit."""
    runs = tidy.read(folders)
    rows = pairs.largest_batch(runs)
    head = ["strategy", "processes", "largest batch", "next", "came out", "s/step", "tokens/s per process", "runs"]
    lines = ["# The largest batch that fits", "", LARGEST, ""]
    for heading, members in _sections(rows, PLACE):
        cells = [
            [row["strategy"], row["world_size"], _number(row["global_batch_size"], "none"),
             _number(row["next_batch_size"], ""), row["next_outcome"], _number(row["seconds_per_step"]),
             _number(row["tokens_per_second_per_gpu"]), row["num_runs" if row["outcomes"] == "ok" else "outcomes"]]
            for row in members.to_dict("records")
        ]  # fmt: skip
        lines += [f"## {heading}", "", *markdown.markdown(head, cells), ""]
    lines += _untimed(runs)
    return "\n".join([*lines, f"Made by `{markdown.command('compare --view largest-batch', folders)}`."])


def scaling(folders: Sequence[Path]) -> str:
    """Make the table of one process against several."""
    runs = tidy.read(folders)
    head = ["strategy", "processes", "tokens/s per process", "scaling efficiency", "base", "runs", "why none"]
    lines = ["# One process against several", "", SCALING, ""]
    for heading, members in _sections(pairs.scaling(runs), WORK):
        cells = [
            [row["strategy"], row["world_size"], _number(row["tokens_per_second_per_gpu"]),
             "" if pd.isna(row["scaling_efficiency"]) else f"{row['scaling_efficiency']:.0%}",
             row["base"], row["num_runs"], "" if pd.isna(row["why"]) else row["why"]]
            for row in members.to_dict("records")
        ]  # fmt: skip
        lines += [f"## {heading}", "", *markdown.markdown(head, cells), ""]
    lines += _untimed(runs)
    without = runs[runs["status"] != "ok"]
    if len(without):
        ended = [
            f"- {run['run_id']}: {markdown.shown(run['status'] + _message(run))}" for run in without.to_dict("records")
        ]
        lines += ["## Without a result", "", *ended, ""]
    return "\n".join([*lines, f"Made by `{markdown.command('compare --view scaling', folders)}`."])


def _sections(rows: pd.DataFrame, place: Sequence[str]) -> Iterator[tuple[str, pd.DataFrame]]:
    """The rows of one thing trained after the other, under a heading that says all that tells it apart."""
    several = rows.groupby(list(place), dropna=False)[[name for name in APART if name in rows]].nunique()
    apart = [name for name, most in several.max().items() if most > 1]
    for values, members in rows.groupby([*place, *apart], sort=False, dropna=False):
        known = {name: value for name, value in zip([*place, *apart], values, strict=True) if not pd.isna(value)}
        words = [f"{known['workload']} {known['size']}", known.get("precision", "unknown precision")]
        words += [f"batch {known['global_batch_size']:.0f}"] if "global_batch_size" in place else []
        words += [APART[name].format(known[name]) for name in apart if name in known]
        yield ", ".join([*words, known["box"]]), members


def _untimed(runs: pd.DataFrame) -> list[str]:
    """How many runs have no time in these tables, and why, in one line; nothing where all have one."""
    ok = runs[runs["status"] == "ok"]
    reasons = Counter(ok["why_untimed"].dropna()).most_common()
    if not reasons:
        return []
    total = sum(n for _, n in reasons)
    return [f"Without a time: {total} of {len(ok)} runs ({'; '.join(f'{n}: {why}' for why, n in reasons)}).", ""]


def _message(run: dict[str, Any]) -> str:
    """What is known of why a run has no result, in parentheses."""
    return "" if run["status"] == "ok" or pd.isna(run["message"]) else f" ({run['message']})"


def _difference(row: dict[str, Any]) -> list[Any]:
    show = bytes_text if row["metric"].endswith("_bytes") else _number
    relative = "" if pd.isna(row["relative_difference"]) else f"{row['relative_difference']:+.3%}"
    if not pd.isna(row["relative_low"]):
        relative += f" ({row['relative_low']:+.3%} to {row['relative_high']:+.3%})"
    margin = row["relative_margin"]
    mine, theirs = row["world_size"], row["control_world_size"]
    return [
        row["strategy"],
        mine if mine == theirs else f"{mine} against {theirs}",
        row["n_pairs"],
        *("unknown" if pd.isna(row[name]) else show(row[name]) for name in ("control_value", "value")),
        relative,
        "" if pd.isna(margin) else f"{margin:.3%}",
        row["verdict"],
        row["why"],
    ]


def _number(value: float, unknown: str = "unknown") -> str:
    return unknown if pd.isna(value) else f"{value:.4g}"
