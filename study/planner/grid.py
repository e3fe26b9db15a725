"""What does the planner answer for common models and boxes? A grid of answers for a page that has no Python.

A file for each model, which the page loads when it is chosen: a script that calls `planned`, as a page that lies in a
folder may load scripts and nothing else. Every answer is that of `zero-study advise` with the same options.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from study import files
from study.errors import Refusal
from study.planner.asked import Asked
from study.planner.choose import Option, advise

PLACE = PurePosixPath("predicted/planned")  # of the answers, below the site of which the page is one
MODELS = ("bert-large", "gpt2", "gpt2-xl", "qwen2.5-1.5b", "gpt-j-6b", "llama-3-8b", "llama-2-13b", "llama-3-70b")
GPUS = ("t4", "v100-32gb", "l4", "a100-40gb", "a100-80gb", "h100-sxm", "h200", "b200")
COUNTS = (1, 2, 4, 8, 16, 64)
LENGTHS = (512, 2048)
PER_GPU = (8, 32)  # sequences of the global batch
NETWORKS = (None, 100)  # Gbit/s of a node: as one rents it, and a slow one
COLUMNS = (
    "strategy", "precision", "fits", "GiB a GPU", "free", "micro batch", "accumulation", "checkpointed", "s/step",
    "low", "high", "tokens/s a GPU", "MFU",
)  # fmt: skip


class Key(NamedTuple):
    """What is asked of one model."""

    gpu: str
    num_gpus: int
    sequence_length: int
    per_gpu: int
    network_gbps: int | None

    @property
    def text(self) -> str:
        return "|".join("" if value is None else str(value) for value in self)

    def asked(self) -> Asked:
        return Asked(
            gpu=self.gpu,
            num_gpus=self.num_gpus,
            sequence_length=self.sequence_length,
            global_batch_size=self.per_gpu * self.num_gpus,
            network_gbps=self.network_gbps,
        )


def asked_for() -> Iterator[Key]:
    """List what is asked; networks differ only where there are several nodes."""
    for gpu, count, length, each, network in itertools.product(GPUS, COUNTS, LENGTHS, PER_GPU, NETWORKS):
        if network is None or count > 8:
            yield Key(gpu, count, length, each, network)


def answer(model: str, key: Key) -> dict[str, Any]:
    """One answer: rows as COLUMNS have them, and the sentence of the recommendation; or why there is none."""
    try:
        advice = advise(model, key.asked())
    except Refusal as why:
        return {"why": str(why)}
    return {"rows": [_row(option) for option in advice.options], "reason": advice.reason}


def _row(option: Option) -> list[Any]:
    found, job = option.prediction, option.prediction.job
    return [
        option.strategy.name,
        found.engine.precision,
        int(found.fits),
        _short(found.needed_bytes / 2**30),
        _short(found.free_bytes / 2**30),
        int(job.micro_batch_size),
        int(job.gradient_accumulation_steps),
        int(job.recomputed),
        _short(found.step.total),
        _short(found.step.low),
        None if option.is_short else _short(found.step.high),
        round(float(found.tokens_per_second_per_gpu)),
        round(100 * float(found.mfu)),
    ]


def _short(value: Any) -> float:
    return float(f"{float(value):.3g}")


def write(folder: Path) -> list[Path]:
    """Write FOLDER/<model>.js for every model."""
    folder.mkdir(parents=True, exist_ok=True)  # before the minutes that the answers take
    paths = []
    for model in MODELS:
        answers = {key.text: answer(model, key) for key in asked_for()}
        content = json.dumps({"model": model, "answers": answers}, separators=(",", ":"), allow_nan=False)
        paths.append(folder / f"{model}.js")
        files.write_whole(paths[-1], f"planned({content});\n".encode())
    return paths
