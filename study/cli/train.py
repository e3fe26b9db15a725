"""Define the commands that train or plan: one run, a study, the plan of a study, and one run of a study as a job."""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from study import config
from study.run import as_words
from zero_study import terminal
from zero_study.cli.options import (
    A_STUDY,
    CHECKPOINT_EVERY,
    DATA_FOLDER,
    MACHINES,
    PATH,
    TRAINING,
    Statuses,
    command,
    json_option,
    require,
)  # fmt: skip
from zero_study.command_line import NUMBER, Argument, Option, argument, given
from zero_study.errors import Refusal
from zero_study.strategy import file

if TYPE_CHECKING:
    from zero_study.answers.envelope import Answer

LAUNCH = "Strategy and processes"


@command(
    "train",
    "What loss, memory and time does a strategy have? Trains BERT or GPT once.",
    "train --strategy zero3",
    statuses=Statuses("the run is ok", "the run has another outcome, for instance out of memory"),
    params=[
        Option(
            ["--strategy"],
            group=LAUNCH,
            is_common=True,
            default="single",
            metavar="NAME",
            help=f"Strategy: your own accelerate file, or one of {', '.join(file.names())}.",
        ),
        Option(
            ["--num-processes"],
            group=LAUNCH,
            is_common=True,
            type=NUMBER,
            help="Number of processes. [default: as the strategy's file says]",
        ),
        Option(
            ["--timeout"],
            group=LAUNCH,
            type=NUMBER,
            help="End the run after this number of seconds. [default: no limit]",
        ),
        *MACHINES,
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
    """Train one model under one strategy.

    The command writes a record to the run directory (--output-dir) and prints a summary. For a run on several machines,
    start the command on each machine.
    """
    from study.compare import summary
    from study.run import make_run
    from study.running import checks, launch, next_run

    require(*TRAINING)
    chosen = file.read_strategy(file.find_strategy(strategy))
    run_config = config.build_config(**given(options))
    machines = num_machines or chosen.num_machines
    _check_machine(machines, main_process_ip)
    place = {"machine_rank": machine_rank, "main_process_ip": main_process_ip, "main_process_port": main_process_port}
    run = make_run(run_config, chosen, num_processes or chosen.num_processes, machines, **place)
    checks.check_folder(run)
    checks.check(run)
    checks.provide_extensions(run)

    ended = launch.launch(run, timeout, lambda line: print(f"  {line}", flush=True))
    if ended.status == "misconfigured" and ended.record_path is None:
        raise Refusal(ended.message)
    result = f"{ended.status}: {ended.message}" + (f" ({ended.record_path})" if ended.record_path else "")
    print(terminal.wrap(result, later_indent="  "))
    if ended.status == "ok" and ended.record_path:
        chosen_options = {**given(options), **({} if timeout is None else {"timeout": timeout})}
        print(summary.of_run(run.folder, next_run.commands(run, chosen_options)))
    if ended.status == "crashed":
        print("\n".join([terminal.command(ended.command), *ended.stderr_tail]))
    return 0 if ended.status == "ok" else 1


def _check_machine(num_machines: int, main_process_ip: str | None) -> None:
    if num_machines > 1 and main_process_ip is None:
        raise Refusal(
            f"--num-machines {num_machines}: the machines cannot meet without the address of machine 0. Add "
            "--main-process-ip."
        )


def _of_a_study(command: Any) -> Any:
    """Add the argument and the options that `plan` and `run` share to a command.

    They select the study, its runs, the folders, the time limit and the checkpoints.
    """
    options = [
        argument("study", help=A_STUDY),
        click.option("--data-dir", type=PATH, help=DATA_FOLDER),
        click.option(
            "--runs-dir", type=PATH, default="runs", help="Folder of all studies. Each study has its own subfolder."
        ),
        click.option(
            "--only",
            default="",
            metavar="TEXT",
            show_default=False,
            help="Use only the runs whose id contains this text.",
        ),
        click.option("--skip", metavar="TEXT", help="Leave out the runs whose id contains this text."),
        click.option("--timeout", type=NUMBER, default=1800, help="End a run after this number of seconds."),
        click.option("--checkpoint-every", type=NUMBER, metavar="STEPS", help=CHECKPOINT_EVERY),
    ]
    for option in reversed(options):
        command = option(command)
    return command


@command(
    "plan",
    "Which runs does a study have, and how long do they take?",
    "plan smoke",
    statuses=Statuses("the runs were listed"),
)
@_of_a_study
@click.option(
    "--slurm",
    is_flag=True,
    help="Instead of the plan, print a shell script that submits the unfinished runs to Slurm.",
)
@click.option(
    "--kubernetes",
    is_flag=True,
    help="Instead of the plan, print the manifest of a Kubeflow TrainJob for each unfinished run (docs/containers.md).",
)
@click.option(
    "--per-machine",
    type=NUMBER,
    help="Largest number of processes on one machine. The processes of a larger run are divided equally among several "
    "machines. [default: no limit]",
)
@json_option
def _plan(
    study: str,
    data_dir: Path | None,
    runs_dir: Path,
    only: str,
    skip: str | None,
    timeout: int,
    checkpoint_every: int | None,
    slurm: bool,
    kubernetes: bool,
    per_machine: int | None,
    as_json: bool,
) -> Answer | None:
    """List a study's runs, and how long they take.

    The plan lists the runs that would start, the finished runs, and the runs that are skipped, with the reason. The
    command starts nothing and writes nothing.
    """
    from study.running import json_answer, plan, studies
    from study.running.slurm import manifests, script
    from zero_study.progress import after_two_seconds

    with after_two_seconds("Reading earlier runs and checking this machine"):
        chosen = studies.find(study)
        folder = runs_dir / chosen.name
        runs = plan.over_machines(plan.select(chosen, data_dir, only, folder, checkpoint_every, skip), per_machine)
        flags = {"data_dir": data_dir, "runs_dir": runs_dir, "timeout": timeout, "checkpoint_every": checkpoint_every}
        job = ["zero-study", "job", *as_words(flags), study]
        if kubernetes:
            if slurm or as_json:
                raise Refusal("--kubernetes prints YAML only. Leave --slurm and --json out.")
            text = manifests(chosen, runs, timeout, job)
        elif slurm:
            text = script(chosen, runs, folder, timeout, [sys.executable, "-m", "zero_study", *job[1:]])
            if as_json:
                return json_answer.of_script(chosen.name, text)
        else:
            made = plan.make_plan(chosen, runs, folder, timeout)
            if as_json:
                return json_answer.of_plan(made)
            text = plan.show(made) + "\n"
    print(text, end="")
    return None


@command(
    "run",
    "How do many strategies compare? Runs a study, or continues it.",
    "run smoke",
    statuses=Statuses(
        "every run is ok or skipped",
        "every run has an outcome, but some are not ok, for instance out of memory",
        "the request is refused",
        "some runs have no outcome yet, because of an interruption, --minutes or --fail-fast",
    ),
)
@_of_a_study
@click.option(
    "--fail-fast", is_flag=True, help="Stop after the first run whose outcome is neither ok nor out of memory."
)
@click.option(
    "--minutes",
    type=NUMBER,
    help="Stop after this many minutes. Runs that failed in an earlier call, and runs that are expected to take longer "
    "than the remaining time, are not started. [default: no limit]",
)
@click.option(
    "--fork",
    is_flag=True,
    help="On a machine without a GPU, fork the runs from one process that has already imported PyTorch and the "
    "engines. Forking saves most of the time of a short run. Runs that need an extension of DeepSpeed that is not "
    "built yet are executed later, and runs with timed steps last. The record says whether a run was forked, because "
    "the resident memory of forked runs cannot be compared with that of other runs.",
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
    fork: bool,
) -> int:
    """Run a study, or continue it.

    The runs are executed one after another. Finished runs are not repeated, and an interrupted run resumes from its
    checkpoint if it has one. The record, the outcome and the logs of a run are in the folder RUNS_DIR/STUDY/RUN.
    """
    from study.running import plan, runner, studies
    from study.training import pretraining

    chosen = studies.find(study)
    folder = runs_dir / chosen.name
    runs = plan.select(chosen, data_dir, only, folder, checkpoint_every, skip)
    require(*TRAINING)  # `plan` works without these packages, but a run does not
    pretraining.train_missing(runs, studies.runs(chosen, data_dir, folder))
    slot = runner.Slot(60.0 * minutes if minutes else math.inf)
    return runner.run(chosen, runs, folder, timeout, fail_fast, slot, fork)


@command(
    "job",
    "How does a scheduler such as Slurm execute one run of a study?",
    "job smoke bert-imdb-tiny-ddp-2x-seed0",
    statuses=Statuses("the run is ok", "the run has another outcome", "the request is refused"),
    params=[
        Argument(["study"], help=A_STUDY),
        Argument(["run_id"], metavar="RUN", help="The id of the run, as `zero-study plan` lists it."),
        click.Option(["--data-dir"], type=PATH, help=DATA_FOLDER),
        click.Option(
            ["--runs-dir"], type=PATH, default="runs", help="Folder of all studies. Each study has its own subfolder."
        ),
        click.Option(["--timeout"], type=NUMBER, default=1800, help="End the run after this number of seconds."),
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
    """Execute one run of a study, as a job of a scheduler such as Slurm.

    Other runs of the study may run at the same time, on this machine or on others.
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


@command(
    "predict",
    "What memory and time would the runs of a study need on other GPUs?",
    "predict smoke --gpu a100-80gb --gpus 8",
    statuses=Statuses("the predictions were written"),
)
@argument("study", required=False, help=A_STUDY)
@click.option("--gpu", metavar="NAME", help="Kind of GPU, as in `zero-study advise`.")
@click.option("--gpus", "num_gpus", type=NUMBER, help="Number of GPUs. [default: 1]")
@click.option("--output", type=PATH, help="Folder to write to. [default: reports/predicted]")
@json_option
def _predict(
    study: str | None, gpu: str | None, num_gpus: int | None, output: Path | None, as_json: bool
) -> Answer | None:
    """Predict a study's runs on other GPUs.

    The command writes predicted memory and time to a JSON file. Without a study, it writes all predictions of the
    project's reports, in a clone of the project only.
    """
    from study.running import json_answer, predictions, studies

    if study is None:
        if gpu or num_gpus:
            raise Refusal(
                "--gpu and --gpus need a study. Name a study, or remove both options to write all predictions of the "
                "reports."
            )
        studies.require_name(output)
    folder = output or Path("reports/predicted")
    if study is None:
        paths = predictions.write_all(folder)
    elif gpu is None:
        raise Refusal("--gpu is missing. For instance, write `zero-study predict STUDY --gpu a100-80gb --gpus 8`.")
    else:
        paths = [predictions.write(folder, predictions.predict_study(studies.find(study), gpu, num_gpus or 1))]
    if as_json:
        return json_answer.of_predictions(paths)
    print("\n".join(f"Wrote {path}" for path in paths))
    return None


COMMANDS = (_train, _run, _plan, _predict, _job)
