"""What does a checkpoint cost, beyond writing its bytes?

    zero-study benchmark checkpoints [--strategies ddp,zero2,zero3,fsdp2] [--size mini] [--rounds 3] [--output FILE]

Each round one run that writes two checkpoints, 50 steps apart. The bytes alone: its last checkpoint's files copied to a
folder beside it and put on the disk, by one process. The share is of the seconds between two checkpoints: 50 times the
run's median step.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from study import files
from study.benchmarks import pairs
from study.records import schema
from study.records.results import header
from study.run import Run

EVERY = 50  # steps
FLAGS: dict[str, Any] = {
    "max_steps": 2 * EVERY,
    "checkpoint_every": EVERY,
    "num_train_examples": 256,
    "num_eval_examples": 8,
    "learning_rate": 1e-3,
}


def measure(strategies: str, size: str, rounds: int, output: Path | None, command: str) -> None:
    """Run every strategy in turn, as many rounds, print what checkpoints cost, and write it."""
    pairs.share_cores(num_processes=2)
    works = [pairs.plan(name, {**FLAGS, "size": size}) for name in strategies.split(",")]
    done: dict[str, list[dict[str, Any]]] = {work.strategy.name: [] for work in works}
    for number in range(1, rounds + 1):
        for work in works:
            facts = run(work)
            done[work.strategy.name].append(facts)
            print(
                f"round {number}/{rounds} {work.strategy.name}: {facts['checkpoint_seconds']:.3f} s a checkpoint of "
                f"{facts['bytes'] / 1e6:.0f} MB, the bytes alone {facts['bytes_seconds']:.3f} s; beyond them "
                f"{100 * facts['share_beyond']:.1f} % of {EVERY} steps",
                flush=True,
            )
    result = {name: pairs.summarize([each["share_beyond"] for each in runs]) for name, runs in done.items()}
    for name, summary in result.items():
        print(f"{name}: beyond the bytes {pairs.show(summary)} of {EVERY} steps")
    if output:
        head = {**header("checkpoints", command), "config": pairs.shown_config(works[0].config)}
        files.write_json(output, {**head, "runs": done, "share_beyond": result})


def run(work: Run) -> dict[str, Any]:
    """Run once; return seconds and bytes of a checkpoint, and the seconds of its bytes alone. Raises RunFailed."""
    with pairs.finished(work) as done:
        record = schema.read(done.folder)
        last = max(done.checkpoints_folder.iterdir())
        began = time.perf_counter()
        _copy(last, done.folder.with_name("copy"))
        bytes_seconds = time.perf_counter() - began
    checkpointing, timing = record.checkpointing, record.timing
    assert checkpointing is not None
    assert timing is not None
    assert timing.median_seconds is not None
    seconds = checkpointing.seconds / checkpointing.count
    return {
        "checkpoint_seconds": seconds,
        "bytes": checkpointing.last_bytes,
        "bytes_seconds": bytes_seconds,
        "median_step_seconds": timing.median_seconds,
        "share_beyond": (seconds - bytes_seconds) / (EVERY * timing.median_seconds),
    }


def _copy(folder: Path, target: Path) -> None:
    """Copy every file of a folder, each put on the disk."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            copy = target / path.relative_to(folder)
            copy.parent.mkdir(parents=True, exist_ok=True)
            with open(copy, "wb") as file:
                file.write(path.read_bytes())
                os.fsync(file.fileno())
