"""Suggest a second run after a successful one, so that both can be compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from study.run import Run, as_words, make_run
from study.running import checks
from zero_study.errors import Refusal
from zero_study.strategy.file import read_by_name

CONTROLS = ("ddp", "zero2", "fsdp2", "zero3")  # the first one that can run here is suggested
_OF_ONE_RUN = {"output_dir", "resume", "resume_with_other_code"}  # options that another run must not repeat


def commands(run: Run, options: Mapping[str, Any]) -> list[list[str]]:
    """Return the commands that train with another strategy and then compare both runs, each as a list of words.

    The first command has the options of the run. Empty if no other strategy can run here with these options, or if
    each has been run already.
    """
    for name in CONTROLS:
        for world_size in dict.fromkeys((run.world_size, read_by_name(name).num_processes)):
            following = _with_strategy(run, name, world_size)
            if name != run.strategy.name and following is not None:
                return [
                    ["zero-study", "train", *_words(run, following, options)],
                    ["zero-study", "compare", str(run.folder), str(following.folder)],
                ]
    return []


def _with_strategy(run: Run, name: str, world_size: int) -> Run | None:
    """Return a run that differs only in strategy and number of processes. None if it cannot run or its folder exists.

    If the run has a folder of the user's choice, the other run gets one beside it.
    """
    config, strategy = run.config, read_by_name(name)
    if config.output_dir is not None:
        stem = config.output_dir.name.removesuffix(f"-{run.strategy.name}")
        config = config.model_copy(update={"output_dir": config.output_dir.with_name(f"{stem}-{name}")})
    if run.strategy.name == "single" and world_size == 1:
        return None
    following = make_run(config, strategy, world_size, run.num_machines)
    following = replace(following, machine_rank=run.machine_rank, main_process_ip=run.main_process_ip)
    try:
        checks.check(following)
        following.config.batches(world_size)
    except Refusal:
        return None
    return None if following.folder.exists() else following


def _words(run: Run, following: Run, options: Mapping[str, Any]) -> list[str]:
    """Return the options of the other run, as they are typed."""
    flags: dict[str, Any] = {"strategy": following.strategy.name}
    if following.world_size != following.strategy.num_processes:
        flags["num_processes"] = following.world_size
    if run.num_machines > 1:
        flags |= {"num_machines": run.num_machines, "machine_rank": run.machine_rank}
        flags |= {"main_process_ip": run.main_process_ip, "main_process_port": run.main_process_port}
    flags |= {name: value for name, value in options.items() if name not in _OF_ONE_RUN}
    folder: Path | None = following.config.output_dir
    return as_words({**flags, "output_dir": folder})
