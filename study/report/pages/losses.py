"""The notebook `learned`: the losses under each strategy, and the statistical studies with deliberate faults."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pandas as pd
from IPython.display import Markdown
from matplotlib.figure import Figure

from study.compare import verdict_text
from study.report import captions, plots, sentences, tables
from study.report.pages.shown import markdown

INDEX = ["workload", "size", "seed", "step"]


class Losses:
    """The losses of the runs in `records`, and the verdicts of the statistical studies in `fixed`."""

    def __init__(self, records: str | Sequence[str], fixed: str | Sequence[str], control: str) -> None:
        finished = plots.filter_runs(tables.runs(records), status="ok")
        self.control = tables.control_of(finished, control)
        self.runs = tables.of_one_setting(finished, self.control)
        steps = tables.steps_of(self.runs)
        self.processes = steps["processes"].mode()[0]  # of most runs; `single` is compared with them
        self.steps = steps[(steps["processes"] == self.processes) | (steps["strategy"] == "single")]
        self.losses = self.steps.pivot_table(index=INDEX, columns="strategy", values="loss")  # mean over repeats
        own = self.losses[self.control]
        self.differences = self.losses.sub(own, axis=0).div(own, axis=0).abs()
        self.decided = verdict_text.decided_in(tables.folders(fixed))
        self.of_fixed = plots.filter_runs(tables.runs(fixed), status="ok")

    def answer(self) -> Markdown:
        """Return the largest differences of the last losses, and the answers of the statistical studies."""
        by_seed = self.differences.drop(columns=[self.control, "single"], errors="ignore").groupby(INDEX[:3])
        texts = []
        for (workload, size), rows in by_seed.last().groupby(["workload", "size"]):
            name = f"Answer for {captions.setting(self._of(workload, size))}"
            last_step = self.losses.loc[(workload, size)].index[-1][-1]
            texts.append(sentences.losses_by_seed(name, rows.droplevel([0, 1]), last_step, self.control))
        answers = sentences.bullets(
            f"`{decided.study.name}`: {verdict_text.answer(decided)}" for decided in self.decided
        )
        statistical = (
            "**Answer of the statistical studies.** These studies also train with *planted faults*, which were put in "
            "on purpose, and train DDP with *variations*, which affect only rounding:"
        )
        return markdown(*texts, *([statistical, answers] if self.decided else []))

    def what_was_run(self) -> Markdown:
        """Describe the runs that the page shows."""
        studies = self.of_fixed["study"].unique()
        lines = [f"{captions.scope(plots.filter_runs(self.of_fixed, study=name))}" for name in studies]
        first = f"**What was run.** {captions.MEASURED} {captions.scope(self.runs)}"
        return markdown(first, sentences.bullets(lines))

    def curves(self) -> Iterator[Figure]:
        """Yield one figure of the loss curves for each model."""
        for (workload, size), curves in self.steps.groupby(["workload", "size"]):
            rows = self._of(workload, size)
            title = f"Training loss, and how far the strategies differ from {self.control}"
            yield plots.loss_curves(curves, captions.head(title, rows), self.control)

    def differences_by_seed(self) -> dict[str, pd.DataFrame]:
        """Return the relative differences of losses per model and seed: at the last step, and their maxima."""
        labeled = self.steps.assign(model=captions.short_names(self.steps))
        names = labeled[["workload", "size", "model"]].drop_duplicates().set_index(["workload", "size"])["model"]
        by_seed = self.differences.drop(columns=self.control).groupby(INDEX[:3])
        result = {}
        for title, table in (("at the last step", by_seed.last()), ("at the step where it is largest", by_seed.max())):
            places = [(names[place[:2]], place[2]) for place in table.index]
            columns = pd.MultiIndex.from_tuples(places, names=["model", "seed"])
            result[title] = table.set_axis(columns).T.rename_axis(index=None)
        return result

    def compared(self) -> pd.DataFrame:
        """Return the runs that `differences_by_seed` compares."""
        return plots.filter_runs(self.runs, processes=[1, self.processes])

    def final(self) -> Iterator[Figure]:
        """Yield one figure of the final held-out losses for each statistical study."""
        for decided in self.decided:
            title = f"Study {decided.study.name}: final held-out losses relative to {self.control}"
            kind = "Measured by this project. Each stroke is one seed."
            head = captions.head(title, self.of_study(decided.study.name), kind)
            yield plots.final_losses(decided.verdict, head, self.control)

    def of_study(self, name: str) -> pd.DataFrame:
        """Return the runs of one statistical study."""
        return plots.filter_runs(self.of_fixed, study=name)

    def _of(self, workload: str, size: str) -> pd.DataFrame:
        return plots.filter_runs(self.runs, workload=workload, size=size, processes=self.processes)
