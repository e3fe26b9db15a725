"""What each process of a run is predicted to need under a cap: theory's peak of tensors, and the process itself."""

from __future__ import annotations

from study.config import RunConfig
from study.strategy import file, in_theory
from study.theory import peaks

GIB = 1 << 30
# What a rank holds beside its tensors at its highest: Python, the libraries, buffers of gloo. Measured before the first
# run of `frontier` by `frontier-pilot`: the median of its ten runs without offload in `steady_steps`, 622 MiB, less
# 150 MiB of the libraries' files, which are read into memory once for all processes and counted against no cap.
PROCESS_BYTES = 470 << 20


def needed_bytes(config: RunConfig, strategy: str, world_size: int) -> float:
    """What a rank on a CPU is predicted to hold at its highest, everything included. Raises Refusal and ValueError."""
    chosen = file.read_by_name(strategy)
    shape, engine = in_theory.of_run(config, chosen, world_size)
    found = peaks.peak(shape, engine, in_theory.job_of(config, world_size, "cpu"))
    return float(found.total) + float(found.host_bytes_then) + PROCESS_BYTES  # type: ignore[arg-type]
