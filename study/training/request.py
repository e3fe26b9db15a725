"""What was the launcher asked for? Read from the command line of the `accelerate launch` above this process."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from study.config import RunConfig
from study.errors import Refusal
from study.run import Run, make_run
from study.strategy.file import read_strategy


def requested_run(config: RunConfig) -> Run:
    """Return the run that the `accelerate launch` above this process was asked for.

    Accelerate hands its children flags, not the name of the file they came from; the launcher's own command line,
    found among this process's ancestors, has it. Raises Refusal where there is none.
    """
    from accelerate.commands.launch import launch_command_parser

    for parent in psutil.Process().parents():
        try:
            command = parent.cmdline()
        except psutil.Error:  # a parent that ended or is not ours
            continue
        if (start := _launch_arguments(command)) is None:
            continue
        arguments = launch_command_parser().parse_args(command[start:])
        if arguments.config_file is None:
            break
        path = Path(parent.cwd()) / arguments.config_file
        strategy = read_strategy(path if not path.is_relative_to(Path.cwd()) else path.relative_to(Path.cwd()))
        return make_run(
            config,
            strategy,
            world_size=arguments.num_processes or strategy.num_processes,
            num_machines=arguments.num_machines or strategy.num_machines,
        )
    raise Refusal(
        "no accelerate file: start it as `accelerate launch --config_file accelerate_configs/zero3.yaml "
        "study/train.py`, or as `zero-study train --strategy zero3`"
    )


def _launch_arguments(command: list[str]) -> int | None:
    """Index of the first argument of `accelerate launch` in a command line, None where it is another program's."""
    for index, word in enumerate(command[:4]):
        base = os.path.basename(word)
        if base == "accelerate-launch" or word == "accelerate.commands.launch":
            return index + 1
        if base in ("accelerate", "accelerate.commands.accelerate_cli") and command[index + 1 : index + 2] == [
            "launch"
        ]:
            return index + 2
    return None
