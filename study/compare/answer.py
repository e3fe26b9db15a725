"""The view `answer`: by strategy what was learned, held and sent, in one table; that of docs/results.md.

What a model learned is told by a study that was fixed in advance, where its runs lie in the folders; else by the runs
of a study that only compares.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from study.compare import differences, expected, verdict, verdict_text
from study.compare import table as tidy
from study.compare.verdict import SAME
from study.compare.verdict_text import Decided
from study.compare.words import in_order, markdown, signed_percent
from study.errors import Refusal

# What is shown of each model: the size where nothing was fixed in advance, the held-out metric, how it is written.
LEARNED = {"bert-imdb": ("micro", "accuracy", ".3f"), "gpt-wikitext": ("mini", "perplexity", ".0f")}
NAMES = {"bert-imdb": "BERT", "gpt-wikitext": "GPT"}
STATES = ("bert-imdb", "large")
WORLD_SIZE = 2


def table(folders: Sequence[Path], control: str = "ddp") -> str:
    """Make the table and the sentence on how many runs it rests on, in Markdown."""
    everything = expected.with_theory(tidy.read(folders))
    compared = differences.compare(everything, control, ["final_loss"])  # more processes tell more of the margin
    compared, runs = (
        rows[(rows["strategy"] == "single") | (rows["world_size"] == WORLD_SIZE)] for rows in (compared, everything)
    )
    ok = runs[runs["status"] == "ok"]
    if ok.empty:
        where = " ".join(map(str, folders))
        raise Refusal(f"{where}: none of {len(everything)} runs ended well on {WORLD_SIZE} processes, so no answer yet")
    tidy.check_control(everything, control)
    states = _cell(runs, *STATES)
    decided = {each.workload: each for each in verdict_text.decided_in(folders)}
    head, columns, seeds = ["strategy"], [], {}
    for workload, (size, metric, form) in LEARNED.items():
        name = NAMES[workload]
        head += [f"{name}: {metric}", f"{name}: loss against {control}"]
        if workload in decided:
            columns.append(_fixed(decided[workload], metric, form))
            seeds[name] = min(len(row.seeds) for row in decided[workload].judged)
        else:
            columns.append(_learned(_cell(ok, workload, size), _cell(compared, workload, size), metric, form, control))
            seeds[name] = _cell(ok, workload, size)["seed"].nunique()
    head += ["BERT-large: states (paper)", "and buffers", "sent (paper)"]
    rows = [
        [f"`{strategy}`", *(cell for column in columns for cell in column(strategy)),
         *_held(states[states["strategy"] == strategy])]
        for strategy in in_order(runs["strategy"])
    ]  # fmt: skip
    seeds["BERT-large"] = _cell(ok, *STATES)["seed"].nunique()
    return "\n".join([*markdown(head, rows), "", _basis(ok, seeds)])


Column = Callable[[str], tuple[str, str]]  # of a strategy: what it learned, and its loss against the control's


def _fixed(decided: Decided, metric: str, form: str) -> Column:
    """What a study says that was fixed in advance, of held-out loss; strategies that train an arm to the bit as it."""
    control, last = decided.study.control, max(endpoint.step for endpoint in decided.protocol.endpoints)
    arms = {row.strategy: row for row in decided.on(decided.primary) if row.world_size == WORLD_SIZE}
    arms |= {row.strategy: row for row in decided.on(decided.primary) if row.strategy == "single"}
    same = verdict.arms_of_same(decided.runs, decided.protocol)

    def cells(strategy: str) -> tuple[str, str]:
        arm = same.get(strategy, strategy)
        by_seed = decided.runs.of(arm, 1 if arm == "single" else WORLD_SIZE)
        if not by_seed:
            return _once(decided, strategy, last, metric, form)
        learned = f"as `{arm}`"
        if arm == strategy:
            learned = _over_starts([run.held_out[last][metric] for run in by_seed.values()], form)
        if arm == control:
            return learned, "the control" if strategy == control else f"as `{control}`, to the bit in one start"
        row, endpoint = arms[arm], decided.primary
        low, middle, high = map(signed_percent, (row.low, row.mean, row.high))
        judged = f"within {100 * endpoint.margin:g} %" if row.equivalence == SAME else row.equivalence
        whose = "" if arm == strategy else f", as `{arm}`, to the bit in one start"
        return learned, f"{middle} % ({low} to {high}), {judged}{whose}"

    return cells


def _once(decided: Decided, strategy: str, step: int, metric: str, form: str) -> tuple[str, str]:
    """What the one run says of a strategy that was to train an arm to the bit, and did not."""
    ensembles = verdict.find_ensembles(decided.runs, decided.protocol, decided.study.control)
    for seed, run in decided.runs.of(strategy, WORLD_SIZE, decided.protocol.once).items():
        reference = statistics.mean(each.held_out[step]["loss"] for each in ensembles[seed])
        far = run.held_out[step]["loss"] / reference - 1
        return f"{run.held_out[step][metric]:{form}} (one start)", f"{signed_percent(far)} %, one start, not judged"
    return "unknown", "unknown"


def _learned(ok: pd.DataFrame, compared: pd.DataFrame, metric: str, form: str, control: str) -> Column:
    """What runs say of which nothing was fixed in advance, of training loss."""
    by_seed = ok.groupby(["strategy", "seed"])[metric].mean()  # however often a seed was repeated
    starts = {strategy: list(each) for strategy, each in by_seed.groupby("strategy")}
    against = compared.set_index("strategy")
    return lambda strategy: (_over_starts(starts.get(strategy, []), form), _difference(strategy, control, against))


def _over_starts(values: list[float], form: str) -> str:
    """The mean, and in parentheses the 95 % interval of the mean over starts, where there are several."""
    if not values or pd.isna(values).any():
        return "unknown"
    middle, low, high = differences.t_interval(np.array(values))
    shown = format(middle, form)
    return shown if low is None or high is None else f"{shown} ({low:{form}} to {high:{form}})"


def _cell(rows: pd.DataFrame, workload: str, size: str) -> pd.DataFrame:
    return rows[(rows["workload"] == workload) & (rows["size"] == size)]


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
    """Bytes per parameter of the fullest rank, and parameters' bytes sent per step; in parentheses the paper's.

    Sent as NCCL would, and behind it as gloo does, over which the run talked, where that is more.
    """
    ok = runs[runs["status"] == "ok"]
    if ok.empty:
        return ["unknown" if runs.empty else runs["status"].iloc[0], "", ""]
    run = ok.iloc[0]
    each, sent = run["num_params"], expected.sent(run["record"])
    states, paper = _number(run["model_state_bytes"] / each, ".2f"), _number(run["paper_state_bytes"] / each, ".0f")
    computed = ", computed" if run["has_computed_buckets"] is True else ""
    said = "unknown"
    if sent is not None:
        by_gloo = run["backend"] == "gloo" and sent.by_gloo > sent.measured
        said = f"{sent.measured:.2f} ({sent.paper:.0f})" + (f", by gloo {sent.by_gloo:.2f}" if by_gloo else "")
    return [f"{states} ({paper})", _number(run["communication_buffer_bytes"] / each, ".2f") + computed, said]


def _basis(ok: pd.DataFrame, seeds: dict[str, int]) -> str:
    days = sorted({started[:10] for started in ok["started_at"]})
    boxes, precisions = (", ".join(sorted(ok[name].unique())) for name in ("box", "precision"))
    span = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    counted = ", ".join(f"{name} {number}" for name, number in seeds.items())
    return f"{len(ok)} runs on {boxes}, {span}; seeds: {counted}; {WORLD_SIZE} processes, `single` one; {precisions}."
