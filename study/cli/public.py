"""Define the command that imports logs of trainings which somebody else ran."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from zero_study import terminal
from zero_study.cli.options import PATH, Statuses, command, json_option
from zero_study.command_line import argument
from zero_study.progress import after_two_seconds

if TYPE_CHECKING:
    from zero_study.answers.envelope import Answer
    from zero_study.logs.imported import Imported
    from zero_study.public_runs.schema import PublicRun
    from zero_study.verdict import Verdict

_SHOWN = ("submitter", "benchmark", "system", "model", "gpu", "engine", "strategy", "precision")
MOST_MARKS = 3  # that are printed for each run


@command(
    "import",
    "How do trainings compare if I only have their logs?",
    "import train.log --output runs/imported",
    statuses=Statuses(
        "all runs were written, or are in the folder already",
        None,
        "nothing was written, because a log is damaged or of an unknown kind, or the folder has another run of the "
        "same name",
        "no run could be read",
    ),
)
@argument("logs", type=PATH, nargs=-1, required=True, metavar="LOG...", help="Files with the logs of trainings.")
@click.option("--output", type=PATH, required=True, help="Folder to write to, with one file per run.")
@click.option("--name", help="Name of the run, if you give a single log. [default: the log's name]")
@click.option(
    "--set",
    "setting",
    multiple=True,
    metavar="FIELD=VALUE",
    help="Add a fact that the log does not state, such as gpu=h100, num_gpus=8 or strategy=zero3. Repeat the option to "
    "add several facts.",
)
@json_option
def _import(
    logs: tuple[Path, ...], output: Path, name: str | None, setting: tuple[str, ...], as_json: bool
) -> Verdict | Answer:
    """Turn logs of other trainings into runs that can be compared.

    The command recognizes the format of each log: MLPerf's :::MLLOG lines, text of nanoGPT and modded-nanogpt, the
    Trainer's trainer_state.json, lines of torchtitan and DeepSpeed, Lightning's metrics.csv, exports of Weights &
    Biases, TensorBoard's event files, Megatron-LM's golden values, and any CSV, JSON or JSON lines with named columns.
    A fact that a log does not state stays unknown.
    """
    from zero_study.logs import imported, json_answer
    from zero_study.public_runs import folder
    from zero_study.verdict import Checked, NotChecked, Verdict

    stated = imported.stated(setting)
    with after_two_seconds("Reading the logs"):
        found = imported.read(logs, name, stated)
    with after_two_seconds("Writing the runs"):
        new = folder.write([run for run, _ in found], output)
    verdict = Verdict.of(
        0,
        [Checked(len(found), "run", f"read from {terminal.count(len(logs), 'log')}")],
        [NotChecked(f"{run.name}: {text}") for run, not_read in found for text in not_read],
    )
    if as_json:
        return json_answer.of(found, new, output, verdict)
    for each in found:
        print(_described(each))
    print(_written(new, found, output))
    print(f"Next: {terminal.command(['zero-study', 'compare', str(output)])}")
    return verdict


def _described(imported: Imported) -> str:
    """Return a line about an imported run, and lines about what is unusual in its log."""
    run = imported.run
    numbers = ", ".join(
        f"{len(series):,} {noun}{'s' * (len(series) != 1)}"
        for series, noun in ((run.training, "logged step"), (run.evaluation, "evaluation"))
        if series is not None
    )
    known = [str(value) for name in _SHOWN if (value := getattr(run.setting, name)) is not None]
    if run.setting.num_gpus is not None:
        known.append(terminal.count(run.setting.num_gpus, "GPU"))
    ending = "" if run.ending == "unknown" else run.ending
    lines = [f"{run.name}: {run.log_format}, {'; '.join(filter(None, (numbers, ', '.join(known), ending)))}"]
    lines += [terminal.wrap(mark, "  ", "    ") for mark in run.marks[:MOST_MARKS]]
    if len(run.marks) > MOST_MARKS:
        lines.append(f"  and {len(run.marks) - MOST_MARKS} more notes, which are in the run's file")
    return "\n".join(lines)


def _written(new: Sequence[PublicRun], found: Sequence[Imported], output: Path) -> str:
    """Return how many runs were written, already existed, or could not be read completely."""
    there = len(found) - len(new)
    incomplete = sum(bool(not_read) for _, not_read in found)
    parts = [f"Wrote {terminal.count(len(new), 'run')} to {output}."] if new else []
    if there:
        parts.append(f"{terminal.count(there, 'run')} {'was' if there == 1 else 'were'} there already.")
    if incomplete:
        parts.append(f"Parts of {terminal.count(incomplete, 'run')} are missing or could not be read.")
    return " ".join(parts)


COMMANDS = (_import,)
