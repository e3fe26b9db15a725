"""The notebook `processes`: what changes if more processes share the same batch."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from IPython.display import Markdown
from matplotlib.figure import Figure

from study.compare import pairs, table
from study.report import captions, plots, sentences, tables
from study.report.pages.shown import markdown
from zero_study.terminal import GIB

LATE = "the run and the run with one process started many hours apart"


class Scaling:
    """The runs of these folders by number of processes. `lead` has the runs of one model with any of these numbers."""

    def __init__(self, records: str | Sequence[str], control: str) -> None:
        self.records = records
        self.every = plots.filter_runs(tables.runs(records), status="ok")
        self.control = tables.control_of(self.every, control)
        model = [name for name in tables.SETTING if name != "processes"]
        several = self.every[self.every.groupby(model)["processes"].transform("nunique") > 1]
        first = (tables.settings(several, self.control) or [self.every])[0]
        self.lead = plots.filter_runs(self.every, **first.iloc[0][model].to_dict())
        self.sharing = self.lead[self.lead["strategy"] != "single"]
        self.most = self.sharing["processes"].max()

    def answer(self) -> Markdown:
        """Return how much the peak memory falls if more processes share the same batch."""
        falls = sentences.more_processes(
            self.sharing.pivot_table(index="strategy", columns="processes", values="peak_gib")
        )
        return markdown(f"**Answer for {captions.setting(self.sharing)}.** {falls}")

    def peaks(self) -> Figure:
        """Return the figure of the peak memory by number of processes."""
        head = captions.head("Peak memory of the process that uses the most, by number of processes", self.sharing)
        x, y = ("processes", "number of processes"), ("peak_gib", "peak memory of tensors (GiB)")
        return plots.lines(self.sharing, x, y, head, self.control)

    def memory(self) -> pd.DataFrame:
        """Return a table of the peak and the model states per strategy and number of processes."""
        lead = self.lead.assign(states=self.lead["model_states_gib"] * GIB / self.lead["parameters"])
        columns = {"peak of tensors (GiB)": "peak_gib", "model states (bytes per parameter)": "states"}
        return pd.concat({title: self._by_processes(lead, column) for title, column in columns.items()}, axis="columns")

    def communication(self) -> tuple[pd.DataFrame, str]:
        """Return a table of the data sent and the number of collectives per strategy, and the title of the latter."""
        lead = self.lead.assign(times=self.lead["sent_gib_per_step"] * GIB / (4 * self.lead["parameters"]))
        sent = self._by_processes(lead, "times")
        kinds = tables.collectives(self.records)
        kinds = kinds[kinds["run"].isin(lead["run"]) & (kinds["processes"] == self.most)]
        counts = kinds.pivot_table(index="strategy", columns="kind", values="count", aggfunc="max", fill_value=0)
        counts = counts.rename(columns=lambda kind: kind.replace("_", "-"))
        counts = counts.loc[:, counts.sum() > 0].reindex(sent.index)
        title = f"number of collectives per step, {self.most} processes"
        return pd.concat({"data sent, by number of processes": sent, title: counts}, axis="columns"), title

    def losses(self) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Return the compared runs, and their largest differences with a row per model and number of processes."""
        compared = pd.concat(tables.settings(self.every, self.control))
        compared = compared[compared["size"].isin(compared.loc[compared["processes"] == self.most, "size"])]
        compared = compared.assign(model=captions.short_names(compared))
        index = ["model", "options", "precision", "batch_sequences", "steps", "processes", "seed"]
        losses = compared.pivot_table(index=index, columns="strategy", values="loss", sort=False)
        losses = losses.reindex(columns=losses.columns.union([self.control], sort=False))  # it may have no such run
        own = losses[self.control]
        differences = losses.sub(own, axis=0).div(own, axis=0).abs().drop(columns=self.control)
        return compared, differences.dropna(how="all").groupby(["model", "processes", "steps"]).max()

    def efficiency(self) -> tuple[pd.DataFrame, pd.DataFrame, pd.Series]:
        """Return the timed runs, their scaling efficiencies, and the reasons why other runs have none."""
        scaling = pairs.scaling(table.read(tables.folders(self.records)))
        scaling = scaling[scaling["strategy"] != "single"].assign(model=captions.short_names(scaling))
        timed = scaling.dropna(subset=["scaling_efficiency"])
        efficiency = timed.pivot_table(
            index="strategy", columns=["model", "world_size"], values="scaling_efficiency", sort=False
        ).rename_axis(columns=["model", "processes"])
        is_timed = captions.short_names(self.every).isin(timed["model"]) & self.every["processes"].isin(
            timed["world_size"]
        )
        reasons = scaling.loc[scaling["scaling_efficiency"].isna(), "why"]
        return self.every[is_timed], efficiency, reasons.str.replace(r"started \d+ hours apart", LATE, regex=True)

    @staticmethod
    def _by_processes(rows: pd.DataFrame, column: str) -> pd.DataFrame:
        return rows.pivot_table(index="strategy", columns="processes", values=column, sort=False)
