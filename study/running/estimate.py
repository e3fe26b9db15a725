"""Estimate, before a run starts, how long it takes (from earlier runs) and how much memory it needs."""

from __future__ import annotations

import statistics
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from study import run_in_theory
from study.config import RunConfig
from study.records.machine import FORKED
from study.records.schema import Outcome, Record
from study.run import Run
from zero_study import terminal
from zero_study.strategy import file
from zero_study.theory import hardware, model_states, peaks, prediction
from zero_study.theory.hardware import Gpu

# Guesses that are used if no similar earlier run exists: the time of a run besides its steps, and the speed of its
# steps. The output says that they are guesses.
LAUNCH_SECONDS = 20.0
GPU_LAUNCH_SECONDS = 12.0  # a box with a GPU has more cores to import with
FORK_SECONDS = 8.0  # of a run that is forked from a process that has imported everything
# Building the weights on the host takes 17 ns per parameter on a core of the development machine, and each of two
# checksums takes 11 ns.
SECONDS_PER_PARAMETER = 40e-9
COMPILE_SECONDS = 40.0
CPU_FLOPS_PER_SECOND = 5e10  # of the whole machine
GPU_FLOPS_PER_SECOND = 2e13  # of a GPU that the theory does not know
# Rate at which ranks that share a GPU communicate through the host; each sends three times its parameters.
HOST_BYTES_PER_SECOND = 3e9
# The memory of a rank besides its tensors at the peak: Python, the libraries and gloo's buffers. It was measured in
# `frontier-pilot`, before the first run of `frontier`: the median of its ten runs without offload in `steady_steps` is
# 622 MiB. From this, 150 MiB of the libraries' files are subtracted, because they are in memory once for all processes
# and count against no cap.
PROCESS_BYTES = 470 << 20
UNRECORDED_SECONDS = 8.0  # from the launch until the time that a record's wall_seconds counts from


# ---------------------------------------------------------------- memory


def model_state_bytes(run: Run) -> tuple[float, float]:
    """Return the predicted bytes of one rank's model states: on its device, and offloaded to the host.

    The prediction is the paper's formula (`theory/model_states.py`). It leaves out buffers and activations, so a run
    that does not fit by this prediction cannot fit.
    """
    shape, engine = run_in_theory.of_run(run.config, run.strategy, run.world_size)
    placed = model_states.paper_bytes_by_place(engine, shape.num_params)
    return placed.device, placed.host


def needed_bytes(config: RunConfig, strategy: str, world_size: int) -> float:
    """Return the predicted peak bytes of one rank on a CPU, including the Python process itself.

    Raises Refusal or ValueError if the configuration cannot be predicted.
    """
    chosen = file.read_by_name(strategy)
    shape, engine = run_in_theory.of_run(config, chosen, world_size)
    peak = peaks.peak(shape, engine, run_in_theory.job_of(config, world_size, "cpu"))
    return float(peak.total) + float(peak.host_bytes_then) + PROCESS_BYTES  # type: ignore[arg-type]


# ---------------------------------------------------------------- time


class Estimate(NamedTuple):
    seconds: float
    # The number of runs that the estimate is based on; 0: a guess, with the planner's step time if the GPU is known.
    num_earlier_runs: int

    def __str__(self) -> str:
        if not self.num_earlier_runs:
            return f"{duration(self.seconds)} (a guess)"
        return f"{duration(self.seconds)} ({terminal.count(self.num_earlier_runs, 'earlier run')})"


@dataclass(frozen=True)
class _Past:
    """The duration of an earlier run, and the properties by which similar runs are found."""

    workload: str
    size: str
    strategy: str
    world_size: int
    share_device: bool
    fixed_seconds: float  # launch, building, evaluation
    seconds_per_token: float
    timed: bool  # False: the run was too short to time its steps, so fixed_seconds is a guess


# The properties that an earlier run must share with a planned run. The strictest set is tried first.
_LIKENESS = (
    ("share_device", "workload", "size", "strategy", "world_size"),
    ("share_device", "workload", "size", "strategy"),
    ("share_device", "workload", "size"),
)


@dataclass
class History:
    """Earlier runs, from which the duration of planned runs is estimated.

    They are the runs in the folder of this study and the runs in `reports/`.
    """

    on_gpu: bool
    gpu: Gpu | None = None  # None: a CPU, or a GPU that the theory does not know
    forked: bool = False  # whether the planned runs are forked, so that they take less time to start
    _own: list[_Past] = field(default_factory=list)
    _of_reports: list[_Past] = field(default_factory=list)
    # Cache: the properties of a run -> its medians.
    _medians: dict[tuple[Any, ...], tuple[float, float, int]] = field(default_factory=dict)

    def add(self, record: Record, outcome: Outcome | None, of_report: bool = False) -> None:
        """Add an earlier run to the history.

        The run is ignored if its status is not ok, if it ran on the other kind of device (CPU or GPU), or if it was
        started in another way than the planned runs.
        """
        if record.status != "ok" or record.proof is None or (record.proof.device != "cpu") != self.on_gpu:
            return
        if (FORKED in record.machine.get("environment", {})) != self.forked:
            return
        whole = record.wall_seconds + UNRECORDED_SECONDS
        # After a resumption it would cover only the last process.
        if outcome and outcome.wall_seconds is not None and not record.resumed_at:
            whole = outcome.wall_seconds
        median = record.timing.median_seconds if record.timing else None
        step = max(0.0, whole - self._launch_seconds) / record.steps_done if median is None else median
        tokens_per_step = record.config["global_batch_size"] * record.config["sequence_length"]
        past = _Past(
            workload=record.workload,
            size=record.size,
            strategy=record.strategy,
            world_size=record.world_size,
            share_device=record.config.get("share_device", False),
            fixed_seconds=max(0.0, whole - step * record.steps_done),
            seconds_per_token=step / tokens_per_step,
            timed=median is not None,
        )
        (self._of_reports if of_report else self._own).append(past)
        self._medians.clear()

    def estimate(self, run: Run) -> Estimate:
        """Estimate how long a run takes, from the medians of the most similar earlier runs.

        The part of the time that depends on the number of tokens is scaled to the tokens of this run.
        """
        config = run.config
        wanted = {name: getattr(config, name) for name in ("workload", "size", "share_device")}
        wanted |= {"strategy": run.strategy.name, "world_size": run.world_size}
        tokens = config.num_steps * config.global_batch_size * config.sequence_length
        key = tuple(wanted.values())
        if key not in self._medians:  # cached, because a study may have hundreds of runs that differ only in the seed
            self._medians[key] = self._most_alike(wanted)
        fixed, each, number = self._medians[key]
        return Estimate(fixed + each * tokens, number) if number else Estimate(self._guess(run), 0)

    @property
    def _launch_seconds(self) -> float:
        return FORK_SECONDS if self.forked else GPU_LAUNCH_SECONDS if self.on_gpu else LAUNCH_SECONDS

    def _most_alike(self, knobs: dict[str, Any]) -> tuple[float, float, int]:
        """Return the median fixed seconds and seconds per token of the most similar earlier runs, and their number.

        All three are 0 if there is no similar run.
        """
        for keys in _LIKENESS:
            for past in (self._own, self._of_reports):
                alike = [earlier for earlier in past if all(getattr(earlier, key) == knobs[key] for key in keys)]
                alike = [earlier for earlier in alike if earlier.timed] or alike
                if alike:
                    fixed = statistics.median(earlier.fixed_seconds for earlier in alike)
                    return fixed, statistics.median(earlier.seconds_per_token for earlier in alike), len(alike)
        return 0.0, 0.0, 0

    def _guess(self, run: Run) -> float:
        """Guess the seconds that a run takes from its model and its tokens, because there is no similar earlier run."""
        config, size = run.config, run_in_theory.shape_of(run.config).num_params
        fixed = self._launch_seconds
        fixed += SECONDS_PER_PARAMETER * size + (COMPILE_SECONDS if config.compile else 0.0)
        if self.gpu and not config.share_device:
            with suppress(ValueError):  # the theory has no rate of this GPU for the precision, or of its host or disk
                return fixed + config.num_steps * _step_seconds(run, self.gpu)
        # 6 floating-point operations per parameter and token: 2 forward, 4 backward (arXiv:2001.08361, sec. 2.1).
        flops = 6 * size * config.num_steps * config.global_batch_size * config.sequence_length
        if not self.on_gpu:
            return fixed + flops / CPU_FLOPS_PER_SECOND
        if not config.share_device:
            return fixed + flops / (GPU_FLOPS_PER_SECOND * run.world_size)
        sent = config.num_steps * run.world_size * 3 * 4 * size
        return fixed + flops / GPU_FLOPS_PER_SECOND + sent / HOST_BYTES_PER_SECOND


def _step_seconds(run: Run, gpu: Gpu) -> float:
    """Return the predicted seconds per optimizer step on such GPUs.

    Raises ValueError if the theory cannot predict the step.
    """
    shape, engine = run_in_theory.of_run(run.config, run.strategy, run.world_size)
    job = run_in_theory.job_of(run.config, run.world_size, "gpu")
    return float(prediction.predict(shape, engine, job, hardware.rented_box(gpu, run.world_size)).step.total)


def duration(seconds: float) -> str:
    """Format a number of seconds for people: 35 s, 41 min, 3 h 20 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
