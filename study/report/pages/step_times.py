"""The notebook `time`: how long a step takes under each strategy."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from IPython.display import Markdown
from matplotlib.figure import Figure

from study.report import captions, plots, sentences, tables
from study.report.pages.shown import markdown


class StepTimes:
    """The timed runs of these folders by setting, with each run's time relative to the baseline's."""

    def __init__(self, records: str | Sequence[str], control: str) -> None:
        self.every = plots.filter_runs(tables.runs(records), status="ok")
        self.control = tables.control_of(self.every, control)
        self.timed = self.every[self.every["why_untimed"].isna() & self.every["step_seconds"].notna()]
        self.speeds = tables.speeds(records, self.control)  # runs that alternated with the control, under a limit
        self.settings = [
            tables.with_ratios(rows, self.speeds, self.control)
            for setting in tables.settings(self.timed, self.control)
            if (rows := tables.with_other_processes(setting, self.timed))["strategy"].nunique() > 2
        ]

    def answer(self) -> Markdown:
        """Return the shortest and the longest step of each setting, relative to the baseline."""
        texts = []
        for rows in self.settings:
            ratios = tables.centers(rows).drop(self.control)
            texts.append(f"**Answer for {captions.setting(rows)}.** {sentences.step_time(ratios, self.control)}")
        why = "The figures need times of three strategies with the same model, precision and batch."
        reasons = captions.joined(self.every["why_untimed"].dropna().unique())
        untimed = f"{len(self.every) - len(self.timed)} of {len(self.every)} runs have no time: {reasons}."
        return markdown(*(texts or [f"There is no figure. {why} {untimed if reasons else ''}"]))

    def throughputs(self) -> pd.DataFrame:
        """Return each strategy's largest batch under the memory limit, and its throughput with this batch."""
        titles = {
            "step": f"step time with {self.control}'s batch, relative",
            "batch": "largest batch (sequences)",
            "speed": "throughput with the largest batch, relative",
        }
        step, speed = (self.speeds[name].map(tables.center) for name in ("equal_ratios", "own_ratios"))
        own = self.speeds.assign(step=step, speed=speed)
        return own[["strategy", *titles]].replace({"batch": {0: None}}).rename(columns=titles)

    def against_memory(self) -> list[Figure]:
        """Return the figure of time against memory of the first setting. Empty if there is no setting."""
        figures = []
        for rows in self.settings[:1]:
            names = ["workload", "size", "precision", "strategy", "processes", "options", "sequence_tokens"]
            alike = self.every.set_index(names).index.isin(rows.set_index(names).index)
            measured = self.every[alike].dropna(subset=["peak_gib"])
            peaks = tables.mean(measured, "peak_gib")["peak_gib"]
            ratios = pd.DataFrame({"time": tables.centers(rows), "memory": peaks / peaks.get(self.control)}).dropna()
            head = captions.head("Time per step against peak memory", pd.concat([rows, measured]))
            figures.append(plots.time_against_memory(ratios, head, self.control))
        return figures
