"""How does a value read in a cell? Numbers of three digits, verdicts with their intervals; None is unknown."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pandas as pd

from study.compare import pairs
from study.compare.words import Unit, bytes_unit, in_order, three_digits
from study.report import markup
from study.report.markup import Html
from study.report.pages.runs import SETTING, PageRow
from study.report.words import listed, verdict_word

NAMED_AT_MOST = 6  # strategies in a sentence
SMALL = 1e-3  # relative difference, below which per cent are no help
CLOSE = 0.01  # relative; measured and by the paper

STATE_COLUMNS = {
    "parameters": "parameter_bytes",
    "gradients": "gradient_bytes",
    "optimizer states": "optimizer_state_bytes",
    "model states": "model_state_bytes",  # all three
}
PAPER_COLUMNS = {
    "parameters": "paper_parameter_bytes",
    "gradients": "paper_gradient_bytes",
    "optimizer states": "paper_optimizer_state_bytes",
    "model states": "paper_state_bytes",
}


def number(value: float) -> str | None:
    """Three digits, so that a column reads evenly."""
    if pd.isna(value):
        return None
    return f"{value:#.3g}".rstrip(".") if 1e-3 <= abs(value) < 999.5 else three_digits(value)


def fixed(value: float, decimals: int) -> str | None:
    return None if pd.isna(value) else f"{value:,.{decimals}f}"


def unit_of(runs: pd.DataFrame, *names: str) -> Unit:
    """The unit that suits the largest value in these columns of bytes."""
    largest = runs[list(names)].max().max()
    return bytes_unit(0.0 if pd.isna(largest) else largest)


def peak_column(runs: pd.DataFrame) -> str:
    """What says best how much memory a rank needed: allocated on a GPU, live tensors on a CPU."""
    return "peak_allocated_bytes" if "cuda" in set(runs["device"]) else "peak_tensor_bytes"


def named(strategies: pd.Series | pd.Index) -> str:
    """Strategies as a sentence lists them, not all of many."""
    names = in_order(strategies)
    more = len(names) - NAMED_AT_MOST
    return listed(names if more <= 0 else [*names[:NAMED_AT_MOST], f"{more} more"])


def relative(value: float) -> str:
    """A relative difference with its sign, in per cent unless it is so small that its power of ten reads better."""
    plus = "+" if value > 0 else ""
    in_percent = abs(value) >= SMALL or value == 0
    return f"{plus}{three_digits(100 * value)} %" if in_percent else f"{plus}{three_digits(value)}"


def outcomes(row: PageRow) -> Html:
    """How many runs there are, and what came of those without a result."""
    others = row.runs.loc[row.runs["status"] != "ok", "status"].value_counts()
    words = ", ".join(f"{amount} {status.replace('_', ' ')}" for status, amount in others.items())
    return Html(f"{len(row.runs)}{f'<small>{markup.escape(words)}</small>' if words else ''}")


def learned(row: PageRow, name: str) -> float:
    """The mean over seeds of what the runs that are ok learned, however often a seed was repeated."""
    ok = row.runs[row.runs["status"] == "ok"]
    return ok.groupby("seed")[name].mean().mean()


def held_out(row: PageRow) -> Html | str | None:
    """Perplexity; or accuracy, with the binomial 95 % interval of one run (Wilson's).

    Seeds are asked the same examples, so that their mean is taken to be no surer than one run.
    """
    accuracy = learned(row, "accuracy")
    if pd.isna(accuracy):
        return fixed(learned(row, "perplexity"), 1)
    examples = row.runs["settings"].iloc[0]["num_eval_examples"]
    z = 1.96
    middle = (accuracy + z**2 / (2 * examples)) / (1 + z**2 / examples)
    spread = math.sqrt(accuracy * (1 - accuracy) / examples + (z / (2 * examples)) ** 2)
    half = z / (1 + z**2 / examples) * spread
    return Html(f"{accuracy:.3f}<small>{middle - half:.3f} to {middle + half:.3f}, of {examples:,}</small>")


def final_loss(row: PageRow) -> str | None:
    return fixed(learned(row, "final_loss"), 4)


def time(row: PageRow) -> Html | str | None:
    """The median time of a step over runs; where it says nothing of the strategy, why."""
    crowded = next((why for run in row.runs.to_dict("records") if (why := pairs.crowding(run))), None)
    return markup.missing(crowded) if crowded else number(row.runs["seconds_per_step"].median())


def speed(make: Callable[[PageRow], str | None]) -> Callable[[PageRow], str | None]:
    """A column of speeds, which stays empty where `time` says why there is none."""
    return lambda row: "" if row.runs["oversubscribed"].any() else make(row)


def states(row: PageRow) -> str | None:
    """Bytes of model states per parameter, and in parentheses by the paper."""
    held, paper = (
        (row.runs[name] / row.runs["num_params"]).max() for name in ("model_state_bytes", "paper_state_bytes")
    )
    return None if pd.isna(held) else f"{held:.2f} ({three_digits(paper)})"


def against_paper(runs: pd.DataFrame) -> pd.DataFrame:
    """What each strategy holds over what the paper's formula says, part by part and in all; where that is furthest."""
    measured = runs.dropna(subset=["paper_state_bytes"])
    ratios = pd.DataFrame(
        {part: measured[name] / measured[PAPER_COLUMNS[part]] for part, name in STATE_COLUMNS.items()}
    )
    furthest = ratios.groupby(measured["strategy"]).agg(lambda each: each.loc[(each - 1).abs().idxmax()])
    return furthest.loc[in_order(furthest.index)]


def other_parts(ratios: pd.DataFrame) -> list[str]:
    """The strategies that hold as much as the paper says in all, and not in its parts."""
    near = (ratios - 1).abs() <= CLOSE
    return list(ratios.index[near["model states"] & ~near.all(axis=1)])


class Verdicts:
    """The comparisons with the control, by the row that each is about."""

    def __init__(self, compared: pd.DataFrame, control: str, metric: str) -> None:
        self.control = control
        self.metric = metric
        self.found: dict[tuple, list[dict[str, Any]]] = {}
        for comparison in compared[compared["metric"] == metric].to_dict("records"):
            key = tuple(comparison[name] for name in SETTING)
            self.found.setdefault(
                (comparison["box"], comparison["strategy"], comparison["world_size"], key), []
            ).append(comparison)

    def of(self, row: PageRow) -> list[dict[str, Any]]:
        """Usually one; more where libraries or data changed between runs of one setting."""
        return self.found.get((row.runs["box"].iloc[0], row.strategy, row.world_size, row.key), [])

    def cell(self, row: PageRow) -> Html:
        if comparisons := self.of(row):
            return Html("<br>".join(self._words(comparison) for comparison in comparisons))
        return markup.missing("the control" if row.strategy == self.control else "not comparable")

    def margin(self, row: PageRow) -> str | None:
        margins = [
            comparison["relative_margin"] for comparison in self.of(row) if pd.notna(comparison["relative_margin"])
        ]
        if row.strategy == self.control:
            return ""
        return "; ".join(f"\N{PLUS-MINUS SIGN}{relative(margin).lstrip('+')}" for margin in margins) or None

    def _words(self, comparison: dict[str, Any]) -> str:
        word = verdict_word(self.metric, comparison["verdict"])
        if pd.isna(comparison["relative_difference"]):
            return word
        interval = ""
        if pd.notna(comparison["relative_low"]):
            interval = f" [{relative(comparison['relative_low'])}, {relative(comparison['relative_high'])}]"
        return f"{word}<small>{relative(comparison['relative_difference'])}{interval}</small>"
