"""The notebook `a100-or-h100`: models on machines with GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd
from IPython.display import Markdown
from matplotlib.figure import Figure

from study.report import by_machine, machine_plots, sentences
from study.report.pages.shown import markdown

HEADS = {"memory": "GiB per GPU", "speed": "tokens per second", "cost": "US dollars per billion tokens"}


class Machines:
    """Models on machines with GPUs: predictions for each strategy, and measured runs if there are any."""

    def __init__(
        self,
        models: Mapping[str, int],
        machines: Sequence[tuple[str, int]],
        strategies: Sequence[str],
        tokens_per_step: int,
        prices: Mapping[str, float],
        records: Sequence[str],
        stack: str,
    ) -> None:
        self.models, self.machines, self.prices = models, machines, prices
        self.compared = by_machine.compare(models, machines, strategies, tokens_per_step, prices, records, stack=stack)
        self.names = [f"{count} x {gpu}" for gpu, count in machines]

    def answer(self) -> Markdown:
        """Return which models fit on which machine, and how their speeds and costs compare."""
        names, compared = self.names, self.compared
        last = names[2] if len(names) > 2 else names[-1]
        lines = [sentences.fitting(compared.best, self.models, name) for name in (names[0], last)]
        lines += [sentences.faster_and_cheaper(compared.best, name, last) for name in names[:2] if name != last]
        lines += [sentences.cheapest(compared.best, model) for model in self.models]
        kinds = by_machine.kinds(compared.rows, compared.others)
        return markdown(f"**Answer** ({kinds}):", sentences.bullets(lines))

    def best(self) -> pd.DataFrame:
        """Return a table of the recommended strategy of each model on each machine, with its values."""
        columns = ["model", "machine", "strategy", *HEADS, "setting", "memory_source", "speed_source", "change"]
        best = self.compared.best
        table = best[columns].assign(cost=[sentences.cost(row) for row in best.to_dict("records")])
        heads = {"memory_source": "memory is", "speed_source": "speed and cost are", "change": "recommended change"}
        return table.rename(columns=HEADS | heads)

    def overview(self) -> Figure:
        """Return one figure of all models on all machines."""
        compared = self.compared
        headings = {model: by_machine.heading(advice) for (model, _), advice in compared.advices.items()}
        head = by_machine.head(compared)
        return machine_plots.models_on_machines(compared.rows, compared.others, compared.best, headings, head)

    def figures(self) -> Iterator[Figure]:
        """Yield one figure per model, with the values of each strategy on each machine."""
        for model in self.models:
            part = self.compared.of_model(model)
            yield machine_plots.of_model(part.rows, part.others, by_machine.head(part))

    def without_room(self) -> pd.DataFrame:
        """Return a table of the strategies that do not fit into memory."""
        rows = self.compared.rows
        rows = rows[~rows["fits"].astype(bool)][["model", "machine", "strategy", "memory", "lacks"]]
        return rows.rename(columns={"memory": HEADS["memory"]})

    def published(self) -> pd.DataFrame:
        """Return a table of the measurements by others, with a link to each source."""
        rows = self.compared.others.drop_duplicates([*by_machine.KEY, "setting", "what", "memory", "speed"])
        values = [_value(row) for row in rows.to_dict("records")]
        sources = [f'<a href="{row["url"]}">{row["measured_by"]}</a>' for row in rows.to_dict("records")]
        columns = ["machine", "strategy", "what", "value", "setting", "differences", "grade", "source"]
        heads = {"what": "measured", "differences": "differs in", "setting": "model and setting"}
        return rows.assign(value=values, source=sources)[columns].rename(columns=heads)

    def own(self) -> pd.DataFrame:
        """Return a table of the measurements by this project. Empty if there are none."""
        rows = self.compared.rows
        rows = rows[rows["source"] == by_machine.MEASURED][[*by_machine.KEY, *HEADS, "setting"]]
        return rows.rename(columns={**HEADS, "memory": "peak of tensors (GiB)"})

    def equal_prices(self) -> tuple[pd.DataFrame, str]:
        """Return the hourly GPU price at which each machine costs as much as the base machine, and the base's name."""
        base = self.names[min(1, len(self.names) - 1)]
        shape: dict[str, Any] = {"index": self.models, "columns": self.names}
        speeds, costs = (
            self.compared.best.pivot(index="model", columns="machine", values=name).reindex(**shape)
            for name in ("speed", "cost")
        )
        gpus = {name: count for name, (_, count) in zip(self.names, self.machines, strict=True)}
        per_gpu = speeds / pd.Series(gpus)
        paid = (costs * per_gpu * 3600 / 1e9)[base]  # US dollars per GPU and hour
        limits = per_gpu.div(per_gpu[base], axis=0).mul(paid, axis=0).drop(columns=base)
        heads = {name: f"{name}: US dollars per GPU and hour" for name in limits}
        return limits.rename(columns=heads).rename_axis(columns=None), base


def _value(row: Mapping[str, Any]) -> str:
    if row["speed"] > 0:
        return f"{row['speed']:,.0f}"
    return f"{row['memory']:.1f} GiB" if row["memory"] > 0 else ""
