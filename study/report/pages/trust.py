"""What must a reader know to trust the answer? What was fixed, what is not comparable, what failed, how to redo it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from study.compare import pairs
from study.compare.words import bytes_text, in_order
from study.report import markup
from study.report.markup import Html, escape
from study.report.pages.runs import SETTING, blocks, plain, settings
from study.report.words import count, listed

FIXED_NOTE = """\
Also the sample order and, for one seed, the initial weights: their checksums are in the records. Micro batch and
accumulation follow from the number of processes. Data: the beginning of its digest."""

_KIND = re.compile(r"-(seed|repeat)\d+")  # what tells runs of one kind apart


def varied(runs: pd.DataFrame) -> Html:
    """What differs between the runs, setting by setting."""
    words = []
    for block in blocks(runs):
        sizes, seeds = (listed(sorted(block.runs[name].unique())) for name in ("world_size", "seed"))
        repeated = int(block.runs["repeat"].max())
        repeats = f"up to {repeated + 1} equal runs" if repeated else "no run repeated"
        strategies = listed(in_order(block.runs["strategy"]))
        words.append(markup.led(block.words, f"{strategies}; processes: {sizes}; seeds: {seeds}; {repeats}."))
    return Html(markup.items(words))


def held_fixed(runs: pd.DataFrame) -> Html:
    """What was equal between the strategies of a setting."""
    by_setting = blocks(runs)
    held = {block.words: settings(block.runs) for block in by_setting}
    names = list(dict.fromkeys(name for known in held.values() for name in known))
    lines = [[name, *(plain(known.get(name)) for known in held.values())] for name in names]
    lines.append(["data digest", *(_digests(block.runs["data_digest"]) for block in by_setting)])
    table = markup.table(
        "Held fixed between strategies", ["setting", *held], [("", lines)], FIXED_NOTE, words=list(held)
    )
    return Html(markup.details("Every setting that was held fixed", table))


def _digests(values: pd.Series) -> str:
    return ", ".join(sorted({value[:12] for value in values.dropna()})) or "unknown"


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
        return Html(markup.paragraphs(f"Every run with a result is compared with {control} in everything measured."))
    head = ["in", "why", "strategies", "runs"]
    return Html(markup.table(f"Not compared with {control}", head, [("", lines)], words=["why", "strategies"]))


def _which(runs: pd.DataFrame) -> str:
    return ", ".join(in_order(runs["strategy"]))


def without_result(runs: pd.DataFrame) -> Html:
    """The runs that ended otherwise than ok; each is a result too."""
    others = runs[runs["status"] != "ok"]
    if others.empty:
        return Html(markup.paragraphs(f"None: all {count(len(runs), 'run')} here ended with a result."))
    lines = [
        [status.replace("_", " "), message, box, Html("<br>".join(map(escape, sorted(members["run_id"]))))]
        for (status, message, box), members in others.fillna({"message": ""}).groupby(["status", "message", "box"])
    ]
    head = ["outcome", "message", "box", "runs"]
    return Html(markup.table("What came of them", head, [("", lines)], words=head))


def reproduce(runs: pd.DataFrame, study: str, records: Sequence[str]) -> Html:
    """The commands that make these records and this report again."""
    files = any(held["data"] == "files" for held in runs["settings"].dropna())
    # A page names no place of a machine, so a folder elsewhere is only called a folder.
    folders = [
        f"FOLDER{number if len(records) > 1 else ''}" if Path(folder).is_absolute() or ".." in folder else folder
        for number, folder in enumerate(records, 1)
    ]
    recorded = runs[runs["machine"].notna()]
    commits = sorted({_commit(machine) for machine in recorded["machine"]})
    lines = [f"git checkout {commits[0]}"] if len(commits) == 1 and " " not in commits[0] else []
    study = Path(study).name
    lines += ["make setup", f"zero-study run {study}{' --data-dir DIR' if files else ''}"]
    lines += [f"zero-study collect runs/{Path(study).stem} {folder}" for folder in folders]
    lines += [f"zero-study report {study} {' '.join(f'--records {folder}' for folder in folders)}"]
    notes = []
    if len(folders) > 1:
        notes.append("Run and collect on each box into a folder of its own, then report on all of them.")
    if files:
        notes.append("DIR is a folder of text and tokenizers, laid out as docs/one-run.md says.")
    commands = list(zip(recorded["run_id"], recorded["command"], strict=True))
    launches = {_KIND.sub("", run_id): " ".join(command) for run_id, command in reversed(commands)}
    title = f"{count(len(launches), 'launch', 'launches')}, one of each kind"
    folded = markup.details(title, markup.code_block(launches[name] for name in sorted(launches)))
    return Html(markup.code_block(lines) + markup.paragraphs(*notes) + folded)


def boxes(runs: pd.DataFrame) -> Html:
    """What the runs ran on, box by box; where a fact changed between runs, all its values."""
    known: dict[str, dict[str, dict[str, None]]] = {}
    recorded = runs[runs["machine"].notna()]
    for box, machine in zip(recorded["box"], recorded["machine"], strict=True):
        for name, value in _machine(machine).items():
            known.setdefault(name, {}).setdefault(box, {}).setdefault(value)
    columns = sorted({box for values in known.values() for box in values})
    lines = [[name, *("; ".join(values.get(box, {})) for box in columns)] for name, values in known.items()]
    return Html(markup.table("What it ran on", ["fact", *columns], [("", lines)], words=columns))


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
