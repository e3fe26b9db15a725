"""What did a network of a given rate cost? Records of several machines as a page."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from study.compare import network
from study.compare.network import Cell, Layout
from study.errors import Refusal
from study.records import find
from study.report import markup
from study.report.figures import network as figures
from study.report.figures.drawing import Figure
from study.report.markup import Html
from study.report.pages.opening import lead
from study.report.words import count, percent, signed_percent

CONTROL = "ddp"
RIGHT = 0.25  # by which a prediction may miss
RUN = "zero-study run network"
ADDED_NOTE = (
    "The slowest of the rates that were tried. Its bytes take: what theory expects a machine to send by gloo's "
    "algorithms, through the limit. Over its bytes: 1 where nothing is hidden behind computing and nothing waits."
)
NOTE = (
    "Machines are namespaces of one box that share its processors: ranks beyond its cores slow one another, and the "
    "times of such layouts are in no other table. gloo is the backend. Times hold within this box."
)
PAYS_NOTE = "At the rates that were tried, by medians: yes, or no."


def load(records: Sequence[str]) -> list[Cell]:
    """Read the runs of several machines below these folders."""
    return network.cells(find.find([Path(folder) for folder in records]))


def _layouts(cells: Sequence[Cell]) -> dict[Layout, dict[str, list[Cell]]]:
    """What can be compared. Raises Refusal where nothing can."""
    if not (found := network.comparable(cells, CONTROL)):
        raise Refusal(f"no strategy and {CONTROL} ran on several machines with a limit and without; run: {RUN}")
    return found


def opening(cells: Sequence[Cell]) -> Html:
    """What a network costs, in words and as curves."""
    return Html(lead(_words(cells)).text + steps(cells)._repr_html_())


def _words(cells: Sequence[Cell]) -> str:
    """Say how near any strategy comes to the control, what a limit adds, and what is there without one."""
    layouts = _layouts(cells)
    near = [
        (ratio, name, network.shown_rate(rate), network.title(layout))
        for layout, of in layouts.items()
        for rate in {cell.rate for cell in of[CONTROL]}
        for name, ratio in _ratios(of, rate).items()
    ]
    ratio, name, rate, where = min(near)
    paying = [one[1] for one in near if one[0] <= network.PAYS]
    who = f", under {' and '.join(sorted(set(paying)))}" if paying else ""
    layout, of = next(iter(layouts.items()))
    slowest = min(cell.rate for name, each in of.items() for cell in each if name != CONTROL)
    slow, free = _ratios(of, slowest), _ratios(of, math.inf)
    worst = max(slow, key=lambda name: slow[name])
    return (
        f"In {len(paying) or 'none'} of {count(len(near), 'case')} a step takes at most {network.PAYS:g} times as long "
        f"as one under {CONTROL} on the same network{who}; the fastest takes {ratio:.2f} times as long ({name}, "
        f"{where}, {rate}). A step under {worst} takes {slow[worst]:.1f} times one under {CONTROL} at "
        f"{network.shown_rate(slowest)}, and {free[worst]:.1f} times without a limit ({network.title(layout)}), where "
        "the difference is the engine's and gloo's work on a CPU. The machines were made of one box, the model is a "
        f"BERT of {of[worst][0].parameter_bytes / 4e6:.1f} million parameters."
    )


def _ratios(of: dict[str, list[Cell]], rate: float) -> dict[str, float]:
    at = {name: cell.median_seconds for name, each in of.items() for cell in each if cell.rate == rate}
    return {name: seconds / at[CONTROL] for name, seconds in at.items() if name != CONTROL}


def steps(cells: Sequence[Cell]) -> Figure:
    """Seconds of a step by the rate, a panel a layout."""
    return figures.steps_by_rate(_titled(cells), CONTROL)


def ratios(cells: Sequence[Cell]) -> Figure:
    """A step over the control's by the rate, a panel a layout."""
    return figures.ratios_by_rate(_titled(cells), CONTROL)


def _titled(cells: Sequence[Cell]) -> list[tuple[str, dict[str, list[Cell]]]]:
    return [(network.title(layout), of) for layout, of in _layouts(cells).items()]


def pays(cells: Sequence[Cell]) -> Html:
    """At which of the rates that were tried a step takes a quarter more than under DDP at most."""
    rates = sorted({cell.rate for cell in cells if cell.rate}, reverse=True)
    groups = []
    for layout, of in _layouts(cells).items():
        control = {cell.rate: cell for cell in of[CONTROL]}
        rows = []
        for name, each in of.items():
            at = {cell.rate: "yes" if network.pays(cell, control[cell.rate]) else "no" for cell in each}
            rows += [[name, *(at.get(rate, "not run") for rate in rates)]] if name != CONTROL else []
        groups.append((network.title(layout), rows))
    head = ["strategy", *map(network.shown_rate, rates)]
    caption = f"Whether a step takes at most {network.PAYS:g} times one under {CONTROL}"
    return Html(markup.table(caption, head, groups, PAYS_NOTE, words=head))


def errors(cells: Sequence[Cell]) -> Html:
    """How far the predictions missed, and where most."""
    fixed = {
        (network.title(layout), name, cell.rate): network.prediction_error(cell, network.unlimited(each))
        for layout, of in _layouts(cells).items()
        for name, each in of.items()
        for cell in each
        if math.isfinite(cell.rate)
    }
    right = sum(abs(error) <= RIGHT for error in fixed.values())
    (where, name, rate), worst = max(fixed.items(), key=lambda item: abs(item[1]))
    median = statistics.median(abs(error) for error in fixed.values())
    return Html(
        markup.paragraphs(
            f"Of {count(len(fixed), 'prediction')}, {right} miss by {percent(RIGHT)} at most, the median by "
            f"{percent(median)}; the worst by {signed_percent(worst)} ({name}, {where}, {network.shown_rate(rate)}). "
            "Below 0: the step took longer than predicted. The rule was fixed beforehand; the step without a limit, to "
            "which it adds the bytes' time, was measured beside."
        )
    )


def added(cells: Sequence[Cell]) -> Html:
    """What the slowest limit of each layout adds to a step, beside what its bytes take, and beside the control."""
    head = ["strategy", "without a limit", "the limit adds", "its bytes take", "over its bytes", "over ddp's",
            "by bytes"]  # fmt: skip
    groups = []
    for layout, of in _layouts(cells).items():
        rate = min(cell.rate for cell in of[CONTROL])
        both = {
            name: (network.unlimited(each), cell) for name, each in of.items() for cell in each if cell.rate == rate
        }
        adds = {name: cell.median_seconds - free.median_seconds for name, (free, cell) in both.items()}
        sends = {name: network.sending_seconds(free, rate) for name, (free, _) in both.items()}
        rows = [
            [name, f"{free.median_seconds:.3f}", f"{adds[name]:.3f}", f"{sends[name]:.3f}",
             f"{adds[name] / sends[name]:.2f}", f"{adds[name] / adds[CONTROL]:.2f}",
             f"{sends[name] / sends[CONTROL]:.2f}"]
            for name, (free, _) in both.items()
        ]  # fmt: skip
        groups.append((f"{network.title(layout)}, {network.shown_rate(rate)}", rows))
    return Html(markup.table("What the slowest limit adds to a step, in seconds", head, groups, ADDED_NOTE))


def wire(cells: Sequence[Cell]) -> Html:
    """What was asked, what gloo's algorithms send for it, what the interfaces counted, and what NCCL would send."""
    head = ["strategy", "asked", "by gloo", "on the wire", "by theory", "NCCL's rings, predicted",
            "loss, from one machine"]  # fmt: skip
    groups = []
    for layout, members in groupby(cells, key=lambda cell: cell.layout):
        rows = []
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
    note = (
        "Of a machine and a step, over the bytes of all parameters; the first column is of a rank, whichever machine "
        "it sends to. On the wire: the median over the rates, headers included. Loss: the largest relative difference "
        "of a step's loss from the run that did the same on one machine."
    )
    return Html(markup.table("Bytes of a step: asked, sent and counted", head, groups, note))


def seconds(cells: Sequence[Cell]) -> Html:
    """Every step's seconds by layout, strategy and rate, and by how much its prediction misses."""
    rates = sorted({cell.rate for cell in cells}, reverse=True)
    head = ["strategy", *map(network.shown_rate, rates)]
    groups = []
    for layout, of in _layouts(cells).items():
        rows = []
        for name, each in of.items():
            at = {cell.rate: cell for cell in each}
            rows.append([name, *(_second(at.get(rate), network.unlimited(each)) for rate in rates)])
        groups.append((network.title(layout), rows))
    fewest, most = (extreme(len(cell.seconds) for cell in cells) for extreme in (min, max))
    repeats = f"Medians over {count(most, 'repeat')}" + (f", of some {fewest}" if fewest < most else "")
    note = f"{repeats}; the whole range of them, and by how much the prediction misses. {NOTE}"
    return Html(markup.table("Seconds a step", head, groups, note))


def _second(cell: Cell | None, free: Cell) -> str:
    if cell is None:
        return "not run"
    missed = "" if cell is free else f", {signed_percent(network.prediction_error(cell, free))}"
    return f"{cell.median_seconds:.3f} ({cell.seconds[0]:.3f} to {cell.seconds[-1]:.3f}{missed})"


def left_out(records: Sequence[str], cells: Sequence[Cell]) -> Html:
    """Name the runs that did not end ok, or are in no comparison."""
    shown = {run for of in _layouts(cells).values() for each in of.values() for cell in each for run in cell.runs}
    files = find.find([Path(folder) for folder in records])
    missing = [
        f"{one.record.run_id} ({one.record.status})"
        for one in files
        if one.record.run_id not in shown and (one.record.status != "ok" or one.record.other_machines)
    ]
    text = f"In no comparison: {', '.join(missing)}." if missing else "Every run that has a record is in the tables."
    return Html(markup.paragraphs(text))
