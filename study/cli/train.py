"""The commands that train: one run, a study, the plan of a study, and one run of a study as a scheduler's job."""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path
from typing import Any

import click

from study import config
from study.cli.options import (
    A_STUDY,
    CHECKPOINT_EVERY,
    DATA_FOLDER,
    MACHINES,
    NUMBER,
    PATH,
    TRAINING,
    command,
    require,
)  # fmt: skip
from study.errors import Refusal
from study.run import as_words
from study.strategy import file


@command(
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
    from study.compare import summary
    from study.run import make_run
    from study.running import checks, launch

    require(*TRAINING)
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
        print(summary.of_run(run.folder))
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


@command("plan")
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


@command("run")
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
    from study.training import pretraining

    chosen = studies.find(study)
    folder = runs_dir / chosen.name
    runs = plan.select(chosen, data_dir, only, folder, checkpoint_every, skip)
    require(*TRAINING)  # a plan does without it, no run does
    pretraining.train_missing(runs, studies.runs(chosen, data_dir, folder))
    return runner.run(chosen, runs, folder, timeout, fail_fast, runner.Slot(60.0 * minutes if minutes else math.inf))


@command(
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
    from study.training import pretraining

    chosen = studies.find(study)
    folder = runs_dir / chosen.name
    run = plan.select_one(chosen, data_dir, run_id, folder, checkpoint_every)
    if num_machines and num_machines > 1:
        _check_machine(num_machines, machine["main_process_ip"])
        run = dataclasses.replace(run, num_machines=num_machines, **machine)
    require(*TRAINING)
    pretraining.train_missing([run], studies.runs(chosen, data_dir, folder))
    return runner.run_one(chosen, run, folder, timeout, is_first_machine=machine["machine_rank"] == 0)


COMMANDS = (_train, _run, _plan, _job)
