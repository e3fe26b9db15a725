"""The commands that read records: tables of runs, notebooks of a study, and the model of a run."""

from __future__ import annotations

import importlib
import operator
from pathlib import Path

import click

from study.cli.options import A_STUDY, DATA_FOLDER, PATH, RECORDS, TRAINING, command, require
from study.errors import Refusal
from study.files import require_clone

# The tables of `zero-study compare`, and the function of study.compare that makes each.
VIEWS = {
    "short": "summary.table",
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


@command("compare")
@click.argument("records", type=PATH, nargs=-1, required=True, help=RECORDS)
@click.option("--view", type=click.Choice(tuple(VIEWS)), default="short", help="which table")
@click.option("--control", default="ddp", metavar="STRATEGY", help=f"what {' and '.join(WITH_CONTROL)} compare with")
@click.option("--verdict", metavar="STUDY", help="hold the runs of this study to the protocol that it fixed in advance")
def _compare(records: tuple[Path, ...], view: str, control: str, verdict: str | None) -> None:
    """Compare runs: loss, memory, time.

    With a control, with intervals and verdicts, as Markdown.

    --verdict judges a study that was fixed in advance: what its null, its arms and its positive controls say.
    """
    if verdict is not None:
        if (view, control) != ("short", "ddp"):
            raise Refusal(
                "--verdict: a study's protocol names its tables and its control; leave --view and --control out"
            )
        from study.compare import verdict_text
        from study.running import studies

        chosen = studies.find(verdict)
        if chosen.protocol is None:
            raise Refusal(
                f"study {verdict!r} has no protocol: nothing was fixed before its runs; use `zero-study compare`"
            )
        print(verdict_text.page(records, chosen))
        return
    if control != "ddp" and view not in WITH_CONTROL:
        raise Refusal(f"--control {control}: --view {view} compares with no strategy of your choice; leave it out")
    module, _, attributes = VIEWS[view].partition(".")
    page = operator.attrgetter(attributes)(importlib.import_module(f"study.compare.{module}"))
    print(page(records, control) if view in WITH_CONTROL else page(records))


@command("report")
@click.argument("study", required=False, help=A_STUDY)
@click.option(
    "--records",
    type=PATH,
    multiple=True,
    help="folder of runs or records; several times for several boxes [default: runs/STUDY]",
)
@click.option("--output", type=PATH, help="where they go [default: reports/STUDY, or reports]")
def _report(study: str | None, records: tuple[Path, ...], output: Path | None) -> None:
    """Execute the notebooks of runs for a study's records.

    Without a study: every notebook as it is committed.
    """
    require_clone("the notebooks")
    require("papermill")
    from study.report import build as report
    from study.running import studies

    if study is None:
        if records:
            raise Refusal("--records goes with a study; name one, or leave it out for the committed notebooks")
        print(report.build_all(output or Path("reports")))
        return
    name = studies.find(study).name
    first = report.build(study, records or [Path("runs") / name], output or Path("reports") / name)
    print("\n".join(str(path) for path in (first, first.with_suffix(".png")) if path.exists()))


@command("export")
@click.argument("run", type=PATH, help="a run directory, or one of its checkpoints")
@click.argument("folder", type=PATH, required=False, help="folder to write [default: RUN/model]")
@click.option("--data-dir", type=PATH, help=DATA_FOLDER)
def _export(run: Path, folder: Path | None, data_dir: Path | None) -> None:
    """Write a run's model, as from_pretrained loads it.

    That of its newest checkpoint, whole and in fp32.

    Its loss on the run's held-out examples is printed beside the run's own.
    """
    require(*TRAINING)
    from study.training import export

    checkpoint = export.newest(run)
    target = folder or run / "model"
    model = export.export(checkpoint, target)
    print(f"exported {target}, of step {checkpoint.manifest.step} under {checkpoint.manifest.identity.strategy}")
    print(export.check(model, checkpoint, data_dir))


COMMANDS = (_compare, _report, _export)
