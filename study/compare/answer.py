"""What is the answer so far, in one table? That of docs/results.md, from committed records."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from study.compare import differences, markdown
from study.compare import table as tidy
from study.compare.order import in_order
from study.errors import Refusal
from study.theory.case import parameter_bytes

# What was trained long enough to learn, with the held-out metric and how it is written.
LEARNED = {("bert-imdb", "micro"): ("accuracy", ".3f"), ("gpt-wikitext", "mini"): ("perplexity", ".0f")}
NAMES = {"bert-imdb": "BERT", "gpt-wikitext": "GPT"}
STATES = ("bert-imdb", "large")
WORLD_SIZE = 2

# Times the parameters, sent by each rank and step (arXiv:1910.02054, sec. 7).
PAPER_VOLUME = {"all whole": 2, "parameters sharded": 3}


def table(folders: Sequence[Path], control: str = "ddp") -> str:
    """Make the table and the sentence on how many runs it rests on, in Markdown."""
    everything = tidy.read(folders)
    compared = differences.compare(everything, control, ["final_loss"])  # more processes tell more of the margin
    compared, runs = (
        rows[(rows["strategy"] == "single") | (rows["world_size"] == WORLD_SIZE)] for rows in (compared, everything)
    )
    ok = runs[runs["status"] == "ok"]
    if ok.empty:
        where = " ".join(map(str, folders))
        raise Refusal(f"{where}: none of {len(everything)} runs ended well on {WORLD_SIZE} processes, so no answer yet")
    states = _cell(runs, STATES)
    head, columns = ["strategy"], []
    for place, (metric, form) in LEARNED.items():
        name = NAMES[place[0]]
        by_seed = _cell(ok, place).groupby(["strategy", "seed"])[metric].mean()  # however often a seed was repeated
        head += [f"{name}: {metric}", f"{name}: loss against {control}"]
        means = by_seed.groupby("strategy").mean()
        columns.append((means, form, _cell(compared, place).set_index("strategy")))
    head += ["BERT-large: states (paper)", "and buffers", "sent (paper)"]
    rows = []
    for strategy in in_order(runs["strategy"]):
        row = [f"`{strategy}`"]
        for means, form, against in columns:
            row.append(_number(means.get(strategy), form))
            row.append(_difference(strategy, control, against))
        rows.append(row + _held(states[states["strategy"] == strategy]))
    return "\n".join([*markdown.markdown(head, rows), "", _basis(ok)])


def _cell(rows: pd.DataFrame, place: tuple[str, str]) -> pd.DataFrame:
    return rows[(rows["workload"] == place[0]) & (rows["size"] == place[1])]


def _number(value: float | None, form: str) -> str:
    return "unknown" if value is None or pd.isna(value) else format(value, form)


def _difference(strategy: str, control: str, against: pd.DataFrame) -> str:
    if strategy == control:
        return "the control"
    if strategy not in against.index:
        return "unknown"
    said = []
    for row in against.loc[[strategy]].to_dict("records"):  # usually one
        words = [_percent(row[name]) for name in ("relative_low", "relative_high") if pd.notna(row[name])]
        if not words and pd.notna(row["relative_difference"]):
            words = [_percent(row["relative_difference"])]
        said.append(", ".join([*([" to ".join(words)] if words else []), row["verdict"]]))
    return "; ".join(said)


def _percent(relative: float) -> str:
    return f"{100 * relative:+.1g} %" if 0 < abs(relative) < 1e-4 else f"{relative:+.2%}"


def _held(runs: pd.DataFrame) -> list[str]:
    """Bytes per parameter of the fullest rank, and parameters' bytes sent per step; in parentheses the paper's."""
    ok = runs[runs["status"] == "ok"]
    if ok.empty:
        return ["unknown" if runs.empty else runs["status"].iloc[0], "", ""]
    run = ok.iloc[0]
    sharded = run["zero_stage"] == 3 or run["strategy"].startswith("fsdp2")
    volume = PAPER_VOLUME["parameters sharded" if sharded else "all whole"] if run["world_size"] > 1 else 0
    each = run["num_params"]
    states, paper = _number(run["model_state_bytes"] / each, ".2f"), _number(run["paper_state_bytes"] / each, ".0f")
    sent = run["collective_bytes"] / (parameter_bytes(run["precision"]) * each)
    computed = ", computed" if run["has_computed_buckets"] is True else ""
    return [
        f"{states} ({paper})",
        _number(run["communication_buffer_bytes"] / each, ".2f") + computed,
        f"{_number(sent, '.2f')} ({volume})",
    ]


def _basis(ok: pd.DataFrame) -> str:
    seeds = {NAMES[place[0]]: _cell(ok, place)["seed"].nunique() for place in LEARNED}
    seeds["BERT-large"] = _cell(ok, STATES)["seed"].nunique()
    days = sorted({started[:10] for started in ok["started_at"]})
    boxes, precisions = (", ".join(sorted(ok[name].unique())) for name in ("box", "precision"))
    span = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    counted = ", ".join(f"{name} {number}" for name, number in seeds.items())
    return f"{len(ok)} runs on {boxes}, {span}; seeds: {counted}; {WORLD_SIZE} processes, `single` one; {precisions}."
