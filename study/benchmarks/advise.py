"""How long do 10,000 predictions take, and one answer of `zero-study advise`?

    zero-study benchmark advise [--repeats 5] [--model gpt2-xl] [--output FILE]

The predictions are of the Python API: memory, communication, time and what is derived of them, over strategies, numbers
of GPUs, micro batches, sequence lengths, accumulation and checkpointing. The answers are whole processes, from start to
exit. Both are repeated; the first round of each pays for what is then kept in memory, and is in the numbers.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from study import files
from study.benchmarks import pairs
from study.errors import Refusal, RunFailed
from study.records.results import header
from study.strategy import engines, file
from study.theory import hardware, on_box, shapes
from study.theory.case import Job
from study.theory.on_box import Prediction
from study.theory.shapes import ModelShape

GPU = "a100-80gb"
GPU_COUNTS = (1, 2, 4, 8, 16, 32, 64)
MICRO_BATCHES = np.array([1, 2, 4, 8, 16]).reshape(-1, 1, 1)
SEQUENCE_LENGTHS = np.array([256, 512, 1024, 2048]).reshape(1, -1, 1)
ACCUMULATIONS = np.array([1, 4, 16]).reshape(1, 1, -1)
ADVICE = ("--gpu", GPU, "--gpus", "8", "--sequence-length", "1024", "--global-batch-size", "64")


def measure(repeats: int, model: str, output: Path | None, command: str) -> None:
    """Time the predictions and the answers, print the seconds, and write them with the command that asked."""
    try:
        shape = shapes.find(model)
    except ValueError as error:
        raise Refusal(f"--model {error}") from None
    rounds = [evaluate(shape) for _ in range(repeats)]
    answers = [answer(model) for _ in range(repeats)]
    result: dict[str, Any] = {
        "configurations": rounds[0][0],
        "grid_seconds": pairs.summarize([seconds for _, seconds in rounds]),
        "advise_seconds": pairs.summarize(answers),
    }
    print(f"{result['configurations']:,} configurations, seconds: {pairs.show(result['grid_seconds'])}")
    print(f"zero-study advise, seconds: {pairs.show(result['advise_seconds'])}")
    if output:
        files.write_json(output, {**header("advise", command), **result})


def grid(shape: ModelShape) -> Iterator[Prediction]:
    """Predict every strategy on every number of GPUs, each an array over batches, lengths and accumulation."""
    gpu = hardware.find_gpu(GPU)
    for name in file.names():
        chosen = file.read_by_name(name)
        for num_gpus in [count for count in GPU_COUNTS if chosen.could_run(count)]:
            engine = engines.advised_engine(chosen, shape.hidden, num_gpus, "bf16")
            box = hardware.typical_box(gpu, num_gpus)
            for checkpointed in (False, True):
                job = Job(MICRO_BATCHES, SEQUENCE_LENGTHS, ACCUMULATIONS, checkpointed, kernels="fused")
                yield on_box.predict(shape, engine, job, box)


def evaluate(shape: ModelShape) -> tuple[int, float]:
    """Evaluate the grid and all that follows from it; return how many configurations it has, and the seconds."""
    started = time.perf_counter()
    count = 0
    for made in grid(shape):
        derived = (
            made.fits,
            made.free_bytes,
            made.mfu,
            made.tokens_per_second_per_gpu,
            made.dollars_per_billion_tokens,
        )
        count += np.broadcast(*derived).size
    return count, time.perf_counter() - started


def answer(model: str) -> float:
    """Seconds of one `zero-study advise`, as a process; raises RunFailed where it fails."""
    command = [sys.executable, "-m", "study", "advise", "--model", model, *ADVICE]
    started = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    seconds = time.perf_counter() - started
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["nothing on stderr"])[-1]
        raise RunFailed(f"zero-study {' '.join(command[3:])}: status {done.returncode}: {last}")
    return seconds
