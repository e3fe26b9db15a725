"""Define the commands that read records: tables of runs, notebooks of a study, and the export of a model."""

from __future__ import annotations

import importlib
import operator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from zero_study import terminal
from zero_study.cli.options import (
    A_STUDY,
    DATA_FOLDER,
    PATH,
    RECORDS,
    TRAINING,
    Statuses,
    command,
    json_option,
    require,
)
from zero_study.command_line import argument
from zero_study.errors import Refusal
from zero_study.files import require_clone
from zero_study.progress import after_two_seconds

if TYPE_CHECKING:
    from study.compare.verdict_text import Judged
    from zero_study.answers.envelope import Answer
    from zero_study.verdict import Verdict

SHORT = "short"
# The tables of `zero-study compare`, and the function of study.compare that makes each.
VIEWS = {
    SHORT: "summary.table",
    "differences": "differences.page",
    "model-states": "memory_views.MODEL_STATES.page",
    "communication": "communication_views.COMMUNICATION.page",
    "peaks": "memory_views.PEAKS.page",
    "theory": "memory_views.THEORY.page",
    "parity": "parity.PARITY.page",
    "bits": "bits.BITS.page",
    "acceptance": "acceptance.page",
    "fits": "frontier.page",
    "parts": "memory_views.PEAK_PARTS.page",
}
WITH_CONTROL = ("differences",)  # the tables that compare with one strategy


@command(
    "compare",
    "How do my runs differ in loss, memory and time?",
    "compare runs",
    statuses=Statuses(
        "the tables were printed (with --verdict: the study shows that all strategies train to the same loss as the "
        "control)",
        "with --verdict: for at least one strategy, the study does not show that it trains to the same loss",
        "the request is refused",
        "with --verdict: a condition of the protocol is not met, or a strategy has no run that counts",
    ),
)
@argument("records", type=PATH, nargs=-1, required=True, help=RECORDS)
@click.option("--view", type=click.Choice(tuple(VIEWS)), default="short", help="The table to print.")
@click.option(
    "--control",
    default="ddp",
    metavar="STRATEGY",
    help="The strategy with which the other strategies are compared. Only --view differences uses this option.",
)
@click.option(
    "--each", is_flag=True, help="List every run. By default, the short table has one row per strategy, with medians."
)
@click.option(
    "--verdict",
    metavar="STUDY",
    help="Decide whether the runs of this study show that all strategies train to the same loss. The study's file "
    "contains the rules, which were fixed before the first run.",
)
@click.option("--markdown", is_flag=True, help="Print the tables in Markdown. By default, the tables are plain text.")
@json_option
def _compare(
    records: tuple[Path, ...],
    view: str,
    control: str,
    each: bool,
    verdict: str | None,
    markdown: bool,
    as_json: bool,
) -> Verdict | Answer | None:
    """Compare runs: loss, memory, time.

    By default, the command prints a short table with one row per strategy. Each row is also compared with DDP, if the
    runs include DDP. --view selects tables with details, for instance `differences` with confidence intervals. Runs
    that `zero-study import` made from logs have a separate table.
    """
    from study.compare import plain_text

    if as_json and markdown:
        raise Refusal("--json and --markdown are two forms of the same answer. Give one of them.")
    judged = None
    with after_two_seconds("Reading the records and making the tables"):
        if verdict is not None:
            judged = _judge(records, view, control, each, verdict)
            page = judged.page
            if as_json:
                from study.compare import json_answer

                return json_answer.of_verdict(verdict, judged)
        elif as_json:
            return _json_of(records, view, control, each)
        else:
            page = _page(records, view, control, each, markdown)
    is_plain = markdown or (verdict is None and view == SHORT)  # the short table is plain text already
    print(page if is_plain else plain_text.of_markdown(page))
    if judged is None:
        return None
    covered = f"Checked: {judged.verdict.coverage()}."
    print(f"\n{covered if markdown else terminal.wrap(covered)}")
    return judged.verdict


def _json_of(records: tuple[Path, ...], view: str, control: str, each: bool) -> Answer:
    """Return what `compare --json` prints for a view. Raises Refusal if the view does not support an option."""
    from study.compare import json_answer, public_table, summary
    from study.public_runs import archive
    from study.records import find

    page = _page(records, view, control, each, markdown=False)
    if view != SHORT:
        return json_answer.of(view, [page])
    public = archive.find(records)
    pages = [public_table.page(archive.read(public))] if public else []
    numbers = summary.content(records, each) if not public or find.has_runs(records) else None
    return json_answer.of(view, pages, numbers)


def _judge(records: tuple[Path, ...], view: str, control: str, each: bool, verdict: str) -> Judged:
    """Return a Markdown page that judges a study by its protocol, together with the verdict.

    Raises Refusal if the study has no protocol, or if options are given that the protocol determines.
    """
    if (view, control, each) != (SHORT, "ddp", False):
        raise Refusal(
            f"--verdict {verdict} cannot be combined with --view, --control or --each, because the study's protocol "
            "determines its tables and its control. Leave these options out."
        )
    from study.compare import verdict_text
    from study.running import studies

    chosen = studies.find(verdict)
    if chosen.protocol is None:
        raise Refusal(
            f"The study {verdict!r} has no protocol that was fixed before its runs, so its runs cannot "
            "be judged. Use `zero-study compare` without --verdict."
        )
    return verdict_text.judge(records, chosen)


def _page(records: tuple[Path, ...], view: str, control: str, each: bool, markdown: bool) -> str:
    """Return what `compare` prints for a view. Raises Refusal if the view does not support an option."""
    if control != "ddp" and view not in WITH_CONTROL:
        raise Refusal(
            f"--control {control}: --view {view} does not use a control. Remove --control, or add --view differences."
        )
    if view == SHORT and markdown:
        raise Refusal("--markdown: the short table exists only as plain text. Add --view, or remove --markdown.")
    if view != SHORT and each:
        raise Refusal(f"--each: --view {view} already lists every run. Leave --each out.")
    from study.public_runs import archive

    for path in records:
        if path.is_file() and not archive.find([path]):
            raise Refusal(
                f"{path} is a file, but not an imported run. If it is the log of a training, run `zero-study import"
                f" {path} --output FOLDER` first, and compare FOLDER. Runs of this project are compared by folder."
            )
    public = archive.find(records)
    if public and view != SHORT:
        raise Refusal(f"--view {view}: {public[0]} is a run that was imported from a log. Leave --view out.")
    module, _, attributes = VIEWS[view].partition(".")
    make = operator.attrgetter(attributes)(importlib.import_module(f"study.compare.{module}"))
    if view != SHORT:
        return str(make(records, control) if view in WITH_CONTROL else make(records))
    from study.records import find

    if not public:
        return str(make(records, each))
    from study.compare import plain_text, public_table

    own = str(make(records, each)) if find.has_runs(records) else ""
    of_public_runs = plain_text.of_markdown(public_table.page(archive.read(public)))
    return "\n\n".join(part for part in (own, of_public_runs) if part)


@command(
    "report",
    "What does a study show? Makes notebooks with figures.",
    "report smoke",
    statuses=Statuses("the notebooks were executed and written"),
)
@argument("study", required=False, help=A_STUDY)
@click.option(
    "--records",
    type=PATH,
    multiple=True,
    help="Folder with run directories, or with records that `zero-study pack` collected. Repeat the option if the runs "
    "were made on several machines. [default: runs/STUDY]",
)
@click.option("--output", type=PATH, help="Folder to write to. [default: reports/STUDY, or reports]")
def _report(study: str | None, records: tuple[Path, ...], output: Path | None) -> None:
    """Execute the notebooks with a study's records.

    The command writes the executed notebooks and the picture of the first notebook, and prints the result. Without a
    study, it executes every notebook of the project with the project's own records, in a clone of the project only.
    """
    require_clone("the notebooks")
    require("papermill")
    from study.report import build as report
    from study.report.pages import results
    from study.running import studies

    if study is None:
        if records:
            raise Refusal(
                "--records needs a study. Name a study, or remove --records to execute the project's own notebooks."
            )
        studies.require_name(output)
        with after_two_seconds("Executing every notebook"):
            folder = report.build_all(output or Path("reports"))
        print(f"Wrote the executed notebooks to {folder}")
        return
    chosen = studies.find(study)
    folders = [*records] or [Path("runs") / chosen.name]
    with after_two_seconds("Executing the notebooks of the study"):
        first = report.build(study, folders, output or Path("reports") / chosen.name)
        result = results.Results([*map(str, folders)], chosen.control).result()
    print(terminal.wrap(f"Result: {result}\nOpen {first} or {first.with_suffix('.png')}, or compare all runs:"))
    print(terminal.command(["zero-study", "compare", *map(str, folders)], "  "))


@command(
    "export",
    "How do I load the model of a run with from_pretrained?",
    "export runs/smoke/bert-imdb-tiny-ddp-2x-seed0",
    statuses=Statuses(
        "the model was written",
        None,
        "there is no complete checkpoint, the checkpoint is damaged or would run code, or the new folder "
        "exists already",
    ),
)
@argument("run", type=PATH, help="A run directory, or one of its checkpoints.")
@argument("folder", type=PATH, required=False, help="Folder to write to. [default: RUN/model]")
@click.option("--data-dir", type=PATH, help=DATA_FOLDER)
@click.option(
    "--merge",
    is_flag=True,
    help="If the run trained an adapter, add it to the model's weights, and write the whole model. By default, only "
    "the adapter is written.",
)
def _export(run: Path, folder: Path | None, data_dir: Path | None, merge: bool) -> None:
    """Export a run's model for from_pretrained.

    The command writes the unsharded fp32 weights of the newest checkpoint. If the run trained an adapter, it writes the
    adapter for PeftModel.from_pretrained, or with --merge the merged model. To check the export, the command computes
    the loss on the run's held-out examples, and prints it next to the loss that the run recorded. The command never
    runs code from the checkpoint.
    """
    require(*TRAINING)
    from study.training import export

    checkpoint = export.newest(run)
    target = folder or run / "model"
    with after_two_seconds("Putting the model together"):
        model = export.export(checkpoint, target, merge, data_dir)
    strategy = checkpoint.manifest.identity.strategy
    print(f"Wrote the model of step {checkpoint.manifest.step}, trained with {strategy}, to {target}")
    print(export.check(model, checkpoint, data_dir))


COMMANDS = (_compare, _report, _export)
