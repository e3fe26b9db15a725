"""One run: a configuration under a strategy, on a number of processes, in a folder of its own."""

from __future__ import annotations

import hashlib
import shutil
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from study.config import RunConfig, build_config
from study.errors import Refusal
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
    machine_rank: int = 0  # of the machine that this process is on
    main_process_ip: str | None = None  # where machine 0 is reached; None: there is one machine
    main_process_port: int = 0  # 0: any that is free, on one machine
    # The knob whose largest value that trains is looked for, and this run's place on its ladder; None: none is.
    rung: tuple[str, int] | None = None
    laboratory: str | None = None  # the rate of the network that its machines are made on; None: they are there

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
    def num_local_ranks(self) -> int:
        """Ranks on each machine. Raises Refusal where the machines cannot have as many each."""
        if self.world_size % self.num_machines:
            raise Refusal(
                f"{self.world_size} processes on {self.num_machines} machines: every machine needs the same number, "
                "and accelerate would silently start fewer. Use --num_processes "
                f"{self.num_machines * max(1, self.world_size // self.num_machines)}"
            )
        return self.world_size // self.num_machines

    def check_machines(self) -> None:
        """Refuse a machine that is none of the run's, and machines that cannot have as many processes each."""
        if self.num_local_ranks and not 0 <= self.machine_rank < self.num_machines:
            raise Refusal(
                f"machine_rank {self.machine_rank} of {self.num_machines} machine(s) does not exist, because "
                "machines are counted from 0. Use another --machine_rank."
            )

    def is_first_of_machine(self, rank: int) -> bool:
        """Say whether a rank does for its machine what is to be done once there."""
        return rank % self.num_local_ranks == 0

    def machine_of(self, rank: int) -> str:
        """Name a rank with its machine, where there are several."""
        return f"{rank} (machine {rank // self.num_local_ranks})" if self.num_machines > 1 else str(rank)

    @property
    def own_folder(self) -> Path:
        """Where this machine keeps what is its own: the run directory on machine 0, a folder in it on every other.

        So machines work alike whether they share a disk or not.
        """
        return self.folder / f"machine{self.machine_rank}" if self.machine_rank else self.folder

    @property
    def swap_folder(self) -> Path:
        """Where NVMe offload swaps to: a folder of this run alone, because DeepSpeed empties it.

        In a folder that runs share its name tells the run's place and machine: two runs may have one name.
        """
        chosen = self.config.swap_dir
        place = f"{socket.gethostname()}:{self.own_folder.resolve()}"
        name = f"zero-study-{self.run_id}-{hashlib.sha256(place.encode()).hexdigest()[:12]}"
        return (chosen / name if chosen else self.own_folder / "swap").resolve()

    @property
    def initial_weights_folder(self) -> Path:
        return self.own_folder / "initial_weights"

    @property
    def checkpoints_folder(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def model_folder(self) -> Path:
        """Where --save-model writes."""
        return self.folder / "model"

    def remove_scratch(self) -> None:
        """Delete what only a process that goes on needs, and give its disk back."""
        for folder in (self.initial_weights_folder, *self.checkpoints_folder.glob("*.part")):
            shutil.rmtree(folder, ignore_errors=True)
        self.remove_swap_folder()

    def remove_swap_folder(self) -> None:
        """Delete what NVMe offload left on the disk, once no rank steps any more."""
        if self.strategy.offloads_to_nvme:
            shutil.rmtree(self.swap_folder, ignore_errors=True)


def make_run(config: RunConfig, strategy: Strategy, world_size: int, num_machines: int = 1, **machine: Any) -> Run:
    """Make a run that belongs to no study: in --output-dir, else in runs/, in a folder named after what it is.

    `machine`: which of several this one is, and where the first is, by the names of Run's fields; of one machine
    accelerate leaves them aside.
    """
    where = f"{world_size}x" + (f"-{num_machines}machines" if num_machines > 1 else "")
    folder = (
        config.output_dir or Path("runs") / f"{config.workload}-{config.size}-{strategy.name}-{where}-seed{config.seed}"
    )
    return Run(config, strategy, world_size, folder, num_machines, **(machine if num_machines > 1 else {}))


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
