"""The tables and figures of a study's pages, from the tidy table of its runs."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from study.compare import pairs, table, verdict_text
from study.compare.verdict_text import Decided
from study.compare.words import bytes_text, computed_note, in_order, processes
from study.errors import Refusal
from study.report import figures, markup
from study.report.drawing import Figure
from study.report.markup import Html, count, fixed, listed, number
from study.report.run_rows import (
    SETTING,
    Cell,
    PageRow,
    Verdicts,
    blocks,
    by_box,
    held_out,
    in_project,
    in_unit,
    learned,
    outcomes,
    peak_column,
    plain,
    rows,
    rows_once,
    settings,
    speed,
    states,
    table_of,
    time,
    unit_of,
    worlds,
)
from study.report.run_rows import boxes as boxes_of

Draw = Callable[[pd.DataFrame], Figure]

# Relative. Where equal runs are further apart, a strategy could not be told from one that takes half as long again.
NOISE = 0.5

VERDICT_NOTE = """\
Against the control: the verdict, and the relative difference with its 95 % interval. Margin: below it 95 of 100 pairs
of equal runs of the control differ."""
HELD_OUT_NOTE = "Held out: perplexity; or accuracy, with one run's binomial 95 % interval. Final loss: over seeds."
STATES_NOTE = "Model states: bytes per parameter on the rank with the most, in parentheses by arXiv:1910.02054."
SENT_NOTE = "Sent: the collectives of a step as NCCL sends them, an all-reduce twice."
MEMORY_NOTE = """\
Of the rank with the most, as the optimizer is about to step, on host and device together; peaks over all training
steps. By the paper: model states by arXiv:1910.02054, sec. 3.1 and 5. Buffers: the engine's communication buffers,
which the paper does not count. Imbalance: the largest rank's peak over the smallest's."""
TIMES_NOTE = """\
Seconds per step: the slowest rank's, without warm-up and the probed step; median over runs. Middle half: of the
steps. Tokens: without padding. MFU: model FLOPs over the card's dense peak."""
SCALING_NOTE = """\
The global batch is the same on every number of processes. Efficiency: tokens per second and process over the base's."""
PROOF_NOTE = """\
Read back from the engine before the first step; a run that is not what was asked stops there. Ranks: how many counted
their bytes. Bucket: elements. Sharded: parameters that are really partitioned."""
FIXED_NOTE = """\
Also the sample order and, for one seed, the initial weights: their checksums are in the records. Micro batch and
accumulation follow from the number of processes. Data: the beginning of its digest."""


def title(question: str) -> Html:
    return Html("<h1>{}</h1>").format(question)


def times_decide(compared: pd.DataFrame) -> bool:
    """Whether times are worth drawing: no repeats of the control are further apart than `NOISE`."""
    largest = compared.loc[compared["metric"] == "seconds_per_step", "relative_margin"].max()
    return bool(pd.isna(largest) or largest <= NOISE)


# ---------------------------------------------------------------- figures


def drawn(runs: pd.DataFrame, draw: Draw, by_world: bool = True) -> Html:
    """A figure of each setting, box and number of processes, side by side."""
    sections = []
    for block in blocks(runs):
        parts = [members for _, members in worlds(block.runs)] if by_world else [block.runs]
        found = [part[part["box"] == box] for box in boxes_of(runs) for part in parts]
        shown = markup.lines(*(_figure(part, draw) for part in found if len(part)))
        sections.append(Html("<section>\n<h3>{}</h3>\n{}\n</section>").format(block.words, shown))
    return Html('<div class="beside">\n{}\n</div>').format(markup.lines(*sections))


def _figure(runs: pd.DataFrame, draw: Draw) -> Html:
    try:
        return Html(draw(runs)._repr_html_())
    except ValueError as nothing:  # the figures' word for: there is nothing to draw
        where = f"{runs['box'].iloc[0]}, {processes(runs['world_size'].max())}"
        return markup.note(f"No figure for {where}: {nothing}.")


def worlds_drawn(runs: pd.DataFrame, compared: pd.DataFrame) -> Html:
    """Each setting against the number of processes: model states, and speed where times decide."""
    with_speed = times_decide(compared)
    return drawn(runs, lambda part: figures.world_sizes(part, with_speed), by_world=False)


def loss_curves(control: str) -> Draw:
    """What draws losses beside the control's."""
    return lambda runs: figures.loss_curves(table.steps(runs), control, runs)


# ---------------------------------------------------------------- the answer


def answer(
    runs: pd.DataFrame, compared: pd.DataFrame, control: str, with_losses: bool = True, with_times: bool = True
) -> Html:
    """The answer in one table per box: what each strategy learned, holds and sends, and how long it takes.

    Losses and times may be told by others, a study that was fixed in advance and quieter runs: then not by these.
    """
    loss, took = (Verdicts(compared, control, metric) for metric in ("final_loss", "seconds_per_step"))
    of_losses: dict[str, Cell] = {"held out": held_out, f"loss against {control}": loss.cell}
    of_times: dict[str, Cell] = {"seconds per step": time, f"time against {control}": took.cell}

    def make(here: pd.DataFrame) -> str:
        peak, sent = unit_of(here, peak_column(here)), unit_of(here, "collective_bytes")
        columns: dict[str, Cell] = {
            "runs": outcomes,
            f"peak memory, {peak.name}": in_unit(peak_column(here), peak),
            "model states (paper)": states,
            **(of_times if with_times else {}),
            **(of_losses if with_losses else {}),
            f"sent per step, {sent.name}": in_unit("collective_bytes", sent),
        }
        note = f"{VERDICT_NOTE} {HELD_OUT_NOTE if with_losses else ''} {STATES_NOTE} {SENT_NOTE}"
        words = [f"loss against {control}", f"time against {control}"]
        return table_of(here, "Every strategy", columns, note, words)

    return by_box(runs, make)


def losses(runs: pd.DataFrame, compared: pd.DataFrame, control: str, found: Sequence[Decided] = ()) -> Html:
    """What was learned, and how far that is from the control; not of what a study fixed in advance decides."""
    runs = runs[~runs["workload"].isin({each.workload for each in found})]
    if runs.empty:
        return Html("")
    verdicts = Verdicts(compared, control, "final_loss")
    columns: dict[str, Cell] = {
        "seeds": lambda row: row.runs["seed"].nunique(),
        "held out": held_out,
        "final loss": lambda row: fixed(learned(row, "final_loss"), 4),
        f"against {control}": verdicts.cell,
        "margin": verdicts.margin,
    }
    note, words = f"{VERDICT_NOTE} {HELD_OUT_NOTE}", [f"against {control}"]
    return by_box(runs, lambda here: table_of(here, "What was learned", columns, note, words, rows_once))


def memory(runs: pd.DataFrame) -> Html:
    """What the rank with the most holds, part by part, beside the paper; and its peak."""
    parts = {
        "parameters": "parameter_bytes",
        "gradients": "gradient_bytes",
        "optimizer states": "optimizer_state_bytes",
        "model states": "model_state_bytes",  # all three
        "by the paper": "paper_state_bytes",
    }

    def make(here: pd.DataFrame) -> str:
        on_gpu = "cuda" in set(here["device"])
        peaks = {"buffers": "communication_buffer_bytes", "peak": peak_column(here)}
        peaks |= {"reserved": "peak_reserved_bytes"} if on_gpu else {"resident": "peak_resident_bytes"}
        columns: dict[str, Cell] = {}
        for of_kind in (parts, peaks):
            unit = unit_of(here, *of_kind.values())
            columns |= {f"{words}, {unit.name}": in_unit(name, unit) for words, name in of_kind.items()}
        columns["imbalance"] = lambda row: fixed(row.runs["memory_imbalance"].max(), 2)
        limits = [bytes_text(limit) for limit in sorted(here["device_memory_bytes"].dropna().unique())]
        has = f" The {'card' if on_gpu else 'host'} has {listed(limits)}." if limits else ""
        return table_of(here, "What a rank holds", columns, MEMORY_NOTE + has + computed_note(here))

    return by_box(runs, make)


def times(runs: pd.DataFrame, compared: pd.DataFrame, control: str) -> Html:
    """How long a step takes, and what that is per token, per FLOP and per joule."""
    verdicts = Verdicts(compared, control, "seconds_per_step")

    def middle_half(row: PageRow) -> str | None:
        lower, upper = (row.runs[name].median() for name in ("seconds_lower", "seconds_upper"))
        return None if pd.isna(lower) else f"{number(lower)} to {number(upper)}"

    columns: dict[str, Cell] = {
        "runs": outcomes,
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
    note, words = f"{TIMES_NOTE} {VERDICT_NOTE}", [f"against {control}"]
    return by_box(runs, lambda here: table_of(here, "How long a step takes", columns, note, words))


def largest_batch(runs: pd.DataFrame) -> Html:
    """What each strategy does at the largest global batch that fits; nothing where a study tried one alone."""

    def make(here: pd.DataFrame) -> str:
        largest, peak = pairs.largest_batch(here), peak_column(here)
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
            groups.append((f"{workload} {size}, {'unknown precision' if pd.isna(precision) else precision}", lines))
        head = ["strategy", "processes", "global batch", "tokens per second and process", f"peak memory, {unit.name}",
                "next batch", "what came of it"]  # fmt: skip
        return markup.table("The largest global batch that fits", head, groups, words=["what came of it"])

    tried = runs.groupby(["workload", "size", "strategy", "world_size"])["global_batch_size"].nunique()
    return by_box(runs, make) if tried.max() > 1 else Html("")


def scaling(runs: pd.DataFrame) -> Html:
    """What more processes leave of each one's speed, and what each then holds, at one global batch."""

    def make(here: pd.DataFrame) -> str:
        found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        for scaled in pairs.scaling(here).to_dict("records"):
            key = tuple(scaled[name] for name in SETTING), scaled["strategy"], scaled["world_size"]
            found.setdefault(key, []).append(scaled)
        sent = unit_of(here, "collective_bytes")

        def efficiency(row: PageRow) -> str | None:
            known = [s for s in found.get((row.key, row.strategy, row.world_size), []) if pd.isna(s["why"])]
            return "; ".join(f"{100 * scaled['scaling_efficiency']:.0f} %" for scaled in known) or None

        def against(row: PageRow) -> str:
            scaled = found.get((row.key, row.strategy, row.world_size), [])
            return "; ".join(s["base"] if pd.isna(s["why"]) else s["why"] for s in scaled)

        columns: dict[str, Cell] = {
            "runs": outcomes,
            "seconds per step": time,
            "tokens per second and process": speed(lambda row: number(row.runs["tokens_per_second_per_gpu"].median())),
            "efficiency": efficiency,
            "against": against,
            "model states (paper)": states,
            f"sent per step, {sent.name}": in_unit("collective_bytes", sent),
        }
        note = f"{SCALING_NOTE} {STATES_NOTE} {SENT_NOTE}"
        return table_of(here, "One process and several", columns, note, words=["against"])

    return by_box(runs, make)


def proof(runs: pd.DataFrame) -> Html:
    """What was asked, and what the engine said it was when it was built."""
    columns = {
        "stage": "zero_stage", "engine": "engine_class", "optimizer offload": "offload_optimizer_device",
        "parameter offload": "offload_param_device", "sharded": "partitioned_parameters",
        "optimizer": "optimizer_class", "precision": "precision", "backend": "backend",
        "clipping": "gradient_clipping", "overlap": "overlap_comm", "bucket": "reduce_bucket_size",
    }  # fmt: skip
    words = ["engine", "optimizer", "optimizer offload", "parameter offload", "precision", "backend", "overlap"]

    def make(here: pd.DataFrame) -> str:
        groups = []
        for (workload, size), members in here.groupby(["workload", "size"]):
            lines: list[list[Any]] = []
            for row in rows(members):
                proved = row.runs[row.runs["engine_class"].notna()]
                for _, alike in proved.groupby(list(columns.values()), dropna=False):
                    counts = sorted(alike["num_ranks_proved"].dropna().unique())
                    ranks = ", ".join(f"{ranks:.0f}" for ranks in counts) or None
                    facts = [_proved(name, alike.iloc[0][name]) for name in columns.values()]
                    lines.append([f"{row.strategy} on {row.world_size}", *facts, len(alike), ranks])
            groups.append((f"{workload} {size}", lines))
        head = ["asked", *columns, "runs", "ranks"]
        return markup.table("What was asked, and what ran", head, groups, PROOF_NOTE, words)

    return by_box(runs, make)


def _proved(name: str, value: Any) -> str:
    if pd.isna(value):
        return "\N{EN DASH}"  # it has none: stages and buckets are DeepSpeed's
    return f"{value:,.0f}" if name == "reduce_bucket_size" else plain(value)


# ---------------------------------------------------------------- studies that were fixed in advance


def decide(folders: Sequence[str], study: str = "") -> list[Decided]:
    """Judge every study with a protocol whose runs lie here; `study` may be a file of the user's own.

    Raises Refusal where runs of no such study lie in folders that were named, and for what the protocols do not allow.
    """
    places = [in_project(name) for name in folders]
    found = verdict_text.decided_in(places, study)
    if places and not found:
        raise Refusal(f"{' '.join(folders)}: no run of a study that was fixed in advance lies here")
    return found


def decided_drawn(found: Sequence[Decided]) -> Html:
    """The primary endpoint of each study."""
    section = Html("<section>\n<h3>{}</h3>\n{}\n</section>")
    return markup.lines(
        *(section.format(each.study.question, Html(figures.decided(each)._repr_html_())) for each in found)
    )


def decided_tables(found: Sequence[Decided]) -> Html:
    """Every endpoint arm by arm, steps to the target, what trains the same, and what it rests on."""
    parts = []
    for each in found:
        parts.append(Html("<h3>{}</h3>").format(each.study.question))
        for of in verdict_text.tables(each):
            cells = [[str(cell).replace("`", "") for cell in row] for row in of.rows]
            parts.append(markup.table(of.title, of.head, [("", cells)], " ".join(of.notes).replace("`", ""), of.head))
        basis = markup.items(line.replace("`", "") for line in verdict_text.basis(each))
        parts.append(markup.details("What it rests on: protocol, dates, code, what was left out", basis))
    return markup.lines(*parts)


# ---------------------------------------------------------------- what the answer rests on


def held_fixed(runs: pd.DataFrame) -> Html:
    """What was equal between the strategies of a setting, and what varied."""
    by_setting = blocks(runs)
    held = {block.words: settings(block.runs) for block in by_setting}
    names = list(dict.fromkeys(name for known in held.values() for name in known))
    equal = [[name, *(plain(known.get(name)) for known in held.values())] for name in names]
    digests = ({value[:12] for value in block.runs["data_digest"].dropna()} for block in by_setting)
    equal.append(["data digest", *(", ".join(sorted(found)) or "unknown" for found in digests)])
    varied = [["strategies", *(", ".join(in_order(block.runs["strategy"])) for block in by_setting)]]
    for title_of, column in (("processes", "world_size"), ("seeds", "seed"), ("repeats", "repeat")):
        varied.append([title_of, *(listed(sorted(block.runs[column].unique())) for block in by_setting)])
    groups = [("varied", varied), ("held fixed", equal)]
    shown = markup.table("What varied, and what was held fixed", ["setting", *held], groups, FIXED_NOTE, list(held))
    return markup.details("Every setting", shown)


def not_comparable(runs: pd.DataFrame, control: str) -> Html:
    """Which runs are in no comparison, and in what others may not be compared."""
    made = pairs.pair(runs, control)
    refused = made.refused[made.refused["status"] == "ok"]
    # A repeat of the control stands beside its first run, for the margin, and not against another strategy's.
    place = ["strategy", "box", *SETTING]
    used = pd.MultiIndex.from_frame(runs.loc[made.compared["control_run"], place])
    refused = refused[~pd.MultiIndex.from_frame(runs.loc[refused.index, place]).isin(used)]
    lines = [["everything", reason, _which(members), len(members)] for reason, members in refused.groupby("reason")]
    for kind in pairs.LIMITS:
        for reason, members in made.compared.dropna(subset=[kind]).groupby(kind):
            lines.append([kind, reason, _which(runs.loc[members["run"]]), len(members)])
    if not lines:
        return markup.note("None.")
    head = ["in", "why", "strategies", "runs"]
    return markup.table(f"Not compared with {control}", head, [("", lines)], words=["why", "strategies"])


def _which(runs: pd.DataFrame) -> str:
    return ", ".join(in_order(runs["strategy"]))


def without_result(runs: pd.DataFrame) -> Html:
    """The runs that ended otherwise than ok; each is a result too."""
    others = runs[runs["status"] != "ok"]
    if others.empty:
        return markup.note(f"None of {count(len(runs), 'run')}.")
    lines = [
        [status.replace("_", " "), message, box, ", ".join(sorted(members["run_id"]))]
        for (status, message, box), members in others.fillna({"message": ""}).groupby(["status", "message", "box"])
    ]
    head = ["outcome", "message", "box", "runs"]
    return markup.table("What came of them", head, [("", lines)], words=head)


_KIND = re.compile(r"-(seed|repeat)\d+")  # what tells runs of one kind apart


def reproduce(runs: pd.DataFrame, study: str, records: Sequence[str]) -> Html:
    """The commands that make these records and this report again, and a launch of each kind."""
    files = any(held["data"] == "files" for held in runs["settings"].dropna())
    # A page names no place of a machine, so a folder elsewhere is only called a folder.
    folders = [
        f"FOLDER{place if len(records) > 1 else ''}" if Path(folder).is_absolute() or ".." in folder else folder
        for place, folder in enumerate(records, 1)
    ]
    recorded = runs[runs["machine"].notna()]
    commits = sorted({_commit(machine) for machine in recorded["machine"]})
    lines = [f"git checkout {commits[0]}"] if len(commits) == 1 and " " not in commits[0] else []
    study = Path(study).name
    lines += ["make setup", f"zero-study run {study}{' --data-dir DIR' if files else ''}"]
    lines += [f"zero-study pack runs/{Path(study).stem} {folder}" for folder in folders]
    lines += [f"zero-study report {study} {' '.join(f'--records {folder}' for folder in folders)}"]
    commands = list(zip(recorded["run_id"], recorded["command"], strict=True))
    launches = {_KIND.sub("", run_id): " ".join(command) for run_id, command in reversed(commands)}
    every = markup.code_block("\n".join(launches[name] for name in sorted(launches)))
    one_of_each = markup.details(f"{count(len(launches), 'launch', 'launches')}, one of each kind", every)
    return markup.lines(markup.code_block("\n".join(lines)), one_of_each)


def boxes(runs: pd.DataFrame) -> Html:
    """What the runs ran on, box by box; where a fact changed between runs, all its values."""
    known: dict[str, dict[str, dict[str, None]]] = {}
    recorded = runs[runs["machine"].notna()]
    days = recorded["started_at"].str[:10]
    for box, machine, day in zip(recorded["box"], recorded["machine"], days, strict=True):
        for name, value in {**_machine(machine), "days": day}.items():
            known.setdefault(name, {}).setdefault(box, {}).setdefault(value)
    columns = sorted({box for values in known.values() for box in values})
    lines = [[name, *("; ".join(values.get(box, {})) for box in columns)] for name, values in known.items()]
    lines.insert(0, ["runs", *(str((runs["box"] == box).sum()) for box in columns)])
    return markup.table("What it ran on", ["fact", *columns], [("", lines)], words=columns)


def _commit(machine: dict[str, Any]) -> str:
    commit = machine["git_commit"] or "unknown commit"
    return f"{commit} with changes" if machine["git_dirty"] else commit


# What the launcher sets from a strategy's file: of a run, not of a machine.
_LAUNCHERS = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")


def _machine(machine: dict[str, Any]) -> dict[str, str]:
    gpus = [f"{gpu['name']}, {bytes_text(gpu['memory_bytes'])}" for gpu in machine["gpus"]]
    facts = {
        "processor": machine["cpu"],
        "cores": machine["num_cores"],
        "cores that a run might use": machine.get("usable_cores"),
        "memory": bytes_text(machine["host_memory_bytes"]),
        "GPUs": "; ".join(f"{gpus.count(gpu)} x {gpu}" for gpu in sorted(set(gpus))) or "none",
        "driver": machine["driver"],
        "CUDA": machine["cuda"],
        "TF32": machine["tf32"],
        "threads per process": machine["num_threads_per_process"],
        "system": machine["system"],
        "Python": machine["python"],
        **machine["libraries"],
        "commit": _commit(machine)[:12] + (" with changes" if machine["git_dirty"] else ""),
        **{name: value for name, value in machine["environment"].items() if not name.startswith(_LAUNCHERS)},
    }
    return {name: plain(value) for name, value in facts.items() if value is not None}
