"""What is the answer? The question, three sentences and one table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd

from study.compare.words import bytes_text, processes
from study.report import markup
from study.report.markup import Html
from study.report.pages.cells import (
    Verdicts,
    counted_verdicts,
    final_loss,
    held_out,
    named,
    number,
    outcomes,
    peak_column,
    states,
    time,
    unit_of,
)
from study.report.pages.runs import PageRow, blocks, boxes, by_box, table_of, worlds
from study.report.words import count, listed

NOTE = """\
Held out: accuracy, or perplexity. Final loss: the mean of the last steps, over seeds. Against the control: the
verdict, and the relative difference with its 95 % interval. Seconds: median. Model states: bytes per parameter on the
rank with the most, in parentheses by arXiv:1910.02054. Peak memory: of that rank; live tensors on a CPU, allocated on
a GPU. Sent: the collectives of a step, an all-reduce twice."""


def title(question: str, runs: pd.DataFrame) -> Html:
    """The question, and what was run to answer it."""
    days = sorted({started[:10] for started in runs["started_at"].dropna()})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    strategies = count(runs["strategy"].nunique(), "strategy", "strategies")
    words = f"{count(len(runs), 'run')} of {strategies} on {listed(boxes(runs))}, {when}."
    return Html(f"<h1>{markup.escape(question)}</h1>\n{markup.paragraphs(words, kind='lead')}")


def in_words(runs: pd.DataFrame, compared: pd.DataFrame, control: str) -> Html:
    """The answer in sentences: what is learned, what a rank holds, how long a step takes."""

    def make(here: pd.DataFrame) -> str:
        of_box = compared[compared["box"].isin(boxes(here))]
        answers = [
            markup.led("What is learned", counted_verdicts(of_box, "final_loss", control, "the final loss")),
            markup.led("What a rank holds", extremes(here)),
            markup.led(
                "How long a step takes", counted_verdicts(of_box, "seconds_per_step", control, "the time of a step")
            ),
        ]
        return markup.items(answers)

    return by_box(runs, make)


def extremes(runs: pd.DataFrame) -> str:
    """Who holds the most and the least model states, on the largest number of processes of each setting."""
    sentences = []
    for block in blocks(runs):
        size, members = list(worlds(block.runs))[-1]
        held = members.dropna(subset=["model_state_bytes"]).groupby("strategy")["model_state_bytes"].max()
        if held.empty:
            continue
        least, most = (held[held == edge].index for edge in (held.min(), held.max()))
        sentences.append(
            f"{block.words} on {processes(size)}: from {bytes_text(held.min())} of model states ({named(least)}) to "
            f"{bytes_text(held.max())} ({named(most)})"
        )
    return f"{'; '.join(sentences)}." if sentences else "Not measured."


def answer(runs: pd.DataFrame, compared: pd.DataFrame, control: str) -> Html:
    """The answer in one table per box: what each strategy learned, holds and sends, and how long it takes."""
    loss, speed = (Verdicts(compared, control, metric) for metric in ("final_loss", "seconds_per_step"))

    def make(here: pd.DataFrame) -> str:
        peak, sent = unit_of(here, peak_column(here)), unit_of(here, "collective_bytes")
        columns: dict[str, Callable[[PageRow], Any]] = {
            "runs": outcomes,
            "held out": held_out,
            "final loss": final_loss,
            f"loss against {control}": loss.cell,
            "seconds per step": time,
            f"time against {control}": speed.cell,
            "model states (paper)": states,
            f"peak memory, {peak.name}": lambda row: number(row.runs[peak_column(here)].max() / peak.size),
            f"sent per step, {sent.name}": lambda row: number(row.runs["collective_bytes"].max() / sent.size),
        }
        words = [f"loss against {control}", f"time against {control}"]
        return table_of(here, "Every strategy, in what it learned, took and held", columns, NOTE, words)

    return by_box(runs, make)
