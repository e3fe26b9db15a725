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
from study.report.words import count, percent

CONTROL = "ddp"
RUN = "zero-study run network"
NOTE = "Machines are namespaces of one box that share its processors; gloo is the backend. Times hold within this box."


def load(records: Sequence[str]) -> list[Cell]:
    """Read the runs of several machines below these folders."""
    return network.cells(find.find([Path(folder) for folder in records]))


def _layouts(cells: Sequence[Cell]) -> dict[Layout, dict[str, list[Cell]]]:
    """What can be compared. Raises Refusal where nothing can."""
    if not (found := network.comparable(cells, CONTROL)):
        raise Refusal(f"no strategy and {CONTROL} ran on several machines with a limit and without; run: {RUN}")
    return found


def opening(cells: Sequence[Cell]) -> Html:
    """Say what the slowest network and the one without a limit cost, for the strategies that differ most."""
    layout, of = next(iter(_layouts(cells).items()))
    slowest = min(cell.rate for each in of.values() for cell in each)
    ratios = {rate: _ratios(of, rate) for rate in (slowest, math.inf)}
    worst = max(ratios[slowest], key=lambda name: ratios[slowest][name])
    words = (
        f"Where machines are joined by {network.shown_rate(slowest)}, a step under {worst} takes "
        f"{ratios[slowest][worst]:.1f} times one under {CONTROL}, on a network without a limit "
        f"{ratios[math.inf][worst]:.1f} times ({network.title(layout)}; a BERT of "
        f"{of[worst][0].parameter_bytes / 4e6:.1f} million parameters)."
    )
    return Html(lead(words).text + steps(cells)._repr_html_())


def _ratios(of: dict[str, list[Cell]], rate: float) -> dict[str, float]:
    at = {name: cell.median_seconds for name, each in of.items() for cell in each if cell.rate == rate}
    return {name: seconds / at[CONTROL] for name, seconds in at.items() if name != CONTROL}


def steps(cells: Sequence[Cell]) -> Figure:
    """Seconds of a step by the rate, a panel a layout."""
    layouts = _layouts(cells)
    return figures.steps_by_rate(
        {network.title(layout): [cell for each in of.values() for cell in each] for layout, of in layouts.items()}
    )


def pays(cells: Sequence[Cell]) -> Html:
    """From which rate on each strategy costs a quarter more than DDP at most, measured and predicted."""
    head = ["strategy", "measured", "predicted"]
    groups = []
    for layout, of in _layouts(cells).items():
        rows = [[name, *_pays(each, of[CONTROL])] for name, each in of.items() if name != CONTROL]
        groups.append((network.title(layout), rows))
    caption = f"The rate from which on a step takes at most {network.PAYS:g} times one under {CONTROL}"
    return Html(markup.table(caption, head, groups, NOTE, words=head))


def _pays(each: list[Cell], control: list[Cell]) -> tuple[str, str]:
    free, plain = (next(cell for cell in of if math.isinf(cell.rate)) for of in (each, control))
    lowest = min(cell.rate for cell in each)
    measured, predicted = network.pays_from(each, control), network.predicted_to_pay_from(free, plain)
    return _rate(measured, lowest), _rate(predicted, lowest)


def _rate(rate: float | None, lowest: float) -> str:
    if rate is None:
        return "never"
    if math.isinf(rate):
        return "only without a limit"
    return f"at every rate tried, {network.shown_rate(lowest)} too" if rate < lowest else network.shown_rate(rate)


def errors(cells: Sequence[Cell]) -> Html:
    """How far the predictions missed, and where most."""
    missed = {
        (network.title(layout), name, cell.rate): network.prediction_error(cell, free)
        for layout, of in _layouts(cells).items()
        for name, each in of.items()
        for free in [cell for cell in each if math.isinf(cell.rate)]
        for cell in each
        if math.isfinite(cell.rate)
    }
    right = sum(abs(error) <= network.RIGHT for error in missed.values())
    (where, name, rate), worst = max(missed.items(), key=lambda item: abs(item[1]))
    median = statistics.median(abs(error) for error in missed.values())
    return Html(
        markup.paragraphs(
            f"Of {count(len(missed), 'prediction')}, {right} miss by {percent(network.RIGHT)} at most, the median by "
            f"{percent(median)}; the worst by {percent(worst)} ({name}, {where}, {network.shown_rate(rate)}). Below 0: "
            "the step took longer than predicted."
        )
    )


def wire(cells: Sequence[Cell]) -> Html:
    """What was asked, what gloo's algorithms send for it, what the interfaces counted, and what NCCL would send."""
    head = ["strategy", "asked", "by gloo", "on the wire", "by theory", "NCCL, predicted", "loss, from one machine"]
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
    """Every step's seconds, by layout, strategy and rate."""
    rates = sorted({cell.rate for cell in cells}, reverse=True)
    head = ["strategy", *map(network.shown_rate, rates)]
    groups = []
    for layout, of in _layouts(cells).items():
        rows = []
        for name, each in of.items():
            at = {cell.rate: cell.median_seconds for cell in each}
            rows.append([name, *(f"{at[rate]:.3f}" if rate in at else None for rate in rates)])
        groups.append((network.title(layout), rows))
    return Html(markup.details("Seconds of every step", markup.table("Seconds a step", head, groups, NOTE)))
