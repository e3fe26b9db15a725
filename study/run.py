"""Describe one run: its configuration, strategy, number of processes and folder."""

from __future__ import annotations

import hashlib
import shutil
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from study.config import RunConfig, build_config
from zero_study.errors import Refusal
from zero_study.files import check_name
from zero_study.strategy.file import Strategy


@dataclass(frozen=True)
class Run:
    """One run: the training configuration, the strategy, the processes and machines, and the run directory."""

    config: RunConfig
    strategy: Strategy
    world_size: int  # number of processes on all machines
    folder: Path  # the run directory
    num_machines: int = 1
    round: int = 0  # round of the study in which this run is done, from 0
    machine_rank: int = 0  # number of the machine that this process is on
    main_process_ip: str | None = None  # address of machine 0; None if there is only one machine
    main_process_port: int = 0  # 0 for any free port, if there is only one machine
    # If a study searches for the largest value of an option that still trains: the option, and the position of this
    # run's value among its values. Otherwise None.
    rung: tuple[str, int] | None = None
    laboratory: str | None = None  # network rate of the simulated machines; None for real machines

    def __post_init__(self) -> None:
        check_name(self.run_id, f"{self.folder}: the run's name")

    @property
    def run_id(self) -> str:
        return self.folder.name

    @property
    def micro_batch_size(self) -> int:
        """The number of sequences per rank and forward pass.

        Raises Refusal if the global batch cannot be divided equally.
        """
        return self.config.batches(self.world_size)[0]

    @property
    def gradient_accumulation_steps(self) -> int:
        """The number of micro steps per optimizer step.

        Raises Refusal if the global batch cannot be divided equally.
        """
        return self.config.batches(self.world_size)[1]

    def arguments(self) -> list[str]:
        """Return the command-line flags that make train.py do this run.

        They set the run directory and every option whose value differs from train.py's default.
        """
        defaults = build_config()
        changed = {name: value for name, value in self.config if value != getattr(defaults, name)}
        return as_words({**changed, "output_dir": self.folder})

    @property
    def num_local_ranks(self) -> int:
        """The number of ranks on each machine of the run.

        Raises Refusal if the ranks cannot be divided equally among the machines.
        """
        if self.world_size % self.num_machines:
            raise Refusal(
                f"{self.world_size} processes cannot be divided equally among {self.num_machines} "
                "machines, and accelerate would start fewer without a warning. Use --num_processes "
                f"{self.num_machines * max(1, self.world_size // self.num_machines)}"
            )
        return self.world_size // self.num_machines

    def check_machines(self) -> None:
        """Raise Refusal if this machine's number is invalid, or if the ranks do not divide equally among machines."""
        if self.num_local_ranks and not 0 <= self.machine_rank < self.num_machines:
            raise Refusal(
                f"machine_rank {self.machine_rank} of {self.num_machines} machine(s) does not exist, because "
                "machines are counted from 0. Use another --machine_rank."
            )

    def is_first_of_machine(self, rank: int) -> bool:
        """Return whether a rank is the first one of its machine.

        This rank does the work that each machine needs only once.
        """
        return rank % self.num_local_ranks == 0

    def machine_of(self, rank: int) -> str:
        """Return a rank's number as text, followed by its machine's number if there are several machines."""
        return f"{rank} (machine {rank // self.num_local_ranks})" if self.num_machines > 1 else str(rank)

    @property
    def own_folder(self) -> Path:
        """The folder for files that belong to this machine only.

        It is the run directory on machine 0, and a subfolder of it on every other machine. The layout is the same
        whether or not the machines share a disk.
        """
        return self.folder / f"machine{self.machine_rank}" if self.machine_rank else self.folder

    @property
    def swap_folder(self) -> Path:
        """The folder that NVMe offload swaps to. No other run may use it, because DeepSpeed empties it.

        Several runs with the same name may share one --swap-dir. The name of the folder therefore includes a hash of
        the machine's name and the run directory.
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
        """The folder that --save-model writes to."""
        return self.folder / "model"

    def remove_scratch(self) -> None:
        """Delete files that are needed only while the run is active, to free their disk space."""
        for folder in (self.initial_weights_folder, *self.checkpoints_folder.glob("*.part")):
            shutil.rmtree(folder, ignore_errors=True)
        self.remove_swap_folder()

    def remove_swap_folder(self) -> None:
        """Delete the files of NVMe offload. Call this only after the last step of every rank."""
        if self.strategy.offloads_to_nvme:
            shutil.rmtree(self.swap_folder, ignore_errors=True)


def make_run(config: RunConfig, strategy: Strategy, world_size: int, num_machines: int = 1, **machine: Any) -> Run:
    """Return the Run of a training that does not belong to a study.

    The run directory is `config.output_dir`. If that is None, it is a folder in runs/ whose name describes the run.
    `machine` has further fields of Run: which machine this is, and how to reach the first one. It is ignored if there
    is only one machine, as accelerate does.
    """
    where = f"{world_size}x" + (f"-{num_machines}machines" if num_machines > 1 else "")
    folder = (
        config.output_dir or Path("runs") / f"{config.workload}-{config.size}-{strategy.name}-{where}-seed{config.seed}"
    )
    return Run(config, strategy, world_size, folder, num_machines, **(machine if num_machines > 1 else {}))


def as_words(flags: Mapping[str, Any]) -> list[str]:
    """Return options as command-line words for train.py.

    For example, {"max_steps": 8, "measure": False} becomes --max-steps 8 --no-measure. Options that are None are left
    out.
    """
    words: list[str] = []
    for name, value in flags.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
        elif value is not None:  # None, or null in YAML, means that the option is not set
            words += [flag, str(value)]
    return words
