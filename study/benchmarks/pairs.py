"""How are two ways of doing the same work compared on a machine whose speed drifts? In pairs, in alternating order."""

from __future__ import annotations

import datetime
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from study.config import RunConfig, build_config
from study.errors import RunFailed
from study.preflight import checks
from study.records import schema
from study.records.schema import Record
from study.running import launch, studies
from study.strategy import file

TIMEOUT_SECONDS = 1800  # of one run


def run_pair(
    arms: dict[str, Callable[[], dict[str, Any]]], number: int, say: Callable[[str, int, dict[str, Any]], None]
) -> dict[str, Any]:
    """Run both arms as pair `number`, from 1; `say(arm, number, facts)` is called after each run.

    Their order is A B, B A, A B, ... from pair to pair: a drift of the machine favours neither.
    """
    order = list(arms) if number % 2 else list(arms)[::-1]
    pair: dict[str, Any] = {"order": order}
    for arm in order:
        pair[arm] = arms[arm]()
        say(arm, number, pair[arm])
    return pair


def summarize(values: Sequence[float]) -> dict[str, float]:
    """Median and range, with the number of values."""
    return {
        "count": len(values),
        "median": statistics.median(values),
        "minimum": min(values),
        "maximum": max(values),
    }


def show(summary: dict[str, float]) -> str:
    return f"{summary['median']:.3f} ({summary['minimum']:.3f} to {summary['maximum']:.3f}, n={summary['count']})"


@dataclass(frozen=True)
class Work:
    """What every run of one comparison does: the flags of `train.py`, checked, under one strategy."""

    strategy: file.Strategy
    flags: dict[str, Any]
    config: RunConfig
    world_size: int


def plan(strategy_name: str, flags: dict[str, Any], num_processes: int | None = None) -> Work:
    """Check the work before anything is started; on as many processes as the file says, or `num_processes`.

    Raises Refusal.
    """
    chosen = file.read_strategy(file.find_strategy(strategy_name))
    world_size = chosen.num_processes if chosen.name == "single" else num_processes or chosen.num_processes
    work = Work(chosen, flags, build_config(**flags), world_size)
    checks.check(work.config, chosen, work.world_size)
    return work


def train_arguments(flags: dict[str, Any]) -> list[str]:
    """Flags as train.py takes them."""
    return studies.Run("", "", 1, flags).arguments()


def run_ours(work: Work) -> tuple[Record, list[dict[str, Any]]]:
    """Run the work as `zero-study train` does; return its record and its steps. Raises RunFailed."""
    with tempfile.TemporaryDirectory(prefix="zero-study-benchmark-") as folder:
        run_dir = Path(folder) / "run"
        ended = launch.launch(
            work.strategy.path, work.world_size, train_arguments(work.flags), run_dir, TIMEOUT_SECONDS
        )
        if ended.status != "ok":
            raise RunFailed("\n".join([f"{work.strategy.name}: {ended.status}, {ended.message}", *ended.stderr_tail]))
        return schema.read(run_dir), schema.read_steps(run_dir)


def share_cores(num_processes: int) -> None:
    """Fix the threads of every process of this benchmark's runs, before torch is imported here."""
    cores = psutil.cpu_count(logical=False) or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // num_processes)))


def text_flags(data_dir: Path | None) -> dict[str, Any]:
    return {} if data_dir is None else {"data": "files", "data_dir": data_dir}


def report(name: str, command: str, work: dict[str, Any]) -> dict[str, Any]:
    """What a benchmark's JSON begins with: what was run, when, where; no path of the machine."""
    from study.records import machine

    return {
        "benchmark": name,
        "command": command,
        "finished_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine.describe(),
        **work,
    }


def shown_config(config: RunConfig) -> dict[str, Any]:
    return config.model_dump(mode="json", exclude={"data_dir", "output_dir", "swap_dir"})
