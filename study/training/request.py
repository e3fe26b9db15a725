"""Read the request from the command line of the `accelerate launch` process above this process."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from study.config import RunConfig
from study.run import Run, make_run
from zero_study.engines.keys import allowed, known_keys
from zero_study.errors import Refusal
from zero_study.strategy.file import Strategy, read_strategy

# Modules of this project that run a user's script unchanged and record what it does.
RECORDERS = {"zero_study.diff", "zero_study.prove"}


def requested_run(config: RunConfig) -> Run:
    """Return the run that is requested by the `accelerate launch` process that started this process.

    Accelerate passes settings to its child processes, but not the name of the strategy's file. The launcher is
    therefore searched for among the parent processes, and its command line is read. Raises Refusal if there is no
    launcher, or if it has an option or an environment variable that a run must not have.
    """
    if (launcher := _launcher()) is not None:
        parent, flags, command = launcher
        if RECORDERS & {*command}:  # the training script still follows these modules
            flags.pop("module", None)
        if "config_file" in flags:
            allowed.check_flags(flags)
            allowed.check_variables(_environment(parent))
            path = Path(parent.cwd()) / flags["config_file"]
            strategy = read_strategy(path if not path.is_relative_to(Path.cwd()) else path.relative_to(Path.cwd()))
            run = make_run(
                config,
                strategy,
                world_size=flags.get("num_processes") or strategy.num_processes,
                num_machines=flags.get("num_machines") or strategy.num_machines,
                machine_rank=flags.get("machine_rank") or strategy.content.get("machine_rank") or 0,
                main_process_ip=flags.get("main_process_ip") or strategy.content.get("main_process_ip"),
                main_process_port=flags.get("main_process_port") or strategy.content.get("main_process_port") or 0,
            )
            run.check_machines()
            allowed.check_rank(os.environ, run.world_size, strategy.distributed_type != "NO")
            return run
    raise Refusal(
        "the launch command names no accelerate file. Start the training as `accelerate launch --config_file "
        "accelerate_configs/zero3.yaml study/train.py`, or as `zero-study train --strategy zero3`"
    )


def check_as_launched(strategy: Strategy, environment: Mapping[str, str]) -> None:
    """Raise Refusal if the strategy's file has changed since the launcher read it, a few seconds earlier.

    `environment` is the environment that the launcher has set for this rank.
    """
    content = strategy.content
    handed_on = known_keys.read()["handed_on"]
    now = {handed_on["filled"]["mixed_precision"]: content.get("mixed_precision") or "no"}
    now |= {f"ACCELERATE_USE_{kind}": strategy.distributed_type == kind or None for kind in ("DEEPSPEED", "FSDP")}
    for key, name in handed_on["written"].items():
        section, _, word = key.partition(".")
        now[name] = (content.get(section) or {}).get(word)
    for name, value in now.items():
        then = environment.get(name)
        if str(then).lower() != str(value).lower():
            raise Refusal(
                f"{strategy.path}: the file was changed while the run started. The launcher read "
                f"{name}={then}, but now the value is {value}. Start the run again."
            )


def launcher_command() -> list[str] | None:
    """Return the command of the `accelerate launch` process that started this process. None if there is none."""
    launcher = _launcher()
    return None if launcher is None else launcher[2]


def _launcher() -> tuple[psutil.Process, dict[str, Any], list[str]] | None:
    """Return the `accelerate launch` process above this process, its options by accelerate's names, and its command.

    None if there is no such process.
    """
    for parent in psutil.Process().parents():
        try:
            command = parent.cmdline()
        except psutil.Error:  # the parent has ended, or belongs to another user
            continue
        if (start := _launch_arguments(command)) is not None:
            words = ["accelerate", "launch", *command[start:]]
            flags = vars(_parser().parse_args(list(command[start:])))
            own = {"training_script", "training_script_args", "nondefault"}  # these are not options of the launcher
            flags_of_launcher = {name: value for name, value in flags.items() if name not in own}
            return parent, flags_of_launcher, words
    return None


def _environment(launcher: psutil.Process) -> dict[str, str]:
    """Return the environment that a launcher was started with.

    It does not have the variables that it sets for its children.
    """
    try:
        return dict(launcher.environ())
    except psutil.Error:
        raise Refusal(
            f"process {launcher.pid}: its environment cannot be read, so its effect on the run is unknown. Start the "
            "launcher as the same user."
        ) from None


@cache
def _parser() -> argparse.ArgumentParser:
    """Return accelerate's parser for the launcher's arguments, without default values."""
    from accelerate.commands.launch import launch_command_parser

    parser: argparse.ArgumentParser = launch_command_parser()
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    return parser


def _launch_arguments(command: list[str]) -> int | None:
    """Return the index of the first argument of `accelerate launch` in a command line. None for any other program."""
    for index, word in enumerate(command[:4]):
        base = os.path.basename(word)
        if base == "accelerate-launch" or word == "accelerate.commands.launch":
            return index + 1
        if base in ("accelerate", "accelerate.commands.accelerate_cli") and command[index + 1 : index + 2] == [
            "launch"
        ]:
            return index + 2
    return None
