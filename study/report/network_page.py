"""The page of runs on several machines: the figure and the tables of steps and bytes by the rate of the network."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from study.compare import network
from study.compare.network import Cell, Layout
from study.errors import Refusal
from study.records import find
from study.report import figures, markup
from study.report.drawing import Figure
from study.report.markup import Html, signed_percent

CONTROL = "ddp"
SECONDS_NOTE = """\
Medians over repeats, with their range; times the control's step at the same rate; and by how much the prediction
misses. Machines are namespaces of one box that share its processors: ranks beyond its cores slow one another, and the
times of such layouts are in no other table. gloo is the backend."""
WIRE_NOTE = """\
Of a machine and a step, over the bytes of all parameters; the first column is of a rank, whichever machine it sends to.
On the wire: the median over the rates, headers included. Loss: the largest relative difference of a step's loss from
the run that did the same on one machine."""


def load(records: Sequence[str]) -> list[Cell]:
    """Read the runs of several machines below these folders."""
    return network.cells(find.find([Path(folder) for folder in records]))


def _layouts(cells: Sequence[Cell]) -> dict[Layout, dict[str, list[Cell]]]:
    """What can be compared. Raises Refusal where nothing can."""
    if not (found := network.comparable(cells, CONTROL)):
        run = "zero-study run network"
        raise Refusal(f"no strategy and {CONTROL} ran on several machines with a limit and without; run: {run}")
    return found


def steps(cells: Sequence[Cell]) -> Figure:
    """Seconds of a step by the rate, a panel a layout."""
    return figures.steps_by_rate([(network.title(layout), of) for layout, of in _layouts(cells).items()])


def seconds(cells: Sequence[Cell]) -> Html:
    """Seconds of a step by layout, strategy and rate, beside the control's, and by how much a prediction misses."""
    rates = sorted({cell.rate for cell in cells}, reverse=True)
    groups = []
    for layout, of in _layouts(cells).items():
        control = {cell.rate: cell for cell in of[CONTROL]}
        rows = []
        for name, each in of.items():
            at = {cell.rate: _second(cell, control[cell.rate], network.unlimited(each)) for cell in each}
            rows.append([name, *(at.get(rate, "not run") for rate in rates)])
        groups.append((network.title(layout), rows))
    head = ["strategy", *map(network.shown_rate, rates)]
    return markup.table("Seconds a step", head, groups, f"{SECONDS_NOTE} Control: {CONTROL}.")


def _second(cell: Cell, control: Cell, free: Cell) -> Html:
    ratio = f"{cell.median_seconds / control.median_seconds:.2f} times"
    missed = "" if cell is free else f", {signed_percent(network.prediction_error(cell, free))}"
    spread = f"{cell.seconds[0]:.3f} to {cell.seconds[-1]:.3f}{missed}"
    return markup.below(f"{cell.median_seconds:.3f}", "" if cell is control else ratio, spread)


def wire(cells: Sequence[Cell]) -> Html:
    """What was asked, what gloo's algorithms send for it, what the interfaces counted, and what NCCL would send."""
    head = ["strategy", "asked", "by gloo", "on the wire", "by theory", "NCCL's rings, predicted",
            "loss, from one machine"]  # fmt: skip
    groups = []
    for layout, members in groupby(cells, key=lambda cell: cell.layout):
        rows: list[list[str | None]] = []
        for name, each in groupby(members, key=lambda cell: cell.strategy):
            of = list(each)
            differs = [cell.from_one_machine for cell in of if cell.from_one_machine is not None]
            carried = statistics.median(cell.on_the_wire for cell in of)
            shown = (of[0].counted, of[0].by_gloo, carried, of[0].by_theory, of[0].by_nccl)
            rows.append(
                [name, *(None if value is None else f"{value:.3f}" for value in shown),
                 f"{max(differs):.0e}" if differs else None]
            )  # fmt: skip
        groups.append((network.title(layout), rows))
    return markup.table("Bytes of a step: asked, sent and counted", head, groups, WIRE_NOTE)


def left_out(records: Sequence[str], cells: Sequence[Cell]) -> Html:
    """Name the runs that did not end ok, or are in no comparison."""
    shown = {run for of in _layouts(cells).values() for each in of.values() for cell in each for run in cell.runs}
    files = find.find([Path(folder) for folder in records])
    missing = [
        [one.record.run_id, one.record.status]
        for one in files
        if one.record.run_id not in shown and (one.record.status != "ok" or one.record.other_machines)
    ]
    if not missing:
        return markup.note("Every run that has a record is in the tables.")
    return markup.table("In no comparison", ["run", "status"], [("", missing)], words=["status"])
