"""What is the answer to each page's own question? Losses, memory, time, processes, and the proof."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd

from study.compare import pairs
from study.compare.facts import QUIET, is_disturbed
from study.compare.words import bytes_text, computed_note, processes, three_digits
from study.report import markup
from study.report.markup import Html
from study.report.pages.cells import (
    CLOSE,
    STATE_COLUMNS,
    Verdicts,
    against_paper,
    final_loss,
    fixed,
    held_out,
    named,
    number,
    other_parts,
    outcomes,
    peak_column,
    speed,
    states,
    time,
    unit_of,
)
from study.report.pages.opening import times_decide
from study.report.pages.runs import SETTING, PageRow, blocks, boxes, by_box, plain, rows, rows_once, table_of
from study.report.words import count, listed, percent

LOSSES_NOTE = """\
Final loss: the mean of the last steps, over seeds. Against the control: the verdict, and the relative difference with
its 95 % interval. Margin: below it 95 of 100 pairs of equal runs of the control differ. Bit-identical: equal final
weights for every seed. Held out: perplexity; or accuracy, with one run's binomial 95 % interval."""

MEMORY_NOTE = """\
Of the rank with the most, as the optimizer is about to step, on host and device together; peaks over all training
steps. By the paper: model states by arXiv:1910.02054, sec. 3.1 and 5. Buffers: the engine's communication buffers,
which the paper does not count. Imbalance: the largest rank's peak over the smallest's. Nothing is summed over ranks."""

TIMES_NOTE = """\
Seconds per step: the slowest rank's, without warm-up and the probed step; median over runs. Middle half: of the
steps. Against the control: geometric means over runs, whose 95 % interval is of one comparison: of twenty without any
effect one is expected to leave out 0. Margin: below it 95 of 100 pairs of equal runs of the control differ. Tokens:
without padding. MFU: model FLOPs of forward and backward, counted by torch.utils.flop_counter, over the card's dense
peak."""

SCALING_NOTE = """\
Strong scaling: the global batch is the same on every number of processes. Efficiency: tokens per second and process
over the base's. Model states: bytes per parameter on the rank with the most, in parentheses by the paper. Sent: the
collectives of a step as NCCL sends them, an all-reduce twice; gloo sends a reduce-scatter twice too."""

PROOF_NOTE = """\
Read back from the engine before the first step; a run that is not what was asked stops there. Ranks: how many counted
their bytes. Bucket: elements. Sharded: parameters that are really partitioned."""


# ---------------------------------------------------------------- losses


def losses(runs: pd.DataFrame, compared: pd.DataFrame, control: str) -> Html:
    """What was learned, and how far that is from the control."""
    verdicts = Verdicts(compared, control, "final_loss")
    columns: dict[str, Callable[[PageRow], Any]] = {
        "seeds": lambda row: row.runs["seed"].nunique(),
        "held out": held_out,
        "final loss": final_loss,
        f"against {control}": verdicts.cell,
        "margin": verdicts.margin,
    }
    return by_box(
        runs,
        lambda here: table_of(
            here, "What was learned", columns, LOSSES_NOTE, words=[f"against {control}"], split=rows_once
        ),
    )


# ---------------------------------------------------------------- memory


def memory_in_words(runs: pd.DataFrame) -> Html:
    """How far the measured model states are from the paper's formula."""

    def make(here: pd.DataFrame) -> str:
        ratios = against_paper(here)
        if ratios.empty:
            return markup.paragraphs("No model states were measured.")
        near = (ratios - 1).abs() <= CLOSE
        as_said = near.all(axis=1)
        words = f"{as_said.sum()} of {count(len(ratios), 'strategy', 'strategies')} hold what the paper's formula says"
        words += f", in every part to within {percent(CLOSE)}: {named(ratios[as_said].index)}" if as_said.any() else ""
        if by_chance := other_parts(ratios):
            parts = ratios.loc[by_chance[0]].drop("model states")[~near.loc[by_chance[0]]]
            differ = listed([f"{three_digits(ratio)} times the {name}" for name, ratio in parts.items()])
            others = f", and so {named(by_chance[1:])}" if by_chance[1:] else ""
            words += f". Of {by_chance[0]} the total agrees and the parts do not: it holds {differ} of the formula"
            words += others
        far = ratios.loc[~near["model states"], "model states"]
        if len(far):
            most = far.idxmax() if far.max() > 1 else far.idxmin()
            words += f". Furthest from it in all is {most}, with {three_digits(far[most])} times as much"
        return markup.paragraphs(f"{words}.")

    return by_box(runs, make)


def memory(runs: pd.DataFrame) -> Html:
    """What the rank with the most holds, part by part, beside the paper; and its peak."""
    parts = {**STATE_COLUMNS, "by the paper": "paper_state_bytes"}

    def make(here: pd.DataFrame) -> str:
        on_gpu = "cuda" in set(here["device"])
        peaks = {"buffers": "communication_buffer_bytes", "peak": peak_column(here)}
        peaks |= {"reserved": "peak_reserved_bytes"} if on_gpu else {"resident": "peak_resident_bytes"}
        columns: dict[str, Callable[[PageRow], Any]] = {}
        for named_columns in (parts, peaks):
            unit = unit_of(here, *named_columns.values())
            for words, name in named_columns.items():
                columns[f"{words}, {unit.name}"] = lambda row, name=name, unit=unit: number(
                    row.runs[name].max() / unit.size
                )
        columns["imbalance"] = lambda row: fixed(row.runs["memory_imbalance"].max(), 2)
        limits = sorted(here["device_memory_bytes"].dropna().unique())
        has = (
            f" The {'card' if on_gpu else 'host'} has {listed([bytes_text(limit) for limit in limits])}."
            if limits
            else ""
        )
        return table_of(here, "What a rank holds", columns, MEMORY_NOTE + has + computed_note(here))

    return by_box(runs, make)


# ---------------------------------------------------------------- time


def times(runs: pd.DataFrame, compared: pd.DataFrame, control: str) -> Html:
    """How long a step takes, and what that is per token, per FLOP and per joule."""
    verdicts = Verdicts(compared, control, "seconds_per_step")

    def middle_half(row: PageRow) -> str | None:
        lower, upper = (row.runs[name].median() for name in ("seconds_lower", "seconds_upper"))
        return None if pd.isna(lower) else f"{number(lower)} to {number(upper)}"

    columns: dict[str, Callable[[PageRow], Any]] = {
        "runs": _timed,
        "seconds per step": time,
        "middle half": speed(middle_half),
        f"against {control}": verdicts.cell,
        "margin": verdicts.margin,
        "tokens per second and process": speed(lambda row: number(row.runs["tokens_per_second_per_gpu"].median())),
        "model TFLOP per second and process": speed(
            lambda row: number(row.runs["model_flops_per_second"].median() / row.world_size / 1e12)
        ),
        "MFU": lambda row: fixed(row.runs["mfu"].median(), 3),
        "joules per token": lambda row: number(row.runs["joules_per_token"].median()),
    }

    def make(here: pd.DataFrame) -> str:
        note = TIMES_NOTE + _apart(here) + _disturbed(here)
        shown = table_of(here, "How long a step takes", columns, note, words=[f"against {control}"])
        return shown if times_decide(compared) else markup.details("The times, which decide nothing", shown)

    return by_box(runs, make)


def _timed(row: PageRow) -> Html:
    """The outcomes of the runs that were not disturbed, and how many were."""
    disturbed = row.runs["share_of_others"].map(is_disturbed)
    left_out = f"<small>{disturbed.sum()} disturbed</small>" if disturbed.any() else ""
    return Html(f"{outcomes(row._replace(runs=row.runs[~disturbed])).text}{left_out}")


def _apart(runs: pd.DataFrame) -> str:
    """How far equal runs were from one another, by the strategy where that is most; empty where none was repeated."""
    equal = runs.dropna(subset=["seconds_per_step"]).groupby([*pairs.CELL, "strategy", "world_size", "seed"])
    spread = (equal["seconds_per_step"].max() / equal["seconds_per_step"].min() - 1)[equal.size() > 1]
    if spread.empty:
        return ""
    return f" Equal runs were up to {percent(spread.max())} apart ({spread.idxmax()[len(pairs.CELL)]})."


def _disturbed(runs: pd.DataFrame) -> str:
    """How many runs have no times because their box was busy with something else; empty where that is unknown."""
    known = runs["share_of_others"].dropna()
    if known.empty:
        return ""
    quiet = known[~known.map(is_disturbed)]
    most = "" if quiet.empty else f"; in the others they took at most {percent(quiet.max())}"
    return (
        f" Left out, as other processes took more than {percent(QUIET)} of the processors meanwhile: "
        f"{len(known) - len(quiet)} of {count(len(known), 'run')}{most}."
    )


def largest_batch(runs: pd.DataFrame) -> Html:
    """What each strategy does at the largest global batch that fits; nothing where a study tried one alone."""

    def make(here: pd.DataFrame) -> str:
        largest = pairs.largest_batch(here)
        peak = peak_column(here)
        unit = unit_of(here, peak)
        groups = []
        for (workload, size, precision), members in largest.groupby(["workload", "size", "precision"], dropna=False):
            lines = [
                [
                    batch["strategy"],
                    batch["world_size"],
                    number(batch["global_batch_size"]),
                    number(batch["tokens_per_second_per_gpu"]),
                    number(batch[peak] / unit.size),
                    number(batch["next_batch_size"]) or "",
                    batch["next_outcome"].replace("_", " "),
                ]
                for batch in members.to_dict("records")
            ]
            precision_words = "unknown precision" if pd.isna(precision) else precision
            groups.append((f"{workload} {size}, {precision_words}", lines))
        head = ["strategy", "processes", "global batch", "tokens per second and process", f"peak memory, {unit.name}",
                "next batch", "what came of it"]  # fmt: skip
        return markup.table("The largest global batch that fits", head, groups, words=["what came of it"])

    tried = runs.groupby(["workload", "size", "strategy", "world_size"])["global_batch_size"].nunique()
    if tried.max() == 1:
        return Html("")  # none is the largest that fits
    return Html(f"<h2>The largest batch that fits</h2>\n{by_box(runs, make).text}")


# ---------------------------------------------------------------- processes


def scaling_in_words(runs: pd.DataFrame, compared: pd.DataFrame) -> Html:
    """The best and the worst efficiency on the largest number of processes whose times count."""
    if not times_decide(compared):
        return Html(markup.paragraphs("What more processes cost in time, the times of these runs cannot decide."))

    def make(here: pd.DataFrame) -> str:
        efficiencies = pairs.scaling(here)
        of_one = efficiencies["base_world_size"] == 1  # else there is nothing that "what one process does" would be
        efficiencies = efficiencies[of_one & (efficiencies["world_size"] > 1)].dropna(subset=["scaling_efficiency"])
        sentences = []
        for block in blocks(here):
            of_block = efficiencies[
                (efficiencies[list(SETTING)] == pd.Series(block.key, index=list(SETTING))).all(axis=1)
            ]
            if of_block.empty:
                continue
            of_block = of_block[of_block["world_size"] == of_block["world_size"].max()].sort_values(
                "scaling_efficiency"
            )
            worst, best = of_block.iloc[0], of_block.iloc[-1]
            sentences.append(
                f"{block.words}, on {processes(best['world_size'])}: each does from "
                f"{100 * worst['scaling_efficiency']:.0f} % ({worst['strategy']}) to "
                f"{100 * best['scaling_efficiency']:.0f} % ({best['strategy']}) of what {best['base']} does."
            )
        crowded = sorted(here.loc[here["oversubscribed"], "world_size"].unique())
        if crowded:
            sentences.append(
                f"Times on {listed(crowded)} processes are left out: they shared the {boxes(here)[0]}, and say "
                "nothing of a strategy."
            )
        return markup.paragraphs(*sentences or ["No time can be compared with that of one process."])

    return by_box(runs, make)


def scaling(runs: pd.DataFrame, compared: pd.DataFrame) -> Html:
    """What more processes leave of each one's speed, and what each then holds, at one global batch."""

    def make(here: pd.DataFrame) -> str:
        scaled_runs: dict[tuple, list[dict[str, Any]]] = {}
        for scaled in pairs.scaling(here).to_dict("records"):
            scaled_runs.setdefault(
                (tuple(scaled[name] for name in SETTING), scaled["strategy"], scaled["world_size"]), []
            ).append(scaled)
        sent = unit_of(here, "collective_bytes")

        def of(row: PageRow) -> list[dict[str, Any]]:
            return scaled_runs.get((row.key, row.strategy, row.world_size), [])

        took: dict[str, Callable[[PageRow], Any]] = {
            "seconds per step": time,
            "tokens per second and process": speed(lambda row: number(row.runs["tokens_per_second_per_gpu"].median())),
            "efficiency": lambda row: (
                "; ".join(f"{100 * scaled['scaling_efficiency']:.0f} %" for scaled in of(row) if pd.isna(scaled["why"]))
                or None
            ),
            "against": lambda row: "; ".join(
                scaled["base"] if pd.isna(scaled["why"]) else scaled["why"] for scaled in of(row)
            ),
        }
        columns: dict[str, Callable[[PageRow], Any]] = {
            "runs": outcomes,
            **(took if times_decide(compared) else {}),
            "model states (paper)": states,
            f"sent per step, {sent.name}": lambda row: number(row.runs["collective_bytes"].max() / sent.size),
        }
        shown = table_of(here, "One process and several", columns, SCALING_NOTE, words=["against"])
        if times_decide(compared):
            return shown
        times = table_of(here, "One process and several, in time", took, SCALING_NOTE, words=["against"])
        return shown + markup.details("The times, which decide nothing", times)

    return by_box(runs, make)


# ---------------------------------------------------------------- the proof


def proof_in_words(runs: pd.DataFrame) -> Html:
    """How many runs proved what they are, and how many never came so far."""
    proved = runs[runs["engine_class"].notna()]
    staged = proved[proved["zero_stage"].notna() & proved["strategy"].str.match(r"zero\d")]
    agree = staged["strategy"].str[4].astype(int) == staged["zero_stage"]
    whole = proved["num_ranks_proved"] == proved["world_size"]
    lead = (
        "A file that asks for a way to train may be read otherwise by the programs below it. So each training reads "
        f"back what was really built before it takes a step: {len(proved)} of {count(len(runs), 'run')} did"
    )
    lead += (
        f", and {agree.sum()} of the {len(staged)} by DeepSpeed have the stage that was asked." if len(staged) else "."
    )
    ranks = f"In {whole.sum()} of {len(proved)} every process counted what it holds."
    return Html(markup.paragraphs(lead, kind="lead") + markup.paragraphs(ranks))


def proof(runs: pd.DataFrame) -> Html:
    """What was asked, and what the engine said it was when it was built."""
    columns = {
        "stage": "zero_stage", "engine": "engine_class", "optimizer offload": "offload_optimizer_device",
        "parameter offload": "offload_param_device", "sharded": "partitioned_parameters",
        "optimizer": "optimizer_class",
    }  # fmt: skip
    more = {
        "precision": "precision", "backend": "backend", "clipping": "gradient_clipping", "overlap": "overlap_comm",
        "bucket": "reduce_bucket_size",
    }  # fmt: skip
    every = columns | more
    words = ["engine", "optimizer", "optimizer offload", "parameter offload", "precision", "backend", "overlap"]

    def shown(here: pd.DataFrame, caption: str, columns: dict[str, str]) -> str:
        groups = []
        for (workload, size), members in here.groupby(["workload", "size"]):
            lines = []
            for row in rows(members):
                proved = row.runs[row.runs["engine_class"].notna()]
                for _, alike in proved.groupby(list(every.values()), dropna=False):
                    counts = sorted(alike["num_ranks_proved"].dropna().unique())
                    ranks = ", ".join(f"{ranks:.0f}" for ranks in counts) or None
                    facts = [_proved(name, alike.iloc[0][name]) for name in columns.values()]
                    lines.append([f"{row.strategy} on {row.world_size}", *facts, len(alike), ranks])
            groups.append((f"{workload} {size}", lines))
        return markup.table(caption, ["asked", *columns, "runs", "ranks"], groups, PROOF_NOTE, words)

    def make(here: pd.DataFrame) -> str:
        return shown(here, "What was asked, and what ran", columns) + markup.details(
            "More columns: " + ", ".join(more), shown(here, "What else the engine said it was", more)
        )

    return by_box(runs, make)


def _proved(name: str, value: Any) -> str:
    if pd.isna(value):
        return "\N{EN DASH}"  # it has none: stages and buckets are DeepSpeed's
    return f"{value:,.0f}" if name == "reduce_bucket_size" else plain(value)
