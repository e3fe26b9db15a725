"""What do the comparisons say, as Markdown for a terminal or a page of a repository?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from study.compare import differences as statistics
from study.compare import pairs, records
from study.compare import table as tidy
from study.compare.figures.drawing import bytes_text

PLACE = ("box", "workload", "size", "precision", "global_batch_size")
SHOWN_REASONS = 12  # of those that leave runs out; the rest is counted

DIFFERENCES = """\
Each strategy beside the control's runs of equal work and seed. n: the differences that an interval rests on.
Difference: relative to the control, with its 95 % interval. Margin: how far two equal runs of the control are from one
another, which was fixed before; *no difference* is within it by two one-sided tests, *higher* and *lower* have an
interval that leaves out 0."""
LARGEST = """\
For each strategy the largest global batch that fits. The work differs from row to row, so losses do not compare, and
nothing here compares with a table of equal work."""
SCALING = """\
Strong scaling: one global batch, and the tokens per second of each process over those of the base."""


def differences(folders: Sequence[Path], control: str) -> str:
    """Make the table of verdicts, metric by metric, and the list of what was left out."""
    runs = tidy.read(folders)
    compared = statistics.compare(runs, control)
    lines = [f"# Differences from {control}", "", DIFFERENCES, ""]
    head = ["strategy", "processes", "n", control, "value", "difference", "margin", "verdict", "why"]
    for place, metrics in compared.groupby(list(PLACE), sort=False):
        lines += [f"## {_place(place)}", ""]
        for metric, rows in metrics.groupby("metric", sort=False):
            lines += [f"### {metric}", "", *records.markdown(head, map(_difference, rows.to_dict("records"))), ""]
    left_out = pairs.pair(runs, control).refused
    if len(left_out):
        counted = left_out.groupby("reason", sort=False).size().sort_values(ascending=False)
        lines += ["## Not compared", "", *(f"- {n} run(s): {why}" for why, n in counted[:SHOWN_REASONS].items())]
        lines += [f"- and {counted[SHOWN_REASONS:].sum()} for other reasons"] * (len(counted) > SHOWN_REASONS) + [""]
    return "\n".join([*lines, f"Made by `{records.command('compare', folders)}`."])


def largest_batch(folders: Sequence[Path]) -> str:
    """Make the table of the largest batches that fit."""
    rows = pairs.largest_batch(tidy.read(folders))
    head = ["strategy", "processes", "largest batch", "next", "came out", "s/step", "tokens/s per process", "runs"]
    lines = ["# The largest batch that fits", "", LARGEST, ""]
    for place, members in rows.groupby([name for name in PLACE if name != "global_batch_size"], sort=False):
        cells = [
            [
                row["strategy"],
                row["world_size"],
                _number(row["global_batch_size"], "none"),
                _number(row["next_batch_size"], ""),
                row["next_outcome"],
                _number(row["seconds_per_step"]),
                _number(row["tokens_per_second_per_gpu"]),
                row["num_runs"],
            ]
            for row in members.to_dict("records")
        ]
        lines += [f"## {_place(place)}", "", *records.markdown(head, cells), ""]
    return "\n".join([*lines, f"Made by `{records.command('compare --view largest-batch', folders)}`."])


def scaling(folders: Sequence[Path]) -> str:
    """Make the table of one process against several."""
    rows = pairs.scaling(tidy.read(folders))
    head = ["strategy", "processes", "tokens/s per process", "scaling efficiency", "base", "runs", "why none"]
    lines = ["# One process against several", "", SCALING, ""]
    for place, members in rows.groupby(list(PLACE), sort=False):
        cells = [
            [
                row["strategy"],
                row["world_size"],
                _number(row["tokens_per_second_per_gpu"]),
                "" if pd.isna(row["scaling_efficiency"]) else f"{row['scaling_efficiency']:.0%}",
                row["base"],
                row["num_runs"],
                "" if pd.isna(row["why"]) else row["why"],
            ]
            for row in members.to_dict("records")
        ]
        lines += [f"## {_place(place)}", "", *records.markdown(head, cells), ""]
    return "\n".join([*lines, f"Made by `{records.command('compare --view scaling', folders)}`."])


def _place(place: Sequence[Any]) -> str:
    box, workload, size, precision, *batch = place
    return ", ".join([f"{workload} {size}", precision, *(f"batch {size}" for size in batch), box])


def _difference(row: dict[str, Any]) -> list[Any]:
    show = bytes_text if row["metric"].endswith("_bytes") else _number
    relative = "" if pd.isna(row["relative_difference"]) else f"{row['relative_difference']:+.3%}"
    if not pd.isna(row["relative_low"]):
        relative += f" ({row['relative_low']:+.3%} to {row['relative_high']:+.3%})"
    margin = row["relative_margin"]
    return [
        row["strategy"],
        row["world_size"],
        row["n_pairs"],
        *("unknown" if pd.isna(row[name]) else show(row[name]) for name in ("control_value", "value")),
        relative,
        "" if pd.isna(margin) else f"{margin:.3%}",
        row["verdict"],
        row["why"],
    ]


def _number(value: float, unknown: str = "unknown") -> str:
    return unknown if pd.isna(value) else f"{value:.4g}"
