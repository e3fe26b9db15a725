"""The notebook `answer`: the results of a study on one page."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from IPython.display import Markdown
from matplotlib.figure import Figure

from study.compare import facts
from study.report import captions, plots, sentences, tables
from study.report.pages.shown import markdown


class Results:
    """The runs of these folders by setting, each compared with the baseline strategy.

    `leading` has the first setting of each study, which the page shows in detail. `first` has the runs of the first
    setting, and those of strategies that need another number of processes.
    """

    def __init__(self, records: str | Sequence[str], control: str) -> None:
        self.every = tables.runs(records)
        self.runs = plots.filter_runs(self.every, status="ok")
        self.control = tables.control_of(self.runs, control)
        speeds = tables.speeds(records, self.control)
        self.settings = [
            tables.with_ratios(rows, speeds, self.control) for rows in tables.settings(self.runs, self.control)
        ]
        self.first = tables.with_other_processes(self.settings[0], self.runs)
        self.leading: dict[str, pd.DataFrame] = {}
        for rows in self.settings:
            self.leading.setdefault(rows["study"].iloc[0], rows)

    def answer(self) -> Markdown:
        """Return how the strategies compare in the leading setting of each study, and how many runs finished."""
        finished = (self.every["status"] == "ok").sum()
        texts = [
            f"**Answer for {captions.setting(rows)}.** {sentences.comparison(rows, self.control)}"
            for rows in self.leading.values()
        ]
        return markdown(*texts, f"**Did every run finish?** {finished} of {len(self.every)} runs finished.")

    def overview(self) -> Figure:
        """Return the figure of losses, memory and times in the first setting.

        If steps of the baseline were timed, the figure has only strategies with timed steps.
        """
        rows = self.first
        timed = rows.loc[rows["why_untimed"] != facts.NO_TIME, "strategy"]
        if self.control in set(timed):
            rows = rows[rows["strategy"].isin(timed)]
        warning = facts.SMALL if rows["parameters"].max() < facts.REAL else ""
        if rows["step_seconds"].isna().all():
            warning = f"There are no times: {captions.joined(rows['why_untimed'].dropna().unique())}."
        head = captions.head("Loss, memory and time", rows, f"{captions.OVERVIEW} {warning}".strip())
        return plots.losses_peaks_and_times(rows, head, self.control)

    def result(self) -> str:
        """Return the result of the study in a few sentences."""
        return sentences.result(self.every, self.first, self.control)

    def other_settings(self) -> pd.DataFrame:
        """Return the lowest memory and time and the largest loss difference of each further setting, as a table.

        The table is empty if there is no such setting.
        """
        summary = []
        for rows in self.settings:
            if rows["strategy"].nunique() < 3 or any(rows is first for first in self.leading.values()):
                continue
            table = tables.relative(rows, self.control)
            names = [name for name in ("peak memory", "step time") if name in table]
            lowest = {name: tables.lowest(table, name, self.control) for name in names}
            differences = table["loss difference"]
            largest = differences.max()
            furthest = f"{sentences.scientific(largest)} ({differences.idxmax()})" if largest else "0"
            summary.append({"setting": captions.setting(rows), **lowest, "largest loss difference": furthest})
        titles = {"peak memory": "least peak memory", "step time": "shortest step"}
        return pd.DataFrame(summary).rename(columns=titles).replace("", pd.NA).dropna(axis="columns", how="all")

    def without_control(self) -> pd.DataFrame:
        """Return a table of absolute values for settings in which the baseline did not run. Empty if there are none."""
        columns = {
            "peak_gib": "peak memory (GiB)",
            "step_seconds": "step time (s)",
            "model_states_gib": "model states (GiB)",
        }
        parts = []
        for rows in tables.without_control(self.runs, self.control):
            if rows["strategy"].nunique() > 1:
                means = tables.mean(rows, *columns).rename(columns=columns).loc[rows["strategy"].unique()]
                parts.append(means.reset_index().assign(setting=captions.setting(rows)))
        if not parts:
            return pd.DataFrame()
        return pd.concat(parts).set_index(["setting", "strategy"]).dropna(axis="columns", how="all")
