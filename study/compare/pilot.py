"""How far apart are a control's runs of one seed, and how many seeds does a margin need? Read before a study is fixed.

A pilot runs the control, its neighbours (`--nudge-seed`) and, at most, its own training cut otherwise; so nothing is
seen of any strategy before the margin stands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import NamedTuple

import numpy as np

from study.compare import admitted, verdict, words
from study.errors import Refusal
from study.records import find as records
from study.records.schema import Record

SEEDS = (10, 15, 20)  # of which the power is said
MARGIN = 0.01  # of loss and perplexity a share; of accuracy a share of the reviews
METRICS = ("loss", "accuracy", "perplexity")
NEIGHBOUR = "a neighbour"


class Spread(NamedTuple):
    """How far runs are from the mean of their seed's control and neighbours (neighbours: from their seed's others)."""

    metric: str
    what: str  # a neighbour, or the label of a part
    seeds: int
    rms: float  # in the margin's unit
    largest: float
    power: tuple[float, ...]  # of the test for MARGIN with SEEDS, were a strategy's differences spread so


def page(folders: Sequence[Path], planned: Set[str], labels: Set[str], study: str) -> str:
    """Make the page of these planned runs. `labels`: the parts'. Raises Refusal where the runs tell nothing."""
    step, found = spreads(folders, planned, labels, study)
    head = ["held out", "runs", "seeds", "apart (root mean square)", "furthest", *(f"power, {n} seeds" for n in SEEDS)]
    rows = [
        [row.metric, row.what, row.seeds, f"{100 * row.rms:.2g} %", f"{100 * row.largest:.2g} %"]
        + [f"{power:.2f}" for power in row.power]
        for row in found
    ]
    return "\n".join(
        [
            f"# Pilot: {study}",
            "",
            f"Held out, step {step}. How far a run is from the mean of its seed's control and neighbours; a neighbour, "
            "from the others. Of accuracy, points. Power: of two one-sided tests at 5 % for a margin of "
            f"{100 * MARGIN:g} %, were a strategy's runs spread so and its mean the control's.",
            "",
            *words.markdown(head, rows),
            "",
            f"Made by `{words.command(f'compare --verdict {study}', folders)}`.",
        ]
    )


def spreads(folders: Sequence[Path], planned: Set[str], labels: Set[str], study: str) -> tuple[int, list[Spread]]:
    """The last step that was looked at in all runs, and what is spread how far there. Raises Refusal."""
    by_seed: dict[int, dict[str, Record]] = {}
    for run in records.find_runs(folders):
        if run.outcome is not None and run.outcome.study == study and run.record is not None:
            record = run.record.record
            if record.status == "ok" and record.run_id in planned:
                by_seed.setdefault(record.seed, {})[admitted.label_of(record.run_id, labels)] = record
    whole = [seed for seed in sorted(by_seed) if by_seed[seed].keys() == labels]
    first = by_seed[whole[0]] if whole else {}
    neighbours = sorted(label for label, record in first.items() if record.config.get("nudge_seed") is not None)
    if len(whole) < 2 or len(neighbours) < 2:
        raise Refusal(
            f"study {study!r} has no protocol: nothing was fixed before its runs, use `zero-study compare`; nor is it "
            f"a pilot, which needs two seeds with all their runs (here: {len(whole)}) and two parts with a nudge_seed "
            f"({len(neighbours)})"
        )
    looked = [{int(line["step"] or 0) for line in r.evaluation} for seed in whole for r in by_seed[seed].values()]
    step = max(set.intersection(*looked))
    found = []
    for metric in METRICS:
        values = {
            label: np.array([_held_out(by_seed[seed][label], step, metric) for seed in whole])
            for label in sorted(labels)  # the control's, which is empty, first
        }
        if any(np.isnan(each).any() for each in values.values()):
            continue
        found += _of_metric(metric, values, neighbours)
    return step, found


def _held_out(record: Record, step: int, metric: str) -> float:
    line = next(line for line in record.evaluation if int(line["step"] or 0) == step)
    value = line.get(metric)
    return float("nan") if value is None else value


def _of_metric(metric: str, values: Mapping[str, np.ndarray], neighbours: Sequence[str]) -> list[Spread]:
    ensemble = np.stack([values[""], *(values[label] for label in neighbours)], axis=1)
    scale = np.ones((len(ensemble), 1)) if metric == "accuracy" else ensemble.mean(axis=1, keepdims=True)
    others = verdict.from_others(ensemble[:, 1:] / scale)
    apart = {NEIGHBOUR: others.ravel()}
    for label, each in values.items():
        if label and label not in neighbours:
            apart[label] = ((each[:, None] - ensemble.mean(axis=1, keepdims=True)) / scale).ravel()
    rows = []
    for what, distances in apart.items():
        rms = float(np.sqrt((distances**2).mean()))
        power = tuple(verdict.power(rms, MARGIN, seeds, 0.05) for seeds in SEEDS)
        rows.append(Spread(metric, what, len(ensemble), rms, float(np.abs(distances).max()), power))
    return rows
