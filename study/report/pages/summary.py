"""What is the answer, strategy by strategy? One table, and what it rests on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd

from study.report import markup
from study.report.markup import Html
from study.report.pages.cells import (
    Verdicts,
    against_paper,
    final_loss,
    held_out,
    named,
    number,
    other_parts,
    outcomes,
    peak_column,
    states,
    time,
    unit_of,
)
from study.report.pages.opening import times_decide
from study.report.pages.runs import PageRow, boxes, by_box, table_of
from study.report.words import count, listed

NOTE = """\
Held out: perplexity; or accuracy, with one run's binomial 95 % interval (seeds are asked the same examples, so their
mean is no surer). Against the control: the verdict, and the relative difference with its 95 % interval. Model states:
bytes per parameter on the rank with the most, in parentheses by arXiv:1910.02054. Peak memory: of that rank; live
tensors on a CPU, allocated on a GPU."""

MORE_NOTE = (
    "Sent: the collectives of a step as NCCL sends them, an all-reduce twice; gloo sends a reduce-scatter twice too."
)


def basis(runs: pd.DataFrame) -> Html:
    """What was run for the answer."""
    days = sorted({started[:10] for started in runs["started_at"].dropna()})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    strategies = count(runs["strategy"].nunique(), "strategy", "strategies")
    words = f"From {count(len(runs), 'run')} of {strategies} on {listed(boxes(runs))}, {when}."
    return Html(markup.paragraphs(words, kind="note"))


def answer(
    runs: pd.DataFrame, compared: pd.DataFrame, control: str, with_losses: bool = True, with_times: bool = True
) -> Html:
    """The answer in one table per box: what each strategy learned, holds and sends, and how long it takes.

    Losses and times may be told by others, a study that was fixed in advance and quieter runs: then not by these.
    """
    loss, speed = (Verdicts(compared, control, metric) for metric in ("final_loss", "seconds_per_step"))
    decide = times_decide(compared)

    def make(here: pd.DataFrame) -> str:
        peak, sent = unit_of(here, peak_column(here)), unit_of(here, "collective_bytes")
        learned: dict[str, Callable[[PageRow], Any]] = {"held out": held_out, f"loss against {control}": loss.cell}
        took: dict[str, Callable[[PageRow], Any]] = {"seconds per step": time, f"time against {control}": speed.cell}
        took = took if with_times else {}
        first: dict[str, Callable[[PageRow], Any]] = {
            **(learned if with_losses else {}),
            **(took if decide else {}),
            f"peak memory, {peak.name}": lambda row: number(row.runs[peak_column(here)].max() / peak.size),
            "model states (paper)": states,
        }
        more: dict[str, Callable[[PageRow], Any]] = {
            "runs": outcomes,
            **({"final loss": final_loss} if with_losses else {}),
            **({} if decide else took),
            f"sent per step, {sent.name}": lambda row: number(row.runs["collective_bytes"].max() / sent.size),
        }
        words = [f"loss against {control}", f"time against {control}"]
        heading = f"More columns: runs, {'losses, ' if with_losses else ''}messages"
        heading += "; and times, which decide nothing" if took and not decide else ""
        whole = "Every strategy, in what it learned and held" if with_losses else "Every strategy, in what it held"
        note = NOTE if with_losses else NOTE[NOTE.index("Model states") :]
        note += " Seconds: median." if decide and with_times else ""
        if by_chance := other_parts(against_paper(here)):
            note += f" Of {named(by_chance)} the total alone is the paper's: the parts are others."
        more_note = MORE_NOTE + (" Final loss: the mean of the last steps, over seeds." if with_losses else "")
        more_note += " Seconds: median." if took and not decide else ""
        rest = table_of(here, "Every strategy: what else was seen", more, more_note, words)
        return table_of(here, whole, first, note, words) + markup.details(heading, rest)

    return by_box(runs, make)
