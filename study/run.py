"""What is one run?"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from study.config import RunConfig
from study.strategy.file import Strategy
from study.training.request import Launch

if TYPE_CHECKING:
    pass


def default_output_dir(config: RunConfig, launch: Launch) -> Path:
    name = f"{config.workload}-{config.size}-{launch.strategy.name}-{launch.num_processes}x-seed{config.seed}"
    return Path("runs") / name


def swap_folder(config: RunConfig, run_dir: Path) -> Path:
    """The folder of this run alone that NVMe offload swaps to; DeepSpeed empties it, so no two runs may share one."""
    return (config.swap_dir / f"zero-study-{run_dir.name}" if config.swap_dir else run_dir / "swap").resolve()


def remove_swap_folder(config: RunConfig, strategy: Strategy, run_dir: Path) -> None:
    """Delete what NVMe offload left on the disk, once no rank steps any more."""
    if strategy.offloads_to_nvme:
        shutil.rmtree(swap_folder(config, run_dir), ignore_errors=True)
