"""What is one run? A configuration under a strategy, on so many processes, in a folder of its own; all else follows."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from study.config import RunConfig, build_config
from study.files import check_name
from study.strategy.file import Strategy


@dataclass(frozen=True)
class Run:
    """One run: what is trained, how it is distributed, and where it leaves what it found."""

    config: RunConfig
    strategy: Strategy
    world_size: int  # processes, over all machines
    folder: Path  # the run directory
    num_machines: int = 1
    round: int = 0  # of its study's rotation, from 0

    def __post_init__(self) -> None:
        check_name(self.run_id, f"{self.folder}: the run's name")

    @property
    def run_id(self) -> str:
        return self.folder.name

    @property
    def micro_batch_size(self) -> int:
        """Sequences per rank and forward pass. Raises Refusal where the batches do not divide."""
        return self.config.batches(self.world_size)[0]

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro steps per optimizer step. Raises Refusal where the batches do not divide."""
        return self.config.batches(self.world_size)[1]

    def arguments(self) -> list[str]:
        """The flags of this run as train.py takes them: what differs from train.py's defaults, and the folder."""
        defaults = build_config()
        changed = {name: value for name, value in self.config if value != getattr(defaults, name)}
        return as_words({**changed, "output_dir": self.folder})

    @property
    def swap_folder(self) -> Path:
        """Where NVMe offload swaps to: a folder of this run alone, because DeepSpeed empties it."""
        chosen = self.config.swap_dir
        return (chosen / f"zero-study-{self.run_id}" if chosen else self.folder / "swap").resolve()

    @property
    def checkpoints_folder(self) -> Path:
        return self.folder / "checkpoints"

    def remove_scratch(self) -> None:
        """Delete what only a process that goes on needs, and give its disk back."""
        for folder in (self.folder / "initial_weights", *self.checkpoints_folder.glob("*.part")):
            shutil.rmtree(folder, ignore_errors=True)
        self.remove_swap_folder()

    def remove_swap_folder(self) -> None:
        """Delete what NVMe offload left on the disk, once no rank steps any more."""
        if self.strategy.offloads_to_nvme:
            shutil.rmtree(self.swap_folder, ignore_errors=True)


def make_run(config: RunConfig, strategy: Strategy, world_size: int, num_machines: int = 1) -> Run:
    """Make a run that belongs to no study: in --output-dir, else in runs/, in a folder named after what it is."""
    name = f"{config.workload}-{config.size}-{strategy.name}-{world_size}x-seed{config.seed}"
    return Run(config, strategy, world_size, config.output_dir or Path("runs") / name, num_machines)


def as_words(flags: Mapping[str, Any]) -> list[str]:
    """Write flags as train.py takes them: {"max_steps": 8, "measure": False} is --max-steps 8 --no-measure."""
    words: list[str] = []
    for name, value in flags.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
        elif value is not None:  # None is unset, as YAML's null says it
            words += [flag, str(value)]
    return words
