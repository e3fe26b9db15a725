"""The notebook `planner`: the predicted strategies for one model on given GPUs."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from study.accuracy import published_rows
from study.report import captions, plots
from zero_study import planner
from zero_study.planner import advice_text, choose
from zero_study.terminal import GIB
from zero_study.theory import measured_by_others
from zero_study.theory.prediction import Prediction

HEADS = {
    "count": "number of times",
    "median": "median error",
    "percentile_90": "90 % of errors are below",
    "worst": "largest error",
}
FEWEST = 5  # published times per row


class Plan:
    """The predictions of `zero-study advise` for a model on these GPUs."""

    def __init__(self, model: str, **request: Any) -> None:
        self.advice = planner.advise(model, planner.Request(**request))
        asked = self.advice.request
        self.setting = (
            f"{model} on {asked.num_gpus} x {asked.gpu}, {asked.sequence_length:,} tokens per sequence, "
            f"{asked.global_batch_size} sequences per step"
        )

    def answer(self) -> None:
        """Print the answer as `zero-study advise` prints it."""
        print(advice_text.text(self.advice))

    def parts(self) -> Figure:
        """Return the figure of a GPU's peak memory by strategy, divided into its parts."""
        peaks = {
            option.strategy.name: {str(part): size for part, size in option.prediction.peak.parts.items()}
            for option in self.advice.options
        }
        usable = float(self.advice.options[0].prediction.usable_bytes) / GIB
        head = captions.Head("Peak memory of a GPU, by strategy", captions.PREDICTED, self.setting)
        return plots.predicted_parts(plots.gib_by_part(peaks), usable, head)

    def best(self) -> pd.DataFrame:
        """Return the combinations that no other combination beats in both memory and speed."""
        rows = []
        for strategy, prediction in front(self.advice):
            job = prediction.job
            rows.append(
                {
                    "strategy": strategy,
                    "memory (GiB per GPU)": float(prediction.needed_bytes) / GIB,
                    "tokens per second and GPU": float(prediction.tokens_per_second_per_gpu),
                    "micro batch": int(job.micro_batch_size),
                    "activations": "recomputed" if job.activation_checkpointing else "kept",
                }
            )
        return pd.DataFrame(rows)


def front(advice: choose.Advice) -> list[tuple[str, Prediction]]:
    """Return strategies and splits of the batch that fit, except those that another one beats in memory and speed.

    They are sorted by memory, the smallest first.
    """
    fitting = [
        (option.strategy.name, split)
        for option in advice.options
        for split in choose.splits(advice.shape, advice.request, option.prediction.engine, advice.box)
        if split.fits
    ]
    best: list[tuple[str, Prediction]] = []
    for name, split in sorted(fitting, key=lambda each: (each[1].peak.total, -each[1].tokens_per_second_per_gpu)):
        if not best or split.tokens_per_second_per_gpu > best[-1][1].tokens_per_second_per_gpu:
            best.append((name, split))
    return best


def errors(by: str) -> pd.DataFrame:
    """Return the errors of predicted step times, grouped by "grade" or by "engine" (which is the strategy).

    Raises Refusal if this is not a clone.
    """
    table = pd.DataFrame(published_rows.load()["errors"])
    table = table.query(f"predictor == 'planner' and left_out == 'family' and count >= {FEWEST} and by == '{by}'")
    table = table[~table["group"].str.contains("as collected|, all")].sort_values("median")
    title = {"engine": "strategy"}.get(by, by)
    return table.rename(columns={"group": title, **HEADS})[[title, *list(HEADS.values())[1:], HEADS["count"]]]


def errors_by_repository() -> pd.DataFrame:
    """Return the errors of predicted step times by repository and grade.

    Raises Refusal if this is not a clone.
    """
    cases = (*measured_by_others.cases(), *measured_by_others.cases_of("mpt_throughput"))
    sources = {case.name: case.measured_by for case in cases}
    unseen = pd.DataFrame(published_rows.load()["unseen"]).query("outside == ''")
    unseen = unseen.assign(repository=unseen["name"].map(sources), size=unseen["error"].abs())
    groups = unseen.groupby(["repository", "grade"], as_index=False)
    shares: dict[str, Any] = {HEADS["median"]: "median", HEADS["percentile_90"]: lambda sizes: sizes.quantile(0.9)}
    rows = groups.agg(**{title: ("size", how) for title, how in shares.items()}, times=("size", "count"))
    rows = rows.query(f"times >= {FEWEST}").sort_values(HEADS["median"])
    return rows.rename(columns={"times": HEADS["count"]})
