"""What can be asked on the command line? Each command takes its options, calls one function and prints.

`parse` reads a command line, `run` reads and runs it. Modules are imported by the command that needs them: what a plain
install lacks is missed only there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import click

from study import __version__, config, files
from study.errors import Refusal, describe_usage
from study.files import require_clone
from study.run import as_words
from study.strategy import file
from study.theory import case

# The tables of `zero-study compare`, by the module of study.compare that makes each.
VIEWS = {
    "short": "at_a_glance.table",
    "differences": "differences.table",
    "model-states": "states_held.table",
    "communication": "bytes_sent.table",
    "peaks": "step_peaks.table",
    "theory": "step_peaks.by_strategy",
    "parity": "parity.table",
    "bits": "bits.table",
    "acceptance": "acceptance.table",
    "fits": "what_fits.table",
    "parts": "peak_parts.table",
}
WITH_CONTROL = ("differences",)  # the tables that compare with one strategy

# What every run imports; deepspeed is asked for where a strategy is its.
TRAINING = (
    "torch", "accelerate", "transformers", "datasets", "evaluate", "huggingface_hub", "pyarrow", "safetensors",
    "tokenizers", "tqdm",
)  # fmt: skip
TRACING = ("torch", "accelerate", "transformers")

A_STUDY = "a study that the project ships, or a YAML file of your own"
RECORDS = "folders of run directories or of collected records"
DATA_FOLDER = "folder with imdb/, wikitext-2/ and tokenizers/, for real text"
CHECKPOINT_EVERY = (
    "optimizer steps between checkpoints, from which what is cut off goes on [default: as the study says]"
)


class _Command(config.Command):
    """A command whose parsing does not call it, and whose help is listed whole."""

    def invoke(self, context: click.Context) -> click.Context:
        return context

    def get_short_help_str(self, limit: int = 45) -> str:
        return " ".join((self.help or "").partition("\n\n")[0].split())


# What `zero-study` alone lists: the commands by what one wants, each group with a command line to begin with.
GROUPS = {
    "Train": (("train", "run", "plan", "job"), "zero-study run smoke"),
    "Compare": (("compare", "report", "export"), "zero-study compare runs"),
    "Plan": (("advise", "predict"), "zero-study advise --model gpt2-xl --gpu a100-80gb --gpus 8"),
    "Check": (("doctor", "dry-run", "upgrade", "diff", "conformance", "claims"), "zero-study doctor my_deepspeed.json"),
    "Maintain": (("pack", "merge"), "zero-study pack runs/smoke my-box.zip"),
}
PROVE = "Check your own script: python -m zero_study.prove train.py (docs/prove.md)."


class _Commands(config.Command, click.Group):
    command_class = _Command
    group_class = type

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        for title, (names, example) in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name, self.commands[name].get_short_help_str()) for name in names])
                formatter.write_text(f"$ {example}")
                if title == "Check":
                    formatter.write_text(PROVE)

    get_short_help_str = _Command.get_short_help_str


class _WholeNumber(click.ParamType):
    """A whole number of at least 1, and not more than anybody has."""

    name = "integer"

    def convert(self, value: str | int, param: click.Parameter | None, context: click.Context | None) -> int:
        try:
            number = int(value)
        except ValueError:
            number = 0
        flag = param.opts[0] if param else self.name
        if number < 1:
            raise Refusal(f"{flag} {value}: must be a whole number of at least 1")
        if number > config.LARGEST_NUMBER:
            raise Refusal(f"{flag} {value}: must be at most {config.LARGEST_NUMBER:,}")
        return number


NUMBER = _WholeNumber()
PATH = click.Path(path_type=Path)

# What a command that is started on every machine of a run is told, by the launcher's own names.
MACHINES = [
    click.Option(
        ["--num-machines"], type=NUMBER, help="machines, on each of which this command is started [default: 1]"
    ),
    click.Option(["--machine-rank"], type=click.IntRange(0), default=0, help="of this machine, from 0"),
    click.Option(["--main-process-ip"], metavar="ADDRESS", help="of machine 0, as the others reach it"),
    click.Option(["--main-process-port"], type=NUMBER, default=29500, help="of machine 0, where all meet"),
]


def parse(words: list[str]) -> click.Context:
    """Return the command that a command line names, with its options as `params`, without running it.

    Raises Refusal for what cannot be asked, and click's Exit once it has printed what --help asks for.
    """
    try:
        context = zero_study.make_context("zero-study", list(words) or ["--help"], max_content_width=120)
        asked: click.Context = zero_study.invoke(context)
        return asked
    except click.UsageError as error:
        raise Refusal(describe_usage(error)) from None


def run(words: list[str]) -> int:
    """Run one command line; return the exit status. Raises Refusal."""
    try:
        context = parse(words)
    except click.exceptions.Exit as end:
        return end.exit_code
    callback = context.command.callback
    assert callback is not None  # every command has one
    return context.invoke(callback, **context.params) or 0


@click.group(
    cls=_Commands, no_args_is_help=False, context_settings={"show_default": True, "help_option_names": ["-h", "--help"]}
)
@click.version_option(__version__, prog_name="zero-study")
def zero_study() -> None:
    """What do DDP, DeepSpeed ZeRO-1/2/3 and FSDP2 cost and save? Train, compare, plan, and check what others say."""


# ---------------------------------------------------------------- runs


@zero_study.command(
    "train",
    params=[
        click.Option(
            ["--strategy"], default="single", metavar="NAME", help=f"a file, or one of {', '.join(file.names())}"
        ),
        click.Option(
            ["--num-processes"], type=NUMBER, help="processes to launch [default: what the strategy's file says]"
        ),
        *MACHINES,
        click.Option(["--timeout"], type=NUMBER, help="seconds after which the run is ended [default: none]"),
        *config.OPTIONS,
    ],
)
def _train(
    strategy: str,
    num_processes: int | None,
    num_machines: int | None,
    machine_rank: int,
    main_process_ip: str | None,
    main_process_port: int,
    timeout: int | None,
    **options: Any,
) -> int:
    """Train one strategy, and record it.

    Of several machines, this one's part of it.
    """
    from study.compare import brief
    from study.run import make_run
    from study.running import checks, launch

    _require(*TRAINING)
    chosen = file.read_strategy(file.find_strategy(strategy))
    asked = config.build_config(**config.given(options))
    machines = num_machines or chosen.num_machines
    _check_machine(machines, main_process_ip)
    where = {"machine_rank": machine_rank, "main_process_ip": main_process_ip, "main_process_port": main_process_port}
    run = make_run(asked, chosen, num_processes or chosen.num_processes, machines, **where)
    checks.check_folder(run)
    checks.check(run)
    checks.provide_extensions(run)

    ended = launch.launch(run, timeout, lambda line: print(f"  {line}", flush=True))
    if ended.status == "misconfigured" and ended.record_path is None:
        raise Refusal(ended.message)
    print(f"{ended.status}: {ended.message}" + (f" ({ended.record_path})" if ended.record_path else ""))
    if ended.status == "ok" and ended.record_path:
        print(brief.text(run.folder))
    if ended.status == "crashed":
        print("\n".join([" ".join(ended.command), *ended.stderr_tail]))
    return 0 if ended.status == "ok" else 1


def _check_machine(num_machines: int, main_process_ip: str | None) -> None:
    if num_machines > 1 and main_process_ip is None:
        raise Refusal(f"--num-machines {num_machines}: the others have to know machine 0; pass --main-process-ip")


def _of_a_study(command: Any) -> Any:
    """Add what `plan` and `run` share: the study, and which of its runs, where and for how long."""
    options = [
        click.argument("study", help=A_STUDY),
        click.option("--data-dir", type=PATH, help=DATA_FOLDER),
        click.option("--runs-dir", type=PATH, default="runs", help="where run directories go"),
        click.option("--only", default="", metavar="TEXT", show_default=False, help="only runs whose id contains this"),
        click.option("--skip", metavar="TEXT", help="no runs whose id contains this"),
        click.option("--timeout", type=NUMBER, default=1800, help="seconds after which one run is ended"),
        click.option("--checkpoint-every", type=NUMBER, metavar="STEPS", help=CHECKPOINT_EVERY),
    ]
    for option in reversed(options):
        command = option(command)
    return command


@zero_study.command("plan")
@_of_a_study
@click.option("--slurm", is_flag=True, help="print a script instead, which submits what is not finished to Slurm")
@click.option(
    "--per-machine",
    type=NUMBER,
    help="processes on one machine, at most; of a larger run each machine has as many [default: all]",
)
def _plan(
    study: str,
    data_dir: Path | None,
    runs_dir: Path,
    only: str,
    skip: str | None,
    timeout: int,
    checkpoint_every: int | None,
    slurm: bool,
    per_machine: int | None,
) -> None:
    """List a study's runs, and how long they take.

    In their order: what is kept, what is skipped and why.
    """
    from study.running import plan, studies
    from study.running.slurm import script

    chosen = studies.find(study)
    folder = runs_dir / chosen.name
    runs = plan.spread(plan.select(chosen, data_dir, only, folder, checkpoint_every, skip), per_machine)
    if not slurm:
        print(plan.show(plan.make(chosen, runs, folder, timeout)))
        return
    told = {"data_dir": data_dir, "runs_dir": runs_dir, "timeout": timeout, "checkpoint_every": checkpoint_every}
    job = [sys.executable, "-m", "study", "job", *as_words(told), study]
    print(script(chosen, runs, folder, timeout, job), end="")


@zero_study.command("run")
@_of_a_study
@click.option("--fail-fast", is_flag=True, help="start no run after one that is neither ok nor out of memory")
@click.option(
    "--minutes",
    type=NUMBER,
    help="stop in time: start no run that is expected to end more minutes from now, and none that failed "
    "[default: none]",
)
def _run(
    study: str,
    data_dir: Path | None,
    runs_dir: Path,
    only: str,
    skip: str | None,
    timeout: int,
    checkpoint_every: int | None,
    fail_fast: bool,
    minutes: int | None,
) -> int:
    """Run a study, and go on where it was.

    One run after another; finished ones are kept, and what was cut off goes on from its checkpoint.

    Exit status: 0 every run is ok or skipped; 1 every run has an outcome, and some are not ok (out of memory, say); 3
    some run has no outcome yet (interrupted, --minutes or --fail-fast); 2 refused.
    """
    from study.running import plan, runner, studies
    from study.training import body

    chosen = studies.find(study)
    folder = runs_dir / chosen.name
    runs = plan.select(chosen, data_dir, only, folder, checkpoint_every, skip)
    _require(*TRAINING)  # a plan does without it, no run does
    body.train_missing(runs, studies.runs(chosen, data_dir, folder))
    return runner.run(chosen, runs, folder, timeout, fail_fast, runner.Slot(60.0 * minutes if minutes else math.inf))


@zero_study.command(
    "job",
    params=[
        click.Argument(["study"], help=A_STUDY),
        click.Argument(["run_id"], metavar="RUN", help="which of its runs, by the id that a plan lists"),
        click.Option(["--data-dir"], type=PATH, help=DATA_FOLDER),
        click.Option(["--runs-dir"], type=PATH, default="runs", help="where run directories go"),
        click.Option(["--timeout"], type=NUMBER, default=1800, help="seconds after which the run is ended"),
        click.Option(["--checkpoint-every"], type=NUMBER, metavar="STEPS", help=CHECKPOINT_EVERY),
        *MACHINES,
    ],
)
def _job(
    study: str,
    run_id: str,
    data_dir: Path | None,
    runs_dir: Path,
    timeout: int,
    checkpoint_every: int | None,
    num_machines: int | None,
    **machine: Any,
) -> int:
    """Run one run of a study, as a scheduler's job.

    Whatever else of it runs elsewhere.

    Exit status: 0 it is ok; 1 it has another outcome; 2 refused.
    """
    from study.running import plan, runner, studies
    from study.training import body

    chosen = studies.find(study)
    folder = runs_dir / chosen.name
    run = plan.select_one(chosen, data_dir, run_id, folder, checkpoint_every)
    if num_machines and num_machines > 1:
        _check_machine(num_machines, machine["main_process_ip"])
        run = dataclasses.replace(run, num_machines=num_machines, **machine)
    _require(*TRAINING)
    body.train_missing([run], studies.runs(chosen, data_dir, folder))
    return runner.run_one(chosen, run, folder, timeout, is_first_machine=machine["machine_rank"] == 0)


@zero_study.command("doctor")
@click.argument("file", type=PATH, required=False, help="an accelerate file or a DeepSpeed JSON, of anybody")
@click.option("--all", "everything", is_flag=True, help="list the keys that do no harm, too")
@click.option("--json", "as_json", is_flag=True, help="print every finding as JSON")
@click.option("--fix", type=PATH, metavar="OUT", help="also write the mended file, to a new file")
@click.option("--disk", type=PATH, metavar="DIR", help="without FILE: a folder on the disk to be tried [default: .]")
@click.option("--for", "release", metavar="deepspeed==VERSION", help="also what this release trains wrongly of it")
def _doctor(
    file: Path | None, everything: bool, as_json: bool, fix: Path | None, disk: Path | None, release: str | None
) -> int:
    """Say what each key of a file really does.

    With these versions; without a file, what would bite on this machine.

    Exit status: 0 every key does what it says, or nothing bites; 1 otherwise; 2 the file cannot be read.
    """
    from study.engines.doctor import checkup, examine

    if file is None:
        if everything or fix or release:
            raise Refusal(f"{'--all' if everything else '--fix' if fix else '--for'} is about a file; name one")
        checks = checkup.examine(disk or Path())
        print(checkup.as_json(checks) if as_json else checkup.text(checks))
        return 1 if any(check.verdict == "bites" for check in checks) else 0
    if disk is not None:
        raise Refusal(f"--disk {disk} is about this machine; leave FILE out, or --disk")
    examined = examine.examine(file, release)
    if fix is not None:
        examine.write_mended(examined, fix)
    print(examined.as_json() if as_json else examine.text(examined, everything))
    return 1 if examined.matters else 0


@zero_study.command("diff")
@click.argument("a", type=PATH, metavar="A", help="folder of a recorded training, with noise-1 and so on in it")
@click.argument("b", type=PATH, metavar="B", help="the same, of the other training")
@click.option("--output", type=PATH, metavar="FILE", help="JSON file to write, with all differences")
def _diff(a: Path, b: Path, output: Path | None) -> int:
    """Say in which tensor two trainings first differ by more than rounding.

    Record each with `python -m zero_study.diff --output A train.py`, and A once more with --noise 1: docs/diff.md.

    Exit status: 0 no difference; 1 there is one; 2 they cannot be compared; 3 not known, because a recording is damaged
    or mixed from several, or because a training failed or ended before the other one.
    """
    from study.engines.diff import compare, text
    from study.engines.diff.recorded import Damaged, Recording

    if output is not None:
        files.require_folder(output)
    try:
        result = compare.compare(Recording.read(a), Recording.read(b))
        shown = text.text(result)
    except Damaged as damaged:
        print(f"zero-study: {text.printable(str(damaged))}", file=sys.stderr)
        return 3
    if output is not None:
        files.write_json(output, text.content(result))
    print(shown)
    return 0 if result.is_same else 1 if result.differences or result.replicas else 3


@zero_study.command("dry-run", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--world", "world_size", type=NUMBER, required=True, help="processes that are pretended")
@click.option(
    "--ranks",
    metavar="R,R",
    help="which of them are asked [default: the first and the last; of up to 4 with a script, all]",
)
@click.option("--per-machine", type=NUMBER, default=8, help="processes on one machine")
@click.option("--model", metavar="NAME", default="gpt2", help="a known name (gpt2-xl, llama-2-7b ...) or a config.json")
@click.option("--micro-batch-size", type=NUMBER, default=1, help="sequences per process and forward pass")
@click.option("--sequence-length", type=NUMBER, help="tokens [default: 1024, or as many as the model has positions]")
@click.option("--gradient-accumulation-steps", type=NUMBER, default=1, help="micro steps per optimizer step")
@click.option("--activation-checkpointing", is_flag=True, help="recompute each block")
@click.option("--mixed-precision", type=click.Choice(("no", "bf16")), help="[default: what the file says]")
@click.option("--output", type=PATH, metavar="FILE", help="JSON file to write, with every call in its order")
@click.argument("strategy", metavar="STRATEGY", help=f"an accelerate file, or one of {', '.join(file.names())}")
@click.argument("script", nargs=-1, type=click.UNPROCESSED, help="a script in the place of a model, and its arguments")
def _dry_run(
    strategy: str, script: tuple[str, ...], world_size: int, ranks: str | None, per_machine: int, output: Path | None,
    **model: Any,
) -> int:  # fmt: skip
    """Run the engine as some ranks of many that are not there.

    Says what each holds and sends, and where they would wait for each other for ever. Options come first.

    Exit status: 0 the ranks make the same calls; 1 they part, which is a hang; 2 it cannot be pretended.
    """
    _require(*TRAINING)
    from study.dryrun import command

    return command.command(file.find_strategy(strategy), script, world_size, ranks, per_machine, output, **model)


@zero_study.command("upgrade")
@click.argument(
    "old", type=PATH, metavar="OLD", help="uv.lock, requirements.txt, environment.yml or what `pip freeze` prints"
)
@click.argument("new", type=PATH, metavar="NEW", help="the same, after the upgrade")
@click.option("--output", type=PATH, metavar="FILE", help="JSON file to write, each change as OSV has it")
def _upgrade(old: Path, new: Path, output: Path | None) -> int:
    """Say what other releases change in a training.

    Exit status: 0 nothing comes that trains otherwise; 1 something does, is unknown, or could not be compared; 2 a file
    cannot be read.
    """
    from study.engines import upgrade

    before, after = upgrade.read_lock(old), upgrade.read_lock(new)
    changes = upgrade.compare(before.pins, after.pins)
    if output is not None:
        files.require_folder(output)
        files.write_json(output, {"vulns": [change.as_osv() for change in changes]})
    print(upgrade.text(changes, before, after))
    return int(not upgrade.is_fine(changes, before, after))


def _require(*modules: str) -> None:
    """Refuse now what would fail later, in a process of its own."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise ModuleNotFoundError(name=module)


# ---------------------------------------------------------------- records


@zero_study.command("conformance")
@click.option("--only", multiple=True, metavar="TEXT", help="only cells whose name contains this, and every other TEXT")
@click.option("--ranks", metavar="NUMBERS", help="how many processes, with commas between [default: 1,2]")
@click.option(
    "--release",
    "asked_releases",
    multiple=True,
    metavar="PACKAGE==VERSION",
    help="another release than the installed one, of deepspeed, accelerate or torch: its plain cells",
)
@click.option("--known", type=PATH, metavar="FILE", help="an earlier --output: what it has as it is now is no failure")
@click.option("--output", type=PATH, help="JSON file to write")
def _conformance(
    only: tuple[str, ...], ranks: str | None, asked_releases: tuple[str, ...], known: Path | None, output: Path | None
) -> int:
    """Ask whether the installed engines train right.

    Trains a toy in every way that they offer, and holds each against a reference without an engine.

    On a CPU, in some minutes. Exit status: 0 every cell is the same or refused, or known; 1 one is wrong or crashed.
    """
    _require(*TRAINING[:1], "deepspeed")
    from study.engines.conformance import cells, committed, installation, releases

    if ranks is not None and not re.fullmatch(r"[1-9](,[1-9])*", ranks):
        raise Refusal(f"--ranks {ranks}: write numbers of processes, for instance 1,2")
    chosen = releases.parse(asked_releases)
    if ranks is not None and chosen:
        raise Refusal(f"--ranks {ranks}: another release is examined on two processes; leave it out")
    numbers = sorted({int(number) for number in (ranks or "1,2").split(",")})
    matrix = cells.of_release(chosen, (cells.PLAIN, *cells.NEWER_TWISTS)) if chosen else cells.matrix(numbers)
    asked = [cell for cell in matrix if all(text in cell.name for text in only)]
    if not asked:
        raise Refusal(
            f"--only {' --only '.join(only)}: no cell's name has that; zero2/bf16/2-ranks/accumulation-2 is one"
        )
    if output is not None:
        files.require_folder(output)
    earlier = None if known is None else committed.load(known)
    found = installation.examine(asked, lambda line: print(line, flush=True), chosen=chosen)
    if output is not None:
        files.write_json(output, found)
    print("\n".join(committed.lines(found)))
    new = committed.failures(found, earlier)
    if known is not None:
        print(f"\nnew since {known}: {', '.join(new) or 'none'}")
    return int(bool(new))


@zero_study.command("export")
@click.argument("run", type=PATH, help="a run directory, or one of its checkpoints")
@click.argument("folder", type=PATH, required=False, help="folder to write [default: RUN/model]")
@click.option("--data-dir", type=PATH, help=DATA_FOLDER)
def _export(run: Path, folder: Path | None, data_dir: Path | None) -> None:
    """Write a run's model, as from_pretrained loads it.

    That of its newest checkpoint, whole and in fp32.

    Its loss on the run's held-out examples is printed beside the run's own.
    """
    _require(*TRAINING)
    from study.training import export

    checkpoint = export.newest(run)
    target = folder or run / "model"
    model = export.export(checkpoint, target)
    print(f"exported {target}, of step {checkpoint.manifest.step} under {checkpoint.manifest.identity.strategy}")
    print(export.check(model, checkpoint, data_dir))


@zero_study.command("compare")
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
    module, table = VIEWS[view].split(".")
    make = getattr(importlib.import_module(f"study.compare.{module}"), table)
    print(make(records, control) if view in WITH_CONTROL else make(records))


@zero_study.command("report")
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
    _require("papermill")
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


@zero_study.command("pack")
@click.argument("records", type=PATH, nargs=-1, required=True, help=RECORDS)
@click.argument("target", type=PATH, help="a file, my-box.zip, or a folder to commit, reports/cpu/records/cpu")
def _pack(records: tuple[Path, ...], target: Path) -> None:
    """Put finished runs into one file, or a folder.

    A file has their digests; a folder, to commit, has a line each.
    """
    from study.records import pack

    if target.suffix == ".zip":
        pack.pack(records, target)
    else:
        pack.collect(records, target)


@zero_study.command("merge")
@click.argument("packed", type=PATH, metavar="FILE", help="what `zero-study pack` wrote")
@click.argument("records", type=PATH, help="folder to write to, for instance reports/STUDY/records/my-box")
def _merge(packed: Path, records: Path) -> None:
    """Take a packed file's records into a folder."""
    from study.records import pack

    pack.merge(packed, records)


# ---------------------------------------------------------------- predictions


def _choice(flag: str, kinds: Any, help: str, default: str | None = None) -> Callable[[Any], Any]:
    """An option that takes one of the words of a Literal."""
    return click.option(flag, type=click.Choice(get_args(kinds)), default=default, help=help)


@zero_study.command("advise")
@click.option("--model", metavar="NAME", help="a known name (gpt2-xl, llama-2-7b ...), a hub id or a config.json")
@click.option(
    "--gpu", required=True, metavar="NAME", help="t4, l4, a10g, v100-16gb, a100-40gb, a100-80gb, h100-sxm, h200 ..."
)
@click.option("--gpus", "num_gpus", type=NUMBER, help="how many")
@click.option("--sequence-length", type=NUMBER, help="tokens [default: 1024, or as many as the model has positions]")
@click.option("--global-batch-size", type=NUMBER, help="sequences per optimizer step [default: 8 per GPU]")
@click.option("--strategy", metavar="NAME", help="only this one: a name or a file")
@click.option(
    "--micro-batch-size", type=NUMBER, help="sequences per GPU and forward pass [default: the fastest that fits]"
)
@click.option("--gradient-accumulation-steps", type=NUMBER, help="micro steps [default: what the batch sizes leave]")
@_choice("--precision", case.Precision, "[default: bf16 where the GPU has it, else fp16]")
@_choice(
    "--activation-checkpointing",
    case.Checkpointing,
    "recompute each block, or every second [default: full, where it makes a strategy fit, or faster]",
)
@_choice(
    "--kernels",
    case.Kernels,
    "norms, activation functions and loss in one each, or composed as transformers has them",
    "fused",
)
@click.option("--compile", is_flag=True, help="torch.compile fuses what transformers composes")
@_choice(
    "--attention",
    case.Attention,
    "PyTorch's (FlashAttention-2 where the card and the type have it), operators, or FlashAttention as of 2022",
    "sdpa",
)
@click.option("--dropout", is_flag=True, help="with dropout")
@_choice(
    "--loss-kernel",
    case.LossKernel,
    "fp32 logits and copies, fp32 logits, 16-bit logits, or never all logits [default: as --kernels]",
)
@_choice("--optimizer", case.Optimizer, "whose states are kept; sgd: without momentum", "adamw")
@_choice(
    "--optimizer-kernel",
    case.OptimizerKernel,
    "foreach, PyTorch's default, takes one more copy of what is updated",
    "fused",
)
@click.option("--network-gbps", type=float, metavar="GBIT", help="of a node to all others [default: as one rents it]")
@click.option("--gpus-per-node", type=NUMBER, help="[default: as one rents it]")
@click.option(
    "--shard-group-size",
    type=NUMBER,
    help="GPUs that share one copy of the states (hybrid sharding, ZeRO-1 within nodes) [default: hybrid, a node's]",
)
@click.option(
    "--all", "everything", is_flag=True, help="every strategy, where the bytes are, and what the times rest on"
)
@click.option("--json", "as_json", is_flag=True, help="print bytes and seconds as JSON")
@click.option("--write", type=PATH, metavar="FILE", help="also write the recommended accelerate file")
@click.option("--trace", is_flag=True, help="choose by traces of the model over fake tensors, a minute or less each")
def _advise(
    model: str | None,
    num_gpus: int | None,
    everything: bool,
    as_json: bool,
    write: Path | None,
    trace: bool,
    **options: Any,
) -> None:
    """Say which strategy to take for a model and GPUs.

    Predicts memory, time and price of each.

    Without --model: the largest model for the GPUs. Without --gpus: the fewest GPUs for the model.
    """
    import json

    from study import planner
    from study.planner import advice_text

    if model is None and num_gpus is None:
        raise Refusal("--model or --gpus is missing: a model for its GPUs, GPUs for their model, or both")
    asked = planner.Asked(num_gpus=num_gpus or 1, **options)
    if trace:
        if None in (model, num_gpus):
            raise Refusal("--trace goes with both --model and --gpus; add them")
        _require(*TRACING)
    if write is not None:
        if None in (model, num_gpus):
            raise Refusal(f"--write {write}: needs both --model and --gpus")
        advice_text.check_free(write)

    def show(advice: Any, text: Callable[[Any], str], content: Callable[[Any], dict[str, Any]]) -> None:
        print(json.dumps(content(advice), indent=1) if as_json else text(advice))

    if model is None:
        show(planner.largest_models(asked), advice_text.text_of_largest, advice_text.content_of_largest)
        return
    if num_gpus is None:
        show(planner.fewest_gpus(model, asked), advice_text.text_of_fewest, advice_text.content_of_fewest)
        return
    tracer = None
    if trace:
        from study.dryrun.trace import trace as trace_step
        from study.planner.trace import trace_options

        asked = dataclasses.replace(asked, kernels="transformers")  # whose modules are traced
        tracer = functools.partial(trace_options, trace_step)
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():  # the lines of a trace
        advice = planner.advise(model, asked, tracer)
    show(advice, advice_text.text_of_all if everything else advice_text.text, advice_text.content)
    if write is not None:
        advice_text.write(advice, write)
        if not as_json:
            print(f"\nWritten: {write}")


@zero_study.command("predict")
@click.argument("study", required=False, help=A_STUDY)
@click.option("--gpu", metavar="NAME", help="as `zero-study advise` names it")
@click.option("--gpus", "num_gpus", type=NUMBER, help="how many [default: 1]")
@click.option("--output", type=PATH, default="reports/predicted", help="folder to write to")
def _predict(study: str | None, gpu: str | None, num_gpus: int | None, output: Path) -> None:
    """Predict a study's runs on other GPUs.

    Without a study, all of the reports'.
    """
    from study.running import predictions, studies

    if study is None:
        if gpu or num_gpus:
            raise Refusal("--gpu and --gpus go with a study; name one, or leave them out for all of the reports'")
        for path in predictions.write_all(output):
            print(path)
        return
    if gpu is None:
        raise Refusal("--gpu is missing: predict STUDY --gpu a100-80gb --gpus 8")
    print(predictions.write(output, predictions.predict_study(studies.find(study), gpu, num_gpus or 1)))


# ---------------------------------------------------------------- what others published


@zero_study.command("claims")
@click.argument("asked", required=False, metavar="[SOURCE|CLAIM]", help="what is asked of: a source or a claim")
@click.option("--search", metavar="WORDS", help="the sentences in which all these words are")
@click.option("--json", "as_json", is_flag=True, help="print everything that is known, of a source or of all, as JSON")
@click.option("--check", is_flag=True, help="decide every claim again, and list what has changed")
@click.option("--write", is_flag=True, help="decide every claim again, write the verdicts")
def _claims(asked: str | None, search: str | None, as_json: bool, check: bool, write: bool) -> int:
    """Say what became of published sentences.

    Of a source, of one claim, or how all came out.

    Exit status of --check and --write: 1 where a verdict no longer follows, or a sentence says another one than its
    rule finds.
    """
    import json

    from study.claims import sentences

    if sum([check, write, as_json, search is not None]) > 1 or ((check or write or search is not None) and asked):
        raise Refusal("--check and --write decide every claim, --search looks in all; give one of them alone")
    if check or write:
        require_clone("the records that claims are decided by")
        return _decide_claims(write)
    if search is not None:
        print(sentences.found(search))
    elif as_json:
        print(json.dumps(sentences.content(sentences.read(asked)), indent=1, ensure_ascii=False))
    else:
        print(sentences.text(asked))
    return 0


def _decide_claims(write: bool) -> int:
    from study.claims import ledger, verdicts

    sources, now = ledger.read(), verdicts.decide_all()
    if write:
        verdicts.write(now)
        print(f"{verdicts.VERDICTS}: {len(now)} verdicts")
    wrong = verdicts.unlike(sources, now) | verdicts.stale(verdicts.read(), now)
    for name, what in wrong.items():
        print(f"{name}: {what}")
    print(
        f"{len(wrong)} of {len(now)} claims are not as they are committed" if wrong else f"{len(now)} verdicts follow"
    )
    return 1 if wrong else 0
