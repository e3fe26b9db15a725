"""The notebook `memory`: how much memory a process uses under each strategy, and what it is used for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd
from IPython.display import Markdown
from matplotlib.figure import Figure

from study.compare import facts
from study.compare.predicted import REASONS, paper_states, state_differences
from study.report import by_machine, captions, plots, sentences, tables
from study.report.pages.shown import markdown
from zero_study.engines.strategy_names import in_order
from zero_study.terminal import GIB

MACHINES = [("a100-80gb", 8), ("h100-sxm", 8)]  # of the predictions for adapters
LORA = {"lora_rank": 16, "lora_target": "all-linear"}
TRAINED: dict[str, dict[str, Any]] = {
    "all weights": {},
    "LoRA": LORA,
    "LoRA, weights in 4 bits": {**LORA, "load_in_4bit": True},
}


class Peaks:
    """The memory peaks of the runs in these folders.

    `runs` is the setting with most strategies, of large models if there are any. `peaks` has its means by strategy.
    `tried` are the runs with a memory limit that finished or ran out of memory.
    """

    def __init__(
        self, records: str | Sequence[str], by_size: str | Sequence[str], capped: str | Sequence[str], control: str
    ) -> None:
        self.records, self.capped = records, capped
        self.every = plots.filter_runs(tables.runs(records), status="ok")
        self.control = tables.control_of(self.every, control)
        self.runs = tables.settings(self.every, self.control)[0]
        self.peaks = tables.mean(self.runs, "peak_gib", "theory_peak_gib", "model_states_gib", "peak_process_gib")
        self.crossings, self.of_sizes = tables.crossings(by_size), plots.filter_runs(tables.runs(by_size), status="ok")
        self.limited = tables.runs(capped)
        self.tried = plots.filter_runs(self.limited, status=["ok", "out_of_memory"])

    def answer(self) -> Markdown:
        """Say how high the peaks of one setting are, and from which model size on each strategy saves memory."""
        texts = [f"**Answer for {captions.setting(self.runs)}.** {sentences.memory(self.peaks, self.control)}"]
        by = ["workload", "precision", "processes"]
        for (workload, precision, processes), rows in self.crossings.groupby(by, sort=False):
            name = f"{captions.readable(workload)} of several sizes, {precision}, {processes} processes"
            texts.append(f"**Answer for {name}.** {sentences.crossings(rows, 'ddp')}")
        return markdown(*texts)

    def what_was_run(self) -> Markdown:
        """Describe the runs that the page shows."""
        text = f"**What was run.** {captions.scope(self.every)} {captions.MEASURED}"
        finished = (self.tried["status"] == "ok").sum()
        limited = (
            f"The last section shows {captions.scope(self.tried)} {finished} of them finished, and the others ran out "
            "of memory."
        )
        return markdown(text, limited if len(self.tried) else "")

    def by_part(self) -> Figure:
        """Return the figure of each strategy's peak, divided into its parts."""
        title = "Peak memory of the process that uses the most, by strategy"
        return plots.peak_by_part(self.runs, captions.head(title, self.runs, captions.LINE_AND_BARS), self.control)

    def numbers(self) -> pd.DataFrame:
        """Return a table of the peaks of each strategy."""
        peaks, control = self.peaks, self.control
        table = pd.DataFrame(
            {
                "peak of tensors (GiB)": peaks["peak_gib"],
                f"relative to {control}": peaks["peak_gib"] / peaks.loc[control, "peak_gib"],
                "predicted peak (GiB)": peaks["theory_peak_gib"],
                "peak, bytes per parameter": peaks["peak_gib"] * GIB / self.runs["parameters"].iloc[0],
                "model states (GiB)": peaks["model_states_gib"],
                "whole process (GiB)": peaks["peak_process_gib"],
            }
        )
        return table.sort_values(table.columns[0]).dropna(axis="columns", how="all")

    def every_setting(self) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Return the runs with several processes, and a table of their peaks by setting and strategy."""
        several = self.every[self.every["processes"] > 1]
        labeled = several.assign(model=captions.short_names(several))
        varying = [name for name in ("options", "batch_sequences", "sequence_tokens") if labeled[name].nunique() > 1]
        index = ["parameters", "model", "precision", *varying, "processes"]
        table = labeled.pivot_table(index=index, columns="strategy", values="peak_gib", sort=False)
        table = table.dropna(axis="columns", thresh=len(table) // 2 + 1).sort_index().droplevel("parameters")
        return several, table[in_order(table.columns)]

    def model_states(self) -> tuple[pd.DataFrame, Markdown]:
        """Return a table of the model states as predicted by the paper and as counted, and explain the differences."""
        states = tables.states(self.records)
        is_shown = states["run"].isin(self.runs["run"]) & (states["moment"] == "updating") & (states["rank"] == 0)
        parts = states[is_shown].pivot_table(index="strategy", columns="part", values="bytes_per_parameter", sort=False)
        parts = parts[["parameters", "gradients", "optimizer_states"]]
        counted = self.runs[self.runs["record"].notna()].drop_duplicates("strategy").set_index("strategy")["record"]
        paper = {name: paper_states(record, "stepping").total / record.num_params for name, record in counted.items()}
        reasons = {}  # by strategy: why a part differs from the paper by more than 2 % of a byte per parameter
        for name, record in counted.items():
            differences = (state_differences(record, "stepping") or [[]])[0]
            large = [part for part in differences if abs(part.num_bytes) > 0.02 * record.num_params]
            reasons[name] = sorted({part.reason for part in large if part.part in parts})
        parts.insert(0, "counted, all parts", parts.sum(axis="columns"))
        parts.insert(0, "ZeRO paper", pd.Series(paper))
        parts["why it differs"] = pd.Series({name: ", ".join(names) for name, names in reasons.items()})
        explained = dict.fromkeys(reason for names in reasons.values() for reason in names)
        text = sentences.bullets(f"*{reason}*: {REASONS[reason]}" for reason in explained)
        return parts.rename(columns=lambda name: name.replace("_", " ")).rename_axis(columns=None), markdown(text)

    def per_parameter(self) -> Figure:
        """Return the figure of the peak per parameter by model size, for the setting with the most sizes."""
        setting = ["workload", "precision", "processes"]
        most_sizes = self.of_sizes.groupby(setting)["size"].nunique().idxmax()
        sizes = plots.filter_runs(self.of_sizes, **dict(zip(setting, most_sizes, strict=True)))
        sizes = sizes.dropna(subset=["peak_gib"])
        sizes = sizes.assign(per=sizes["peak_gib"] * GIB / sizes["parameters"], millions=sizes["parameters"] / 1e6)
        shown = sizes[sizes.groupby("strategy")["size"].transform("nunique") == sizes["size"].nunique()]
        head = captions.head("Peak memory of tensors per parameter, by model size", shown)
        x, y = ("millions", "model (millions of parameters)"), ("per", "peak memory (bytes per parameter)")
        return plots.lines(shown, x, y, head, "ddp")

    def largest(self) -> Iterator[Figure]:
        """Yield one figure per memory limit, with the largest model that fits under each strategy."""
        largest, control = tables.largest(self.capped), tables.control_of(self.limited, self.control)
        for cap, rows in largest.groupby("cap_gib"):
            by_strategy = rows.set_index("strategy")
            trained, predicted = (by_strategy[name].map(tables.millions) for name in ("trained", "predicted"))
            title = f"Largest model that fits in {cap:g} GiB per process"
            source = "Bars: measured by this project. Diamonds: predicted. No diamond: no model is predicted to fit."
            head = captions.head(title, tables.capped(self.limited, cap), source)
            yield plots.largest_models(trained, predicted, control, head)


class Adapters:
    """Runs that train an adapter, the same runs with all weights trained, and predictions."""

    def __init__(self, records: str | Sequence[str]) -> None:
        runs = plots.filter_runs(tables.runs(records), status="ok", precision="fp32")
        trained = runs["record"].map(lambda record: ", ".join(facts.shown_adapter(record)) or "all weights")
        self.runs = runs.assign(model=captions.short_names(runs), trained=trained)

    def measured(self, column: str) -> pd.DataFrame:
        """Return a table of one measured quantity by model and strategy. Columns say which weights are trained."""
        table = self.runs.pivot_table(index=["model", "strategy"], columns="trained", values=column, sort=False)
        return table.sort_index(level="model", sort_remaining=False).rename_axis(columns=None)

    @staticmethod
    def predicted() -> dict[str, pd.DataFrame]:
        """Return the predicted memory per GPU (GiB) and speed (tokens per second) of Llama-3.1-8B on eight GPUs."""
        parts = []
        for trained, settings in TRAINED.items():
            advices = by_machine.ask({"llama-3.1-8b": 2048}, MACHINES, 64 * 2048, micro_batch_size=1, **settings)
            parts.append(by_machine.predicted(advices).assign(trained=trained))
        rows = pd.concat(parts)
        rows = rows[rows["fits"]]
        tables_by_name = {}
        for name in ("memory", "speed"):
            table = rows.pivot_table(index=["machine", "strategy"], columns="trained", values=name, sort=False)
            tables_by_name[name] = table[list(TRAINED)].rename_axis(columns=None)
        return tables_by_name
