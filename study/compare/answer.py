"""What is the answer so far, in one small table? README's, from committed records."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from study.compare import differences, records
from study.compare import table as tidy
from study.compare.figures.drawing import in_order

# What was trained long enough to learn, with the held-out metric and how it is written.
LEARNED = {("bert-imdb", "micro"): ("accuracy", ".3f"), ("gpt-wikitext", "mini"): ("perplexity", ".0f")}
NAMES = {"bert-imdb": "BERT", "gpt-wikitext": "GPT"}
STATES = ("bert-imdb", "large")
WORLD_SIZE = 2

# Times the parameters, sent by each rank and step (arXiv:1910.02054, sec. 7); None: no ZeRO stage.
PAPER_VOLUME = {None: 2, 0: 2, 1: 2, 2: 2, 3: 3}


def table(folders: Sequence[Path], control: str = "ddp") -> str:
    """Make the table and the sentence on how many runs it rests on, in Markdown."""
    everything = tidy.read(folders)
    compared = differences.compare(everything, control, ["final_loss"])  # more processes tell more of the margin
    compared, runs = (
        rows[(rows["strategy"] == "single") | (rows["world_size"] == WORLD_SIZE)] for rows in (compared, everything)
    )
    states = _cell(runs, STATES)
    head, columns = ["strategy"], []
    for place, (metric, form) in LEARNED.items():
        name = NAMES[place[0]]
        learned = _cell(runs, place)
        head += [f"{name}: {metric}", f"{name}: loss against {control}"]
        columns.append((learned.groupby("strategy")[metric], form, _cell(compared, place).set_index("strategy")))
    head += ["BERT-large: states (paper)", "and buffers", "sent (paper)"]
    rows = []
    for strategy in in_order(runs["strategy"]):
        row = [f"`{strategy}`"]
        for values, form, against in columns:
            row.append(_number(values.mean().get(strategy), form))
            row.append(_difference(strategy, control, against))
        rows.append(row + _held(states[states["strategy"] == strategy]))
    return "\n".join([*records.markdown(head, rows), "", _basis(runs)])


def _cell(rows: pd.DataFrame, place: tuple[str, str]) -> pd.DataFrame:
    return rows[(rows["workload"] == place[0]) & (rows["size"] == place[1])]


def _number(value: float | None, form: str) -> str:
    return "unknown" if value is None or pd.isna(value) else format(value, form)


def _difference(strategy: str, control: str, against: pd.DataFrame) -> str:
    if strategy == control:
        return "the control"
    if strategy not in against.index:
        return "unknown"
    row = against.loc[strategy]
    if pd.isna(row["relative_low"]):
        return f"{row['relative_difference']:+.2%}, {row['verdict']}"
    return f"{row['relative_low']:+.2%} to {row['relative_high']:+.2%}, {row['verdict']}"


def _held(runs: pd.DataFrame) -> list[str]:
    """Bytes per parameter of the fullest rank, and parameters' bytes sent per step; in parentheses the paper's."""
    ok = runs[runs["status"] == "ok"]
    if ok.empty:
        return ["unknown" if runs.empty else runs["status"].iloc[0], "", ""]
    run = ok.iloc[0]
    stage = None if pd.isna(run["zero_stage"]) else int(run["zero_stage"])
    volume = PAPER_VOLUME[stage] if run["world_size"] > 1 else 0
    return [
        f"{run['model_state_bytes'] / run['num_params']:.2f} ({run['paper_state_bytes'] / run['num_params']:.0f})",
        f"{run['communication_buffer_bytes'] / run['num_params']:.2f}",
        f"{run['collective_bytes'] / (4 * run['num_params']):.2f} ({volume})",
    ]


def _basis(runs: pd.DataFrame) -> str:
    ok = runs[runs["status"] == "ok"]
    seeds = [_cell(ok, place)["seed"].nunique() for place in LEARNED]
    days = sorted({started[:10] for started in ok["started_at"]})
    boxes = ", ".join(sorted(ok["box"].unique()))
    span = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    counted = " and ".join(map(str, sorted(set(seeds))))
    return (
        f"{len(ok)} runs on {boxes}, {span}; {counted} seeds of BERT and GPT, one of BERT-large; "
        f"{WORLD_SIZE} processes, `single` one; fp32."
    )
